"""Look through a pack for damage, and mend what is damaged from the source.

Owns the comparison of every stored byte with the digests in rows.b3 and pack.json. A row is mended
in place: its old bytes were useless, and a crash half way leaves a row that still does not match
its digest, so the next run mends it again. Files are replaced whole. Runs in a verifying process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import blake3

from moet_desk.errors import MoetError, fail
from moet_desk.store.durable import disk_errors, pack_lock, replace_file, write_at
from moet_desk.store.identity import hash_file, identify
from moet_desk.store.model_source import ModelSource
from moet_desk.store.pack_format import (
    DENSE_FILE,
    DIGEST_BYTES,
    DIGEST_FILE,
    ROW_FILES,
    PackMeta,
    PackPlan,
    PackProgress,
    Phase,
    Plane,
)
from moet_desk.store.pack_meta import DigestTable, damaged_rows, read_digests, read_meta, unreadable
from moet_desk.store.pack_rows import RowMaker, dense_chunks, one_torch_thread, row_digest

_ROWS_PER_STEP = 16

Report = Callable[[PackProgress], None]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify_pack` found.

    Attributes:
        meta: the pack's record.
        bad: rows that do not match their digest.
        digests_ok: whether rows.b3 is as it was written.
        digests: a table known to be right (recomputed from the rows when rows.b3 alone is damaged),
            None when neither rows.b3 nor the rows give one.
        dense_ok: whether dense.safetensors is as it was written.
        files: small files that are missing or changed.
    """

    meta: PackMeta
    bad: tuple[tuple[Plane, int], ...]
    digests_ok: bool
    digests: DigestTable | None
    dense_ok: bool
    files: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.bad and not self.damaged_files

    @property
    def damaged_files(self) -> tuple[str, ...]:
        """Names of whole files that are not as they were written."""
        tested = ((DENSE_FILE, self.dense_ok), (DIGEST_FILE, self.digests_ok))
        return (*(name for name, is_ok in tested if not is_ok), *self.files)

    def error(self, folder: Path) -> MoetError | None:
        """The damage as a catalogue error: MD-PACK-04 for rows, MD-PACK-07 for a file."""
        if self.bad:
            return damaged_rows(folder, self.meta, self.bad)
        if self.damaged_files:
            others = self.damaged_files[1:]
            reason = f"it is missing or changed; so are {', '.join(others)}"
            first = folder / self.damaged_files[0]
            return unreadable(first, reason if others else "it is missing or changed")
        return None


def verify_pack(path: Path, *, progress: Report = lambda _: None, threads: int = 2) -> VerifyReport:
    """Read a whole pack and compare it with its digests. Changes nothing.

    Raises:
        MoetError: MD-PACK-03, 06 or 07: there is no complete pack, or its record is damaged.
    """
    meta = read_meta(path)
    try:
        table = read_digests(path, meta)
    except MoetError:
        table = DigestTable(b"", meta.n_rows)  # a missing table is a damaged one
    computed = _row_digests(path, meta, progress, threads)
    found = DigestTable(b"".join(computed), meta.n_rows)
    digests_ok = table.matches(meta)
    right = table if digests_ok else found if found.matches(meta) else None
    bad = tuple(
        (plane, row)
        for plane in Plane
        for row in range(meta.n_rows)
        if found.of(plane, row) != (right or table).of(plane, row)
    )
    dense_ok = _file_hash(path / DENSE_FILE) == meta.dense_blake3
    files = tuple(file.name for file in meta.copied if _file_hash(path / file.name) != file.blake3)
    return VerifyReport(meta, bad, digests_ok, right, dense_ok, files)


def _row_digests(path: Path, meta: PackMeta, progress: Report, threads: int) -> list[bytes]:
    """Digests of all rows as they lie on disk, base rows first."""
    steps = [
        (plane, range(first, min(first + _ROWS_PER_STEP, meta.n_rows)))
        for plane in Plane
        for first in range(0, meta.n_rows, _ROWS_PER_STEP)
    ]
    digests: list[bytes] = []
    total = 2 * meta.n_rows
    with contextlib.ExitStack() as stack:
        fds = {plane: _open_rows(path / ROW_FILES[plane], stack) for plane in Plane}
        pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="verify"))

        def look(step: tuple[Plane, range]) -> list[bytes]:
            plane, rows = step
            return [_digest_at(fds[plane], row, meta.stride(plane)) for row in rows]

        for part in pool.map(look, steps):
            digests += part
            progress(PackProgress(Phase.VERIFY, len(digests), total, "rows"))
    return digests


def _open_rows(path: Path, stack: contextlib.ExitStack) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    stack.callback(os.close, fd)
    return fd


def _digest_at(fd: int | None, row: int, stride: int) -> bytes:
    """Digest of a row on disk; zeros, which no row has, when it cannot be read."""
    try:
        data = b"" if fd is None else os.pread(fd, stride, row * stride)
    except OSError:
        data = b""
    return row_digest(data) if len(data) == stride else bytes(DIGEST_BYTES)


def _file_hash(path: Path) -> str:
    try:
        return hash_file(path).blake3
    except MoetError:
        return ""


