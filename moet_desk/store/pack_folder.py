"""A pack in the making: its row files, its journal and its end, whoever brings the rows.

Owns the order of things on disk: rows are written and synced, then journalled; pack.json is written
last, and a folder without it is not a pack. Opened again for the same source, every journalled row
is kept. The packer of a whole folder (`pack_writer`) and the one that packs shards as they land
(`stream_pack`) share this. One packing thread, under the folder's lock.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import blake3

from moet_desk.errors import Damaged, fail
from moet_desk.store.durable import (
    PARTIAL,
    allocated,
    check_space,
    leftovers,
    replace_file,
    sync_folder,
    write_at,
)
from moet_desk.store.identity import Identity, hash_bytes
from moet_desk.store.journal import Digests, Journal, JournalKey, JournalState, read_journal
from moet_desk.store.pack_format import (
    BASE_FILE,
    COPIED_FILES,
    DENSE_FILE,
    DIGEST_BYTES,
    DIGEST_FILE,
    FINE_FILE,
    FORMAT_VERSION,
    JOURNAL_FILE,
    PACK_JSON,
    QUANTIZER_VERSION,
    ROW_FILES,
    PackMeta,
    Plane,
    SourceFile,
    decode_meta,
    encode_meta,
)
from moet_desk.store.pack_rows import MadeRow, RowMaker, dense_bytes, row_digest
from moet_desk.units import MIB

CHECKED_ROWS = 64  # newest rows that are read back when a folder is opened again
SPARE_BYTES = MIB  # journal twice, folder entries


class PackFolder:
    """The files of an unfinished pack. Call `open` before anything else but `finished`."""

    def __init__(self, dest: Path, maker: RowMaker) -> None:
        self.dest = dest
        self.kept = self.dropped = 0
        self.dense = ""  # blake3 of dense.safetensors once that is in place
        self.dense_parts: dict[int, bytes] = {}  # blake3-128 of parts in its partial file
        self._maker = maker
        self._fds: dict[Plane, int] = {}
        self._digests: dict[int, Digests] = {}
        self._journal: Journal | None = None

    # -- before ------------------------------------------------------------------------------

    def finished(self) -> PackMeta | None:
        """The record of a pack that is complete already, None when there is work to do.

        Raises:
            OSError: the record cannot be read.
        """
        path = self.dest / PACK_JSON
        if not path.exists():
            return None
        try:
            return decode_meta(path.read_bytes(), path=str(path))
        except Damaged as error:
            if error.code != "MD-PACK-07":
                raise
        return None  # nobody can use that pack as it is: make everything again

    def taken(self, got: str, want: str) -> Exception:
        """MD-PACK-08: the folder belongs to the source with identity `got`."""
        names = {"path": str(self.dest), "model": self.dest.name}
        return fail("MD-PACK-08", got=got[:12], want=want[:12], **names)

    def open(self, identity: str) -> None:
        """Open files and journal with what an earlier run finished.

        Args:
            identity: blake3 in hex of what is packed; a journal of another one is refused.

        Raises:
            MoetError: MD-PACK-08 another source is packed here.
            OSError: the disk refused.
        """
        path = self.dest / JOURNAL_FILE
        key = JournalKey.of(identity, self._maker.plan)
        state = read_journal(path, key=key)
        if state.key is not None and state.key.identity != key.identity:
            raise self.taken(state.key.identity, identity)
        for plane in Plane:
            self._fds[plane] = self._open_rows(plane)
        if state.key is None or state.key == key:  # else: another plan, nothing can be used
            self._resume(state)
        rows, parts = self._digests, self.dense_parts
        self._journal = Journal.create(path, key, rows=rows, dense=self.dense, parts=parts)
        self.kept = len(rows)

    def _resume(self, state: JournalState) -> None:
        self._digests = self._trusted(state.rows)
        self.dropped = state.dropped + len(state.rows) - len(self._digests)
        size = dense_bytes(self._maker.index, self._maker.plan)
        file = self.dest / DENSE_FILE
        self.dense = state.dense if file.is_file() and file.stat().st_size == size else ""
        partial = self.dest / f"{DENSE_FILE}{PARTIAL}"
        if not self.dense and partial.is_file() and partial.stat().st_size == size:
            self.dense_parts = dict(state.parts)

    def close(self) -> None:
        """Close all files; what is journalled stays."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _open_rows(self, plane: Plane) -> int:
        path = self.dest / ROW_FILES[plane]
        size = self._maker.plan.n_rows * self._stride(plane)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, size)  # sparse; does nothing when the size is right
        except OSError:
            os.close(fd)
            raise
        return fd

    def _trusted(self, rows: Mapping[int, Digests]) -> dict[int, Digests]:
        """Journalled rows to keep. If one of the newest is not on disk, all are looked at."""
        newest = list(rows)[-CHECKED_ROWS:]
        if all(self._is_written(row, rows[row]) for row in newest):
            return dict(rows)
        return {row: both for row, both in rows.items() if self._is_written(row, both)}

    def _is_written(self, row: int, digests: Digests) -> bool:
        for plane, want in zip(Plane, digests, strict=True):
            stride = self._stride(plane)
            if row_digest(os.pread(self._fds[plane], stride, row * stride)) != want:
                return False
        return True

    # -- work --------------------------------------------------------------------------------

    @property
    def n_done(self) -> int:
        """Rows that are durable."""
        return len(self._digests)

    @property
    def done_words(self) -> str:
        """How far it is, for messages."""
        return f"{self.n_done} of {self._maker.plan.n_rows} rows"

    def has(self, row: int) -> bool:
        """Whether a row is durable."""
        return row in self._digests

    @property
    def journal(self) -> Journal:
        assert self._journal is not None  # noqa: S101
        return self._journal

    def commit(self, batch: Sequence[MadeRow]) -> None:
        """Make a batch durable, then journal it: only in this order does a record mean anything.

        Raises:
            OSError: the disk refused; the rows of this batch do not count.
        """
        if not batch:
            return
        for plane in Plane:
            for made in batch:
                write_at(self._fds[plane], made.of(plane), made.row * self._stride(plane))
            os.fdatasync(self._fds[plane])
        rows = [(made.row, (made.base_digest, made.fine_digest)) for made in batch]
        self.journal.add_rows(rows)
        self._digests.update(rows)

    def finish(self, small: Mapping[str, bytes], identity: Identity) -> PackMeta:
        """Write what is left once all rows and the dense file are there: the pack is complete.

        Args:
            small: the small files to take over, by name.
            identity: of the whole source.

        Raises:
            MoetError: MD-SRC-02 a small file is not what it was.
            OSError: the disk refused.
        """
        ordered = [self._digests[row] for row in range(self._maker.plan.n_rows)]
        digests = b"".join(base for base, _ in ordered) + b"".join(fine for _, fine in ordered)
        replace_file(self.dest / DIGEST_FILE, [digests])
        copied = self._write_small_files(small, identity)
        meta = build_meta(self._maker, identity, dense=self.dense, digests=digests, copied=copied)
        replace_file(self.dest / PACK_JSON, [encode_meta(meta)])
        self.tidy()
        return meta

    def _write_small_files(
        self, small: Mapping[str, bytes], identity: Identity
    ) -> list[SourceFile]:
        hashed = {file.name: file for file in identity.files}
        copied = []
        for name in COPIED_FILES:
            if name not in small:
                continue
            file = hash_bytes(name, small[name])
            if hashed.get(name, file) != file:
                raise fail("MD-SRC-02", file=name, reason="it changed while it was being packed")
            replace_file(self.dest / name, [small[name]])
            copied.append(file)
        return copied

    def tidy(self) -> None:
        """Remove what only a pack in the making needs. Raises OSError."""
        for path in leftovers(self.dest):
            path.unlink()
        sync_folder(self.dest)

    def _stride(self, plane: Plane) -> int:
        layout = self._maker.layout
        return layout.base_stride if plane is Plane.BASE else layout.fine_stride


