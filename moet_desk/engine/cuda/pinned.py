"""Pinned memory: our own page-aligned mapping, registered with the driver in pieces of 1 GiB.

torch's pinned allocator rounds up to powers of two and cannot hold an arena. Registering in pieces
shows progress and finds a limit (RLIMIT_MEMLOCK, WSL) without touching the rest. The driver would
have the pages of a piece made one after another; several threads make them before. If a piece is
refused everything is undone and the caller gets a catalogue error: pageable memory is never used
silently.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from moet_desk.errors import fail
from moet_desk.units import GIB, MIB, show_memory

PIECE_BYTES = GIB
_MAPPED = 2  # cudaHostRegisterMapped: kernels may read the memory at the same address

TOUCHING_THREADS = 8
"""Measured on 2 cores: two threads make pages twice as fast as one."""

_HUGE_BYTES = 2 * MIB  # of a page, where the system has such
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # <asm-generic/mman-common.h>

Register = Callable[[int, int], int]
Unregister = Callable[[int], int]


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def cuda_register(address: int, n_bytes: int) -> int:
    """Register memory with the driver. Returns a cudaError_t, 0 for success."""
    return int(_runtime().cudaHostRegister(address, n_bytes, _MAPPED))


def cuda_unregister(address: int) -> int:
    """Undo `cuda_register` for the piece that begins at `address`."""
    return int(_runtime().cudaHostUnregister(address))


def make_present(address: int, n_bytes: int) -> None:
    """Have the system make the pages of memory, with several threads; large pages if it can.

    A hint: where it is refused (Linux before 5.14) pages are made when they are first used.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise(address, n_bytes, _MADV_HUGEPAGE)
    share = -(-n_bytes // (TOUCHING_THREADS * _HUGE_BYTES)) * _HUGE_BYTES

    def touch(at: int) -> None:
        advise(address + at, min(share, n_bytes - at), _MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(TOUCHING_THREADS) as threads:
        list(threads.map(touch, range(0, n_bytes, share)))


@dataclass(slots=True)
class PinnedMemory:
    """Makes registered mappings and releases them all at the end.

    `touch` is called with address and size of a piece before it is registered, `progress` with its
    bytes afterwards. Not thread-safe; the engine thread's.
    """

    register: Register = cuda_register
    unregister: Unregister = cuda_unregister
    progress: Callable[[int], None] = lambda _: None
    touch: Callable[[int, int], None] = make_present
    _pieces: list[int] = field(default_factory=list)
    _mappings: list[mmap.mmap] = field(default_factory=list)

    def allocate(self, n_bytes: int, unit: int = mmap.PAGESIZE) -> mmap.mmap:
        """A zeroed mapping that the device can read and write in place.

        Args:
            n_bytes: size.
            unit: pieces end at multiples of this many bytes, whole pages: the driver refuses a
                copy that begins in one piece and ends in another.

        Raises:
            MoetError: MD-RAM-02, the driver refused; nothing of this mapping stays registered.
        """
        memory = mmap.mmap(-1, n_bytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        done: list[int] = []
        piece = max(unit, PIECE_BYTES // unit * unit)
        for at in range(0, n_bytes, piece):
            size = min(piece, n_bytes - at)
            self.touch(start + at, size)
            status = self.register(start + at, size)
            if status != 0:
                for address in reversed(done):
                    self.unregister(address)
                held = len(self._pieces) + len(done)
                raise fail(
                    "MD-RAM-02",
                    want=show_memory(n_bytes),
                    got=show_memory(held * PIECE_BYTES),
                    status=status,
                )
            done.append(start + at)
            self.progress(size)
        self._pieces += done
        self._mappings.append(memory)
        return memory

    def release(self) -> None:
        """Unregister everything; the mappings go with their last view."""
        for address in reversed(self._pieces):
            self.unregister(address)
        self._pieces.clear()
        self._mappings.clear()
