"""Choosing each row's token on the device, and how sure the model is.

Twins: `reference.sampling.greedy`, `sample`, `uniform`. `greedy` is two launches; `sample` adds
twelve for rows with a temperature and passes over the others. Launchers allocate nothing; working
memory is a `SampleScratch`. Called on the engine thread.

Summing order: a weight exp((logit - best) / temperature) is made in float64 and kept as a whole
number of 2**-44, and whole numbers add up to the same sum in any order. So nothing here depends on
scheduling, and a choice can differ from the twin's, whose float64 sums are rounded, only if a
border or the draw falls within about 2**-26 of V rounded weights (1e-8 of all draws for 262,144).

A search never sorts: it narrows the place where a running sum passes a target by eight bits of the
logit's order at a time, in four passes over all logits. Three searches follow each other: the k-th
largest logit, the token that crosses top_p, the drawn token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_REPLICAS = 8
"""Copies of each sum, so that atomic additions of hot sums rarely wait for each other."""

_BINS = 256
_TOP_K, _TOP_P, _DRAW = 0, 1, 2
_SEARCHES, _PASSES = 3, 4
_CELLS = 4  # edge of top_k; edge of all filters; weight above it; the draw's target

MAX_VOCAB = 1 << 18
"""Weights of more logits could overflow a sum."""


@dataclass(frozen=True, slots=True)
class SampleScratch:
    """Working memory for some rows over a vocabulary.

    Attributes:
        chunk_best, chunk_sum: float32 [T, C]; chunk_id: int32 [T, C]; best: float32 [T].
        weights: int64 [T, V]; bins: int64 [T, 3, 4, R, 256]; state: int64 [T, 3, 4, 2].
        cells: int64 [T, 4]; first_ids: int32 [T, 256].
    """

    chunk_best: Tensor
    chunk_sum: Tensor
    chunk_id: Tensor
    best: Tensor
    weights: Tensor
    bins: Tensor
    state: Tensor
    cells: Tensor
    first_ids: Tensor

    @classmethod
    def make(cls, rows: int, vocab: int, *, device: torch.device) -> SampleScratch:
        """Memory for `rows` rows of `vocab` logits.

        Raises:
            ValueError: the vocabulary is larger than 262,144.
        """
        if vocab > MAX_VOCAB:
            raise ValueError(f"{vocab} logits are more than {MAX_VOCAB}")

        def room(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        chunks = -(-vocab // _BLOCK)
        return cls(
            chunk_best=room(torch.float32, chunks),
            chunk_sum=room(torch.float32, chunks),
            chunk_id=room(torch.int32, chunks),
            best=room(torch.float32),
            weights=room(torch.int64, vocab),
            bins=room(torch.int64, _SEARCHES, _PASSES, _REPLICAS, _BINS),
            state=room(torch.int64, _SEARCHES, _PASSES, 2),
            cells=room(torch.int64, _CELLS),
            first_ids=room(torch.int32, _BINS),
        )


def wish(
    *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[float, float, float, float]:
    """One row of `wishes` from what `reference.sampling.sample` takes; temperature 0 is greedy."""
    floor = temperature * math.log(min_p) if min_p > 0 and temperature > 0 else -math.inf
    return temperature, float(top_k), top_p, floor


@triton.jit
def _scan_kernel(logits, stride, chunk_best, chunk_sum, chunk_id, V, BLOCK: tl.constexpr):
    c = tl.program_id(0)
    t = tl.program_id(1)
    at = c * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + t.to(tl.int64) * stride + at, mask=at < V, other=float("-inf"))
    best, place = tl.max(x, 0, return_indices=True)
    base = tl.where(best == float("-inf"), 0.0, best)
    to = t * tl.num_programs(0) + c
    tl.store(chunk_best + to, best)
    tl.store(chunk_id + to, c * BLOCK + place)
    # NaN and infinity both make this NaN.
    tl.store(chunk_sum + to, tl.sum(tl.exp(x - base), 0))


@triton.jit
def _settle_kernel(
    chunk_best,
    chunk_sum,
    chunk_id,
    best,
    tokens,
    confidence,
    error,
    C: tl.constexpr,
    BC: tl.constexpr,
    NAN_BIT: tl.constexpr,
):
    t = tl.program_id(0)
    c = tl.arange(0, BC)
    chunk = tl.load(chunk_best + t * C + c, mask=c < C, other=float("-inf"))
    sums = tl.load(chunk_sum + t * C + c, mask=c < C, other=0.0)
    top, place = tl.max(chunk, 0, return_indices=True)
    total = tl.sum(tl.where(c < C, sums * tl.exp(chunk - top), 0.0), 0)
    tl.store(best + t, top)
    tl.store(tokens + t, tl.load(chunk_id + t * C + place))
    tl.store(confidence + t, tl.div_rn(1.0, total))
    if (total != total) | (top == float("-inf")):
        tl.atomic_or(error, NAN_BIT)


@triton.jit
def _order(x):
    """Whole numbers (int64, 0 .. 2**32 - 1) that stand in the order of float32, -0 beside 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


