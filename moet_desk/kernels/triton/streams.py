"""Hyper-connections: residual streams read, mixed and written to around a block.

Twins: `reference.connections` with `block_input` and `after`, and `reference.collapse`. A token's
products are cut into parts whose number follows from the widths alone, and its programs read that
token alone, so its bits do not depend on the others. Launchers allocate nothing and ask the device
nothing, so they can be captured. Called on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS, _TURNS = 128, 4
"""Columns of all streams that a program multiplies at a time, and how often."""

_WIDE = 256
"""Numbers of each stream that a program mixes."""


@triton.jit
def _project_kernel(
    streams,
    project,
    parts,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNS: tl.constexpr,
):
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, R)
    total = tl.zeros((R,), tl.float32)
    for turn in tl.static_range(TURNS):  # so that all reads are asked for at once
        column = (part * TURNS + turn) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < K
        x = tl.load(streams + t * K + column, mask=inside, other=0.0)
        here = (row < ROWS)[:, None] & inside[None, :]
        w = tl.load(project + row[:, None] * K + column[None, :], mask=here, other=0.0)
        w = tl.where((row == ROWS)[:, None], x[None, :], w)  # behind the products: the squares
        total += tl.sum(w * x[None, :], 1)
    to = parts + (t * tl.num_programs(1) + part) * (ROWS + 1) + row
    tl.store(to, total, mask=row <= ROWS)


@triton.jit
def _summed(parts, at, here):
    """Sum over the parts of a token, the first dim."""
    return tl.sum(tl.load(parts + at, mask=here, other=0.0), 0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _connect_kernel(
    parts,
    base,
    scale,
    out,
    eps,
    norm_eps,
    N_PARTS: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, P)
    at = t * (N_PARTS * (ROWS + 1)) + part * (ROWS + 1)
    squares = _summed(parts, at + ROWS, part < N_PARTS)
    factor = tl.rsqrt(squares / K + norm_eps)
    n = tl.arange(0, N)
    here = (part < N_PARTS)[:, None] & (n < N)[None, :]
    out += t * ROWS
    read = _summed(parts, at[:, None] + n[None, :], here) * factor
    read = _sigmoid(read * tl.load(scale) + tl.load(base + n)) + eps
    tl.store(out + n, read)
    if ROWS > N:
        write = _summed(parts, at[:, None] + N + n[None, :], here) * factor
        write = 2.0 * _sigmoid(write * tl.load(scale + 1) + tl.load(base + N + n))
        tl.store(out + N + n, write)
        cell = 2 * N + n[:, None] * N + n[None, :]
        every = here[:, :, None] & (n < N)[None, None, :]
        mix = _summed(parts, at[:, None, None] + cell[None, :, :], every) * factor
        mix = mix * tl.load(scale + 2) + tl.load(base + cell)
        mix = tl.exp(mix - tl.max(mix, 1)[:, None])
        mix = mix / tl.sum(mix, 1)[:, None] + eps
        mix = mix / (tl.sum(mix, 0)[None, :] + eps)
        for _ in range(STEPS - 1):
            mix = mix / (tl.sum(mix, 1)[:, None] + eps)
            mix = mix / (tl.sum(mix, 0)[None, :] + eps)
        tl.store(out + cell, mix)


@triton.jit
def _read_kernel(
    streams,
    made,
    out,
    H: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = (n < N)[:, None] & (column < H)[None, :]
    x = tl.load(streams + (t * N + n[:, None]) * H + column[None, :], mask=inside, other=0.0)
    read = tl.load(made + t * ROWS + n)
    tl.store(out + t * H + column, tl.sum(x * read[:, None], 0), mask=column < H)


@triton.jit
def _after_kernel(
    streams,
    made,
    y,
    H: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = (n < N)[:, None] & (column < H)[None, :]
    at = streams + (t * N + n[:, None]) * H + column[None, :]
    x = tl.load(at, mask=inside, other=0.0)
    made += t * ROWS
    mix = tl.load(made + 2 * N + n[:, None] * N + n[None, :])  # from, to
    block = tl.load(y + t * H + column, mask=column < H, other=0.0)
    mixed = tl.sum(mix[:, :, None] * x[:, None, :], 0)
    write = tl.load(made + N + n)
    tl.store(at, write[:, None] * block[None, :] + mixed, mask=inside)


@dataclass(frozen=True, slots=True)
class StreamScratch:
    """What connections are made in; the next block may use it again.

    Attributes:
        parts: [T, parts, rows + 1] float32.
        made: [T, rows] float32: of each token what reads, what writes, and the mix (from, to).
    """

    parts: Tensor
    made: Tensor

    @classmethod
    def make(cls, rows: int, n: int, hidden: int, device: torch.device) -> StreamScratch:
        """For up to `rows` tokens."""
        most = 2 * n + n * n
        return cls(
            torch.empty((rows, _n_parts(n * hidden), most + 1), device=device),
            torch.empty((rows, most), device=device),
        )


def connect(
    streams: Tensor,
    project: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    steps: int,
    eps: float,
    norm_eps: float,
    scratch: StreamScratch,
) -> None:
    """Make the connections of a block, or of the end of all layers, whose `project` has N rows.

    Shapes:
        streams [T, N, H], N a power of two; project [2N + N*N or N, N*H], base of as many rows,
        scale [3] or [1], all float32; leaves `scratch.made`
    """
    n_rows, n = streams.shape[:2]
    rows, width = project.shape
    n_parts = _n_parts(width)
    _project_kernel[(n_rows, n_parts)](
        streams, project, scratch.parts, K=width, ROWS=rows, R=triton.next_power_of_2(rows + 1),
        COLUMNS=_COLUMNS, TURNS=_TURNS, num_warps=4,
    )  # fmt: skip
    _connect_kernel[(n_rows,)](
        scratch.parts, base, scale, scratch.made, eps, norm_eps, N_PARTS=n_parts,
        P=triton.next_power_of_2(n_parts), K=width, N=n, STEPS=steps, ROWS=rows,
        num_warps=1,  # its many small sums then need no barrier
    )  # fmt: skip


def block_input(streams: Tensor, rows: int, *, scratch: StreamScratch, out: Tensor) -> None:
    """What a block reads, before its norm; `rows` of its `project`.

    Shapes:
        streams [T, N, H], out [T, H], float32
    """
    n_tokens, n, hidden = streams.shape
    _read_kernel[(n_tokens, triton.cdiv(hidden, _WIDE))](
        streams, scratch.made, out, H=hidden, N=n, ROWS=rows, WIDE=_WIDE, num_warps=4,
    )  # fmt: skip


def write_back(streams: Tensor, y: Tensor, *, scratch: StreamScratch) -> None:
    """The streams behind a block, in place.

    Shapes:
        streams [T, N, H], the block's output y [T, H], float32
    """
    n_tokens, n, hidden = streams.shape
    _after_kernel[(n_tokens, triton.cdiv(hidden, _WIDE))](
        streams, scratch.made, y, H=hidden, N=n, ROWS=2 * n + n * n, WIDE=_WIDE, num_warps=4,
    )  # fmt: skip


def _n_parts(width: int) -> int:
    return -(-width // (_COLUMNS * _TURNS))
