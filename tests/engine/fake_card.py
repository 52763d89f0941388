"""A card's driver in RAM: what is not mapped is full of rubbish, and the card may be full."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from moet_desk.engine.cuda.vmm import OUT_OF_MEMORY, DriverError
from moet_desk.units import MIB

RUBBISH = 0xA5


class FakeCard:
    """`MemoryDriver` over RAM.

    Attributes:
        free: bytes that can still be mapped.
        pieces: what is mapped, by address: bytes and handle.
        fails: calls that fail, by name, with the code that they give.
    """

    def __init__(self, free: int = 1 << 40, unit: int = 2 * MIB) -> None:
        self.free, self.unit = free, unit
        self.pieces: dict[int, tuple[int, int]] = {}
        self.ranges: dict[int, mmap.mmap] = {}
        self.fails: dict[str, int] = {}
        self.calls: list[str] = []

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise DriverError(name, self.fails[name], "CUDA_ERROR")

    def granularity(self) -> int:
        return self.unit

    def reserve(self, n_bytes: int) -> int:
        self._note("reserve")
        memory = mmap.mmap(-1, n_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.ranges[address] = memory
        self._spoil(address, n_bytes)
        return address

    def unreserve(self, address: int, n_bytes: int) -> None:
        self._note("unreserve")
        assert not any(address <= piece < address + n_bytes for piece in self.pieces)
        self.ranges.pop(address)

    def map(self, address: int, n_bytes: int) -> int:
        self._note("map")
        assert address not in self.pieces
        assert n_bytes % self.unit == 0
        if n_bytes > self.free:
            raise DriverError("cuMemCreate", OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY")
        self.free -= n_bytes
        handle = len(self.calls)
        self.pieces[address] = (n_bytes, handle)
        return handle

    def unmap(self, address: int, n_bytes: int, handle: int) -> None:
        self._note("unmap")
        assert self.calls[-2] in ("unmap", "settle"), "kernels may still run"
        assert self.pieces.pop(address) == (n_bytes, handle)
        self.free += n_bytes
        self._spoil(address, n_bytes)

    def settle(self) -> None:
        self._note("settle")

    def view(self, address: int, n_bytes: int) -> Tensor:
        assert address in self.pieces, "torch asks the driver what this address is"
        return torch.frombuffer(self.ranges[address], dtype=torch.uint8, count=n_bytes)

    @staticmethod
    def _spoil(address: int, n_bytes: int) -> None:
        ctypes.memset(address, RUBBISH, n_bytes)
