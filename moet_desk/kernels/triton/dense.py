"""Products of a few rows with dense weights, memory-bound and batch-invariant; embedding.

Owns the decode step's dense products: x stays float32, weights stay as shipped (bfloat16, float32,
or e4m3 with a float32 scale per 128 x 128). The prompt's products are in `gemm`. Launchers allocate
nothing. Called on the engine thread.

Summing order, the same for every number of rows, tile and card: K is walked in steps of 32 runs of
`RUN` consecutive weights (16 of e4m3, 8 of bfloat16, 4 of float32: one 16-byte load of a lane).
Lane c fuses the products of its run in a fixed order, times the block's scale, onto its sum; at the
end the 32 lanes are added by halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.triton.numbers import e4m3_value, halving_sum, has_e4m3
from moet_desk.kernels.triton.portable import PTX

SCALE_BLOCK = 128
"""Rows and columns of an e4m3 weight that share one scale."""

MAX_ROWS = 8
"""Most rows of one decode step."""


class WeightKind(Enum):
    """How the values of a dense weight are stored."""

    F32 = "f32"
    BF16 = "bf16"
    FP8 = "fp8"


RUN = {WeightKind.F32: 4, WeightKind.BF16: 8, WeightKind.FP8: 16}


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A matrix as shipped.

    Attributes:
        values: [N, K] float32, bfloat16 or float8_e4m3fn, contiguous.
        scales: [ceil(N/128), ceil(K/128)] float32 for e4m3, else None.

    Raises:
        ValueError: dtype, layout or scales do not fit each other.
    """

    values: Tensor
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        if self.values.dim() != 2 or not self.values.is_contiguous():
            raise ValueError(
                f"a dense weight of shape {tuple(self.values.shape)} is no plain matrix"
            )
        wanted = tuple(-(-size // SCALE_BLOCK) for size in self.values.shape)
        found = None if self.scales is None else tuple(self.scales.shape)
        if found != (wanted if self.kind is WeightKind.FP8 else None):
            raise ValueError(
                f"scales {found} do not fit a {self.kind.value} weight of {wanted} blocks"
            )
        if self.k % RUN[self.kind]:
            raise ValueError(f"{self.k} inputs are not whole runs of {RUN[self.kind]}")

    @property
    def kind(self) -> WeightKind:
        """Storage of the values."""
        kinds = {
            torch.float32: WeightKind.F32,
            torch.bfloat16: WeightKind.BF16,
            torch.float8_e4m3fn: WeightKind.FP8,
        }
        if self.values.dtype not in kinds:
            raise ValueError(f"a dense weight cannot be {self.values.dtype}")
        return kinds[self.values.dtype]

    @property
    def n(self) -> int:
        """Output rows."""
        return self.values.shape[0]

    @property
    def k(self) -> int:
        """Inputs."""
        return self.values.shape[1]

    @property
    def raw(self) -> Tensor:
        """Values as kernels take them: e4m3 as bytes."""
        if self.kind is WeightKind.FP8:
            return self.values.view(torch.uint8)
        return self.values


@dataclass(frozen=True, slots=True)
class GemvTile:
    """Shape of one program; changes speed, never bits."""

    rows: int
    warps: int
    unroll: int = 1


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which rows of a weight a launch multiplies, and with which part of x.

    Head h has output rows 0 .. count-1, lying at `first + h * pitch` of the weight.
    """

    heads: int
    count: int
    first: int = 0
    pitch: int = 0


@triton.jit
def weight_tile(pointers, mask, KIND: tl.constexpr, HARDWARE: tl.constexpr):
    """A tile of weights as float32; the weights are read once, so they leave the caches first."""
    raw = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    if KIND == "fp8":
        return e4m3_value(raw, HARDWARE)
    else:
        return raw.to(tl.float32)


_FOUR_E4M3 = tl.constexpr(
    "{ .reg .b16 low, high, a, b, c, d; .reg .b32 p, q;"
    " mov.b32 {low, high}, $4;"
    " cvt.rn.f16x2.e4m3x2 p, low; cvt.rn.f16x2.e4m3x2 q, high;"
    " mov.b32 {a, b}, p; mov.b32 {c, d}, q;"
    " cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"
)
# Weights are read once: they need no room in L1.
_SIXTEEN_BYTES = tl.constexpr("ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
_SIXTEEN_BYTES_OR_0 = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $5, 0;"
    " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    " @p ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4]; }"
)
_FOUR_FLOATS = tl.constexpr("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];")
_FOUR_FLOATS_OR_0 = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $5, 0;"
    " mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; mov.f32 $2, 0f00000000;"
    " mov.f32 $3, 0f00000000; @p ld.global.v4.f32 {$0, $1, $2, $3}, [$4]; }"
)
_ONE_FLOAT = tl.constexpr("ld.global.nc.f32 $0, [$1];")


@triton.jit
def _four_words(pointers, seen, EVEN: tl.constexpr, PTX: tl.constexpr):
    """The four int32 from each pointer on, as tensors of the pointers' shape; 0 where not `seen`.

    Written as PTX, because a 16-byte load of Triton's own comes in a layout that makes every use
    of it cross shared memory (seen in the SASS: 16 barriers per 512 weights).
    """
    if PTX and EVEN:
        words = tl.inline_asm_elementwise(
            _SIXTEEN_BYTES, "=r,=r,=r,=r,l", [pointers.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif PTX:
        words = tl.inline_asm_elementwise(
            _SIXTEEN_BYTES_OR_0, "=&r,=&r,=&r,=&r,l,r",
            [pointers.to(tl.int64), tl.broadcast_to(seen, pointers.shape).to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        words = (
            tl.load(pointers, mask=seen, other=0),
            tl.load(pointers + 1, mask=seen, other=0),
            tl.load(pointers + 2, mask=seen, other=0),
            tl.load(pointers + 3, mask=seen, other=0),
        )
    return words


@triton.jit
def _four_floats(pointers, seen, EVEN: tl.constexpr, PTX: tl.constexpr):
    """Like `_four_words` for float32 that stays in L1."""
    if PTX and EVEN:
        values = tl.inline_asm_elementwise(
            _FOUR_FLOATS, "=f,=f,=f,=f,l", [pointers.to(tl.int64)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    elif PTX:
        values = tl.inline_asm_elementwise(
            _FOUR_FLOATS_OR_0, "=&f,=&f,=&f,=&f,l,r",
            [pointers.to(tl.int64), tl.broadcast_to(seen, pointers.shape).to(tl.int32)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        values = (
            tl.load(pointers, mask=seen, other=0.0),
            tl.load(pointers + 1, mask=seen, other=0.0),
            tl.load(pointers + 2, mask=seen, other=0.0),
            tl.load(pointers + 3, mask=seen, other=0.0),
        )
    return values


@triton.jit
def _one_float(pointers, PTX: tl.constexpr):
    """A float32 behind each pointer; a load of Triton's own would choose everyone's layout."""
    if PTX:
        return tl.inline_asm_elementwise(
            _ONE_FLOAT, "=f,l", [pointers.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.load(pointers)


@triton.jit
def _run_values(words, KIND: tl.constexpr, HARDWARE: tl.constexpr):
    """The weights in four words, in order: a float32 tensor per place of a lane's run."""
    values = ()
    for i in tl.static_range(4):
        if KIND == "f32":
            values = values + (words[i].to(tl.float32, bitcast=True),)
        elif KIND == "bf16":
            values = values + (
                (words[i] << 16).to(tl.float32, bitcast=True),
                (words[i] & -65536).to(tl.float32, bitcast=True),
            )
        elif HARDWARE:
            values = values + tl.inline_asm_elementwise(
                _FOUR_E4M3, "=f,=f,=f,=f,r", [words[i]],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            for byte in tl.static_range(4):
                code = ((words[i] >> (8 * byte)) & 255).to(tl.uint8)
                values = values + (e4m3_value(code, False),)
    return values


@triton.jit
def _gemv_sums(
    x,
    x_stride,
    weight,
    scales,
    rows,
    K: tl.constexpr,
    SCALE_K: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    KIND: tl.constexpr,
    UNROLL: tl.constexpr,
    HARDWARE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Products of T rows of x with weight rows `rows` [ROWS]: a tuple of T tensors [ROWS]."""
    STEP: tl.constexpr = 32 * RUN  # 32: lanes of the summing order, and of a warp
    EVEN: tl.constexpr = K % STEP == 0
    lane = tl.arange(0, 32)[None, :]
    line = weight.to(tl.pointer_type(tl.int32)) + (rows.to(tl.int64) * (K * 4 // RUN))[:, None]
    sums = ()
    for _ in tl.static_range(T):
        sums = sums + (tl.zeros([ROWS, 32], tl.float32),)
    for k0 in tl.range(0, K, STEP, num_stages=1, loop_unroll_factor=UNROLL):
        k = k0 + lane * RUN
        tile = _run_values(
            _four_words(line + k0 * 4 // RUN + lane * 4, k < K, EVEN, PTX), KIND, HARDWARE
        )
        if KIND == "fp8":
            at = (rows // 128 * SCALE_K)[:, None] + tl.minimum(k // 128, SCALE_K - 1)
            scale = _one_float(scales + at, PTX)
        moved = ()
        for t in tl.static_range(T):
            run = tl.zeros([ROWS, 32], tl.float32) if KIND == "fp8" else sums[t]
            for j in tl.static_range(RUN // 4):
                xs = _four_floats(x + t * x_stride + k + 4 * j, k < K, EVEN, PTX)
                for i in tl.static_range(4):
                    run = tl.fma(tile[4 * j + i], tl.broadcast_to(xs[i], (ROWS, 32)), run)
            if KIND == "fp8":
                run = tl.fma(run, scale, sums[t])
            moved = moved + (run,)
        sums = moved
    out = ()
    for t in tl.static_range(T):
        out = out + (halving_sum(sums[t], ROWS, 32),)
    return out


@triton.jit
def _gemv_kernel(
    x,
    x_stride,
    weight,
    scales,
    bias,
    residual,
    residual_stride,
    out,
    out_stride,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    PITCH: tl.constexpr,
    HEAD_X: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    KIND: tl.constexpr,
    UNROLL: tl.constexpr,
    HARDWARE: tl.constexpr,
    PTX: tl.constexpr,
):
    head = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = n < COUNT
    sums = _gemv_sums(
        x + head * HEAD_X,
        x_stride,
        weight,
        scales,
        FIRST + head * PITCH + tl.where(live, n, 0),
        K,
        (K + 127) // 128,
        T,
        ROWS,
        RUN,
        KIND,
        UNROLL,
        HARDWARE,
        PTX,
    )
    at = head * COUNT + n
    for t in tl.static_range(T):
        y = sums[t]
        if bias is not None:
            y += tl.load(bias + at, mask=live, other=0.0).to(tl.float32)
        if residual is not None:
            y += tl.load(residual + t * residual_stride + at, mask=live, other=0.0)
        tl.store(out + t * out_stride + at, y, mask=live)


@triton.jit
def _swiglu_gemv_kernel(
    x,
    x_stride,
    weight,
    scales,
    out,
    out_stride,
    limit,
    INTER: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    KIND: tl.constexpr,
    UNROLL: tl.constexpr,
    HARDWARE: tl.constexpr,
    PTX: tl.constexpr,
):
    lane = tl.arange(0, 2 * ROWS)
    # Gate and up rows alternate, so that one pass loads both and a split takes them apart.
    n = tl.program_id(0) * ROWS + lane // 2
    live = n < INTER
    sums = _gemv_sums(
        x,
        x_stride,
        weight,
        scales,
        tl.where(live, n, 0) + (lane % 2) * INTER,
        K,
        (K + 127) // 128,
        T,
        2 * ROWS,
        RUN,
        KIND,
        UNROLL,
        HARDWARE,
        PTX,
    )
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for t in tl.static_range(T):
        g, u = tl.split(tl.reshape(sums[t], (ROWS, 2)))
        if limit is not None:
            g = tl.where(g > limit, limit, g)
            u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        y = tl.div_rn(g, tl.exp(-g) + 1.0) * u
        tl.store(out + t * out_stride + at, y, mask=at < INTER)


@triton.jit
def _embed_kernel(ids, table, out, H: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + t).to(tl.int64)
    value = tl.load(table + row * H + column, mask=column < H, other=0.0).to(tl.float32)
    tl.store(out + t.to(tl.int64) * H + column, value, mask=column < H)


def gemv(
    x: Tensor,
    weight: DenseWeight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    tile: GemvTile | None = None,
) -> None:
    """Multiply up to 8 rows by W^T; a row's bits depend on that row alone.

    Shapes:
        x [T, K] float32 (rows may lie apart); out [T, N] float32 (likewise); bias [N] bfloat16 or
        float32; residual [T, N] float32, added last, may be `out` itself
    Raises:
        ValueError: T is not 1..8, or x does not fit the weight.
    """
    _check_rows(x, weight.k)
    _launch(x, weight, out, _Rows(1, weight.n), bias=bias, residual=residual, tile=tile)


def head_gemv(
    x: Tensor, weight: DenseWeight, out: Tensor, *, first: int, count: int, pitch: int
) -> None:
    """For each head h: multiply x[:, h] by rows first + h * pitch .. + count of the weight.

    Shapes:
        x [T, N, K] float32; out [T, N * count] float32
    Raises:
        ValueError: T is not 1..8, or x does not fit the weight.
    """
    heads = x.shape[1]
    _check_rows(x, weight.k)
    if first + (heads - 1) * pitch + count > weight.n:
        raise ValueError(f"a weight of {weight.n} rows has no {heads} heads of {pitch}")
    _launch(x.flatten(1), weight, out, _Rows(heads, count, first, pitch), x_pitch=weight.k)


def swiglu_gemv(
    x: Tensor,
    gate_up: DenseWeight,
    out: Tensor,
    *,
    limit: float | None = None,
    tile: GemvTile | None = None,
) -> None:
    """silu(x G^T) * (x U^T) of up to 8 rows in one pass; `limit` as in `reference.swiglu`.

    Shapes:
        x [T, K] float32; gate_up [2I, K], gate rows first (e4m3 scales: those of G, then those of
        U, which is one matrix's grid only if I is a multiple of 128); out [T, I] float32
    Raises:
        ValueError: T is not 1..8, x does not fit, or I of e4m3 is not a multiple of 128.
    """
    _check_rows(x, gate_up.k)
    inter = gate_up.n // 2
    if gate_up.kind is WeightKind.FP8 and inter % SCALE_BLOCK:
        raise ValueError(f"gate and up of {inter} rows share a block of scales")
    tile = tile or tile_for(gate_up.n, x.shape[0])
    rows = max(1, tile.rows // 2)
    _swiglu_gemv_kernel[(triton.cdiv(inter, rows),)](
        x, x.stride(0), gate_up.raw, gate_up.scales, out, out.stride(0), limit,
        INTER=inter, K=gate_up.k, T=x.shape[0], ROWS=rows, RUN=RUN[gate_up.kind],
        KIND=gate_up.kind.value, UNROLL=tile.unroll, HARDWARE=has_e4m3(x.device), PTX=PTX,
        num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip


def embed(ids: Tensor, table: Tensor, out: Tensor) -> None:
    """Copy the rows of a table.

    Shapes:
        ids [T] int32 or int64; table [V, H] bfloat16 or float32; out [T, H] float32
    """
    hidden = table.shape[1]
    block = min(1024, triton.next_power_of_2(hidden))
    grid = (ids.shape[0], triton.cdiv(hidden, block))
    _embed_kernel[grid](ids, table, out, H=hidden, BLOCK=block, num_warps=4)


def _launch(
    x: Tensor,
    weight: DenseWeight,
    out: Tensor,
    rows: _Rows,
    *,
    x_pitch: int = 0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    tile: GemvTile | None = None,
) -> None:
    tile = tile or tile_for(rows.heads * rows.count, x.shape[0])
    grid = (triton.cdiv(rows.count, tile.rows), rows.heads)
    _gemv_kernel[grid](
        x, x.stride(0), weight.raw, weight.scales, bias, residual,
        0 if residual is None else residual.stride(0), out, out.stride(0),
        COUNT=rows.count, K=weight.k, FIRST=rows.first, PITCH=rows.pitch, HEAD_X=x_pitch,
        T=x.shape[0], ROWS=tile.rows, RUN=RUN[weight.kind], KIND=weight.kind.value,
        UNROLL=tile.unroll, HARDWARE=has_e4m3(x.device), PTX=PTX,
        num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip


def tile_for(n: int, rows: int) -> GemvTile:
    """Tile by the number of weight rows and of x rows; `bench/gpu_gemv_sweep.py` compares them.

    H200, 2026-11-29, FP8 with K = 4096, one token: N = 16384 takes 24 us with (16, 4, 1) and 57
    with three stages; N = 4096 takes 10 us with (4, 4, 1) and 17 with (16, 4, 3). The weights come
    straight into registers: the way through shared memory costs more than it hides. With several
    tokens more rows share what a program reads of x (4 tokens, N = 4096: 19 us).
    """
    if rows > 1:
        return GemvTile(rows=8, warps=4)
    return GemvTile(rows=16, warps=4) if n >= 8192 else GemvTile(rows=4, warps=4, unroll=2)


def _check_rows(x: Tensor, k: int) -> None:
    if not 1 <= x.shape[0] <= MAX_ROWS or x.shape[-1] != k:
        raise ValueError(f"x {tuple(x.shape)} is not 1..{MAX_ROWS} rows of {k}")
