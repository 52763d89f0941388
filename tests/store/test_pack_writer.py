"""Packing: the right rows, the plan check, a full disk, one packer at a time, stopping."""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moet_desk.errors import MoetError
from moet_desk.kernels.layouts import unpack_nibbles
from moet_desk.store.journal import read_journal
from moet_desk.store.model_source import ModelSource
from moet_desk.store.pack_folder import check_pack_space
from moet_desk.store.pack_format import PackProgress, Phase, Plane
from moet_desk.store.pack_reader import PackReader
from moet_desk.store.pack_rows import RowMaker
from moet_desk.store.pack_verify import verify_pack
from moet_desk.store.pack_writer import write_pack
from moet_desk.store.quant_formats import decode, fp4_of
from moet_desk.store.sources import TensorIndex
from tests.faults import (
    FOLDERS,
    MAPS,
    RENAMES,
    Refusal,
    n_open_files,
    opens,
    opens_to_write,
    refused,
)
from tests.store.conftest import TINY
from tests.store.tiny import PARTS, Tiny, flip_bit, plan_of, snapshot, write_source, write_weights

SMALL_BATCH = 140_000  # bytes: three rows between two syncs


def row_of(reader: PackReader, plane: Plane, row: int) -> torch.Tensor:
    out = bytearray(reader.meta.stride(plane))
    reader.read_row(plane, row, out)
    return torch.frombuffer(out, dtype=torch.uint8)


def unpacked(reader: PackReader, row: int) -> tuple[torch.Tensor, ...]:
    """Nibbles and scales of [gate; up] and of down, from the two rows."""
    base, fine = row_of(reader, Plane.BASE, row), row_of(reader, Plane.FINE, row)
    layout = reader.layout
    first = unpack_nibbles(base, fine, layout.gate_up)
    at, fine_at = layout.gate_up.base_bytes, layout.gate_up.fine_bytes
    return (*first, *unpack_nibbles(base[at:], fine[fine_at:], layout.down))


