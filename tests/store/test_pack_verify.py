"""Verifying finds every kind of damage; repairing gives the old bytes back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from moet_desk.errors import MoetError
from moet_desk.store.durable import pack_lock
from moet_desk.store.pack_format import PackProgress, Plane
from moet_desk.store.pack_verify import repair_rows, verify_pack
from tests.store.conftest import TINY
from tests.store.tiny import flip_bit, plan_of, snapshot, write_source

STRIDE = 4096  # both rows of a tiny expert fit one page


def test_verify_pack__sound_pack__is_ok_and_counts_rows(tiny_pack: Path) -> None:
    steps: list[PackProgress] = []
    report = verify_pack(tiny_pack, progress=steps.append)
    assert report.ok
    assert report.error(tiny_pack) is None
    assert (steps[-1].done, steps[-1].total) == (16, 16)


@pytest.mark.parametrize("threads", [1, 2])
def test_verify_pack__flipped_bits__are_named(threads: int, tiny_pack: Path) -> None:
    flip_bit(tiny_pack / "experts.base", 0, 7)
    flip_bit(tiny_pack / "experts.base", 6 * STRIDE, 0)
    flip_bit(tiny_pack / "experts.fine", 3 * STRIDE + 4095, 1)
    report = verify_pack(tiny_pack, threads=threads)
    assert report.bad == ((Plane.BASE, 0), (Plane.BASE, 6), (Plane.FINE, 3))
    error = report.error(tiny_pack)
    assert error is not None
    assert error.code == "MD-PACK-04"
    assert "layer 2 expert 2 (base)" in error.cause
    assert "3 of 16 rows of tiny" in error.cause


@pytest.mark.parametrize(
    "name", ["dense.safetensors", "rows.b3", "config.json", "tokenizer.json", "chat_template.jinja"]
)
@pytest.mark.parametrize("gone", [False, True])
def test_verify_pack__damaged_file__is_named_and_rows_are_not_blamed(
    name: str, gone: bool, tiny_pack: Path
) -> None:
    if gone:
        (tiny_pack / name).unlink()
    else:
        flip_bit(tiny_pack / name, (tiny_pack / name).stat().st_size // 2)
    report = verify_pack(tiny_pack)
    assert report.damaged_files == (name,)
    assert report.bad == ()
    error = report.error(tiny_pack)
    assert error is not None
    assert error.code == "MD-PACK-07"
    assert name in error.cause


def test_verify_pack__damaged_record__is_an_error(tiny_pack: Path) -> None:
    flip_bit(tiny_pack / "pack.json", 100)
    with pytest.raises(MoetError, match=r"pack\.json") as caught:
        verify_pack(tiny_pack)
    assert caught.value.code == "MD-PACK-07"


def damage(pack: Path, what: str) -> None:
    if what == "rows":
        for at in (0, 5000, 20_000):
            flip_bit(pack / "experts.base", at)
        flip_bit(pack / "experts.fine", 30_000)
    elif what == "row file gone":
        (pack / "experts.fine").unlink()
    elif what == "row file cut":
        os.truncate(pack / "experts.base", 3 * STRIDE)
    elif what == "dense":
        flip_bit(pack / "dense.safetensors", 2000)
    elif what == "digests":
        flip_bit(pack / "rows.b3", 17)
    elif what == "digests and rows":
        flip_bit(pack / "rows.b3", 17)
        flip_bit(pack / "experts.fine", 30_000)
    elif what == "small files":
        (pack / "tokenizer.json").unlink()
        (pack / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("what", "written"),
    [
        ("nothing", 0),
        ("rows", 4),
        ("row file gone", 8),
        ("row file cut", 5),
        ("dense", 1),
        ("digests", 1),
        ("digests and rows", 2),
        ("small files", 2),
    ],
)
def test_repair_rows__each_damage__gives_the_old_bytes_back(
    what: str, written: int, tiny_source: Path, tiny_pack: Path
) -> None:
    want = snapshot(tiny_pack)
    damage(tiny_pack, what)
    report = verify_pack(tiny_pack)
    assert report.ok == (what == "nothing")
    plan = plan_of(TINY, tiny_source)
    assert repair_rows(tiny_pack, tiny_source, plan, report) == written
    assert snapshot(tiny_pack) == want
    assert verify_pack(tiny_pack).ok


def test_repair_rows__another_source__changes_nothing(tiny_pack: Path, tmp_path: Path) -> None:
    write_source(tmp_path / "other", TINY, seed=8)
    flip_bit(tiny_pack / "experts.base", 0)
    before = snapshot(tiny_pack)
    plan = plan_of(TINY, tmp_path / "other")
    with pytest.raises(MoetError) as caught:
        repair_rows(tiny_pack, tmp_path / "other", plan, verify_pack(tiny_pack))
    assert caught.value.code == "MD-PACK-10"
    assert snapshot(tiny_pack) == before


def test_repair_rows__while_somebody_packs__is_refused(tiny_source: Path, tiny_pack: Path) -> None:
    report = verify_pack(tiny_pack)
    with pack_lock(tiny_pack), pytest.raises(MoetError) as caught:
        repair_rows(tiny_pack, tiny_source, plan_of(TINY, tiny_source), report)
    assert caught.value.code == "MD-PACK-09"


def test_repair_rows__killed_half_way__can_be_run_again(
    tiny_source: Path, tiny_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = snapshot(tiny_pack)
    damage(tiny_pack, "rows")
    plan = plan_of(TINY, tiny_source)
    real, left = os.pwrite, [3]

    def stops(fd: int, data: bytes, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(fd, data, at)

    report = verify_pack(tiny_pack)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", stops)
        with pytest.raises(KeyboardInterrupt):
            repair_rows(tiny_pack, tiny_source, plan, report)
    repair_rows(tiny_pack, tiny_source, plan, verify_pack(tiny_pack))
    assert snapshot(tiny_pack) == want


def test_repair_rows__copied_file_differs_in_the_source__is_said(
    tiny_source: Path, tmp_path: Path
) -> None:
    from moet_desk.store.pack_writer import write_pack

    source = tmp_path / "source"
    shutil.copytree(tiny_source, source)
    (source / "NOTICE").write_text("one")
    write_pack(source, plan_of(TINY, source), tmp_path / "p")
    (source / "NOTICE").write_text("two")
    (tmp_path / "p" / "NOTICE").unlink()
    with pytest.raises(MoetError, match="NOTICE") as caught:
        repair_rows(tmp_path / "p", source, plan_of(TINY, source), verify_pack(tmp_path / "p"))
    assert caught.value.code == "MD-PACK-10"
