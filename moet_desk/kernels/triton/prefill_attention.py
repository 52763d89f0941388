"""Attention of a prompt chunk to everything before it and to itself.

Owns MLA with expanded keys and values (cheaper than the latent form for many rows) and grouped
queries over pages. Twins: `reference.mla_plain`, `reference.gqa`. A chunk belongs to one sequence,
and its own entries are already in the pages. Launchers allocate nothing: expanded keys and values
of a group of heads live in a `PrefillScratch`. Called on the engine thread.

float32 operands are cut into two bfloat16 parts; the product of the two small parts is left out, so
a score is within a few 2**-17 of its largest terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.reference.kv_formats import gqa_entry_bytes, mla_entry_bytes
from moet_desk.kernels.triton.dense_weight import DenseWeight
from moet_desk.kernels.triton.gemm import gemm, store_parts
from moet_desk.kernels.triton.kv_entries import (
    KvPages,
    check_entries,
    entry_of,
    load_rope,
    load_scale,
    load_vectors,
    vector_bytes,
)
from moet_desk.kernels.triton.latent import LatentWeight
from moet_desk.kernels.triton.numbers import bf16_part, has_e4m3, loop_bound
from moet_desk.kernels.triton.portable import INTERPRETED

_NO_WINDOW = 1 << 30
_LEAST_DOT = 32
"""Numbers of a head that a product takes at least: with 16 the compiled kernel reads outside."""


@dataclass(frozen=True, slots=True)
class PrefillScratch:
    """Room for the expanded entries of one layer, made once for the longest prompt.

    Attributes:
        parts: bfloat16 [2 * S * r], latents.
        ropes: float32 [S * dr].
        expanded: float32 [S * (dn + dv) * heads], keys and values of as many heads as fit.
    """

    parts: Tensor
    ropes: Tensor
    expanded: Tensor

    @classmethod
    def make(
        cls, entries: int, r: int, dr: int, *, per_entry: int, device: torch.device
    ) -> PrefillScratch:
        """Room for `entries` entries; `per_entry` floats of keys and values for each of them.

        More heads at a time fill the card better; (dn + dv) floats are one head.
        """
        return cls(
            torch.empty(2 * entries * r, dtype=torch.bfloat16, device=device),
            torch.empty(entries * dr, dtype=torch.float32, device=device),
            torch.empty(entries * per_entry, dtype=torch.float32, device=device),
        )


# Numbers that change from chunk to chunk must not make new variants of a kernel: a variant takes
# seconds to compile.
@triton.jit(do_not_specialize=["size"])
def _latents_kernel(
    pages,
    table,
    parts,
    ropes,
    size,
    R: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BR: tl.constexpr,
    FORM: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = at < size
    entry = entry_of(table, tl.where(live, at, 0), PAGE)
    for c in tl.static_range(R // CHUNK):
        x = load_vectors(pages, entry, live, ENTRY, 0, R, c * CHUNK, CHUNK, FORM, HARDWARE)
        if FORM == "fp8":
            x *= load_scale(pages, entry, live, ENTRY, 0, R, c * CHUNK)[:, None]
        to = (at.to(tl.int64) * R)[:, None] + (c * CHUNK + tl.arange(0, CHUNK))[None, :]
        store_parts(parts, to, size.to(tl.int64) * R, x, live[:, None])
    rope = load_rope(pages, entry, live, ENTRY, R, DR, BR, FORM, HARDWARE)
    j = tl.arange(0, BR)
    to = (at.to(tl.int64) * DR)[:, None] + j[None, :]
    inside = live[:, None] & (j < DR)[None, :]
    if ropes.dtype.element_ty == tl.bfloat16:
        store_parts(ropes, to, size.to(tl.int64) * DR, rope, inside)
    else:
        tl.store(ropes + to, rope, mask=inside)


@triton.jit
def close_dot(a, b, acc, EXACT: tl.constexpr, MMA: tl.constexpr):
    """acc + a x b, small products first; EXACT: bfloat16 holds b."""
    if MMA:
        a_high = bf16_part(a)
        b_high = bf16_part(b)
        rest = (a - a_high).to(tl.bfloat16)
        acc = tl.dot(rest, b_high.to(tl.bfloat16), acc)
        if not EXACT:
            acc = tl.dot(a_high.to(tl.bfloat16), (b - b_high).to(tl.bfloat16), acc)
        return tl.dot(a_high.to(tl.bfloat16), b_high.to(tl.bfloat16), acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _softmax_step(scores, largest, total):
    """`attention` has the same without rows that see nothing yet."""
    new = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp(scores - base[:, None])
    factor = tl.exp(largest - base)
    return p, factor, new, total * factor + tl.sum(p, 1)


@triton.jit
def _finish(acc, largest, total, sink, head):
    """Divide by the sum of weights, a sink's included."""
    if sink is not None:
        logit = tl.load(sink + head).to(tl.float32)
        base = tl.maximum(largest, logit)
        factor = tl.exp(largest - base)
        return acc * (factor / (total * factor + tl.exp(logit - base)))[:, None]
    else:
        return acc / total[:, None]


