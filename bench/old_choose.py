"""What an indexer's scores choose: the best entries of each row, in the order of the sequence.

Twin: `reference.choose`. A row's scores stay in registers while bounds close in on the rank of the
last one chosen; rows too long for that are read again for each pair of bounds. Launchers allocate
nothing and ask the device nothing, so they can be captured. Called on the engine thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.numbers import loop_bound
from moet_desk.kernels.triton.portable import INTERPRETED
from moet_desk.kernels.triton.seen import Places, Pooled

_SHORT, _LONG = 2048, 8192
"""Scores that a program holds: a row has one of these widths if it can, 4 or 16 a thread."""

_WARPS = 16

_NEVER, _BEYOND = tl.constexpr(-2139095041), tl.constexpr(2147483647)
"""The rank of -inf, and one above all."""


@triton.jit
def _ranks(line, at, live):
    """Scores as int32 in the same order; -0 as 0, NaN as infinity, what is not there as -inf."""
    x = tl.load(line + at, mask=live, other=float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)
    x = tl.where(x == x, x, float("inf"))
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _cuts(low, high):
    """Two ranks at thirds between `low` and `high`, which are 2 apart at least; int64."""
    third = tl.maximum((high - low) // 3, 1)
    return low + third, high - third


@triton.jit
def _narrowed(low, high, n_low, n_high, a, b, n_a, n_b, TOP_K: tl.constexpr):
    """The part of [low, high) that `a` and `b` cut, in which the last one chosen is. Counts are
    those of ranks from a bound on: at least TOP_K from `low`, fewer from `high`.
    """
    in_b, in_a = n_b >= TOP_K, n_a >= TOP_K
    low = tl.where(in_b, b, tl.where(in_a, a, low))
    n_low = tl.where(in_b, n_b, tl.where(in_a, n_a, n_low))
    n_high = tl.where(in_b, n_high, tl.where(in_a, n_b, n_a))
    high = tl.where(in_b, high, tl.where(in_a, b, a))
    return low, high, n_low, n_high


@triton.jit
def _bounds(rank, TOP_K: tl.constexpr):
    """(low, high, how many are above): all from `high` on are chosen, and of those in
    [low, high) the first ones. These are of one rank, or just as many as there is room for.
    """
    high = tl.max(rank, 0).to(tl.int64) + 1
    low = tl.min(tl.where(rank > _NEVER, rank, _BEYOND), 0).to(tl.int64)
    n_high = high.to(tl.int32) * 0
    n_low = n_high + TOP_K + 1  # not counted yet
    while (high - low > 1) & (n_low != TOP_K):
        a, b = _cuts(low, high)
        from_a = (rank >= a.to(tl.int32)).to(tl.int32)
        from_b = (rank >= b.to(tl.int32)).to(tl.int32)
        both = tl.sum(from_a + (from_b << 16), 0)
        n_a, n_b = both & 65535, both >> 16
        low, high, n_low, n_high = _narrowed(low, high, n_low, n_high, a, b, n_a, n_b, TOP_K)
    return low.to(tl.int32), high.to(tl.int32), n_high


@triton.jit
def _far_bounds(line, length, TOP_K: tl.constexpr, B: tl.constexpr, COMPILED: tl.constexpr):
    """`_bounds` of a row that is read again and again."""
    most = tl.full([B], _NEVER, tl.int32)
    least = tl.full([B], _BEYOND, tl.int32)
    for start in range(0, loop_bound(length, COMPILED), B):
        at = start + tl.arange(0, B)
        rank = _ranks(line, at, at < length)
        most = tl.maximum(most, rank)
        least = tl.minimum(least, tl.where(rank > _NEVER, rank, _BEYOND))
    high = tl.max(most, 0).to(tl.int64) + 1
    low = tl.min(least, 0).to(tl.int64)
    n_high = length * 0
    n_low = n_high + TOP_K + 1
    while (high - low > 1) & (n_low != TOP_K):
        a, b = _cuts(low, high)
        both = tl.zeros([B], tl.int32)
        for start in range(0, loop_bound(length, COMPILED), B):
            at = start + tl.arange(0, B)
            rank = _ranks(line, at, at < length)
            both += (rank >= a.to(tl.int32)).to(tl.int32)
            both += (rank >= b.to(tl.int32)).to(tl.int32) << 16
        n_a, n_b = tl.sum(both & 65535, 0), tl.sum(both >> 16, 0)
        low, high, n_low, n_high = _narrowed(low, high, n_low, n_high, a, b, n_a, n_b, TOP_K)
    return low.to(tl.int32), high.to(tl.int32), n_high


@triton.jit
def _take(rank, entry, to, low, high, room, sure, equal):
    """Put entries that are chosen behind the `sure` + min(`equal`, `room`) of blocks before this
    one, and give the two counts with this one's.
    """
    mine = rank >= high
    tie = (rank >= low) & (rank < high)
    packed = mine.to(tl.int32) + (tie.to(tl.int32) << 16)
    counted = tl.cumsum(packed, 0)
    nth = equal + (counted >> 16)
    place = sure + (counted & 65535) + tl.minimum(nth, room) - 1
    tl.store(to + place, entry, mask=mine | (tie & (nth <= room)))
    total = tl.sum(packed, 0)
    return sure + (total & 65535), equal + (total >> 16)


@triton.jit
def _entries(table, at, live, first, PAGE: tl.constexpr):
    """Numbers of entries, int32."""
    page = tl.load(table + at // PAGE, mask=live, other=0)
    return first + page * PAGE + at % PAGE


@triton.jit
def _choose_held(line, length, table, first, to, TOP_K: tl.constexpr, PAGE: tl.constexpr,
                 B: tl.constexpr):  # fmt: skip
    """Choose of a row of up to B scores; how many are chosen."""
    at = tl.arange(0, B)
    live = at < length
    rank = _ranks(line, at, live)
    entry = _entries(table, at, live, first, PAGE)
    low, high, above = _bounds(rank, TOP_K)
    room = TOP_K - above
    sure, equal = _take(rank, entry, to, low, high, room, 0, 0)
    return sure + tl.minimum(equal, room)


@triton.jit
def _choose_read(line, length, table, first, to, TOP_K: tl.constexpr, PAGE: tl.constexpr,
                 B: tl.constexpr, COMPILED: tl.constexpr):  # fmt: skip
    """`_choose_held` of a row of any length."""
    low, high, above = _far_bounds(line, length, TOP_K, B, COMPILED)
    room = TOP_K - above
    sure, equal = length * 0, length * 0
    for start in range(0, loop_bound(length, COMPILED), B):
        at = start + tl.arange(0, B)
        live = at < length
        rank = _ranks(line, at, live)
        entry = _entries(table, at, live, first, PAGE)
        sure, equal = _take(rank, entry, to, low, high, room, sure, equal)
    return sure + tl.minimum(equal, room)


@triton.jit
def _choose_long(line, length, table, first, to, TOP_K: tl.constexpr, PAGE: tl.constexpr,
                 LONG: tl.constexpr, MOST: tl.constexpr, COMPILED: tl.constexpr):  # fmt: skip
    """The same of a row of up to MOST scores, held if it can be."""
    if MOST <= LONG:
        count = _choose_held(line, length, table, first, to, TOP_K, PAGE, MOST)
    elif length <= LONG:
        count = _choose_held(line, length, table, first, to, TOP_K, PAGE, LONG)
    else:
        count = _choose_read(line, length, table, first, to, TOP_K, PAGE, LONG, COMPILED)
    return count


@triton.jit
def _choose_kernel(
    scores,
    scores_stride,
    lengths,
    table,
    table_stride,
    positions,
    rings,
    first,
    chosen,
    chosen_stride,
    counts,
    TOP_K: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    BK: tl.constexpr,
    BW: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    MOST: tl.constexpr,
    COMPILED: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + t)
    line = scores + t * scores_stride
    table += t * table_stride
    to = chosen + t * chosen_stride
    near = length * 0
    if positions is not None:
        position = tl.load(positions + t)
        near = tl.minimum(position + 1, WINDOW)
        place = tl.arange(0, BW)
        entry = tl.load(rings + t) + (position + 1 - near + place) % RING
        tl.store(to + place, entry, mask=place < near)
        to += near
    if length <= TOP_K:  # nothing was scored
        at = tl.arange(0, BK)
        tl.store(to + at, _entries(table, at, at < length, first, PAGE), mask=at < length)
        count = length
    elif MOST <= SHORT:
        count = _choose_held(line, length, table, first, to, TOP_K, PAGE, MOST)
    elif SHORT < LONG:
        if length <= SHORT:
            count = _choose_held(line, length, table, first, to, TOP_K, PAGE, SHORT)
        else:
            count = _choose_long(line, length, table, first, to, TOP_K, PAGE, LONG, MOST, COMPILED)
    else:
        count = _choose_long(line, length, table, first, to, TOP_K, PAGE, LONG, MOST, COMPILED)
    tl.store(counts + t, near + count)


def choose(scores: Tensor, lengths: Tensor, kv: KvPages, chosen: Tensor, counts: Tensor) -> None:
    """The K highest scores of each row, of equal ones the lowest place, as `reference.choose`; all
    that a row sees, whatever `scores` holds, if these are no more than K.

    Args:
        scores: of the entries that each row sees.
        lengths: how many these are.
        kv: pages of the attention, for where its entries lie.
        chosen: gets numbers of entries among all of a layer's, in the order of the sequence.
        counts: gets how many they are.

    Shapes:
        scores [T, S] float32, lengths and counts [T] int32, chosen [T, K] int32, rows apart
    """
    _launch(scores, lengths, kv, None, 0, chosen, counts, top_k=chosen.shape[1], window=1, ring=1)


def list_chosen(
    scores: Tensor,
    places: Places,
    pooled: Pooled,
    listed: Tensor,
    lengths: Tensor,
    *,
    top_k: int,
    window: int,
    ring: int,
) -> None:
    """Name the entries that each row sees, as `list_seen`, where an indexer chooses: those of its
    window in order, then the `top_k` best of the pooled ones as `choose` has them.

    Shapes:
        scores [T, S] float32, of `places.closed` windows; listed [T, window + top_k] int32, rows
        apart; lengths [T] int32
    """
    _launch(
        scores, places.closed, pooled.kv, places, pooled.first, listed, lengths, top_k=top_k,
        window=window, ring=ring,
    )  # fmt: skip


def _launch(
    scores: Tensor, lengths: Tensor, kv: KvPages, places: Places | None, first: int,
    chosen: Tensor, counts: Tensor, *, top_k: int, window: int, ring: int,
) -> None:  # fmt: skip
    most = triton.next_power_of_2(scores.shape[1])
    positions, rings = (None, None) if places is None else (places.positions, places.rings)
    _choose_kernel[(chosen.shape[0],)](
        scores, scores.stride(0), lengths, kv.table, kv.table.stride(0), positions, rings, first,
        chosen, chosen.stride(0), counts, TOP_K=top_k, PAGE=kv.page_tokens, WINDOW=window,
        RING=ring, BK=triton.next_power_of_2(top_k), BW=triton.next_power_of_2(window),
        SHORT=_SHORT if top_k < _SHORT else _LONG, LONG=_LONG, MOST=most, COMPILED=not INTERPRETED,
        num_warps=_WARPS,
    )  # fmt: skip
