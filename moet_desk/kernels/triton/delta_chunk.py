"""The gated delta rule over many tokens of one sequence, in blocks (arXiv 2412.06464, §3.2).

Twin: `reference.delta_chunk`. Within a block the tokens' changes depend on each other by a
triangular system. What that needs of the state is known beforehand, so a first launch inverts the
systems of all blocks at the same time, and a second one walks along the blocks with the state in
registers. Launchers allocate nothing. Called on the engine thread.

The inverse is built row by row: keys that repeat make the powers of a series grow without bound
before they cancel.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.triton.delta import DeltaShape, DeltaWeights, log_decay
from moet_desk.kernels.triton.gates import sigmoid
from moet_desk.kernels.triton.numbers import loop_bound
from moet_desk.kernels.triton.portable import INTERPRETED

BLOCK = 64
"""Tokens of a block, as `reference.DELTA_BLOCK`."""

_COLUMNS, _WARPS = 32, 8  # of a state in one program, and its warps


@dataclass(frozen=True, slots=True)
class DeltaScratch:
    """Room for R rows, in whole blocks; float32.

    Attributes:
        changes: [R, N, dv], what the tokens add while the state is nothing; then the outputs.
        reads: [R, N, dk], what they take of the state.
        seen: [R / BLOCK, N, BLOCK, BLOCK], products of queries with keys before them.
        passed: [R, N], logarithm of what stays from the block's beginning on.
    """

    changes: Tensor
    reads: Tensor
    seen: Tensor
    passed: Tensor


@triton.jit
def _dot(a, b, MMA: tl.constexpr):
    """As close as float32."""
    if MMA:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _rows(first, R, T: tl.constexpr):
    """Which of a block's rows there are, and their numbers; those that are not there read row 0."""
    row = first + tl.arange(0, T)
    live = row < R
    return live, tl.where(live, row, 0).to(tl.int64)


@triton.jit(do_not_specialize=["R"])
def _solve_kernel(
    mixed,
    beta_decay,
    bd_stride,
    rate,
    dt_bias,
    changes,
    reads,
    seen,
    passed_out,
    R,
    M: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    T: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    MMA: tl.constexpr,
):
    C: tl.constexpr = 2 * M * DK + N * DV
    block = tl.program_id(0)
    n = tl.program_id(1)
    m = n // (N // M)
    t = tl.arange(0, T)
    live, row = _rows(block * T, R, T)
    line = mixed + row[:, None] * C
    gates = beta_decay + row * bd_stride + n
    beta = tl.where(live, sigmoid(tl.load(gates)), 0.0)
    decay = log_decay(tl.load(gates + N), tl.load(rate + n), tl.load(dt_bias + n))
    passed = tl.cumsum(tl.where(live, decay, 0.0), 0)
    at = row * N + n
    tl.store(passed_out + at, passed, mask=live)
    i = tl.arange(0, BK)
    mask = live[:, None] & (i < DK)[None, :]
    k = tl.load(line + (M + m) * DK + i[None, :], mask=mask, other=0.0)
    # later tokens are columns: a token's row of the system is then a column over earlier ones
    between = tl.exp(tl.minimum(passed[None, :] - passed[:, None], 0.0))
    product = _dot(k, tl.trans(k), MMA)
    system = tl.where(t[:, None] < t[None, :], product * between * beta[None, :], 0.0)
    inverse = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    for r in range(1, loop_bound(tl.minimum(R - block * T, T), MMA)):
        own = tl.sum(tl.where(t[None, :] == r, system, 0.0), 1)
        new = tl.sum(own[:, None] * inverse, 0)
        inverse -= tl.where(t[:, None] == r, new[None, :], 0.0)
    taken = _dot(inverse, k * (beta * tl.exp(passed))[:, None], MMA)
    tl.store(reads + at[:, None] * DK + i[None, :], taken, mask=mask)
    for j0 in tl.static_range(0, DV, BV):
        j = j0 + tl.arange(0, BV)
        inside = live[:, None] & (j < DV)[None, :]
        v = tl.load(line + 2 * M * DK + n * DV + j[None, :], mask=inside, other=0.0)
        change = _dot(inverse, v * beta[:, None], MMA)
        tl.store(changes + at[:, None] * DV + j[None, :], change, mask=inside)
    q = tl.load(line + m * DK + i[None, :], mask=mask, other=0.0)
    back = tl.exp(tl.minimum(passed[:, None] - passed[None, :], 0.0))
    scores = tl.where(t[:, None] >= t[None, :], _dot(q, tl.trans(k), MMA) * back, 0.0)
    to = seen + ((block * N + n).to(tl.int64) * T + t[:, None]) * T + t[None, :]
    tl.store(to, scores)