@triton.jit(do_not_specialize=["start", "M", "heads", "head0"])
def _mla_prefill_kernel(
    q_nope,
    q_stride,
    q_pitch,
    q_rope,
    expanded,
    ropes,
    out,
    scale,
    start,
    M,
    heads,
    head0,
    N: tl.constexpr,
    DN: tl.constexpr,
    DR: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    TILE: tl.constexpr,
    CD: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
    MMA: tl.constexpr,
):
    # The last rows see most: they begin first.
    m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM + tl.arange(0, BM)
    inner = tl.program_id(1)
    head = head0 + inner
    live = (m < M)[:, None]
    row = tl.where(m < M, m, 0).to(tl.int64)
    line = (row * q_stride + head * q_pitch)[:, None]
    j = tl.arange(0, BR)
    turned = q_rope + ((row * N + head) * DR)[:, None] + j[None, :]
    turned = tl.load(turned, mask=live & (j < DR)[None, :], other=0.0)
    column = tl.arange(0, BV)
    largest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    end = start + tl.minimum((tl.num_programs(0) - tl.program_id(0)) * BM, M)
    # Queries stay in shared memory: kept in registers over the loop they would spill.
    for first in tl.range(0, loop_bound(end, MMA), TILE, disable_licm=True):
        at = first + tl.arange(0, TILE)
        seen = at < end
        entry = tl.where(seen, at, 0).to(tl.int64)
        mask = seen[:, None] & (j < DR)[None, :]
        k = tl.load(ropes + (entry * DR)[:, None] + j[None, :], mask=mask, other=0.0)
        scores = close_dot(turned, tl.trans(k), tl.zeros([BM, TILE], tl.float32), False, MMA)
        base = expanded + ((entry * heads + inner) * (DN + DV))[:, None]
        for c in tl.static_range((DN + CD - 1) // CD):
            d = c * CD + tl.arange(0, CD)
            q = tl.load(q_nope + line + d[None, :], mask=live & (d < DN)[None, :], other=0.0)
            k = tl.load(base + d[None, :], mask=seen[:, None] & (d < DN)[None, :], other=0.0)
            scores = close_dot(q, tl.trans(k), scores, False, MMA)
        hidden = at[None, :] > (start + m)[:, None]
        scores = tl.where(hidden, float("-inf"), scores * scale)
        p, factor, largest, total = _softmax_step(scores, largest, total)
        mask = seen[:, None] & (column < DV)[None, :]
        v = tl.load(base + DN + column[None, :], mask=mask, other=0.0)
        acc = close_dot(p, v, acc * factor[:, None], False, MMA)
    to = out + ((row * N + head) * DV)[:, None] + column[None, :]
    y = _finish(acc, largest, total, None, head)
    tl.store(to, y, mask=live & (column < DV)[None, :])


@triton.jit
def _whole_vectors(
    pages,
    entry,
    live,
    ENTRY: tl.constexpr,
    D: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    FORM: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """`load_vectors` with the scale of FP8 applied."""
    x = load_vectors(pages, entry, live, ENTRY, 0, D, FIRST, COUNT, FORM, HARDWARE)
    if FORM == "fp8":
        x *= load_scale(pages, entry, live, ENTRY, 0, D, FIRST)[:, None]
    return x


@triton.jit(do_not_specialize=["start", "M", "window"])
def _gqa_prefill_kernel(
    q,
    pages,
    table,
    sink,
    out,
    scale,
    window,
    start,
    M,
    N: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    BM: tl.constexpr,
    TILE: tl.constexpr,
    CD: tl.constexpr,
    CV: tl.constexpr,
    FORM: tl.constexpr,
    MMA: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    SHARE: tl.constexpr = N // KEYS
    EXACT: tl.constexpr = FORM == "bf16" or FORM == "nvfp4"
    KEY_BYTES: tl.constexpr = vector_bytes(D, FORM)
    VALUE_BYTES: tl.constexpr = vector_bytes(DV, FORM)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    key = tl.program_id(1)
    # All heads that share a key head stand in one tile, token by token.
    i = tile * BM + tl.arange(0, BM)
    token = i // SHARE
    head = key * SHARE + i % SHARE
    live = (token < M)[:, None]
    row = tl.where(token < M, token, 0).to(tl.int64) * N + head
    largest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = ()
    for _ in tl.static_range((DV + CV - 1) // CV):
        acc = acc + (tl.zeros([BM, CV], tl.float32),)
    oldest = tl.maximum(start + tile * BM // SHARE + 1 - window, 0) // TILE * TILE
    end = start + tl.minimum(((tile + 1) * BM + SHARE - 1) // SHARE, M)
    low, high = loop_bound(oldest, MMA), loop_bound(end, MMA)
    for first in tl.range(low, high, TILE, disable_licm=True):
        at = first + tl.arange(0, TILE)
        seen = at < end
        entry = entry_of(table, tl.where(seen, at, 0), PAGE)
        scores = tl.zeros([BM, TILE], tl.float32)
        base = pages + key * KEY_BYTES
        for c in tl.static_range((D + CD - 1) // CD):
            k = _whole_vectors(base, entry, seen, ENTRY, D, c * CD, CD, FORM, HARDWARE)
            d = c * CD + tl.arange(0, CD)
            mask = live & (d < D)[None, :]
            x = tl.load(q + (row * D)[:, None] + d[None, :], mask=mask, other=0.0)
            scores = close_dot(x, tl.trans(k), scores, EXACT, MMA)
        age = (start + token)[:, None] - at[None, :]
        scores = tl.where((age < 0) | (age >= window), float("-inf"), scores * scale)
        p, factor, largest, total = _softmax_step(scores, largest, total)
        base = pages + KEYS * KEY_BYTES + key * VALUE_BYTES
        moved = ()
        for c in tl.static_range((DV + CV - 1) // CV):
            v = _whole_vectors(base, entry, seen, ENTRY, DV, c * CV, CV, FORM, HARDWARE)
            moved = moved + (close_dot(p, v, acc[c] * factor[:, None], EXACT, MMA),)
        acc = moved
    for c in tl.static_range((DV + CV - 1) // CV):
        d = c * CV + tl.arange(0, CV)
        y = _finish(acc[c], largest, total, sink, head)
        tl.store(out + (row * DV)[:, None] + d[None, :], y, mask=live & (d < DV)[None, :])


def mla_prefill(
    q_nope: Tensor,
    q_rope: Tensor,
    kv: KvPages,
    up: LatentWeight,
    out: Tensor,
    *,
    start: int,
    scale: float,
    scratch: PrefillScratch,
) -> None:
    """MLA of M rows at positions start .. start + M - 1 of one sequence, as `reference.mla_plain`.

    Shapes:
        q_nope [M, N, dn] (rows and heads may lie apart), q_rope [M, N, dr] float32
        kv.table [1, max_pages]; out [M, N * dv] float32
    Raises:
        ValueError: pages or scratch do not fit.
    """
    rows, n, dr = q_rope.shape
    r, entries = up.weight.k, start + rows
    check_entries(kv, mla_entry_bytes(kv.form, r, dr))
    group = _heads_that_fit(up, scratch.expanded.numel() // entries)
    own = scratch.ropes[: entries * dr].view(-1, dr)
    parts, ropes = _latents(kv, entries, r, scratch, own)
    width = up.dn + up.dv
    tile_m, tile_s, warps, stages = _shape(q_nope.device, narrow=max(up.dn, up.dv) <= 128)
    for first in range(0, n, group):
        heads = min(group, n - first)
        expanded = scratch.expanded[: entries * heads * width].view(entries, heads * width)
        gemm(parts, _rows_of(up.weight, first * width, heads * width), expanded)
        _mla_prefill_kernel[(triton.cdiv(rows, tile_m), heads)](
            q_nope, q_nope.stride(0), q_nope.stride(1), q_rope, expanded, ropes, out,
            scale, start, rows, heads, first, N=n, DN=up.dn, DR=dr, DV=up.dv,
            BM=tile_m, TILE=tile_s, CD=max(_LEAST_DOT, chunk_of(up.dn)),
            BR=max(_LEAST_DOT, triton.next_power_of_2(dr)),
            BV=max(_LEAST_DOT, triton.next_power_of_2(up.dv)), MMA=not INTERPRETED,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip


def gqa_prefill(
    q: Tensor,
    kv: KvPages,
    out: Tensor,
    *,
    n_keys: int,
    start: int,
    scale: float,
    window: int | None = None,
    sink: Tensor | None = None,
) -> None:
    """Grouped-query attention of M rows at positions start .. start + M - 1 of one sequence.

    Shapes:
        q [M, N, D] float32; kv.table [1, max_pages]; sink [N] bfloat16 or float32
        out [M, N, Dv] float32
    Raises:
        ValueError: the pages hold entries of another size.
    """
    rows, n, d = q.shape
    dv = out.shape[2]
    check_entries(kv, gqa_entry_bytes(kv.form, n_keys, d, dv))
    tile_m, tile_s, warps, stages = _shape(q.device)
    _gqa_prefill_kernel[(triton.cdiv(rows * (n // n_keys), tile_m), n_keys)](
        q, kv.pages, kv.table, sink, out, scale, _NO_WINDOW if window is None else window,
        start, rows, N=n, KEYS=n_keys, D=d, DV=dv, PAGE=kv.page_tokens, ENTRY=kv.entry_bytes,
        BM=tile_m, TILE=tile_s, CD=chunk_of(d), CV=chunk_of(dv), FORM=kv.form.value,
        MMA=not INTERPRETED, HARDWARE=has_e4m3(q.device), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def decode_latents(
    kv: KvPages, entries: int, r: int, dr: int, scratch: PrefillScratch
) -> tuple[Tensor, Tensor]:
    """Entries 0 .. `entries` decoded, all in two bfloat16 parts: latents [2, S, r], rotary keys
    [2, S, dr]. Of formats that bfloat16 holds the second parts are zero.

    Raises:
        ValueError: there is too little room.
    """
    ropes = scratch.ropes.view(torch.bfloat16)[: 2 * entries * dr]
    return _latents(kv, entries, r, scratch, ropes.view(2, -1, dr))


def _latents(
    kv: KvPages, entries: int, r: int, scratch: PrefillScratch, ropes: Tensor
) -> tuple[Tensor, Tensor]:
    """Entries 0 .. `entries` decoded: latents in two parts [2, S, r], rotary keys as `ropes`."""
    if scratch.parts.numel() < 2 * entries * r or ropes.shape[-2] < entries:
        raise ValueError(f"no room for {entries} entries")
    parts = scratch.parts[: 2 * entries * r].view(2, entries, r)
    tile, dr = 32, ropes.shape[-1]
    _latents_kernel[(triton.cdiv(entries, tile),)](
        kv.pages, kv.table, parts, ropes, entries,
        R=r, DR=dr, PAGE=kv.page_tokens, ENTRY=kv.entry_bytes, TILE=tile, CHUNK=chunk_of(r),
        BR=triton.next_power_of_2(dr), FORM=kv.form.value, HARDWARE=has_e4m3(parts.device),
        num_warps=4,
    )  # fmt: skip
    return parts, ropes


def _rows_of(weight: DenseWeight, first: int, count: int) -> DenseWeight:
    """Some rows of a weight, beginning at a block of scales."""
    values = weight.values[first : first + count]
    if weight.scales is None:
        return DenseWeight(values)
    low, high = first // weight.scale_rows, -(-(first + count) // weight.scale_rows)
    return DenseWeight(values, weight.scales[low:high])


def _heads_that_fit(up: LatentWeight, floats: int) -> int:
    """Heads expanded at a time; groups begin at a block of scales if there are scales."""
    width = up.dn + up.dv
    fit = floats // width
    if up.weight.scales is not None and fit < up.heads:
        step = up.weight.scale_rows // gcd(up.weight.scale_rows, width)
        fit = fit // step * step
    if fit < 1:
        raise ValueError(f"no room for the keys and values of one head ({width} floats an entry)")
    return min(fit, up.heads)


def chunk_of(d: int) -> int:
    """Dims multiplied at a time: 128, or what divides d if that is less than d; 32 at least, as
    `attention` has it.
    """
    return min(128, max(16, d & -d)) if d > 64 else max(32, 1 << (d - 1).bit_length())


def _shape(device: torch.device, *, narrow: bool = False) -> tuple[int, int, int, int]:
    """Rows, entries, warps and stages of a program; consumer cards have less shared memory."""
    if INTERPRETED:
        return 16, 32, 4, 1
    if torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return CARD_SHAPE
    return HOPPER_NARROW_SHAPE if narrow else HOPPER_SHAPE


HOPPER_SHAPE = (128, 64, 8, 1)
HOPPER_NARROW_SHAPE = (128, 128, 8, 1)
"""MLA with values of at most 128: wider ones do not leave room in shared memory."""
CARD_SHAPE = (64, 32, 8, 1)
