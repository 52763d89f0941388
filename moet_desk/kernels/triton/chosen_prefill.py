"""Attention of a prompt's rows to entries that were chosen for each of them (DeepSeek-V3.2, GLM-5).

Owns MLA in the latent form over lists of places: rows see too different entries for expanded keys
and values to pay. Twin: `reference.mla_absorbed`. The sequence's entries are decoded once for all
rows, in bfloat16 parts. Queries go into the latent space on tensor cores, cut into two parts. Then
a program takes one row with some heads: of the row's entries it makes tiles that are keys and
values at once, so these stand as matrices' rows and heads as columns, as in `shared_prefill`. What
heads mixed is cut again and multiplied by each head's values. As many rows are taken at a time as
there is room for; what one gives depends on its own entries alone. Launchers allocate nothing.
Called on the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import mla_entry_bytes
from moet_desk.kernels.triton.dense_weight import weight_tile
from moet_desk.kernels.triton.gemm import gemm_of_heads, store_parts
from moet_desk.kernels.triton.kv_entries import KvPages, check_entries
from moet_desk.kernels.triton.latent import LatentWeight
from moet_desk.kernels.triton.numbers import bf16_part, has_e4m3, loop_bound
from moet_desk.kernels.triton.portable import INTERPRETED
from moet_desk.kernels.triton.prefill_attention import (
    PrefillScratch,
    chunk_of,
    close_dot,
    decode_latents,
)


@dataclass(frozen=True, slots=True)
class AbsorbTile:
    """Shape of a program that moves queries: rows, numbers of the latent space and of a head."""

    rows: int
    columns: int
    inputs: int
    warps: int


@dataclass(frozen=True, slots=True)
class ChosenTile:
    """Shape of a program that attends.

    Attributes:
        heads: of a row; entries: at a time; chunk: numbers of them multiplied at a time.
        warps: of the program; stages: of its loop.
        held: whether queries stay in shared memory, from which Hopper's tensor cores read them.
            Others read registers, where queries would leave no room: they stay in L2.
    """

    heads: int
    entries: int
    chunk: int
    warps: int
    stages: int
    held: bool


ABSORB_TILE = AbsorbTile(rows=64, columns=128, inputs=32, warps=8)
HOPPER_TILE = ChosenTile(heads=32, entries=64, chunk=128, warps=8, stages=3, held=True)
HOPPER_PARTS_TILE = ChosenTile(heads=32, entries=64, chunk=128, warps=8, stages=1, held=True)
CARD_TILE = ChosenTile(heads=32, entries=64, chunk=128, warps=8, stages=1, held=False)
CARD_PARTS_TILE = ChosenTile(heads=16, entries=32, chunk=128, warps=8, stages=1, held=False)
"""The second of each card: of entries that one bfloat16 does not hold."""
SMALL_TILE = ChosenTile(heads=16, entries=32, chunk=64, warps=4, stages=1, held=False)
"""For the interpreter."""

_EVEN_ROWS = 16
"""Groups of rows begin at multiples: pointers stay aligned, so that they make no new variants."""


# The number of rows changes from chunk to chunk: it must not make new variants of a kernel.
@triton.jit(do_not_specialize=["rows"])
def _absorb_rows_kernel(
    q,
    q_stride,
    q_pitch,
    q_rope,
    weight,
    scales,
    parts,
    rows,
    N: tl.constexpr,
    PITCH: tl.constexpr,
    DN: tl.constexpr,
    DR: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    MMA: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    head = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    live = (m < rows)[:, None]
    row = tl.where(m < rows, m, 0).to(tl.int64)
    size = rows.to(tl.int64) * (N * (R + DR))
    to = ((row * N + head) * (R + DR))[:, None]
    if tl.program_id(0) * BR >= R:  # what was rotated goes behind, as it is
        j = tl.arange(0, BT)[None, :]
        inside = live & (j < DR)
        turned = tl.load(q_rope + ((row * N + head) * DR)[:, None] + j, mask=inside, other=0.0)
        store_parts(parts, to + R + j, size, turned, inside)
    else:
        r = (tl.program_id(0) * BR + tl.arange(0, BR))[None, :]
        x = q + (row * q_stride + head * q_pitch)[:, None]
        acc = tl.zeros([BM, BR], tl.float32)
        for d0 in range(0, DN, BD):
            d = d0 + tl.arange(0, BD)
            own = tl.load(x + d[None, :], mask=live & (d < DN)[None, :], other=0.0)
            line = head * PITCH + d
            seen = (d < DN)[:, None] & (r < R)
            at = (line.to(tl.int64) * R)[:, None] + r
            w = weight_tile(weight + at, seen, KIND, HARDWARE)
            if KIND == "int8":
                spot = (line * (R // 32))[:, None] + r // 32
                w *= tl.load(scales + spot, mask=seen, other=0.0).to(tl.float32)
            elif KIND == "fp8":  # a weight before its scale is exact
                if SCALE_ROWS == 1:
                    block = line
                else:
                    block = line // 128 * ((R + 127) // 128) + tl.program_id(0) * BR // 128
                own *= tl.load(scales + block, mask=d < DN, other=0.0)[None, :]
            acc = close_dot(own, w, acc, KIND == "bf16" or KIND == "fp8", MMA)
        store_parts(parts, to + r, size, acc, live & (r < R))


@triton.jit
def _columns(base, line, FIRST: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Numbers FIRST .. FIRST + C of lines [L] of D numbers, zero behind these: [L, C]."""
    column = FIRST + tl.arange(0, C)
    at = base + line[:, None] + column[None, :]
    if FIRST + C <= D:
        return tl.load(at)
    else:
        return tl.load(at, mask=(column < D)[None, :], other=0.0)


