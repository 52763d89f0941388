"""A device's MTP head reads numbers of rows whose launches were recorded, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moet_desk.engine.cuda.draft import DeviceHead
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.store.pack_format import Plane


class Recorded:
    """Guesses ten times what the last row reads; its states are those of the rows of a launch."""

    most_rows = 8

    def __init__(self) -> None:
        self.launches: list[tuple[list[int], list[int]]] = []
        self.kept = torch.empty(0)

    def guess(self, rows: Any, plane: Plane, states: torch.Tensor) -> list[int]:
        assert len(rows) == len(states)
        start = rows[0].sequence.length
        self.launches.append(([row.token for row in rows], [start + row.ahead for row in rows]))
        self.kept = states + 1
        return [10 * row.token for row in rows]

    def states(self, first: int, count: int) -> torch.Tensor:
        return self.kept[first : first + count]


@pytest.mark.parametrize(
    ("count", "want"),
    [(1, [1]), (3, [3]), (5, [4, 1]), (6, [4, 2]), (7, [4, 3]), (8, [8])],
)
def test_read__any_number_of_tokens__in_recorded_launches(count: int, want: list[int]) -> None:
    model: Any = Recorded()
    head = DeviceHead(model, (1, 2, 3, 4, 8))
    sequence = KvSequence([0], length=20)
    ids, states = list(range(1, count + 1)), torch.arange(float(count)).reshape(count, 1)
    guess, state = head.read(ids, states, sequence, Plane.BASE)
    assert [len(tokens) for tokens, _ in model.launches] == want
    assert [token for tokens, _ in model.launches for token in tokens] == ids
    assert [at for _, places in model.launches for at in places] == list(range(20, 20 + count))
    assert guess == 10 * count
    assert state.tolist() == [[float(count)]]
    assert sequence.length == 20 + count
