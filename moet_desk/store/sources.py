"""One index over the tensors of a safetensors folder, whatever quantisation they are stored in.

Owns the read-only mappings and the grouping of stored tensors into logical ones (a weight with its
scales is one tensor). Checks of headers are in `headers`; decodes nothing: that is `quant_formats`.
Not bound to a thread. What an index says never changes; the files behind one made from headers come
and go (`WeightFile`).
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch

from moet_desk.errors import fail
from moet_desk.store.headers import (
    INDEX_FILE,
    LENGTH_BYTES,
    SINGLE_FILE,
    damaged,
    header_length,
    missing_tensors,
    parse_header,
    read_shard_index,
)

MXFP4_BLOCK = 32
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

_SCALES = (".weight_scale_inv", ".weight_scale", ".scale")
# present only with layouts that are not read here; they make a tensor UNKNOWN instead of wrong
_EXTRAS = (
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_shape",
    ".input_scale",
    ".input_global_scale",
)
_BYTE_CODES = ("U8", "I8")
_SCALED = ("U8", "I8", "F8_E4M3")  # dtypes that mean nothing without a scale


class Format(Enum):
    """How a logical tensor is stored. The values are the words of messages and of pack.json."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    FP8 = "fp8"  # e4m3, one scale per 128 x 128 block
    MXFP4 = "mxfp4"  # e2m1, one E8M0 scale per 32 columns
    GGUF = "gguf"  # blocks of a GGUF type, which the stored tensor's dtype names
    INTEGER = "integer"  # tables of numbers; copied, never decoded
    UNKNOWN = "unknown"


_PLAIN = {"F64": Format.F64, "F32": Format.F32, "F16": Format.F16, "BF16": Format.BF16}
_INTEGERS = ("BOOL", "U16", "I16", "U32", "I32", "U64", "I64", "U8", "I8")


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
class TensorInfo:
    """A logical tensor: its shape after decoding, how it is stored and where."""

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
        return tuple(dict.fromkeys(raw.file for raw in self.raws))

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


