"""The packer's journal: which rows are durably on disk, and their digests.

Owns the bytes of the `journal` file. A header names the source and the plan; then one record per
finished row, appended only after the row itself was synced. Every record carries its own checksum,
keyed with the header's content, so a torn or damaged record loses one row and nothing else. Used by
the packing thread, and read when an unfinished pack is opened.

    header 64 bytes: magic "MDJ1", n_rows u32, identity 32 bytes, plan digest 16, checksum 8
    record 48 bytes: row u32, zeros u32, base digest 16, fine digest 16, checksum 8
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import blake3
import msgspec

from moet_desk.store.durable import replace_file, write_at
from moet_desk.store.pack_format import PackPlan

_MAGIC = b"MDJ1"
_HEADER = struct.Struct("<4sI32s16s8s")
_RECORD = struct.Struct("<II16s16s8s")
_SEAL_BYTES = 8

DENSE_ROW = 0xFFFFFFFF
"""Row number of the record that says dense.safetensors is done; both digests are its blake3."""

_PART_ROW = 0x80000000
# Rows from here on are parts of dense.safetensors, by their order in it; both digests are its own.

Digests = tuple[bytes, bytes]
"""blake3-128 of a base row and of a fine row."""


@dataclass(frozen=True, slots=True)
class JournalKey:
    """What a journal belongs to: a source (blake3 in hex), and what is made of it."""

    identity: str
    n_rows: int
    plan: bytes  # blake3-128 of the plan: row numbers mean something under one plan only

    @classmethod
    def of(cls, identity: str, plan: PackPlan) -> JournalKey:
        digest = blake3.blake3(msgspec.json.encode(plan)).digest(length=16)
        return cls(identity, plan.n_rows, digest)

    def header(self) -> bytes:
        start = _HEADER.pack(_MAGIC, self.n_rows, bytes.fromhex(self.identity), self.plan, b"")
        return start[:-_SEAL_BYTES] + _seal(start[:-_SEAL_BYTES])


@dataclass(frozen=True, slots=True)
class JournalState:
    """What a journal file says."""

    key: JournalKey | None = None  # None: no journal, or its header is damaged
    rows: Mapping[int, Digests] = field(default_factory=dict)  # in the order they were finished
    dense: str = ""  # blake3 of dense.safetensors, when that is done
    parts: Mapping[int, bytes] = field(default_factory=dict)  # of dense.safetensors, while it grows
    dropped: int = 0  # records that do not match their checksum; a torn last one is not counted


def read_journal(path: Path, *, key: JournalKey | None = None) -> JournalState:
    """Read a journal; records that are damaged are left out.

    Args:
        path: the file; a missing one reads as empty.
        key: what is about to be packed. It lets records be used although the header is damaged;
            records of another source or plan never match it.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return JournalState()
    found = _parse_header(data[: _HEADER.size])
    known = found or key
    if known is None:
        return JournalState()
    header = known.header()
    rows: dict[int, Digests] = {}
    parts: dict[int, bytes] = {}
    dense, dropped = "", 0
    n_records = (len(data) - _HEADER.size) // _RECORD.size
    for i in range(n_records):
        at = _HEADER.size + i * _RECORD.size
        record = data[at : at + _RECORD.size]
        row, _, base, fine, seal = _RECORD.unpack(record)
        if seal != _seal(header + record[:-_SEAL_BYTES]):
            dropped += 1
        elif row == DENSE_ROW:
            dense = (base + fine).hex()
        elif row >= _PART_ROW:
            parts[row - _PART_ROW] = base
        elif row < known.n_rows:
            rows[row] = (base, fine)
    return JournalState(found, rows, dense, parts, dropped)


class Journal:
    """An open journal that records are appended to. One writer, under the folder's lock."""

    def __init__(self, path: Path, key: JournalKey) -> None:
        self._header = key.header()
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._end = os.fstat(self._fd).st_size

    @classmethod
    def create(
        cls,
        path: Path,
        key: JournalKey,
        *,
        rows: Mapping[int, Digests],
        dense: str,
        parts: Mapping[int, bytes],
    ) -> Journal:
        """Write a journal anew with the records that are trusted, and open it. Raises OSError."""
        records = [_record(key.header(), row, digests) for row, digests in rows.items()]
        records += _part_records(key.header(), parts)
        if dense:
            records.append(_dense_record(key.header(), dense))
        replace_file(path, [key.header(), b"".join(records)])
        return cls(path, key)

    def add_rows(self, rows: Iterable[tuple[int, Digests]]) -> None:
        """Append finished rows and make that durable. The rows must be synced already.

        Raises:
            OSError: the disk refused; records may be torn, which the next reader drops.
        """
        self._append(b"".join(_record(self._header, row, digests) for row, digests in rows))

    def add_dense(self, digest: str) -> None:
        """Append that dense.safetensors is in place. Raises OSError."""
        self._append(_dense_record(self._header, digest))

    def add_parts(self, parts: Mapping[int, bytes]) -> None:
        """Append parts of dense.safetensors that are synced in its partial file. Raises OSError."""
        self._append(b"".join(_part_records(self._header, parts)))

    def _append(self, data: bytes) -> None:
        write_at(self._fd, data, self._end)
        os.fdatasync(self._fd)
        self._end += len(data)

    def close(self) -> None:
        os.close(self._fd)


def _parse_header(data: bytes) -> JournalKey | None:
    if len(data) < _HEADER.size:
        return None
    magic, n_rows, identity, plan, _ = _HEADER.unpack(data)
    key = JournalKey(identity.hex(), n_rows, plan)
    return key if magic == _MAGIC and key.header() == data else None


def _record(header: bytes, row: int, digests: Digests) -> bytes:
    start = _RECORD.pack(row, 0, *digests, b"")[:-_SEAL_BYTES]
    return start + _seal(header + start)


def _dense_record(header: bytes, digest: str) -> bytes:
    whole = bytes.fromhex(digest)
    return _record(header, DENSE_ROW, (whole[:16], whole[16:]))


def _part_records(header: bytes, parts: Mapping[int, bytes]) -> list[bytes]:
    return [_record(header, _PART_ROW + part, (digest,) * 2) for part, digest in parts.items()]


def _seal(data: bytes) -> bytes:
    return blake3.blake3(data).digest(length=_SEAL_BYTES)
