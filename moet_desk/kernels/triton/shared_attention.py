"""Attention of a decode step over one vector that is key and value of all heads (DeepSeek-V4).

Twin: `reference.shared_attention` over entries as `reference.shared_write` made them. What a row
sees, entries of its window and pooled ones, comes as a list of entries, which is a page table of
pages of one; so this reads them as any other attention of a step does, and its splits, its joining
and what they promise are `attention`'s. Launchers allocate nothing. Called on the engine thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kv_sizes import SHARED_BLOCK, shared_entry_bytes
from moet_desk.kernels.triton.attention import (
    SHORTEST_PART,
    SPLITS,
    DecodeScratch,
    join_parts,
    mix_values,
    most_parts,
    part_length,
    query_scores,
    running_weights,
)
from moet_desk.kernels.triton.kv_entries import (
    KvPages,
    check_entries,
    entry_of,
    load_rope,
    load_vectors,
)
from moet_desk.kernels.triton.numbers import e4m3_value, has_e4m3, loop_bound
from moet_desk.kernels.triton.portable import INTERPRETED

_HEADS, _TILE = 16, 32
"""Heads and entries that a program works on at a time."""


@triton.jit
def _values(
    pages,
    entry,
    live,
    C: tl.constexpr,
    ENTRY: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    FORM: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Chunk C of entries [S], the numbers of one scale or those that rotate: [S, W] float32, of
    which all but "f32" are exact in bfloat16.
    """
    if C * W < R:
        if FORM == "fp8":
            line = pages + entry * ENTRY
            column = C * W + tl.arange(0, W)
            codes = tl.load(line[:, None] + column[None, :], mask=live[:, None], other=0)
            values = e4m3_value(codes, HARDWARE)
            power = tl.load(line + R + 2 * W + C, mask=live, other=127).to(tl.int32)
            return values * (power << 23).to(tl.float32, bitcast=True)[:, None]
        else:
            return load_vectors(pages, entry, live, ENTRY, 0, R, C * W, W, FORM, HARDWARE)
    elif FORM == "fp8":
        return load_vectors(pages, entry, live, ENTRY, R, W, 0, W, "bf16", HARDWARE)
    else:
        return load_rope(pages, entry, live, ENTRY, R, W, W, FORM, HARDWARE)


@triton.jit
def _shared_decode_kernel(
    q,
    pages,
    table,
    table_stride,
    lengths,
    sums,
    stats,
    scale,
    N: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    TILE: tl.constexpr,
    BH: tl.constexpr,
    FORM: tl.constexpr,
    MMA: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    R: tl.constexpr = D - W
    split = tl.program_id(0)
    t = tl.program_id(2)
    length = tl.load(lengths + t)
    part = part_length(length, SPLITS, SHORTEST)
    first = split * part
    if first < length:
        last = tl.minimum(first + part, length)
        head = tl.program_id(1) * BH + tl.arange(0, BH)
        live_head = (head < N)[:, None]
        line = q + ((t * N + head) * D)[:, None]
        largest = tl.full([BH], float("-inf"), tl.float32)
        total = tl.zeros([BH], tl.float32)
        acc = ()
        for _ in tl.static_range(D // W):
            acc = acc + (tl.zeros([BH, W], tl.float32),)
        # Queries stay in shared memory: kept in registers over the loop they would spill.
        low, high = loop_bound(first, MMA), loop_bound(last, MMA)
        for start in tl.range(low, high, TILE, disable_licm=True):
            at = start + tl.arange(0, TILE)
            live = at < last
            entry = entry_of(table + t * table_stride, tl.where(live, at, first), PAGE)
            scores = tl.zeros([BH, TILE], tl.float32)
            values = ()
            for c in tl.static_range(D // W):
                mine = _values(pages, entry, live, c, ENTRY, R, W, FORM, HARDWARE)
                column = c * W + tl.arange(0, W)
                part_q = tl.load(line + column[None, :], mask=live_head, other=0.0)
                scores += query_scores(part_q, mine, FORM, MMA)
                values = values + (mine,)
            scores = tl.where(live[None, :], scores * scale, float("-inf"))
            p, factor, largest, total = running_weights(scores, largest, total)
            moved = ()
            for c in tl.static_range(D // W):
                moved = moved + (mix_values(p, values[c], acc[c] * factor[:, None], FORM, MMA),)
            acc = moved
        row = (t * SPLITS + split) * N + head
        tl.store(stats + row * 2, largest, mask=head < N)
        tl.store(stats + row * 2 + 1, total, mask=head < N)
        for c in tl.static_range(D // W):
            column = c * W + tl.arange(0, W)
            to = sums + (row.to(tl.int64) * D)[:, None] + column[None, :]
            tl.store(to, acc[c], mask=live_head)


def shared_decode(
    q: Tensor,
    kv: KvPages,
    lengths: Tensor,
    sink: Tensor,
    out: Tensor,
    *,
    scale: float,
    scratch: DecodeScratch,
    splits: int = SPLITS,
) -> None:
    """Attention of each row to the entries that its list names, as `reference.shared_attention`.
    `kv` has pages of one entry: a row's line of the table is its list, of which `lengths` are
    named, one at least. `splits` is a power of two: most parts of a row's entries, of which fewer
    leave room for more rows in `scratch`; they change the last bits.

    Shapes:
        q, out [T, N, D] float32, D a multiple of 64 of which the last 64 rotate; lengths [T] int32;
        sink [N] bfloat16 or float32
    Raises:
        ValueError: pages or scratch do not fit.
    """
    rows, n, d = q.shape
    check_entries(kv, shared_entry_bytes(kv.form, d, SHARED_BLOCK))
    scratch.check(rows, n, d, splits)
    _shared_decode_kernel[(most_parts(kv, splits=splits), triton.cdiv(n, _HEADS), rows)](
        q, kv.pages, kv.table, kv.table.stride(0), lengths, scratch.sums, scratch.stats, scale,
        N=n, D=d, W=SHARED_BLOCK, PAGE=kv.page_tokens, ENTRY=kv.entry_bytes, SPLITS=splits,
        SHORTEST=SHORTEST_PART, TILE=_TILE, BH=_HEADS, FORM=kv.form.value, MMA=not INTERPRETED,
        HARDWARE=has_e4m3(q.device), num_warps=8, num_stages=1,
    )  # fmt: skip
    join_parts(scratch, lengths, out, width=d, sink=sink, splits=splits)
