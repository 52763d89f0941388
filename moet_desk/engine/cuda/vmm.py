"""Memory of a card that grows and shrinks at a fixed address: the driver's virtual memory.

A range of addresses is reserved once; pieces of memory are mapped at its beginning and unmapped
again. So captured graphs, which hold addresses, stay valid (docs/adr/0017). torch knows the memory
as a tensor over the whole range; what is not mapped must not be touched. The engine thread's, whose
CUDA context is torch's.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Protocol

import torch
from torch import Tensor

from moet_desk.units import GIB, MIB

OUT_OF_MEMORY = 2  # CUresult of cuMemCreate when the card has none left

SMALL_PIECE, LARGE_PIECE = 2 * MIB, 64 * MIB
LARGE_FROM = 4 * GIB
"""Ranges from this size on get large pieces: a handful of calls per GiB. Others keep small ones, so
that a small pool can give something back at all."""

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3  # of cuda.h: allocation type, location, access
_HAS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


class DriverError(Exception):
    """A call of the driver that failed: its name, and the CUresult as number and word."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call, self.code, self.name = call, code, name


class MemoryDriver(Protocol):
    """What is asked of the driver. Every call raises `DriverError`."""

    def granularity(self) -> int:
        """Bytes of which pieces must be multiples."""
        ...

    def reserve(self, n_bytes: int) -> int:
        """Addresses without memory behind them; returns the first."""
        ...

    def unreserve(self, address: int, n_bytes: int) -> None:
        """Give addresses back; nothing may be mapped there."""
        ...

    def map(self, address: int, n_bytes: int) -> int:
        """Put new memory behind reserved addresses; returns its handle."""
        ...

    def unmap(self, address: int, n_bytes: int, handle: int) -> None:
        """Take that memory away again and give it back to the card."""
        ...

    def settle(self) -> None:
        """Wait until nothing that was launched runs any more."""
        ...

    def view(self, address: int, n_bytes: int) -> Tensor:
        """uint8 [n_bytes] over addresses whose beginning is mapped."""
        ...


