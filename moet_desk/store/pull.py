"""Fetching a model and packing it meanwhile: shards in, rows out, and nothing is done twice.

Owns the run after `pull_prepare`: which shard is fetched when, what is packed when it has landed,
and when it may be deleted (`reclaim`). A shard is deleted only after every row and dense tensor
that needs it is synced and journalled. Started again after any end, it goes on. Fetching threads
bring files; everything else happens in the calling thread, under the pack folder's lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from moet_desk.errors import MoetError, fail
from moet_desk.store.durable import disk_errors, pack_lock
from moet_desk.store.fetch import PART, Line, Stopped, check_file, fetch_file
from moet_desk.store.hub import RemoteFile
from moet_desk.store.identity import hash_bytes, identity_of
from moet_desk.store.model_source import read_small
from moet_desk.store.pack_folder import PackFolder
from moet_desk.store.pack_format import (
    IDENTITY_FILES,
    PackMeta,
    PackProgress,
    Phase,
    SourceFile,
)
from moet_desk.store.pack_rows import one_torch_thread
from moet_desk.store.pack_writer import effort_of
from moet_desk.store.pull_prepare import Prepared, check_room
from moet_desk.store.pull_state import (
    MADE_FROM,
    STATE_VERSION,
    FileRecord,
    Origin,
    fingerprint,
    header_path,
    remove_download,
    write_origin,
    write_state,
)
from moet_desk.store.shard_book import ShardBook, may_start
from moet_desk.store.stream_pack import StreamPacker
from moet_desk.units import GIB, show_disk

_TICK_S = 0.2
_REPORT_S = 1.0
_RATE_S = 5.0  # the shown rate is an average over about this time


@dataclass(frozen=True, slots=True)
class Fetching:
    """One report of the download: bytes of `total` that are here or were packed and deleted."""

    done: int
    total: int
    rate: float | None  # bytes per second
    files_done: int
    n_files: int
    retries: int
    trouble: str  # words while nothing arrives, else empty
    disk: int  # bytes of shards on disk now


Report = Callable[[PackProgress | Fetching], None]


def pull(
    prepared: Prepared,
    line: Line,
    *,
    memory_budget: int = 2 * GIB,
    threads: int = 1,
    report: Report = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> PackMeta:
    """Fetch and pack a model, or go on where an earlier run stopped.

    Args:
        prepared: what `pull_prepare.prepare` found.
        line: hub, limits and patience.
        memory_budget: bytes that rows in the making may take.
        threads: how many rows are made at a time.
        report: told about each step and about the download once a second; called from this thread.
        stop: asked all the time; True ends the run with everything finished kept.

    Raises:
        MoetError: MD-PULL-01 stopped; MD-NET-.., MD-HUB-.. the hub; MD-PACK-02 a file stays wrong;
            MD-DISK-01..03 the disk; MD-SRC-06 invalid numbers; MD-PACK-08, 09; MD-RAM-01.
    """
    check_room(prepared)
    dest = prepared.asked.dest
    with disk_errors(dest):
        dest.mkdir(parents=True, exist_ok=True)
    own = replace(line, stop=threading.Event(), lock=threading.Lock())
    with pack_lock(dest):
        run = _Pull(prepared, own, memory_budget, threads, report, stop)
        try:
            return run.run()
        except Stopped as stopped:
            raise run.paused() from stopped
        except MoetError as error:
            if error.code != "MD-PACK-06":
                raise
            raise run.paused() from error


class _Pull:
    """One run, under the folder's lock."""

    def __init__(
        self,
        prepared: Prepared,
        line: Line,
        memory_budget: int,
        threads: int,
        report: Report,
        stop: Callable[[], bool],
    ) -> None:
        self._prepared, self._line, self._report, self._stop = prepared, line, report, stop
        self._asked, self._state = prepared.asked, prepared.state
        self._files = {file.name: file for file in prepared.shards}
        self._folder = PackFolder(self._asked.dest, prepared.maker)
        effort = effort_of(prepared.maker, memory_budget, threads)
        self._packer = StreamPacker(
            self._folder, prepared.maker, effort, progress=report, stop=self._is_stopping
        )
        self._book = ShardBook({})
        self._coming: dict[Future[str], str] = {}
        self._waiting: list[str] = []  # shards to fetch, next first
        self._here: set[str] = set()  # shards that are needed and take disk space, or soon will
        self._is_idle = True  # nothing is on its way and nothing can be packed
        self._rate = _Rate()
        self._reported_s = 0.0

    def run(self) -> PackMeta:
        with (
            disk_errors(self._asked.dest, lambda: self._folder.done_words),
            contextlib.closing(self._folder),
            one_torch_thread(),
        ):
            self._folder.open(fingerprint(self._records()))
            self._packer.report()
            todo = self._packer.needs()
            while True:
                self._bring_and_pack(todo)
                redo = self._packer.finish_dense()
                if not redo:
                    return self._finish()
                todo = {unit: need for unit, need in self._packer.needs().items() if unit in redo}

    def paused(self) -> MoetError:
        """MD-PULL-01 with how far it is."""
        done, total = self._arrived(), self._prepared.figures.total
        return fail(
            "MD-PULL-01",
            model=self._asked.dest.name,
            done=show_disk(done),
            total=show_disk(total),
            done_bytes=done,
            total_bytes=total,
            rows=self._folder.n_done,
            n_rows=self._prepared.maker.plan.n_rows,
        )

    # -- shards in, rows out --------------------------------------------------------------------

    def _bring_and_pack(self, needs: dict[int, tuple[str, ...]]) -> None:
        plan = self._prepared.maker.plan
        first = plan.n_rows + len(plan.dense)
        # every shard counts for the identity, also one that holds nothing that is packed
        unhashed = [name for name in self._files if name not in self._state.landed]
        hashing: dict[int, tuple[str, ...]] = {
            first + i: (name,) for i, name in enumerate(unhashed)
        }
        self._book = ShardBook(needs | hashing)
        # what is here already takes disk space already, so it comes first
        self._waiting = sorted(self._book.wanted, key=lambda name: (not self._is_begun(name), name))
        with ThreadPoolExecutor(self._asked.parallel, thread_name_prefix="fetch") as pool:
            try:
                while self._waiting or self._coming:
                    self._start(pool)
                    landed = self._landed()
                    ready = [unit for name in landed for unit in self._book.land(name)]
                    self._work_on(sorted(ready), pool)
            finally:
                self._line.stop.set()
                self._coming = {}
        self._line.stop.clear()
        self._here.clear()

    def _start(self, pool: ThreadPoolExecutor) -> None:
        while self._waiting and len(self._coming) < self._asked.parallel:
            n_here = len(self._here)
            window = self._asked.window if self._asked.reclaim else n_here + 1
            if not may_start(n_here, window, idle=self._is_idle):
                return
            name = self._waiting.pop(0)
            self._here.add(name)
            self._coming[pool.submit(self._bring, self._files[name])] = name
            self._is_idle = False

    def _bring(self, file: RemoteFile) -> str:
        """In a fetching thread: have the file here and compared; returns its blake3."""
        work, line, listing = self._asked.work, self._line, self._prepared.listing
        ours = check_file(file, work / file.name, line)
        if ours is not None:
            return ours
        (work / file.name).unlink(missing_ok=True)
        cached = line.hub.cached(listing, file.name)
        if cached is not None:
            ours = check_file(file, cached, line)
            if ours is not None:
                (work / file.name).symlink_to(cached.absolute())
                return ours
        return fetch_file(line, listing, file, work)

    def _landed(self) -> list[str]:
        """Wait for files; the names of those that have arrived since."""
        done, _ = wait(self._coming, timeout=_TICK_S, return_when=FIRST_COMPLETED)
        self._tick()
        names = []
        for future in done:
            name = self._coming.pop(future)
            ours = future.result()
            self._attach(name)
            self._state = msgspec.structs.replace(
                self._state, landed={**self._state.landed, name: ours}
            )
            names.append(name)
        if names:
            write_state(self._asked.work, self._state)
        return sorted(names)

    def _attach(self, name: str) -> None:
        """Map a file that has landed; its header must be the one the plan was made from."""
        home = self._prepared.homes[name]
        if home.attach() == self._prepared.headers[name]:
            return
        home.detach()
        header_path(self._asked.work, name).unlink(missing_ok=True)
        size = show_disk(self._files[name].size)
        reason = "its header was fetched before and differs"
        raise fail("MD-PACK-02", file=name, reason=reason, attempts=1, size=size)

    def _work_on(self, units: list[int], pool: ThreadPoolExecutor) -> None:
        plan = self._prepared.maker.plan
        n_units = plan.n_rows + len(plan.dense)
        self._free(self._book.finish(unit for unit in units if unit >= n_units))
        self._is_idle = False
        for durable in self._packer.pack([unit for unit in units if unit < n_units]):
            self._free(self._book.finish(durable))
            self._start(pool)
            self._tick()
        self._tick()
        self._is_idle = not self._coming

    def _free(self, names: list[str]) -> None:
        """Shards that nobody needs any more."""
        for name in names:
            self._prepared.homes[name].detach()
            self._here.discard(name)
            if self._asked.reclaim:
                (self._asked.work / name).unlink(missing_ok=True)

    # -- the end --------------------------------------------------------------------------------

    def _finish(self) -> PackMeta:
        self._report(PackProgress(Phase.FINISH, 0, 1, "bytes"))
        work, dest = self._asked.work, self._asked.dest
        weights = [
            SourceFile(name, file.size, self._state.landed[name])
            for name, file in self._files.items()
        ]
        small = read_small(work)
        counted = [hash_bytes(name, small[name]) for name in IDENTITY_FILES if name in small]
        write_origin(
            dest, Origin(STATE_VERSION, self._state.repo, self._state.commit, self._records())
        )
        meta = self._folder.finish(small, identity_of([*weights, *counted]))
        if self._asked.reclaim:
            remove_download(work)
        self._report(PackProgress(Phase.FINISH, 1, 1, "bytes"))
        return meta

    def _records(self) -> list[FileRecord]:
        """The files that the pack is made from."""
        wanted = {*self._files, *IDENTITY_FILES, *MADE_FROM}
        return [file for file in self._state.files if file.name in wanted]

    # -- reports --------------------------------------------------------------------------------

    def _is_stopping(self) -> bool:
        return self._stop()

    def _tick(self) -> None:
        """Between any two steps: stop if asked, report now and then."""
        now_s = time.monotonic()
        if now_s - self._reported_s >= _REPORT_S:
            self._reported_s = now_s
            self._report(self._fetching(now_s))
        if self._stop():
            raise Stopped

    def _fetching(self, now_s: float) -> Fetching:
        return Fetching(
            done=self._arrived(),
            total=self._prepared.figures.total,
            rate=self._rate.update(now_s, self._line.arrived_bytes),
            files_done=sum(name in self._state.landed for name in self._files),
            n_files=len(self._files),
            retries=self._line.retries,
            trouble=self._line.trouble,
            disk=sum(map(self._taken, self._files)),
        )

    def _arrived(self) -> int:
        small = self._prepared.figures.total - sum(file.size for file in self._files.values())
        landed = self._state.landed
        return small + sum(
            file.size if name in landed else min(file.size, _size(self._asked.work / name))
            for name, file in self._files.items()
        )

    def _taken(self, name: str) -> int:
        """Disk space of a shard; a link into the library's cache takes none."""
        for path in (self._asked.work / name, self._asked.work / f"{name}{PART}"):
            with contextlib.suppress(OSError):
                return path.lstat().st_blocks * 512
        return 0

    def _is_begun(self, name: str) -> bool:
        return _size(self._asked.work / name) > 0


class _Rate:
    """Bytes per second, smoothed."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._bytes = 0
        self._rate: float | None = None

    def update(self, now_s: float, n_bytes: int) -> float | None:
        """The rate, given how many bytes have arrived by now."""
        if self._at_s is not None and now_s > self._at_s:
            passed_s = now_s - self._at_s
            newest = (n_bytes - self._bytes) / passed_s
            weight = min(1.0, passed_s / _RATE_S)
            before = newest if self._rate is None else self._rate
            self._rate = before + weight * (newest - before)
        self._at_s, self._bytes = now_s, n_bytes
        return self._rate


def _size(path: Path) -> int:
    """Bytes of a file that is here, or of as much of it as has arrived."""
    for place in (path, path.with_name(path.name + PART)):
        with contextlib.suppress(OSError):
            return place.stat().st_size
    return 0
