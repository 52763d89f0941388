"""Rows that are read in parts side by side and hashed while they arrive.

A row of a large model has 7 to 11 MiB. If it is read as a whole and then hashed, the drive rests
while one core hashes, and a single request does not fill a fast drive. Where many rows are read at
once they do that for each other, and parts would only cost time. Owned by who reads rows; `read`
may be called by several threads at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import blake3

from moet_desk.kernels.row_sizes import ROW_ALIGN_BYTES
from moet_desk.store.pack_format import DIGEST_BYTES
from moet_desk.units import MIB

MOST_PARTS = 8
"""Read at the same time, of all rows together."""

LEAST_PART_BYTES = MIB
"""Long enough that handing a part to a thread (some 30 us) does not count."""

Fill = Callable[[memoryview, int], object]
"""Fills a view with a row's bytes from an offset on."""


def part_bytes(n_bytes: int, rows: int) -> int:
    """Size of the parts of a row, the last of which may be shorter, while so many rows are read.

    They begin where direct reads may.
    """
    parts = max(1, min(MOST_PARTS // rows, n_bytes // LEAST_PART_BYTES))
    return -(-n_bytes // (parts * ROW_ALIGN_BYTES)) * ROW_ALIGN_BYTES


class RowParts:
    """Threads for parts of rows; none is started before it is needed."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST_PARTS, thread_name_prefix="io-part")
        self._lock, self._rows = threading.Lock(), 0

    def read(self, fill: Fill, row: memoryview) -> bytes:
        """Fill `row` and give its digest.

        The threads' queue is bounded: each caller waits for its own row. When this ends, with an
        error too, nobody writes into `row` any more.

        Returns:
            What `pack_rows.row_digest` gives.

        Raises:
            OSError: what `fill` raised.
        """
        digest = blake3.blake3()
        with self._reading() as rows:
            size = part_bytes(len(row), rows)
            if size >= len(row):
                fill(row, 0)
                return digest.update(row).digest(length=DIGEST_BYTES)
            starts = range(0, len(row), size)
            reads: list[Future[object]] = [
                self._threads.submit(fill, row[at : at + size], at) for at in starts
            ]
            try:
                for at, read in zip(starts, reads, strict=True):
                    read.result()
                    digest.update(row[at : at + size])
            finally:
                for read in reads:
                    read.cancel()
                wait(reads)
        return digest.digest(length=DIGEST_BYTES)

    @contextmanager
    def _reading(self) -> Iterator[int]:
        """Count a row; gives how many are read now."""
        with self._lock:
            self._rows += 1
            rows = self._rows
        try:
            yield rows
        finally:
            with self._lock:
                self._rows -= 1

    def close(self) -> None:
        """Let the threads end; a read that does not end holds up nobody."""
        self._threads.shutdown(wait=False)