class GrowableMemory:
    """A reserved range and the memory that is mapped at its beginning.

    Args:
        driver: of the card.
        most: bytes of the range.

    Raises:
        DriverError: the addresses cannot be had.
    """

    def __init__(self, driver: MemoryDriver, most: int) -> None:
        self._driver = driver
        unit = driver.granularity()
        wanted = LARGE_PIECE if most >= LARGE_FROM else SMALL_PIECE
        self._piece = -(-wanted // unit) * unit
        self._range = -(-most // self._piece) * self._piece
        self._address = driver.reserve(self._range)
        self._handles: list[int] = []
        self._lost = False  # a piece of the range is in an unknown state

    @property
    def mapped(self) -> int:
        """Bytes that may be used."""
        return len(self._handles) * self._piece

    def resize(self, n_bytes: int) -> int:
        """Map or unmap at the end until `n_bytes` are there, in whole pieces.

        Returns:
            `mapped`: less than asked for if the card has no more.

        Raises:
            DriverError: anything but a full card. `mapped` tells what is there then.
        """
        wanted = -(-min(n_bytes, self._range) // self._piece)
        if wanted < len(self._handles):
            self._driver.settle()  # kernels and copies in flight may use what goes
        while len(self._handles) > wanted:
            handle = self._handles.pop()  # first: what half went away is used no more
            at = self._address + len(self._handles) * self._piece
            try:
                self._driver.unmap(at, self._piece, handle)
            except DriverError:
                self._lost = True
                raise
        while len(self._handles) < wanted:
            at = self._address + len(self._handles) * self._piece
            try:
                self._handles.append(self._driver.map(at, self._piece))
            except DriverError as error:
                if error.code == OUT_OF_MEMORY:
                    break
                raise
        return self.mapped

    def view(self, n_bytes: int) -> Tensor:
        """uint8 [n_bytes] from the beginning on; some of it must be mapped."""
        return self._driver.view(self._address, n_bytes)

    def close(self) -> None:
        """Give everything back. Views must not be used any more.

        Raises:
            DriverError: the driver is in a state in which it gives nothing back.
        """
        self.resize(0)
        if not self._lost:
            self._driver.unreserve(self._address, self._range)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Properties(ctypes.Structure):
    """CUmemAllocationProp of cuda.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc of cuda.h."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Shown:
    """What torch takes for an array on the card."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (n_bytes,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


class CudaDriver:
    """`MemoryDriver` of the card that torch uses.

    Args:
        device: the card.
        library: libcuda, loaded; the tests hand in one of their own.

    Raises:
        DriverError: the driver cannot map memory by itself on this card.
    """

    def __init__(self, device: torch.device, library: Any) -> None:
        self._library, self._device = library, device
        index = device.index
        number = int(torch.cuda.current_device()) if index is None else index
        ordinal, has = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(ordinal), number)
        self._call("cuDeviceGetAttribute", ctypes.byref(has), _HAS_VIRTUAL_MEMORY, ordinal)
        if not has.value:
            raise DriverError("cuDeviceGetAttribute", 801, "no virtual memory management")
        location = _Location(_ON_DEVICE, ordinal.value)
        self._properties = Properties(type=_PINNED, location=location)
        self._access = Access(location=location, flags=_READ_WRITE)

    def granularity(self) -> int:
        """See `MemoryDriver`."""
        found = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(found), ctypes.byref(self._properties), 0,
        )  # fmt: skip
        return found.value

    def reserve(self, n_bytes: int) -> int:
        """See `MemoryDriver`."""
        address, size = ctypes.c_uint64(), ctypes.c_size_t(n_bytes)
        nothing = ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address), size, ctypes.c_size_t(0), nothing, nothing,
        )  # fmt: skip
        return address.value

    def unreserve(self, address: int, n_bytes: int) -> None:
        """See `MemoryDriver`."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(n_bytes))

    def map(self, address: int, n_bytes: int) -> int:
        """See `MemoryDriver`."""
        handle, size, at = ctypes.c_uint64(), ctypes.c_size_t(n_bytes), ctypes.c_uint64(address)
        nothing = ctypes.c_uint64(0)
        properties = ctypes.byref(self._properties)
        self._call("cuMemCreate", ctypes.byref(handle), size, properties, nothing)
        try:
            self._call("cuMemMap", at, size, ctypes.c_size_t(0), handle, nothing)
        except DriverError:
            self._call("cuMemRelease", handle)
            raise
        try:
            self._call("cuMemSetAccess", at, size, ctypes.byref(self._access), ctypes.c_size_t(1))
        except DriverError:
            self.unmap(address, n_bytes, handle.value)
            raise
        return handle.value

    def unmap(self, address: int, n_bytes: int, handle: int) -> None:
        """See `MemoryDriver`."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(n_bytes))
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def settle(self) -> None:
        """See `MemoryDriver`."""
        torch.cuda.synchronize(self._device)

    def view(self, address: int, n_bytes: int) -> Tensor:
        """See `MemoryDriver`."""
        tensor = torch.as_tensor(_Shown(address, n_bytes), device=self._device)
        if tensor.data_ptr() != address or tensor.numel() != n_bytes:
            raise DriverError("torch.as_tensor", 0, "torch made a copy")
        return tensor

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            raise DriverError(name, code, self._word(code))

    def _word(self, code: int) -> str:
        word = ctypes.c_char_p()
        if self._library.cuGetErrorName(code, ctypes.byref(word)) or word.value is None:
            return "unknown error"
        return word.value.decode("ascii", "replace")


def cuda_driver(device: torch.device) -> CudaDriver:
    """The driver of a card.

    Raises:
        DriverError: it cannot map memory by itself.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise DriverError(name, 0, str(error)) from error
    try:
        return CudaDriver(device, library)
    except AttributeError as error:  # a driver from before 10.2
        raise DriverError(name, 0, str(error)) from error
