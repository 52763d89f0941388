"""What is told of each expert: sums, times, where it came from, and estimates between pictures."""

from __future__ import annotations

import numpy as np
import pytest

from moet_desk.engine.ledger import Ledger, moves, uses_between
from moet_desk.telemetry import Tier

N, R, G, Q = (np.uint8(tier) for tier in Tier)


def grid(*tiers: np.uint8) -> np.ndarray:
    return np.array(tiers, np.uint8)


def counts(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def test_ledger__two_notes__sums_and_the_newest_times() -> None:
    ledger = Ledger(3, exact=True)
    assert ledger.stories(0.0).of(1).used_s is None
    none = counts(0, 0, 0)
    uses = np.array([1, 2, 0], np.float32)
    ledger.note(1.0, uses=uses, fetches=counts(0, 1, 0), evictions=none, before=grid(R, N, R))
    ledger.note(
        2.5, uses=np.array([3, 0, 0], np.float32), fetches=none, evictions=counts(0, 1, 0),
        before=grid(G, G, R),
    )  # fmt: skip
    stories = ledger.stories(4.0)
    assert (stories.now_s, stories.exact) == (4.0, True)
    first, second, third = (stories.of(row) for row in range(3))
    assert (first.uses, first.used_s, first.fetches, first.fetched_s) == (4.0, 2.5, 0, None)
    assert (second.uses, second.used_s) == (2.0, 1.0)
    assert (second.fetches, second.evictions, second.fetched_s) == (1, 1, 1.0)
    assert (second.source, first.source) == (Tier.NVME, None)
    assert (third.uses, third.used_s) == (0.0, None)


def test_ledger__fetched_again_since_the_last_look__came_from_ram() -> None:
    ledger = Ledger(1, exact=True)
    one = counts(1)
    ledger.note(1.0, uses=np.ones(1, np.float32), fetches=one, evictions=one, before=grid(G))
    assert ledger.stories(1.0).of(0).source is Tier.RAM


def test_stories__later_notes__leave_an_earlier_copy_alone() -> None:
    ledger = Ledger(1, exact=False)
    before = ledger.stories(0.0)
    ledger.note(
        1.0, uses=np.ones(1, np.float32), fetches=counts(0), evictions=counts(0), before=None
    )
    assert before.of(0).uses == 0
    assert ledger.stories(1.0).of(0).uses == 1


def test_moves__into_and_out_of_slots__not_between_them() -> None:
    before, after = grid(N, R, G, G, Q, R), grid(R, G, Q, R, N, Q)
    came, left = moves(before, after)
    assert came.tolist() == [0, 1, 0, 0, 0, 1]
    assert left.tolist() == [0, 0, 0, 1, 1, 0]
    assert moves(None, after)[0].tolist() == [0] * 6


def test_uses_between__decayed_counts__add_up_to_the_lookups_of_each_layer() -> None:
    rng, life, n_steps = np.random.default_rng(0), 16, 12
    n_layers, n_experts, top_k = 3, 32, 4
    heat = rng.random((n_layers, n_experts)) * 8
    heat[:, 20:] = 0.0  # never used
    before, used = heat.copy(), np.zeros((n_layers, n_experts))
    for _ in range(n_steps):
        heat *= 0.5 ** (1 / life)
        for layer in range(n_layers):
            chosen = rng.choice(16, top_k, replace=False)
            heat[layer, chosen] += 1
            used[layer, chosen] += 1
    found = uses_between(
        before * 0.5 ** (n_steps / life), heat, np.full(n_layers, n_steps * top_k)
    ).reshape(n_layers, n_experts)
    assert found.sum(1) == pytest.approx([n_steps * top_k] * n_layers)
    assert np.array_equal(found > 0, used > 0)
    assert np.abs(found - used).max() < 1.0


def test_uses_between__no_lookups_or_wrapped_counters__none() -> None:
    heat = np.full((1, 4), 3.0)
    assert uses_between(heat * 0.9, heat, np.array([-5])).tolist() == [0] * 4
    assert uses_between(heat, heat, np.array([9])).tolist() == [0] * 4
