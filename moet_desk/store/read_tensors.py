"""Tensors of a file that is read and not mapped: a drive that dies gives an error then, where a
mapping ends the process (SIGBUS).

For the dense weights of a pack, which are read once while a model is loaded. Not bound to a thread;
`close` must come after the last read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from moet_desk.store.headers import LENGTH_BYTES, header_length
from moet_desk.store.pack_meta import unreadable
from moet_desk.store.reads import fill, open_again
from moet_desk.store.sources import TensorIndex, raw_tensors
from moet_desk.store.stored_tensors import DTYPES, RawTensor, WeightFile

_PIECE_BYTES = 16 << 20
"""Read before they are converted, so that a large matrix needs little room beside its numbers.
Small pieces are slow: two threads wait for each other at every one of them.
"""


class ReadFile:
    """A file of a pack that stays open.

    Attributes:
        path: where it is.
        fd: its descriptor.
        size: bytes of it when it was opened.

    Raises:
        MoetError: MD-PACK-07 it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self.fd).st_size
        except OSError as error:
            raise unreadable(path, error.strerror or str(error)) from error

    def read(self, view: memoryview, at: int) -> None:
        """Fill a buffer from a place of the file on.

        Raises:
            MoetError: MD-PACK-07 the drive fails or the file ends before.
        """
        try:
            try:
                fill(self.fd, view, at)
            except OSError:
                open_again(self.path, self.fd)
                fill(self.fd, view, at)
        except OSError as error:
            raise unreadable(self.path, error.strerror or str(error)) from error

    def header(self) -> bytes:
        """The JSON header of a safetensors file.

        Raises:
            MoetError: MD-PACK-07 as `read`, MD-SRC-02 there is none.
        """
        start = bytearray(min(LENGTH_BYTES, self.size))
        self.read(memoryview(start), 0)
        header = bytearray(header_length(bytes(start), self.size, self.path.name))
        self.read(memoryview(header), LENGTH_BYTES)
        return bytes(header)

    def tensors(self) -> TensorIndex:
        """Its tensors, whose values are read each time they are asked for.

        Raises:
            MoetError: MD-PACK-07, MD-SRC-02, MD-SRC-05: it is no whole safetensors file.
        """
        raws = raw_tensors(WeightFile(self.path), self.header(), self.size)
        read = (
            ReadTensor(r.name, r.dtype, r.shape, r.file, r.start, r.n_bytes, r.home, self)
            for r in raws
        )
        return TensorIndex({raw.name: raw for raw in read}, [self.path])

    def close(self) -> None:
        """Nothing can be read from here on."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


@dataclass(frozen=True, slots=True)
class ReadTensor(RawTensor):
    """One tensor of such a file; `home` is not attached."""

    source: ReadFile = field(repr=False, compare=False)

    def bytes(self) -> Tensor:
        """A copy of the stored bytes, uint8 [n_bytes].

        Raises:
            MoetError: as `ReadFile.read`.
        """
        made = torch.empty(self.n_bytes, dtype=torch.uint8)
        self.source.read(memoryview(made.numpy()), self.start)  # type: ignore[arg-type]
        return made

    def tensor(self) -> Tensor:
        """The tensor in its own dtype and shape. Raises as `bytes`."""
        return self.bytes().view(DTYPES[self.dtype]).reshape(self.shape)

    def floats(self) -> Tensor:
        """Its numbers as float32. Raises as `bytes`."""
        made = torch.empty(self.shape)
        flat, at = made.view(-1), 0
        for piece in self._pieces():
            values = piece.view(DTYPES[self.dtype])
            flat[at : at + len(values)] = values
            at += len(values)
        return made

    def _pieces(self) -> Iterator[Tensor]:
        """Its bytes in order, each piece in the memory of the one before."""
        room = torch.empty(min(_PIECE_BYTES, self.n_bytes), dtype=torch.uint8)
        view = memoryview(room.numpy())  # type: ignore[arg-type]  # numpy's stubs know no Buffer
        for at in range(0, self.n_bytes, _PIECE_BYTES):
            n = min(_PIECE_BYTES, self.n_bytes - at)
            self.source.read(view[:n], self.start + at)
            yield room[:n]
