"""The header of a GGUF file: read, and not believed.

Owns the checks of what comes from elsewhere: lengths, counts, types, names, offsets, overlaps. Maps
and decodes nothing. Any thread.

The package gguf has a reader too; it is not used, because on a damaged file it ends in whatever
numpy or memory gives, and it makes several Python objects per string of a vocabulary.

A file is, little-endian: "GGUF", version u32, number of tensors u64, number of fields u64; the
fields (name, type u32, value); the tensors (name, dimensions with the innermost first, type u32,
offset u64); zeros up to the alignment; the data. A string is its length u64 and UTF-8.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moet_desk.errors import fail
from moet_desk.store.gguf.blocks import BLOCK_SIZES, type_name
from moet_desk.store.headers import damaged

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 1 << 28  # the largest vocabularies take some 20 MB
VERSIONS = (2, 3)

_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MAX_DEPTH = 4  # of arrays in arrays
_MAX_DIMS = 4
_MAX_SIZE = 1 << 63
_MAX_FIELDS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_ITEMS = 1 << 22  # of all arrays; a large vocabulary has some hundred thousand, three times
_DEFAULT_ALIGNMENT = 32
_MIN_FIELD_BYTES = 13  # empty name, type, one byte
_MIN_TENSOR_BYTES = 24  # empty name, no dimensions, type, offset


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """One checked tensor of a header.

    Attributes:
        dtype: a name of `blocks.BLOCK_SIZES`.
        shape: outermost dimension first, as everywhere else here.
        begin: first byte, counted from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Fields by name, and the tensors in data order."""

    fields: Mapping[str, Any]
    tensors: tuple[GgufEntry, ...]


def parse_gguf(data: memoryview, *, file: str) -> GgufHeader:
    """Check a whole file's header against the bytes of the file.

    Args:
        data: the file, uint8; only the header is touched.
        file: its name, for messages.

    Raises:
        MoetError: MD-SRC-02 with the reason, MD-SRC-05 a tensor type that nobody knows.
    """
    reader = _Reader(data, file)
    n_tensors, n_fields = reader.counts()
    fields: dict[str, Any] = {}
    for _ in range(n_fields):
        name = reader.text("a field's name")
        if name in fields:
            raise damaged(file, f"it has the field {name} twice")
        fields[name] = reader.value(reader.number("I"), 0)
    raws = [reader.tensor() for _ in range(n_tensors)]
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment % 8:
        raise damaged(file, f"general.alignment is {alignment!r}")
    start = -(-reader.at // alignment) * alignment
    return GgufHeader(fields, tuple(_placed(raws, start, alignment, len(data), file)))


class _Reader:
    """A cursor over the header that never leaves the file."""

    def __init__(self, data: memoryview, file: str) -> None:
        self.at = 0
        self._items_left = _MAX_ITEMS
        self._data = data
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._file = file

    def take(self, n_bytes: int, what: str) -> memoryview:
        if n_bytes > self._end - self.at:
            left = self._end - self.at
            raise damaged(self._file, f"{what} needs {n_bytes} bytes, {left} are left of it")
        self.at += n_bytes
        return self._data[self.at - n_bytes : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), "a number"))[0]

    def text(self, what: str) -> str:
        raw = self.take(self.number("Q"), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise damaged(self._file, f"{what} is not UTF-8") from error

    def counts(self) -> tuple[int, int]:
        """Check magic and version; return the numbers of tensors and fields."""
        if bytes(self._data[:4]) != MAGIC:
            raise damaged(self._file, "it does not begin as a GGUF file")
        self.at = 4
        version = self.number("I")
        if version and not version & 0xFFFF:
            raise damaged(self._file, "it is big-endian, only little-endian files are read")
        if version not in VERSIONS:
            raise damaged(self._file, f"it has GGUF version {version}, 2 and 3 are read")
        n_tensors, n_fields = self.number("Q"), self.number("Q")
        least = n_tensors * _MIN_TENSOR_BYTES + n_fields * _MIN_FIELD_BYTES
        too_many = n_tensors > _MAX_TENSORS or n_fields > _MAX_FIELDS
        if too_many or least > self._end - self.at:
            claim = f"{n_tensors} tensors and {n_fields} fields"
            raise damaged(self._file, f"its header claims {claim}, more than can be")
        return n_tensors, n_fields

    def value(self, kind: int, depth: int) -> Any:
        """A field's value; an array becomes a list."""
        if kind == _STRING:
            return self.text("a text")
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise damaged(self._file, f"a field has the unknown type {kind}")
            return self.number(_SCALARS[kind])
        if depth == _MAX_DEPTH:
            raise damaged(self._file, "a field has arrays in arrays, too many deep")
        inner, length = self.number("I"), self.number("Q")
        if length > self._items_left:
            raise damaged(self._file, f"an array claims {length} values, more than can be")
        self._items_left -= length
        if inner in _SCALARS:
            code = _SCALARS[inner]
            raw = self.take(length * struct.calcsize("<" + code), "an array")
            return list(struct.unpack(f"<{length}{code}", raw))
        return [self.value(inner, depth + 1) for _ in range(length)]

    def tensor(self) -> GgufEntry:
        """A tensor as it is written, its offset not placed yet."""
        name = self.text("a tensor's name")
        n_dims = self.number("I")
        if n_dims > _MAX_DIMS:
            raise damaged(self._file, f"tensor {name} has {n_dims} dimensions")
        shape = tuple(self.number("Q") for _ in range(n_dims))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        dtype = type_name(kind)
        if dtype not in BLOCK_SIZES:
            raise fail("MD-SRC-05", tensor=name, format=f"GGUF type {dtype}")
        n_weights = math.prod(shape)
        if not 0 < n_weights < _MAX_SIZE or offset >= _MAX_SIZE:
            raise damaged(self._file, f"tensor {name} has a size out of range")
        per_block, block_bytes = BLOCK_SIZES[dtype]
        width = shape[-1] if shape else 1
        if width % per_block:
            reason = f"tensor {name} has rows of {width}, not whole {dtype} blocks"
            raise damaged(self._file, reason)
        return GgufEntry(name, dtype, shape, offset, n_weights // per_block * block_bytes)


def _placed(
    raws: list[GgufEntry], start: int, alignment: int, size: int, file: str
) -> list[GgufEntry]:
    """The tensors at their places in the file, in data order."""
    names = set()
    end = start
    placed = []
    for raw in sorted(raws, key=lambda raw: (raw.begin, raw.n_bytes)):
        begin = start + raw.begin
        if raw.name in names:
            raise damaged(file, f"it has two tensors called {raw.name}")
        if raw.begin % alignment:
            raise damaged(file, f"tensor {raw.name} does not begin on a multiple of {alignment}")
        if begin < end:
            raise damaged(file, f"tensor {raw.name} begins at {begin} and overlaps another one")
        end = begin + raw.n_bytes
        if end > size:
            raise damaged(file, f"tensor {raw.name} ends at {end}, the file has {size} bytes")
        names.add(raw.name)
        placed.append(GgufEntry(raw.name, raw.dtype, raw.shape, begin, raw.n_bytes))
    return placed
