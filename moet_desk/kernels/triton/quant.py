"""Activations to integers per block of 32, alone or right behind the RMS norm.

Twins: `reference.quantize_activations`, `reference.rms_norm`. Codes come in one of two orders:
planar int32 [T, 8, G] for decode (word o of block g = elements 4o..4o+3, so that a thread that owns
a block reads eight words and each feeds one dot product), or plain int8 [T, H] for prefill.

Codes of 15 bits (docs/adr/0009) are two bytes, q = 256 * hi + lo: [T, 2, 8, G] or [T, 2, H], a
row's hi first. The shape of the codes that a caller passes says which kind it gets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.layouts import GROUP
from moet_desk.kernels.triton.portable import PTX, product

_WEAKEST_BLOCK = tl.constexpr(2.0**-100)  # as in reference.quant: weaker blocks become zeros

_INT8_STEPS = tl.constexpr(float(Activations.INT8.value))
_INT15_STEPS = tl.constexpr(float(Activations.INT15.value))

_BLOCKS_PER_PROGRAM = 16
"""2 KiB of floats: eight programs share one row of H = 4096, so that one token is done quickly."""


@triton.jit
def block_codes(blocks, WIDE: tl.constexpr, PTX: tl.constexpr):
    """Round blocks to integers -L..L, L = 127 or with WIDE 32512, and the scale of each block.

    A NaN or infinity makes the scale NaN or infinite, which every product with it then shows.

    Shapes:
        blocks [B, 32] float32; returns int32 [B, 32] and float32 [B]
    """
    STEPS: tl.constexpr = _INT15_STEPS if WIDE else _INT8_STEPS
    # As integers, so that NaN, which lies above infinity, wins; a float maximum would drop it.
    bits = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
    # 1/amax first: that is what torch makes of L / amax, and the last bit decides some codes.
    inverse = tl.where(amax < _WEAKEST_BLOCK, 0.0, tl.div_rn(1.0, amax) * STEPS)
    rounded = tl.floor(product(blocks, inverse[:, None], PTX) + 0.5)
    codes = tl.where(rounded == rounded, rounded, 0.0).to(tl.int32)
    return codes, tl.div_rn(amax, STEPS)


@triton.jit
def _high_part(codes):
    """hi of 256 * hi + lo; lo as a byte is the code's lowest byte."""
    return (codes + 128) >> 8


@triton.jit
def _packed_words(codes, B: tl.constexpr):
    """Lowest bytes of four neighbouring codes per int32, first one lowest: [B, 32] -> [B, 8]."""
    quads = tl.reshape(codes & 255, [B, 8, 4])
    return tl.sum(quads << (8 * tl.arange(0, 4))[None, None, :], 2)


@triton.jit
def store_planar(out, b, codes, row, G: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr):
    """Store the codes of a row's blocks b < G in planar order.

    Shapes:
        out int32 [R, 8, G], with WIDE [R, 2, 8, G]; b int32 [B], codes int32 [B, 32]
    """
    at = tl.arange(0, 8)[None, :] * G + b[:, None]
    inside = b[:, None] < G
    if WIDE:
        out += row * (16 * G)
        tl.store(out + at, _packed_words(_high_part(codes), B), mask=inside)
        tl.store(out + 8 * G + at, _packed_words(codes, B), mask=inside)
    else:
        tl.store(out + row * (8 * G) + at, _packed_words(codes, B), mask=inside)


@triton.jit
def _store_plain(out, b, codes, row, G: tl.constexpr, WIDE: tl.constexpr):
    """`store_planar` in plain order: out int8 [R, H], with WIDE [R, 2, H]."""
    at = b[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = b[:, None] < G
    if WIDE:
        out += row * (64 * G)
        tl.store(out + at, _high_part(codes).to(tl.int8), mask=inside)
        tl.store(out + 32 * G + at, codes.to(tl.int8), mask=inside)
    else:
        tl.store(out + row * (32 * G) + at, codes.to(tl.int8), mask=inside)


@triton.jit
def store_codes(
    blocks, b, codes, scales, t,
    G: tl.constexpr, B: tl.constexpr, PLAIN: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    q, s = block_codes(blocks, WIDE, PTX)
    if PLAIN:
        _store_plain(codes, b, q, t, G, WIDE)
    else:
        store_planar(codes, b, q, t, G, B, WIDE)
    tl.store(scales + t * G + b, s, mask=b < G)


@triton.jit
def _quantize_kernel(
    x, codes, scales,
    G: tl.constexpr, B: tl.constexpr, PLAIN: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0) * B + tl.arange(0, B)
    at = b[:, None] * 32 + tl.arange(0, 32)[None, :]
    blocks = tl.load(x + t * (32 * G) + at, mask=b[:, None] < G, other=0.0)
    store_codes(blocks, b, codes, scales, t, G, B, PLAIN, WIDE, PTX)


@triton.jit
def _norm_kernel(
    x, weight, eps, out, codes, scales,
    G: tl.constexpr, B: tl.constexpr, PLUS_ONE: tl.constexpr,
    PLAIN: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr,
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
    store_codes(normed, b, codes, scales, t, G, B, PLAIN, WIDE, PTX)


def planar_shape(width: int, kind: Activations) -> tuple[int, ...]:
    """Shape of one row's planar codes."""
    words = (8, width // GROUP)
    return words if kind is Activations.INT8 else (2, *words)


def plain_shape(width: int, kind: Activations) -> tuple[int, ...]:
    """Shape of one row's plain codes."""
    return (width,) if kind is Activations.INT8 else (2, width)


def is_wide(codes: Tensor) -> bool:
    """Whether codes, planar or plain, are of 15 bits: they have an axis of two parts."""
    return codes.ndim == (3 if codes.dtype == torch.int8 else 4)


def quantize_rows(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Quantise rows per block of 32, the same bits as `reference.quantize_activations`.

    Shapes:
        x [T, H] float32 contiguous; scales [T, G] float32
        codes int32 [T, 8, G] (planar) or int8 [T, H] (plain); for 15 bits [T, 2, ...] likewise
    """
    groups = x.shape[1] // GROUP
    grid = (triton.cdiv(groups, _BLOCKS_PER_PROGRAM), x.shape[0])
    _quantize_kernel[grid](
        x, codes, scales,
        groups, _BLOCKS_PER_PROGRAM, codes.dtype == torch.int8, is_wide(codes), PTX,
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
        groups, padded, plus_one, codes.dtype == torch.int8, is_wide(codes), PTX,
        num_warps=max(1, min(16, padded // 16)), enable_fp_fusion=False,
    )  # fmt: skip
