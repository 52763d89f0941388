"""An indexer over pooled entries in a step: keys stored, queries made ready, windows scored.

Twins: `reference.pooled_key_write`, `reference.index_rounded`, `reference.index_scores`. Where
entries are rounded (FP8, NVFP4), keys and queries are turned by a Hadamard matrix and rounded to
e2m1 with a power of two per 32 numbers; what is compared then is exact in bfloat16. The choice is
`indexer.choose`. Launchers allocate nothing and ask the device nothing, so they can be captured.
Called on the engine thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import pooled_key_bytes
from moet_desk.kernels.triton.attention import query_scores
from moet_desk.kernels.triton.kv_entries import KvPages, entry_of, load_vectors
from moet_desk.kernels.triton.loads import in_order, in_order_halves
from moet_desk.kernels.triton.numbers import bf16_code, e2m1_code, e2m1_value
from moet_desk.kernels.triton.portable import INTERPRETED
from moet_desk.kernels.triton.prepare import Rotation

HOPPER_SHAPE, CARD_SHAPE = (32, 64, 4), (32, 16, 4)
"""Keys that a program scores, heads at a time, and warps; the former where queries are rounded and
tensor cores take 64 heads at once.
"""

_ROUNDING_WARPS = 1
"""Of a program that rounds one vector: it waits for no other warp."""


@triton.jit
def _rotated(line, scale, weight, cos, sin, position, D: tl.constexpr, DR: tl.constexpr):
    """A vector [D] times `scale` and `weight` (None: without), its last DR numbers rotated."""
    j = tl.arange(0, D)
    turning = j >= D - DR
    partner = tl.where(turning, j ^ 1, j)
    one, two = tl.load(line + j) * scale, tl.load(line + partner) * scale
    if weight is not None:
        one *= tl.load(weight + j).to(tl.float32)
        two *= tl.load(weight + partner).to(tl.float32)
    angle = position * (DR // 2) + (j - (D - DR)) // 2
    c = tl.load(cos + angle, mask=turning, other=1.0)
    s = tl.load(sin + angle, mask=turning, other=0.0)
    turned = tl.where(j % 2 == 1, one * c + two * s, one * c - two * s)
    return tl.where(turning, turned, one)


@triton.jit
def hadamard(D: tl.constexpr):
    """Signs of a Hadamard matrix [D, D]."""
    i = tl.arange(0, D)
    both = i[:, None] & i[None, :]
    both ^= both >> 4
    both ^= both >> 2
    both ^= both >> 1
    return 1.0 - 2.0 * (both & 1).to(tl.float32)


@triton.jit
def block_codes(blocks):
    """Nibbles [n, 32] of blocks [n, 32] and their exponents [n]."""
    largest = tl.maximum(tl.max(tl.abs(blocks), 1), 7.052966e-38)
    bits = largest.to(tl.int32, bitcast=True)
    # A sixth of it, up to a power of two: 6 is 1.5 times one, so no division is needed.
    power = (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)
    power = tl.where(bits < 0x7F800000, power, 255 + ((bits & 0x7FFFFF) != 0).to(tl.int32))
    inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
    return e2m1_code(blocks * inverse[:, None]), power


@triton.jit
def _rounded(x, FACTOR: tl.constexpr, D: tl.constexpr):
    """Nibbles [D / 32, 32] and exponents [D / 32] of a vector [D] that is turned first.

    The matrix is a product of two small ones, of the low bits of places and of the others.
    """
    parts = tl.reshape(x, (D // 16, 16))
    parts = tl.sum(parts[:, :, None] * hadamard(16)[None, :, :], 1)
    parts = tl.sum(parts[:, None, :] * hadamard(D // 16)[:, :, None], 0)
    return block_codes(tl.reshape(parts * FACTOR, (D // 32, 32)))


@triton.jit
def _key_kernel(
    vectors,
    weight,
    eps,
    cos,
    sin,
    positions,
    pages,
    table,
    table_stride,
    D: tl.constexpr,
    DR: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    FACTOR: tl.constexpr,
    FORM: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + t)
    if position % RATIO == RATIO - 1:
        number = position // RATIO
        to = pages + entry_of(table + t * table_stride, number, PAGE) * ENTRY
        j = tl.arange(0, D)
        x = tl.load(vectors + t * D + j)
        factor = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        x = _rotated(vectors + t * D, factor, weight, cos, sin, number * RATIO, D, DR)
        if FORM == "f32":
            tl.store(to.to(tl.pointer_type(tl.float32)) + j, x)
        elif FORM == "bf16":
            tl.store(to.to(tl.pointer_type(tl.int16)) + j, bf16_code(x))
        else:
            nibbles, power = _rounded(x, FACTOR, D)
            even, odd = tl.split(tl.reshape(nibbles, (D // 2, 2)))
            tl.store(to + tl.arange(0, D // 2), (even | (odd << 4)).to(tl.uint8))
            tl.store(to + D // 2 + tl.arange(0, D // 32), power.to(tl.uint8))


@triton.jit
def _query_kernel(
    q,
    q_out,
    cos,
    sin,
    positions,
    D: tl.constexpr,
    DR: tl.constexpr,
    FACTOR: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    at = (t * tl.num_programs(1) + tl.program_id(1)) * D
    x = _rotated(q + at, 1.0, None, cos, sin, tl.load(positions + t), D, DR)
    if ROUNDS:
        nibbles, power = _rounded(x, FACTOR, D)
        scale = (power << 23).to(tl.float32, bitcast=True)
        x = tl.reshape(e2m1_value(nibbles) * scale[:, None], (D,))
    tl.store(q_out + at + tl.arange(0, D), x.to(q_out.dtype.element_ty))


@triton.jit
def _raw_keys(pages, entry, live, D: tl.constexpr, ENTRY: tl.constexpr):
    """Codes [S, D / 2] and exponents [S, D / 32] of rounded keys, int32."""
    line = pages + entry * ENTRY
    pair = tl.arange(0, D // 2)
    codes = tl.load(line[:, None] + pair[None, :], mask=live[:, None], other=0).to(tl.int32)
    block = D // 2 + tl.arange(0, D // 32)
    power = tl.load(line[:, None] + block[None, :], mask=live[:, None], other=127)
    return codes, power.to(tl.int32)


@triton.jit
def _decoded_keys(codes, power, D: tl.constexpr):
    """Keys [S, D] float32."""
    S: tl.constexpr = codes.shape[0]
    values = tl.interleave(e2m1_value(codes & 15), e2m1_value(codes >> 4))
    scale = (power << 23).to(tl.float32, bitcast=True)
    blocks = tl.reshape(values, (S, D // 32, 32)) * scale[:, :, None]
    return tl.reshape(blocks, (S, D))


@triton.jit
def stored_keys(pages, entry, live, D: tl.constexpr, ENTRY: tl.constexpr, FORM: tl.constexpr):
    """Keys [S, D] float32, of which all but "f32" are exact in bfloat16."""
    if FORM == "f32" or FORM == "bf16":
        return load_vectors(pages, entry, live, ENTRY, 0, D, 0, D, FORM, False)
    else:
        codes, power = _raw_keys(pages, entry, live, D, ENTRY)
        return _decoded_keys(codes, power, D)


@triton.jit
def _score_kernel(
    q,
    weights,
    weights_stride,
    scale,
    pages,
    table,
    table_stride,
    table_size,
    lengths,
    scores,
    scores_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    TILE: tl.constexpr,
    BH: tl.constexpr,
    FORM: tl.constexpr,
    MMA: tl.constexpr,
):
    ROUNDED: tl.constexpr = FORM != "f32" and FORM != "bf16"
    t = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TILE
    at = first + tl.arange(0, TILE)
    page = at // PAGE  # asked for while nobody knows yet how many there are
    page = tl.load(table + t * table_stride + page, mask=page < table_size, other=0)
    length = tl.load(lengths + t)
    if first < length:
        live = at < length
        entry = page.to(tl.int64) * PAGE + at % PAGE
        if ROUNDED:
            codes, power = _raw_keys(pages, entry, live, D, ENTRY)
        else:
            keys = stored_keys(pages, entry, live, D, ENTRY, FORM)
        j = tl.arange(0, D)
        found = tl.zeros([TILE], tl.float32)
        # All queries are asked for at once; a few heads at a time are multiplied.
        queries, heads = (), ()
        for head0 in tl.static_range(0, N, BH):
            head = head0 + tl.arange(0, BH)
            line = ((t * N + head) * D)[:, None]
            queries = queries + (
                tl.load(q + line + j[None, :], mask=(head < N)[:, None], other=0.0),
            )
            weight = tl.load(weights + t * weights_stride + head, mask=head < N, other=0.0)
            weight = in_order(weight.to(tl.int32, bitcast=True), MMA).to(tl.float32, bitcast=True)
            heads = heads + (weight * scale,)
        if ROUNDED and MMA:
            asked = ()
            for i in tl.static_range((N + BH - 1) // BH):
                # As round as keys: bfloat16 holds all of them, and one product is exact.
                asked = asked + (in_order_halves(queries[i].to(tl.bfloat16), MMA),)
            queries = asked
        if ROUNDED:
            keys = _decoded_keys(in_order(codes, MMA), power, D)
        for i in tl.static_range((N + BH - 1) // BH):
            if MMA and ROUNDED:
                products = tl.dot(queries[i], tl.trans(keys.to(tl.bfloat16)))
            else:
                products = query_scores(queries[i].to(tl.float32), keys, FORM, MMA)
            # not `maximum`: that would lose a NaN
            products = tl.where(products < 0.0, 0.0, products)
            found += tl.sum(products * heads[i][:, None], 0)
        tl.store(scores + t * scores_stride + at, found, mask=live)


def rounds(form: KvFormat) -> bool:
    """Whether queries are rounded, as keys of this format are; then bfloat16 holds them."""
    return form in (KvFormat.FP8, KvFormat.NVFP4)


def store_keys(
    vectors: Tensor,
    weight: Tensor,
    eps: float,
    *,
    ratio: int,
    rotation: Rotation,
    kv: KvPages,
) -> None:
    """Norm, rotate and store the keys of windows that rows at `rotation.positions` close.

    Shapes:
        vectors [T, D] float32, D a power of two from 32 on, whose last dims rotate in pairs;
        weight [D]; the pages of `kv` hold keys, one of a window
    Raises:
        ValueError: the pages hold entries of another size.
    """
    rows, d = vectors.shape
    check_keys(kv, d)
    _key_kernel[(rows,)](
        vectors, weight, eps, rotation.cos, rotation.sin, rotation.positions, kv.pages, kv.table,
        kv.table.stride(0), D=d, DR=2 * rotation.cos.shape[1], RATIO=ratio, PAGE=kv.page_tokens,
        ENTRY=kv.entry_bytes, FACTOR=d**-0.5, FORM=kv.form.value,
        num_warps=_ROUNDING_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def prepare_queries(q: Tensor, out: Tensor, form: KvFormat, *, rotation: Rotation) -> None:
    """Rotate queries, and round them where keys of this format are.

    Shapes:
        q [T, N, D] float32, as `store_keys`; out [T, N, D] float32, or bfloat16 where `rounds`
    """
    rows, n, d = q.shape
    _query_kernel[(rows, n)](
        q, out, rotation.cos, rotation.sin, rotation.positions, D=d, DR=2 * rotation.cos.shape[1],
        FACTOR=d**-0.5, ROUNDS=rounds(form),
        num_warps=_ROUNDING_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def score_windows(
    q: Tensor, weights: Tensor, kv: KvPages, lengths: Tensor, scores: Tensor, *, scale: float
) -> None:
    """Score the windows that are closed for each row: sum over heads of scale * weight *
    relu(q . k).

    Shapes:
        q [T, N, D] as `prepare_queries` gives it; weights [T, N] float32 (rows may lie apart)
        lengths [T] int32, windows closed for a row
        scores [T, S] float32, of which row t gets the first lengths[t]

    Raises:
        ValueError: the pages hold entries of another size.
    """
    rows, n, d = q.shape
    check_keys(kv, d)
    tile, heads, warps = _shape(q.device, kv.form)
    _score_kernel[(triton.cdiv(scores.shape[1], tile), rows)](
        q, weights, weights.stride(0), scale, kv.pages, kv.table, kv.table.stride(0),
        kv.table.shape[1], lengths, scores, scores.stride(0), N=n, D=d, PAGE=kv.page_tokens,
        ENTRY=kv.entry_bytes, TILE=tile, BH=heads, FORM=kv.form.value, MMA=not INTERPRETED,
        num_warps=warps, num_stages=1,
    )  # fmt: skip


def _shape(device: torch.device, form: KvFormat) -> tuple[int, int, int]:
    if INTERPRETED or not rounds(form) or torch.cuda.get_device_capability(device)[0] != 9:
        return CARD_SHAPE
    return HOPPER_SHAPE


def check_keys(kv: KvPages, d: int) -> None:
    """Refuse pages that do not hold keys of `d` numbers.

    Raises:
        ValueError: they do not.
    """
    size = pooled_key_bytes(kv.form, d)
    if kv.entry_bytes != size:
        raise ValueError(f"pages hold keys of {kv.entry_bytes} bytes, not {size}")
