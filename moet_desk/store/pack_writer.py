"""Write a pack so that a crash at any moment loses nothing that was finished.

Owns the order of things on disk. A row counts once it is synced and then journalled; pack.json is
written last, and a folder without it is not a pack. Started again on the same source, the packer
keeps every journalled row and gives the same bytes as a run that was never interrupted. Runs in a
packing process of its own; one at a time per folder.

    hash the source -> lock -> journal -> dense.safetensors -> rows, in batches: write both files,
    sync them, journal, sync that -> rows.b3, small files, pack.json -> journal removed
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import blake3
import torch

from moet_desk.errors import Damaged, fail
from moet_desk.store.durable import (
    PARTIAL,
    Buffer,
    disk_errors,
    pack_lock,
    replace_file,
    sync_folder,
    write_at,
)
from moet_desk.store.identity import Identity, hash_file, identify
from moet_desk.store.journal import Digests, Journal, JournalKey, read_journal
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
    PackPlan,
    PackProgress,
    Phase,
    Plane,
    SourceFile,
    decode_meta,
    encode_meta,
)
from moet_desk.store.pack_rows import (
    MadeRow,
    RowMaker,
    dense_bytes,
    dense_chunks,
    one_torch_thread,
    row_digest,
)
from moet_desk.store.sources import TensorIndex
from moet_desk.units import GIB, MIB, show_disk, show_memory

BATCH_ROWS = 64
BATCH_BYTES = 64 * MIB  # a sync per batch: more would lose more work to a crash, not gain speed
_SPARE_BYTES = MIB  # journal twice, folder entries

Report = Callable[[PackProgress], None]


@dataclass(frozen=True, slots=True)
class _Effort:
    """How many threads make rows and how many rows are held between two syncs."""

    threads: int
    batch_rows: int


def write_pack(
    source: Path,
    plan: PackPlan,
    dest: Path,
    *,
    memory_budget: int = 2 * GIB,
    threads: int = 1,
    progress: Report = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> PackMeta:
    """Make a pack of a source, or go on where an earlier run stopped.

    Args:
        source: folder with config.json, safetensors files, tokenizer and template.
        plan: what the model's family says is in it.
        dest: the pack's folder; made if needed. It is a pack once pack.json is in it.
        memory_budget: bytes that rows in the making may take.
        threads: how many rows are made at a time.
        progress: told about each step; called from this thread.
        stop: asked between steps; True ends the run with everything finished kept.

    Raises:
        MoetError: MD-SRC-01..06, 08 the source; MD-PACK-08 `dest` holds another model;
            MD-PACK-09 somebody else packs it; MD-DISK-01..03 the disk; MD-RAM-01 the budget is too
            small for one row; MD-PACK-06 stopped.
    """
    maker = RowMaker(TensorIndex.open(source), plan)
    effort = _effort(maker, memory_budget, threads)
    if dest.resolve() == source.resolve():
        raise fail("MD-DISK-03", path=str(dest), reason="it is the folder of the source")
    _check_space(maker, source, dest)
    with disk_errors(dest):
        dest.mkdir(parents=True, exist_ok=True)
    with pack_lock(dest):
        return _Packing(source, maker, dest, effort, progress, stop).run()


def _effort(maker: RowMaker, budget: int, threads: int) -> _Effort:
    left = budget - maker.row_bytes
    if left < maker.work_bytes:
        need = maker.work_bytes + maker.row_bytes
        raise fail("MD-RAM-01", need=show_memory(need), have=show_memory(budget), need_bytes=need)
    # a finished row may wait behind each one in the making
    busy = max(1, min(threads, left // (maker.work_bytes + maker.row_bytes)))
    spare = min(BATCH_BYTES, left - busy * maker.work_bytes)
    return _Effort(busy, max(1, min(BATCH_ROWS, spare // maker.row_bytes)))


def _check_space(maker: RowMaker, source: Path, dest: Path) -> None:
    sizes = {
        BASE_FILE: maker.plan.n_rows * maker.layout.base_stride,
        FINE_FILE: maker.plan.n_rows * maker.layout.fine_stride,
        DENSE_FILE: dense_bytes(maker.index, maker.plan),
        DIGEST_FILE: maker.plan.n_rows * 2 * DIGEST_BYTES,
    }
    small = [source / name for name in COPIED_FILES if (source / name).is_file()]
    sizes |= {path.name: path.stat().st_size for path in small}
    need = _SPARE_BYTES
    for name, size in sizes.items():
        need += max(0, size - _allocated(dest / name))
    place = next(folder for folder in (dest, *dest.absolute().parents) if folder.is_dir())
    disk = os.statvfs(place)
    have = disk.f_bavail * disk.f_frsize
    if need > have:
        raise fail(
            "MD-DISK-01",
            what=f"The pack {dest.name}",
            path=str(place),
            need=show_disk(need),
            have=show_disk(have),
            missing=show_disk(need - have),
            need_bytes=need,
            have_bytes=have,
        )


def _allocated(path: Path) -> int:
    """Bytes a file takes on disk: less than its size while it is sparse."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