class TensorIndex:
    """All tensors of a folder (or of one file) by logical name. Immutable.

    A logical name has no ".weight" and no quantisation suffix; a parameter with another suffix
    ("….bias") keeps its name.
    """

    def __init__(self, raws: Mapping[str, RawTensor], files: Sequence[Path]) -> None:
        self.files: tuple[Path, ...] = tuple(files)
        self._tensors = _group(raws)

    @classmethod
    def open(cls, folder: Path) -> TensorIndex:
        """Map the weights of a source folder and check every header.

        Raises:
            MoetError: MD-SRC-01 no weights, MD-SRC-02 a damaged file or index, MD-SRC-03 missing
                shards or tensors, MD-SRC-05 an unknown dtype.
        """
        if (folder / INDEX_FILE).is_file():
            return _open_shards(folder)
        if (folder / SINGLE_FILE).is_file():
            return cls.open_file(folder / SINGLE_FILE)
        found = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        if len(found) != 1:
            missing = INDEX_FILE if found else ".safetensors file"
            raise fail("MD-SRC-01", path=str(folder), missing=missing)
        return cls.open_file(found[0])

    @classmethod
    def of(cls, tensors: Mapping[str, TensorInfo], files: Sequence[Path]) -> TensorIndex:
        """An index over tensors that are known by their logical names already."""
        index = cls({}, files)
        index._tensors = dict(tensors)
        return index

    @classmethod
    def open_file(cls, path: Path) -> TensorIndex:
        """Map one safetensors file. Raises as `open`."""
        return cls({raw.name: raw for raw in _map_file(path)}, [path])

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def names(self) -> list[str]:
        """All logical names, sorted."""
        return sorted(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """The logical tensor called `name`.

        Raises:
            KeyError: there is none; the plan check makes that an error for people first.
        """
        return self._tensors[name]

    def raw(self, name: str) -> dict[str, RawTensor]:
        """The stored tensors behind a logical one, by their names in the file."""
        return {raw.name: raw for raw in self.info(name).raws}


# -- files -------------------------------------------------------------------------------------


def raw_tensors(home: WeightFile, header: bytes, size: int) -> Iterator[RawTensor]:
    """Check the JSON header of a file of `size` bytes and yield its tensors in data order.

    Raises:
        MoetError: MD-SRC-02 with the reason, MD-SRC-05 an unknown dtype.
    """
    path, start = home.path, LENGTH_BYTES + len(header)
    for entry in parse_header(header, data_bytes=size - start, file=path.name):
        begin, n_bytes = start + entry.begin, entry.end - entry.begin
        yield RawTensor(entry.name, entry.dtype, entry.shape, path, begin, n_bytes, home)


def _map_file(path: Path) -> Iterator[RawTensor]:
    home = WeightFile(path)
    header = home.attach()
    return raw_tensors(home, header, len(home.mapped))


def _view(pages: mmap.mmap) -> torch.Tensor:
    """A file as one uint8 tensor over its read-only mapping, which lives as long as any view."""
    with warnings.catch_warnings():
        # torch warns that such a tensor must not be written to; a writable private mapping would
        # be counted as used memory by the system, so a big file could not be opened at all
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(pages, dtype=torch.uint8)


def _open_shards(folder: Path) -> TensorIndex:
    shard_of = read_shard_index(folder / INDEX_FILE)
    absent = {shard for shard in set(shard_of.values()) if not (folder / shard).is_file()}
    if absent:
        names = [name for name, shard in shard_of.items() if shard in absent]
        raise missing_tensors(names, shard_of)
    return index_shards(folder, shard_of, lambda shard: _map_file(folder / shard))


def index_shards(
    folder: Path, shard_of: Mapping[str, str], tensors: Callable[[str], Iterable[RawTensor]]
) -> TensorIndex:
    """Join the tensors of shards, and compare them with the index that came with them.

    Raises:
        MoetError: MD-SRC-02 a shard holds something else, MD-SRC-03 tensors are missing.
    """
    shards = sorted(set(shard_of.values()))
    raws: dict[str, RawTensor] = {}
    for shard in shards:
        for raw in tensors(shard):
            if shard_of.get(raw.name) != shard:
                place = shard_of.get(raw.name, "no file")
                raise damaged(shard, f"it holds {raw.name}, {INDEX_FILE} says {place}")
            raws[raw.name] = raw
    if len(raws) < len(shard_of):
        raise missing_tensors([name for name in shard_of if name not in raws], shard_of)
    return TensorIndex(raws, [folder / shard for shard in shards])


# -- grouping ----------------------------------------------------------------------------------


def _group(raws: Mapping[str, RawTensor]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    claimed: set[str] = set()
    for raw in raws.values():
        parts = _parts(raw, raws)
        if parts is not None:
            claimed.update(part.name for part in parts.raws)
            if parts.name in tensors:
                other = tensors[parts.name].weight.name
                reason = f"{raw.name} and {other} would both be {parts.name}"
                raise damaged(raw.file.name, reason)
            tensors[parts.name] = parts
    for raw in raws.values():
        if raw.name not in claimed:
            if raw.name in tensors:
                raise damaged(raw.file.name, f"two tensors would both be {raw.name}")
            tensors[raw.name] = _classify(raw.name, raw, (), ())
    return tensors


def _parts(raw: RawTensor, raws: Mapping[str, RawTensor]) -> TensorInfo | None:
    """The logical tensor whose weight `raw` is, or None when it stands alone or is a companion."""
    if raw.name.endswith("_blocks"):
        base = raw.name.removesuffix("_blocks")
        scale = raws.get(base + "_scales")
        return None if scale is None else _classify(base, raw, (scale,), ())
    for suffix in (".weight_packed", ".weight"):
        if raw.name.endswith(suffix):
            base = raw.name.removesuffix(suffix)
            # ".scale" is a usual name for a parameter of its own; beside byte codes it is a scale
            usual = _SCALES if raw.dtype in _SCALED else _SCALES[:-1]
            scales = tuple(raws[base + end] for end in usual if base + end in raws)
            extras = tuple(raws[base + end] for end in _EXTRAS if base + end in raws)
            return _classify(base, raw, scales, extras)
    return None


def _classify(
    name: str,
    weight: RawTensor,
    scales: tuple[RawTensor, ...],
    extras: tuple[RawTensor, ...],
) -> TensorInfo:
    if len(scales) > 1 or extras:
        return TensorInfo(name, weight.shape, Format.UNKNOWN, weight, None, (*scales, *extras))
    if not scales:
        kind = Format.INTEGER if weight.dtype in _INTEGERS else Format.UNKNOWN
        return TensorInfo(name, weight.shape, _PLAIN.get(weight.dtype, kind), weight)
    scale = scales[0]
    if weight.dtype in _BYTE_CODES and scale.dtype in ("U8", "F8_E8M0"):
        shape = _mxfp4_shape(weight.shape, scale.shape)
        if shape is not None:
            return TensorInfo(name, shape, Format.MXFP4, weight, scale)
    blocks = tuple(-(-size // FP8_BLOCK) for size in weight.shape)
    is_fp8 = weight.dtype == "F8_E4M3" and scale.dtype in ("F32", "BF16", "F8_E8M0")
    if is_fp8 and len(blocks) == 2 and scale.shape == blocks:
        return TensorInfo(name, weight.shape, Format.FP8, weight, scale)
    return TensorInfo(name, weight.shape, Format.UNKNOWN, weight, scale)


def _mxfp4_shape(codes: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """Logical shape of MXFP4 codes, two per byte: [o, i/2], or gpt-oss [E, o, i/32, 16]."""
    half = MXFP4_BLOCK // 2
    if len(codes) == len(scales) + 1 and codes == (*scales, half):
        return (*scales[:-1], scales[-1] * MXFP4_BLOCK)
    if len(scales) >= 2 and codes == (*scales[:-1], scales[-1] * half):
        return (*scales[:-1], scales[-1] * MXFP4_BLOCK)
    return None
