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
from moet_desk.kernels.triton.loads import in_order
from moet_desk.kernels.triton.numbers import loop_bound
from moet_desk.kernels.triton.portable import INTERPRETED
from moet_desk.kernels.triton.seen import Places, Pooled

_SHORT, _LONG = 2048, 8192
"""Scores that a program holds: a row has one of these widths if it can."""

_RUN, _MOST_WARPS = 8, 16
"""Scores in sequence that a thread holds, or more where a program would have too many warps."""

_NEVER, _BEYOND = tl.constexpr(-2139095041), tl.constexpr(2147483647)
"""The rank of -inf, and one above all."""


@triton.jit
def _fours(line, at, size, LANES: tl.constexpr, ALIGNED: tl.constexpr):
    """Four scores from each of `at` on, as they are compared: -0 as 0, NaN as infinity, -inf behind
    `size`, of which an ALIGNED one and its line are whole fours.
    """
    place = at[:, None] + tl.arange(0, 4)[None, :]
    here = (at < size)[:, None] if ALIGNED else place < size
    x = tl.load(line + place, mask=here, other=float("-inf"))
    x = tl.where(x == x, x, float("inf")) + 0.0
    even, odd = tl.split(tl.reshape(x, (LANES, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _held(line, start, size, B: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr):
    """B scores from `start` on, as many tensors [LANES] as a lane has: a lane's are neighbours."""
    RUN: tl.constexpr = B // LANES
    x = ()
    for r in tl.static_range(0, RUN, 4):
        x = x + _fours(line, start + tl.arange(0, LANES) * RUN + r, size, LANES, ALIGNED)
    return x


@triton.jit
def _seen(x, start, length, LANES: tl.constexpr):
    """The same with -inf behind the row's length."""
    seen = ()
    for r in tl.static_range(len(x)):
        at = start + tl.arange(0, LANES) * len(x) + r
        seen = seen + (tl.where(at < length, x[r], float("-inf")),)
    return seen


@triton.jit
def _number(table, at, seen, PAGE: tl.constexpr):
    """Numbers of the entries at places of a sequence; the places where there is no table."""
    if table is None:
        return at
    else:
        return tl.load(table + at // PAGE, mask=seen, other=0) * PAGE + at % PAGE


@triton.jit
def _entries(table, start, size, first, B: tl.constexpr, LANES: tl.constexpr,
             PAGE: tl.constexpr):  # fmt: skip
    """Numbers of the entries of `_held`, int32."""
    RUN: tl.constexpr = B // LANES
    EACH: tl.constexpr = (PAGE | RUN) & -(PAGE | RUN)  # of a lane that are on one page
    entry = ()
    for r in tl.static_range(0, RUN, EACH):
        at = start + tl.arange(0, LANES) * RUN + r
        number = first + _number(table, at, at < size, PAGE)
        for i in tl.static_range(EACH):
            entry = entry + (number + i,)
    return entry


@triton.jit
def _rank(x):
    """Scores as int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _of_rank(rank):
    """The score of a rank; of those above infinity's NaN, which no score reaches."""
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _widened(x, least, most):
    """`least` and `most` of each lane with those of `x`, of what is above -inf."""
    for r in tl.static_range(len(x)):
        least = tl.minimum(least, tl.where(x[r] > float("-inf"), x[r], float("inf")))
        most = tl.maximum(most, x[r])
    return least, most


@triton.jit
def _reached(x, limit):
    """How many of each lane's scores reach a limit, float32: a comparison gives 1.0 in one
    instruction. Four sums, because an addition waits for the one before.
    """
    a, b = tl.where(x[0] >= limit, 1.0, 0.0), tl.where(x[1] >= limit, 1.0, 0.0)
    c, d = tl.where(x[2] >= limit, 1.0, 0.0), tl.where(x[3] >= limit, 1.0, 0.0)
    for r in tl.static_range(4, len(x), 4):
        a += tl.where(x[r] >= limit, 1.0, 0.0)
        b += tl.where(x[r + 1] >= limit, 1.0, 0.0)
        c += tl.where(x[r + 2] >= limit, 1.0, 0.0)
        d += tl.where(x[r + 3] >= limit, 1.0, 0.0)
    return (a + b) + (c + d)


@triton.jit
def _whole(x):
    """Whole numbers of float32, less than 2**23: they are the last bits behind 2**23. A conversion
    would have what they are made of done in integers.
    """
    return (x + 8388608.0).to(tl.int32, bitcast=True) & 0x7FFFFF


@triton.jit
def _bounds(line, length, x, TOP_K: tl.constexpr, B: tl.constexpr, LANES: tl.constexpr,
            ALIGNED: tl.constexpr, COMPILED: tl.constexpr):  # fmt: skip
    """(low, high, how many are above): all ranks from `high` on are chosen, and of those in
    [low, high) the first ones. These are of one rank, or just as many as there is room for; if
    [low, high) is empty all are chosen that there are. Scores are `x`, or read again and again.

    The first cuts are at the lowest score, since they may be too few, and halfway to the highest;
    the others at thirds of what is left, of ranks: of scores on both sides of zero most ranks are
    of tiny ones, of which there may be none.
    """
    HELD: tl.constexpr = len(x) > 0
    least = tl.full([LANES], float("inf"), tl.float32)
    most = -least
    if HELD:
        least, most = _widened(x, least, most)
    else:
        for start in range(0, loop_bound(length, COMPILED), B):
            own = _seen(_held(line, start, length, B, LANES, ALIGNED), start, length, LANES)
            least, most = _widened(own, least, most)
    # both in one reduction
    which = tl.arange(0, 2)
    ends = tl.max(tl.where(which[:, None] == 0, ~_rank(least)[None, :], _rank(most)[None, :]), 1)
    low = ~tl.max(tl.where(which == 0, ends, _NEVER), 0)
    high = tl.max(tl.where(which == 1, ends, _NEVER), 0)
    searched = low <= high
    middle = 0.5 * _of_rank(tl.minimum(low, high)) + 0.5 * _of_rank(high)
    a, b = low, tl.minimum(_rank(middle), high)
    high += 1
    n_high = high * 0
    while searched:
        one, two = _of_rank(a), _of_rank(b)
        if HELD:
            both = tl.sum(_whole(_reached(x, one) + _reached(x, two) * 65536.0), 0)
            n_a, n_b = both & 65535, both >> 16
        else:
            n_one = tl.zeros([LANES], tl.float32)
            n_two = n_one
            for start in range(0, loop_bound(length, COMPILED), B):
                own = _seen(_held(line, start, length, B, LANES, ALIGNED), start, length, LANES)
                n_one += _reached(own, one)
                n_two += _reached(own, two)
            n_a, n_b = tl.sum(_whole(n_one), 0), tl.sum(_whole(n_two), 0)
        in_a, in_b = n_a >= TOP_K, n_b >= TOP_K
        low = tl.where(in_b, b, tl.where(in_a, a, low))
        n_high = tl.where(in_b, n_high, tl.where(in_a, n_b, n_a))
        high = tl.where(in_b, high, tl.where(in_a, b, a))
        span = (high - low).to(tl.uint32, bitcast=True)
        third = tl.maximum(span // 3, 1).to(tl.int32, bitcast=True)
        a, b = low + third, high - third
        searched = (span > 1) & (n_a != TOP_K) & (n_b != TOP_K)
    return low, high, n_high


@triton.jit
def _take(x, entry, to, low, high, room, sure, equal):
    """Put entries that are chosen behind the `sure` + min(`equal`, `room`) of blocks before this
    one, and give the two counts with this one's.
    """
    low, high = _of_rank(low), _of_rank(high)
    passed = ()  # how many of a lane's are above, and equal
    own = (x[0] >= high).to(tl.int32) * 0
    for r in tl.static_range(len(x)):
        own += tl.where(x[r] >= high, 1, tl.where(x[r] >= low, 65536, 0))
        passed = passed + (own,)
    before = tl.cumsum(own, 0) - own
    for r in tl.static_range(len(x)):
        counted = before + passed[r]
        nth = equal + (counted >> 16)
        place = sure + (counted & 65535) + tl.minimum(nth, room) - 1
        chosen = (x[r] >= high) | ((x[r] >= low) & (nth <= room))
        tl.store(to + place, entry[r], mask=chosen)
    total = tl.sum(own, 0)
    return sure + (total & 65535), equal + (total >> 16)


@triton.jit
def _choose_held(x, entry, line, length, to, TOP_K: tl.constexpr, B: tl.constexpr,
                 LANES: tl.constexpr, COMPILED: tl.constexpr):  # fmt: skip
    """Choose of a row of up to B scores; how many are chosen."""
    x = _seen(x, 0, length, LANES)
    low, high, above = _bounds(line, length, x, TOP_K, B, LANES, False, COMPILED)
    _take(x, entry, to, low, high, TOP_K - above, 0, 0)
    return tl.where(low < high, TOP_K, above)


@triton.jit
def _choose_long(line, length, table, first, to, TOP_K: tl.constexpr, PAGE: tl.constexpr,
                 B: tl.constexpr, LANES: tl.constexpr, HELD: tl.constexpr, ALIGNED: tl.constexpr,
                 COMPILED: tl.constexpr):  # fmt: skip
    """The same, if they are HELD, or of a row of any length."""
    if HELD:
        x = _held(line, 0, length, B, LANES, ALIGNED)
        entry = _entries(table, 0, length, first, B, LANES, PAGE)
        return _choose_held(x, entry, line, length, to, TOP_K, B, LANES, COMPILED)
    else:
        low, high, above = _bounds(line, length, (), TOP_K, B, LANES, ALIGNED, COMPILED)
        sure, equal = length * 0, length * 0
        for start in range(0, loop_bound(length, COMPILED), B):
            own = _seen(_held(line, start, length, B, LANES, ALIGNED), start, length, LANES)
            entry = _entries(table, start, length, first, B, LANES, PAGE)
            sure, equal = _take(own, entry, to, low, high, TOP_K - above, sure, equal)
        return tl.where(low < high, TOP_K, above)


@triton.jit
def _choose_kernel(
    scores,
    scores_stride,
    size,
    lengths,
    table,
    table_stride,
    table_size,
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
    LANES: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    MOST: tl.constexpr,
    ALIGNED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    line = scores + t * scores_stride
    if ALIGNED:
        line = tl.multiple_of(line, 16)
    if table is not None:
        table += t * table_stride
    if MOST <= SHORT:  # asked for while nobody knows yet how many there are
        x = _held(line, 0, size, MOST, LANES, ALIGNED)
        entry = _entries(table, 0, table_size * PAGE, first, MOST, LANES, PAGE)
    length = in_order(tl.load(lengths + t), COMPILED)
    to = chosen + t * chosen_stride
    near = length * 0
    if positions is not None:
        position = tl.load(positions + t)
        near = tl.minimum(position + 1, WINDOW)
        place = tl.arange(0, BW)
        own = tl.load(rings + t) + (position + 1 - near + place) % RING
        tl.store(to + place, own, mask=place < near)
        to += near
    if length <= TOP_K:  # nothing was scored
        at = tl.arange(0, BK)
        tl.store(to + at, first + _number(table, at, at < length, PAGE), mask=at < length)
        count = length
    elif MOST <= SHORT:
        count = _choose_held(x, entry, line, length, to, TOP_K, MOST, LANES, COMPILED)
    elif length <= SHORT:
        count = _choose_long(
            line, length, table, first, to, TOP_K, PAGE, SHORT, LANES, True, ALIGNED, COMPILED
        )
    elif MOST <= LONG:
        count = _choose_long(
            line, length, table, first, to, TOP_K, PAGE, MOST, LANES, True, ALIGNED, COMPILED
        )
    elif SHORT == LONG:
        count = _choose_long(
            line, length, table, first, to, TOP_K, PAGE, LONG, LANES, False, ALIGNED, COMPILED
        )
    elif length <= LONG:
        count = _choose_long(
            line, length, table, first, to, TOP_K, PAGE, LONG, LANES, True, ALIGNED, COMPILED
        )
    else:
        count = _choose_long(
            line, length, table, first, to, TOP_K, PAGE, LONG, LANES, False, ALIGNED, COMPILED
        )
    tl.store(counts + t, near + count)


def choose(
    scores: Tensor, lengths: Tensor, kv: KvPages | None, chosen: Tensor, counts: Tensor
) -> None:
    """The K highest scores of each row, of equal ones the lowest place, as `reference.choose`; all
    that a row sees, whatever `scores` holds, if these are no more than K.

    Args:
        scores: of the entries that each row sees.
        lengths: how many these are.
        kv: pages of the attention, for where its entries lie; None: places are asked for.
        chosen: gets numbers of entries among all of a layer's, or their places in the sequence, in
            the order of the sequence.
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
    scores: Tensor, lengths: Tensor, kv: KvPages | None, places: Places | None, first: int,
    chosen: Tensor, counts: Tensor, *, top_k: int, window: int, ring: int,
) -> None:  # fmt: skip
    most = max(32 * _RUN, triton.next_power_of_2(scores.shape[1]))
    short = _SHORT if top_k < _SHORT else _LONG
    warps = max(1, min(_MOST_WARPS, min(most, _LONG) // (32 * _RUN)))
    aligned = not (scores.shape[1] % 4 or scores.stride(0) % 4 or scores.data_ptr() % 16)
    table, stride, size, page = None, 0, scores.shape[1], 1
    if kv is not None:
        table, page = kv.table, kv.page_tokens
        stride, size = table.stride(0), table.shape[1]
    positions, rings = (None, None) if places is None else (places.positions, places.rings)
    _choose_kernel[(chosen.shape[0],)](
        scores, scores.stride(0), scores.shape[1], lengths, table, stride, size,
        positions, rings, first, chosen, chosen.stride(0), counts, TOP_K=top_k,
        PAGE=page, WINDOW=window, RING=ring, BK=triton.next_power_of_2(top_k),
        BW=triton.next_power_of_2(window), LANES=min(32 * warps, short // 4), SHORT=short,
        LONG=_LONG, MOST=most, ALIGNED=aligned, COMPILED=not INTERPRETED, num_warps=warps,
    )  # fmt: skip