class _Packing:
    """One run of the packer, under the folder's lock."""

    def __init__(
        self,
        source: Path,
        maker: RowMaker,
        dest: Path,
        effort: _Effort,
        progress: Report,
        stop: Callable[[], bool],
    ) -> None:
        self._source, self._maker, self._dest = source, maker, dest
        self._effort, self._progress, self._stop = effort, progress, stop
        self._digests: dict[int, Digests] = {}
        self._kept = self._dropped = 0

    def run(self) -> PackMeta:
        identity = identify(self._source, self._maker.index.files, self._on_source_bytes)
        finished = self._finished(identity)
        if finished is not None:
            return finished
        with disk_errors(self._dest, self._done), contextlib.ExitStack() as stack:
            fds = {plane: self._open_rows(plane) for plane in Plane}
            for fd in fds.values():
                stack.callback(os.close, fd)
            journal, dense = self._resume(identity, fds)
            stack.callback(journal.close)
            stack.enter_context(one_torch_thread())
            dense = dense or self._write_dense(journal)
            self._write_rows(journal, fds)
            return self._finish(identity, dense)

    # -- before ------------------------------------------------------------------------------

    def _finished(self, identity: Identity) -> PackMeta | None:
        """The record of a pack that is complete already, None when there is work to do."""
        path = self._dest / PACK_JSON
        with disk_errors(path):
            if not path.exists():
                return None
            try:
                meta = decode_meta(path.read_bytes(), path=str(path))
            except Damaged as error:
                if error.code != "MD-PACK-07":
                    raise
                return None  # nobody can use that pack as it is: make everything again
            if meta.identity != identity.hash:
                raise self._taken(meta.identity, identity)
            self._tidy()  # the last run may have been killed just before its end
        return meta

    def _taken(self, got: str, want: Identity) -> Exception:
        names = {"path": str(self._dest), "model": self._dest.name}
        return fail("MD-PACK-08", got=got[:12], want=want.short, **names)

    def _open_rows(self, plane: Plane) -> int:
        path = self._dest / ROW_FILES[plane]
        size = self._maker.plan.n_rows * self._stride(plane)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, size)  # sparse; does nothing when the size is right
        except OSError:
            os.close(fd)
            raise
        return fd

    def _resume(self, identity: Identity, fds: Mapping[Plane, int]) -> tuple[Journal, str]:
        """Open the journal with what an earlier run finished; also the dense file's digest."""
        path = self._dest / JOURNAL_FILE
        key = JournalKey.of(identity.hash, self._maker.plan)
        state = read_journal(path, key=key)
        rows: dict[int, Digests] = {}
        dense = ""
        if state.key is not None and state.key.identity != key.identity:
            raise self._taken(state.key.identity, identity)
        if state.key is None or state.key == key:  # else: another plan, nothing can be used
            rows = self._trusted(state.rows, fds)
            size = dense_bytes(self._maker.index, self._maker.plan)
            file = self._dest / DENSE_FILE
            dense = state.dense if file.is_file() and file.stat().st_size == size else ""
            self._dropped = state.dropped + len(state.rows) - len(rows)
        self._digests = rows
        self._kept = len(rows)
        return Journal.create(path, key, rows=rows, dense=dense), dense

    def _trusted(self, rows: Mapping[int, Digests], fds: Mapping[Plane, int]) -> dict[int, Digests]:
        """Journalled rows to keep. If one of the newest is not on disk, all are looked at."""
        newest = list(rows)[-BATCH_ROWS:]
        if all(self._is_written(row, rows[row], fds) for row in newest):
            return dict(rows)
        return {row: both for row, both in rows.items() if self._is_written(row, both, fds)}

    def _is_written(self, row: int, digests: Digests, fds: Mapping[Plane, int]) -> bool:
        for plane, want in zip(Plane, digests, strict=True):
            stride = self._stride(plane)
            if row_digest(os.pread(fds[plane], stride, row * stride)) != want:
                return False
        return True

    # -- work --------------------------------------------------------------------------------

    def _write_dense(self, journal: Journal) -> str:
        """Copy the dense tensors as shipped; returns the blake3 of the file."""
        hasher = blake3.blake3(max_threads=self._effort.threads)
        total = dense_bytes(self._maker.index, self._maker.plan)

        def chunks() -> Iterator[Buffer]:
            done = 0
            for chunk in dense_chunks(self._maker.index, self._maker.plan):
                self._stop_if_asked()
                hasher.update(chunk)
                yield chunk
                done += len(chunk)
                self._progress(PackProgress(Phase.DENSE, done, total, "bytes"))

        replace_file(self._dest / DENSE_FILE, chunks())
        journal.add_dense(hasher.hexdigest())
        return hasher.hexdigest()

    def _write_rows(self, journal: Journal, fds: Mapping[Plane, int]) -> None:
        todo = [row for row in range(self._maker.plan.n_rows) if row not in self._digests]
        self._report_rows()
        batch: list[MadeRow] = []
        for made in self._make_rows(todo):
            batch.append(made)
            stopping = self._stop()
            if stopping or len(batch) == self._effort.batch_rows:
                self._commit(batch, journal, fds)
                batch = []
            if stopping:
                self._stop_if_asked()
        self._commit(batch, journal, fds)

    def _make_rows(self, rows: Iterable[int]) -> Iterator[MadeRow]:
        """Rows in order; with several threads, later ones are made while one is taken."""
        if self._effort.threads == 1:
            yield from map(self._maker.make, rows)
            return
        n_threads = self._effort.threads
        # torch's limit belongs to the thread that sets it
        with ThreadPoolExecutor(n_threads, "pack", torch.set_num_threads, (1,)) as pool:
            waiting: deque[Future[MadeRow]] = deque()
            for row in rows:
                waiting.append(pool.submit(self._maker.make, row))
                if len(waiting) > n_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _commit(self, batch: Sequence[MadeRow], journal: Journal, fds: Mapping[Plane, int]) -> None:
        """Make a batch durable, then journal it: only in this order does a record mean anything."""
        if not batch:
            return
        for plane in Plane:
            for made in batch:
                write_at(fds[plane], made.of(plane), made.row * self._stride(plane))
            os.fdatasync(fds[plane])
        rows = [(made.row, (made.base_digest, made.fine_digest)) for made in batch]
        journal.add_rows(rows)
        self._digests.update(rows)
        self._report_rows()

    # -- after -------------------------------------------------------------------------------

    def _finish(self, identity: Identity, dense: str) -> PackMeta:
        self._progress(PackProgress(Phase.FINISH, 0, 1, "bytes"))
        ordered = [self._digests[row] for row in range(self._maker.plan.n_rows)]
        digests = b"".join(base for base, _ in ordered) + b"".join(fine for _, fine in ordered)
        replace_file(self._dest / DIGEST_FILE, [digests])
        copied = self._copy_small_files(identity)
        meta = build_meta(self._maker, identity, dense=dense, digests=digests, copied=copied)
        replace_file(self._dest / PACK_JSON, [encode_meta(meta)])
        self._tidy()
        self._progress(PackProgress(Phase.FINISH, 1, 1, "bytes"))
        return meta

    def _copy_small_files(self, identity: Identity) -> list[SourceFile]:
        hashed = {file.name: file for file in identity.files}
        copied = []
        for name in COPIED_FILES:
            if not (self._source / name).is_file():
                continue
            replace_file(self._dest / name, [(self._source / name).read_bytes()])
            file = hash_file(self._dest / name)
            if hashed.get(name, file) != file:
                raise fail("MD-SRC-02", file=name, reason="it changed while it was being packed")
            copied.append(file)
        return copied

    def _tidy(self) -> None:
        for leftover in self._dest.glob(f"*{PARTIAL}"):
            leftover.unlink()
        (self._dest / JOURNAL_FILE).unlink(missing_ok=True)
        sync_folder(self._dest)

    # -- reports -----------------------------------------------------------------------------

    def _stride(self, plane: Plane) -> int:
        layout = self._maker.layout
        return layout.base_stride if plane is Plane.BASE else layout.fine_stride

    def _done(self) -> str:
        return f"{len(self._digests)} of {self._maker.plan.n_rows} rows"

    def _on_source_bytes(self, done: int, total: int) -> None:
        self._stop_if_asked()
        self._progress(PackProgress(Phase.READ_SOURCE, done, total, "bytes"))

    def _report_rows(self) -> None:
        done, total = len(self._digests), self._maker.plan.n_rows
        kept, dropped = self._kept, self._dropped
        self._progress(PackProgress(Phase.ROWS, done, total, "rows", kept, dropped))

    def _stop_if_asked(self) -> None:
        if self._stop():
            raise fail(
                "MD-PACK-06",
                path=str(self._dest),
                done=len(self._digests),
                total=self._maker.plan.n_rows,
                model=self._dest.name,
            )


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
