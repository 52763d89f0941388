"""Memory at a fixed address that grows and shrinks: pieces, faults, and what the driver is told."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from moet_desk.engine.cuda.vmm import (
    LARGE_FROM,
    LARGE_PIECE,
    OUT_OF_MEMORY,
    SMALL_PIECE,
    Access,
    CudaDriver,
    DriverError,
    GrowableMemory,
    Properties,
    cuda_driver,
)
from moet_desk.units import MIB
from tests.engine.fake_card import RUBBISH, FakeCard

P = SMALL_PIECE


def test_resize__up_and_down__whole_pieces_at_one_address() -> None:
    card = FakeCard(free=100 * P)
    memory = GrowableMemory(card, 10 * P + 1)
    assert memory.mapped == 0
    assert [memory.resize(n) for n in (1, P, P + 1, 5 * P, 100 * P)] == [
        P, P, 2 * P, 5 * P, 11 * P,
    ]  # fmt: skip
    view = memory.view(10 * P)
    first = view.data_ptr()
    assert sorted(card.pieces) == [first + i * P for i in range(11)]
    view[: 3 * P] = 7
    assert memory.resize(2 * P + 1) == 3 * P
    assert sorted(card.pieces) == [first + i * P for i in range(3)]
    assert card.free == 97 * P
    assert view[3 * P] == RUBBISH
    assert memory.resize(4 * P) == 4 * P
    assert bool((view[: 3 * P] == 7).all())


def test_resize__shrinking__waits_for_kernels_first_growing_does_not() -> None:
    card = FakeCard()
    memory = GrowableMemory(card, 8 * P)
    memory.resize(8 * P)
    assert "settle" not in card.calls
    memory.resize(6 * P)
    assert card.calls[-3:] == ["settle", "unmap", "unmap"]
    memory.resize(6 * P)
    assert card.calls.count("settle") == 1


def test_resize__card_is_full__takes_what_there_is() -> None:
    card = FakeCard(free=3 * P)
    memory = GrowableMemory(card, 8 * P)
    assert memory.resize(8 * P) == 3 * P
    card.free += 2 * P
    assert memory.resize(8 * P) == 5 * P
    assert card.free == 0


def test_resize__driver_refuses_to_map__raised_and_what_was_there_stays() -> None:
    card = FakeCard()
    memory = GrowableMemory(card, 8 * P)
    memory.resize(2 * P)
    card.fails["map"] = 700
    with pytest.raises(DriverError, match=r"map: CUDA_ERROR \(700\)"):
        memory.resize(4 * P)
    assert memory.mapped == 2 * P


def test_resize__driver_refuses_to_unmap__that_piece_is_used_no_more() -> None:
    card = FakeCard()
    memory = GrowableMemory(card, 8 * P)
    memory.resize(4 * P)
    card.fails["unmap"] = 700
    with pytest.raises(DriverError):
        memory.resize(P)
    assert memory.mapped == 3 * P
    card.fails.clear()
    memory.close()  # but its addresses stay taken: something may still be there
    assert len(card.pieces) == 1
    assert "unreserve" not in card.calls


def test_close__everything__goes_back() -> None:
    card = FakeCard(free=9 * P)
    memory = GrowableMemory(card, 8 * P)
    memory.resize(5 * P)
    memory.close()
    assert (card.free, card.pieces, card.ranges) == (9 * P, {}, {})


@pytest.mark.parametrize(
    ("most", "unit", "piece"),
    [
        (LARGE_FROM - 1, 2 * MIB, SMALL_PIECE),
        (LARGE_FROM, 2 * MIB, LARGE_PIECE),
        (10 * MIB, 4 * MIB, 4 * MIB),
        (LARGE_FROM, 48 * MIB, 96 * MIB),
    ],
)
def test_pieces__large_for_large_pools__multiples_of_the_drivers_unit(
    most: int, unit: int, piece: int
) -> None:
    card = FakeCard(unit=unit)
    card.reserve = lambda n_bytes: 1 << 40  # type: ignore[method-assign]
    card.unmap = lambda *given: None  # type: ignore[method-assign]
    memory = GrowableMemory(card, most)
    assert memory.resize(1) == piece


class Library:
    """libcuda, as far as it is called: notes calls, and fails those that it is told to."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.has_virtual_memory = 1

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*given: Any) -> int:
            values = tuple(one._obj if hasattr(one, "_obj") else one for one in given)
            return self._answer(name, values)

        return call

    def _answer(self, name: str, values: tuple[Any, ...]) -> int:
        if name == "cuGetErrorName":
            values[1].value = {2: b"CUDA_ERROR_OUT_OF_MEMORY"}.get(values[0])
            return 0 if values[1].value else 1
        self.calls.append((name, values))
        match name:
            case "cuDeviceGet":
                values[0].value = values[1] + 5
            case "cuDeviceGetAttribute":
                assert values[1] == 102
                values[0].value = self.has_virtual_memory
            case "cuMemGetAllocationGranularity":
                values[0].value = 2 * MIB
            case "cuMemAddressReserve":
                values[0].value = 1 << 44
            case "cuMemCreate":
                values[0].value = 77
            case _:
                pass
        return self.codes.get(name, 0)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def given(self, name: str) -> tuple[Any, ...]:
        return next(values for called, values in self.calls if called == name)