@triton.jit
def _value_at(order):
    """The float32 whose `_order` it is."""
    bits = (order - 2147483648).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, best, temperature):
    """exp((x - best) / temperature) in units of 2**-44."""
    power = (x.to(tl.float64) - best.to(tl.float64)) / temperature
    return (tl.exp(power) * 17592186044416.0 + 0.5).to(tl.int64)


@triton.jit
def _uniform(seed, position):
    """`reference.sampling.uniform`: Philox4x32-10, 53 bits in [0, 1), float64."""
    low: tl.constexpr = 0xFFFFFFFF
    c0 = position.to(tl.uint64, bitcast=True) & low
    c1 = position.to(tl.uint64, bitcast=True) >> 32
    c2 = c0 * 0
    c3 = c0 * 0
    k0 = seed.to(tl.uint64, bitcast=True) & low
    k1 = seed.to(tl.uint64, bitcast=True) >> 32
    for _ in tl.static_range(10):
        first = c0 * 0xD2511F53
        second = c2 * 0xCD9E8D57
        c0 = (second >> 32) ^ c1 ^ k0
        c1 = second & low
        c2 = (first >> 32) ^ c3 ^ k1
        c3 = first & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    return (((c0 << 32) | c1) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _weigh_kernel(
    logits,
    stride,
    wishes,
    best,
    tokens,
    weights,
    bins,
    cells,
    first_ids,
    V,
    BLOCK: tl.constexpr,
    ROW_BINS: tl.constexpr,
    SLICE: tl.constexpr,
    BS: tl.constexpr,
):
    """Weights of all logits, and clean sums for the searches."""
    c = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    temperature = tl.load(wishes + t * 4)
    if temperature > 0:
        at = c * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + t * stride + at, mask=at < V, other=float("-inf"))
        tl.store(weights + t * V + at, _weight(x, tl.load(best + t), temperature), mask=at < V)
        offset = tl.arange(0, BS)
        inside = (offset < SLICE) & (c * SLICE + offset < ROW_BINS)
        tl.store(bins + t * ROW_BINS + c * SLICE + offset, offset.to(tl.int64) * 0, mask=inside)
        if c == 0:
            tl.store(cells + t * 4 + tl.arange(0, 4), tl.zeros([4], tl.int64))
            # If numbers are invalid no bin is hit: then the largest logit's id comes out.
            ids = tl.zeros([256], tl.int32) + tl.load(tokens + t)
            tl.store(first_ids + t * 256 + tl.arange(0, 256), ids + V)


@triton.jit
def _bin_sums(bins, S: tl.constexpr, P: tl.constexpr, REPLICAS: tl.constexpr):
    """Sums [256] of a pass, over the copies."""
    copy = tl.arange(0, REPLICAS)[:, None] * 256 + tl.arange(0, 256)[None, :]
    return tl.sum(tl.load(bins + (S * 4 + P) * REPLICAS * 256 + copy), 0)


@triton.jit
def _choose(sums, before, target):
    """The digit in which `target` lies, counted from the largest, and the sum before it."""
    digit = tl.arange(0, 256)
    above = before + tl.sum(sums, 0) - tl.cumsum(sums, 0)
    hit = (above <= target) & (target < above + sums)
    place = tl.sum(tl.where(hit, digit, 0).to(tl.int64), 0)
    return place, tl.sum(tl.where(hit, above, 0), 0)


@triton.jit
def _settled(bins, state, target, S: tl.constexpr, P: tl.constexpr, REPLICAS: tl.constexpr):
    """Digits chosen up to pass P of a search, as one number, and the sum before them."""
    sums = _bin_sums(bins, 1 if P == 0 and S == 2 else S, P, REPLICAS)
    if P == 0:
        place, before = _choose(sums, target * 0, target)
        return place, before
    else:
        prefix = tl.load(state + (S * 4 + P - 1) * 2)
        place, before = _choose(sums, tl.load(state + (S * 4 + P - 1) * 2 + 1), target)
        return prefix * 256 + place, before


