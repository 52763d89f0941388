"""The gated delta rule on a device, a token at a time, and what stands before and behind it.

Twins: `reference.causal_conv`, `delta_unit`, `delta_decay` and `delta_step`. Many tokens at once
are in `delta_chunk`. Launchers allocate nothing. Called on the engine thread.

A sequence has one matrix per head, behind `length - pending` tokens, and a ring of what its last
tokens added: how much stays, the key, and the change. A launch first applies the pending ones of
those, which moves the matrix up to `length`, then goes on in registers through the new rows, whose
parts it leaves in the ring. So a sequence can go back to any length from the newest launch's
beginning on, and going back costs nothing. Applying a part from the ring gives the bits that the
row itself had: both are a rounded product and one fused addition.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kv_sizes import DELTA_RING, MOST_PENDING
from moet_desk.kernels.triton.gates import sigmoid, silu
from moet_desk.kernels.triton.numbers import loop_bound
from moet_desk.kernels.triton.portable import PTX, product

RING = DELTA_RING

RUN_COLUMNS = 4
"""Of a row in the table of runs: slot, pending parts, rows of the run before it, rows of the run.
"""

_UNIT_EPS = 1e-6
_COLUMNS = 32  # of a matrix in one program: 128 programs for 32 heads of 128


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads of a layer: M of queries and keys, N of values, and their widths."""

    n_keys: int
    n_values: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Of the convolution (C): queries, keys and values of all heads."""
        return 2 * self.n_keys * self.key_dim + self.n_values * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaMemory:
    """States of one layer, float32; S slots.

    Attributes:
        matrices: [S, N, dk, dv].
        inputs: [S, RING, C], of the convolution.
        keys: [S, RING, M, dk]; deltas: [S, RING, N, dv]; kept: [S, RING, N]: what tokens added.
    """

    matrices: Tensor
    inputs: Tensor
    keys: Tensor
    deltas: Tensor
    kept: Tensor

    def slot(self, slot: int) -> DeltaMemory:
        """A view of one slot."""
        own = slice(slot, slot + 1)
        return DeltaMemory(
            self.matrices[own], self.inputs[own], self.keys[own], self.deltas[own], self.kept[own]
        )


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Rows of a launch and the states they belong to.

    Attributes:
        memory: of the layer.
        runs: int32 [T, RUN_COLUMNS]. The rows of a sequence follow each other.
        positions: int32 [T], of each row.
    """

    memory: DeltaMemory
    runs: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Small weights of a layer, float32.

    Attributes:
        conv: [C, kernel].
        rate: [N], -exp(A); dt_bias: [N].
    """

    conv: Tensor
    rate: Tensor
    dt_bias: Tensor


@triton.jit
def log_decay(a, rate, dt_bias):
    """rate * softplus(a + dt_bias). The hardware's logarithm is poor near 1, so log(1 + y) is
    2 atanh(y / (2 + y)), whose argument is at most 1/3.
    """
    x = a + dt_bias
    y = tl.exp(-tl.abs(x))
    z = tl.div_rn(y, 2.0 + y)
    square = z * z
    series = square * 0.0 + 1.0 / 17.0
    for term in tl.static_range(8):
        series = series * square + 1.0 / (15 - 2 * term)
    return rate * (tl.maximum(x, 0.0) + 2.0 * z * series)


@triton.jit
def _conv_kernel(
    joined,
    joined_stride,
    weight,
    inputs,
    runs,
    runs_stride,
    positions,
    out,
    scale,
    eps,
    M: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    KERNEL: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    t = tl.program_id(0)
    head = tl.program_id(1)
    if WHOLE:  # all rows are one run, whose inputs are kept by another launch
        run = runs
        ahead = t
    else:
        run = runs + t * runs_stride
        ahead = tl.load(run + 2)
    slot = tl.load(run).to(tl.int64)
    position = tl.load(positions + t)
    is_value = head >= 2 * M
    column = tl.arange(0, BLOCK)
    inside = column < tl.where(is_value, DV, DK)
    channel = tl.where(is_value, 2 * M * DK + (head - 2 * M) * DV, head * DK) + column
    line = joined + t.to(tl.int64) * joined_stride + channel
    x = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(KERNEL):
        age = KERNEL - 1 - i
        here = age <= ahead
        near = tl.load(line - age * joined_stride, mask=inside & here, other=0.0)
        place = (position + RING - age) % RING
        seen = inside & (age > ahead) & (position >= age)
        far = tl.load(inputs + (slot * RING + place) * C + channel, mask=seen, other=0.0)
        w = tl.load(weight + channel * KERNEL + i, mask=inside, other=0.0)
        x += tl.where(here, near, far) * w
    if not WHOLE:
        newest = tl.load(line, mask=inside, other=0.0)
        tl.store(inputs + (slot * RING + position % RING) * C + channel, newest, mask=inside)
    x = tl.where(inside, silu(x), 0.0)
    unit = x * tl.rsqrt(tl.sum(x * x, 0) + eps)
    x = tl.where(is_value, x, tl.where(head < M, unit * scale, unit))
    tl.store(out + t.to(tl.int64) * C + channel, x, mask=inside)


@triton.jit
def _applied(state, kept, k, d, PTX: tl.constexpr):
    """kept * state + k d^T, the product rounded: the same bits wherever it is computed."""
    shape: tl.constexpr = state.shape
    decayed = product(state, tl.broadcast_to(kept, shape), PTX)
    k = tl.broadcast_to(k[:, None], shape)
    return tl.fma(k, tl.broadcast_to(d[None, :], shape), decayed)


@triton.jit
def _over_keys(vector, matrix, PTX: tl.constexpr):
    """vector^T matrix."""
    return tl.sum(product(tl.broadcast_to(vector[:, None], matrix.shape), matrix, PTX), 0)


@triton.jit
def _delta_step_kernel(
    mixed,
    beta_decay,
    bd_stride,
    rate,
    dt_bias,
    matrices,
    keys,
    deltas,
    kept,
    runs,
    runs_stride,
    positions,
    out,
    M: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    RING: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PTX: tl.constexpr,
):
    SHARE: tl.constexpr = N // M
    C: tl.constexpr = 2 * M * DK + N * DV
    t = tl.program_id(0)
    n = tl.program_id(1)
    m = n // SHARE
    run = runs + t * runs_stride
    if tl.load(run + 2) == 0:  # the first row of a run does all of them
        slot = tl.load(run).to(tl.int64)
        pending = tl.load(run + 1)
        count = tl.load(run + 3)
        length = tl.load(positions + t)
        i = tl.arange(0, BK)
        j = tl.program_id(2) * BV + tl.arange(0, BV)
        inside = (i < DK)[:, None] & (j < DV)[None, :]
        at = matrices + (slot * N + n) * (DK * DV) + i[:, None] * DV + j[None, :]
        state = tl.load(at, mask=inside & (length > pending), other=0.0)
        for p in range(0, loop_bound(pending, PTX)):
            line = slot * RING + (length - pending + p) % RING
            k = tl.load(keys + (line * M + m) * DK + i, mask=i < DK, other=0.0)
            d = tl.load(deltas + (line * N + n) * DV + j, mask=j < DV, other=0.0)
            state = _applied(state, tl.load(kept + line * N + n), k, d, PTX)
        if pending > 0:
            tl.store(at, state, mask=inside)
        for r in range(0, loop_bound(count, PTX)):
            row = mixed + (t + r).to(tl.int64) * C
            q = tl.load(row + m * DK + i, mask=i < DK, other=0.0)
            k = tl.load(row + (M + m) * DK + i, mask=i < DK, other=0.0)
            v = tl.load(row + 2 * M * DK + n * DV + j, mask=j < DV, other=0.0)
            gates = beta_decay + (t + r).to(tl.int64) * bd_stride + n
            beta = sigmoid(tl.load(gates))
            stays = tl.exp(log_decay(tl.load(gates + N), tl.load(rate + n), tl.load(dt_bias + n)))
            decayed = product(state, tl.broadcast_to(stays, state.shape), PTX)
            d = product(v - _over_keys(k, decayed, PTX), tl.broadcast_to(beta, v.shape), PTX)
            state = _applied(state, stays, k, d, PTX)
            y = _over_keys(q, state, PTX)
            tl.store(out + ((t + r).to(tl.int64) * N + n) * DV + j, y, mask=j < DV)
            line = slot * RING + (length + r) % RING
            tl.store(deltas + (line * N + n) * DV + j, d, mask=j < DV)
            first = tl.program_id(2) == 0
            tl.store(kept + line * N + n, stays, mask=first)
            own = (i < DK) & first & (n % SHARE == 0)
            tl.store(keys + (line * M + m) * DK + i, k, mask=own)


@triton.jit
def _gated_norm_kernel(
    x,
    gate,
    gate_stride,
    weight,
    eps,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < D
    at = x + (t * N + n) * D + column
    row = tl.load(at, mask=inside, other=0.0)
    z = tl.load(gate + t * gate_stride + n * D + column, mask=inside, other=0.0)
    w = tl.load(weight + column, mask=inside, other=0.0)
    normed = row * tl.rsqrt(tl.sum(row * row, 0) / D + eps) * w
    tl.store(at, normed * silu(z), mask=inside)


def delta_conv(
    joined: Tensor, weights: DeltaWeights, rows: DeltaRows, out: Tensor, shape: DeltaShape, *,
    whole: bool = False,
) -> None:  # fmt: skip
    """Queries (scaled), keys, both of length 1, and values of each row.

    The rows' inputs are kept in the ring, but for `whole`: then all rows are one run, whatever the
    table of runs says but for the slot, and `keep_inputs` must follow.

    Shapes:
        joined [T, >= C] float32 (rows may lie apart), out [T, C] float32
    """
    memory, kernel = rows.memory, weights.conv.shape[1]
    heads = 2 * shape.n_keys + shape.n_values
    _conv_kernel[(joined.shape[0], heads)](
        joined, joined.stride(0), weights.conv, memory.inputs, rows.runs, rows.runs.stride(0),
        rows.positions, out, shape.key_dim**-0.5, _UNIT_EPS,
        M=shape.n_keys, DK=shape.key_dim, DV=shape.value_dim, C=shape.channels, KERNEL=kernel,
        RING=RING, BLOCK=triton.next_power_of_2(max(shape.key_dim, shape.value_dim)),
        WHOLE=whole, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def keep_inputs(joined: Tensor, rows: DeltaRows, slot: int) -> None:
    """Keep the last inputs of rows that were one run; not for a captured step.

    Shapes:
        joined [T, C] float32 (rows may lie apart)
    """
    last = slice(max(0, joined.shape[0] - MOST_PENDING), joined.shape[0])
    places = (rows.positions[last] % RING).long()
    rows.memory.inputs[slot].index_copy_(0, places, joined[last])


def delta_step(
    mixed: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    rows: DeltaRows,
    out: Tensor,
    shape: DeltaShape,
) -> None:
    """The delta rule for up to 8 rows, or, for a run of none, what is pending alone.

    Shapes:
        mixed [T, C] float32 from `delta_conv`; gates [T, 2N] float32 (rows may lie apart): of beta,
        then of the decay; out [T, N, dv] float32
    """
    memory = rows.memory
    columns = min(_COLUMNS, triton.next_power_of_2(shape.value_dim))
    grid = (rows.runs.shape[0], shape.n_values, triton.cdiv(shape.value_dim, columns))
    _delta_step_kernel[grid](
        mixed, gates, gates.stride(0), weights.rate, weights.dt_bias,
        memory.matrices, memory.keys, memory.deltas, memory.kept,
        rows.runs, rows.runs.stride(0), rows.positions, out,
        M=shape.n_keys, N=shape.n_values, DK=shape.key_dim, DV=shape.value_dim, RING=RING,
        BK=triton.next_power_of_2(shape.key_dim), BV=columns, PTX=PTX,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> None:
    """x = rms_norm(x) * weight * silu(gate), of each head.

    Shapes:
        x [T, N, D] float32, gate [T, N * D] float32 (rows may lie apart), weight [D] float32
    """
    rows, n, d = x.shape
    _gated_norm_kernel[(rows, n)](
        x, gate, gate.stride(0), weight, eps, N=n, D=d, BLOCK=triton.next_power_of_2(d),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
