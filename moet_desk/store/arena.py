"""The RAM tier: packed rows held in page-aligned memory of our own, filled from the pack file.

Owned by the engine thread. A row is published in the index only after its read succeeded and its
checksum matched, so a reader never sees a half-filled place. Prefill passes `scan=True`: it may
fill free places but never pushes out a row that decode uses (a flag, not a guess from the batch
size).
"""

from __future__ import annotations

import mmap
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.errors import MoetError
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import ReadTimes

RECENT_READS = 512
"""Reads whose times are kept."""

PRELOADING = 8
"""Rows that are read side by side while a model is loaded; one at a time leaves a drive idle."""

PRELOADED_ROWS = 2 * PRELOADING
"""Given to them together, between two reports of how far it is."""

ABSENT = -1
"""In a table: the row is not in RAM."""


@dataclass(slots=True)
class ArenaCounters:
    """Rows given out, and bytes read for them, since the start."""

    from_ram: int = 0
    from_nvme: int = 0
    bytes_read: int = 0
    read_errors: int = 0


Allocate = Callable[[int, int], mmap.mmap]
"""Makes page-aligned, zeroed memory of a number of bytes; a GPU's is registered with its driver, in
pieces that do not end within a unit of so many bytes."""


def plain_memory(n_bytes: int, unit: int) -> mmap.mmap:
    """Anonymous memory of the process."""
    return mmap.mmap(-1, n_bytes)


class RowSizes(Protocol):
    """Rows of a model at rest. `pack_format.PackMeta` is one."""

    @property
    def n_rows(self) -> int: ...

    @property
    def base_stride(self) -> int: ...

    @property
    def fine_stride(self) -> int: ...


class RowSource(Protocol):
    """Where rows are read from. `pack_reader.PackReader` is one; `read_row` runs in any thread."""

    @property
    def meta(self) -> RowSizes: ...

    @property
    def direct(self) -> bool: ...

    def read_row(self, plane: Plane, row: int, out: memoryview) -> None: ...

    def expect(self, plane: Plane, row: int) -> None: ...

    def unreadable_row(self, row: int, reason: str) -> MoetError: ...


class _Region:
    """Places for rows of one plane. `place_of_row` is ordered from the least recently used on."""

    def __init__(self, places: int, stride: int, n_rows: int, allocate: Allocate) -> None:
        # one place more than asked for: reads that must not displace anything land there
        self.memory = allocate((places + 1) * stride, stride)
        table = np.frombuffer(allocate(4 * n_rows, mmap.PAGESIZE), dtype=np.int32)
        table[:] = ABSENT
        self.table: NDArray[np.int32] = table
        self.rows = torch.frombuffer(self.memory, dtype=torch.uint8).view(places + 1, stride)
        self.view = memoryview(self.memory)
        self.stride = stride
        self.places = places
        self.place_of_row: OrderedDict[int, int] = OrderedDict()
        self.free = list(range(places - 1, -1, -1))

    def slice(self, place: int) -> memoryview:
        return self.view[place * self.stride : (place + 1) * self.stride]