@triton.jit(do_not_specialize=["R", "slot", "start"])
def _scan_kernel(
    mixed,
    changes,
    reads,
    seen,
    passed_in,
    matrices,
    R,
    slot,
    start,
    M: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    T: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    MMA: tl.constexpr,
):
    C: tl.constexpr = 2 * M * DK + N * DV
    n = tl.program_id(0)
    m = n // (N // M)
    t = tl.arange(0, T)
    i = tl.arange(0, BK)
    j = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = (i < DK)[:, None] & (j < DV)[None, :]
    home = matrices + (slot.to(tl.int64) * N + n) * (DK * DV) + i[:, None] * DV + j[None, :]
    state = tl.load(home, mask=inside & (start > 0), other=0.0)
    for first in range(0, loop_bound(R, MMA), T):
        live, row = _rows(first, R, T)
        at = row * N + n
        passed = tl.load(passed_in + at, mask=live, other=0.0)
        last = tl.min(passed, 0)  # it only falls
        wide = live[:, None] & (i < DK)[None, :]
        taken = tl.load(reads + at[:, None] * DK + i[None, :], mask=wide, other=0.0)
        own = live[:, None] & (j < DV)[None, :]
        to = changes + at[:, None] * DV + j[None, :]
        delta = tl.load(to, mask=own, other=0.0) - _dot(taken, state, MMA)
        line = mixed + row[:, None] * C + i[None, :]
        q = tl.load(line + m * DK, mask=wide, other=0.0)
        out = _dot(q * tl.exp(passed)[:, None], state, MMA)
        near = seen + ((first // T * N + n).to(tl.int64) * T + t[:, None]) * T + t[None, :]
        out += _dot(tl.load(near), delta, MMA)
        k = tl.load(line + (M + m) * DK, mask=wide, other=0.0)
        left = tl.where(live, tl.exp(last - passed), 0.0)
        state = state * tl.exp(last) + _dot(tl.trans(k * left[:, None]), delta, MMA)
        tl.store(to, out, mask=own)
    tl.store(home, state, mask=inside)


def delta_chunk(
    mixed: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    matrices: Tensor,
    shape: DeltaShape,
    *,
    slot: int,
    start: int,
    scratch: DeltaScratch,
) -> None:
    """The delta rule for R rows of one sequence; what they read is then in `scratch.changes`.

    The matrix of `slot` moves on by R tokens, whatever is pending in its ring. With a `start` of 0
    there was nothing before.

    Shapes:
        mixed [R, C] float32 from `delta_conv`; gates [R, 2N] float32 (rows may lie apart): of beta,
        then of the decay; matrices [S, N, dk, dv] float32
    """
    rows, n = mixed.shape[0], shape.n_values
    wide = max(16, triton.next_power_of_2(shape.key_dim))
    columns = min(_COLUMNS, max(16, triton.next_power_of_2(shape.value_dim)))
    form = {
        "M": shape.n_keys, "N": n, "DK": shape.key_dim, "DV": shape.value_dim, "T": BLOCK,
        "BK": wide, "BV": columns, "MMA": not INTERPRETED, "num_warps": _WARPS, "num_stages": 1,
    }  # fmt: skip
    between = (scratch.changes, scratch.reads, scratch.seen, scratch.passed)
    _solve_kernel[(triton.cdiv(rows, BLOCK), n)](
        mixed, gates, gates.stride(0), weights.rate, weights.dt_bias,
        *between, rows, **form,
    )  # fmt: skip
    _scan_kernel[(n, triton.cdiv(shape.value_dim, columns))](
        mixed, *between, matrices, rows, slot, start, **form
    )
