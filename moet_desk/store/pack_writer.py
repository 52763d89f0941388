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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import blake3
import torch

from moet_desk.errors import fail
from moet_desk.store.durable import Buffer, disk_errors, pack_lock, replace_file
from moet_desk.store.identity import Identity, identify
from moet_desk.store.model_source import ModelSource
from moet_desk.store.pack_folder import PackFolder, check_pack_space
from moet_desk.store.pack_format import (
    DENSE_FILE,
    PackMeta,
    PackPlan,
    PackProgress,
    Phase,
)
from moet_desk.store.pack_rows import (
    MadeRow,
    RowMaker,
    dense_bytes,
    dense_chunks,
    one_torch_thread,
)
from moet_desk.units import GIB, MIB, show_memory

BATCH_ROWS = 64
BATCH_BYTES = 64 * MIB  # a sync per batch: more would lose more work to a crash, not gain speed

Report = Callable[[PackProgress], None]


@dataclass(frozen=True, slots=True)
class Effort:
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
        source: folder with config.json, safetensors files, tokenizer and template, or GGUF files.
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
    opened = ModelSource.open(source)
    maker = RowMaker(opened.index, plan)
    effort = effort_of(maker, memory_budget, threads)
    if dest.resolve() == opened.folder.resolve():
        raise fail("MD-DISK-03", path=str(dest), reason="it is the folder of the source")
    check_pack_space(maker, opened.small, dest)
    with disk_errors(dest):
        dest.mkdir(parents=True, exist_ok=True)
    with pack_lock(dest):
        return _Packing(opened, maker, dest, effort, progress, stop).run()


def effort_of(maker: RowMaker, budget: int, threads: int) -> Effort:
    """What a memory budget in bytes allows.

    Raises:
        MoetError: MD-RAM-01 not even one row fits.
    """
    left = budget - maker.row_bytes
    if left < maker.work_bytes:
        need = maker.work_bytes + maker.row_bytes
        raise fail("MD-RAM-01", need=show_memory(need), have=show_memory(budget), need_bytes=need)
    # a finished row may wait behind each one in the making
    busy = max(1, min(threads, left // (maker.work_bytes + maker.row_bytes)))
    spare = min(BATCH_BYTES, left - busy * maker.work_bytes)
    return Effort(busy, max(1, min(BATCH_ROWS, spare // maker.row_bytes)))


def make_rows(maker: RowMaker, rows: Iterable[int], n_threads: int) -> Iterator[MadeRow]:
    """Rows in order; with several threads, later ones are made while one is taken.

    Raises:
        MoetError: as `RowMaker.make`.
    """
    if n_threads == 1:
        yield from map(maker.make, rows)
        return
    # torch's limit belongs to the thread that sets it
    with ThreadPoolExecutor(n_threads, "pack", torch.set_num_threads, (1,)) as pool:
        waiting: deque[Future[MadeRow]] = deque()
        for row in rows:
            waiting.append(pool.submit(maker.make, row))
            if len(waiting) > n_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Packing:
    """One run of the packer, under the folder's lock."""

    def __init__(
        self,
        source: ModelSource,
        maker: RowMaker,
        dest: Path,
        effort: Effort,
        progress: Report,
        stop: Callable[[], bool],
    ) -> None:
        self._source, self._maker, self._dest = source, maker, dest
        self._effort, self._progress, self._stop = effort, progress, stop
        self._folder = PackFolder(dest, maker)

    def run(self) -> PackMeta:
        weights, small = self._source.index.files, self._source.small
        identity = identify(weights, small, self._on_source_bytes)
        finished = self._finished(identity)
        if finished is not None:
            return finished
        with (
            disk_errors(self._dest, lambda: self._folder.done_words),
            contextlib.closing(self._folder),
            one_torch_thread(),
        ):
            self._folder.open(identity.hash)
            if not self._folder.dense:
                self._write_dense()
            self._write_rows()
            self._progress(PackProgress(Phase.FINISH, 0, 1, "bytes"))
            meta = self._folder.finish(small, identity)
            self._progress(PackProgress(Phase.FINISH, 1, 1, "bytes"))
            return meta

    def _finished(self, identity: Identity) -> PackMeta | None:
        with disk_errors(self._dest):
            meta = self._folder.finished()
            if meta is None:
                return None
            if meta.identity != identity.hash:
                raise self._folder.taken(meta.identity, identity.hash)
            self._folder.tidy()  # the last run may have been killed just before its end
        return meta

    def _write_dense(self) -> None:
        """Copy the dense tensors as shipped."""
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
        self._folder.dense = hasher.hexdigest()
        self._folder.journal.add_dense(self._folder.dense)

    def _write_rows(self) -> None:
        todo = [row for row in range(self._maker.plan.n_rows) if not self._folder.has(row)]
        self._report_rows()
        batch: list[MadeRow] = []
        for made in make_rows(self._maker, todo, self._effort.threads):
            batch.append(made)
            stopping = self._stop()
            if stopping or len(batch) == self._effort.batch_rows:
                self._folder.commit(batch)
                self._report_rows()
                batch = []
            if stopping:
                self._stop_if_asked()
        self._folder.commit(batch)
        self._report_rows()

    def _on_source_bytes(self, done: int, total: int) -> None:
        self._stop_if_asked()
        self._progress(PackProgress(Phase.READ_SOURCE, done, total, "bytes"))

    def _report_rows(self) -> None:
        done, total = self._folder.n_done, self._maker.plan.n_rows
        kept, dropped = self._folder.kept, self._folder.dropped
        self._progress(PackProgress(Phase.ROWS, done, total, "rows", kept, dropped))

    def _stop_if_asked(self) -> None:
        if self._stop():
            raise fail(
                "MD-PACK-06",
                path=str(self._dest),
                done=self._folder.n_done,
                total=self._maker.plan.n_rows,
                model=self._dest.name,
            )
