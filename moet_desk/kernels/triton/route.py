"""The router on the device: from logits to the chosen experts and their weights.

Twins: `reference.route` and, where a table names the experts, `reference.weights_of`, with the same
ids (ties to the lowest) and weights that differ in the last bits. One program per token, so a
token's choice does not depend on the others.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kinds import Score
from moet_desk.kernels.triton.numbers import loop_bound
from moet_desk.kernels.triton.portable import PTX, product

MOST_EXPERTS = 1024
MOST_CHOSEN = 16

OF_A_WARP = 256
"""Experts among which one warp chooses."""

_SOFTMAX, _SIGMOID, _SQRT_SOFTPLUS, _TOPK_SOFTMAX = (tl.constexpr(i) for i in range(4))
SCORE_KINDS = {
    Score.SOFTMAX: 0,
    Score.SIGMOID: 1,
    Score.SQRT_SOFTPLUS: 2,
    Score.TOPK_SOFTMAX: 3,
}


@triton.jit
def _scores(x, SCORE: tl.constexpr, PTX: tl.constexpr):
    """Scores of logits; padding is -inf on entry."""
    if SCORE == _SOFTMAX:
        e = tl.exp(x - tl.max(x, 0))
        return e / tl.sum(e, 0)
    elif SCORE == _SIGMOID:
        return 1.0 / (tl.exp(-x) + 1.0)
    elif SCORE == _SQRT_SOFTPLUS:
        return tl.sqrt(tl.where(x > 0.0, x, 0.0) + _log_one_plus(tl.exp(-tl.abs(x)), PTX))
    else:
        return x


@triton.jit
def _log_one_plus(y, PTX: tl.constexpr):
    """log(1 + y) for 0 <= y <= 1 with small y kept: log(u) * y / (u - 1) for u = 1 + y rounded."""
    u = y + 1.0
    exact = u - 1.0
    share = y / tl.where(exact == 0.0, 1.0, exact)
    return tl.where(exact == 0.0, y, product(tl.log(u), share, PTX))


@triton.jit
def _first_best(values, open_, i, E2: tl.constexpr):
    """Index of the largest open value, the lowest of equals, though all of them be -inf."""
    best = tl.max(tl.where(open_, values, -float("inf")), 0)
    return tl.min(tl.where(open_ & (values >= best), i, E2 - 1), 0)


@triton.jit
def _ordered(values):
    """Integers in the order of floats that are not NaN, equal where they are equal. A warp finds
    the largest integer in one instruction, the largest float in ten that wait for each other.
    """
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _in_best_groups(
    choice, i, E: tl.constexpr, E2: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUPS2: tl.constexpr,
):  # fmt: skip
    """Which experts lie in the KEPT groups whose two best values sum highest."""
    WIDTH: tl.constexpr = E // GROUPS
    group_of = i // WIDTH
    g = tl.arange(0, GROUPS2)
    sums = tl.full([GROUPS2], -float("inf"), tl.float32)
    for n in tl.static_range(GROUPS):
        mine = (group_of == n) & (i < E)
        at = _first_best(choice, mine, i, E2)
        best_two = tl.max(tl.where(mine, choice, -float("inf")), 0)
        if WIDTH > 1:
            best_two += tl.max(tl.where(mine & (i != at), choice, -float("inf")), 0)
        sums = tl.where(g == n, best_two, sums)
    kept = i < 0
    left = g < GROUPS
    for _ in tl.static_range(KEPT):
        group = _first_best(sums, left, g, GROUPS2)
        left = left & (g != group)
        kept = kept | (group_of == group)
    return kept


@triton.jit
def _spoiled(x, inside):
    """NaN if any logit is NaN or infinite, else 0."""
    # As integers, of which a warp finds the largest in one instruction.
    size = tl.where(inside, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    return tl.where(tl.max(size, 0) >= 0x7F800000, float("nan"), 0.0)


@triton.jit
def _weighed(
    chosen, k, scale, spoiled,
    K: tl.constexpr, SCORE: tl.constexpr, RENORM: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Weights of chosen scores, -inf from K on."""
    if SCORE == _TOPK_SOFTMAX:
        e = tl.exp(chosen - tl.max(chosen, 0))
        chosen = e / tl.sum(e, 0)
    chosen = tl.where(k < K, chosen, 0.0)
    if RENORM:
        chosen = chosen / (tl.sum(chosen, 0) + 1e-20)
    return product(chosen, scale, PTX) + spoiled


