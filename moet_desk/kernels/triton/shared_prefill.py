"""Attention of a prompt's rows over one vector that is key and value of all heads (DeepSeek-V4).

Twin: `reference.shared_attention`. Rows of a prompt are of one sequence, so what they can see is
decoded once for all of them (`decode_seen`), into bfloat16, which holds it exactly: the ring, then
pooled entries by their numbers. A program takes one row with some heads: of the row's entries it
makes tiles that are keys and values at once, so these stand as matrices' rows and heads as columns.
Queries come in two bfloat16 parts (`head_parts`) and weights are cut into two, as
`prefill_attention` has it; what heads mixed goes out in two parts, by groups. What a row gives
depends on its own entries alone, not on how many rows are read at a time. Launchers allocate
nothing. Called on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import SHARED_BLOCK, shared_entry_bytes
from moet_desk.kernels.triton.gemm import store_parts
from moet_desk.kernels.triton.kv_entries import (
    KvPages,
    check_entries,
    load_rope,
    load_vectors,
)
from moet_desk.kernels.triton.numbers import bf16_part, e4m3_value, has_e4m3, loop_bound
from moet_desk.kernels.triton.portable import INTERPRETED
from moet_desk.kernels.triton.prepare import Rotation
from moet_desk.kernels.triton.seen import Pooled

_DECODED = 32
"""Entries that a program decodes."""


@dataclass(frozen=True, slots=True)
class RunTile:
    """Shape of a program: heads, entries at a time, numbers of them multiplied at a time, warps."""

    heads: int
    entries: int
    chunk: int
    warps: int


HOPPER_TILE = RunTile(heads=32, entries=128, chunk=128, warps=8)
CARD_TILE = RunTile(heads=32, entries=64, chunk=128, warps=8)
WIDE_TILE = RunTile(heads=16, entries=32, chunk=64, warps=8)
"""Of float32 entries, which nobody keeps on a card for their speed."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of one sequence that follow each other.

    Attributes:
        start: position of the first.
        ring: entries of the sequence's ring; first: where it begins among the layer's.
        window: tokens whose own entries a row sees.
        pooled: which others it sees, if the layer has some.
        n_pooled: windows closed behind the last row.
        chosen: int32 [T, K] and [T], numbers of pooled entries that were chosen for each row and
            how many; None: all of windows that are closed.
    """

    start: int
    ring: int
    first: int
    window: int
    pooled: Pooled | None
    n_pooled: int
    chosen: tuple[Tensor, Tensor] | None = None


@triton.jit
def _stored(
    pages,
    entry,
    live,
    C: tl.constexpr,
    ENTRY: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    FORM: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Chunk C of entries [S], the numbers of one scale or those that rotate: [S, W] float32."""
    R: tl.constexpr = D - W
    if C * W == R:
        if FORM == "fp8":
            return load_vectors(pages, entry, live, ENTRY, R, W, 0, W, "bf16", HARDWARE)
        else:
            return load_rope(pages, entry, live, ENTRY, R, W, W, FORM, HARDWARE)
    elif FORM == "fp8":
        line = pages + entry * ENTRY
        column = C * W + tl.arange(0, W)
        codes = tl.load(line[:, None] + column[None, :], mask=live[:, None], other=0)
        power = tl.load(line + R + 2 * W + C, mask=live, other=127).to(tl.int32)
        scale = (power << 23).to(tl.float32, bitcast=True)
        return e4m3_value(codes, HARDWARE) * scale[:, None]
    else:
        return load_vectors(pages, entry, live, ENTRY, 0, R, C * W, W, FORM, HARDWARE)


