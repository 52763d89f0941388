"""Gates that multiply what a block gives: a sigmoid of each number, or of one for a whole row.

Twin: `torch.sigmoid(gate) * x`. Launchers allocate nothing. Called on the engine thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def _gate_kernel(
    x,
    x_stride,
    gate,
    gate_stride,
    residual,
    residual_stride,
    out,
    out_stride,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < W
    if ONE:
        g = tl.load(gate + t * gate_stride)
    else:
        g = tl.load(gate + t * gate_stride + column, mask=inside, other=0.0)
    y = tl.load(x + t * x_stride + column, mask=inside, other=0.0) * sigmoid(g)
    if residual is not None:
        y += tl.load(residual + t * residual_stride + column, mask=inside, other=0.0)
    tl.store(out + t * out_stride + column, y, mask=inside)


def gated(x: Tensor, gate: Tensor, out: Tensor, *, residual: Tensor | None = None) -> None:
    """out = x * sigmoid(gate), and `residual` added to that.

    Shapes:
        x, out, residual [T, W] float32, gate [T, W] or [T, 1] float32; rows may lie apart; out may
        be x or the residual itself
    """
    rows, width = x.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    _gate_kernel[(rows, triton.cdiv(width, block))](
        x, x.stride(0), gate, gate.stride(0), residual,
        0 if residual is None else residual.stride(0), out, out.stride(0),
        W=width, BLOCK=block, ONE=gate.shape[1] == 1, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