class Arena:
    """Rows of a pack in RAM, least recently used out first.

    Args:
        reader: the open pack, or what stands for one.
        base_rows, fine_rows: how many rows of each plane to hold. 0 reads every row from the file.
        allocate: where the memory comes from.
    """

    def __init__(
        self,
        reader: RowSource,
        *,
        base_rows: int,
        fine_rows: int,
        allocate: Allocate = plain_memory,
    ) -> None:
        meta = reader.meta
        self._reader = reader
        self._regions = {
            Plane.BASE: _Region(base_rows, meta.base_stride, meta.n_rows, allocate),
            Plane.FINE: _Region(fine_rows, meta.fine_stride, meta.n_rows, allocate),
        }
        self.counters = ArenaCounters()
        # several threads append, the engine thread copies it; the interpreter makes both atomic
        self._read_s: deque[float] = deque(maxlen=RECENT_READS)

    def read_times(self) -> ReadTimes | None:
        """How long the newest reads took that somebody waited for; None before the first."""
        read_s = list(self._read_s)
        if not read_s:
            return None
        p50, p95, p99 = (round(1e3 * float(s), 3) for s in np.percentile(read_s, (50, 95, 99)))
        return ReadTimes(p50, p95, p99, direct=self._reader.direct)

    def row(self, plane: Plane, row: int, *, scan: bool = False) -> Tensor:
        """The packed bytes of a row, read from the file if need be.

        Returns:
            uint8 [stride]; valid until the next call for the same plane.

        Raises:
            MoetError: MD-NVME-04 the read failed, MD-PACK-04 the checksum does not match.
        """
        region = self._regions[plane]
        place = region.place_of_row.get(row)
        if place is not None:
            self.counters.from_ram += 1
            if not scan:
                region.place_of_row.move_to_end(row)
            return region.rows[place]
        place = self._read(region, plane, row, scan=scan)
        self.counters.from_nvme += 1
        self.counters.bytes_read += region.stride
        return region.rows[place]

    def holds(self, plane: Plane, row: int) -> bool:
        return row in self._regions[plane].place_of_row

    def expect(self, plane: Plane, row: int) -> None:
        """A row will be asked for soon: begin to read it from the file, unless it is here."""
        if not self.holds(plane, row):
            self._reader.expect(plane, row)

    def present(self, plane: Plane) -> NDArray[np.bool_]:
        """Which rows are in RAM now, bool [n_rows]."""
        in_ram: NDArray[np.bool_] = self._regions[plane].table != ABSENT
        return in_ram

    def memory(self, plane: Plane) -> Tensor:
        """All places, uint8 [places + 1, stride]; the last is for reads that displace nothing."""
        return self._regions[plane].rows

    def table(self, plane: Plane) -> NDArray[np.int32]:
        """The live table row -> place, int32 [n_rows], ABSENT where a row is not in RAM."""
        return self._regions[plane].table

    def preload(
        self, plane: Plane, rows: Iterable[int], *, progress: Callable[[int], None]
    ) -> None:
        """Fill free places with `rows` in order; stops when the arena is full. Nobody asked for
        them, so they do not count.

        Args:
            plane: whose rows.
            rows: the first ones matter most.
            progress: told the bytes of some rows that have come.

        Raises:
            MoetError: as `bring`.
        """
        region, counters = self._regions[plane], self.counters
        counted = counters.from_nvme, counters.bytes_read
        missing = [row for row in rows if row not in region.place_of_row][: len(region.free)]
        with ThreadPoolExecutor(PRELOADING, thread_name_prefix="io-load") as readers:
            for at in range(0, len(missing), PRELOADED_ROWS):
                some = missing[at : at + PRELOADED_ROWS]
                self.bring(plane, some, keep=(), run=readers)
                progress(len(some) * region.stride)
        counters.from_nvme, counters.bytes_read = counted
        self.forget_times()  # nobody waits for one of these; loading shows its own times

    def forget_times(self) -> None:
        """Let `read_times` begin anew."""
        self._read_s.clear()

    def bring(
        self, plane: Plane, rows: Sequence[int], *, keep: Collection[int], run: Executor
    ) -> list[tuple[int, int]]:
        """Read rows that are not in RAM into places of their own, side by side.

        The queue of `run` is bounded: `rows` are what one layer lacks, no more than there are
        places (and than a mailbox holds), and they have all ended when this returns.

        Args:
            plane: whose rows.
            rows: what to read; none of them may be in RAM.
            keep: rows whose places must not be taken for this.
            run: all reads but the first run here; that one runs on the calling thread, because to
                hand a single row over takes longer than to read it from a fast drive's cache.

        Returns:
            for each row its place, and the row that lost it or ABSENT.

        Raises:
            MoetError: a read failed (MD-NVME-04, MD-PACK-04); rows read meanwhile are kept.
            ValueError: the arena is too small for `rows` beside `keep`.
        """
        region = self._regions[plane]
        kept = sum(row in region.place_of_row for row in keep)
        if region.places - kept < len(rows):
            raise ValueError("the arena is too small for the rows of one layer")
        taken = [self._free_place(region, keep) for _ in rows]

        def attempt(row: int, place: int) -> Exception | None:
            try:
                self._read_row(plane, row, region.slice(place))
            except Exception as error:  # told after all reads have ended
                return error
            return None

        places = [place for place, _ in taken]
        others = [
            run.submit(attempt, row, place) for row, place in zip(rows[1:], places[1:], strict=True)
        ]
        ends = [attempt(row, place) for row, place in zip(rows[:1], places[:1], strict=True)]
        ends += [other.result() for other in others]
        problem: Exception | None = None
        for row, place, end in zip(rows, places, ends, strict=True):
            if end is None:
                region.place_of_row[row] = place
                region.table[row] = place
                self.counters.from_nvme += 1
                self.counters.bytes_read += region.stride
            else:
                self.counters.read_errors += 1
                region.free.append(place)
                problem = end
        if problem is not None:
            raise problem
        return taken

    def read_into(self, plane: Plane, row: int, place: Tensor) -> None:
        """Read a row into memory of the caller's, beside what is kept here.

        May be called from several threads at once.

        Shapes:
            place: uint8 [stride]

        Raises:
            MoetError: MD-NVME-04 the read failed, MD-PACK-04 the checksum does not match.
        """
        view = memoryview(place.numpy())  # type: ignore[arg-type]
        self._read_row(plane, row, view)

    def no_answer(self, row: int) -> MoetError:
        """The error of a row whose read does not end."""
        return self._reader.unreadable_row(row, "no answer in time")

    def _free_place(self, region: _Region, keep: Collection[int]) -> tuple[int, int]:
        """A place to read into and the row that lost it: the oldest that is not kept."""
        if region.free:
            return region.free.pop(), ABSENT
        for row in region.place_of_row:
            if row not in keep:
                place = region.place_of_row.pop(row)
                region.table[row] = ABSENT
                return place, row
        raise ValueError("every row is kept")

    def n_used(self, plane: Plane) -> int:
        return len(self._regions[plane].place_of_row)

    def n_places(self, plane: Plane) -> int:
        return self._regions[plane].places

    def close(self) -> None:
        """Forget all rows; the memory goes when the last view of it does."""
        self._regions.clear()

    def _read_row(self, plane: Plane, row: int, out: memoryview) -> None:
        began = time.perf_counter()
        self._reader.read_row(plane, row, out)
        self._read_s.append(time.perf_counter() - began)

    def _read(self, region: _Region, plane: Plane, row: int, *, scan: bool) -> int:
        place = self._place(region, scan=scan)
        try:
            self._read_row(plane, row, region.slice(place))
        except Exception:
            self.counters.read_errors += 1
            if place < region.places:
                region.free.append(place)
            raise
        if place < region.places:
            region.place_of_row[row] = place
            region.table[row] = place
        return place

    def _place(self, region: _Region, *, scan: bool) -> int:
        """A place that may be overwritten: a free one, the oldest, or the spare one behind them."""
        if region.free:
            return region.free.pop()
        if scan or not region.places:
            return region.places
        row, place = region.place_of_row.popitem(last=False)
        region.table[row] = ABSENT
        return place