# -- repair ------------------------------------------------------------------------------------


def repair_rows(
    path: Path,
    source: Path,
    plan: PackPlan,
    report: VerifyReport,
    *,
    progress: Report = lambda _: None,
) -> int:
    """Make the damaged parts of a pack again from its source.

    Args:
        path: the pack's folder.
        source: the folder or file the pack was made from.
        plan: the family's plan for that source.
        report: what `verify_pack` found.
        progress: told about each row.

    Returns:
        How many rows and files were written.

    Raises:
        MoetError: MD-PACK-10 another source, MD-PACK-09 the pack is being written, MD-SRC-..
            the source, MD-DISK-02 or 03 the disk.
    """
    opened = ModelSource.open(source)
    maker = RowMaker(opened.index, plan)
    with pack_lock(path):
        meta = read_meta(path)

        def on_bytes(done: int, total: int) -> None:
            progress(PackProgress(Phase.READ_SOURCE, done, total, "bytes"))

        identity = identify(opened.index.files, opened.small, on_bytes)
        if identity.hash != meta.identity:
            got, want = identity.short, meta.identity[:12]
            raise fail("MD-PACK-10", path=str(source), got=got, want=want)
        return mend(path, opened.small, maker, report, progress=progress)


def rows_to_make(report: VerifyReport) -> Sequence[int]:
    """The rows that a repair makes again: without right digests nobody knows which are damaged."""
    if report.digests is None:
        return range(report.meta.n_rows)
    return sorted({row for _, row in report.bad})


def mend(
    path: Path,
    small: Mapping[str, bytes],
    maker: RowMaker,
    report: VerifyReport,
    *,
    progress: Report = lambda _: None,
) -> int:
    """Do what `repair_rows` says, under the pack's lock, for a source known to be the right one.

    The source need only hold what the damaged parts are made from; `small` are its small files.
    """
    with disk_errors(path), one_torch_thread():
        written = _repair_experts(path, maker, report, progress)
        return written + _repair_files(path, small, maker, report)


def _repair_experts(path: Path, maker: RowMaker, report: VerifyReport, progress: Report) -> int:
    meta = report.meta
    table = report.digests
    keys = [(plane, row) for plane in Plane for row in range(meta.n_rows)]
    digests = {key: b"" if table is None else table.of(*key) for key in keys}
    todo = rows_to_make(report)
    written = 0
    with contextlib.ExitStack() as stack:
        fds = {plane: _open_to_write(path, meta, plane, stack) for plane in Plane}
        for n_done, row in enumerate(todo, 1):
            made = maker.make(row)
            for plane in Plane:
                want = digests[plane, row] or made.digest(plane)
                if made.digest(plane) != want:
                    raise _other_bytes(path / ROW_FILES[plane], made.digest(plane), want)
                digests[plane, row] = want
                stride = meta.stride(plane)
                if _digest_at(fds[plane], row, stride) != made.digest(plane):
                    write_at(fds[plane], made.of(plane), row * stride)
                    written += 1
            progress(PackProgress(Phase.REPAIR, n_done, len(todo), "rows"))
        for fd in fds.values():
            os.fdatasync(fd)
    return written + _repair_digests(path, meta, report, list(digests.values()))


def _open_to_write(path: Path, meta: PackMeta, plane: Plane, stack: contextlib.ExitStack) -> int:
    fd = os.open(path / ROW_FILES[plane], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    stack.callback(os.close, fd)
    os.ftruncate(fd, meta.n_rows * meta.stride(plane))
    return fd


def _repair_digests(
    path: Path, meta: PackMeta, report: VerifyReport, digests: Sequence[bytes]
) -> int:
    if report.digests_ok:
        return 0
    table = b"".join(digests)
    _want_hash(path / DIGEST_FILE, [table], meta.digests_blake3)
    replace_file(path / DIGEST_FILE, [table])
    return 1


def _repair_files(
    path: Path, small: Mapping[str, bytes], maker: RowMaker, report: VerifyReport
) -> int:
    if not report.dense_ok:
        index, plan = maker.index, maker.plan
        _want_hash(path / DENSE_FILE, dense_chunks(index, plan), report.meta.dense_blake3)
        replace_file(path / DENSE_FILE, dense_chunks(index, plan))
    want = {file.name: file.blake3 for file in report.meta.copied}
    for name in report.files:
        data = small.get(name, b"")
        _want_hash(path / name, [data], want[name])
        replace_file(path / name, [data])
    return (not report.dense_ok) + len(report.files)


def _want_hash(path: Path, chunks: Iterable[bytes | memoryview], want: str) -> None:
    """Refuse to write a file that would not match the record."""
    hasher = blake3.blake3()
    for chunk in chunks:
        hasher.update(chunk)
    if hasher.hexdigest() != want:
        raise _other_bytes(path, hasher.digest(), bytes.fromhex(want))


def _other_bytes(path: Path, got: bytes, want: bytes) -> MoetError:
    """The source gives other bytes than were packed, although its identity is the same."""
    return fail("MD-PACK-10", path=str(path), got=got.hex()[:12], want=want.hex()[:12])
