"""Headers of safetensors files and the index over shards: read, and not believed.

Owns the checks of what comes from elsewhere: sizes, overlaps, holes, types, file names. Maps and
decodes nothing, so a header that was fetched alone is checked by the same code. Any thread.

A file is: 8 bytes little-endian header length, the JSON header, then the data without holes. The
checks follow the format's description in the safetensors README and its Rust reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from moet_desk.errors import MoetError, fail

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library has the same limit
LENGTH_BYTES = 8

_MAX_DIMS = 8
_MAX_SIZE = 1 << 63

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Types that a file may hold, by their names there."""

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One checked line of a header; offsets count from the first data byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> list[HeaderEntry]:
    """The tensors of a file, without its data.

    Raises:
        MoetError: as `parse_header`.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        n_bytes = header_length(file.read(LENGTH_BYTES), size, path.name)
        header = file.read(n_bytes)
    return parse_header(header, data_bytes=size - LENGTH_BYTES - n_bytes, file=path.name)


def parse_header(header: bytes, *, data_bytes: int, file: str) -> list[HeaderEntry]:
    """Check a JSON header against the bytes behind it; return its tensors in data order.

    Raises:
        MoetError: MD-SRC-02 with the reason, MD-SRC-05 an unknown dtype.
    """
    try:
        table = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"its header is not valid JSON ({error})") from error
    metadata = table.pop("__metadata__", None)
    try:
        if metadata is not None:
            msgspec.json.decode(metadata, type=dict[str, str])
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"its __metadata__ is not a table of strings ({error})") from error
    entries = sorted(
        (_check_entry(name, raw, file) for name, raw in table.items()),
        key=lambda entry: (entry.begin, entry.end),
    )
    at = 0
    for entry in entries:
        if entry.begin != at:
            kind = "overlaps the one before" if entry.begin < at else "leaves a hole before it"
            raise damaged(file, f"tensor {entry.name} begins at {entry.begin} and {kind} ({at})")
        at = entry.end
    if at != data_bytes:
        raise damaged(file, f"its tensors need {at} bytes of data, it has {data_bytes}")
    return entries


def _check_entry(name: str, raw: msgspec.Raw, file: str) -> HeaderEntry:
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"the header of tensor {name} is wrong ({error})") from error
    if entry.dtype not in ITEM_BYTES:
        raise fail("MD-SRC-05", tensor=name, format=entry.dtype)
    begin, end = entry.data_offsets
    # msgspec's bounds do not see integers beyond 64 bits
    if any(not 0 <= size < _MAX_SIZE for size in (*entry.shape, begin, end)):
        raise damaged(file, f"the header of tensor {name} has a size out of range")
    want = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
    if end - begin != want:
        what = f"{entry.dtype} {entry.shape} needs {want} bytes"
        raise damaged(file, f"tensor {name}: {what}, its offsets give {end - begin}")
    return HeaderEntry(name, entry.dtype, tuple(entry.shape), begin, end)


def header_length(prefix: bytes, size: int, file: str) -> int:
    if len(prefix) < LENGTH_BYTES:
        raise damaged(file, f"it has only {size} bytes")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise damaged(file, f"its header claims {length} bytes, {MAX_HEADER_BYTES} are allowed")
    if length > size - LENGTH_BYTES:
        raise damaged(file, f"its header claims {length} bytes, the file has {size}")
    return length


def damaged(file: str, reason: str) -> MoetError:
    return fail("MD-SRC-02", file=file, reason=reason)


# -- shards ------------------------------------------------------------------------------------


class _ShardIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def read_shard_index(path: Path) -> dict[str, str]:
    try:
        shard_of = msgspec.json.decode(path.read_bytes(), type=_ShardIndex).weight_map
    except OSError as error:
        raise damaged(path.name, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise damaged(path.name, f"it is not a valid index ({error})") from error
    for shard in set(shard_of.values()):
        # an index comes from the network: it may only name files beside itself
        if Path(shard).name != shard or "\0" in shard or not shard.endswith(".safetensors"):
            raise damaged(path.name, f'"{shard}" is not the name of a file beside it')
    if not shard_of:
        raise damaged(path.name, "it names no tensors")
    return shard_of


def missing_tensors(names: Sequence[str], shard_of: Mapping[str, str]) -> MoetError:
    files = sorted({shard_of[name] for name in names})
    shown = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    return fail(
        "MD-SRC-03",
        n_missing=len(names),
        n_total=len(shard_of),
        index=INDEX_FILE,
        first=min(names),
        files=shown,
    )
