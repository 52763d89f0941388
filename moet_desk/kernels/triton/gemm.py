"""Products of a prompt chunk with dense weights, on tensor cores with nearly float32 accuracy.

Owns the prompt's dense products; the step's are in `dense`. A float32 activation becomes two
bfloat16 parts whose sum has 16 bits of it, so two tensor-core products with a weight that bfloat16
holds exactly (bfloat16, or e4m3 and int8 before their scale) come within a few 1e-6 of float64. A
float32 weight is cut the same way and takes three products.

Tensor cores cut what does not fit when they add to their sum, so a long sum drifts towards zero: by
3.5e-5 over 7168 inputs of one sign (H200). Therefore each chunk of inputs starts from zero and is
added to the total outside, where float32 rounds to nearest. Launchers allocate nothing. Called on
the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.row_sizes import GROUP
from moet_desk.kernels.triton.dense_weight import DenseWeight, WeightKind
from moet_desk.kernels.triton.numbers import bf16_part, e4m3_value, has_e4m3
from moet_desk.kernels.triton.portable import INTERPRETED

PARTS = 2
"""bfloat16 parts of a float32 activation."""

_SPLIT_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class GemmTile:
    """Shape of one program: `m` x `n` results, `k` inputs at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@triton.jit
def store_parts(parts, at, size, value, mask):
    high = bf16_part(value)
    tl.store(parts + at, high.to(tl.bfloat16), mask=mask)
    tl.store(parts + size + at, (value - high).to(tl.bfloat16), mask=mask)


# The number of rows changes from chunk to chunk: it must not make new variants of a kernel.
@triton.jit(do_not_specialize=["M"])
def _split_kernel(x, x_stride, parts, M, K: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + m * x_stride + k, mask=k < K, other=0.0)
    store_parts(parts, m * K + k, M.to(tl.int64) * K, value, k < K)


