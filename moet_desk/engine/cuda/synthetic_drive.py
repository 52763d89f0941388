"""Made-up rows on a drive, for measuring with less RAM than a model's rows take.

A file of random rows stands for the pack's row files. It is smaller than these, so several rows
share a place in it; it is read past the page cache and each row is checked, as the engine does it.
Owned by the thread that measures; `read_row` may be called by several at once.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moet_desk.engine.cuda.mailbox_server import READERS
from moet_desk.engine.cuda.synthetic import made_row
from moet_desk.errors import MoetError, fail
from moet_desk.kernels.layouts import ROW_ALIGN_BYTES, ExpertLayout
from moet_desk.store.arena import plain_memory
from moet_desk.store.durable import check_space
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_rows import row_digest
from moet_desk.store.row_parts import RowParts
from moet_desk.units import GIB

FILE_BYTES = 4 * GIB
"""Of each plane at most: more than a drive's own memory holds."""

_TIMED_ROWS = 128


@dataclass(frozen=True, slots=True)
class DriveRows:
    """What an arena has to know of rows: as much of a `PackMeta`."""

    n_rows: int
    base_stride: int
    fine_stride: int

    def stride(self, plane: Plane) -> int:
        """Bytes from one row of this plane to the next."""
        return self.base_stride if plane is Plane.BASE else self.fine_stride


class SyntheticDrive:
    """Files of rows in a folder of their own, gone after `close`. See `store.arena.RowSource`.

    Args:
        folder: where the models are, so that their drive is measured.
        layout: sizes of an expert.
        n_rows: rows of each plane.
        planes: whose rows are read.
        file_bytes: most bytes of each file.

    Raises:
        MoetError: MD-DISK-01 the files do not fit.
    """

    def __init__(
        self,
        folder: Path,
        layout: ExpertLayout,
        n_rows: int,
        planes: tuple[Plane, ...],
        *,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.meta = DriveRows(n_rows, layout.base_stride, layout.fine_stride)
        places = {
            plane: max(1, min(n_rows, file_bytes // self.meta.stride(plane))) for plane in planes
        }
        need = sum(count * self.meta.stride(plane) for plane, count in places.items())
        check_space(folder, need, what="a file of made-up rows")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(dir=folder, prefix="moet-desk-bench-")
        self._fds: dict[Plane, int] = {}
        self._cached: dict[Plane, int] = {}  # descriptors that read through the page cache
        self._reads_cached = False
        self._parts = RowParts()
        self._digests: dict[Plane, list[bytes]] = {}
        self.direct = True
        for plane, count in places.items():
            self._write(Path(self._folder.name) / plane.value, plane, layout, count)

    def _write(self, path: Path, plane: Plane, layout: ExpertLayout, count: int) -> None:
        digests, source = list[bytes](), np.random.default_rng(0)
        with path.open("wb") as file:
            for _ in range(count):
                row = made_row(layout, plane, source).tobytes()
                digests.append(row_digest(row))
                file.write(row)
            file.flush()
            os.fsync(file.fileno())
        self._digests[plane] = digests
        self._cached[plane] = os.open(path, os.O_RDONLY)
        try:
            self._fds[plane] = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # some file systems refuse
            self._fds[plane] = os.open(path, os.O_RDONLY)
            self.direct = False

    def expect(self, plane: Plane, row: int) -> None:
        """Nothing: made-up experts are known no sooner than they are asked for."""

    def read_row(self, plane: Plane, row: int, out: memoryview) -> None:
        """Fill `out` with a row and check it.

        Raises:
            MoetError: MD-NVME-04.
        """
        stride, place = self.meta.stride(plane), row % len(self._digests[plane])
        fd = (self._cached if self._reads_cached else self._fds)[plane]

        def fill(part: memoryview, offset: int) -> None:
            if os.preadv(fd, [part], place * stride + offset) != len(part):
                raise OSError(errno.EIO, "the file ends before this row")

        try:
            digest = self._parts.read(fill, out)
        except OSError as error:
            raise self.unreadable_row(row, error.strerror or str(error)) from error
        if digest != self._digests[plane][place]:
            raise self.unreadable_row(row, "the bytes are not those that were written")

    @contextmanager
    def from_cache(self) -> Iterator[None]:
        """Let reads take what the system kept of the files as they were written: to fill RAM with
        rows from the drive itself says nothing about it, and takes most of a minute.
        """
        self._reads_cached = True
        try:
            yield
        finally:
            self._reads_cached = False

    def unreadable_row(self, row: int, reason: str) -> MoetError:
        """MD-NVME-04 for a row."""
        path = self._folder.name
        return fail("MD-NVME-04", layer="?", expert=row, path=path, model="M", reason=reason)

    def bytes_per_s(self) -> float:
        """What reads of base rows reach, as many side by side as the engine does."""
        stride, count = self.meta.base_stride, len(self._digests[Plane.BASE])
        memory = memoryview(plain_memory(READERS * stride, ROW_ALIGN_BYTES))
        rows = np.random.default_rng(1).integers(count, size=(READERS, _TIMED_ROWS // READERS))

        def read(reader: int) -> None:
            place = memory[reader * stride : (reader + 1) * stride]
            for row in rows[reader].tolist():
                self.read_row(Plane.BASE, row, place)

        began = time.perf_counter()
        with ThreadPoolExecutor(READERS) as readers:
            list(readers.map(read, range(READERS)))
        return rows.size * stride / (time.perf_counter() - began)

    def close(self) -> None:
        """Remove the files."""
        self._parts.close()
        for fds in (self._fds, self._cached):
            for fd in fds.values():
                os.close(fd)
            fds.clear()
        self._folder.cleanup()