@pytest.mark.parametrize(
    "kind",
    ["mxfp4", "mxfp4-v4", "bf16", "f16", "fp8", "fp8-e8m0", "fp8-rows", "nvfp4", "int4-32"],
)
def test_write_pack__each_source_format__rows_give_its_fp4_back(kind: str, tmp_path: Path) -> None:
    source, dest = tmp_path / "source", tmp_path / "pack"
    write_source(source, TINY, kind, shards=2)
    meta = write_pack(source, plan_of(TINY, source), dest)
    index = ModelSource.open(source).index
    assert meta.fine_is_lossless == kind.startswith("mxfp4")
    assert meta.source_format == (kind if kind == "fp8-rows" else kind.split("-", maxsplit=1)[0])
    with PackReader.open(dest) as reader:
        for row in range(meta.n_rows):
            layer, expert = meta.expert_of(row)
            gate, up, down = (fp4_of(index, TINY.expert(layer, expert, part)) for part in PARTS)
            got = unpacked(reader, row)
            want = (torch.cat([gate[0], up[0]]), torch.cat([gate[1], up[1]]), *down)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_write_pack__stacked_experts__are_packed_like_single_ones(tmp_path: Path) -> None:
    one, stacked = tmp_path / "one", tmp_path / "stacked"
    tensors = write_source(one, TINY, "bf16")
    write_source(stacked, TINY, "bf16")
    merged = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in TINY.layers:
        for part in PARTS:
            names = [f"{TINY.expert(layer, e, part)}.weight" for e in range(TINY.n_experts)]
            parts = torch.stack([tensors[name] for name in names])
            merged[f"model.layers.{layer}.mlp.experts.{part}"] = parts
    write_weights(stacked, merged)
    plan = plan_of(TINY, one)
    names = {
        part: f"model.layers.{{layer}}.mlp.experts.{part}_proj" for part in ("gate", "up", "down")
    }
    write_pack(one, plan, tmp_path / "a")
    write_pack(stacked, dataclasses.replace(plan, **names), tmp_path / "b")
    for name in ("experts.base", "experts.fine", "rows.b3", "dense.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_write_pack__dense_tensors__are_copied_as_shipped(
    tiny_source: Path, tiny_pack: Path
) -> None:
    got = load_file(tiny_pack / "dense.safetensors")
    shipped = load_file(tiny_source / "model.safetensors")
    want = {name: value for name, value in shipped.items() if ".experts." not in name}
    assert set(got) == set(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        assert torch.equal(got[name].view(torch.uint8), value.view(torch.uint8))
    with PackReader.open(tiny_pack) as reader:
        index = TensorIndex.open(tiny_source)
        for name in reader.dense.names():
            assert torch.equal(reader.dense_tensor(name), decode(index, name))
            raw = reader.dense.info(name).weight
            assert torch.equal(raw.tensor().view(torch.uint8), got[raw.name].view(torch.uint8))


def test_write_pack__small_files_and_layout__are_complete(
    tiny_source: Path, tiny_pack: Path
) -> None:
    assert sorted(path.name for path in tiny_pack.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "dense.safetensors",
        "experts.base",
        "experts.fine",
        "pack.json",
        "rows.b3",
        "tokenizer.json",
    ]
    for name in ("chat_template.jinja", "config.json", "tokenizer.json"):
        assert (tiny_pack / name).read_bytes() == (tiny_source / name).read_bytes()


@pytest.mark.parametrize(("budget", "threads"), [(SMALL_BATCH, 1), (SMALL_BATCH, 4), (1 << 30, 3)])
def test_write_pack__any_budget_and_threads__same_bytes(
    budget: int, threads: int, tiny_source: Path, tiny_pack: Path, tmp_path: Path
) -> None:
    plan = plan_of(TINY, tiny_source)
    write_pack(tiny_source, plan, tmp_path / "b", memory_budget=budget, threads=threads)
    assert snapshot(tmp_path / "b") == snapshot(tiny_pack)


def test_write_pack__budget_below_one_row__says_how_much_it_takes(
    tiny_source: Path, tmp_path: Path
) -> None:
    with pytest.raises(MoetError) as caught:
        write_pack(tiny_source, plan_of(TINY, tiny_source), tmp_path / "p", memory_budget=1000)
    assert caught.value.code == "MD-RAM-01"
    assert not (tmp_path / "p").exists()


def test_write_pack__complete_already__changes_nothing(tiny_source: Path, tiny_pack: Path) -> None:
    before = snapshot(tiny_pack)
    (tiny_pack / "journal").write_bytes(b"left behind by a crash just before the end")
    (tiny_pack / "pack.json.partial").write_bytes(b"{")
    meta = write_pack(tiny_source, plan_of(TINY, tiny_source), tiny_pack)
    assert meta.n_rows == 8
    assert snapshot(tiny_pack) == before


# -- the plan against the source ---------------------------------------------------------------


def without_files(folder: Path) -> bool:
    return not folder.exists() or not any(folder.iterdir())


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        (lambda t: t.pop("model.norm.weight"), "MD-SRC-03", "model.norm"),
        (
            lambda t: t.pop("model.layers.2.mlp.experts.3.up_proj.weight_packed"),
            "MD-SRC-0",
            "up_proj",
        ),
        (lambda t: t.update({"extra.weight": torch.zeros(2)}), "MD-SRC-08", "extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), "MD-SRC-04", "model.norm"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.float8_e5m2)}),
            "MD-SRC-05",
            "F8_E5M2",
        ),
        (
            lambda t: t.update(
                {
                    "model.layers.1.mlp.experts.0.gate_proj.weight_packed": torch.zeros(
                        32, 48, dtype=torch.uint8
                    ),
                    "model.layers.1.mlp.experts.0.gate_proj.weight_scale": torch.zeros(
                        32, 3, dtype=torch.uint8
                    ),
                }
            ),
            "MD-SRC-04",
            "experts.0.gate_proj is [32, 96], the config asks for [32, 64]",
        ),
    ],
)
def test_write_pack__source_does_not_fit_the_plan__refused_before_the_first_byte(
    change: Callable[[dict[str, Any]], Any],
    code: str,
    word: str,
    tiny_source: Path,
    tmp_path: Path,
) -> None:
    plan = plan_of(TINY, tiny_source)
    shutil.copytree(tiny_source, tmp_path / "source")
    tensors = load_file(tiny_source / "model.safetensors")
    change(tensors)
    write_weights(tmp_path / "source", tensors)
    with pytest.raises(MoetError) as caught:
        write_pack(tmp_path / "source", plan, tmp_path / "p")
    assert caught.value.code.startswith(code)
    assert word in caught.value.cause
    assert without_files(tmp_path / "p")


