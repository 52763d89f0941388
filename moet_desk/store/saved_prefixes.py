"""Chunks of prompts on disk, so that a long chat comes back at once after a restart.

One file per chunk, named by its key: a header with a checksum, then the bytes. It is a cache: what
is damaged, of another version or cannot be written is dropped and said in the log, and the prompt
is read again. The longest unused files go when all of them take more than they may.

Files are written by a thread of their own; the rest belongs to one thread.
"""

from __future__ import annotations

import logging
import os
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from moet_desk.errors import MoetError
from moet_desk.store.durable import PARTIAL, disk_errors

log = logging.getLogger("moet_desk.store")

MAGIC = b"MOETPFX1"
_HEADER = struct.Struct("<8sQ32s")  # magic, bytes that follow, their blake3
SUFFIX = ".kv"
WAITING_BYTES = 256 * 2**20
"""Most bytes that wait to be written: on a slow drive what comes then is not saved."""


class SavedPrefixes:
    """See `engine.prefix_cache.Saved`.

    Args:
        folder: where the files are; made when the first one is written.
        n_bytes: most bytes of all files together.

    Attributes:
        n_damaged: files that were dropped because their bytes were wrong.
    """

    def __init__(self, folder: Path, *, n_bytes: int) -> None:
        self._folder, self._most = folder, n_bytes
        self.n_damaged = 0
        self._gave_up = False
        self._sizes = _sizes(folder)  # the oldest first
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prefix-writer")
        self._writes: dict[str, tuple[Future[None], int]] = {}
        self._drop_oldest()

    def read(self, key: bytes) -> NDArray[np.uint8] | None:
        """See `engine.prefix_cache.Saved`."""
        self._take_back()
        name = key.hex() + SUFFIX
        if name not in self._sizes:
            return None
        path = self._folder / name
        try:
            data = np.fromfile(path, dtype=np.uint8)
            os.utime(path)
        except OSError as error:  # another process dropped it, or the drive is gone
            log.info("a saved prompt is gone: %s", error.strerror)
            del self._sizes[name]
            return None
        body = _checked(data)
        if body is None:
            self.n_damaged += 1
            log.warning("a saved prompt was damaged and is read anew: %s", name)
            self._forget(name)
            return None
        self._sizes[name] = self._sizes.pop(name)
        return body

    def write(self, key: bytes, entries: NDArray[np.uint8]) -> None:
        """See `engine.prefix_cache.Saved`."""
        self._take_back()
        name, size = key.hex() + SUFFIX, _HEADER.size + entries.nbytes
        waiting = sum(n for _, n in self._writes.values())
        if name in self._sizes or name in self._writes:
            return
        if not self._gave_up and waiting + size <= WAITING_BYTES and size <= self._most:
            self._writes[name] = (self._writer.submit(self._write, name, entries), size)

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.shutdown()
        self._take_back()

    def _take_back(self) -> None:
        """Count what has been written; after a failure nothing more is."""
        for name, (write, size) in list(self._writes.items()):
            if not write.done():
                continue
            del self._writes[name]
            try:
                write.result()
                self._sizes[name] = size
            except MoetError as error:
                self._gave_up = True
                log.warning("prompts are no longer saved: %s", error)
        self._drop_oldest()

    def _write(self, name: str, entries: NDArray[np.uint8]) -> None:
        """In the writer's thread."""
        path = self._folder / name
        partial = path.with_name(name + PARTIAL)
        data = np.ascontiguousarray(entries).reshape(-1).data
        header = _HEADER.pack(MAGIC, data.nbytes, blake3(data).digest())
        with disk_errors(path):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(header)
                    file.write(data)
                partial.replace(path)
            except OSError:
                partial.unlink(missing_ok=True)
                raise

    def _drop_oldest(self) -> None:
        total = sum(self._sizes.values())
        for name in list(self._sizes):
            if total <= self._most:
                return
            total -= self._sizes[name]
            self._forget(name)

    def _forget(self, name: str) -> None:
        del self._sizes[name]
        with suppress(OSError):  # a folder that became read-only
            (self._folder / name).unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Remove all saved prompts.

    Raises:
        MoetError: MD-DISK-03, one cannot be removed.
    """
    with disk_errors(folder):
        _remove_all(folder)


def _remove_all(folder: Path) -> None:
    for path in folder.glob(f"*{SUFFIX}*"):
        path.unlink(missing_ok=True)


def _sizes(folder: Path) -> dict[str, int]:
    """Files by age. What a killed writer left half done goes."""
    found = []
    for path in folder.glob(f"*{SUFFIX}*"):
        with suppress(OSError):  # it went meanwhile, or cannot be removed
            if path.name.endswith(PARTIAL):
                path.unlink()
                continue
            about = path.stat()
            found.append((about.st_mtime_ns, path.name, about.st_size))
    return {name: size for _, name, size in sorted(found)}


def _checked(data: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """The bytes behind a header that is right about them."""
    if len(data) < _HEADER.size:
        return None
    magic, n_bytes, digest = _HEADER.unpack(data[: _HEADER.size].tobytes())
    body = data[_HEADER.size :]
    if magic != MAGIC or len(body) != n_bytes or blake3(body.data).digest() != digest:
        return None
    return body