@triton.jit
def _dot(a, b, acc, MMA: tl.constexpr):
    """acc + a x b of bfloat16."""
    if MMA:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["size", "rows"])
def _chosen_kernel(
    parts,
    latents,
    ropes,
    chosen,
    counts,
    out,
    scale,
    size,
    rows,
    N: tl.constexpr,
    R: tl.constexpr,
    DR: tl.constexpr,
    TOP_K: tl.constexpr,
    BH: tl.constexpr,
    TILE: tl.constexpr,
    CD: tl.constexpr,
    BT: tl.constexpr,
    EXACT: tl.constexpr,
    HELD: tl.constexpr,
    MMA: tl.constexpr,
):
    CHUNKS: tl.constexpr = (R + CD - 1) // CD
    t = tl.program_id(1)
    length = tl.load(counts + t)
    chosen += t * TOP_K
    head = tl.program_id(0) * BH + tl.arange(0, BH)
    both = tl.arange(0, 2 * BH)  # parts of heads: the products of a tile of keys take one turn
    line = tl.minimum(tl.program_id(0) * BH + both % BH, N - 1)
    line = (t.to(tl.int64) * N + line) * (R + DR) + both // BH * (
        rows.to(tl.int64) * (N * (R + DR))
    )
    rest = latents + size.to(tl.int64) * R
    largest = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = ()
    for _ in tl.static_range(CHUNKS):
        acc = acc + (tl.zeros([CD, BH], tl.float32),)
    held = ()
    if HELD:
        for c in tl.static_range(CHUNKS):
            held = held + (tl.trans(_columns(parts, line, c * CD, CD, R)),)
        held = held + (tl.trans(_columns(parts + R, line, 0, BT, DR)),)
    for first in tl.range(0, loop_bound(length, MMA), TILE, disable_licm=True):
        at = first + tl.arange(0, TILE)
        live = at < length
        # the first one stands for those behind the last
        entry = tl.load(chosen + tl.where(live, at, 0)).to(tl.int64)
        q = held[CHUNKS] if HELD else tl.trans(_columns(parts + R, line, 0, BT, DR))
        twice = tl.zeros([TILE, 2 * BH], tl.float32)
        if not EXACT:
            near = _columns(ropes + size.to(tl.int64) * DR, entry * DR, 0, BT, DR)
            twice = _dot(near, q, twice, MMA)
        near = _columns(ropes, entry * DR, 0, BT, DR)
        twice = _dot(near, q, twice, MMA)
        values, small = (), ()
        for c in tl.static_range(CHUNKS):
            q = held[c] if HELD else tl.trans(_columns(parts, line, c * CD, CD, R))
            if not EXACT:
                mine = _columns(rest, entry * R, c * CD, CD, R)
                twice = _dot(mine, q, twice, MMA)
                small = small + (mine,)
            mine = _columns(latents, entry * R, c * CD, CD, R)
            twice = _dot(mine, q, twice, MMA)
            values = values + (mine,)
        scores = tl.sum(tl.reshape(twice, (TILE, 2, BH)), 1)
        scores = tl.where(live[:, None], scores * scale, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 0))
        p = tl.exp(scores - new[None, :])
        factor = tl.exp(largest - new)
        total = total * factor + tl.sum(p, 0)
        largest = new
        high = bf16_part(p)
        low = (p - high).to(tl.bfloat16)
        high = high.to(tl.bfloat16)
        moved = ()
        for c in tl.static_range(CHUNKS):
            y = acc[c] * factor[None, :]
            if not EXACT:
                y = _dot(tl.trans(small[c]), high, y, MMA)
            y = _dot(tl.trans(values[c]), low, y, MMA)
            moved = moved + (_dot(tl.trans(values[c]), high, y, MMA),)
        acc = moved
    to = ((head.to(tl.int64) * rows + t) * R)[None, :]
    for c in tl.static_range(CHUNKS):
        column = (c * CD + tl.arange(0, CD))[:, None]
        inside = (head < N)[None, :] & (column < R)
        y = acc[c] / total[None, :]
        store_parts(out, to + column, rows.to(tl.int64) * (N * R), y, inside)


