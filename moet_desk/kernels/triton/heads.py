"""Heads of shared attention on their way in and out: normed and turned, and turned back.

Twins: `reference.unit` and `reference.rotate`, heads side by side. One program per row and head.
Launchers allocate nothing. Called on the engine thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.triton.prepare import Rotation


@triton.jit
def _turn_kernel(
    x,
    out,
    group_stride,
    row_stride,
    cos,
    sin,
    positions,
    eps,
    D: tl.constexpr,
    DR: tl.constexpr,
    B: tl.constexpr,
    EACH: tl.constexpr,
    NORM: tl.constexpr,
    BACK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    j = tl.arange(0, B)
    inside = j < D
    turning = inside & (j >= D - DR)
    line = x + (t * tl.num_programs(1) + head) * D
    mine = tl.load(line + j, mask=inside, other=0.0)
    other = tl.load(line + tl.where(turning, j ^ 1, 0), mask=turning, other=0.0)
    angle = tl.load(positions + t) * (DR // 2) + (j - (D - DR)) // 2
    c = tl.load(cos + angle, mask=turning, other=1.0)
    s = tl.load(sin + angle, mask=turning, other=0.0)
    if BACK:
        s = -s
    if NORM:
        factor = tl.rsqrt(tl.sum(mine * mine, 0) / D + eps)
        mine, other = mine * factor, other * factor
    turned = tl.where(j % 2 == 1, mine * c + other * s, mine * c - other * s)
    to = out + head // EACH * group_stride + t * row_stride + head % EACH * D + j
    tl.store(to, tl.where(turning, turned, mine), mask=inside)


def turn_heads(x: Tensor, out: Tensor, *, rotation: Rotation, eps: float) -> None:
    """Scale each head to RMS 1 and rotate its last dims in pairs.

    Shapes:
        x, out [T, N, D] float32, contiguous, D and the dims that rotate even; not the same memory
    """
    n, d = x.shape[1:]
    _launch(x, out, rotation, eps, each=n, strides=(0, n * d), norm=True, back=False)


def turn_back(x: Tensor, out: Tensor, *, rotation: Rotation) -> None:
    """Undo the rotation of each head, and put the heads of a group together.

    Shapes:
        x [T, N, D] float32, contiguous; out [G, T, N / G * D] float32, its last dim contiguous; not
        the same memory
    """
    n = x.shape[1]
    strides = out.stride(0), out.stride(1)
    _launch(x, out, rotation, 0.0, each=n // out.shape[0], strides=strides, norm=False, back=True)


def _launch(
    x: Tensor, out: Tensor, rotation: Rotation, eps: float, *, each: int,
    strides: tuple[int, int], norm: bool, back: bool,
) -> None:  # fmt: skip
    rows, n, d = x.shape
    _turn_kernel[(rows, n)](
        x, out, *strides, rotation.cos, rotation.sin, rotation.positions, eps, D=d,
        DR=2 * rotation.cos.shape[1], B=triton.next_power_of_2(d), EACH=each, NORM=norm, BACK=back,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
