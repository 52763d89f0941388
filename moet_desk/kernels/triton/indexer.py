"""An indexer's work in a step and in a prompt: its key and queries made ready, entries scored.

Twins: `reference.layer_norm`, `reference.rotate` and `reference.index_write`,
`reference.index_scores`. What `choose` makes of the scores is a list of entries per row, in the
order of the sequence: the attention of a step then reads it as a page table of pages of one entry
(`chosen_pages`), so a step's sparse attention needs no kernel of its own; a prompt's is in
`chosen_prefill`. Launchers allocate nothing and ask the device nothing, so they can be captured.
Called on the engine thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kv_sizes import vector_bytes
from moet_desk.kernels.triton.attention import query_scores
from moet_desk.kernels.triton.kv_entries import (
    KvPages,
    block_of,
    check_entries,
    entry_of,
    load_scale,
    load_vectors,
    store_vector,
)
from moet_desk.kernels.triton.numbers import has_e4m3
from moet_desk.kernels.triton.portable import INTERPRETED
from moet_desk.kernels.triton.prepare import Rotation, partner_of

_TILE = 32
"""Entries that a program scores."""

_HEADS_SCORED, _HEADS_EACH = 16, 8
"""Heads that a program scores at a time, and those that one rotates."""


@triton.jit
def _prepare_kernel(
    key,
    weight,
    bias,
    eps,
    q,
    q_out,
    cos,
    sin,
    positions,
    pages,
    table,
    table_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    B: tl.constexpr,
    W: tl.constexpr,
    BD: tl.constexpr,
    BH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FORM: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions + t)
    cos += position * (DR // 2)
    sin += position * (DR // 2)
    if group == 0:
        at = tl.arange(0, B)[:, None] * W + tl.arange(0, W)[None, :]
        inside = at < D
        turns = at < DR
        partner, angle, second = partner_of(at, DR, INTERLEAVED)
        partner = tl.where(turns, partner, at)
        line = key + t * D
        x = tl.load(line + at, mask=inside, other=0.0)
        mean = tl.sum(tl.sum(x, 1), 0) / D
        centred = tl.where(inside, x - mean, 0.0)
        factor = tl.rsqrt(tl.sum(tl.sum(centred * centred, 1), 0) / D + eps)
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        mine = centred * factor * w + b
        w = tl.load(weight + partner, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(bias + partner, mask=inside, other=0.0).to(tl.float32)
        other = (tl.load(line + partner, mask=inside, other=0.0) - mean) * factor * w + b
        c = tl.load(cos + angle, mask=turns, other=1.0)
        s = tl.load(sin + angle, mask=turns, other=0.0)
        turned = tl.where(second, mine * c + other * s, mine * c - other * s)
        to = pages + entry_of(table + t * table_stride, position, PAGE) * ENTRY
        store_vector(to, tl.where(turns, turned, mine), D, B, W, FORM)
    else:
        head = (group - 1) * BH + tl.arange(0, BH)
        j = tl.arange(0, BD)
        turning = j < DR
        here = (head < N)[:, None] & (j < D)[None, :]
        pair, turn, later = partner_of(j, DR, INTERLEAVED)
        pair = tl.where(turning, pair, j)
        first = ((t * N + head) * D)[:, None]
        one = tl.load(q + first + j[None, :], mask=here, other=0.0)
        two = tl.load(q + first + pair[None, :], mask=here, other=0.0)
        c_j = tl.load(cos + turn, mask=turning, other=1.0)[None, :]
        s_j = tl.load(sin + turn, mask=turning, other=0.0)[None, :]
        out = tl.where(later[None, :], one * c_j + two * s_j, one * c_j - two * s_j)
        out = tl.where(turning[None, :], out, one)
        tl.store(q_out + first + j[None, :], out, mask=here)


@triton.jit
def _scores_kernel(
    q,
    weights,
    scale,
    pages,
    table,
    table_stride,
    lengths,
    scores,
    scores_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    TILE: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    FORM: tl.constexpr,
    MMA: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    t = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TILE
    length = tl.load(lengths + t)
    if first < length:
        at = first + tl.arange(0, TILE)
        live = at < length
        entry = entry_of(table + t * table_stride, tl.where(live, at, first), PAGE)
        keys = load_vectors(pages, entry, live, ENTRY, 0, D, 0, BD, FORM, HARDWARE)
        j = tl.arange(0, BD)
        found = tl.zeros([TILE], tl.float32)
        # All queries are asked for at once; a few heads at a time are multiplied.
        queries, heads = (), ()
        for head0 in tl.static_range(0, N, BH):
            head = head0 + tl.arange(0, BH)
            inside = (head < N)[:, None] & (j < D)[None, :]
            line = ((t * N + head) * D)[:, None]
            queries = queries + (tl.load(q + line + j[None, :], mask=inside, other=0.0),)
            weight = tl.load(weights + t * N + head, mask=head < N, other=0.0)
            heads = heads + (weight * scale,)
        for i in tl.static_range((N + BH - 1) // BH):
            products = query_scores(queries[i], keys, FORM, MMA)
            # not `maximum`: that would lose a NaN
            products = tl.where(products < 0.0, 0.0, products)
            found += tl.sum(products * heads[i][:, None], 0)
        if FORM == "fp8":
            found *= load_scale(pages, entry, live, ENTRY, 0, D, 0)
        tl.store(scores + t * scores_stride + at, found, mask=live)


def index_prepare(
    key: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    q: Tensor,
    q_out: Tensor,
    *,
    rotation: Rotation,
    kv: KvPages,
) -> None:
    """Store each row's key, normed and rotated, and make its queries ready.

    Of a key and of every query the first dr = 2 * cos.shape[1] dims rotate.

    Shapes:
        key [T, D], q and q_out [T, N, D] float32; weight, bias [D] bfloat16 or float32
    Raises:
        ValueError: the pages hold entries of another size.
    """
    rows, n, d = q.shape
    check_entries(kv, vector_bytes(kv.form, d))
    width, heads = block_of(kv.form), min(_HEADS_EACH, triton.next_power_of_2(n))
    _prepare_kernel[(rows, 1 + triton.cdiv(n, heads))](
        key, weight, bias, eps, q, q_out, rotation.cos, rotation.sin, rotation.positions,
        kv.pages, kv.table, kv.table.stride(0),
        N=n, D=d, DR=2 * rotation.cos.shape[1], PAGE=kv.page_tokens, ENTRY=kv.entry_bytes,
        B=triton.next_power_of_2(triton.cdiv(d, width)), W=width, BD=triton.next_power_of_2(d),
        BH=heads, INTERLEAVED=rotation.interleaved, FORM=kv.form.value,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def index_scores(
    q: Tensor, weights: Tensor, kv: KvPages, lengths: Tensor, scores: Tensor, *, scale: float
) -> None:
    """Score the entries that each row sees: sum over heads of scale * weight * relu(q . k).

    Shapes:
        q [T, N, D], weights [T, N] float32; lengths [T] int32, own entry included
        scores [T, S] float32, of which row t gets the first lengths[t]

    Raises:
        ValueError: the pages hold entries of another size, or a key is more than one block.
    """
    rows, n, d = q.shape
    if d > 128:
        raise ValueError(f"keys of {d} values are more than 128")
    check_entries(kv, vector_bytes(kv.form, d))
    _scores_kernel[(triton.cdiv(scores.shape[1], _TILE), rows)](
        q, weights, scale, kv.pages, kv.table, kv.table.stride(0), lengths, scores,
        scores.stride(0), N=n, D=d, PAGE=kv.page_tokens, ENTRY=kv.entry_bytes, TILE=_TILE,
        BH=_HEADS_SCORED, BD=max(16, triton.next_power_of_2(d)),
        FORM=kv.form.value, MMA=not INTERPRETED, HARDWARE=has_e4m3(q.device),
        num_warps=4, num_stages=1,
    )  # fmt: skip


def chosen_pages(kv: KvPages, chosen: Tensor) -> KvPages:
    """A layer's entries as pages of one entry, of which each row has those that were chosen for it.

    With `counts` for lengths, `mla_decode` on them is the attention to the chosen entries.
    """
    return KvPages(kv.pages.view(-1, 1, kv.entry_bytes), chosen, kv.form)