@triton.jit
def _edges(wishes, best, bins, state, V, REPLICAS: tl.constexpr):
    """Orders of the lowest logit that top_k keeps, and that all of top_k and min_p keep."""
    top_k = tl.load(wishes + 1)
    edge = _order(tl.full([1], -3.4028234663852886e38, tl.float32))
    if (top_k > 0) & (top_k < V):
        found, _ = _settled(bins, state, top_k.to(tl.int64) - 1, 0, 3, REPLICAS)
        edge = tl.maximum(edge, found)
    edge = tl.max(edge, 0)
    floor = (tl.load(best).to(tl.float64) + tl.load(wishes + 3)).to(tl.float32)
    return edge, tl.maximum(edge, _order(floor))


@triton.jit
def _top_p_target(wishes, bins, REPLICAS: tl.constexpr):
    """The crossing token is the first at which the running weight passes this."""
    total = tl.sum(_bin_sums(bins, 1, 0, REPLICAS), 0)
    border = tl.ceil(tl.load(wishes + 2) * total.to(tl.float64)).to(tl.int64) - 1
    return tl.minimum(tl.maximum(border, 0), total - 1)


@triton.jit
def _draw_target(wishes, draws, best, bins, state, cells, REPLICAS: tl.constexpr):
    """The drawn token is the first at which the running weight passes this."""
    kept = tl.load(cells + 2)
    if tl.load(wishes + 2) < 1.0:
        target = _top_p_target(wishes, bins, REPLICAS)
        order, before = _settled(bins, state, target, 1, 3, REPLICAS)
        w = tl.maximum(_weight(_value_at(order), tl.load(best), tl.load(wishes)), 1)
        kept = tl.minimum(kept, before + ((target - before) // w + 1) * w)
    u = _uniform(tl.load(draws), tl.load(draws + 1))
    return tl.minimum((u * kept.to(tl.float64)).to(tl.int64), kept - 1)


@triton.jit
def _pass_kernel(
    logits,
    stride,
    weights,
    wishes,
    draws,
    best,
    bins,
    state,
    cells,
    first_ids,
    V,
    S: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    REPLICAS: tl.constexpr,
):
    """Pass P of search S: choose the digit of the pass before, then sum by the next one."""
    c = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    wishes += t * 4
    draws += t * 2
    best += t
    bins += t * (3 * 4 * 256 * REPLICAS)
    state += t * (3 * 4 * 2)
    cells += t * 4
    top_k = tl.load(wishes + 1)
    used = tl.load(wishes) > 0
    if S == 0:
        used = used & (top_k > 0) & (top_k < V)
    if S == 1 and P > 0:
        used = used & (tl.load(wishes + 2) < 1.0)
    if used:
        at = c * BLOCK + tl.arange(0, BLOCK)
        order = _order(tl.load(logits + t * stride + at, mask=at < V, other=float("-inf")))
        match = at < V
        if S == 0:
            mass = (at >= 0).to(tl.int64)
            target = top_k.to(tl.int64) - 1
        else:
            mass = tl.load(weights + t * V + at, mask=at < V, other=0)
            if S == 1 and P == 0:
                edge, floor = _edges(wishes, best, bins, state, V, REPLICAS)
                tl.atomic_add(cells + 2, tl.sum(tl.where(order >= floor, mass, 0), 0))
                if c == 0:
                    tl.store(cells, edge)
                    tl.store(cells + 1, floor)
            else:
                edge = tl.load(cells)
            mass = tl.where(order >= edge, mass, 0)
            if S == 1 and P > 0:
                target = _top_p_target(wishes, bins, REPLICAS)
            if S == 2:
                if P == 1:
                    target = _draw_target(wishes, draws, best, bins, state, cells, REPLICAS)
                    if c == 0:
                        tl.store(cells + 3, target)
                else:
                    target = tl.load(cells + 3)
        if P > 0:
            prefix, before = _settled(bins, state, target, S, P - 1, REPLICAS)
            match = match & ((order >> (32 - 8 * P)) == prefix)
            if c == 0:
                tl.store(state + (S * 4 + P - 1) * 2, prefix)
                tl.store(state + (S * 4 + P - 1) * 2 + 1, before)
        digit = (order >> (24 - 8 * P)) & 255
        match = match & (mass > 0)
        to = bins + ((S * 4 + P) * REPLICAS + c % REPLICAS) * 256 + digit
        tl.atomic_add(to, mass, mask=match, sem="relaxed")
        if S == 2 and P == 3:
            tl.atomic_min(first_ids + t * 256 + digit, at, mask=match, sem="relaxed")


@triton.jit
def _finish_kernel(
    logits,
    stride,
    wishes,
    best,
    bins,
    state,
    cells,
    first_ids,
    tokens,
    V,
    BLOCK: tl.constexpr,
    REPLICAS: tl.constexpr,
):
    """The drawn token; among equal logits by id."""
    t = tl.program_id(0).to(tl.int64)
    temperature = tl.load(wishes + t * 4)
    if temperature > 0:
        target = tl.load(cells + t * 4 + 3)
        bins += t * (3 * 4 * 256 * REPLICAS)
        order, before = _settled(bins, state + t * (3 * 4 * 2), target, 2, 3, REPLICAS)
        w = tl.maximum(_weight(_value_at(order), tl.load(best + t), temperature), 1)
        rank = (target - before) // w
        chosen = tl.load(first_ids + t * 256 + (order & 255)) % V
        first = 0
        searching = rank > 0
        while searching & (first < V):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(logits + t * stride + at, mask=at < V, other=float("-inf"))
            equal = ((_order(x) == order) & (at < V)).to(tl.int64)
            count = tl.sum(equal, 0)
            if rank < count:
                mine = (equal > 0) & (tl.cumsum(equal, 0) == rank + 1)
                chosen = tl.sum(tl.where(mine, at, 0), 0)
                searching = searching & False
            else:
                rank -= count  # may become 0: then it is the first one of a later block
            first += BLOCK
        tl.store(tokens + t, chosen)


def greedy(
    logits: Tensor,
    tokens: Tensor,
    confidence: Tensor,
    error: Tensor,
    *,
    scratch: SampleScratch,
) -> None:
    """Take the largest logit of each row, the lowest id of equal ones.

    Shapes:
        logits [T, V] float32 (rows may lie apart); tokens [T] int32
        confidence [T] float32: the probability of the largest logit
        error [1] int32: bit 2 is set if a row has NaN or infinity, or nothing finite
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, _BLOCK)
    _scan_kernel[(chunks, rows)](
        logits, logits.stride(0), scratch.chunk_best, scratch.chunk_sum, scratch.chunk_id, vocab,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    _settle_kernel[(rows,)](
        scratch.chunk_best, scratch.chunk_sum, scratch.chunk_id, scratch.best, tokens, confidence,
        error, C=chunks, BC=triton.next_power_of_2(chunks), NAN_BIT=4, num_warps=1,
    )  # fmt: skip


def sample(
    logits: Tensor,
    wishes: Tensor,
    draws: Tensor,
    tokens: Tensor,
    confidence: Tensor,
    error: Tensor,
    *,
    scratch: SampleScratch,
) -> None:
    """Draw a token for each row as `reference.sampling.sample` does, with `uniform`'s number.

    Shapes:
        logits [T, V] float32 (rows may lie apart; penalties and biases are in them already)
        wishes [T, 4] float64, rows as from `wish`; draws [T, 2] int64: seed and position
        tokens, confidence, error: as in `greedy`
    """
    greedy(logits, tokens, confidence, error, scratch=scratch)
    rows, vocab = logits.shape
    grid = (triton.cdiv(vocab, _BLOCK), rows)
    row_bins = _SEARCHES * _PASSES * _REPLICAS * _BINS
    share = triton.cdiv(row_bins, grid[0])
    _weigh_kernel[grid](
        logits, logits.stride(0), wishes, scratch.best, tokens, scratch.weights, scratch.bins,
        scratch.cells, scratch.first_ids, vocab, BLOCK=_BLOCK, ROW_BINS=row_bins, SLICE=share,
        BS=triton.next_power_of_2(share), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    for search in (_TOP_K, _TOP_P, _DRAW):
        for step in range(1 if search == _DRAW else 0, _PASSES):
            _pass_kernel[grid](
                logits, logits.stride(0), scratch.weights, wishes, draws, scratch.best,
                scratch.bins, scratch.state, scratch.cells, scratch.first_ids, vocab,
                S=search, P=step, BLOCK=_BLOCK, REPLICAS=_REPLICAS,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    _finish_kernel[(rows,)](
        logits, logits.stride(0), wishes, scratch.best, scratch.bins, scratch.state, scratch.cells,
        scratch.first_ids, tokens, vocab, BLOCK=4 * _BLOCK, REPLICAS=_REPLICAS,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