def test_write_pack__ignored_tensors__are_left_out(tiny_source: Path, tmp_path: Path) -> None:
    plan = plan_of(TINY, tiny_source)
    dense = {name: shape for name, shape in plan.dense.items() if name != "lm_head"}
    plan = dataclasses.replace(plan, dense=dense, ignored=("lm_head",))
    write_pack(tiny_source, plan, tmp_path / "p")
    assert "lm_head.weight" not in load_file(tmp_path / "p" / "dense.safetensors")


@pytest.mark.parametrize("part", ["gate_proj.weight_scale", "lm_head.weight"])
def test_write_pack__invalid_number__names_the_tensor_and_can_go_on(
    part: str, tiny_source: Path, tiny_pack: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_source, tmp_path / "source")
    tensors = load_file(tiny_source / "model.safetensors")
    name = part if part in tensors else f"model.layers.2.mlp.experts.1.{part}"
    tensors[name][0, 0] = 255 if tensors[name].dtype == torch.uint8 else float("nan")
    write_weights(tmp_path / "source", tensors)
    with pytest.raises(MoetError) as caught:
        write_pack(tmp_path / "source", plan_of(TINY, tiny_source), tmp_path / "p")
    assert caught.value.code == "MD-SRC-06"
    assert name.rpartition(".")[0] in caught.value.cause
    assert not (tmp_path / "p" / "pack.json").exists()


def test_write_pack__into_the_source_folder__is_refused(tiny_source: Path) -> None:
    before = snapshot(tiny_source)
    with pytest.raises(MoetError, match="MD-DISK-03"):
        write_pack(tiny_source, plan_of(TINY, tiny_source), tiny_source)
    assert snapshot(tiny_source) == before


def test_write_pack__no_config__says_what_is_missing(tiny_source: Path, tmp_path: Path) -> None:
    plan = plan_of(TINY, tiny_source)
    shutil.copytree(tiny_source, tmp_path / "source")
    (tmp_path / "source" / "config.json").unlink()
    with pytest.raises(MoetError, match=r"config\.json") as caught:
        write_pack(tmp_path / "source", plan, tmp_path / "p")
    assert caught.value.code == "MD-SRC-01"


# -- resuming ----------------------------------------------------------------------------------


