"""From a layer's first product to attention: norms, rotary embedding, the KV entry, in one launch.

Owns what stands between the dense product and attention for MLA and grouped queries, for rows of a
step and of a prompt alike; every row stands at a position of its own. Twins: `reference.rms_norm`,
`reference.rotate`, `reference.mla_write`, `reference.gqa_write`. Queries' unrotated parts are left
where the product put them. Launchers allocate nothing. Called on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.reference.kv_formats import gqa_entry_bytes, mla_entry_bytes
from moet_desk.kernels.triton.kv_entries import (
    KvPages,
    block_of,
    check_entries,
    entry_of,
    store_rope,
    store_vector,
    vector_bytes,
)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Where rows stand and by what angles positions turn.

    Attributes:
        positions: int32 [T].
        cos, sin: float32 [n_positions, dr / 2], as `reference.rope_tables` makes them.
        interleaved: dims (2i, 2i+1) form a pair; else (i, i + dr/2).
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool


@triton.jit
def partner_of(j, DR: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For dim j of a rotary part: the other dim of its pair, the pair, and whether j is second."""
    if INTERLEAVED:
        return j ^ 1, j // 2, (j & 1) == 1
    else:
        second = j >= DR // 2
        return tl.where(second, j - DR // 2, j + DR // 2), j % (DR // 2), second


@triton.jit
def _turn(mine, other, angle, mask, cos, sin, second):
    """One dim of a rotated pair: a cos - b sin, or b cos + a sin for the second."""
    c = tl.load(cos + angle, mask=mask, other=0.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)
    return tl.where(second, mine * c + other * s, mine * c - other * s)


@triton.jit
def _rotated(line, cos, sin, BR: tl.constexpr, DR: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The rotary part [BR] at `line`, rotated."""
    j = tl.arange(0, BR)
    inside = j < DR
    partner, angle, second = partner_of(j, DR, INTERLEAVED)
    mine = tl.load(line + j, mask=inside, other=0.0)
    other = tl.load(line + partner, mask=inside, other=0.0)
    return _turn(mine, other, angle, inside, cos, sin, second)


@triton.jit
def _normed_blocks(line, weight, eps, D: tl.constexpr, B: tl.constexpr, W: tl.constexpr):
    """RMS norm of D values at `line` as blocks [B, W]."""
    at = tl.arange(0, B)[:, None] * W + tl.arange(0, W)[None, :]
    inside = at < D
    x = tl.load(line + at, mask=inside, other=0.0)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / D + eps) * w


@triton.jit
def _turn_heads(
    q,
    q_pitch,
    out,
    cos,
    sin,
    first,
    NOPE: tl.constexpr,
    N: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
    DR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate the last DR dims of query heads first .. first + BH into out [N, DR]."""
    head = first + tl.arange(0, BH)
    j = tl.arange(0, BR)
    inside = (head < N)[:, None] & (j < DR)[None, :]
    partner, angle, second = partner_of(j, DR, INTERLEAVED)
    line = (q + head * q_pitch + NOPE)[:, None]
    mine = tl.load(line + j[None, :], mask=inside, other=0.0)
    other = tl.load(line + partner[None, :], mask=inside, other=0.0)
    c = tl.load(cos + angle, mask=j < DR, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=j < DR, other=0.0)[None, :]
    turned = tl.where(second[None, :], mine * c + other * s, mine * c - other * s)
    tl.store(out + (head * DR)[:, None] + j[None, :], turned, mask=inside)


@triton.jit
def _mla_prepare_kernel(
    joined,
    stride,
    weight,
    q_weight,
    eps,
    q_out,
    cos,
    sin,
    positions,
    pages,
    table,
    table_stride,
    Q: tl.constexpr,
    N: tl.constexpr,
    NOPE: tl.constexpr,
    R: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    B: tl.constexpr,
    W: tl.constexpr,
    BQ: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FORM: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + t)
    line = joined + t * stride
    cos += position * (DR // 2)
    sin += position * (DR // 2)
    if tl.program_id(1) == 0:
        to = pages + entry_of(table + t * table_stride, position, PAGE) * ENTRY
        store_vector(to, _normed_blocks(line + Q, weight, eps, R, B, W), R, B, W, FORM)
        rope = _rotated(line + Q + R, cos, sin, BR, DR, INTERLEAVED)
        j = tl.arange(0, BR)
        store_rope(to, j, rope, j < DR, R, FORM)
    elif q_weight is not None:
        x = _normed_blocks(line, q_weight, eps, Q, BQ, 128)
        at = tl.arange(0, BQ)[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(q_out + t * Q + at, x, mask=at < Q)
    else:
        first = (tl.program_id(1) - 1) * BH
        out = q_out + t * (N * DR)
        _turn_heads(line, NOPE + DR, out, cos, sin, first, NOPE, N, BH, BR, DR, INTERLEAVED)


@triton.jit
def _rotate_queries_kernel(
    q,
    stride,
    q_rope,
    cos,
    sin,
    positions,
    NOPE: tl.constexpr,
    N: tl.constexpr,
    DR: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + t)
    cos += position * (DR // 2)
    sin += position * (DR // 2)
    first = tl.program_id(1) * BH
    out = q_rope + t * (N * DR)
    _turn_heads(q + t * stride, NOPE + DR, out, cos, sin, first, NOPE, N, BH, BR, DR, INTERLEAVED)


@triton.jit
def _head_norm(line, weight, eps, D: tl.constexpr, BD: tl.constexpr):
    """1 / RMS of D values at `line`, or 1 if there is no norm."""
    if weight is None:
        return 1.0
    else:
        j = tl.arange(0, BD)
        x = tl.load(line + j, mask=j < D, other=0.0)
        return tl.rsqrt(tl.sum(x * x, 0) / D + eps)


@triton.jit
def _head(
    line,
    weight,
    eps,
    at,
    cos,
    sin,
    D: tl.constexpr,
    BD: tl.constexpr,
    DR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Values `at` of one head: norm, then the first DR dims rotated."""
    inside = at < D
    turned = at < DR
    partner, angle, second = partner_of(tl.where(turned, at, 0), DR, INTERLEAVED)
    mine = tl.load(line + at, mask=inside, other=0.0)
    other = tl.load(line + partner, mask=turned, other=0.0)
    if weight is not None:
        scale = _head_norm(line, weight, eps, D, BD)
        mine = mine * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        other = other * scale * tl.load(weight + partner, mask=turned, other=0.0).to(tl.float32)
    return tl.where(turned, _turn(mine, other, angle, turned, cos, sin, second), mine)


@triton.jit
def _gqa_prepare_kernel(
    joined,
    stride,
    q_weight,
    k_weight,
    eps,
    q_out,
    cos,
    sin,
    positions,
    pages,
    table,
    table_stride,
    N: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    B: tl.constexpr,
    W: tl.constexpr,
    BD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FORM: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + t)
    line = joined + t * stride
    cos += position * (DR // 2)
    sin += position * (DR // 2)
    if head < N:
        j = tl.arange(0, BD)
        q = _head(line + head * D, q_weight, eps, j, cos, sin, D, BD, DR, INTERLEAVED)
        tl.store(q_out + (t * N + head) * D + j, q, mask=j < D)
    else:
        key = head - N
        to = pages + entry_of(table + t * table_stride, position, PAGE) * ENTRY
        at = tl.arange(0, B)[:, None] * W + tl.arange(0, W)[None, :]
        k = _head(line + head * D, k_weight, eps, at, cos, sin, D, BD, DR, INTERLEAVED)
        store_vector(to + key * vector_bytes(D, FORM), k, D, B, W, FORM)
        v = tl.load(line + (N + KEYS) * D + key * DV + at, mask=at < DV, other=0.0)
        to += KEYS * vector_bytes(D, FORM) + key * vector_bytes(DV, FORM)
        store_vector(to, v, DV, B, W, FORM)


def mla_prepare(
    joined: Tensor,
    latent_weight: Tensor,
    eps: float,
    *,
    rotation: Rotation,
    kv: KvPages,
    q_out: Tensor,
    q_weight: Tensor | None = None,
) -> None:
    """Store each row's KV entry, and make its queries ready.

    Without a query latent, q_out gets the rotated parts of the queries in `joined`, whose unrotated
    parts stay where they are. With one (`q_weight` given), q_out gets the normed query latent, and
    `rotate_queries` follows behind the product with it.

    Shapes:
        joined [T, Q + r + dr] float32 (rows may lie apart), Q = N * (dn + dr) or the query rank
        latent_weight [r], q_weight [Q] bfloat16 or float32
        q_out [T, N, dr] or, with a query latent, [T, Q] float32
    Raises:
        ValueError: the pages hold entries of another size.
    """
    rows, r = joined.shape[0], latent_weight.shape[0]
    dr = 2 * rotation.cos.shape[1]
    q = joined.shape[1] - r - dr
    check_entries(kv, mla_entry_bytes(kv.form, r, dr))
    n = 1 if q_weight is not None else q_out.shape[1]
    width, heads = block_of(kv.form), _heads_each(n)
    groups = 1 if q_weight is not None else triton.cdiv(n, heads)
    _mla_prepare_kernel[(rows, 1 + groups)](
        joined, joined.stride(0), latent_weight, q_weight, eps, q_out, rotation.cos, rotation.sin,
        rotation.positions, kv.pages, kv.table, kv.table.stride(0),
        Q=q, N=n, NOPE=q // n - dr, R=r, DR=dr, PAGE=kv.page_tokens, ENTRY=kv.entry_bytes,
        B=triton.next_power_of_2(triton.cdiv(r, width)), W=width,
        BQ=triton.next_power_of_2(triton.cdiv(q, 128)), BH=heads,
        BR=triton.next_power_of_2(dr), INTERLEAVED=rotation.interleaved, FORM=kv.form.value,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def rotate_queries(q: Tensor, q_rope: Tensor, *, rotation: Rotation) -> None:
    """Rotate the last dr dims of every query head.

    Shapes:
        q [T, N, dn + dr] float32 (rows may lie apart); q_rope [T, N, dr] float32
    """
    rows, n, width = q.shape
    dr = q_rope.shape[2]
    heads = _heads_each(n)
    _rotate_queries_kernel[(rows, triton.cdiv(n, heads))](
        q, q.stride(0), q_rope, rotation.cos, rotation.sin, rotation.positions,
        NOPE=width - dr, N=n, DR=dr, BH=heads, BR=triton.next_power_of_2(dr),
        INTERLEAVED=rotation.interleaved, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def gqa_prepare(
    joined: Tensor,
    q_out: Tensor,
    *,
    rotation: Rotation,
    kv: KvPages,
    dv: int,
    eps: float = 0.0,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
) -> None:
    """Store each row's keys and values, and make its queries ready.

    Heads are normed if weights are given; the first dr = 2 * cos.shape[1] dims of a head rotate.
    Biases belong to the product before.

    Shapes:
        joined [T, (N + M) * D + M * dv] float32 (rows may lie apart): queries, keys, values
        q_weight, k_weight [D] bfloat16 or float32; q_out [T, N, D] float32
    Raises:
        ValueError: the pages hold entries of another size, or `joined` is no such row.
    """
    rows, n, d = q_out.shape
    keys, rest = divmod(joined.shape[1] - n * d, d + dv)
    if rest or keys < 1:
        raise ValueError(f"rows of {joined.shape[1]} are not {n} heads of {d} with keys and values")
    check_entries(kv, gqa_entry_bytes(kv.form, keys, d, dv))
    width = block_of(kv.form)
    _gqa_prepare_kernel[(rows, n + keys)](
        joined, joined.stride(0), q_weight, k_weight, eps, q_out, rotation.cos, rotation.sin,
        rotation.positions, kv.pages, kv.table, kv.table.stride(0),
        N=n, KEYS=keys, D=d, DV=dv, DR=2 * rotation.cos.shape[1], PAGE=kv.page_tokens,
        ENTRY=kv.entry_bytes, B=triton.next_power_of_2(triton.cdiv(max(d, dv), width)), W=width,
        BD=triton.next_power_of_2(d), INTERLEAVED=rotation.interleaved, FORM=kv.form.value,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def _heads_each(n: int) -> int:
    """Heads that one program rotates: enough work for four warps, few enough to spread."""
    return min(16, 1 << (n - 1).bit_length())
