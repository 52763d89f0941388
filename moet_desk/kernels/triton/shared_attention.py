"""Attention of a decode step over one vector that is key and value of all heads (DeepSeek-V4).

Twins: `reference.unit` and `reference.rotate` of the queries, `reference.shared_attention` over
entries as `reference.shared_write` made them, and `reference.rotate` back. What a row sees, entries
of its window and pooled ones, comes as a list of entries, which is a page table of pages of one; so
this reads them as any other attention of a step does, and its splits, its joining and what they
promise are `attention`'s. Launchers allocate nothing. Called on the engine thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import SHARED_BLOCK, shared_entry_bytes
from moet_desk.kernels.triton.attention import mix_values, running_weights
from moet_desk.kernels.triton.attention_parts import (
    SPLITS,
    DecodeScratch,
    joined_parts,
    most_parts,
    part_length,
)
from moet_desk.kernels.triton.expert_math import stacked
from moet_desk.kernels.triton.kv_entries import (
    KvPages,
    check_entries,
    decoded,
    entry_of,
    load_raw,
)
from moet_desk.kernels.triton.loads import in_order
from moet_desk.kernels.triton.numbers import bf16_part, e4m3_value, has_e4m3, loop_bound
from moet_desk.kernels.triton.portable import INTERPRETED
from moet_desk.kernels.triton.prepare import Rotation

_HEADS, _TILE, _HOPPER_TILE = 16, 16, 32
"""Heads and entries that a program works on at a time; cards with more shared memory hold more."""

_SHORTEST = 32
"""Entries of a part while 64 of them are enough: few, since a step waits for the longest chain of
reads and products, not for the card's bandwidth. A program takes a part of so many in one round; of
one round of 16 Triton 3.6 makes a kernel that reads wrong values on an H200.
"""

_JOIN_FLOATS, _JOIN_AHEAD, _JOIN_FEW = 128, 24, 8
"""Numbers that a program joins, of one warp, and parts that it reads at once (640 entries: 20)."""


@triton.jit
def _raw(
    pages, entry, live, ENTRY: tl.constexpr, D: tl.constexpr, W: tl.constexpr, FORM: tl.constexpr
):
    """The bytes of entries [S], for `_values`: they are asked for long before they are used."""
    R: tl.constexpr = D - W
    column = tl.arange(0, D)
    line = pages + entry * ENTRY
    here = live[:, None]
    if FORM == "f32" or FORM == "bf16":
        return load_raw(pages, entry, live, ENTRY, 0, D, 0, D, FORM)
    elif FORM == "fp8":
        codes = line[:, None] + column[None, :]
        turned = (line + R).to(tl.pointer_type(tl.bfloat16))[:, None] + (column - R)[None, :]
        block = tl.arange(0, D // W)
        power = (line + R + 2 * W)[:, None] + block[None, :]
        return (
            tl.load(codes, mask=here & (column < R)[None, :], other=0),
            tl.load(turned, mask=here & (column >= R)[None, :], other=0.0),
            tl.load(power, mask=here & (block < R // W)[None, :], other=127),
        )
    else:
        turned = (line + R // 2 + R // 16)[:, None] + (column - R)[None, :]
        codes = load_raw(pages, entry, live, ENTRY, 0, R, 0, D, FORM)
        return codes[0], codes[1], tl.load(turned, mask=here & (column >= R)[None, :], other=0)


@triton.jit
def _values(raw, D: tl.constexpr, W: tl.constexpr, FORM: tl.constexpr, HARDWARE: tl.constexpr):
    """Numbers of `_raw`'s entries: [S, D] float32, of which all but "f32" are exact in bfloat16.

    Every thread has the scales of its own numbers: what is decoded chunk by chunk goes through
    shared memory as often.
    """
    S: tl.constexpr = raw[0].shape[0]
    still = (tl.arange(0, D) < D - W)[None, :]
    if FORM == "f32" or FORM == "bf16":
        return decoded(raw, D, FORM, HARDWARE)
    elif FORM == "fp8":
        scale = (raw[2].to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, :, None]
        values = tl.reshape(e4m3_value(raw[0], HARDWARE), (S, D // W, W)) * scale
        return tl.where(still, tl.reshape(values, (S, D)), raw[1].to(tl.float32))
    else:
        values = decoded((raw[0], raw[1]), D, FORM, HARDWARE)
        return tl.where(still, values, e4m3_value(raw[2], HARDWARE))


@triton.jit
def _word_bytes(pages, entry, live, ENTRY: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """What `_word_values` decodes of entries [S] of "nvfp4", each [D / 8, S]: for 8 numbers four
    bytes, another four where numbers are turned, and the byte of their scale.

    Words come first, as neighbouring lanes then read neighbouring words: the compiler knows nothing
    about these addresses, and takes the first dim for the fastest.
    """
    R: tl.constexpr = D - W
    word = tl.arange(0, D // 8)[:, None]
    still = word < R // 8
    here = live[None, :]
    at = tl.where(still, word, (R // 2 + R // 16) // 4 + 2 * (word - R // 8))
    at = (pages.to(tl.pointer_type(tl.int32)) + entry * (ENTRY // 4))[None, :] + at
    return (
        tl.load(at, mask=here, other=0),
        tl.load(at + 1, mask=here & (word >= R // 8), other=0),
        tl.load((pages + entry * ENTRY + R // 2)[None, :] + word // 2, mask=here & still, other=0),
    )


def _nibbles_ptx() -> str:
    """Eight numbers as bfloat16 in $0 .. $3, two each: e2m1 codes $4 times the e4m3 code $6, or the
    e4m3 codes $4, $5 where $7 is not 0. A product has 6 bits of its own, so it is exact.
    """
    lines = [
        "{ .reg .b32 m, s, h, l, t, z, f; .reg .b16 a, b; .reg .f32 x, y; .reg .pred p;",
        "setp.ne.s32 p, $7, 0;",
        "shl.b32 t, $6, 8; or.b32 t, t, $6; cvt.u16.u32 a, t; cvt.rn.f16x2.e4m3x2 t, a;",
        "mov.b32 {a, b}, t; cvt.f32.f16 x, a; cvt.rn.bf16x2.f32 f, x, x;",
        "and.b32 m, $4, 0x77777777; and.b32 s, $4, 0x88888888; mov.b32 z, 0x80008000;",
    ]
    for pair in range(4):
        if pair == 2:
            lines.append("shr.u32 m, m, 16;")
        if pair % 2 == 0:  # upper and lower bytes of bfloat16: 0 .5 1 1.5 2 3 4 6, over 64
            lines += [
                "mov.b32 h, 0x3C3C3C00; mov.b32 t, 0x3D3D3D3D; prmt.b32 h, h, t, m;",
                "mov.b32 l, 0xC0800000; mov.b32 t, 0xC0804000; prmt.b32 l, l, t, m;",
            ]
        lines += [
            f"prmt.b32 ${pair}, l, h, {0x7362 if pair % 2 else 0x5140};",
            f"prmt.b32 t, s, 0, {0x4440 + pair}; mul.lo.u32 t, t, 0x01001000;",
            f"lop3.b32 ${pair}, t, z, ${pair}, 0x6A;",  # (t & z) ^ number
            f"fma.rn.bf16x2 ${pair}, ${pair}, f, z;",
        ]
    for pair in range(4):
        lines += [
            f"mov.b32 {{a, b}}, ${4 + pair // 2};",
            f"cvt.rn.f16x2.e4m3x2 t, {'ab'[pair % 2]};",
            "mov.b32 {a, b}, t; cvt.f32.f16 x, a; cvt.f32.f16 y, b;",
            "cvt.rn.bf16x2.f32 t, y, x;",
            f"selp.b32 ${pair}, t, ${pair}, p;",
        ]
    return " ".join([*lines, "}"])


_NIBBLES = tl.constexpr(_nibbles_ptx())


@triton.jit
def _word_values(raw, D: tl.constexpr, W: tl.constexpr):
    """Numbers of `_word_bytes`: [D / W, S, W] bfloat16."""
    S: tl.constexpr = raw[0].shape[1]
    turned = (tl.arange(0, D // 8)[:, None] >= (D - W) // 8).to(tl.int32)
    two = tl.inline_asm_elementwise(
        _NIBBLES, "=&r,=&r,=&r,=&r,r,r,r,r",
        [raw[0], raw[1], raw[2].to(tl.int32), tl.broadcast_to(turned, raw[0].shape)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    every = ()
    for i in tl.static_range(4):
        every = every + (
            two[i].to(tl.int16).to(tl.bfloat16, bitcast=True),
            (two[i] >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),
        )
    values = tl.reshape(stacked(every), (D // W, W // 8, S, 8))
    return tl.reshape(tl.permute(values, (0, 2, 1, 3)), (D // W, S, W))


@triton.jit
def _bytes_of(
    pages, entry, live, ENTRY: tl.constexpr, D: tl.constexpr, W: tl.constexpr, FORM: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    if WORDS:
        return _word_bytes(pages, entry, live, ENTRY, D, W)
    else:
        return _raw(pages, entry, live, ENTRY, D, W, FORM)


@triton.jit
def _slices(
    raw, D: tl.constexpr, W: tl.constexpr, FORM: tl.constexpr, MMA: tl.constexpr,
    HARDWARE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Numbers of entries [S] in slices: [D / W, S, W]."""
    if WORDS:
        return _word_values(raw, D, W)
    else:
        values = _values(raw, D, W, FORM, HARDWARE)
        if MMA and FORM != "f32":
            values = values.to(tl.bfloat16)
        return tl.permute(tl.reshape(values, (values.shape[0], D // W, W)), (1, 0, 2))


@triton.jit
def _close_dot(a, b, acc):
    """acc + a x b of float32, as close as float32: parts that leave out 2**-24 and less.

    By bfloat16: halves of tf32 would lie in shared memory twice, which is more than cards have.
    """
    a_high, b_high = bf16_part(a), bf16_part(b)
    a_middle, b_middle = bf16_part(a - a_high), bf16_part(b - b_high)
    a_low, b_low = (a - a_high - a_middle).to(tl.bfloat16), (b - b_high - b_middle).to(tl.bfloat16)
    a_high, b_high = a_high.to(tl.bfloat16), b_high.to(tl.bfloat16)
    a_middle, b_middle = a_middle.to(tl.bfloat16), b_middle.to(tl.bfloat16)
    acc = tl.dot(a_low, b_high, tl.dot(a_high, b_low, tl.dot(a_middle, b_middle, acc)))
    return tl.dot(a_high, b_high, tl.dot(a_middle, b_high, tl.dot(a_high, b_middle, acc)))


@triton.jit
def _scores(q, keys, unit, FORM: tl.constexpr, MMA: tl.constexpr):
    """[C, H, W] x [C, S, W] times `unit` [H] -> [C, H, S]."""
    k = tl.permute(keys, (0, 2, 1))
    unit = unit[None, :, None]
    if MMA and FORM == "f32":
        none = tl.zeros([q.shape[0], q.shape[1], k.shape[2]], tl.float32)
        return _close_dot(q, k, none) * unit
    elif MMA:
        high = bf16_part(q)
        middle = bf16_part(q - high)
        low = q - high - middle
        scores = tl.dot(middle.to(tl.bfloat16), k) * unit + tl.dot(low.to(tl.bfloat16), k) * unit
        return tl.dot(high.to(tl.bfloat16), k) * unit + scores
    else:
        return tl.dot(q, k, input_precision="ieee") * unit


@triton.jit(do_not_specialize=["width"])
def _shared_decode_kernel(
    q,
    cos,
    sin,
    positions,
    eps,
    pages,
    table,
    table_stride,
    lengths,
    sums,
    stats,
    scale,
    width,
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
    ONCE: tl.constexpr,
    WORDS: tl.constexpr,
):
    # Numbers come in C slices of W, each a warp's: else all warps would take all queries apart, and
    # products of few entries would be chains of D / 16 in few of them.
    R: tl.constexpr = D - W
    C: tl.constexpr = D // W
    split = tl.program_id(0)
    t = tl.program_id(2)
    length = tl.load(lengths + t)
    own = table + t * table_stride
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    live_head = (head < N)[None, :, None]
    column = (tl.arange(0, C) * W)[:, None, None] + tl.arange(0, W)[None, None, :]
    pair = (tl.arange(0, C) * (W // 2))[:, None, None] + tl.arange(0, W // 2)[None, None, :]
    position = tl.load(positions + t)
    at = split * SHORTEST + tl.arange(0, TILE)
    if ONCE:  # nothing that is read here waits for the length
        named = tl.load(own + at // PAGE, mask=at // PAGE < width, other=0)
    part = part_length(length, SPLITS, SHORTEST)
    first = split * part
    if first < length:
        last = tl.minimum(first + part, length)
        if ONCE:
            entry = named.to(tl.int64) * PAGE + at % PAGE
        else:
            at = first + tl.arange(0, TILE)
            entry = entry_of(own, tl.where(at < last, at, first), PAGE)
        raw = _bytes_of(pages, entry, at < last, ENTRY, D, W, FORM, WORDS)
        line = ((t * N + head) * D)[None, :, None] + column
        heads = tl.load(q + line, mask=live_head, other=0.0)
        angle = position * (W // 2) + pair - R // 2
        c = tl.load(cos + angle, mask=pair >= R // 2, other=1.0)
        s = tl.load(sin + angle, mask=pair >= R // 2, other=0.0)
        # A head of RMS 1: its factor counts the same before and after the products.
        unit = tl.rsqrt(tl.sum(tl.sum(heads * heads, 2), 0) / D + eps) * scale
        even, odd = tl.split(tl.reshape(heads, (C, BH, W // 2, 2)))
        heads = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (C, BH, W))
        largest = tl.full([BH], float("-inf"), tl.float32)
        total = tl.zeros([BH], tl.float32)
        acc = tl.zeros([C, BH, W], tl.float32)
        if ONCE:
            values = _slices(raw, D, W, FORM, MMA, HARDWARE, WORDS)
            scores = tl.sum(_scores(heads, values, unit, FORM, MMA), 0)
            scores = tl.where((at < last)[None, :], scores, float("-inf"))
            p, _, largest, total = running_weights(scores, largest, total)
            p = tl.broadcast_to(p[None, :, :], (C, BH, TILE))
            acc = mix_values(p, values, acc, FORM, MMA)
        else:
            low, high = loop_bound(first, MMA), loop_bound(last, MMA)
            for start in tl.range(low, high, TILE):
                values = _slices(raw, D, W, FORM, MMA, HARDWARE, WORDS)
                scores = tl.sum(_scores(heads, values, unit, FORM, MMA), 0)
                at = start + tl.arange(0, TILE)
                scores = tl.where((at < last)[None, :], scores, float("-inf"))
                p, factor, largest, total = running_weights(scores, largest, total)
                p = tl.broadcast_to(p[None, :, :], (C, BH, TILE))
                at += TILE
                entry = entry_of(own, tl.where(at < last, at, first), PAGE)
                raw = _bytes_of(pages, entry, at < last, ENTRY, D, W, FORM, WORDS)
                acc *= factor[None, :, None]
                if MMA and FORM == "f32":
                    acc = _close_dot(p, values, acc)
                else:
                    acc = mix_values(p, values, acc, FORM, MMA)
        row = (t * SPLITS + split) * N + head
        tl.store(stats + row * 2, largest, mask=head < N)
        tl.store(stats + row * 2 + 1, total, mask=head < N)
        tl.store(sums + (row.to(tl.int64) * D)[None, :, None] + column, acc, mask=live_head)


@triton.jit
def _few_joined(
    sums, stats, span, sink, t, head, n, column0, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr, BW: tl.constexpr, MOST: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`joined_parts` of at most MOST parts, all of which are read at once."""
    column = column0 + tl.arange(0, BW)
    part = part_length(span, SPLITS, SHORTEST)
    parts = (span + part - 1) // part
    first = t * SPLITS * n + head
    tops = ()
    totals = ()
    pieces = ()
    for i in tl.static_range(MOST):
        line = first + i * n
        tops = tops + (tl.load(stats + line * 2, mask=i < parts, other=float("-inf")),)
        totals = totals + (tl.load(stats + line * 2 + 1, mask=i < parts, other=0.0),)
        at = line.to(tl.int64) * WIDTH + column
        pieces = pieces + (tl.load(sums + at, mask=(i < parts) & (column < WIDTH), other=0.0),)
    logit = tl.load(sink + in_order(head, PTX)).to(tl.float32)
    top = logit
    for i in tl.static_range(MOST):
        top = tl.maximum(top, tops[i])
    total = tl.exp(logit - top)
    mixed = tl.zeros([BW], tl.float32)
    for i in tl.static_range(MOST):
        weight = tl.exp(tops[i] - top)
        total += totals[i] * weight
        mixed += pieces[i] * weight
    return mixed / total


@triton.jit
def _join_back_kernel(
    sums,
    stats,
    lengths,
    sink,
    cos,
    sin,
    positions,
    out,
    group_stride,
    row_stride,
    D: tl.constexpr,
    DR: tl.constexpr,
    EACH: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    B: tl.constexpr,
    AHEAD: tl.constexpr,
    FEW: tl.constexpr,
    COMPILED: tl.constexpr,
):
    first = tl.program_id(0) * B
    head = tl.program_id(1)
    t = tl.program_id(2)
    pair = first // 2 + tl.arange(0, B // 2)
    turning = (2 * pair >= D - DR) & (2 * pair < D)
    angle = tl.load(positions + t) * (DR // 2) + pair - (D - DR) // 2
    c = tl.load(cos + angle, mask=turning, other=1.0)
    s = tl.load(sin + angle, mask=turning, other=0.0)
    length = tl.load(lengths + t)
    if FEW:
        mixed = _few_joined(
            sums, stats, length, sink, t, head, tl.num_programs(1), first, D, SPLITS, SHORTEST, B,
            AHEAD, COMPILED,
        )  # fmt: skip
    else:
        mixed = joined_parts(
            sums, stats, length, sink, t, head, tl.num_programs(1), first, D, SPLITS, SHORTEST, B,
            AHEAD, COMPILED,
        )  # fmt: skip
    even, odd = tl.split(tl.reshape(mixed, (B // 2, 2)))
    mixed = tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (B,))
    column = first + tl.arange(0, B)
    to = out + head // EACH * group_stride + t.to(tl.int64) * row_stride + head % EACH * D + column
    tl.store(to, mixed, mask=column < D)


def shared_decode(
    q: Tensor,
    kv: KvPages,
    lengths: Tensor,
    sink: Tensor,
    out: Tensor,
    *,
    rotation: Rotation,
    eps: float,
    scale: float,
    scratch: DecodeScratch,
    splits: int = SPLITS,
) -> None:
    """Attention of each row to the entries that its list names, as `reference.shared_attention`:
    with each head at RMS 1 and its last 64 dims rotated in pairs, and what comes out rotated back.
    `kv` has pages of one entry: a row's line of the table is its list, of which `lengths` are
    named, one at least. `splits` is a power of two: most parts of a row's entries, of which fewer
    leave room for more rows in `scratch`; they change the last bits.

    Shapes:
        q [T, N, D] float32, contiguous, D a power of two from 128 on; out [G, T, N / G * D]
        float32, the heads of a group together, its last dim contiguous; not the same memory;
        lengths [T] int32; sink [N] bfloat16 or float32
    Raises:
        ValueError: pages or scratch do not fit.
    """
    rows, n, d = q.shape
    check_entries(kv, shared_entry_bytes(kv.form, d, SHARED_BLOCK))
    scratch.check(rows, n, d, splits)
    turns = rotation.cos, rotation.sin, rotation.positions
    parts = most_parts(kv, splits=splits, shortest=_SHORTEST)
    once = kv.form is not KvFormat.F32 and (
        kv.table.shape[1] * kv.page_tokens <= _SHORTEST * splits
    )
    _shared_decode_kernel[(parts, triton.cdiv(n, _HEADS), rows)](
        q, *turns, eps, kv.pages, kv.table, kv.table.stride(0), lengths, scratch.sums,
        scratch.stats, scale, kv.table.shape[1], N=n, D=d, W=SHARED_BLOCK, PAGE=kv.page_tokens,
        ENTRY=kv.entry_bytes, SPLITS=splits, SHORTEST=_SHORTEST,
        TILE=_SHORTEST if once else _tile(kv), BH=_HEADS, FORM=kv.form.value,
        MMA=not INTERPRETED, HARDWARE=has_e4m3(q.device), ONCE=once,
        WORDS=kv.form is KvFormat.NVFP4 and has_e4m3(q.device),
        num_warps=_warps(kv.form, once), num_stages=1,
    )  # fmt: skip
    block = min(_JOIN_FLOATS, triton.next_power_of_2(d))
    _join_back_kernel[(triton.cdiv(d, block), n, rows)](
        scratch.sums, scratch.stats, lengths, sink, *turns, out, out.stride(0), out.stride(1), D=d,
        DR=SHARED_BLOCK, EACH=n // out.shape[0], SPLITS=splits, SHORTEST=_SHORTEST, B=block,
        AHEAD=_JOIN_FEW if parts <= _JOIN_FEW else _JOIN_AHEAD, FEW=parts <= _JOIN_AHEAD,
        COMPILED=not INTERPRETED, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def _warps(form: KvFormat, once: bool) -> int:
    """Fewer do less twice, as long as registers hold it. On an H200, 640 entries of NVFP4 in one
    round: 8.8 us with 4 warps, 10.3 with 8; two rows 11.9 and 16.6.
    """
    return 4 if once and form in (KvFormat.NVFP4, KvFormat.FP8) else 8


def _tile(kv: KvPages) -> int:
    if INTERPRETED or kv.form is KvFormat.F32:
        return _TILE
    large = torch.cuda.get_device_capability(kv.pages.device)[0] in (9, 10)
    return _HOPPER_TILE if large else _TILE