@triton.jit
def best_experts(
    x, own_bias, pairs, scale, before, n_rounds,
    E: tl.constexpr, E2: tl.constexpr, K: tl.constexpr, K2: tl.constexpr,
    SCORE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUPS2: tl.constexpr, RENORM: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Ids and weights [K2] of a token with the logits x, -inf from E on; and `pairs` with its ids
    at the places from `before` on. The bits are those of every kernel that does this with one
    layout, as long as none fuses multiply-adds.
    """
    i = tl.arange(0, E2)
    inside = i < E
    spoiled = _spoiled(x, inside)
    scores = _scores(x, SCORE, PTX)
    choice = scores
    if BIASED:
        choice = scores + own_bias
    choice = tl.where(choice == choice, choice, -float("inf"))
    if GROUPS > 1:
        kept = _in_best_groups(choice, i, E, E2, GROUPS, KEPT, GROUPS2)
        choice = tl.where(kept, choice, -float("inf"))

    k = tl.arange(0, K2)
    p = tl.arange(0, pairs.shape[0])
    chosen_ids = tl.zeros([K2], tl.int32)
    taken = -(2**31)  # below -inf
    keys = tl.where(inside, _ordered(choice), taken)
    # Unrolled, the rounds are slower: their code is read once, from far away.
    for n in range(0, loop_bound(n_rounds, PTX)):
        expert = tl.min(tl.where(keys == tl.max(keys, 0), i, E2 - 1), 0)
        keys = tl.where(i == expert, taken, keys)
        chosen_ids = tl.where(k == n, expert, chosen_ids)
        pairs = tl.where(p == before + n, expert, pairs)
    chosen = tl.where(k < K, tl.gather(scores, chosen_ids, 0), -float("inf"))
    return chosen_ids, _weighed(chosen, k, scale, spoiled, K, SCORE, RENORM, PTX), pairs


@triton.jit(do_not_specialize=["n_rounds"])
def _route_kernel(
    logits, bias, ids, weights, share, scale, n_rounds,
    E: tl.constexpr, E2: tl.constexpr, K: tl.constexpr, K2: tl.constexpr,
    SCORE: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUPS2: tl.constexpr, RENORM: tl.constexpr,
    REAL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    i = tl.arange(0, E2)
    k = tl.arange(0, K2)
    x = tl.load(logits + t * E + i, mask=i < E, other=-float("inf"))
    own_bias = None
    if BIASED:
        own_bias = tl.load(bias + i, mask=i < E, other=0.0)
    chosen_ids, chosen, _ = best_experts(
        x, own_bias, k, scale, 0, n_rounds, E, E2, K, K2, SCORE, BIASED, GROUPS, KEPT, GROUPS2,
        RENORM, PTX,
    )  # fmt: skip
    if REAL < E:
        real = chosen_ids < REAL
        tl.store(share + t, tl.sum(tl.where(real | (k >= K), 0.0, chosen), 0))
        chosen_ids = tl.where(real, chosen_ids, -1)
        chosen = tl.where(real, chosen, 0.0)
    tl.store(ids + t * K + k, chosen_ids, mask=k < K)
    tl.store(weights + t * K + k, chosen, mask=k < K)


@triton.jit
def _named_kernel(
    logits, table, tokens, ids, weights, scale,
    E: tl.constexpr, E2: tl.constexpr, K: tl.constexpr, K2: tl.constexpr,
    SCORE: tl.constexpr, RENORM: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    i = tl.arange(0, E2)
    k = tl.arange(0, K2)
    x = tl.load(logits + t * E + i, mask=i < E, other=-float("inf"))
    spoiled = _spoiled(x, i < E)
    scores = _scores(x, SCORE, PTX)
    token = tl.load(tokens + t).to(tl.int64)
    named = tl.load(table + token * K + k, mask=k < K, other=0)
    chosen = tl.sum(tl.where(named[:, None] == i[None, :], scores[None, :], 0.0), 1)
    chosen = tl.where(k < K, chosen, -float("inf"))
    chosen = _weighed(chosen, k, scale, spoiled, K, SCORE, RENORM, PTX)
    tl.store(ids + t * K + k, named, mask=k < K)
    tl.store(weights + t * K + k, chosen, mask=k < K)


def route_named(
    logits: Tensor,
    table: Tensor,
    tokens: Tensor,
    *,
    ids: Tensor,
    weights: Tensor,
    score: Score,
    renormalize: bool,
    scale: float,
) -> None:
    """Take the experts that a table names for each token; they count as `reference.weights_of`
    says.

    Shapes:
        logits [T, E] float32, table [V, K] int32 of ids below E, tokens [T] int32; ids [T, K]
        int32, weights [T, K] float32
    """
    n_experts, top_k = logits.shape[1], ids.shape[1]
    _named_kernel[(logits.shape[0],)](
        logits, table, tokens, ids, weights, scale,
        n_experts, triton.next_power_of_2(n_experts), top_k, triton.next_power_of_2(top_k),
        SCORE_KINDS[score], renormalize, PTX, num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip


def route(
    logits: Tensor,
    bias: Tensor | None,
    *,
    ids: Tensor,
    weights: Tensor,
    score: Score,
    n_groups: int = 1,
    kept_groups: int = 1,
    renormalize: bool,
    scale: float,
    n_real: int | None = None,
    share: Tensor | None = None,
) -> None:
    """Choose the experts of each token and how much each counts; see `reference.route`.

    A NaN or infinite logit gives distinct ids in range and NaN for every weight of its token. With
    `n_real`, ids from there on are identity experts: they become -1 with weight 0, and their
    weights are added up in `share`.

    Shapes:
        logits [T, E] float32, bias [E] float32 or None; ids [T, K] int32, weights [T, K] float32;
        share [T] float32

    Raises:
        ValueError: more than `MOST_EXPERTS` or `MOST_CHOSEN`, or K above E.
    """
    n_experts, top_k = logits.shape[1], ids.shape[1]
    if n_experts > MOST_EXPERTS or top_k > min(MOST_CHOSEN, n_experts):
        raise ValueError(f"cannot choose {top_k} of {n_experts} experts")
    _route_kernel[(logits.shape[0],)](
        logits, logits if bias is None else bias, ids, weights, share, scale, top_k,
        n_experts, triton.next_power_of_2(n_experts), top_k, triton.next_power_of_2(top_k),
        SCORE_KINDS[score], bias is not None,
        n_groups, kept_groups, triton.next_power_of_2(n_groups), renormalize,
        n_experts if n_real is None else n_real, PTX,
        num_warps=1 if n_experts <= OF_A_WARP else 2 if n_experts <= 512 else 4,
        enable_fp_fusion=False,
    )  # fmt: skip