DEVICE = torch.device("cuda", 1)


def numbers(values: tuple[Any, ...]) -> list[int]:
    return [one.value for one in values if not isinstance(one, ctypes.Structure)]


def test_driver__map_and_unmap__the_calls_of_cuda_h() -> None:
    library = Library()
    driver = CudaDriver(DEVICE, library)
    assert driver.granularity() == 2 * MIB
    assert driver.reserve(8 * P) == 1 << 44
    handle = driver.map((1 << 44) + P, P)
    driver.unmap((1 << 44) + P, P, handle)
    driver.unreserve(1 << 44, 8 * P)
    assert library.names()[2:] == [
        "cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemCreate", "cuMemMap",
        "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree",
    ]  # fmt: skip
    assert numbers(library.given("cuMemAddressReserve")) == [1 << 44, 8 * P, 0, 0, 0]
    assert numbers(library.given("cuMemCreate")) == [77, P, 0]
    assert numbers(library.given("cuMemMap")) == [(1 << 44) + P, P, 0, 77, 0]
    assert numbers(library.given("cuMemSetAccess")) == [(1 << 44) + P, P, 1]
    assert numbers(library.given("cuMemUnmap")) == [(1 << 44) + P, P]
    assert numbers(library.given("cuMemRelease")) == [77]
    assert numbers(library.given("cuMemAddressFree")) == [1 << 44, 8 * P]
    how = library.given("cuMemCreate")[2]
    assert (how.type, how.handle_types, how.location.type, how.location.id) == (1, 0, 1, 6)
    access = library.given("cuMemSetAccess")[2]
    assert (access.location.type, access.location.id, access.flags) == (1, 6, 3)


def test_structures__laid_out_as_in_cuda_h() -> None:
    assert (ctypes.sizeof(Properties), ctypes.sizeof(Access)) == (32, 12)
    assert (Properties.location.offset, Properties.win32.offset) == (8, 16)


def test_driver__card_full__code_and_word_of_the_driver() -> None:
    driver = CudaDriver(DEVICE, Library(cuMemCreate=OUT_OF_MEMORY))
    with pytest.raises(DriverError, match=r"cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY \(2\)") as caught:
        driver.map(1 << 44, P)
    assert caught.value.code == OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("fails", "undone"),
    [
        ("cuMemMap", ["cuMemRelease"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemRelease"]),
    ],
)
def test_driver__mapping_fails_half_way__nothing_is_left(fails: str, undone: list[str]) -> None:
    library = Library(**{fails: 999})
    with pytest.raises(DriverError, match=rf"{fails}: unknown error \(999\)"):
        CudaDriver(DEVICE, library).map(1 << 44, P)
    names = library.names()
    assert names[names.index(fails) + 1 :] == undone


def test_driver__card_without_virtual_memory__refused() -> None:
    library = Library()
    library.has_virtual_memory = 0
    with pytest.raises(DriverError, match="no virtual memory management"):
        CudaDriver(DEVICE, library)


def test_cuda_driver__no_library_or_an_old_one__says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DriverError, match="cannot open shared object file"):
        cuda_driver(DEVICE)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with pytest.raises(DriverError, match="cuDeviceGet"):
        cuda_driver(DEVICE)
