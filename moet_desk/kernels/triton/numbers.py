"""Number formats and summing orders that several kernels share, written for the compiler and for
the interpreter alike.

Owns bit tricks only; every function is called from inside a kernel. Codes are those of
`reference.kv_formats`: e4m3 (bias 7, largest 448, one NaN), e2m1, bfloat16, all nearest even.
Encoders are integer arithmetic, so their bytes are the same on every card.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from moet_desk.kernels.triton.portable import INTERPRETED

_EVEN = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and taking away rounds |x| < 2**22 to a whole number, halves to even."""


_COMPILED = tl.constexpr(not INTERPRETED)


@cache
def has_e4m3(device: torch.device) -> bool:
    """Whether kernels on `device` can convert e4m3 in hardware (SM89 and later)."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def e4m3_value(code, HARDWARE: tl.constexpr):
    """float32 of e4m3 codes (uint8). HARDWARE: by conversion (SM89 and later); the same values."""
    if HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = code.to(tl.int32)
        # The exponent of e4m3 taken as one of float32 is short by 120, subnormals included.
        size = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        size = tl.where((wide & 0x7F) == 0x7F, float("nan"), size)
        return tl.where(wide >= 0x80, -size, size)


@triton.jit
def e4m3_code(x):
    """e4m3 codes (uint8) of float32, saturating at 448; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    normal = size.to(tl.int32, bitcast=True)
    normal = (normal + 0x7FFFF + ((normal >> 20) & 1)) >> 20  # nearest even in three bits
    small = ((size * 512.0 + _EVEN) - _EVEN).to(tl.int32)
    code = tl.where(size < 0.015625, small, normal - 960)  # 960: 120 exponents of 8 steps
    code = tl.where(x != x, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def bf16_code(x):
    """Bits (int16) of float32 rounded to bfloat16; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    code = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, code).to(tl.int16)


@triton.jit
def e2m1_value(nibble):
    """float32 of e2m1 nibbles (int32, 0..15)."""
    bits = ((nibble & 7) << 22) | ((nibble & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def e2m1_code(x):
    """e2m1 nibbles (int32) of float32, saturating at 6; NaN gives 0."""
    size = tl.minimum(tl.abs(x), 6.0)
    small = (size * 2.0 + _EVEN) - _EVEN
    middle = ((size + _EVEN) - _EVEN) + 2.0
    large = ((size * 0.5 + _EVEN) - _EVEN) + 4.0
    index = tl.where(size < 2.0, small, tl.where(size < 4.0, middle, large))
    index = tl.where(x != x, 0.0, index).to(tl.int32)
    return index | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def lanes_of(x, ROWS: tl.constexpr, RUN: tl.constexpr):
    """Cut [ROWS, 32 * RUN] into RUN tensors [ROWS, 32], one per place in a lane's run.

    Each cut takes even and odd places apart, which needs no exchange between threads that hold
    whole runs; so the tensors come in bit-reversed order of their places.
    """
    if RUN == 1:
        return (tl.reshape(x, (ROWS, 32)),)
    else:
        even, odd = tl.split(tl.reshape(x, (ROWS, 16 * RUN, 2)))
        return lanes_of(even, ROWS, RUN // 2) + lanes_of(odd, ROWS, RUN // 2)


@triton.jit
def halving_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum [ROWS, WIDTH] over its last dim by halves: x[:, :h] + x[:, h:] until one is left."""
    if WIDTH == 1:
        return tl.reshape(x, (ROWS,))
    else:
        halves = tl.permute(tl.reshape(x, (ROWS, 2, WIDTH // 2)), (0, 2, 1))
        low, high = tl.split(halves)
        return halving_sum(low + high, ROWS, WIDTH // 2)


@triton.jit
def lane_sum(x, ROWS: tl.constexpr, LANES: tl.constexpr, SHUFFLED: tl.constexpr):
    """Sum [ROWS, LANES] over its last dim: each 32 lanes by halves, then those sums by halves.

    SHUFFLED: by a reduction, which does just that on a card where lanes are those of warps (32 *
    warps >= LANES); the interpreter's has another order.
    """
    if SHUFFLED:
        return tl.sum(x, 1)
    else:
        warps = halving_sum(tl.reshape(x, (ROWS * LANES // 32, 32)), ROWS * LANES // 32, 32)
        return halving_sum(tl.reshape(warps, (ROWS, LANES // 32)), ROWS, LANES // 32)


@triton.jit
def halving_rows(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum [ROWS, WIDTH] over its first dim by halves: x[:h] + x[h:] until one is left."""
    if ROWS == 1:
        return tl.reshape(x, (WIDTH,))
    else:
        halves = tl.permute(tl.reshape(x, (2, ROWS // 2, WIDTH)), (1, 2, 0))
        low, high = tl.split(halves)
        return halving_rows(low + high, ROWS // 2, WIDTH)


@triton.jit
def bf16_part(x):
    """float32 nearest x that bfloat16 can hold (the interpreter cuts instead of rounding).

    A pair of x and 0 is converted, whose bits are those of the float32: of one number alone ptxas
    makes another instruction for sm_90 (F2F, not F2FP), and a move of bits behind it.
    """
    if _COMPILED:
        bits = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=r,f", [x],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def loop_bound(x, COMPILED: tl.constexpr):
    """A run-time scalar as a bound of `range`; the interpreter wants a number of Python's."""
    if COMPILED:
        return x
    else:
        return int(x.handle.data.item())
