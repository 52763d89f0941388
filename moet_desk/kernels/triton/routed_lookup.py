"""Choosing a few tokens' experts and finding their slots, in one launch.

Twins: `reference.route` and `reference.cache`; the ids, weights and tables are those of `route` and
`lookup` one after the other. One program does all of it. Called on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kinds import Score
from moet_desk.kernels.reference.cache import HALF_LIFE
from moet_desk.kernels.triton.cache import MOST_PAIRS, GpuTables, LookupOutput, look_up
from moet_desk.kernels.triton.fetch import CHUNK_WORDS, PROGRAMS, Arena, copy_when_known
from moet_desk.kernels.triton.loads import in_order
from moet_desk.kernels.triton.portable import PTX
from moet_desk.kernels.triton.route import OF_A_WARP, SCORE_KINDS, best_experts

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


@triton.jit
def _route_and_look_up(
    logits, bias, weights, scale, n_rounds,
    ids, slot_of, owner, last_used, warmth, free, n_free, hand, clock, counters, limit,
    uniq_slot, uniq_pair, n_uniq, miss_n, miss_row, miss_slot, layer, waiting,
    E2: tl.constexpr, K2: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUPS2: tl.constexpr, RENORM: tl.constexpr,
    L: tl.constexpr, E: tl.constexpr, PER_USE: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
    PAIRS: tl.constexpr, CELLS: tl.constexpr, ADVANCE: tl.constexpr,
    PTX: tl.constexpr, WAITING: tl.constexpr,
):  # fmt: skip
    # All loads come before anything is computed: what they ask for was not read since the step
    # before and is far away. So the layer's whole tables are, not the chosen rows' alone.
    i = tl.arange(0, E2)
    inside = i < E
    own_bias = None
    if BIASED:
        own_bias = tl.load(bias + i, mask=inside, other=0.0)
    slots = tl.load(slot_of + layer * E + i, mask=inside, other=0)
    heats = tl.load(warmth + layer * E + i, mask=inside, other=0.0)
    step, counted = tl.load(clock), tl.load(counters + layer * 4 + tl.arange(0, 4))
    n_left, n_slots, at_slot = tl.load(n_free), tl.load(limit), tl.load(hand)
    logits = tl.multiple_of(logits + in_order(0, PTX), 16)

    p = tl.arange(0, PAIRS)
    pairs = tl.full([PAIRS], -1, tl.int32)
    k = tl.arange(0, K2)
    for t in tl.static_range(T):
        x = tl.load(logits + t * E + i, mask=inside, other=-float("inf"))
        own, counts, pairs = best_experts(
            x, own_bias, pairs, scale, t * K, n_rounds, E, E2, K, K2, SCORE, BIASED,
            GROUPS, KEPT, GROUPS2, RENORM, PTX,
        )  # fmt: skip
        tl.store(ids + t * K + k, own, mask=k < K)
        tl.store(weights + t * K + k, counts, mask=k < K)
    valid = pairs >= 0
    at = tl.where(valid, pairs, 0)
    look_up(
        p, pairs, tl.gather(heats, at, 0), tl.where(valid, tl.gather(slots, at, 0), 0),
        step, counted, n_left, n_slots, at_slot,
        slot_of, owner, last_used, warmth, free, n_free, hand, clock, counters,
        uniq_slot, uniq_pair, n_uniq, miss_n, miss_row, miss_slot, waiting, layer, 0,
        L, E, PER_USE, T, K, PAIRS, CELLS, ADVANCE, PTX, T == 1, WAITING,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "n_rounds"])
def _routed_lookup_kernel(
    logits, bias, weights, scale, n_rounds,
    ids, slot_of, owner, last_used, warmth, free, n_free, hand, clock, counters, limit,
    uniq_slot, uniq_pair, n_uniq, miss_n, miss_row, miss_slot, layer,
    E2: tl.constexpr, K2: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUPS2: tl.constexpr, RENORM: tl.constexpr,
    L: tl.constexpr, E: tl.constexpr, PER_USE: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
    PAIRS: tl.constexpr, CELLS: tl.constexpr, ADVANCE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    _route_and_look_up(
        logits, bias, weights, scale, n_rounds,
        ids, slot_of, owner, last_used, warmth, free, n_free, hand, clock, counters, limit,
        uniq_slot, uniq_pair, n_uniq, miss_n, miss_row, miss_slot, layer, None,
        E2, K2, SCORE, BIASED, GROUPS, KEPT, GROUPS2, RENORM, L, E, PER_USE, T, K, PAIRS, CELLS,
        ADVANCE, PTX, 0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "n_rounds", "arena"])
def _routed_fetch_kernel(
    logits, bias, weights, scale, n_rounds,
    ids, slot_of, owner, last_used, warmth, free, n_free, hand, clock, counters, limit,
    uniq_slot, uniq_pair, n_uniq, miss_n, miss_row, miss_slot, layer,
    waiting, pool, arena, place_of,
    E2: tl.constexpr, K2: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUPS2: tl.constexpr, RENORM: tl.constexpr,
    L: tl.constexpr, E: tl.constexpr, PER_USE: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
    PAIRS: tl.constexpr, CELLS: tl.constexpr, ADVANCE: tl.constexpr,
    PTX: tl.constexpr,
    STRIDE: tl.constexpr, WORDS: tl.constexpr, WAITING: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        _route_and_look_up(
            logits, bias, weights, scale, n_rounds,
            ids, slot_of, owner, last_used, warmth, free, n_free, hand, clock, counters, limit,
            uniq_slot, uniq_pair, n_uniq, miss_n, miss_row, miss_slot, layer, waiting,
            E2, K2, SCORE, BIASED, GROUPS, KEPT, GROUPS2, RENORM, L, E, PER_USE, T, K, PAIRS, CELLS,
            ADVANCE, PTX, WAITING,
        )  # fmt: skip
    else:
        copy_when_known(
            pool, arena, place_of, miss_n, miss_row, miss_slot, waiting,
            tl.program_id(0) - 1, WAITING, STRIDE, WORDS, PTX,
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
    slots: Tensor | None = None,
    arena: Arena | None = None,
) -> None:
    """`route`, which writes `ids` and the weights, and `lookup` of them; none are set aside. With
    `slots` and `arena` `fetch` too, in the same launch: other programs wait for what is missing.

    Raises:
        ValueError: `does_both` is False, or there are more pairs than slots.
    """
    (n_tokens, top_k), n_experts = ids.shape, routing.logits.shape[1]
    n_pairs = n_tokens * top_k
    if not does_both(n_tokens, n_experts, top_k) or n_pairs > min(MOST_PAIRS, tables.n_slots):
        raise ValueError(f"cannot choose {n_pairs} of {n_experts} and find {tables.n_slots} slots")
    logits, bias = routing.logits, routing.bias
    before = (
        logits, logits if bias is None else bias, routing.weights, routing.scale, top_k,
        ids, tables.slot_of, tables.owner, tables.last_used, tables.warmth, tables.free,
        tables.n_free, tables.hand, tables.clock, tables.counters, tables.limit,
        out.uniq_slot, out.uniq_pair, out.n_uniq, out.miss_n, out.miss_row, out.miss_slot, layer,
    )  # fmt: skip
    sizes = (
        triton.next_power_of_2(n_experts), triton.next_power_of_2(top_k),
        SCORE_KINDS[routing.score], bias is not None, routing.n_groups, routing.kept_groups,
        triton.next_power_of_2(routing.n_groups), routing.renormalize,
        tables.n_layers, n_experts, 1.0 / (HALF_LIFE * tables.n_layers), n_tokens, top_k,
        triton.next_power_of_2(n_pairs), triton.next_power_of_2(n_pairs * n_tokens), ends_step,
        PTX,
    )  # fmt: skip
    options = {"num_warps": 1, "maxnreg": 128, "enable_fp_fusion": False}
    if slots is None or arena is None:
        _routed_lookup_kernel[(1,)](*before, *sizes, **options)
        return
    _routed_fetch_kernel[(1 + PROGRAMS,)](
        *before, out.waiting, slots, arena.address, arena.place_of,
        *sizes, arena.stride, CHUNK_WORDS, PROGRAMS, **options,
    )  # fmt: skip
