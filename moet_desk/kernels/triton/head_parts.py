"""Heads of a prompt's shared attention: normed, turned, and cut into two bfloat16 parts each.

Twins: `reference.unit` and `reference.rotate`. What comes next in a prompt multiplies on tensor
cores, so a pass over all queries is saved. Launchers allocate nothing. Called on the engine thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.triton.gemm import store_parts
from moet_desk.kernels.triton.prepare import Rotation

_HEADS = 4
"""Heads that a program turns."""


@triton.jit(do_not_specialize=["size"])
def _parts_kernel(
    x,
    parts,
    size,
    cos,
    sin,
    positions,
    eps,
    N: tl.constexpr,
    D: tl.constexpr,
    DR: tl.constexpr,
    B: tl.constexpr,
    BH: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    j = tl.arange(0, B)
    inside = (head < N)[:, None] & (j < D)[None, :]
    at = ((t * N + head) * D)[:, None] + j[None, :]
    mine = tl.load(x + at, mask=inside, other=0.0)
    mine *= tl.rsqrt(tl.sum(mine * mine, 1) / D + eps)[:, None]
    even, odd = tl.split(tl.reshape(mine, (BH, B // 2, 2)))
    pair = tl.arange(0, B // 2) - (D - DR) // 2
    turning = (pair >= 0) & (pair < DR // 2)
    angle = tl.load(positions + t) * (DR // 2) + pair
    c = tl.load(cos + angle, mask=turning, other=1.0)[None, :]
    s = tl.load(sin + angle, mask=turning, other=0.0)[None, :]
    turned = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (BH, B))
    store_parts(parts, at, size.to(tl.int64), turned, inside)


def head_parts(x: Tensor, parts: Tensor, *, rotation: Rotation, eps: float) -> None:
    """Scale each head to RMS 1 and rotate its last dims in pairs.

    Shapes:
        x [T, N, D] float32, parts [2, T, N, D] bfloat16, contiguous, D and the dims that rotate
        even; not the same memory
    """
    rows, n, d = x.shape
    _parts_kernel[(rows, triton.cdiv(n, _HEADS))](
        x, parts, x.numel(), rotation.cos, rotation.sin, rotation.positions, eps, N=n, D=d,
        DR=2 * rotation.cos.shape[1], B=triton.next_power_of_2(d), BH=_HEADS, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
