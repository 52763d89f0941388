"""Choosing experts and finding their slots in one launch, and fetching: what several leave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet_desk.kernels.kinds import Score
from moet_desk.kernels.triton.cache import GpuTables, LookupOutput, lookup
from moet_desk.kernels.triton.fetch import Arena, fetch
from moet_desk.kernels.triton.route import route
from moet_desk.kernels.triton.routed_lookup import Routing, does_both, route_and_look_up

N_LAYERS, E, K, SLOTS = 2, 24, 3, 8
RULES = [
    (Score.SQRT_SOFTPLUS, True, 1, 1, True, 1.5),  # DeepSeek-V4
    (Score.SIGMOID, True, 4, 2, True, 2.5),
    (Score.SOFTMAX, False, 1, 1, False, 1.0),
]


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _left(tables: GpuTables, out: LookupOutput) -> list[Tensor]:
    """All that a look-up leaves; behind its count the misses mean nothing."""
    names = "slot_of owner last_used warmth free n_free hand clock counters limit".split()
    n = int(out.miss_n)
    return [
        *(getattr(tables, name) for name in names), out.uniq_slot, out.uniq_pair, out.n_uniq,
        out.miss_n, out.miss_row[:n], out.miss_slot[:n],
    ]  # fmt: skip


def _arena() -> tuple[Arena, Tensor]:
    """All rows, each of its own bytes, and the memory that they lie in."""
    rows = torch.arange(N_LAYERS * E, dtype=torch.uint8)[:, None].repeat(1, 4096)
    return Arena(rows.data_ptr(), torch.arange(N_LAYERS * E, dtype=torch.int32), 4096), rows


@pytest.mark.parametrize("fetches", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule[0].value))
def test_route_and_look_up__steps_with_misses__what_launches_one_by_one_leave(
    rule: tuple[Score, bool, int, int, bool, float], fetches: bool
) -> None:
    score, biased, n_groups, kept_groups, renormalize, scale = rule
    bias = _random(E, seed=1) / 8 if biased else None
    both, each = (GpuTables.empty(N_LAYERS, E, SLOTS, device="cpu") for _ in range(2))
    arena, rows = _arena()
    slots = [torch.zeros(SLOTS, arena.stride, dtype=torch.uint8) for _ in range(2)]
    for step, n_tokens in enumerate([1, 2, 1]):
        for layer in range(N_LAYERS):
            logits = _random(n_tokens, E, seed=10 * step + layer)
            found = [LookupOutput.empty(n_tokens, K, device="cpu") for _ in range(2)]
            ids = [torch.full((n_tokens, K), -7, dtype=torch.int32) for _ in range(2)]
            weights = [torch.full((n_tokens, K), -7.0) for _ in range(2)]
            routing = Routing(
                logits, bias, weights[0], score, n_groups, kept_groups, renormalize, scale
            )
            ends = layer == N_LAYERS - 1
            whole = {"slots": slots[0], "arena": arena} if fetches else {}
            route_and_look_up(
                routing, ids[0], both, layer=layer, out=found[0], ends_step=ends, **whole
            )
            route(
                logits, bias, ids=ids[1], weights=weights[1], score=score, n_groups=n_groups,
                kept_groups=kept_groups, renormalize=renormalize, scale=scale,
            )  # fmt: skip
            lookup(ids[1], each, layer=layer, out=found[1], ends_step=ends)
            fetch(
                slots[1], arena, found[1].miss_n, miss_row=found[1].miss_row,
                miss_slot=found[1].miss_slot,
            )  # fmt: skip
            assert torch.equal(slots[0], slots[1] if fetches else torch.zeros_like(slots[1]))
            assert int(found[0].waiting) == 0
            assert torch.equal(ids[0], ids[1])
            assert torch.equal(weights[0], weights[1])
            for one, other in zip(_left(both, found[0]), _left(each, found[1]), strict=True):
                assert torch.equal(one, other)
    assert int(both.counters[:, 3].sum()) > 0  # some were evicted
    assert int(both.clock) == 3
    held = torch.nonzero(both.owner >= 0).flatten()
    assert not fetches or torch.equal(slots[0][held], rows[both.owner[held].long()])


def test_does_both__what_one_warp_holds__and_no_more() -> None:
    assert does_both(2, 256, 8)
    assert not does_both(3, 256, 4)
    assert not does_both(2, 256, 9)
    assert not does_both(1, 257, 8)
    routing = Routing(torch.zeros(3, E), None, torch.zeros(3, K), Score.SOFTMAX, 1, 1, True, 1.0)
    tables = GpuTables.empty(1, E, SLOTS, device="cpu")
    out = LookupOutput.empty(3, K, device="cpu")
    with pytest.raises(ValueError, match="cannot choose 9 of 24"):
        route_and_look_up(routing, torch.zeros(3, K).int(), tables, layer=0, out=out)
