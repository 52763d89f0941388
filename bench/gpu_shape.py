"""Decode of a model of real shape on a GPU, with made-up weights; prints a record (design §13).

    python bench/gpu_shape.py deepseek-v4-flash --vram-gib 32 --hit-rate 0.96 --context 32768

The pool gets what the card's budget leaves. The router's bias is adjusted until the measured hit rate
is near the wanted one. Times are of whole steps as the engine runs them: host inputs, one graph, logits
back on the host. `--split` also times each kernel group by leaving the others out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import time
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

from moet_desk.engine.cuda.pinned import PinnedMemory
from moet_desk.engine.cuda.pools import DevicePool, PoolExperts
from moet_desk.engine.cuda.shapes import SyntheticLoader, shapes
from moet_desk.engine.cuda.step import StepModel, StepRow
from moet_desk.engine.kv_cache import KvCache
from moet_desk.kernels.kinds import Activations, KvFormat
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton import fetch
from moet_desk.store.pack_format import Plane
from moet_desk.units import GIB

DEVICE = torch.device("cuda")
WARM, STEPS = 200, 300


class NoHost:
    """Stands for the host's arena: every row is in it."""

    def table(self, plane: Plane) -> np.ndarray:
        raise RuntimeError("no row is ever late here")


def arena_of(layout: ExpertLayout, n_rows: int, places: int, pinned: PinnedMemory) -> fetch.Arena:
    """Pinned rows with sane scales; many rows share a place."""
    stride = layout.base_stride
    memory = torch.frombuffer(pinned.allocate(places * stride), dtype=torch.uint8)
    rows = memory.view(places, stride)
    row = torch.randint(0, 256, (stride,), dtype=torch.uint8)
    at = layout.gate_up.base_bytes
    # scales near 2**-7: products of unit activations stay near one
    row[8 * layout.gate_up.n * layout.gate_up.groups : at] = 120
    row[at + 8 * layout.down.n * layout.down.groups :] = 120
    rows[:] = row
    place_of = (torch.arange(n_rows) % places).int().to(DEVICE)
    return fetch.Arena(memory.data_ptr(), place_of, stride)


