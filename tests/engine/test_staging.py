"""Staging places on a CPU: sizes, turns, and what is held."""

from __future__ import annotations

import torch

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


def test_reading__places_come_back_behind_those_that_were_free() -> None:
    staging = Staging(96, CPU)
    staging.divide(BOTH)
    first, second = staging.take(), staging.take()
    with staging.reading([first]):
        assert staging.n_free == 2
    assert staging.n_free == 3
    assert [staging.take() for _ in range(3)] == [2, 3, first]
    staging.give_back([second])
    assert staging.take() == second
    staging.give_all_back()
    assert staging.n_free == 4