def chosen_prefill(
    q_nope: Tensor,
    q_rope: Tensor,
    kv: KvPages,
    up: LatentWeight,
    chosen: Tensor,
    counts: Tensor,
    out: Tensor,
    *,
    entries: int,
    scale: float,
    scratch: PrefillScratch,
) -> None:
    """MLA of M rows of one sequence to the entries chosen for each, as `reference.mla_absorbed`.

    Args:
        q_nope: queries without the part that was rotated.
        q_rope: that part.
        kv: pages of the sequence.
        up: weights of the latent space.
        chosen: places in the sequence, each row's own.
        counts: how many of them a row has, at least one.
        out: gets what heads mixed.
        entries: how many the pages hold.
        scale: of scores.
        scratch: room for entries decoded, queries in the latent space, and what they mix there.

    Shapes:
        q_nope [M, N, dn] (rows and heads may lie apart), q_rope [M, N, dr] float32
        kv.table [1, max_pages]; chosen [M, K], counts [M] int32, contiguous
        out [M, N * dv] float32, contiguous
    Raises:
        ValueError: pages or scratch do not fit.
    """
    (rows, n, dr), r = q_rope.shape, up.weight.k
    check_entries(kv, mla_entry_bytes(kv.form, r, dr))
    latents, ropes = decode_latents(kv, entries, r, dr, scratch)
    room = scratch.expanded.view(torch.bfloat16)
    for own in even_groups(rows, rows_that_fit(scratch, n, r, dr)):
        m = own.stop - own.start
        parts = room[: 2 * m * n * (r + dr)].view(2, m, n, r + dr)
        mixed = room[parts.numel() : parts.numel() + 2 * n * m * r].view(2, n, m, r)
        absorb_rows(q_nope[own], q_rope[own], up, parts)
        attend_chosen(
            parts, latents, ropes, chosen[own], counts[own], mixed, scale=scale, form=kv.form
        )
        gemm_of_heads(mixed, up.weight, out[own], first=up.dn, count=up.dv)


