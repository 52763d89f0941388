"""Writing that survives kill -9, a full disk and a power cut; and one packer per folder.

Owns the order write - fsync - rename - fsync folder, the lock file, and the words for what a disk
refuses. Any thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moet_desk.errors import MoetError, fail
from moet_desk.errors.disk import unwritable
from moet_desk.store.pack_format import JOURNAL_FILE, LOCK_FILE
from moet_desk.units import show_disk

PARTIAL = ".partial"
"""Suffix of a file that is being written and has not replaced its old self yet."""

Buffer = bytes | bytearray | memoryview


def free_bytes(path: Path) -> int:
    """Free disk space for this user where `path` is or will be."""
    place = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize


def check_space(path: Path, need: int, *, what: str) -> None:
    """Whether `need` more bytes fit where `path` is or will be.

    Raises:
        MoetError: MD-DISK-01, with the figures.
    """
    have = free_bytes(path)
    if need > have:
        place = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
        raise fail(
            "MD-DISK-01",
            what=what,
            path=str(place),
            need=show_disk(need),
            have=show_disk(have),
            missing=show_disk(need - have),
            need_bytes=need,
            have_bytes=have,
        )


def allocated(path: Path) -> int:
    """Bytes a file takes on disk: less than its size while it is sparse."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


@contextmanager
def disk_errors(path: Path, done: Callable[[], str] = lambda: "a part") -> Iterator[None]:
    """Turn operating system errors while writing `path` into catalogue errors.

    Args:
        path: what is being written.
        done: says how far the work had come, e.g. "64 of 288 rows".

    Raises:
        MoetError: MD-DISK-02 the disk is full, MD-DISK-03 it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(path, error, done=done()) from error


def write_at(fd: int, data: Buffer, offset: int) -> None:
    """Write all of `data` at `offset`, however many calls it takes. Raises OSError."""
    left = memoryview(data)
    while left:
        n_written = os.pwrite(fd, left, offset)
        if n_written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left, offset = left[n_written:], offset + n_written


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, chunks: Iterable[Buffer], *, mode: int = 0o644) -> None:
    """Put a new file in the place of `path`: after a crash it is the old one or the whole new one.
    `mode` is that of the new one.

    Raises:
        OSError: the disk refused; `path` is unchanged.
    """
    partial = path.with_name(path.name + PARTIAL)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        at = 0
        for chunk in chunks:
            write_at(fd, chunk, at)
            at += len(chunk)
        os.fsync(fd)
    finally:
        os.close(fd)
    partial.replace(path)
    sync_folder(path.parent)


def write_new(path: Path, text: str) -> None:
    """Write a text into a file that must not be there yet.

    Raises:
        MoetError: MD-DISK-02 or MD-DISK-03; then the file is not there, or is another one's.
    """
    with disk_errors(path, lambda: "nothing"), path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink(missing_ok=True)
            raise


@contextmanager
def pack_lock(folder: Path) -> Iterator[None]:
    """Be the only process that writes this pack folder.

    The lock goes with the process, so a killed packer leaves none behind.

    Raises:
        MoetError: MD-PACK-09 another process has it; MD-DISK-02 or 03 no lock file can be made.
    """
    path = folder / LOCK_FILE
    with disk_errors(path):
        fd = _locked(path)
    try:
        yield
    finally:
        if _is_same_file(fd, path):  # else the folder was moved away meanwhile
            path.unlink(missing_ok=True)  # while it is held, so nobody else can have locked it
        os.close(fd)


def leftovers(pack: Path) -> list[Path]:
    """Files that only a pack in the making needs."""
    return [*pack.glob(f"*{PARTIAL}"), *pack.glob(JOURNAL_FILE)]


def clear_leftovers(pack: Path) -> None:
    """Remove what a process that was killed behind its last step left in a complete pack.

    Raises:
        MoetError: as `pack_lock`.
        OSError: the disk refused.
    """
    if not (leftovers(pack) or (pack / LOCK_FILE).exists()):
        return
    with pack_lock(pack):  # nobody writes it now; the lock file goes with it
        for path in leftovers(pack):
            path.unlink(missing_ok=True)


def _locked(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the last owner may have removed the file between our open and our lock
            if _is_same_file(fd, path):
                os.truncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
                return fd
        except BlockingIOError as error:
            taken = _taken(path, fd)
            os.close(fd)
            raise taken from error
        except OSError:
            os.close(fd)
            raise
        os.close(fd)


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _taken(path: Path, fd: int) -> MoetError:
    pid = os.pread(fd, 32, 0).decode("ascii", "replace") or "?"
    return fail("MD-PACK-09", path=str(path.parent), pid=pid)
