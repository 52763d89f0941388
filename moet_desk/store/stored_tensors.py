"""Tensors as they lie in files: mappings, views of parts of them, and what several make together.

Owns the records that sources are described with. Groups nothing (`grouping`) and decodes nothing
(`quant_formats`). Not bound to a thread; records never change, the files behind them come and go
(`WeightFile`).
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from moet_desk.store.headers import LENGTH_BYTES, damaged, header_length

MXFP4_BLOCK = 32
NVFP4_BLOCK = 16
FP8_BLOCK = 128

# name in the file -> torch dtype of a view; E8M0 stays bytes because only its exponent is used
DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,
}


class Format(Enum):
    """How a logical tensor is stored. The values are the words of messages and of pack.json."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    FP8 = "fp8"  # e4m3, one scale per 128 x 128 block
    FP8_ROWS = "fp8-rows"  # e4m3, one scale per row or for all of it
    MXFP4 = "mxfp4"  # e2m1, one E8M0 scale per 32 columns
    NVFP4 = "nvfp4"  # e2m1, one e4m3 scale per 16 columns and one float32 for all
    INT8 = "int8"  # whole numbers, one scale per group of columns, per row, or for all of it
    INT4 = "int4"
    GGUF = "gguf"  # blocks of a GGUF type, which the stored tensor's dtype names
    INTEGER = "integer"  # tables of numbers; copied, never decoded
    UNKNOWN = "unknown"


class WeightFile:
    """The bytes of one weight file, mapped read only while the file is there.

    A streaming packer makes its index from headers, attaches each file when it has landed and
    detaches it before it is deleted: a mapping would keep its disk space.
    """

    __slots__ = ("_mapped", "_pages", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: torch.Tensor | None = None
        self._pages: mmap.mmap | None = None

    @property
    def mapped(self) -> torch.Tensor:
        """The whole file, uint8 [size]."""
        assert self._mapped is not None, f"{self.path} is not attached"  # noqa: S101
        return self._mapped

    def attach(self) -> bytes:
        """Map the file and return its JSON header.

        Raises:
            MoetError: MD-SRC-02 it cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                n_bytes = header_length(file.read(LENGTH_BYTES), size, self.path.name)
                header = file.read(n_bytes)
        except OSError as error:
            raise damaged(self.path.name, error.strerror or str(error)) from error
        self.map()
        return header

    def map(self) -> None:
        """Map the file, whatever is in it.

        Raises:
            MoetError: MD-SRC-02 it cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._mapped = _view(self._pages)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise damaged(self.path.name, getattr(error, "strerror", None) or str(error)) from error

    def detach(self) -> None:
        """Let the mapping go as soon as no view of it is left."""
        self._mapped = self._pages = None

    def forget(self, start: int, n_bytes: int) -> None:
        """Take pages out of this process; they come back from the page cache when they are read.

        A packer reads each byte once: without this, all of the source would count as its memory.
        """
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._pages is not None and last > first:
            self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor as it lies in a file: `n_bytes` bytes from `start`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    n_bytes: int
    home: WeightFile = field(repr=False, compare=False)

    @property
    def stored(self) -> tuple[RawTensor, ...]:
        """The tensors of files whose bytes it is made from."""
        return (self,)

    @property
    def mapped(self) -> torch.Tensor:
        """The whole file, uint8 [size]."""
        return self.home.mapped

    def data(self) -> memoryview:
        """The stored bytes, without a copy."""
        return memoryview(self.bytes().numpy())  # type: ignore[arg-type]  # numpy's stubs know no Buffer

    def bytes(self) -> torch.Tensor:
        """The stored bytes, uint8 [n_bytes], without a copy; writing to them ends the process."""
        return self.mapped[self.start : self.start + self.n_bytes]

    def forget(self) -> None:
        """Say that its bytes are not needed soon."""
        self.home.forget(self.start, self.n_bytes)

    def tensor(self) -> torch.Tensor:
        """The tensor in its own dtype and shape, a read-only view (F8_E8M0 as uint8).

        A tensor that does not begin on a multiple of its item size is copied: no view can be made.
        """
        dtype = DTYPES[self.dtype]
        data = self.bytes()
        if self.start % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).reshape(self.shape)

    def floats(self) -> torch.Tensor:
        """A copy of its numbers as float32."""
        form = torch.contiguous_format
        return self.tensor().to(torch.float32, copy=True, memory_format=form)

    def part(self, rows: slice | None, expert: int | None) -> torch.Tensor:
        """Some rows of `tensor`, or of one matrix of a stack of them; a view if it can be."""
        chosen = self.tensor() if expert is None else self.tensor()[expert]
        return chosen if rows is None else chosen[rows]

    def chunks(self, n_bytes: int) -> Iterator[memoryview]:
        """The stored bytes in pieces of at most `n_bytes`."""
        data = self.data()
        for at in range(0, self.n_bytes, n_bytes):
            yield data[at : at + n_bytes]


