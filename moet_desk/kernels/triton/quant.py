"""Activations to int8 per block of 32, alone or right behind the RMS norm.

Twins: `reference.quantize_activations`, `reference.rms_norm`. Codes come in one of two orders:
planar int32 [T, 8, G] for decode (word o of block g = elements 4o..4o+3, so that a thread that owns
a block reads eight words and each feeds one dot product), or plain int8 [T, H] for prefill.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.layouts import GROUP
from moet_desk.kernels.triton.portable import PTX, product

_WEAKEST_BLOCK = tl.constexpr(2.0**-100)  # as in reference.quant: weaker blocks become zeros

_BLOCKS_PER_PROGRAM = 16
"""2 KiB of floats: eight programs share one row of H = 4096, so that one token is done quickly."""


@triton.jit
def block_codes(blocks, PTX: tl.constexpr):
    """Round blocks to int8: integers -127..127 and the scale of each block.

    A NaN or infinity makes the scale NaN or infinite, which every product with it then shows.

    Shapes:
        blocks [B, 32] float32; returns int32 [B, 32] and float32 [B]
    """
    # As integers, so that NaN, which lies above infinity, wins; a float maximum would drop it.
    bits = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
    # 1/amax first: that is what torch makes of 127 / amax, and the last bit decides some codes.
    inverse = tl.where(amax < _WEAKEST_BLOCK, 0.0, tl.div_rn(1.0, amax) * 127.0)
    rounded = tl.floor(product(blocks, inverse[:, None], PTX) + 0.5)
    codes = tl.where(rounded == rounded, rounded, 0.0).to(tl.int32)
    return codes, tl.div_rn(amax, 127.0)


@triton.jit
def packed_words(codes, B: tl.constexpr):
    """Four neighbouring codes per int32, lowest first: [B, 32] -> [B, 8]."""
    quads = tl.reshape(codes & 255, [B, 8, 4])
    return tl.sum(quads << (8 * tl.arange(0, 4))[None, None, :], 2)


@triton.jit
def _store_codes(
    blocks, b, codes, scales, t,
    G: tl.constexpr, B: tl.constexpr, PLAIN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    q, s = block_codes(blocks, PTX)
    if PLAIN:
        at = b[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(codes + t * (32 * G) + at, q.to(tl.int8), mask=b[:, None] < G)
    else:
        at = tl.arange(0, 8)[None, :] * G + b[:, None]
        tl.store(codes + t * (8 * G) + at, packed_words(q, B), mask=b[:, None] < G)
    tl.store(scales + t * G + b, s, mask=b < G)


@triton.jit
def _quantize_kernel(
    x, codes, scales, G: tl.constexpr, B: tl.constexpr, PLAIN: tl.constexpr, PTX: tl.constexpr
):
    t = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0) * B + tl.arange(0, B)
    at = b[:, None] * 32 + tl.arange(0, 32)[None, :]
    blocks = tl.load(x + t * (32 * G) + at, mask=b[:, None] < G, other=0.0)
    _store_codes(blocks, b, codes, scales, t, G, B, PLAIN, PTX)


@triton.jit
def _norm_kernel(
    x, weight, eps, out, codes, scales,
    G: tl.constexpr, B: tl.constexpr, PLUS_ONE: tl.constexpr, PLAIN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, B)
    at = b[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = b[:, None] < G
    row = tl.load(x + t * (32 * G) + at, mask=inside, other=0.0)
    w = tl.load(weight + at, mask=inside, other=0.0)
    if PLUS_ONE:
        w += 1.0
    mean = tl.sum(tl.sum(row * row, 1), 0) / (32 * G)
    normed = row * tl.rsqrt(mean + eps) * w
    tl.store(out + t * (32 * G) + at, normed, mask=inside)
    _store_codes(normed, b, codes, scales, t, G, B, PLAIN, PTX)


def quantize_rows(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Quantise rows to int8 per block of 32, the same bits as `reference.quantize_activations`.

    Shapes:
        x [T, H] float32 contiguous; scales [T, G] float32
        codes int32 [T, 8, G] (planar), or int8 [T, H] (plain)
    """
    groups = x.shape[1] // GROUP
    grid = (triton.cdiv(groups, _BLOCKS_PER_PROGRAM), x.shape[0])
    _quantize_kernel[grid](
        x, codes, scales, groups, _BLOCKS_PER_PROGRAM, codes.dtype == torch.int8, PTX,
        num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor,
    codes: Tensor,
    scales: Tensor,
    plus_one: bool = False,
) -> None:
    """`reference.rms_norm`, and its result quantised as by `quantize_rows`, in one launch.

    Shapes:
        x, out [T, H] float32, weight [H] float32; codes and scales as in `quantize_rows`
    """
    groups = x.shape[1] // GROUP
    padded = triton.next_power_of_2(groups)
    _norm_kernel[(x.shape[0],)](
        x, weight, eps, out, codes, scales,
        groups, padded, plus_one, codes.dtype == torch.int8, PTX,
        num_warps=max(1, min(16, padded // 16)), enable_fp_fusion=False,
    )  # fmt: skip
