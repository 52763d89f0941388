"""Attention of a decode step: split over the cached entries, then joined in order.

Owns MLA in the latent space and grouped queries, over pages in any format of
`reference.kv_formats`. Twins: `reference.mla_absorbed` (its middle; the ends are in `latent`) and
`reference.gqa`. How entries are cut into parts and parts are joined is in `attention_parts`, the
prompt's attention in `prefill_attention`. Launchers allocate nothing. Called on the engine thread.

Cached values are exact in bfloat16 (FP8: up to a scale that is applied to sums), queries are cut
into three bfloat16 parts, probabilities into two: tensor cores then come as close as float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.reference.kv_formats import gqa_entry_bytes, mla_entry_bytes
from moet_desk.kernels.triton.attention_parts import (
    NO_WINDOW,
    SHORTEST_PART,
    SPLITS,
    DecodeScratch,
    join_parts,
    most_parts,
    part_length,
)
from moet_desk.kernels.triton.kv_entries import (
    KvPages,
    check_entries,
    decoded,
    entry_of,
    load_raw,
    load_rope,
    load_scale,
    load_vectors,
    vector_bytes,
)
from moet_desk.kernels.triton.numbers import bf16_part, has_e4m3, loop_bound
from moet_desk.kernels.triton.portable import INTERPRETED

_TILE, _HOPPER_TILE = 32, 64
"""Entries that a program works on at a time; cards with more shared memory hold more of them."""


@triton.jit
def query_scores(q, keys, FORM: tl.constexpr, MMA: tl.constexpr):
    """[H, C] x [S, C] -> [H, S], as close as float32."""
    if MMA and FORM == "f32":
        return tl.dot(q, tl.trans(keys), input_precision="tf32x3")
    elif MMA:
        high = bf16_part(q)
        middle = bf16_part(q - high)
        low = (q - high - middle).to(tl.bfloat16)
        k = tl.trans(keys.to(tl.bfloat16))
        scores = tl.dot(middle.to(tl.bfloat16), k, tl.dot(low, k))
        return tl.dot(high.to(tl.bfloat16), k, scores)
    else:
        return tl.dot(q, tl.trans(keys), input_precision="ieee")


@triton.jit
def mix_values(p, values, acc, FORM: tl.constexpr, MMA: tl.constexpr):
    """acc + [H, S] x [S, C], as close as float32."""
    if MMA and FORM == "f32":
        return tl.dot(p, values, acc, input_precision="tf32x3")
    elif MMA:
        high = bf16_part(p)
        v = values.to(tl.bfloat16)
        acc = tl.dot((p - high).to(tl.bfloat16), v, acc)
        return tl.dot(high.to(tl.bfloat16), v, acc)
    else:
        return tl.dot(p, values, acc, input_precision="ieee")


@triton.jit
def running_weights(scores, largest, total):
    """One step of a running softmax: weights of a tile, the old sums' factor, and the new state."""
    new = tl.maximum(largest, tl.max(scores, 1))
    p = tl.exp(scores - new[:, None])
    factor = tl.exp(largest - new)
    return p, factor, new, total * factor + tl.sum(p, 1)