@dataclass(frozen=True, slots=True)
class PartTensor(RawTensor):
    """Some rows of a stored matrix, or of its transpose; they lie apart in the file.

    `start` and `n_bytes` are those of the whole stored matrix, `shape` is what is seen of it.

    Attributes:
        whole: shape of the stored matrix.
        rows: which of its rows, or of its columns if `turned`.
        turned: whether it is stored transposed.
    """

    whole: tuple[int, ...]
    rows: slice
    turned: bool

    def tensor(self) -> Tensor:
        dtype = DTYPES[self.dtype]
        data = self.bytes()
        if self.start % dtype.itemsize:
            data = data.clone()
        stored = data.view(dtype).view(self.whole)
        return (stored.T if self.turned else stored)[self.rows]


RowsOf = Callable[[range], Tensor]
"""Rows of a matrix (items of a vector), in order, to float32."""


@dataclass(frozen=True, slots=True)
class MadeTensor(RawTensor):
    """A tensor that its file holds in another form. `start` means nothing.

    Attributes:
        parents: what it is made from.
        rows_of: its values.
    """

    parents: tuple[RawTensor, ...]
    rows_of: RowsOf

    @property
    def stored(self) -> tuple[RawTensor, ...]:
        return self.parents

    def tensor(self) -> Tensor:
        return self.part(None, None)

    def part(self, rows: slice | None, expert: int | None) -> Tensor:
        assert expert is None, "experts are slices"  # noqa: S101
        chosen = range(self.shape[0])[rows or slice(None)]
        return self.rows_of(chosen).to(DTYPES[self.dtype])

    def bytes(self) -> Tensor:
        return self.tensor().contiguous().view(-1).view(torch.uint8)

    def chunks(self, n_bytes: int) -> Iterator[memoryview]:
        step = max(1, n_bytes * self.shape[0] // max(1, self.n_bytes))
        for first in range(0, self.shape[0], step):
            part = self.part(slice(first, first + step), None).contiguous()
            yield memoryview(part.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]

    def forget(self) -> None:
        for parent in self.parents:
            parent.forget()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A logical tensor: its shape after decoding, how it is stored and where.

    Attributes:
        extras: what decoding needs besides: NVFP4's scale for all, the shape of packed numbers.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    weight: RawTensor
    scale: RawTensor | None = None
    extras: tuple[RawTensor, ...] = ()

    @property
    def raws(self) -> tuple[RawTensor, ...]:
        scales = () if self.scale is None else (self.scale,)
        return (self.weight, *scales, *self.extras)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(part.file for raw in self.raws for part in raw.stored))

    @property
    def bytes(self) -> int:
        """Stored bytes, scales included."""
        return sum(raw.n_bytes for raw in self.raws)

    @property
    def kind(self) -> str:
        """How it is stored in a word: "bf16", "mxfp4", "q4_k"."""
        return self.weight.dtype.lower() if self.format is Format.GGUF else self.format.value

    @property
    def stored_as(self) -> str:
        """Words for an error: "F8_E4M3 [128, 512] with weight_scale F32 [128, 1]"."""
        first, *others = self.raws
        words = [f"{raw.name.rpartition('.')[2]} {raw.dtype} {list(raw.shape)}" for raw in others]
        own = f"{first.dtype} {list(first.shape)}"
        return f"{own} with {', '.join(words)}" if words else own


def _view(pages: mmap.mmap) -> torch.Tensor:
    """A file as one uint8 tensor over its read-only mapping, which lives as long as any view."""
    with warnings.catch_warnings():
        # torch warns that such a tensor must not be written to; a writable private mapping would
        # be counted as used memory by the system, so a big file could not be opened at all
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(pages, dtype=torch.uint8)