@triton.jit(do_not_specialize=["M"])
def _swiglu_split_kernel(gate_up, parts, M, limit, INTER: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line = gate_up + m * (2 * INTER)
    g = tl.load(line + k, mask=k < INTER, other=0.0)
    u = tl.load(line + INTER + k, mask=k < INTER, other=0.0)
    if limit is not None:
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    value = tl.div_rn(g, tl.exp(-g) + 1.0) * u
    store_parts(parts, m * INTER + k, M.to(tl.int64) * INTER, value, k < INTER)


@triton.jit
def _product(high, low, raw, KIND: tl.constexpr, MMA: tl.constexpr, HARDWARE: tl.constexpr):
    """raw x (high + low)^T of a chunk; small products first. Tensor cores take the first operand
    from registers, so that is where decoded weights need no way through shared memory.
    """
    high, low = tl.trans(high), tl.trans(low)
    if MMA:
        if KIND == "fp8" or KIND == "int8":
            value = e4m3_value(raw, HARDWARE) if KIND == "fp8" else raw.to(tl.float32)
            w = value.to(tl.bfloat16)
            return tl.dot(w, high, tl.dot(w, low))
        elif KIND == "bf16":
            return tl.dot(raw, high, tl.dot(raw, low))
        else:
            first = bf16_part(raw)
            w, rest = first.to(tl.bfloat16), (raw - first).to(tl.bfloat16)
            return tl.dot(w, high, tl.dot(rest, high, tl.dot(w, low)))
    else:
        x = high.to(tl.float32) + low.to(tl.float32)
        w = e4m3_value(raw, HARDWARE) if KIND == "fp8" else raw.to(tl.float32)
        return tl.dot(w, x, input_precision="ieee")


@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    parts,
    weight,
    scales,
    bias,
    residual,
    out,
    out_stride,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    INPUTS: tl.constexpr,
    FIRST: tl.constexpr,
    PITCH: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    MMA: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    SCALE_K: tl.constexpr = (K + 127) // 128
    # GROUP row tiles share a column tile in turn, so that its weights are still in L2.
    columns = tl.cdiv(N, BN) * INPUTS
    group = tl.program_id(0) // (GROUP * columns)
    height = min(tl.cdiv(M, BM) - group * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * columns)
    m = (group * GROUP + inside % height) * BM + tl.arange(0, BM)
    own = inside // height // tl.cdiv(N, BN)  # whose input
    column = inside // height % tl.cdiv(N, BN) * BN + tl.arange(0, BN)
    inner = column < N
    n = FIRST + own * PITCH + column  # whose row of the weight
    column += own * N
    k = tl.arange(0, BK)
    line = tl.where(m < M, m, 0).to(tl.int64) + M.to(tl.int64) * own
    x = parts + (line * K)[:, None] + k[None, :]
    w = weight + (tl.where(inner, n, 0).to(tl.int64) * K)[:, None] + k[None, :]
    size = M.to(tl.int64) * (K * INPUTS)
    acc = tl.zeros([BN, BM], tl.float32)
    for k0 in range(0, K, BK):
        if K % BK == 0:
            high, low, raw = tl.load(x + k0), tl.load(x + size + k0), tl.load(w + k0)
        else:
            seen = (k0 + k < K)[None, :]
            high = tl.load(x + k0, mask=seen, other=0.0)
            low = tl.load(x + size + k0, mask=seen, other=0.0)
            raw = tl.load(w + k0, mask=seen, other=0)
        product = _product(high, low, raw, KIND, MMA, HARDWARE)
        if KIND == "int8":
            scale = tl.load(scales + n * (K // 32) + k0 // 32, mask=inner, other=0.0)
            product *= scale.to(tl.float32)[:, None]
        elif KIND == "fp8":
            if SCALE_ROWS == 1:
                scale = tl.load(scales + n, mask=inner, other=0.0)
            else:
                scale = tl.load(scales + n // 128 * SCALE_K + k0 // 128, mask=inner, other=0.0)
            product *= scale[:, None]
        acc += product
    acc = tl.trans(acc)
    live = (m < M)[:, None] & inner[None, :]
    at = (m.to(tl.int64) * out_stride)[:, None] + column[None, :]
    if bias is not None:
        acc += tl.load(bias + column, mask=inner, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        acc += tl.load(residual + at, mask=live, other=0.0)
    tl.store(out + at, acc, mask=live)


def split(x: Tensor, parts: Tensor) -> None:
    """Cut float32 into two bfloat16 parts, x = parts[0] + parts[1] up to 2**-17 of x.

    Shapes:
        x [M, K] float32 (rows may lie apart); parts [2, M, K] bfloat16
    """
    rows, k = x.shape
    grid = (rows, triton.cdiv(k, _SPLIT_BLOCK))
    _split_kernel[grid](x, x.stride(0), parts, rows, K=k, BLOCK=_SPLIT_BLOCK, num_warps=4)


def swiglu_split(gate_up: Tensor, parts: Tensor, *, limit: float | None = None) -> None:
    """`reference.swiglu` of the halves of each row, cut like `split`, for the product with down.

    Shapes:
        gate_up [M, 2I] float32; parts [2, M, I] bfloat16
    """
    rows, inter = parts.shape[1:]
    grid = (rows, triton.cdiv(inter, _SPLIT_BLOCK))
    _swiglu_split_kernel[grid](
        gate_up, parts, rows, limit, INTER=inter, BLOCK=_SPLIT_BLOCK, num_warps=4
    )


def gemm(
    parts: Tensor,
    weight: DenseWeight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    tile: GemmTile | None = None,
) -> None:
    """Multiply many rows by W^T; relative error against float64 below 1e-5.

    Shapes:
        parts [2, M, K] bfloat16 from `split`; out [M, N] float32 (rows may lie apart)
        bias [N] bfloat16 or float32; residual [M, N] as `out`, may be `out` itself
    Raises:
        ValueError: the parts do not fit the weight, or `residual` lies otherwise than `out`.
    """
    if residual is not None and residual.stride() != out.stride():
        raise ValueError("a residual must lie as the result does")
    _launch(parts[:, None], weight, out, bias, residual, tile)


def gemm_by_group(parts: Tensor, weight: DenseWeight, out: Tensor) -> None:
    """Multiply inputs by rows of a weight of their own: G of them by N / G rows each.

    Shapes:
        parts [2, G, M, K] bfloat16, contiguous; out [M, N] float32 (rows may lie apart)

    Raises:
        ValueError: the parts do not fit the weight.
    """
    _launch(parts, weight, out, None, None, None)


def gemm_of_heads(
    parts: Tensor, weight: DenseWeight, out: Tensor, *, first: int, count: int
) -> None:
    """Multiply each head's inputs by `count` of its rows of a weight, from its row `first` on.

    Shapes:
        parts [2, N, M, K] bfloat16, contiguous; out [M, N * count] float32 (rows may lie apart)

    Raises:
        ValueError: the parts do not fit the weight.
    """
    _launch(parts, weight, out, None, None, None, first=first, count=count)


def _launch(
    parts: Tensor, weight: DenseWeight, out: Tensor, bias: Tensor | None,
    residual: Tensor | None, tile: GemmTile | None, *, first: int = 0, count: int | None = None,
) -> None:  # fmt: skip
    groups, rows, k = parts.shape[1:]
    pitch = weight.n // groups
    count = pitch if count is None else count
    if k != weight.k or weight.n % groups or first + count > pitch:
        raise ValueError(f"{groups} inputs of {k} do not fit a weight of {weight.n} x {weight.k}")
    tile = tile or tile_for(parts.device, rows, groups * count, k)
    if weight.kind is WeightKind.INT8:
        tile = replace(tile, k=GROUP)  # a step of inputs has one scale
    grid = (triton.cdiv(rows, tile.m) * triton.cdiv(count, tile.n) * groups,)
    _gemm_kernel[grid](
        parts, weight.raw, weight.scales, bias, residual, out, out.stride(0), rows,
        N=count, K=k, BM=tile.m, BN=tile.n, BK=tile.k, GROUP=8, INPUTS=groups,
        FIRST=first, PITCH=pitch, KIND=weight.kind.value, SCALE_ROWS=weight.scale_rows,
        MMA=not INTERPRETED, HARDWARE=has_e4m3(parts.device), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def tile_for(device: torch.device, rows: int, columns: int, inputs: int) -> GemmTile:
    """Hopper has 227 KiB of shared memory per multiprocessor, consumer cards 99; where large tiles
    would leave half of the card idle, small ones. H200, FP8, 512 rows, low tiles and high ones:
    1536 x 4096 54 and 83 us, 32768 x 1024 168 and 185, 4096 x 8192 176 and 161.
    """
    if INTERPRETED:
        return GemmTile(m=16, n=32, k=64, warps=4, stages=1)
    if triton.cdiv(rows, 128) * triton.cdiv(columns, 128) <= FEW_TILES:
        return SMALL_TILE
    if torch.cuda.get_device_capability(device)[0] in (9, 10):
        return HOPPER_TILE if inputs < 8192 else HOPPER_TILE_HIGH
    return CONSUMER_TILE


HOPPER_TILE = GemmTile(m=64, n=128, k=64, warps=4, stages=4)
HOPPER_TILE_HIGH = GemmTile(m=128, n=128, k=64, warps=8, stages=3)
SMALL_TILE = GemmTile(m=64, n=64, k=64, warps=4, stages=3)
CONSUMER_TILE = GemmTile(m=64, n=128, k=64, warps=4, stages=3)

FEW_TILES = 64
"""Programs of 128 x 128 that fill no more than half of a large card."""