class StopAfter:
    """Asks the packer to stop once some rows are durable."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self.done = 0

    def note(self, step: PackProgress) -> None:
        if step.phase is Phase.ROWS:
            self.done = step.done

    def __call__(self) -> bool:
        return self.done >= self.n_rows


def half_packed(source: Path, dest: Path, tiny: Tiny = TINY, n_rows: int = 3) -> int:
    stop = StopAfter(n_rows)
    with pytest.raises(MoetError) as caught:
        write_pack(
            source,
            plan_of(tiny, source),
            dest,
            memory_budget=SMALL_BATCH,
            progress=stop.note,
            stop=stop,
        )
    assert caught.value.code == "MD-PACK-06"
    return int(caught.value.facts["done"])


def resume(source: Path, dest: Path) -> list[PackProgress]:
    steps: list[PackProgress] = []
    write_pack(source, plan_of(TINY, source), dest, progress=steps.append)
    return steps


def kept_and_dropped(steps: list[PackProgress]) -> tuple[int, int]:
    rows = [step for step in steps if step.phase is Phase.ROWS]
    return rows[0].kept, rows[0].dropped


def test_write_pack__stopped__keeps_rows_and_resumes_to_the_same_bytes(
    tiny_source: Path, tiny_pack: Path, tmp_path: Path
) -> None:
    done = half_packed(tiny_source, tmp_path / "p")
    assert 3 <= done < 8
    with pytest.raises(MoetError, match=f"has {done} of 8 rows") as caught:
        PackReader.open(tmp_path / "p")
    assert caught.value.code == "MD-PACK-06"
    assert kept_and_dropped(resume(tiny_source, tmp_path / "p")) == (done, 0)
    assert snapshot(tmp_path / "p") == snapshot(tiny_pack)


def test_write_pack__every_bit_of_the_journal_damaged__same_bytes_and_said(
    tiny_source: Path, tiny_pack: Path, tmp_path: Path
) -> None:
    done = half_packed(tiny_source, tmp_path / "half")
    size = (tmp_path / "half" / "journal").stat().st_size
    assert size == 64 + 48 * (done + 1)
    want = snapshot(tiny_pack)
    for at in [*range(0, 64, 7), *range(64, size, 13)]:
        shutil.rmtree(tmp_path / "p", ignore_errors=True)
        shutil.copytree(tmp_path / "half", tmp_path / "p")
        flip_bit(tmp_path / "p" / "journal", at, at % 8)
        kept, dropped = kept_and_dropped(resume(tiny_source, tmp_path / "p"))
        assert (kept, dropped) in ((done, 0), (done, 1), (done - 1, 1)), at
        assert dropped == (at >= 64)
        assert snapshot(tmp_path / "p") == want


@pytest.mark.parametrize("cut", [1, 47, 48, 100, 1000])
def test_write_pack__journal_cut_short__loses_only_the_rows_cut_off(
    cut: int, tiny_source: Path, tiny_pack: Path, tmp_path: Path
) -> None:
    done = half_packed(tiny_source, tmp_path / "p")
    journal = tmp_path / "p" / "journal"
    data = journal.read_bytes()
    journal.write_bytes(data[: max(0, len(data) - cut)])
    kept, _ = kept_and_dropped(resume(tiny_source, tmp_path / "p"))
    assert kept == max(0, done - -(-cut // 48))
    assert snapshot(tmp_path / "p") == snapshot(tiny_pack)


@pytest.mark.parametrize("file", ["experts.base", "experts.fine"])
def test_write_pack__journalled_rows_not_on_disk__are_made_again(
    file: str, tiny_source: Path, tiny_pack: Path, tmp_path: Path
) -> None:
    done = half_packed(tiny_source, tmp_path / "p")
    (tmp_path / "p" / file).unlink()
    assert kept_and_dropped(resume(tiny_source, tmp_path / "p")) == (0, done)
    assert snapshot(tmp_path / "p") == snapshot(tiny_pack)


def test_write_pack__another_source__leaves_the_first_alone(
    tiny_source: Path, tiny_pack: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_source(other, TINY, seed=99)
    half_packed(tiny_source, tmp_path / "half")
    for dest in (tmp_path / "half", tiny_pack):
        before = snapshot(dest)
        with pytest.raises(MoetError) as caught:
            write_pack(other, plan_of(TINY, other), dest)
        assert caught.value.code == "MD-PACK-08"
        assert snapshot(dest) == before


def test_write_pack__another_plan_for_the_source__starts_anew(
    tiny_source: Path, tmp_path: Path
) -> None:
    half_packed(tiny_source, tmp_path / "p")
    plan = dataclasses.replace(plan_of(TINY, tiny_source), moe_layers=(2, 1))
    write_pack(tiny_source, plan, tmp_path / "p")
    write_pack(tiny_source, plan, tmp_path / "fresh")
    assert snapshot(tmp_path / "p") == snapshot(tmp_path / "fresh")


# -- the disk ----------------------------------------------------------------------------------


class Failing:
    """Replaces a call of `os`; the n-th one and all later ones fail."""

    def __init__(self, name: str, number: int, after: int) -> None:
        self.real = getattr(os, name)
        self.number, self.left = number, after

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))
        return self.real(*args)


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "fsync", "ftruncate"])
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "MD-DISK-02"),
        (errno.EDQUOT, "MD-DISK-02"),
        (errno.EROFS, "MD-DISK-03"),
        (errno.EIO, "MD-DISK-03"),
    ],
)
def test_write_pack__disk_refuses_at_any_call__resumes_to_the_same_bytes(
    call: str, number: int, code: str, tiny_source: Path, tiny_pack: Path, tmp_path: Path
) -> None:
    plan = plan_of(TINY, tiny_source)
    failures = 0
    for after in range(0, 200, 5):
        dest = tmp_path / f"p{after}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, call, Failing(call, number, after))
            try:
                write_pack(tiny_source, plan, dest, memory_budget=SMALL_BATCH)
                break
            except MoetError as error:
                assert error.code == code  # noqa: PT017
                failures += 1
        kept = len(read_journal(dest / "journal").rows)
        steps = resume(tiny_source, dest)
        assert kept_and_dropped(steps)[0] == kept
        assert snapshot(dest) == snapshot(tiny_pack)
    assert failures >= 1


@pytest.mark.parametrize(
    "refusal",
    [
        opens(errno.EMFILE),
        opens_to_write(errno.EROFS),
        Refusal(FOLDERS, errno.EACCES),
        Refusal(RENAMES, errno.EIO),
        Refusal(MAPS, errno.ENOMEM),
    ],
    ids=str,
)
def test_write_pack__the_kernel_refuses__catalogue_error_then_the_same_bytes(
    refusal: Refusal, tiny_source: Path, tiny_pack: Path, tmp_path: Path
) -> None:
    gc.collect()  # what earlier tests left open would be closed in between
    plan, dest, n_files = plan_of(TINY, tiny_source), tmp_path / "p", n_open_files()
    with pytest.raises(MoetError) as caught:
        refused(refusal, lambda: write_pack(tiny_source, plan, dest))
    assert caught.value.code in ("MD-DISK-03", "MD-SRC-02")
    del caught  # with the frames that hold the source's mapping
    gc.collect()
    assert n_open_files() == n_files
    resume(tiny_source, dest)
    assert snapshot(dest) == snapshot(tiny_pack)


def test_write_pack__disk_full__says_how_far_it_came(tiny_source: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", Failing("pwrite", errno.ENOSPC, 25))
        with pytest.raises(MoetError, match="of 8 rows") as caught:
            write_pack(
                tiny_source, plan_of(TINY, tiny_source), tmp_path / "p", memory_budget=SMALL_BATCH
            )
    assert caught.value.code == "MD-DISK-02"


def test_write_pack__too_little_space__refused_with_numbers_before_writing(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    fields = [*real[:4], 100, *real[5:]]  # 100 blocks available
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    with pytest.raises(MoetError) as caught:
        write_pack(tiny_source, plan_of(TINY, tiny_source), tmp_path / "deep" / "p")
    assert caught.value.code == "MD-DISK-01"
    assert caught.value.facts["have_bytes"] == 100 * real.f_frsize
    assert caught.value.facts["need_bytes"] > caught.value.facts["have_bytes"]
    assert not (tmp_path / "deep").exists()


def test_check_space__counts_what_is_already_written(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = half_packed(tiny_source, tmp_path / "p")
    maker = RowMaker(TensorIndex.open(tiny_source), plan_of(TINY, tiny_source))
    needs = []
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([*real[:4], 0, *real[5:]]))
    for dest in (tmp_path / "p", tmp_path / "none"):
        with pytest.raises(MoetError) as caught:
            check_pack_space(maker, {}, dest)
        needs.append(caught.value.facts["need_bytes"])
    assert needs[1] - needs[0] >= done * maker.row_bytes


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_write_pack__folder_not_writable__says_so(tiny_source: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(MoetError, match="MD-DISK-03"):
        write_pack(tiny_source, plan_of(TINY, tiny_source), tmp_path / "locked" / "p")


# -- one packer at a time ----------------------------------------------------------------------

HOLD = """
import pathlib, sys, time
from moet_desk.store.durable import pack_lock
with pack_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_write_pack__somebody_else_packs__names_its_process(
    tiny_source: Path, tiny_pack: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "p"
    dest.mkdir()
    command = [sys.executable, "-c", HOLD, str(dest)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(MoetError) as caught:
            write_pack(tiny_source, plan_of(TINY, tiny_source), dest)
        assert caught.value.code == "MD-PACK-09"
        assert caught.value.facts["pid"] == str(other.pid)
        other.kill()
    # a killed holder leaves its file, not its lock
    assert (dest / "lock").exists()
    write_pack(tiny_source, plan_of(TINY, tiny_source), dest)
    assert snapshot(dest) == snapshot(tiny_pack)


def test_write_pack__damaged_record__is_made_again_from_the_source(
    tiny_source: Path, tiny_pack: Path
) -> None:
    want = snapshot(tiny_pack)
    flip_bit(tiny_pack / "pack.json", 60)
    flip_bit(tiny_pack / "experts.base", 5)
    write_pack(tiny_source, plan_of(TINY, tiny_source), tiny_pack)
    assert snapshot(tiny_pack) == want
    assert verify_pack(tiny_pack).ok


def test_row_maker__source_that_was_read__leaves_this_process(tmp_path: Path) -> None:
    big = Tiny(hidden=512, inter=512, n_experts=4, layers=(1,))
    write_source(tmp_path / "big", big, "bf16")
    maker = RowMaker(TensorIndex.open(tmp_path / "big"), plan_of(big, tmp_path / "big"))

    def resident() -> int:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        total = 0
        for line in lines:
            if str(tmp_path) in line:
                next(lines), next(lines), next(lines)
                total += int(next(lines).split()[1]) * 1024
        return total

    first = maker.make(0)
    one_expert = 3 * 512 * 512 * 2
    again = [maker.make(row) for row in range(4)]
    assert bytes(again[0].fine) == bytes(first.fine)
    assert resident() < 2 * one_expert < (tmp_path / "big" / "model.safetensors").stat().st_size
