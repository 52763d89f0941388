"""Choosing experts and finding their slots in one launch: what two launches leave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet_desk.kernels.kinds import Score
from moet_desk.kernels.triton.cache import GpuTables, LookupOutput, lookup
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


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule[0].value))
def test_route_and_look_up__steps_with_misses__what_two_launches_leave(
    rule: tuple[Score, bool, int, int, bool, float],
) -> None:
    score, biased, n_groups, kept_groups, renormalize, scale = rule
    bias = _random(E, seed=1) / 8 if biased else None
    both, each = (GpuTables.empty(N_LAYERS, E, SLOTS, device="cpu") for _ in range(2))
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
            route_and_look_up(routing, ids[0], both, layer=layer, out=found[0], ends_step=ends)
            route(
                logits, bias, ids=ids[1], weights=weights[1], score=score, n_groups=n_groups,
                kept_groups=kept_groups, renormalize=renormalize, scale=scale,
            )  # fmt: skip
            lookup(ids[1], each, layer=layer, out=found[1], ends_step=ends)
            assert torch.equal(ids[0], ids[1])
            assert torch.equal(weights[0], weights[1])
            for one, other in zip(_left(both, found[0]), _left(each, found[1]), strict=True):
                assert torch.equal(one, other)
    assert int(both.counters[:, 3].sum()) > 0  # some were evicted
    assert int(both.clock) == 3


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
