"""The RAM tier: who stays, who goes, and that a failed read leaves no trace."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moet_desk.errors import MoetError
from moet_desk.store.arena import RECENT_READS, Arena
from moet_desk.store.pack_format import BASE_FILE, Plane
from moet_desk.store.pack_reader import PackReader


@pytest.fixture
def reader(demo_pack: Path):  # type: ignore[no-untyped-def]
    reader = PackReader.open(demo_pack)
    yield reader
    reader.close()


def wanted(pack: Path, row: int, stride: int) -> bytes:
    with (pack / BASE_FILE).open("rb") as file:
        file.seek(row * stride)
        return file.read(stride)


def test_row__from_file_then_ram__same_bytes(reader: PackReader, demo_pack: Path) -> None:
    arena = Arena(reader, base_rows=4, fine_rows=0)
    for row in (3, 77, 3, 200):
        got = bytes(arena.row(Plane.BASE, row).numpy())
        assert got == wanted(demo_pack, row, reader.meta.base_stride)
    assert (arena.counters.from_nvme, arena.counters.from_ram) == (3, 1)


def test_row__arena_full__least_recently_used_goes(reader: PackReader) -> None:
    arena = Arena(reader, base_rows=3, fine_rows=0)
    for row in (1, 2, 3, 1, 4):
        arena.row(Plane.BASE, row)
    assert [arena.holds(Plane.BASE, row) for row in (1, 2, 3, 4)] == [True, False, True, True]
    assert sorted(arena.present(Plane.BASE).nonzero()[0].tolist()) == [1, 3, 4]


def test_scan__fills_free_places_but_pushes_nothing_out(reader: PackReader) -> None:
    arena = Arena(reader, base_rows=3, fine_rows=0)
    arena.row(Plane.BASE, 1)
    for row in range(10, 20):
        arena.row(Plane.BASE, row, scan=True)
    assert arena.holds(Plane.BASE, 1)
    assert arena.n_used(Plane.BASE) == 3
    assert arena.holds(Plane.BASE, 10)
    assert not arena.holds(Plane.BASE, 19)


def test_no_places__every_row_from_the_file(reader: PackReader, demo_pack: Path) -> None:
    arena = Arena(reader, base_rows=0, fine_rows=0)
    for row in (5, 5, 6):
        got = bytes(arena.row(Plane.BASE, row).numpy())
        assert got == wanted(demo_pack, row, reader.meta.base_stride)
    assert arena.counters.from_nvme == 3
    assert arena.n_used(Plane.BASE) == 0


def test_failed_read__place_free_again_row_not_published(
    reader: PackReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(reader, base_rows=2, fine_rows=0)
    arena.row(Plane.BASE, 1)

    def failing(*_: object, **__: object) -> None:
        raise OSError("the drive is gone")

    with monkeypatch.context() as patch:
        patch.setattr(type(reader), "read_row", failing)
        with pytest.raises(OSError, match="gone"):
            arena.row(Plane.BASE, 2)
    assert not arena.holds(Plane.BASE, 2)
    assert arena.counters.read_errors == 1
    arena.row(Plane.BASE, 3)
    assert arena.holds(Plane.BASE, 1)
    assert arena.holds(Plane.BASE, 3)


def test_preload__stops_when_full_and_reports_bytes(reader: PackReader) -> None:
    arena = Arena(reader, base_rows=5, fine_rows=0)
    seen: list[int] = []
    arena.preload(Plane.BASE, range(40, 60), progress=seen.append)
    assert sum(seen) == 5 * reader.meta.base_stride
    assert arena.n_used(Plane.BASE) == 5


def test_damaged_row__error_names_it(reader: PackReader, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    real = os.preadv

    def flipped(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        count = real(fd, buffers, offset, *flags)
        buffers[0][10] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", flipped)
    with pytest.raises(MoetError) as caught:
        Arena(reader, base_rows=2, fine_rows=0).row(Plane.BASE, 33)
    assert caught.value.code == "MD-PACK-04"
    assert "layer 2" in caught.value.cause
    assert "expert 1" in caught.value.cause


class SlowDrive:
    """A clock that a read moves on: the first takes 1 ms, the second 2 ms, and so on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.n_reads = 0
        patch.setattr(
            "moet_desk.store.arena.time", SimpleNamespace(perf_counter=lambda: self.now_s)
        )
        patch.setattr(PackReader, "read_row", self.read_row)

    def read_row(self, plane: Plane, row: int, out: memoryview) -> None:
        self.n_reads += 1
        self.now_s += self.n_reads / 1000


def test_read_times__newest_reads_that_were_waited_for(
    reader: PackReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(reader, base_rows=4, fine_rows=0)
    with monkeypatch.context() as patch:
        drive = SlowDrive(patch)
        arena.preload(Plane.BASE, range(4), progress=lambda _: None)
        arena.row(Plane.BASE, 0)
        assert arena.read_times() is None
        drive.n_reads = 0
        for row in range(100, 200):
            arena.row(Plane.BASE, row)
        times = arena.read_times()
        assert times is not None
        assert (times.p50_ms, times.p95_ms, times.p99_ms) == pytest.approx((50.5, 95.05, 99.01))
        assert times.direct == reader.direct
        for _ in range(RECENT_READS):
            arena.row(Plane.FINE, 7)
        later = arena.read_times()
        assert later is not None
        assert later.p50_ms > 100


def test_read_times__side_by_side__every_row_counts(reader: PackReader) -> None:
    arena = Arena(reader, base_rows=8, fine_rows=0)
    aside = torch.empty((2, reader.meta.base_stride), dtype=torch.uint8)
    with ThreadPoolExecutor(4) as run:
        arena.bring(Plane.BASE, [1, 2, 3], keep=(), run=run)
        assert len(arena._read_s) == 3
        list(run.map(arena.read_into, [Plane.BASE] * 2, [4, 5], aside))
    assert len(arena._read_s) == 5


def test_read_times__reader_goes_direct__told(demo_pack: Path) -> None:
    with PackReader.open(demo_pack) as reader:
        arena = Arena(reader, base_rows=2, fine_rows=0)
        arena.row(Plane.BASE, 1)
        before = arena.read_times()
        assert before is not None
        assert not before.direct
        went = reader.go_direct()
        got = bytes(arena.row(Plane.BASE, 2).numpy())
        assert got == wanted(demo_pack, 2, reader.meta.base_stride)
        after = arena.read_times()
        assert after is not None
        assert after.direct == went
