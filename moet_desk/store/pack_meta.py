"""Which state a pack folder is in: complete, being made, of another version, damaged.

Owns reading pack.json and the checks that need no data: sizes and the digest table. Imports no
torch, so the library and the command line can list packs quickly. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import blake3

from moet_desk.errors import MoetError, fail
from moet_desk.store.journal import read_journal
from moet_desk.store.pack_format import (
    DENSE_FILE,
    DIGEST_BYTES,
    DIGEST_FILE,
    JOURNAL_FILE,
    PACK_JSON,
    ROW_FILES,
    PackMeta,
    Plane,
    decode_meta,
)


def read_meta(folder: Path) -> PackMeta:
    """The record of a complete pack.

    Raises:
        MoetError: MD-PACK-06 it is not complete, MD-PACK-03 another format version, MD-PACK-07
            there is no pack or its record is damaged.
    """
    path = folder / PACK_JSON
    try:
        return decode_meta(path.read_bytes(), path=str(path))
    except FileNotFoundError as error:
        raise _without_record(folder) from error
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error


def _without_record(folder: Path) -> MoetError:
    journal = folder / JOURNAL_FILE
    try:
        if not journal.exists():
            return unreadable(folder, f"it has no {PACK_JSON}")
        state = read_journal(journal)
    except OSError as error:
        return unreadable(journal, error.strerror or str(error))
    total = "?" if state.key is None else state.key.n_rows
    names = {"path": str(folder), "model": folder.name}
    return fail("MD-PACK-06", done=len(state.rows), total=total, **names)


def unreadable(path: Path, reason: str) -> MoetError:
    """MD-PACK-07 for a file of a pack (or for its folder)."""
    model = path.name if path.is_dir() else path.parent.name
    return fail("MD-PACK-07", path=str(path), reason=reason, model=model)


def check_sizes(folder: Path, meta: PackMeta) -> None:
    """Compare the sizes of the big files with the record.

    Raises:
        MoetError: MD-PACK-07 a file is missing or has another size.
    """
    want = {ROW_FILES[plane]: meta.n_rows * meta.stride(plane) for plane in Plane}
    want[DENSE_FILE] = meta.dense_bytes
    want[DIGEST_FILE] = 2 * meta.n_rows * DIGEST_BYTES
    for name, n_bytes in want.items():
        path = folder / name
        try:
            got = path.stat().st_size
        except OSError as error:
            raise unreadable(path, error.strerror or str(error)) from error
        if got != n_bytes:
            raise unreadable(path, f"it has {got} bytes, {n_bytes} are expected")


@dataclass(frozen=True, slots=True)
class DigestTable:
    """rows.b3 in memory: the blake3-128 of every row, all base rows first, then all fine rows."""

    data: bytes
    n_rows: int

    def of(self, plane: Plane, row: int) -> bytes:
        at = (row + (self.n_rows if plane is Plane.FINE else 0)) * DIGEST_BYTES
        return self.data[at : at + DIGEST_BYTES]

    def matches(self, meta: PackMeta) -> bool:
        """Whether this is the table the record was written for."""
        return blake3.blake3(self.data).hexdigest() == meta.digests_blake3


def read_digests(folder: Path, meta: PackMeta) -> DigestTable:
    """Load rows.b3 without judging it.

    Raises:
        MoetError: MD-PACK-07 it cannot be read.
    """
    path = folder / DIGEST_FILE
    try:
        return DigestTable(path.read_bytes(), meta.n_rows)
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error


def damaged_rows(folder: Path, meta: PackMeta, bad: Iterable[tuple[Plane, int]]) -> MoetError:
    """MD-PACK-04 naming the first rows that do not match their checksum."""
    listed = list(bad)
    words = []
    for plane, row in listed[:6]:
        layer, expert = meta.expert_of(row)
        words.append(f"layer {layer} expert {expert} ({plane.value})")
    if len(listed) > len(words):
        words.append(f"{len(listed) - len(words)} more")
    return fail(
        "MD-PACK-04",
        n_bad=len(listed),
        n_rows=2 * meta.n_rows,
        model=folder.name,
        rows=", ".join(words),
    )
