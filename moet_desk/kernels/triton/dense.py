"""Products of a few rows with dense weights, memory-bound and batch-invariant; embedding.

Owns the decode step's dense products: x stays float32, weights stay as shipped (bfloat16, float32,
or e4m3 with a float32 scale per 128 x 128 or per row) or are int8 with a bfloat16 scale per 32
inputs (`reference.quantize_dense`). Weights are in `dense_weight`, how products are cut in
`gemv_tiles`, the prompt's products in `gemm`.
Launchers allocate nothing. Called on the engine thread.

Summing order, the same for every number of rows, tile and card: K is walked in steps of 128, 64 or
32 runs of 16 bytes, as K alone says (`lanes_of`). Lane c fuses the products of its run, in an order
that depends on c alone (`loads`), onto its sum (of e4m3 and int8: onto zero, and that times the
block's scale onto its sum); at the end each 32 lanes are added by halves, then those sums likewise.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.triton.dense_weight import DenseWeight, WeightKind
from moet_desk.kernels.triton.gemv_tiles import GemvTile, Way, tile_for, way_of
from moet_desk.kernels.triton.loads import (
    four_floats,
    four_words,
    in_order,
    one_scale,
    run_values,
    turn_of,
)
from moet_desk.kernels.triton.norms import norm_warps, normed_row, rms_norm
from moet_desk.kernels.triton.numbers import has_e4m3, lane_sum, loop_bound
from moet_desk.kernels.triton.portable import PTX

MAX_ROWS = 8
"""Most rows of one decode step."""


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
def _gemv_sums(
    x, x_stride, weight, scales, rows, scale_rows, width,
    K: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
    BY_ROW: tl.constexpr, LANES: tl.constexpr, AHEAD: tl.constexpr, EAGER: tl.constexpr,
    HARDWARE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Products of T rows of x with weight rows `rows` [ROWS]: a tuple of T tensors [ROWS].

    `scale_rows` are the rows' rows of scales, [ROWS] or [1] for all. `width` is K as a run-time
    number: a loop whose length the compiler knows is unrolled whole, or disappears, and then the
    sum at its end gives every tensor another layout.

    All weights of AHEAD steps are asked for, then their scales, with EAGER what they meet of x, and
    only then the first is multiplied: the bytes under way decide the speed.
    """
    SCALED: tl.constexpr = KIND == "fp8" or KIND == "int8"
    RUN: tl.constexpr = 16 if SCALED else 8 if KIND == "bf16" else 4
    PIECES: tl.constexpr = RUN // 4
    SCALE_WIDTH: tl.constexpr = 32 if KIND == "int8" else 128
    ONE_A_ROW: tl.constexpr = KIND == "fp8" and BY_ROW
    SCALE_K: tl.constexpr = 1 if ONE_A_ROW else (K + SCALE_WIDTH - 1) // SCALE_WIDTH
    STEP: tl.constexpr = LANES * RUN
    EVEN: tl.constexpr = K % (STEP * AHEAD) == 0
    lane = tl.arange(0, LANES)[None, :]
    turn = turn_of(lane, PIECES)
    line = weight.to(tl.pointer_type(tl.int32)) + (rows.to(tl.int64) * (K // PIECES))[:, None]
    grid = scales
    if SCALED:
        grid = scales + (scale_rows * SCALE_K)[:, None]
    sums = ()
    for _ in tl.static_range(T):
        sums = sums + (tl.zeros([ROWS, LANES], tl.float32),)
    for k0 in tl.range(0, loop_bound(width, PTX), STEP * AHEAD, num_stages=1):
        words = ()
        for step in tl.static_range(AHEAD):
            k = k0 + (step * LANES + lane) * RUN
            words = words + (four_words(line + k // PIECES, turn, k < K, PIECES, EVEN, PTX),)
        factors = ()
        for step in tl.static_range(AHEAD if SCALED else 0):
            block = (k0 + (step * LANES + lane) * RUN) // SCALE_WIDTH
            factors = factors + (one_scale(grid + tl.minimum(block, SCALE_K - 1), KIND, PTX),)
        met = ()
        for at in tl.static_range(1, T * AHEAD * PIECES if EAGER else 1):
            k = k0 + (at // PIECES % AHEAD * LANES + lane) * RUN
            piece = k + 4 * ((turn + at % PIECES) % PIECES)
            row = x + at // (PIECES * AHEAD) * x_stride
            met = met + (four_floats(row + piece, k < K, EVEN, PTX),)
        # The first piece comes behind what all must come before.
        first = in_order(k0, PTX)
        for step in tl.static_range(AHEAD):
            k = first + (step * LANES + lane) * RUN
            w = run_values(words[step], KIND, HARDWARE)
            moved = ()
            for t in tl.static_range(T):
                run = tl.zeros([ROWS, LANES], tl.float32) if SCALED else sums[t]
                for j in tl.static_range(PIECES):
                    if not EAGER or step + j + t == 0:
                        piece = k + 4 * ((turn + j) % PIECES)
                        xs = four_floats(x + t * x_stride + piece, k < K, EVEN, PTX)
                    else:
                        xs = met[(t * AHEAD + step) * PIECES + j - 1]
                    for i in tl.static_range(4):
                        run = tl.fma(w[4 * j + i], tl.broadcast_to(xs[i], (ROWS, LANES)), run)
                if SCALED:
                    run = tl.fma(run, tl.broadcast_to(factors[step], (ROWS, LANES)), sums[t])
                moved = moved + (run,)
            sums = moved
    # Where many sums are short, shuffles of each would take longer than the products.
    out = ()
    for t in tl.static_range(T):
        out = out + (lane_sum(sums[t], ROWS, LANES, PTX and (LANES > 32 or T < 3)),)
    return out


@triton.jit(do_not_specialize=["width"])
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
    width,
    norm_weight,
    eps,
    normed,
    normed_stride,
    arrived,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    PITCH: tl.constexpr,
    HEAD_X: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    LANES: tl.constexpr,
    AHEAD: tl.constexpr,
    EAGER: tl.constexpr,
    HARDWARE: tl.constexpr,
    PTX: tl.constexpr,
):
    head = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = n < COUNT
    rows = FIRST + head * PITCH + tl.where(live, n, 0)
    scale_rows = rows // SCALE_ROWS
    if SCALE_ROWS % ROWS == 0 and FIRST % ROWS == 0 and PITCH % ROWS == 0:
        begin = FIRST + head * PITCH + tl.program_id(0) * ROWS
        scale_rows = (begin + tl.arange(0, 1)) // SCALE_ROWS
    sums = _gemv_sums(
        x + head * HEAD_X, x_stride, weight, scales, rows, scale_rows, width,
        K, T, ROWS, KIND, SCALE_ROWS == 1, LANES, AHEAD, EAGER, HARDWARE, PTX,
    )  # fmt: skip
    at = head * COUNT + n
    for t in tl.static_range(T):
        y = sums[t]
        if bias is not None:
            y += tl.load(bias + at, mask=live, other=0.0).to(tl.float32)
        if residual is not None:
            y += tl.load(residual + t * residual_stride + at, mask=live, other=0.0)
        tl.store(out + t * out_stride + at, y, mask=live)
    if NORMED > 0 and tl.program_id(0) * ROWS < NORMED:
        # The last of the programs that share these columns has them whole.
        tl.debug_barrier()
        if tl.atomic_add(arrived, 1, sem="acq_rel") == (NORMED + ROWS - 1) // ROWS - 1:
            tl.store(arrived, 0)  # for the next launch
            column = tl.arange(0, BLOCK)
            inside = column < NORMED
            for t in tl.static_range(T):
                line = out + t * out_stride + column
                row = tl.load(line, mask=inside, other=0.0, cache_modifier=".cg")
                to = normed + t * normed_stride
                normed_row(row, norm_weight, eps, to, NORMED, BLOCK, False)


@triton.jit(do_not_specialize=["width"])
def _swiglu_gemv_kernel(
    x,
    x_stride,
    weight,
    scales,
    out,
    out_stride,
    width,
    limit,
    INTER: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    LANES: tl.constexpr,
    AHEAD: tl.constexpr,
    EAGER: tl.constexpr,
    HARDWARE: tl.constexpr,
    PTX: tl.constexpr,
):
    lane = tl.arange(0, 2 * ROWS)
    # Gate and up rows alternate, so that one pass loads both and a split takes them apart.
    n = tl.program_id(0) * ROWS + lane // 2
    live = n < INTER
    rows = tl.where(live, n, 0) + (lane % 2) * INTER
    sums = _gemv_sums(
        x, x_stride, weight, scales, rows, rows // SCALE_ROWS, width,
        K, T, 2 * ROWS, KIND, SCALE_ROWS == 1, LANES, AHEAD, EAGER, HARDWARE, PTX,
    )  # fmt: skip
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


@dataclass(frozen=True, slots=True)
class NormOf:
    """`rms_norm` of the first columns of a product, in its launch.

    Attributes:
        weight: [C] bfloat16 or float32.
        eps: of the norm.
        out: [T, C] float32, rows may lie apart.
        arrived: int32 [1], 0 before and after: programs that are done with these columns.
    """

    weight: Tensor
    eps: float
    out: Tensor
    arrived: Tensor


def gemv(
    x: Tensor,
    weight: DenseWeight,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: NormOf | None = None,
    tile: GemvTile | None = None,
) -> None:
    """Multiply up to 8 rows by W^T; a row's bits depend on that row alone. With `norm` the first
    columns of `out` are normed too, with the bits of `rms_norm`.

    Shapes:
        x [T, K] float32 (rows may lie apart); out [T, N] float32 (likewise); bias [N] bfloat16 or
        float32; residual [T, N] float32, added last, may be `out` itself
    Raises:
        ValueError: T is not 1..8, or x does not fit the weight.
    """
    _check_rows(x, weight.k)
    way = _way(weight, x, tile or tile_for(weight.n, weight.k, weight.kind, x.shape[0]))
    whole = norm is not None and way.warps == norm_warps(norm.weight.shape[0])
    _launch(
        x, weight, out, _Rows(1, weight.n), bias=bias, residual=residual, tile=tile,
        norm=norm if whole else None,
    )  # fmt: skip
    if norm is not None and not whole:  # with other warps it would have another order of adding
        rms_norm(out[:, : norm.weight.shape[0]], norm.weight, norm.eps, out=norm.out)


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
        ValueError: T is not 1..8, x does not fit, or blocks of 128 rows do not meet at I.
    """
    _check_rows(x, gate_up.k)
    inter = gate_up.n // 2
    if gate_up.kind is WeightKind.FP8 and inter % gate_up.scale_rows:
        raise ValueError(f"gate and up of {inter} rows share a block of scales")
    way = _way(gate_up, x, tile or _gated_tile(gate_up, x))
    rows = max(1, way.rows // 2)
    _swiglu_gemv_kernel[(triton.cdiv(inter, rows),)](
        x, x.stride(0), gate_up.raw, gate_up.scales, out, out.stride(0), gate_up.k, limit,
        INTER=inter, K=gate_up.k, T=x.shape[0], ROWS=rows,
        KIND=gate_up.kind.value, SCALE_ROWS=gate_up.scale_rows,
        LANES=way.lanes, AHEAD=way.ahead, EAGER=way.eager, HARDWARE=has_e4m3(x.device), PTX=PTX,
        num_warps=way.warps, enable_fp_fusion=False,
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
    norm: NormOf | None = None,
    tile: GemvTile | None = None,
) -> None:
    n = rows.heads * rows.count
    way = _way(weight, x, tile or tile_for(n, weight.k, weight.kind, x.shape[0]))
    grid = (triton.cdiv(rows.count, way.rows), rows.heads)
    columns = 0 if norm is None else norm.weight.shape[0]
    _gemv_kernel[grid](
        x, x.stride(0), weight.raw, weight.scales, bias, residual,
        0 if residual is None else residual.stride(0), out, out.stride(0), weight.k,
        *((None, 0.0, None, 0, None) if norm is None else
          (norm.weight, norm.eps, norm.out, norm.out.stride(0), norm.arrived)),
        NORMED=columns, BLOCK=triton.next_power_of_2(max(columns, 1)),
        COUNT=rows.count, K=weight.k, FIRST=rows.first, PITCH=rows.pitch, HEAD_X=x_pitch,
        T=x.shape[0], ROWS=way.rows, KIND=weight.kind.value, SCALE_ROWS=weight.scale_rows,
        LANES=way.lanes, AHEAD=way.ahead, EAGER=way.eager, HARDWARE=has_e4m3(x.device), PTX=PTX,
        num_warps=way.warps, enable_fp_fusion=False,
    )  # fmt: skip


def _gated_tile(gate_up: DenseWeight, x: Tensor) -> GemvTile:
    return tile_for(gate_up.n, gate_up.k, gate_up.kind, x.shape[0], gated=True)


def _way(weight: DenseWeight, x: Tensor, tile: GemvTile) -> Way:
    return way_of(weight.k, weight.kind, x.shape[0], tile)


def _check_rows(x: Tensor, k: int) -> None:
    if x.stride(0) % 4:
        raise ValueError(f"rows of x lie {x.stride(0)} numbers apart, no multiple of 4")
    if not 1 <= x.shape[0] <= MAX_ROWS or x.shape[-1] != k:
        raise ValueError(f"x {tuple(x.shape)} is not 1..{MAX_ROWS} rows of {k}")
