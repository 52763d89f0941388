"""RMS norm of rows.

Twin: `reference.rms_norm`. One program per row, so a row's bits depend on that row alone. Launchers
allocate nothing. Called on the engine thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def normed_row(row, weight, eps, out, H: tl.constexpr, BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr):
    """Norm a row [BLOCK], 0 from H on. With as many warps (`norm_warps`) it has the same bits."""
    column = tl.arange(0, BLOCK)
    inside = column < H
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        w += 1.0
    mean = tl.sum(row * row, 0) / H
    tl.store(out + column, row * tl.rsqrt(mean + eps) * w, mask=inside)


@triton.jit
def _rms_norm_kernel(
    x,
    x_stride,
    weight,
    eps,
    out,
    out_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    row = tl.load(x + t * x_stride + column, mask=inside, other=0.0)
    normed_row(row, weight, eps, out + t * out_stride, H, BLOCK, PLUS_ONE)


def norm_warps(width: int) -> int:
    """Warps of a program that norms a row of this width."""
    return max(1, min(16, int(triton.next_power_of_2(width)) // 256))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor, plus_one: bool = False) -> None:
    """Scale rows to RMS 1, as `reference.rms_norm`.

    Shapes:
        x [T, H] float32 (rows may lie apart), weight [H] bfloat16 or float32, out [T, H] float32
        (likewise), may be `x` itself
    """
    hidden = x.shape[1]
    _rms_norm_kernel[(x.shape[0],)](
        x, x.stride(0), weight, eps, out, out.stride(0),
        H=hidden, BLOCK=triton.next_power_of_2(hidden), PLUS_ONE=plus_one,
        num_warps=norm_warps(hidden), enable_fp_fusion=False,
    )  # fmt: skip
