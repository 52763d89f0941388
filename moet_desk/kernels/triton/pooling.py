"""Pooled entries in a step: each row's token joins the sums of its open window, and where it closes
the window, the entry is normed, rotated and stored.

Twins: `reference.OpenWindow`, token by token, then `reference.rms_norm`, `reference.rotate` and
`reference.shared_write`. States are slots of a table: a row reads one and writes another, so
whoever keeps the first can go back to it. A row may go on from what a row before it wrote, as
several tokens of one sequence do. Launchers allocate nothing and ask the device nothing, so they
can be captured. Called on the engine thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import POOL_STATES, SHARED_BLOCK
from moet_desk.kernels.triton.kv_entries import store_rope, store_vector
from moet_desk.kernels.triton.numbers import bf16_code, e4m3_code, loop_bound
from moet_desk.kernels.triton.portable import INTERPRETED

_NUMBERS = 64
"""Numbers of an entry that a program pools."""


@triton.jit
def _joined(peak, total, weighted, logit, share, value):
    """Sums of two groups of tokens; a group of none has the peak -inf."""
    new = tl.maximum(peak, logit)
    mine, theirs = tl.exp(peak - new), tl.exp(logit - new)
    return new, total * mine + share * theirs, weighted * mine + value * theirs


@triton.jit
def _pool_kernel(
    joined,
    joined_stride,
    places,
    positions,
    states,
    sources,
    targets,
    means,
    n_rows,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    B: tl.constexpr,
    COMPILED: tl.constexpr,
):
    WIDTH: tl.constexpr = 2 * D if OVERLAP else D
    SLOT: tl.constexpr = 9 * D if OVERLAP else 3 * D
    column = tl.program_id(0) * B + tl.arange(0, B)
    inside = column < D
    own = WIDTH - D + column  # with overlap, the part for the next window comes first
    for t in range(0, loop_bound(n_rows, COMPILED)):
        position = tl.load(positions + t)
        place = position % RATIO
        closes = place == RATIO - 1
        held = states + tl.load(sources + t).to(tl.int64) * SLOT
        to = states + tl.load(targets + t).to(tl.int64) * SLOT
        line = joined + t * joined_stride
        bias = places + place * WIDTH
        value = tl.load(line + own, mask=inside, other=0.0)
        logit = tl.load(line + WIDTH + own, mask=inside, other=0.0)
        logit += tl.load(bias + own, mask=inside, other=0.0)
        peak = tl.load(held + own, mask=inside & (place > 0), other=float("-inf"))
        total = tl.load(held + WIDTH + own, mask=inside & (place > 0), other=0.0)
        weighted = tl.load(held + 2 * WIDTH + own, mask=inside & (place > 0), other=0.0)
        peak, total, weighted = _joined(peak, total, weighted, logit, 1.0, value)
        if OVERLAP:
            later = tl.load(line + column, mask=inside, other=0.0)
            weight = tl.load(line + WIDTH + column, mask=inside, other=0.0)
            weight += tl.load(bias + column, mask=inside, other=0.0)
            goes_on = inside & (place > 0)
            next_peak = tl.load(held + column, mask=goes_on, other=float("-inf"))
            next_total = tl.load(held + WIDTH + column, mask=goes_on, other=0.0)
            next_sum = tl.load(held + 2 * WIDTH + column, mask=goes_on, other=0.0)
            next_peak, next_total, next_sum = _joined(
                next_peak, next_total, next_sum, weight, 1.0, later
            )
            left = held + 3 * WIDTH + column
            known = inside & (position >= RATIO)
            old_peak = tl.load(left, mask=known, other=float("-inf"))
            old_total = tl.load(left + D, mask=known, other=0.0)
            old_sum = tl.load(left + 2 * D, mask=known, other=0.0)
            _, whole, mean = _joined(old_peak, old_total, old_sum, peak, total, weighted)
            tl.store(to + column, next_peak, mask=inside)
            tl.store(to + WIDTH + column, next_total, mask=inside)
            tl.store(to + 2 * WIDTH + column, next_sum, mask=inside)
            left = to + 3 * WIDTH + column
            tl.store(left, tl.where(closes, next_peak, old_peak), mask=inside)
            tl.store(left + D, tl.where(closes, next_total, old_total), mask=inside)
            tl.store(left + 2 * D, tl.where(closes, next_sum, old_sum), mask=inside)
        else:
            whole, mean = total, weighted
        tl.store(to + own, peak, mask=inside)
        tl.store(to + WIDTH + own, total, mask=inside)
        tl.store(to + 2 * WIDTH + own, weighted, mask=inside)
        tl.store(means + t * D + column, mean / whole, mask=inside & closes)


@triton.jit(do_not_specialize=["start", "n_rows"])
def _pool_run_kernel(
    joined,
    joined_stride,
    places,
    start,
    held,
    states,
    targets,
    means,
    n_rows,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    KEPT: tl.constexpr,
    B: tl.constexpr,
    COMPILED: tl.constexpr,
):
    WIDTH: tl.constexpr = 2 * D if OVERLAP else D
    SLOT: tl.constexpr = 9 * D if OVERLAP else 3 * D
    column = tl.program_id(0) * B + tl.arange(0, B)
    inside = column < D
    own = WIDTH - D + column
    # The rows of this window; with overlap the walk begins where the window before it does.
    behind = (tl.program_id(1) + 1) * RATIO - start % RATIO
    begin = tl.maximum(behind - RATIO, 0)
    end = tl.minimum(behind, n_rows)
    first = tl.maximum(behind - 2 * RATIO, 0) if OVERLAP else begin
    goes_on = inside & (first == 0) & (start % RATIO > 0)
    peak = tl.load(held + own, mask=goes_on, other=float("-inf"))
    total = tl.load(held + WIDTH + own, mask=goes_on, other=0.0)
    weighted = tl.load(held + 2 * WIDTH + own, mask=goes_on, other=0.0)
    if OVERLAP:
        next_peak = tl.load(held + column, mask=goes_on, other=float("-inf"))
        next_total = tl.load(held + WIDTH + column, mask=goes_on, other=0.0)
        next_sum = tl.load(held + 2 * WIDTH + column, mask=goes_on, other=0.0)
        left = held + 3 * WIDTH + column
        known = inside & (first == 0) & (start >= RATIO)
        old_peak = tl.load(left, mask=known, other=float("-inf"))
        old_total = tl.load(left + D, mask=known, other=0.0)
        old_sum = tl.load(left + 2 * D, mask=known, other=0.0)
    for t in range(loop_bound(first, COMPILED), loop_bound(end, COMPILED)):
        place = (start + t) % RATIO
        closes = place == RATIO - 1
        mine = t >= begin
        kept = mine & (t >= n_rows - KEPT)
        to = states + tl.load(targets + t).to(tl.int64) * SLOT
        line = joined + tl.cast(t, tl.int64) * joined_stride
        bias = places + place * WIDTH
        value = tl.load(line + own, mask=inside, other=0.0)
        logit = tl.load(line + WIDTH + own, mask=inside, other=0.0)
        logit += tl.load(bias + own, mask=inside, other=0.0)
        peak = tl.where(place > 0, peak, float("-inf"))
        total = tl.where(place > 0, total, 0.0)
        weighted = tl.where(place > 0, weighted, 0.0)
        peak, total, weighted = _joined(peak, total, weighted, logit, 1.0, value)
        if OVERLAP:
            later = tl.load(line + column, mask=inside, other=0.0)
            weight = tl.load(line + WIDTH + column, mask=inside, other=0.0)
            weight += tl.load(bias + column, mask=inside, other=0.0)
            next_peak = tl.where(place > 0, next_peak, float("-inf"))
            next_total = tl.where(place > 0, next_total, 0.0)
            next_sum = tl.where(place > 0, next_sum, 0.0)
            next_peak, next_total, next_sum = _joined(
                next_peak, next_total, next_sum, weight, 1.0, later
            )
            _, whole, mean = _joined(old_peak, old_total, old_sum, peak, total, weighted)
            old_peak = tl.where(closes, next_peak, old_peak)
            old_total = tl.where(closes, next_total, old_total)
            old_sum = tl.where(closes, next_sum, old_sum)
            tl.store(to + column, next_peak, mask=inside & kept)
            tl.store(to + WIDTH + column, next_total, mask=inside & kept)
            tl.store(to + 2 * WIDTH + column, next_sum, mask=inside & kept)
            left = to + 3 * WIDTH + column
            tl.store(left, old_peak, mask=inside & kept)
            tl.store(left + D, old_total, mask=inside & kept)
            tl.store(left + 2 * D, old_sum, mask=inside & kept)
        else:
            whole, mean = total, weighted
        tl.store(to + own, peak, mask=inside & kept)
        tl.store(to + WIDTH + own, total, mask=inside & kept)
        tl.store(to + 2 * WIDTH + own, weighted, mask=inside & kept)
        tl.store(means + t * D + column, mean / whole, mask=inside & closes & mine)


@triton.jit
def _store_shared(to, x, R: tl.constexpr, W: tl.constexpr, B: tl.constexpr, FORM: tl.constexpr):
    """Write R values, given as blocks [B, W] of one scale each, at the beginning of an entry."""
    if FORM == "fp8":
        block = tl.arange(0, B)
        at = block[:, None] * W + tl.arange(0, W)[None, :]
        largest = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), 1e-4), 448.0)
        bits = largest.to(tl.int32, bitcast=True)
        power = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)  # up to a power of two
        inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
        codes = e4m3_code(x * inverse[:, None])
        tl.store(to + at, codes, mask=at < R)
        tl.store(to + R + 2 * W + block, power.to(tl.uint8), mask=block * W < R)
    elif FORM == "nvfp4":
        store_vector(to, tl.reshape(x, (B * W // 16, 16)), R, B * W // 16, 16, FORM)
    else:
        store_vector(to, x, R, B, W, FORM)


@triton.jit
def _entry_kernel(
    vectors,
    vectors_stride,
    weight,
    eps,
    cos,
    sin,
    positions,
    pages,
    table,
    table_stride,
    D: tl.constexpr,
    W: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    SPREAD: tl.constexpr,
    RING: tl.constexpr,
    ENTRY: tl.constexpr,
    B: tl.constexpr,
    FORM: tl.constexpr,
):
    R: tl.constexpr = D - W
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + t)
    if position % RATIO == RATIO - 1:
        number = position // RATIO
        line = vectors + t * vectors_stride
        at = tl.arange(0, B)[:, None] * W + tl.arange(0, W)[None, :]
        still = tl.load(line + at, mask=at < R, other=0.0)
        j = tl.arange(0, W)
        partner = j ^ 1
        one, two = tl.load(line + R + j), tl.load(line + R + partner)
        squares = tl.sum(tl.sum(still * still, 1), 0) + tl.sum(one * one, 0)
        factor = tl.rsqrt(squares / D + eps)
        still *= factor * tl.load(weight + at, mask=at < R, other=0.0).to(tl.float32)
        one *= factor * tl.load(weight + R + j).to(tl.float32)
        two *= factor * tl.load(weight + R + partner).to(tl.float32)
        angle = number * RATIO * (W // 2) + j // 2
        c, s = tl.load(cos + angle), tl.load(sin + angle)
        turned = tl.where(j % 2 == 1, one * c + two * s, one * c - two * s)
        own = table + t * table_stride
        if RING:
            entry = tl.load(own).to(tl.int64) + number % RING
        else:
            page = tl.load(own + number // PAGE * SPREAD).to(tl.int64)
            entry = page * PAGE + number % PAGE
        to = pages + entry * ENTRY
        _store_shared(to, still, R, W, B, FORM)
        if FORM == "fp8":
            tl.store((to + R).to(tl.pointer_type(tl.int16)) + j, bf16_code(turned))
        else:
            store_rope(to, j, turned, j < W, R, FORM)


def pool(
    joined: Tensor,
    places: Tensor,
    positions: Tensor,
    states: Tensor,
    sources: Tensor,
    targets: Tensor,
    means: Tensor,
    *,
    overlap: bool,
) -> None:
    """Take each row's token into its window, in the order of the rows.

    Shapes:
        joined [T, 2 * width] float32: values, then logits, with overlap of width 2 D, the part for
        the next window first, else D (rows may lie apart); places [ratio, width] float32;
        positions, sources, targets [T] int32; states [slots, 9 D, else 3 D] float32; means [T, D]
        float32, written where a window closes
    """
    rows, d = means.shape
    _pool_kernel[(triton.cdiv(d, _NUMBERS),)](
        joined, joined.stride(0), places, positions, states, sources, targets, means, rows,
        D=d, RATIO=places.shape[0], OVERLAP=overlap, B=_NUMBERS, COMPILED=not INTERPRETED,
        num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip


def pool_run(
    joined: Tensor,
    places: Tensor,
    start: int,
    held: Tensor,
    states: Tensor,
    targets: Tensor,
    means: Tensor,
    *,
    overlap: bool,
) -> None:
    """The same for rows of one sequence that follow each other from position `start` on, windows
    side by side, with the same bits. States are kept behind the last rows alone.

    Args:
        joined: as `pool`, like the others that are not named here.
        places: likewise.
        start: position of the first row.
        held: the state before it, a copy, because its slot may be written.
        states: of all slots.
        targets: of each row.
        means: written where a window closes.
        overlap: whether a token gives a part to the next window.

    Shapes:
        held [9 D, else 3 D] float32; the others as `pool`
    """
    rows, d = means.shape
    ratio = places.shape[0]
    windows = triton.cdiv(start % ratio + rows, ratio)
    _pool_run_kernel[(triton.cdiv(d, _NUMBERS), windows)](
        joined, joined.stride(0), places, start, held, states, targets, means, rows,
        D=d, RATIO=ratio, OVERLAP=overlap, KEPT=POOL_STATES, B=_NUMBERS, COMPILED=not INTERPRETED,
        num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip


def finish(
    vectors: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    pages: Tensor,
    table: Tensor,
    form: KvFormat,
    *,
    ratio: int,
    spread: int = 1,
    ring: int = 0,
) -> None:
    """Norm, rotate and store the entries of windows that close; with a ratio of 1, of all rows.

    Args:
        vectors: the entries before that; rows may lie apart.
        weight: of the norm.
        eps: likewise.
        cos: of the angles of positions.
        sin: likewise.
        positions: of the rows' tokens.
        pages: where entries go.
        table: each row's pages; with `ring`, the first entry of its ring among all of `pages`.
        form: of the entries.
        ratio: tokens of a window.
        spread: pages of the table that share an entry, which lies on the first of them.
        ring: entries of a ring, in which those of a sequence go round; 0: they do not.

    Shapes:
        vectors [T, D] float32, D a multiple of 64 of which the last 64 rotate in pairs; weight [D];
        cos, sin [positions, 32] float32; positions [T] int32; pages uint8 [n_pages, entries of a
        page, bytes]; table int32 [T, pages of a row] or [T, 1]
    """
    rows, d = vectors.shape
    _entry_kernel[(rows,)](
        vectors, vectors.stride(0), weight, eps, cos, sin, positions, pages, table,
        table.stride(0), D=d, W=SHARED_BLOCK, RATIO=ratio, PAGE=pages.shape[1], SPREAD=spread,
        RING=ring, ENTRY=pages.shape[2],
        B=triton.next_power_of_2(-(-d // SHARED_BLOCK)), FORM=form.value,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
