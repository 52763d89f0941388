"""How fast a synthetic checkpoint is packed, and what memory that takes.

    python bench/packing.py --kind mxfp4 --gigabytes 4 [--limit-s S] [--work DIR] [--threads N]
    python bench/packing.py --kind gguf-q4_k ...    one file, random blocks of that type

Makes a checkpoint of one dense tensor and experts of DeepSeek-V3's shape (7168 x 2048) with random
weights in a temporary folder, packs it with the product's own packer in a process of its own, and
prints one JSON object: bytes of expert source per second, and per second of one core's time (which
other programs on the machine do not change much); the highest resident set of anonymous memory
(what the packer itself holds; mapped files of the source are the page cache's) and the highest
resident set of all. The folder is deleted at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from moet_desk.errors import JobPaused
from moet_desk.store.pack_format import PackPlan, PackProgress, Phase
from moet_desk.store.pack_writer import write_pack
from moet_desk.units import GIB, parse_bytes

HIDDEN, INTER = 7168, 2048
N_EXPERTS = 8
DENSE = (4096, HIDDEN)
PARTS = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}


def expert_tensors(name: str, kind: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tensors = {}
    for part, (rows, columns) in PARTS.items():
        if kind == "bf16":
            values = torch.randn((rows, columns), generator=generator, dtype=torch.float32) * 0.02
            tensors[f"{name}.{part}.weight"] = values.bfloat16()
            continue
        codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(
            115, 125, (rows, columns // 32), generator=generator, dtype=torch.uint8
        )
        tensors[f"{name}.{part}.weight_packed"] = codes
        tensors[f"{name}.{part}.weight_scale"] = scales
    return tensors


def write_checkpoint(folder: Path, kind: str, n_bytes: int) -> PackPlan:
    """Files of one layer each, as released models are cut."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    weights = 3 * HIDDEN * INTER
    per_expert = weights * 2 if kind == "bf16" else weights // 2 + weights // 32
    n_layers = max(1, round(n_bytes / (per_expert * N_EXPERTS)))
    shard_of = {}
    for layer in range(1, n_layers + 1):
        tensors = {}
        if layer == 1:
            tensors["model.embed_tokens.weight"] = torch.randn(
                DENSE, generator=generator
            ).bfloat16()
        for expert in range(N_EXPERTS):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors |= expert_tensors(name, kind, generator)
        shard = f"model-{layer:05d}.safetensors"
        save_file(tensors, folder / shard)
        shard_of |= dict.fromkeys(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    (folder / "config.json").write_text('{"model_type": "synthetic"}')
    return synthetic_plan(n_layers)


def write_gguf(folder: Path, kind: str, n_bytes: int) -> PackPlan:
    """One file with merged experts, as converters write them."""
    import gguf
    import numpy as np

    from moet_desk.store.gguf.blocks import BLOCK_SIZES

    name = kind.removeprefix("gguf-").upper()
    per_block, block_bytes = BLOCK_SIZES[name]
    per_expert = 3 * HIDDEN * INTER // per_block * block_bytes
    n_layers = max(1, round(n_bytes / (per_expert * N_EXPERTS)))
    writer = gguf.GGUFWriter(folder / "model.gguf", "deepseek2", use_temp_file=True)
    counts = {
        "block_count": n_layers + 1, "context_length": 4096, "embedding_length": HIDDEN,
        "feed_forward_length": INTER, "attention.head_count": 8, "expert_used_count": 2,
        "expert_count": N_EXPERTS, "attention.kv_lora_rank": 512, "attention.key_length": 192,
        "attention.value_length": 128, "rope.dimension_count": 64, "expert_gating_func": 2,
        "expert_feed_forward_length": INTER,
    }  # fmt: skip
    for key, value in counts.items():
        writer.add_uint32(f"deepseek2.{key}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    rng = np.random.default_rng(1)
    dense = rng.normal(size=DENSE).astype(np.float32)
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(dense, gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    for layer in range(1, n_layers + 1):
        for part, (rows, columns) in PARTS.items():
            shape = (N_EXPERTS, rows, columns // per_block * block_bytes)
            blocks = rng.integers(0, 256, shape, dtype=np.uint8) & 0xBF  # no infinite scales
            stored = f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight"
            writer.add_tensor(stored, blocks, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "tokenizer.json").write_text("{}")
    return synthetic_plan(n_layers)


def synthetic_plan(n_layers: int) -> PackPlan:
    expert_name = "model.layers.{layer}.mlp.experts.{expert}."
    return PackPlan(
        model_type="synthetic",
        hidden=HIDDEN,
        inter=INTER,
        n_experts=N_EXPERTS,
        moe_layers=tuple(range(1, n_layers + 1)),
        gate=expert_name + "gate_proj",
        up=expert_name + "up_proj",
        down=expert_name + "down_proj",
        dense={"model.embed_tokens": DENSE},
    )


class Memory(threading.Thread):
    """The highest anonymous and whole resident set of this process, sampled."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.anonymous = self.resident = 0

    def run(self) -> None:
        while True:
            fields = dict(
                line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
            )
            self.anonymous = max(self.anonymous, int(fields["RssAnon"].split()[0]) * 1024)
            self.resident = max(self.resident, int(fields["VmRSS"].split()[0]) * 1024)
            time.sleep(0.05)


def pack(folder: Path, threads: int, budget: int, limit_s: float) -> dict[str, object]:
    """In the packing process: pack FOLDER/source, and say what it took.

    After `limit_s` of packing experts it stops; the rates are those of the rows done by then.
    """
    raw = json.loads((folder / "plan.json").read_text())
    raw |= {"moe_layers": tuple(raw["moe_layers"])}
    raw["dense"] = {name: tuple(shape) for name, shape in raw["dense"].items()}
    began: dict[Phase, float] = {}
    memory = Memory()
    memory.start()
    time.sleep(0.2)
    idle = memory.anonymous
    start = time.perf_counter()
    seen: list[tuple[float, float, int]] = []  # time, CPU time, durable rows

    def progress(step: PackProgress) -> None:
        now = time.perf_counter()
        began.setdefault(step.phase, now)
        if step.phase is Phase.ROWS:
            seen.append((now, time.process_time(), step.done))

    def stop() -> bool:
        return Phase.ROWS in began and time.perf_counter() - began[Phase.ROWS] > limit_s

    plan = PackPlan(**raw)
    try:
        write_pack(
            folder / "source",
            plan,
            folder / "pack",
            memory_budget=budget,
            threads=threads,
            progress=progress,
            stop=stop,
        )
        is_whole = True
    except JobPaused:
        is_whole = False
    all_s = time.perf_counter() - start
    shards = [*(folder / "source").glob("*.safetensors"), *(folder / "source").glob("*.gguf")]
    source_bytes = sum(path.stat().st_size for path in shards)
    dense_bytes = 2 * DENSE[0] * DENSE[1]  # about half of it in a GGUF file, of gigabytes
    (began_s, began_cpu_s, _), (end_s, end_cpu_s, n_done) = seen[0], seen[-1]
    rows_s, rows_cpu_s = end_s - began_s, end_cpu_s - began_cpu_s
    done_bytes = (source_bytes - dense_bytes) * n_done / plan.n_rows
    return {
        "rows": plan.n_rows,
        "rows_done": n_done,
        "is_whole": is_whole,
        "source_bytes": source_bytes,
        "all_s": round(all_s, 2),
        "hash_source_s": round(began[Phase.DENSE] - began[Phase.READ_SOURCE], 2),
        "rows_s": round(rows_s, 2),
        "rows_cpu_s": round(rows_cpu_s, 2),
        "cpu_share": round(rows_cpu_s / rows_s, 2),
        "rows_mb_per_s": round(done_bytes / rows_s / 1e6, 1),
        "rows_mb_per_s_per_core": round(done_bytes / rows_cpu_s / 1e6, 1),
        "peak_anonymous_bytes": memory.anonymous,
        "anonymous_before_bytes": idle,
        "peak_resident_bytes": memory.resident,
        "within_budget": memory.anonymous - idle <= budget,
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", default="mxfp4", help="mxfp4, bf16 or gguf-TYPE")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--budget", type=parse_bytes, default=2 * GIB)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="of packing experts")
    parser.add_argument("--work", type=Path, help="where the temporary folder is made")
    parser.add_argument("--pack", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.pack:
        print(json.dumps(pack(given.pack, given.threads, given.budget, given.limit_s)))
        return
    folder = Path(tempfile.mkdtemp(prefix="packing-", dir=given.work))
    try:
        (folder / "source").mkdir()
        write = write_gguf if given.kind.startswith("gguf-") else write_checkpoint
        plan = write(folder / "source", given.kind, int(given.gigabytes * 1e9))
        (folder / "plan.json").write_text(json.dumps(dataclasses.asdict(plan)))
        command = [sys.executable, __file__, "--pack", str(folder)]
        command += ["--threads", str(given.threads), "--budget", str(given.budget)]
        command += ["--limit-s", str(given.limit_s)]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True
        ).stdout.strip()
        record = {
            "bench": "packing",
            "kind": given.kind,
            "expert_shape": [HIDDEN, INTER],
            "threads": given.threads,
            "budget_bytes": given.budget,
            "commit": commit,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "load_before": round(os.getloadavg()[0], 1),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **json.loads(ran.stdout),
        }
        print(json.dumps(record, indent=1))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
