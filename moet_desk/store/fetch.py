"""Fetching files so that no byte is fetched twice without need, and none is believed unchecked.

Owns retries, resuming, the bandwidth limit and the comparison with the hub's hashes. A file grows
beside its place as NAME.part, is synced, compared, and renamed; what is under its own name was
compared once. Many threads fetch at a time and share one `Line`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import blake3

from moet_desk.errors import MoetError, fail
from moet_desk.store.durable import disk_errors, free_bytes, replace_file, sync_folder, write_at
from moet_desk.store.hub import Hub, Listing, Passing, RemoteFile
from moet_desk.units import MIB, show_disk

PART = ".part"
"""Suffix of a file that has not arrived as a whole."""

_T = TypeVar("_T")
SizeOf = Callable[[bytes], int]

_READ_BYTES = 8 * MIB
_FIRST_HEADER_BYTES = 64 * 1024  # most headers fit: one request each


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a failing hub is asked again before the job is paused."""

    attempts: int = 8  # without a byte of progress in between
    first_s: float = 1.0  # doubled each time
    longest_s: float = 60.0
    obeyed_s: float = 300.0  # a server that asks for longer gets its wish: the job is paused
    fetches: int = 3  # of one file whose checksum is wrong


class Limiter:
    """At most so many bytes per second, over all threads; no burst after a pause or a sleep."""

    def __init__(
        self, bytes_per_s: float | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._now = now
        self._free_at_s = now()
        self._lock = threading.Lock()

    def delay_s(self, n_bytes: int) -> float:
        """Book `n_bytes` and return how long to wait before going on."""
        if not self.bytes_per_s:
            return 0.0
        with self._lock:
            now_s = self._now()
            start_s = max(self._free_at_s, now_s)  # time that was not used is not saved up
            self._free_at_s = start_s + n_bytes / self.bytes_per_s
            return self._free_at_s - now_s


class Stopped(Exception):
    """The fetch was asked to stop; what has arrived is kept."""


@dataclass(slots=True)
class Line:
    """What all fetches of one job share. The counters are guarded by `lock`."""

    hub: Hub
    patience: Patience = Patience()
    limiter: Limiter = field(default_factory=lambda: Limiter(None))
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    arrived_bytes: int = 0  # of this run, over all files
    retries: int = 0
    trouble: str = ""  # words of the last failure; empty while bytes arrive

    def count(self, n_bytes: int) -> None:
        """Note that bytes arrived."""
        with self.lock:
            self.arrived_bytes += n_bytes
            self.trouble = ""

    def wait(self, seconds: float) -> None:
        """Sleep, unless asked to stop.

        Raises:
            Stopped: the fetches of this job are to end.
        """
        if self.stop.wait(seconds) if seconds > 0 else self.stop.is_set():
            raise Stopped

    def patiently(self, work: Callable[[], _T], progress: Callable[[], int] = lambda: 0) -> _T:
        """Do `work`, again and again while it fails in passing.

        Args:
            work: raises `Passing` to be tried again.
            progress: a number that grows when an attempt brought something. Growth, and a sleep
                of the computer, make the counting of attempts start anew.

        Raises:
            MoetError: it kept failing.
            Stopped: as `wait`.
        """
        attempts, before, slept_s = 0, progress(), _slept_s()
        while True:
            self.wait(0)
            try:
                return work()
            except Passing as passing:
                self._note(passing)
                if progress() > before or _slept_s() > slept_s + 1:
                    attempts, before, slept_s = 0, progress(), _slept_s()
                attempts += 1
                wait_s = passing.wait_s
                if wait_s is None:
                    steps = self.patience.first_s * 2 ** (attempts - 1)
                    wait_s = min(steps, self.patience.longest_s) * random.uniform(0.5, 1)
                if attempts >= self.patience.attempts or wait_s > self.patience.obeyed_s:
                    facts = {**passing.error.facts, "attempts": attempts}
                    raise fail(passing.error.code, **facts) from passing
                self.wait(wait_s)

    def _note(self, passing: Passing) -> None:
        with self.lock:
            self.retries += 1
            self.trouble = passing.error.cause


def _slept_s() -> float:
    """Seconds this computer has spent suspended since it was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


# -- whole files ---------------------------------------------------------------------------------


def fetch_file(line: Line, listing: Listing, file: RemoteFile, folder: Path) -> str:
    """Bring a file into `folder`, going on where an earlier run stopped.

    Returns:
        The blake3 of its bytes in hex.

    Raises:
        MoetError: MD-NET-.., MD-HUB-.. of the hub; MD-PACK-02 the bytes stay wrong; MD-DISK-02 or
            03 the disk.
        Stopped: what has arrived is kept.
    """
    place = folder / file.name
    part = place.with_name(place.name + PART)
    for left in range(line.patience.fetches, 0, -1):
        with disk_errors(place, lambda: f"{show_disk(_size(part))} of {show_disk(file.size)}"):
            hashes = _Hashes(file)
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _fill(line, listing, file, _Part(fd, hashes, place))
                os.fsync(fd)
            finally:
                os.close(fd)
            reason = hashes.difference(file)
            if not reason:
                part.replace(place)
                sync_folder(folder)
                return hashes.blake3
            part.unlink()  # one hash for all of it: nobody can say which bytes are wrong
        if left == 1:
            raise _wrong(file, reason, line.patience.fetches)
    raise AssertionError("at least one fetch is allowed")


def check_file(file: RemoteFile, path: Path, line: Line) -> str | None:
    """The blake3 of a file that lies here already; None: it is not that file.

    Raises:
        Stopped: asked to stop.
    """
    if _size(path) != file.size:
        return None
    hashes = _Hashes(file)
    with contextlib.suppress(OSError), path.open("rb", buffering=0) as there:
        buffer = bytearray(_READ_BYTES)
        while n_read := there.readinto(buffer):
            line.wait(0)
            hashes.update(memoryview(buffer)[:n_read])
    return None if hashes.difference(file) else hashes.blake3


class _Hashes:
    """The hub's hash and our own of bytes as they pass."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self.n_bytes = 0
        if file.sha256:
            self._theirs = hashlib.sha256()
        else:  # git's hash of a small file; no defence against forgery, only against damage
            start = b"blob %d\0" % file.size
            self._theirs = hashlib.sha1(start, usedforsecurity=False)
        self._ours = blake3.blake3(max_threads=1)

    def update(self, data: bytes | memoryview) -> None:
        self.n_bytes += len(data)
        self._theirs.update(data)
        self._ours.update(data)

    @property
    def blake3(self) -> str:
        return self._ours.hexdigest()

    def difference(self, file: RemoteFile) -> str:
        """Why these are not the bytes of `file`; empty: they are."""
        if self.n_bytes != file.size:
            return f"it has {self.n_bytes} bytes instead of {file.size}"
        got, want = self._theirs.hexdigest(), file.sha256 or file.git_sha1
        return "" if got == want else f"its hash is {got[:12]}, {want[:12]} is expected"


@dataclass(slots=True)
class _Part:
    """An open .part file; `hashes` have seen everything before `hashes.n_bytes`."""

    fd: int
    hashes: _Hashes
    place: Path


def _fill(line: Line, listing: Listing, file: RemoteFile, part: _Part) -> None:
    """Make the part file complete."""
    _read_back(line, file, part)
    left = file.size - part.hashes.n_bytes
    have = free_bytes(part.place)
    if left > have:
        needs = f"{show_disk(part.hashes.n_bytes)}; {show_disk(left)} more are needed"
        done = f"{needs} and {show_disk(have)} are free"
        raise fail("MD-DISK-02", path=str(part.place), done=done, need_bytes=left, have_bytes=have)

    def attempt() -> None:
        while part.hashes.n_bytes < file.size:
            _append(line, listing, file, part)

    line.patiently(attempt, lambda: part.hashes.n_bytes)


def _read_back(line: Line, file: RemoteFile, part: _Part) -> None:
    """Hash what an earlier run left; more than the file's size is of no use."""
    size = os.fstat(part.fd).st_size
    if size > file.size:
        os.ftruncate(part.fd, 0)
        return
    while part.hashes.n_bytes < size:
        line.wait(0)
        data = os.pread(part.fd, _READ_BYTES, part.hashes.n_bytes)
        if not data:
            break
        part.hashes.update(data)


def _append(line: Line, listing: Listing, file: RemoteFile, part: _Part) -> None:
    """One request, and its bytes at the end of the part file."""
    start = part.hashes.n_bytes
    with line.hub.open(listing, file.name, start=start, end=None) as body:
        if body.start != start:
            if body.start != 0:
                raise _nonsense(line, f"asked for {file.name} from byte {start}, got another part")
            # everything from the start again: what is here must not be appended to
            os.ftruncate(part.fd, 0)
            part.hashes = _Hashes(file)
        for chunk in body.chunks():
            wanted = memoryview(chunk)[: file.size - part.hashes.n_bytes]
            write_at(part.fd, wanted, part.hashes.n_bytes)
            part.hashes.update(wanted)
            line.count(len(chunk))
            line.wait(line.limiter.delay_s(len(chunk)))
            if len(wanted) < len(chunk):
                return  # more than the file has: its hash decides
    if part.hashes.n_bytes == start:
        raise _nonsense(line, f"sent nothing of {file.name}")


# -- headers -------------------------------------------------------------------------------------


def fetch_start(line: Line, listing: Listing, file: RemoteFile, size_of: SizeOf) -> bytes:
    """The first bytes of a file, as many as `size_of` says when it sees the beginning.

    Raises:
        MoetError: as `fetch_file`, and what `size_of` raises.
        Stopped: asked to stop.
    """
    data = bytearray()

    def attempt() -> None:
        want = min(_FIRST_HEADER_BYTES, file.size)
        while len(data) < want:
            n_before = len(data)
            with line.hub.open(listing, file.name, start=n_before, end=want) as body:
                if body.start == 0:
                    data.clear()
                elif body.start != n_before:
                    raise _nonsense(line, f"sent another part of {file.name}")
                for chunk in body.chunks():
                    data.extend(chunk)
                    line.wait(line.limiter.delay_s(len(chunk)))
                    if len(data) >= want:
                        break
            if len(data) <= n_before:
                raise _nonsense(line, f"sent nothing of {file.name}")
            want = max(want, size_of(bytes(data)))

    line.patiently(attempt, lambda: len(data))
    return bytes(data[: size_of(bytes(data))])


def fetch_span(
    line: Line, listing: Listing, file: RemoteFile, span: range, write: Callable[[bytes, int], None]
) -> None:
    """Bring the bytes of a file at the places `span`, and hand them in order to `write`, with the
    place of the first. Nobody has a checksum of a part: the caller has to know them.

    Raises:
        MoetError, Stopped: as `fetch_file`.
    """
    at = span.start

    def attempt() -> None:
        nonlocal at
        while at < span.stop:
            before = at
            with line.hub.open(listing, file.name, start=at, end=span.stop) as body:
                if body.start not in (0, at):
                    raise _nonsense(line, f"sent another part of {file.name}")
                place = body.start
                for chunk in body.chunks():
                    line.count(len(chunk))
                    line.wait(line.limiter.delay_s(len(chunk)))
                    wanted = chunk[max(0, at - place) : max(0, span.stop - place)]
                    place += len(chunk)
                    if wanted:
                        write(wanted, at)
                        at += len(wanted)
                    if at >= span.stop:
                        break
            if at == before:
                raise _nonsense(line, f"sent nothing of {file.name}")

    line.patiently(attempt, lambda: at)


def save(path: Path, data: bytes) -> None:
    """Keep a small file durably. Raises MD-DISK-02 or 03."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [data])


def _nonsense(line: Line, reason: str) -> Passing:
    facts: dict[str, Any] = {"host": line.hub.host, "reason": reason}
    return Passing(fail("MD-NET-01", **facts))


def _wrong(file: RemoteFile, reason: str, attempts: int) -> MoetError:
    size = show_disk(file.size)
    return fail("MD-PACK-02", file=file.name, reason=reason, attempts=attempts, size=size)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