def measure(model: StepModel, kv: KvCache, tables: Any, *, context: int, rows: int) -> dict[str, Any]:
    sequence = kv.reserve(context)
    assert sequence is not None
    sequence.length = context - WARM - STEPS - 8
    token = 1
    times, before = [], None
    for i in range(WARM + STEPS):
        if i == WARM:
            before = tables.counters.cpu().numpy().astype(np.int64).sum(0)
        began = time.perf_counter()
        logits = model.run([StepRow(token + r, sequence, r) for r in range(rows)], Plane.BASE)
        token = int(logits[rows - 1].argmax()) % 100_000
        times.append(time.perf_counter() - began)
        sequence.length += 1
    after = tables.counters.cpu().numpy().astype(np.int64).sum(0)
    kv.release(sequence)
    asked, hits, misses, _ = (after - before).tolist()
    steps = sorted(1e3 * t for t in times[WARM:])
    marks = quantiles(steps, n=20)
    return {
        "hit_rate": round(hits / asked, 4), "misses_per_step": round(misses / STEPS, 2),
        "finite": bool(torch.isfinite(logits).all()),
        "step_ms": {"median": round(median(steps), 3), "p05": round(marks[0], 3), "p95": round(marks[-1], 3)},
        "decode_tok_per_s": round(1e3 / median(steps), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    parser.add_argument("--vram-gib", type=float, default=32)
    parser.add_argument("--hit-rate", type=float, default=0.96)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--places", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1)
    args = parser.parse_args()
    shape = shapes(args.context)[args.shape]
    spec = shape.spec
    torch.cuda.set_per_process_memory_fraction(args.vram_gib * GIB / torch.cuda.mem_get_info()[1])
    moe, n_layers = spec.moe_ffn, len(spec.main_moe_layers)
    layout = ExpertLayout(spec.hidden, moe.inter)
    n_rows = n_layers * moe.router.n_experts
    pinned = PinnedMemory()
    arena = arena_of(layout, n_rows, min(args.places, n_rows), pinned)
    kv = KvCache(spec.layers[0].mixer, n_layers=len(spec.layers), n_pages=args.context // 64 + 2,
                 page_tokens=64, form=KvFormat.NVFP4, device=DEVICE)
    popularity, found, model = 0.004, None, None
    pool: DevicePool | None = None
    for attempt in range(5):
        load = SyntheticLoader(spec, DEVICE, popularity=popularity)
        if model is None:
            held = PoolHolder()
            model = StepModel(spec, load, kv, {Plane.BASE: held}, context=args.context, device=DEVICE,
                              error=torch.zeros(1, dtype=torch.int32, device=DEVICE))
            free = args.vram_gib * GIB - torch.cuda.memory_allocated() - 1.5 * GIB
            slots = min(n_rows, int(free // layout.base_stride))
            pool = DevicePool.make(Plane.BASE, arena, n_layers=n_layers, n_experts=moe.router.n_experts,
                                   n_slots=slots, top_k=moe.router.top_k, device=DEVICE)
            held.experts = PoolExperts(pool, None, layout, n_layers=n_layers, mailbox=None, host=NoHost())
            sequence = kv.reserve(8)
            assert sequence is not None
            model.run([StepRow(0, sequence, r) for r in range(args.rows)], Plane.BASE)
            model.capture(args.rows, Plane.BASE)
            kv.release(sequence)
        set_popularity(model, popularity)
        found = measure(model, kv, pool.tables, context=args.context, rows=args.rows)
        print(json.dumps({"attempt": attempt, "popularity": round(popularity, 5), **found}), flush=True)
        error = args.hit_rate - found["hit_rate"]
        if abs(error) < 0.004 or slots == n_rows:
            break
        popularity = max(0.0, popularity * (1 + 8 * error) if popularity else 0.001)
    record = {
        "gpu": torch.cuda.get_device_name(), "driver": driver(), "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"bench/gpu_shape.py {args.shape} --vram-gib {args.vram_gib} --hit-rate {args.hit_rate}"
                   f" --context {args.context} --rows {args.rows}",
        "shape": args.shape, "note": shape.note, "weights": "synthetic", "vram_limit_gib": args.vram_gib,
        "base_slots": slots, "rows": n_rows, "tokens_per_step": args.rows, "acceptance": None,
        "context": args.context, "kv_format": "nvfp4", **(found or {}), "prefill_tok_per_s": None,
        "bytes_per_step": {
            "pcie": round((found or {})["misses_per_step"] * layout.base_stride),
            "vram": n_layers * moe.router.top_k * layout.base_bytes,
        },
        "peak_vram_gib": round(torch.cuda.max_memory_allocated() / GIB, 2), "repeats": STEPS,
    }
    print(json.dumps(record), flush=True)
    pinned.release()


class PoolHolder:
    """The experts of a model that is made before its pool, so that the pool can have what is left."""

    experts: PoolExperts

    @property
    def activations(self) -> Activations:
        return self.experts.activations

    def __call__(self, moe_layer: int, buffers: Any, rows: int) -> None:
        self.experts(moe_layer, buffers, rows)

    def recover(self) -> None:
        self.experts.recover()


def set_popularity(model: StepModel, popularity: float) -> None:
    """Scale the routers' biases in place: graphs keep their addresses."""
    for layer in model.layers:
        bias = getattr(layer.ffn, "bias", None)
        if bias is not None:
            order = torch.argsort(torch.argsort(-bias)).float() if bool((bias != 0).any()) else bias
            bias.copy_(order * -popularity)


def driver() -> str | None:
    found = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                           check=False, capture_output=True, text=True)
    return found.stdout.strip() or None


def commit() -> str | None:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], check=False, capture_output=True, text=True)
    return found.stdout.strip() or None


if __name__ == "__main__":
    main()
