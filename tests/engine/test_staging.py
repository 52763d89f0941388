"""Staging places on a CPU: sizes, turns, and what is held."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moet_desk.engine.cuda.staging import Staging
from moet_desk.store.pack_format import Plane

CPU = torch.device("cpu")
BOTH = {Plane.BASE: 16, Plane.FINE: 8}


def held_bytes(staging: Staging, place: int, plane: Plane, size: int) -> list[int]:
    start = staging.address(place, plane) - staging._memory.data_ptr()
    found: list[int] = staging._memory[start : start + size].tolist()
    return found


def test_divide__fewer_planes__more_places_in_the_same_memory() -> None:
    staging = Staging(100, CPU)
    staging.divide(BOTH)
    assert staging.n_free == 4
    staging.divide({Plane.BASE: 16})
    assert staging.n_free == 6


def test_fill__rows_of_both_planes__lie_behind_each_other() -> None:
    staging = Staging(96, CPU)
    staging.divide(BOTH)
    places = [staging.take() for _ in range(3)]
    rows = [(p, plane, torch.full((n,), 10 * p + n, dtype=torch.uint8))
            for p in places for plane, n in BOTH.items()]  # fmt: skip
    staging.fill(rows)
    for place, plane, row in rows:
        assert held_bytes(staging, place, plane, row.numel()) == row.tolist()


def test_give_back__places_come_behind_those_that_were_free() -> None:
    staging = Staging(96, CPU)
    staging.divide(BOTH)
    first, second = staging.take(), staging.take()
    staging.give_back([first])
    assert staging.n_free == 3
    assert [staging.take() for _ in range(3)] == [2, 3, first]
    staging.give_back([second])
    assert staging.take() == second
    staging.give_all_back()
    assert staging.n_free == 4


# -- order of copies and kernels on a device, with streams that only keep the books --------------


class Stream:
    """What is known to have ended before the next operation: a count per stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known = {"copies": 0, "kernels": 0}

    def run(self) -> dict[str, int]:
        """An operation; returns what has ended when it begins, and counts it."""
        before = dict(self.known)
        self.known[self.name] += 1
        return before

    def wait_event(self, event: Event) -> None:
        self.known = {name: max(n, event.known[name]) for name, n in self.known.items()}

    def wait_stream(self, other: Stream) -> None:
        self.known = {name: max(n, other.known[name]) for name, n in self.known.items()}


class Event:
    def record(self, stream: Stream) -> None:
        self.known = dict(stream.known)


class Books:
    """The memory of a staging whose copies and kernels are checked against each other."""

    def __init__(self, patch: pytest.MonkeyPatch, n_bytes: int) -> None:
        self.copies, self.kernels = Stream("copies"), Stream("kernels")
        self.current = self.kernels
        self.filled: dict[int, int] = {}  # place -> number of its last copy
        self.read: dict[int, int] = {}  # place -> number of the last kernel that read it
        self.n_bytes, self.stride = n_bytes, 1
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda: self.current)
        patch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def numel(self) -> int:
        return self.n_bytes

    def __getitem__(self, piece: slice) -> Books:
        self.place = piece.start // self.stride
        return self

    def copy_(self, row: torch.Tensor, *, non_blocking: bool) -> None:
        before = self.current.run()
        assert self.current is self.copies
        assert before["kernels"] >= self.read.get(self.place, 0)
        self.filled[self.place] = self.copies.known["copies"]

    def kernel(self, places: list[int]) -> None:
        before = self.kernels.run()
        for place in places:
            assert before["copies"] >= self.filled[place]
            self.read[place] = self.kernels.known["kernels"]


@given(st.randoms(use_true_random=False), st.integers(3, 9))
def test_staging__any_order_of_use__no_kernel_reads_early_and_no_copy_writes_early(
    choose: random.Random, n_places: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        books = Books(patch, 8 * n_places)
        staging = Staging(1, CPU)
        staging._memory, staging._stream = books, books.copies  # type: ignore[assignment]
        books.stride = 8
        staging.divide({Plane.BASE: 8})
        row, held = torch.zeros(8, dtype=torch.uint8), list[int]()
        for _ in range(60):
            if staging.n_free and choose.random() < 0.6:
                taken = [staging.take() for _ in range(choose.randint(1, staging.n_free))]
                staging.fill([(place, Plane.BASE, row) for place in taken])
                held += taken
            elif held and choose.random() < 0.9:
                choose.shuffle(held)
                n = choose.randint(1, len(held))
                used, held = held[:n], held[n:]
                with staging.reading(used):
                    books.kernel(used)
                staging.give_back(used)
            elif held and choose.random() < 0.5:
                staging.give_back([held.pop()])
            else:
                books.kernels.run()
                staging.give_all_back()
                held = []
        assert staging.n_free + len(held) == n_places
