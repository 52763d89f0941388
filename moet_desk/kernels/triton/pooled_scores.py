"""An indexer's scores of a prompt's rows: many rows by many windows at a time.

Twins: `reference.index_rounded`, `reference.index_scores`. `pooled_keys` has the same for a step.
The rows are of one sequence, so a program decodes keys once and takes some rows through them; where
queries are rounded bfloat16 holds them, and one product is exact. Launchers allocate nothing.
Called on the engine thread.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.kv_entries import KvPages, entry_of
from moet_desk.kernels.triton.numbers import bf16_part, e2m1_value, loop_bound
from moet_desk.kernels.triton.pooled_keys import (
    block_codes,
    check_keys,
    hadamard,
    rounds,
    stored_keys,
)
from moet_desk.kernels.triton.portable import INTERPRETED
from moet_desk.kernels.triton.prepare import Rotation

HOPPER_SHAPE = (256, 64, 16, 8)
CARD_SHAPE, CARD_PARTS_SHAPE = (128, 32, 16, 8), (128, 16, 16, 8)
"""Windows, heads at a time, rows and warps of a program; the last where queries are three parts."""
QUERY_HEADS, QUERY_WARPS = 16, 8
"""Heads that a program rounds at a time, and its warps."""
PLAIN_SHAPE = (32, 16, 16, 4)
"""Of float32 keys, which nobody keeps on a card for their speed."""


@triton.jit
def _products(keys, q, FORM: tl.constexpr, MMA: tl.constexpr):
    """keys [S, D] x q^T -> [S, H], as close as float32."""
    if not MMA:
        return tl.dot(keys, tl.trans(q), input_precision="ieee")
    elif FORM == "f32":
        return tl.dot(keys, tl.trans(q), input_precision="tf32x3")
    elif FORM == "bf16":
        k, high = keys.to(tl.bfloat16), bf16_part(q)
        middle = bf16_part(q - high)
        low = (q - high - middle).to(tl.bfloat16)
        rest = tl.dot(k, tl.trans(middle.to(tl.bfloat16)), tl.dot(k, tl.trans(low)))
        return tl.dot(k, tl.trans(high.to(tl.bfloat16)), rest)
    else:
        return tl.dot(keys.to(tl.bfloat16), tl.trans(q))


@triton.jit
def _turned(x, signs, MMA: tl.constexpr):
    """x [H, D] x signs [D, D], as close as float32."""
    if MMA:
        high = bf16_part(x)
        middle = bf16_part(x - high)
        low = (x - high - middle).to(tl.bfloat16)
        h = signs.to(tl.bfloat16)
        return tl.dot(high.to(tl.bfloat16), h, tl.dot(middle.to(tl.bfloat16), h, tl.dot(low, h)))
    else:
        return tl.dot(x, signs, input_precision="ieee")


@triton.jit
def _query_run_kernel(
    q,
    q_out,
    cos,
    sin,
    positions,
    N: tl.constexpr,
    D: tl.constexpr,
    DR: tl.constexpr,
    BH: tl.constexpr,
    FACTOR: tl.constexpr,
    ROUNDS: tl.constexpr,
    MMA: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, D // 2) - (D - DR) // 2
    angle = tl.load(positions + t) * (DR // 2) + pair
    c = tl.load(cos + angle, mask=pair >= 0, other=1.0)[None, :]
    s = tl.load(sin + angle, mask=pair >= 0, other=0.0)[None, :]
    signs = hadamard(D)
    for head0 in tl.range(0, N, BH):
        head = head0 + tl.arange(0, BH)
        inside = (head < N)[:, None]
        at = ((t * N + head) * D)[:, None] + tl.arange(0, D)[None, :]
        x = tl.load(q + at, mask=inside, other=0.0)
        even, odd = tl.split(tl.reshape(x, (BH, D // 2, 2)))
        x = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (BH, D))
        if ROUNDS:
            x = _turned(x, signs, MMA) * FACTOR
            nibbles, power = block_codes(tl.reshape(x, (BH * D // 32, 32)))
            scale = (power << 23).to(tl.float32, bitcast=True)
            x = tl.reshape(e2m1_value(nibbles) * scale[:, None], (BH, D))
        tl.store(q_out + at, x.to(q_out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _score_run_kernel(
    q,
    weights,
    weights_stride,
    scale,
    pages,
    table,
    lengths,
    scores,
    scores_stride,
    rows,
    N: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRY: tl.constexpr,
    TILE: tl.constexpr,
    BH: tl.constexpr,
    ROWS: tl.constexpr,
    FORM: tl.constexpr,
    MMA: tl.constexpr,
):
    first = tl.program_id(0) * TILE
    low = tl.program_id(1) * ROWS
    high = tl.minimum(low + ROWS, rows)
    most = tl.load(lengths + high - 1)  # the last row sees most
    if first < most:
        at = first + tl.arange(0, TILE)
        live = at < most
        entry = entry_of(table, tl.where(live, at, first), PAGE)
        keys = stored_keys(pages, entry, live, D, ENTRY, FORM)
        j = tl.arange(0, D)
        for t in tl.range(loop_bound(low, MMA), loop_bound(high, MMA)):
            found = tl.zeros([TILE], tl.float32)
            for head0 in tl.static_range(0, N, BH):
                head = head0 + tl.arange(0, BH)
                line = ((tl.cast(t, tl.int64) * N + head) * D)[:, None]
                queries = tl.load(q + line + j[None, :], mask=(head < N)[:, None], other=0.0)
                if not MMA:
                    queries = queries.to(tl.float32)
                products = _products(keys, queries, FORM, MMA)
                # not `maximum`: that would lose a NaN
                products = tl.where(products < 0.0, 0.0, products)
                weight = tl.load(weights + t * weights_stride + head, mask=head < N, other=0.0)
                found += tl.sum(products * (weight * scale)[None, :], 1)
            seen = at < tl.load(lengths + t)
            tl.store(scores + tl.cast(t, tl.int64) * scores_stride + at, found, mask=seen)


def prepare_run(q: Tensor, out: Tensor, form: KvFormat, *, rotation: Rotation) -> None:
    """As `pooled_keys.prepare_queries`.

    Shapes:
        q [T, N, D] float32, out [T, N, D], bfloat16 where `rounds`, else float32
    """
    rows, n, d = q.shape
    _query_run_kernel[(rows,)](
        q, out, rotation.cos, rotation.sin, rotation.positions, N=n, D=d,
        DR=2 * rotation.cos.shape[1], BH=QUERY_HEADS, FACTOR=d**-0.5, ROUNDS=rounds(form),
        MMA=not INTERPRETED, num_warps=QUERY_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def score_run(
    q: Tensor, weights: Tensor, kv: KvPages, lengths: Tensor, scores: Tensor, *, scale: float
) -> None:
    """As `pooled_keys.score_windows`, of rows that follow each other in one sequence, whose pages
    the first line of `kv.table` has.

    Shapes:
        q [T, N, D] as `prepare_run` gives it; weights [T, N] float32 (rows may lie apart)
        lengths [T] int32, windows closed for a row, ascending
        scores [T, S] float32, of which row t gets the first lengths[t]

    Raises:
        ValueError: the pages hold entries of another size.
    """
    rows, n, d = q.shape
    check_keys(kv, d)
    tile, heads, each, warps = _shape(q.device, kv.form)
    grid = (triton.cdiv(scores.shape[1], tile), triton.cdiv(rows, each))
    _score_run_kernel[grid](
        q, weights, weights.stride(0), scale, kv.pages, kv.table, lengths, scores,
        scores.stride(0), rows, N=n, D=d, PAGE=kv.page_tokens, ENTRY=kv.entry_bytes, TILE=tile,
        BH=heads, ROWS=each, FORM=kv.form.value, MMA=not INTERPRETED, num_warps=warps,
        num_stages=1,
    )  # fmt: skip


def _shape(device: torch.device, form: KvFormat) -> tuple[int, int, int, int]:
    if INTERPRETED or form is KvFormat.F32:
        return PLAIN_SHAPE
    if torch.cuda.get_device_capability(device)[0] in (9, 10):
        return HOPPER_SHAPE
    return CARD_SHAPE if rounds(form) else CARD_PARTS_SHAPE