@triton.jit
def _mla_decode_kernel(
    q_latent,
    q_rope,
    pages,
    table,
    table_stride,
    lengths,
    sums,
    stats,
    scale,
    N: tl.constexpr,
    R: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    TILE: tl.constexpr,
    BH: tl.constexpr,
    CHUNK: tl.constexpr,
    BR: tl.constexpr,
    FORM: tl.constexpr,
    MMA: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    split = tl.program_id(0)
    t = tl.program_id(2)
    length = tl.load(lengths + t)
    part = part_length(length, SPLITS, SHORTEST)
    first = split * part
    if first < length:
        last = tl.minimum(first + part, length)
        head = tl.program_id(1) * BH + tl.arange(0, BH)
        live_head = (head < N)[:, None]
        q = q_latent + ((t * N + head) * R)[:, None]
        j = tl.arange(0, BR)
        turned = q_rope + ((t * N + head) * DR)[:, None] + j[None, :]
        turned = tl.load(turned, mask=live_head & (j < DR)[None, :], other=0.0)
        largest = tl.full([BH], float("-inf"), tl.float32)
        total = tl.zeros([BH], tl.float32)
        acc = ()
        for _ in tl.static_range(R // CHUNK):
            acc = acc + (tl.zeros([BH, CHUNK], tl.float32),)
        # Queries stay in shared memory: kept in registers over the loop they would spill.
        low, high = loop_bound(first, MMA), loop_bound(last, MMA)
        for start in tl.range(low, high, TILE, disable_licm=True):
            at = start + tl.arange(0, TILE)
            live = at < last
            entry = entry_of(table + t * table_stride, tl.where(live, at, first), PAGE)
            # All of the tile's bytes are asked for before any is used.
            raw = ()
            for c in tl.static_range(R // CHUNK):
                raw = raw + (load_raw(pages, entry, live, ENTRY, 0, R, c * CHUNK, CHUNK, FORM),)
            keys = load_rope(pages, entry, live, ENTRY, R, DR, BR, FORM, HARDWARE)
            scores = query_scores(turned, keys, "f32" if FORM == "f32" else "bf16", MMA)
            latent = ()
            for c in tl.static_range(R // CHUNK):
                values = decoded(raw[c], CHUNK, FORM, HARDWARE)
                column = c * CHUNK + tl.arange(0, CHUNK)
                part_q = tl.load(q + column[None, :], mask=live_head, other=0.0)
                more = query_scores(part_q, values, FORM, MMA)
                if FORM == "fp8":
                    more *= load_scale(pages, entry, live, ENTRY, 0, R, c * CHUNK)[None, :]
                scores += more
                latent = latent + (values,)
            scores = tl.where(live[None, :], scores * scale, float("-inf"))
            p, factor, largest, total = running_weights(scores, largest, total)
            moved = ()
            for c in tl.static_range(R // CHUNK):
                weights = p
                if FORM == "fp8":
                    weights *= load_scale(pages, entry, live, ENTRY, 0, R, c * CHUNK)[None, :]
                moved = moved + (
                    mix_values(weights, latent[c], acc[c] * factor[:, None], FORM, MMA),
                )
            acc = moved
        row = (t * SPLITS + split) * N + head
        tl.store(stats + row * 2, largest, mask=head < N)
        tl.store(stats + row * 2 + 1, total, mask=head < N)
        for c in tl.static_range(R // CHUNK):
            column = c * CHUNK + tl.arange(0, CHUNK)
            to = sums + (row.to(tl.int64) * R)[:, None] + column[None, :]
            tl.store(to, acc[c], mask=live_head)


@triton.jit
def _gqa_decode_kernel(
    q,
    pages,
    table,
    table_stride,
    lengths,
    sums,
    stats,
    scale,
    window,
    N: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    TILE: tl.constexpr,
    BH: tl.constexpr,
    CD: tl.constexpr,
    CV: tl.constexpr,
    FORM: tl.constexpr,
    MMA: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    SHARE: tl.constexpr = N // KEYS
    HEAD_TILES: tl.constexpr = (SHARE + BH - 1) // BH
    KEY_BYTES: tl.constexpr = vector_bytes(D, FORM)
    VALUE_BYTES: tl.constexpr = vector_bytes(DV, FORM)
    split = tl.program_id(0)
    key = tl.program_id(1) // HEAD_TILES
    t = tl.program_id(2)
    length = tl.load(lengths + t)
    oldest = tl.maximum(length - window, 0)
    part = part_length(length - oldest, SPLITS, SHORTEST)
    first = oldest + split * part
    if first < length:
        last = tl.minimum(first + part, length)
        inner = tl.program_id(1) % HEAD_TILES * BH + tl.arange(0, BH)
        head = key * SHARE + inner
        live_head = inner < SHARE
        line = q + ((t * N + head) * D)[:, None]
        largest = tl.full([BH], float("-inf"), tl.float32)
        total = tl.zeros([BH], tl.float32)
        acc = ()
        for _ in tl.static_range((DV + CV - 1) // CV):
            acc = acc + (tl.zeros([BH, CV], tl.float32),)
        # Queries stay in shared memory: kept in registers over the loop they would spill.
        low, high = loop_bound(first, MMA), loop_bound(last, MMA)
        for start in tl.range(low, high, TILE, disable_licm=True):
            at = start + tl.arange(0, TILE)
            live = at < last
            entry = entry_of(table + t * table_stride, tl.where(live, at, first), PAGE)
            scores = tl.zeros([BH, TILE], tl.float32)
            # A head's vectors begin at a byte known at run time only, so it moves the base.
            base = pages + key * KEY_BYTES
            for c in tl.static_range((D + CD - 1) // CD):
                keys = load_vectors(base, entry, live, ENTRY, 0, D, c * CD, CD, FORM, HARDWARE)
                column = c * CD + tl.arange(0, CD)
                seen = live_head[:, None] & (column < D)[None, :]
                more = query_scores(
                    tl.load(line + column[None, :], mask=seen, other=0.0), keys, FORM, MMA
                )
                if FORM == "fp8":
                    more *= load_scale(base, entry, live, ENTRY, 0, D, c * CD)[None, :]
                scores += more
            scores = tl.where(live[None, :], scores * scale, float("-inf"))
            p, factor, largest, total = running_weights(scores, largest, total)
            base = pages + KEYS * KEY_BYTES + key * VALUE_BYTES
            moved = ()
            for c in tl.static_range((DV + CV - 1) // CV):
                values = load_vectors(base, entry, live, ENTRY, 0, DV, c * CV, CV, FORM, HARDWARE)
                weights = p
                if FORM == "fp8":
                    weights *= load_scale(base, entry, live, ENTRY, 0, DV, c * CV)[None, :]
                moved = moved + (mix_values(weights, values, acc[c] * factor[:, None], FORM, MMA),)
            acc = moved
        row = (t * SPLITS + split) * N + head
        tl.store(stats + row * 2, largest, mask=live_head)
        tl.store(stats + row * 2 + 1, total, mask=live_head)
        for c in tl.static_range((DV + CV - 1) // CV):
            column = c * CV + tl.arange(0, CV)
            to = sums + (row.to(tl.int64) * DV)[:, None] + column[None, :]
            tl.store(to, acc[c], mask=live_head[:, None] & (column < DV)[None, :])


def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    kv: KvPages,
    lengths: Tensor,
    out: Tensor,
    *,
    scale: float,
    scratch: DecodeScratch,
) -> None:
    """Mix the latents that each row sees: softmax((q_latent . c + q_rope . k) * scale) c.

    Shapes:
        q_latent [T, N, r], q_rope [T, N, dr] float32; lengths [T] int32, own entry included
        out [T, N, r] float32
    Raises:
        ValueError: pages or scratch do not fit, or r is neither a power of two nor 128 * n.
    """
    rows, n, r = q_latent.shape
    dr = q_rope.shape[2]
    chunk = _chunk(r)
    if r % chunk:
        raise ValueError(f"latents of {r} values are not made of blocks of {chunk}")
    check_entries(kv, mla_entry_bytes(kv.form, r, dr))
    scratch.check(rows, n, r)
    heads = 16
    _mla_decode_kernel[(most_parts(kv), triton.cdiv(n, heads), rows)](
        q_latent, q_rope, kv.pages, kv.table, kv.table.stride(0), lengths,
        scratch.sums, scratch.stats, scale,
        N=n, R=r, DR=dr, PAGE=kv.page_tokens, ENTRY=kv.entry_bytes, SPLITS=SPLITS,
        SHORTEST=SHORTEST_PART, TILE=_tile(kv), BH=heads, CHUNK=chunk,
        BR=max(16, triton.next_power_of_2(dr)), FORM=kv.form.value, MMA=not INTERPRETED,
        HARDWARE=has_e4m3(q_latent.device), num_warps=8, num_stages=1,
    )  # fmt: skip
    join_parts(scratch, lengths, out, width=r)


def gqa_decode(
    q: Tensor,
    kv: KvPages,
    lengths: Tensor,
    out: Tensor,
    *,
    n_keys: int,
    scale: float,
    scratch: DecodeScratch,
    window: int | None = None,
    sink: Tensor | None = None,
) -> None:
    """Grouped-query attention of each row to the entries it sees, as `reference.gqa`.

    Shapes:
        q [T, N, D] float32; lengths [T] int32, own entry included; sink [N] bfloat16 or float32
        out [T, N, Dv] float32
    Raises:
        ValueError: pages or scratch do not fit.
    """
    rows, n, d = q.shape
    dv = out.shape[2]
    check_entries(kv, gqa_entry_bytes(kv.form, n_keys, d, dv))
    scratch.check(rows, n, dv)
    share = n // n_keys
    heads = min(64, max(16, triton.next_power_of_2(share)))
    seen = NO_WINDOW if window is None else window
    _gqa_decode_kernel[(most_parts(kv, seen), n_keys * triton.cdiv(share, heads), rows)](
        q, kv.pages, kv.table, kv.table.stride(0), lengths,
        scratch.sums, scratch.stats, scale, seen,
        N=n, KEYS=n_keys, D=d, DV=dv, PAGE=kv.page_tokens, ENTRY=kv.entry_bytes, SPLITS=SPLITS,
        SHORTEST=SHORTEST_PART, TILE=_TILE, BH=heads, CD=_chunk(d), CV=_chunk(dv),
        FORM=kv.form.value, MMA=not INTERPRETED, HARDWARE=has_e4m3(q.device),
        num_warps=4, num_stages=1,
    )  # fmt: skip
    join_parts(scratch, lengths, out, width=dv, window=seen, sink=sink)


def _tile(kv: KvPages) -> int:
    """Entries at a time: H200, 64 heads and 8192 entries take 48 us with 64 and 68 with 32."""
    if INTERPRETED or kv.form in (KvFormat.F32, KvFormat.FP8):
        return _TILE
    large = torch.cuda.get_device_capability(kv.pages.device)[0] in (9, 10)
    return _HOPPER_TILE if large else _TILE


def _chunk(d: int) -> int:
    """Values of a vector that a program multiplies at a time: at most one FP8 block.

    Two NVFP4 blocks at least: of a single one Triton 3.6 makes a kernel that reads wrong values
    on an H200.
    """
    return min(128, max(32, 1 << (d - 1).bit_length()))
