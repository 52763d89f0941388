"""Read a pack: single expert rows straight from the file, dense tensors by name.

Owns the open files. Every row is checked against its digest before anybody uses it, and a row that
cannot be read is an error, never zeros. `read_row` may be called from several threads at once, as
it has no file position; `close` must come after the last of them.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import blake3
import numpy as np
from torch import Tensor

from moet_desk.errors import MoetError, fail
from moet_desk.kernels.layouts import ROW_ALIGN_BYTES, ExpertLayout
from moet_desk.store.pack_format import DENSE_FILE, ROW_FILES, PackMeta, Plane
from moet_desk.store.pack_meta import (
    DigestTable,
    check_sizes,
    damaged_rows,
    read_digests,
    read_meta,
    unreadable,
)
from moet_desk.store.quant_formats import decode
from moet_desk.store.read_tensors import ReadFile
from moet_desk.store.reads import open_again
from moet_desk.store.row_parts import RowParts
from moet_desk.store.row_table import RowTable
from moet_desk.store.sources import TensorIndex
from moet_desk.store.stored_tensors import Format

RowBuffer = bytearray | memoryview | mmap.mmap


class PackReader:
    """An open pack. Made by `open`; usable as a context manager.

    Attributes:
        path: the pack's folder.
        meta: its record.
        layout: sizes of one expert.
        dense: the dense tensors, read when they are asked for.
        direct: whether aligned buffers are filled past the page cache.
    """

    def __init__(
        self,
        path: Path,
        meta: PackMeta,
        *,
        dense: TensorIndex,
        dense_file: ReadFile,
        digests: DigestTable,
        fds: Mapping[Plane, int],
        direct_fds: Mapping[Plane, int],
    ) -> None:
        self.path = path
        self.meta = meta
        self.layout = ExpertLayout(meta.hidden, meta.inter)
        self.dense = dense
        self._dense_file = dense_file
        self._digests = digests
        self._fds = dict(fds)
        self._direct_fds = dict(direct_fds)
        self._parts = RowParts()

    @classmethod
    def open(cls, path: Path, *, direct: bool = False) -> PackReader:
        """Open a complete pack after checking its record, sizes and digest table.

        Args:
            path: the pack's folder.
            direct: read past the page cache (O_DIRECT) where the file system allows it. Only
                buffers on a 4096-byte boundary gain by it; others are read as usual.

        Raises:
            MoetError: MD-PACK-03 another format version, MD-PACK-06 not complete, MD-PACK-07
                damaged or not a pack.
        """
        meta = read_meta(path)
        _check_layout(path, meta)
        check_sizes(path, meta)
        digests = read_digests(path, meta)
        if not digests.matches(meta):
            raise unreadable(path / "rows.b3", "it does not match its checksum")
        dense_file = ReadFile(path / DENSE_FILE)
        fds: dict[Plane, int] = {}
        try:
            dense = _tensors(dense_file)
            for plane in Plane:
                fds[plane] = os.open(path / ROW_FILES[plane], os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, MoetError) as error:
            dense_file.close()
            _close(fds)
            if isinstance(error, MoetError):
                raise
            raise unreadable(path, error.strerror or str(error)) from error
        direct_fds = _open_direct(path) if direct else {}
        return cls(
            path, meta, dense=dense, dense_file=dense_file, digests=digests, fds=fds,
            direct_fds=direct_fds,
        )  # fmt: skip

    @property
    def direct(self) -> bool:
        return bool(self._direct_fds)

    def go_direct(self) -> bool:
        """Read past the page cache from now on, as `open` with `direct`; before other threads read.

        Returns:
            False: the file system refuses, reads go on as before.
        """
        if not self._direct_fds:
            self._direct_fds = _open_direct(self.path)
        return self.direct

    def read_row(self, plane: Plane, row: int, out: RowBuffer) -> None:
        """Fill `out` with one padded row and check it.

        Args:
            plane: base or fine.
            row: layer * n_experts + expert, layers counted among MoE layers.
            out: writable, exactly one stride of this plane.

        Raises:
            MoetError: MD-NVME-04 the read failed, MD-PACK-04 the bytes are not those packed. `out`
                must not be used then.
            ValueError: `row` or the size of `out` is wrong.
        """
        view = memoryview(out).cast("B")
        stride = self.meta.stride(plane)
        if not 0 <= row < self.meta.n_rows or len(view) != stride:
            raise ValueError(f"row {row} into {len(view)} bytes, stride {stride}")

        def fill(part: memoryview, offset: int) -> None:
            self._fill(plane, part, row * stride + offset)

        try:
            digest = self._parts.read(fill, view)
        except OSError as error:
            raise self.unreadable_row(row, error.strerror or str(error)) from error
        if digest != self._digests.of(plane, row):
            raise damaged_rows(self.path, self.meta, [(plane, row)])

    def expect(self, plane: Plane, row: int) -> None:
        """Let the kernel begin to read a row that will be asked for soon, if reads go through its
        page cache. A wish only: nothing is said about whether it can be met.
        """
        stride = self.meta.stride(plane)
        if plane not in self._direct_fds and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fds[plane], row * stride, stride, os.POSIX_FADV_WILLNEED)

    def _fill(self, plane: Plane, view: memoryview, offset: int) -> None:
        try:
            self._read(plane, view, offset)
        except OSError:
            for fds, flags in ((self._fds, 0), (self._direct_fds, os.O_DIRECT)):
                if plane in fds:
                    open_again(self.path / ROW_FILES[plane], fds[plane], flags)
            self._read(plane, view, offset)

    def _read(self, plane: Plane, view: memoryview, offset: int) -> None:
        fd = self._fds[plane]
        if plane in self._direct_fds and _address(view) % ROW_ALIGN_BYTES == 0:
            fd = self._direct_fds[plane]
        done = 0
        while done < len(view):
            n_read = os.preadv(fd, [view[done:]], offset + done)
            if n_read == 0:
                raise OSError(errno.EIO, "the file ends before this row")
            done += n_read
            fd = self._fds[plane]  # the rest of a short direct read is no longer aligned

    def unreadable_row(self, row: int, reason: str) -> MoetError:
        """MD-NVME-04 for a row, with the expert's name."""
        layer, expert = self.meta.expert_of(row)
        names = {"path": str(self.path), "model": self.path.name}
        return fail("MD-NVME-04", layer=layer, expert=expert, reason=reason, **names)

    def dense_tensor(self, name: str) -> Tensor:
        """A dense tensor by logical name, decoded to a new float32 tensor; a table of whole numbers
        as they are.

        Raises:
            MoetError: MD-PACK-07 the pack has no such tensor, or it cannot be read; MD-SRC-05,
                MD-SRC-06 as `decode`.
        """
        if name not in self.dense:
            raise unreadable(self.path / DENSE_FILE, f"it has no tensor {name}")
        info = self.dense.info(name)
        if info.format is Format.INTEGER:
            return info.weight.tensor().clone()
        return decode(self.dense, name)

    def dense_rows(self, name: str) -> RowTable:
        """What reads single rows of a dense matrix; not from several threads.

        Raises:
            MoetError: MD-PACK-07 the pack has no such tensor.
        """
        if name not in self.dense:
            raise unreadable(self.path / DENSE_FILE, f"it has no tensor {name}")
        return RowTable(self.dense.info(name), self._dense_file.fd)

    def config(self) -> dict[str, Any]:
        """The model's config.json.

        Raises:
            MoetError: MD-PACK-07 it is missing or not as it was when packed.
        """
        path = self.path / "config.json"
        want = {file.name: file.blake3 for file in self.meta.copied}
        try:
            data = path.read_bytes()
            if blake3.blake3(data).hexdigest() != want.get("config.json"):
                raise unreadable(path, "it does not match its checksum")
            config: dict[str, Any] = json.loads(data)
        except OSError as error:
            raise unreadable(path, error.strerror or str(error)) from error
        except (ValueError, RecursionError) as error:
            raise unreadable(path, str(error)) from error
        return config

    def close(self) -> None:
        """Close the files; nothing can be read any more."""
        self._parts.close()
        _close(self._fds)
        _close(self._direct_fds)
        self._dense_file.close()

    def __enter__(self) -> PackReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_layout(path: Path, meta: PackMeta) -> None:
    try:
        layout = ExpertLayout(meta.hidden, meta.inter)
    except ValueError as error:
        raise unreadable(path / "pack.json", str(error)) from error
    sizes = (meta.base_row_bytes, meta.base_stride, meta.fine_row_bytes, meta.fine_stride)
    want = (layout.base_bytes, layout.base_stride, layout.fine_bytes, layout.fine_stride)
    if sizes != want:
        raise unreadable(path / "pack.json", f"rows of {sizes} bytes, {want} are expected")


def _tensors(file: ReadFile) -> TensorIndex:
    try:
        return file.tensors()
    except MoetError as error:
        if error.code == "MD-PACK-07":
            raise
        # the words of MD-SRC-02 would send people to download a file that we made
        raise unreadable(file.path, str(error.facts.get("reason", error))) from error


def _open_direct(path: Path) -> dict[Plane, int]:
    """Descriptors that read past the page cache; none when the file system refuses."""
    fds: dict[Plane, int] = {}
    probe = mmap.mmap(-1, ROW_ALIGN_BYTES)
    try:
        for plane in Plane:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
            fds[plane] = os.open(path / ROW_FILES[plane], flags)
            os.preadv(fds[plane], [probe], 0)  # some file systems take the flag and then refuse
    except OSError:
        _close(fds)
    return fds


def _close(fds: dict[Plane, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