def absorb_rows(q_nope: Tensor, q_rope: Tensor, up: LatentWeight, parts: Tensor) -> None:
    """Move queries into the latent space, U_K^T q, and put what was rotated behind them.

    Shapes:
        q_nope [M, N, dn] (rows and heads may lie apart), q_rope [M, N, dr] float32
        parts [2, M, N, r + dr] bfloat16
    """
    (rows, n, dr), r, tile = q_rope.shape, up.weight.k, ABSORB_TILE
    width = min(tile.columns, chunk_of(r))
    _absorb_rows_kernel[(triton.cdiv(r, width) + 1, n, triton.cdiv(rows, tile.rows))](
        q_nope, q_nope.stride(0), q_nope.stride(1), q_rope, up.weight.raw, up.weight.scales,
        parts, rows, N=n, PITCH=up.dn + up.dv, DN=up.dn, DR=dr, R=r, BM=tile.rows,
        BD=min(tile.inputs, chunk_of(up.dn)), BR=width, BT=triton.next_power_of_2(dr),
        KIND=up.weight.kind.value, SCALE_ROWS=up.weight.scale_rows, MMA=not INTERPRETED,
        HARDWARE=has_e4m3(parts.device), num_warps=tile.warps, num_stages=1,
    )  # fmt: skip


def attend_chosen(
    parts: Tensor,
    latents: Tensor,
    ropes: Tensor,
    chosen: Tensor,
    counts: Tensor,
    out: Tensor,
    *,
    scale: float,
    form: KvFormat,
) -> None:
    """What heads mix of the latents of a row's chosen entries, in two parts.

    Shapes:
        parts [2, M, N, r + dr], latents [2, S, r], ropes [2, S, dr], out [2, N, M, r] bfloat16
        chosen [M, K], counts [M] int32; all contiguous
    """
    (rows, n), r, dr = parts.shape[1:3], latents.shape[2], ropes.shape[2]
    exact = form in (KvFormat.NVFP4, KvFormat.BF16)
    tile = _tile(parts.device, exact=exact)
    _chosen_kernel[(triton.cdiv(n, tile.heads), rows)](
        parts, latents, ropes, chosen, counts, out, scale, latents.shape[1], rows,
        N=n, R=r, DR=dr, TOP_K=chosen.shape[1], BH=tile.heads, TILE=tile.entries,
        CD=min(tile.chunk, chunk_of(r)), BT=chunk_of(dr), EXACT=exact, HELD=tile.held,
        MMA=not INTERPRETED, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def rows_that_fit(scratch: PrefillScratch, heads: int, r: int, dr: int) -> int:
    """Rows taken at a time: two parts of a number have the size of a float."""
    return scratch.expanded.numel() // (heads * (2 * r + dr))


def even_groups(rows: int, most: int) -> Iterator[slice]:
    """Rows in groups of about the same size that fit.

    Raises:
        ValueError: none fits.
    """
    if most < 1:
        raise ValueError("no room for a single row")
    step = _EVEN_ROWS if most >= _EVEN_ROWS else 1
    most -= most % step
    each = triton.cdiv(rows, triton.cdiv(rows, most))
    each = triton.cdiv(each, step) * step
    for first in range(0, rows, each):
        yield slice(first, min(first + each, rows))


def _tile(device: torch.device, *, exact: bool) -> ChosenTile:
    if INTERPRETED:
        return SMALL_TILE
    if torch.cuda.get_device_capability(device)[0] == 9:  # later ones hold queries elsewhere
        return HOPPER_TILE if exact else HOPPER_PARTS_TILE
    return CARD_TILE if exact else CARD_PARTS_TILE