@triton.jit(do_not_specialize=["base", "first", "count"])
def _decode_kernel(
    pages,
    base,
    table,
    first,
    entries,
    count,
    D: tl.constexpr,
    W: tl.constexpr,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
    SPREAD: tl.constexpr,
    ENTRY: tl.constexpr,
    TILE: tl.constexpr,
    FORM: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = at < count
    number = tl.where(at < RING, 0, at - RING)
    page = tl.load(table + number // PAGE * SPREAD, mask=live & (at >= RING), other=0)
    far = first + page * PAGE + number % PAGE
    entry = tl.where(at < RING, base + at, far).to(tl.int64)
    to = entries + (at.to(tl.int64) * D)[:, None]
    for c in tl.static_range(D // W):
        value = _stored(pages, entry, live, c, ENTRY, D, W, FORM, HARDWARE)
        column = c * W + tl.arange(0, W)
        tl.store(to + column[None, :], value.to(entries.dtype.element_ty), mask=live[:, None])


@triton.jit
def _scores(keys, parts, scores, FORM: tl.constexpr, MMA: tl.constexpr):
    """scores [S, 2 H] + keys [S, C] x parts [2 H, C]^T, of both parts of some heads."""
    if MMA and FORM != "f32":
        return tl.dot(keys, tl.trans(parts), scores)
    else:
        precision: tl.constexpr = "tf32x3" if MMA else "ieee"
        q = tl.trans(parts.to(tl.float32))
        return tl.dot(keys.to(tl.float32), q, scores, input_precision=precision)


@triton.jit
def _mixed(values, p, acc, FORM: tl.constexpr, MMA: tl.constexpr):
    """acc [C, H] + values [S, C]^T x p [S, H], small products first."""
    if MMA and FORM != "f32":
        high = bf16_part(p)
        v = tl.trans(values)
        acc = tl.dot(v, (p - high).to(tl.bfloat16), acc)
        return tl.dot(v, high.to(tl.bfloat16), acc)
    else:
        precision: tl.constexpr = "tf32x3" if MMA else "ieee"
        return tl.dot(tl.trans(values.to(tl.float32)), p, acc, input_precision=precision)


@triton.jit
def _turned_back(
    x, cos, sin, FIRST: tl.constexpr, D: tl.constexpr, DR: tl.constexpr, C: tl.constexpr
):
    """Numbers FIRST .. FIRST + C of heads [C, H], of which the last DR of all D turn back."""
    if FIRST + C <= D - DR:
        return x
    else:
        H: tl.constexpr = x.shape[1]
        pairs = tl.permute(tl.reshape(x, (C // 2, 2, H)), (0, 2, 1))
        even, odd = tl.split(pairs)
        pair = (FIRST - D + DR) // 2 + tl.arange(0, C // 2)
        c = tl.load(cos + pair, mask=pair >= 0, other=1.0)[:, None]
        s = tl.load(sin + pair, mask=pair >= 0, other=0.0)[:, None]
        back = tl.join(even * c + odd * s, odd * c - even * s)
        return tl.reshape(tl.permute(back, (0, 2, 1)), (C, H))


# Positions change from chunk to chunk: they must not make new variants of a kernel.
@triton.jit(do_not_specialize=["start", "size", "first_row", "rows"])
def _run_attention_kernel(
    parts,
    entries,
    chosen,
    counts,
    sink,
    out,
    cos,
    sin,
    scale,
    start,
    size,
    first_row,
    rows,
    N: tl.constexpr,
    D: tl.constexpr,
    DR: tl.constexpr,
    EACH: tl.constexpr,
    BH: tl.constexpr,
    TILE: tl.constexpr,
    CD: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    FORM: tl.constexpr,
    MMA: tl.constexpr,
):
    # The last rows see most: they begin first.
    t = tl.num_programs(1) - 1 - tl.program_id(1)
    position = start + t
    n_near = tl.minimum(position + 1, WINDOW)
    if RATIO == 0:
        length = n_near
    elif TOP_K > 0:
        length = n_near + tl.load(counts + t)
    else:
        length = n_near + (position + 1) // RATIO
    head = tl.program_id(0) * BH + tl.arange(0, BH)
    own = tl.where(head < N, head, 0)
    both = tl.arange(0, 2 * BH)  # parts of heads: the products of a tile of keys take one turn
    line = tl.minimum(tl.program_id(0) * BH + both % BH, N - 1)
    line = (t.to(tl.int64) * N + line) * D + both // BH * size.to(tl.int64)
    largest = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = ()
    for _ in tl.static_range(D // CD):
        acc = acc + (tl.zeros([CD, BH], tl.float32),)
    # Queries stay in L2: kept over the loop they would not leave room for tiles of entries.
    for first in tl.range(0, loop_bound(length, MMA), TILE, disable_licm=True):
        at = first + tl.arange(0, TILE)
        live = at < length
        far = at - n_near
        if TOP_K > 0:
            far = tl.load(chosen + t * TOP_K + far, mask=live & (far >= 0), other=0)
        entry = tl.where(at < n_near, (position + 1 - n_near + at) % RING, RING + far)
        # one that is surely there stands for those behind the last
        entry = tl.where(live, entry, position % RING).to(tl.int64)
        twice = tl.zeros([TILE, 2 * BH], tl.float32)
        values = ()
        for c in tl.static_range(D // CD):
            column = (c * CD + tl.arange(0, CD))[None, :]
            mine = tl.load(entries + (entry * D)[:, None] + column)
            twice = _scores(mine, tl.load(parts + line[:, None] + column), twice, FORM, MMA)
            values = values + (mine,)
        scores = tl.sum(tl.reshape(twice, (TILE, 2, BH)), 1)
        scores = tl.where(live[:, None], scores * scale, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 0))
        p = tl.exp(scores - new[None, :])
        factor = tl.exp(largest - new)
        total = total * factor + tl.sum(p, 0)
        largest = new
        moved = ()
        for c in tl.static_range(D // CD):
            moved = moved + (_mixed(values[c], p, acc[c] * factor[None, :], FORM, MMA),)
        acc = moved
    logit = tl.load(sink + own).to(tl.float32)
    top = tl.maximum(largest, logit)
    factor = tl.exp(largest - top)
    factor /= total * factor + tl.exp(logit - top)
    cos += position * (DR // 2)
    sin += position * (DR // 2)
    place = (head // EACH).to(tl.int64) * rows + first_row + t
    to = (place * EACH + head % EACH) * D
    inside = (head < N)[None, :]
    for c in tl.static_range(D // CD):
        y = _turned_back(acc[c] * factor[None, :], cos, sin, c * CD, D, DR, CD)
        at = to[None, :] + (c * CD + tl.arange(0, CD))[:, None]
        store_parts(out, at, rows.to(tl.int64) * (N * D), y, inside)


def decode_seen(kv: KvPages, run: Run, entries: Tensor) -> None:
    """Decode what rows of a run may see: the ring, then pooled entries by their numbers.

    Shapes:
        kv.pages [entries of the layer, 1, bytes]
        entries [ring + n_pooled or more, D], bfloat16, or float32 where entries are stored so

    Raises:
        ValueError: the pages hold entries of another size, or there is too little room.
    """
    d, count = entries.shape[1], run.ring + run.n_pooled
    check_entries(kv, shared_entry_bytes(kv.form, d, SHARED_BLOCK))
    if len(entries) < count:
        raise ValueError(f"no room for {count} decoded entries")
    table, page, spread, first = kv.table, 1, 1, 0
    if run.pooled is not None:
        own = run.pooled
        table, page, spread, first = own.kv.table, own.kv.page_tokens, own.spread, own.first
    _decode_kernel[(triton.cdiv(count, _DECODED),)](
        kv.pages, run.first, table, first, entries, count, D=d, W=SHARED_BLOCK, RING=run.ring,
        PAGE=page, SPREAD=spread, ENTRY=kv.entry_bytes, TILE=_DECODED, FORM=kv.form.value,
        HARDWARE=has_e4m3(entries.device), num_warps=4,
    )  # fmt: skip


def run_attention(
    parts: Tensor,
    entries: Tensor,
    run: Run,
    sink: Tensor,
    out: Tensor,
    *,
    rotation: Rotation,
    scale: float,
    form: KvFormat,
    first: int = 0,
) -> None:
    """Attention of rows of a run to what each sees of `entries`, as `reference.shared_attention`,
    turned back.

    Args:
        parts: of the queries (`head_parts`).
        entries: as `decode_seen` left them.
        run: the rows.
        sink: of each head.
        out: gets what heads mixed as `gemm_by_group` reads it, cut into two parts.
        rotation: tables of angles.
        scale: of scores.
        form: of entries.
        first: the first row's place in `out`.

    Shapes:
        parts [2, T, N, D] bfloat16, each part contiguous; sink [N] bfloat16 or float32
        out [2, G, R, N / G * D] bfloat16, contiguous, of as many numbers as the queries of R rows
    """
    rows, n, d = parts.shape[1:]
    ratio = 0 if run.pooled is None else run.pooled.ratio
    chosen, counts = run.chosen or (parts, parts)  # else not read
    top_k = chosen.shape[1] if run.chosen else 0
    tile = _tile(out.device, form)
    _run_attention_kernel[(triton.cdiv(n, tile.heads), rows)](
        parts, entries, chosen, counts, sink, out, rotation.cos, rotation.sin, scale, run.start,
        parts.stride(0), first, out.shape[2], N=n, D=d, DR=2 * rotation.cos.shape[1],
        EACH=n // out.shape[1], BH=tile.heads, TILE=tile.entries,
        CD=tile.chunk if d % tile.chunk == 0 else SHARED_BLOCK, WINDOW=run.window, RING=run.ring,
        RATIO=ratio, TOP_K=top_k, FORM=form.value, MMA=not INTERPRETED, num_warps=tile.warps,
        num_stages=1,
    )  # fmt: skip


def _tile(device: torch.device, form: KvFormat) -> RunTile:
    if form is KvFormat.F32 or INTERPRETED:
        return WIDE_TILE
    large = torch.cuda.get_device_capability(device)[0] in (9, 10)
    return HOPPER_TILE if large else CARD_TILE