def pack_sizes(maker: RowMaker) -> dict[str, int]:
    """Bytes of the big files of a finished pack."""
    n_rows = maker.plan.n_rows
    return {
        BASE_FILE: n_rows * maker.layout.base_stride,
        FINE_FILE: n_rows * maker.layout.fine_stride,
        DENSE_FILE: dense_bytes(maker.index, maker.plan),
        DIGEST_FILE: n_rows * 2 * DIGEST_BYTES,
    }


def missing_bytes(dest: Path, sizes: Mapping[str, int]) -> int:
    """Disk space that a pack of these file sizes still needs."""
    return SPARE_BYTES + sum(
        max(0, size - max(allocated(dest / name), allocated(dest / f"{name}{PARTIAL}")))
        for name, size in sizes.items()
    )


def check_pack_space(maker: RowMaker, small: Mapping[str, bytes], dest: Path) -> None:
    """Whether the disk has room for what of a pack is not there yet.

    Raises:
        MoetError: MD-DISK-01.
    """
    sizes = pack_sizes(maker) | {name: len(data) for name, data in small.items()}
    check_space(dest, missing_bytes(dest, sizes), what=f"The pack {dest.name}")


def build_meta(
    maker: RowMaker, identity: Identity, *, dense: str, digests: bytes, copied: list[SourceFile]
) -> PackMeta:
    """The record of a pack made from this source."""
    plan, layout = maker.plan, maker.layout
    return PackMeta(
        format=FORMAT_VERSION,
        identity=identity.hash,
        quantizer=QUANTIZER_VERSION,
        model_type=plan.model_type,
        hidden=plan.hidden,
        inter=plan.inter,
        n_experts=plan.n_experts,
        moe_layers=list(plan.moe_layers),
        base_row_bytes=layout.base_bytes,
        base_stride=layout.base_stride,
        fine_row_bytes=layout.fine_bytes,
        fine_stride=layout.fine_stride,
        source_format=maker.source_format,
        fine_is_lossless=maker.is_lossless,
        source=list(identity.files),
        dense_bytes=dense_bytes(maker.index, plan),
        dense_blake3=dense,
        digests_blake3=blake3.blake3(digests).hexdigest(),
        copied=copied,
    )
