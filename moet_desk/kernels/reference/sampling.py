"""Choosing a token from logits: the filters, the draw, and the counter-based uniform numbers.

Plain torch and plain integers; the reference for any faster version. Functions of their arguments
alone, so a request draws the same tokens alone and beside others. Called by the engine thread.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK_32 = 0xFFFF_FFFF
_PHILOX_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_PHILOX_WEYL = (0x9E37_79B9, 0xBB67_AE85)
_PHILOX_ROUNDS = 10

_FIRST_CANDIDATES = 128  # most draws end among these; sorting 8192 logits takes 0.5 ms
_LEAST = -torch.finfo(torch.float32).max  # at or above it: every token that is not at -inf


def philox_4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Return four random 32-bit words for a counter and a key.

    Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        product_0 = _PHILOX_MULTIPLIERS[0] * c0
        product_1 = _PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK_32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK_32,
        )
        k0 = (k0 + _PHILOX_WEYL[0]) & _MASK_32
        k1 = (k1 + _PHILOX_WEYL[1]) & _MASK_32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to a seed and a position.

    The counter is the position and the key is the seed (both modulo 2**64), so any number can be
    made without the ones before it. 53 bits, the precision of a double.
    """
    counter = (position & _MASK_32, (position >> 32) & _MASK_32, 0, 0)
    words = philox_4x32(counter, (seed & _MASK_32, (seed >> 32) & _MASK_32))
    return (((words[0] << 32) | words[1]) >> 11) * 2.0**-53


def greedy(logits: Tensor) -> int:
    """Return the id of the largest logit, the lowest id of equal ones.

    Shapes:
        logits [V]
    """
    return int(logits.max(0).indices)  # max gives the first of equal ones, in half of argmax's time


def sample(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    u: float,
) -> int:
    """Draw a token id.

    The filters are those of Hugging Face in its order: temperature, top_k (equal logits at the edge
    all stay), top_p (of what top_k left; the token that crosses the edge stays), min_p (relative to
    the best token). All three keep a beginning of the tokens in order of probability, so only as
    many tokens are sorted as the draw needs.

    Shapes:
        logits [V] float32, finite or -inf, at least one finite

    Args:
        logits: penalties and biases are in it already.
        temperature: 0 takes the largest logit.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        u: in [0, 1); the token is the first one, by probability descending and id ascending, at
            which the cumulative probability goes above it.
    """
    if temperature == 0:
        return greedy(logits)
    vocab = logits.shape[0]
    best = float(logits.max())
    top_k_edge = float(logits.topk(top_k).values[-1]) if 0 < top_k < vocab else _LEAST
    min_p_edge = best + temperature * math.log(min_p) if min_p > 0 else _LEAST
    edge = max(top_k_edge, min_p_edge)
    needs_total = top_p < 1 or edge == _LEAST
    total = _total(logits, top_k_edge, best=best, temperature=temperature) if needs_total else 0.0
    n_sorted = _FIRST_CANDIDATES if needs_total else vocab
    while True:
        cut = edge
        if n_sorted < vocab:
            cut = max(edge, float(logits.topk(n_sorted).values[-1]))
        ids = (logits >= cut).nonzero().flatten()  # [C], ascending
        ordered, order = logits[ids].sort(descending=True, stable=True)  # [C], equal ones by id
        weights = torch.exp((ordered.double() - best) / temperature)  # [C]
        at = _draw(weights, total, top_p=top_p, u=u, is_all=cut == edge)
        if at is not None:
            return int(ids[order[at]])
        n_sorted *= 16


def _total(logits: Tensor, top_k_edge: float, *, best: float, temperature: float) -> float:
    """Sum of exp((logit - best) / temperature) over what top_k left.

    Shapes:
        logits [V]
    """
    weights = torch.exp((logits.double() - best) / temperature)  # [V]
    if top_k_edge > _LEAST:
        weights = weights[logits >= top_k_edge]
    return float(weights.sum())


def _draw(weights: Tensor, total: float, *, top_p: float, u: float, is_all: bool) -> int | None:
    """Return the place of the drawn token in `weights`; None if it may lie behind them.

    Shapes:
        weights [C] float64, descending: the heaviest tokens, or all that are left (`is_all`)

    Args:
        weights: relative probabilities.
        total: their sum over everything that top_k left, for top_p and for an incomplete list.
        top_p: 1 is off.
        u: in [0, 1).
        is_all: nothing is left behind `weights`.
    """
    reached = weights.cumsum(0)  # [C]
    n_kept = len(weights)
    if top_p < 1:
        n_kept = max(1, int((reached - weights < top_p * total).sum()))
    is_complete = is_all or n_kept < len(weights)
    if is_complete:
        kept = float(reached[n_kept - 1])
    elif top_p < 1:
        return None  # how much stays is not known yet
    else:
        kept = total
    target = min(u * kept, math.nextafter(kept, 0.0))  # the product may round up to `kept`
    at = int(torch.searchsorted(reached, target, right=True))
    return at if at < n_kept else None
