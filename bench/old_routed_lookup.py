"""Choosing a few tokens' experts and finding their slots, in one launch.

Twins: `reference.route` and `reference.cache`; the ids, weights and tables are those of `route` and
`lookup` one after the other. One program does all of it. Called on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from bench.old_cache import MOST_PAIRS, GpuTables, LookupOutput, look_up
from bench.old_route import OF_A_WARP, SCORE_KINDS, choose_experts
from moet_desk.kernels.kinds import Score
from moet_desk.kernels.reference.cache import HALF_LIFE
from moet_desk.kernels.triton.portable import PTX

MOST_ROUTED = 2
"""Tokens whose experts one program chooses: more at once are sooner done by one program each."""

_PAIRS_OF_A_WARP = 16


@dataclass(frozen=True, slots=True)
class Routing:
    """What chooses experts that are not chosen yet; the options of `route`.

    Shapes:
        logits [T, E] float32, bias [E] float32 or None, weights [T, K] float32, to be written
    """

    logits: Tensor
    bias: Tensor | None
    weights: Tensor
    score: Score
    n_groups: int
    kept_groups: int
    renormalize: bool
    scale: float


@triton.jit(do_not_specialize=["layer"])
def _routed_lookup_kernel(
    logits, bias, weights, scale,
    ids, slot_of, owner, last_used, warmth, free, n_free, hand, clock, counters, limit,
    uniq_slot, uniq_pair, n_uniq, miss_n, miss_row, miss_slot, layer,
    E2: tl.constexpr, K2: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUPS2: tl.constexpr, RENORM: tl.constexpr,
    L: tl.constexpr, E: tl.constexpr, PER_USE: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
    PAIRS: tl.constexpr, CELLS: tl.constexpr, ADVANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    for t in tl.static_range(T):
        choose_experts(
            logits, bias, ids, weights, None, scale, t, E, E2, K, K2, SCORE, BIASED, GROUPS, KEPT,
            GROUPS2, RENORM, E, PTX,
        )  # fmt: skip
    tl.debug_barrier()  # the ids are there
    look_up(
        ids, slot_of, owner, last_used, warmth, free, n_free, hand, clock, counters, limit,
        uniq_slot, uniq_pair, n_uniq, miss_n, miss_row, miss_slot, layer, 0,
        L, E, PER_USE, T, K, PAIRS, CELLS, ADVANCE, PTX, T == 1,
    )  # fmt: skip


def does_both(n_tokens: int, n_experts: int, top_k: int) -> bool:
    """Whether one warp is soon done with so many."""
    few = n_tokens <= MOST_ROUTED and n_tokens * top_k <= _PAIRS_OF_A_WARP
    return few and n_experts <= OF_A_WARP


def route_and_look_up(
    routing: Routing,
    ids: Tensor,
    tables: GpuTables,
    *,
    layer: int,
    out: LookupOutput,
    ends_step: bool = False,
) -> None:
    """`route`, which writes `ids` and the weights, and `lookup` of them; none are set aside.

    Raises:
        ValueError: `does_both` is False, or there are more pairs than slots.
    """
    (n_tokens, top_k), n_experts = ids.shape, routing.logits.shape[1]
    n_pairs = n_tokens * top_k
    if not does_both(n_tokens, n_experts, top_k) or n_pairs > min(MOST_PAIRS, tables.n_slots):
        raise ValueError(f"cannot choose {n_pairs} of {n_experts} and find {tables.n_slots} slots")
    logits, bias = routing.logits, routing.bias
    _routed_lookup_kernel[(1,)](
        logits, logits if bias is None else bias, routing.weights, routing.scale,
        ids, tables.slot_of, tables.owner, tables.last_used, tables.warmth, tables.free,
        tables.n_free, tables.hand, tables.clock, tables.counters, tables.limit,
        out.uniq_slot, out.uniq_pair, out.n_uniq, out.miss_n, out.miss_row, out.miss_slot, layer,
        triton.next_power_of_2(n_experts), triton.next_power_of_2(top_k),
        SCORE_KINDS[routing.score], bias is not None, routing.n_groups, routing.kept_groups,
        triton.next_power_of_2(routing.n_groups), routing.renormalize,
        tables.n_layers, n_experts, 1.0 / (HALF_LIFE * tables.n_layers), n_tokens, top_k,
        triton.next_power_of_2(n_pairs), triton.next_power_of_2(n_pairs * n_tokens), ends_step, PTX,
        num_warps=1, maxnreg=128, enable_fp_fusion=False,
    )  # fmt: skip
