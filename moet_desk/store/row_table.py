"""Single rows of a large matrix of a pack, read when they are needed.

Rows are read from the file, not from a mapping: a drive that fails gives an error then, and ends no
process. The page cache keeps rows that are asked for often. They have no checksums of their own;
`verify` checks the whole file. `read` may be called from several threads at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from moet_desk.errors import fail
from moet_desk.store.reads import fill, open_again
from moet_desk.store.stored_tensors import DTYPES, Format, TensorInfo

ROW_FORMATS = (Format.F32, Format.F16, Format.BF16)
"""Formats whose rows stand alone."""


class RowTable:
    """Rows of one matrix.

    Args:
        info: a matrix in one of `ROW_FORMATS`.
        fd: of the file that it lies in, which the caller closes.
    """

    def __init__(self, info: TensorInfo, fd: int) -> None:
        self._info, self._fd = info, fd
        self._dtype = DTYPES[info.weight.dtype]
        self._width = info.shape[1]
        self._row_bytes = self._width * self._dtype.itemsize

    def expect(self, rows: Sequence[int]) -> None:
        """Let the kernel begin to read these: a drive reads many at once faster than one after the
        other. A wish only; the read itself says what is wrong.
        """
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                for row in rows:
                    os.posix_fadvise(
                        self._fd, self._at(row), self._row_bytes, os.POSIX_FADV_WILLNEED
                    )

    def read(self, rows: Sequence[int]) -> Tensor:
        """Rows by number: [n, width] float32.

        Raises:
            MoetError: MD-NVME-05 one cannot be read.
        """
        size = self._row_bytes
        data = bytearray(len(rows) * size)
        view = memoryview(data)
        for i, row in enumerate(rows):
            self._fill(view[i * size : (i + 1) * size], row)
        found = torch.frombuffer(data, dtype=self._dtype).view(len(rows), self._width)
        return found.to(torch.float32)

    def _at(self, row: int) -> int:
        """Where a row begins in the file."""
        return self._info.weight.start + row * self._row_bytes

    def _fill(self, view: memoryview, row: int) -> None:
        path = self._info.weight.file
        try:
            try:
                fill(self._fd, view, self._at(row))
            except OSError:
                open_again(path, self._fd)
                fill(self._fd, view, self._at(row))
        except OSError as error:
            raise fail(
                "MD-NVME-05", row=row, tensor=self._info.name, path=str(path),
                reason=error.strerror or str(error), model=path.parent.name,
            ) from error  # fmt: skip
