"""A row's entries in parts that programs attend to side by side, and how the parts are joined.

Owns how long a part is, where partial results lie, and their sum. A row's entries are cut into at
most `SPLITS` parts of 64 * 2**k entries, k as small as that row's own visible length allows; each
part is one program's, and parts are joined in order. So a row's bits depend on its own entries
alone, whatever other rows and whatever lengths are in the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.numbers import halving_rows, loop_bound
from moet_desk.kernels.triton.portable import INTERPRETED

SPLITS = 64
"""Most parts of a row's entries."""

SHORTEST_PART = 64
"""Entries of a part while 64 of them are enough: 256 programs for 64 heads at 4k entries."""

NO_WINDOW = 1 << 30
"""Entries of a window that nothing lies outside of."""

_JOIN_FLOATS, _JOIN_WARPS, _JOIN_AHEAD = 128, 1, 8
"""A program of `join`: a float4 per thread, and parts that are read at once."""


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Partial results of splits, made once for the widest layer of a step.

    Attributes:
        sums: float32 [T * SPLITS * N * width], weighted sums of values.
        stats: float32 [T * SPLITS * N * 2], largest score and sum of weights.
    """

    sums: Tensor
    stats: Tensor

    @classmethod
    def make(cls, rows: int, heads: int, width: int, *, device: torch.device) -> DecodeScratch:
        """Room for `rows` rows of `heads` heads whose values have `width` numbers."""
        size = rows * SPLITS * heads
        return cls(
            torch.empty(size * width, dtype=torch.float32, device=device),
            torch.empty(size * 2, dtype=torch.float32, device=device),
        )

    def check(self, rows: int, heads: int, width: int, splits: int = SPLITS) -> None:
        """Refuse work that does not fit.

        Raises:
            ValueError: there is too little room.
        """
        size = rows * splits * heads
        if self.sums.numel() < size * width or self.stats.numel() < size * 2:
            raise ValueError(f"no room for {rows} rows of {heads} heads of {width}")


@triton.jit
def part_length(span, SPLITS: tl.constexpr, SHORTEST: tl.constexpr):
    """Entries of each part of `span` entries: SHORTEST * 2**k, with the least k that is enough."""
    times = tl.maximum(span - 1, 0) // (SHORTEST * SPLITS)  # k is how many bits this has
    exponent = times.to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return (span * 0 + SHORTEST) << tl.maximum(exponent - 126, 0)


@triton.jit
def joined_parts(
    sums,
    stats,
    span,
    sink,
    t,
    head,
    n,
    column0,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    BW: tl.constexpr,
    AHEAD: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """What a row's head mixed of `span` entries, numbers from `column0` on: [BW]."""
    column = column0 + tl.arange(0, BW)
    part = part_length(span, SPLITS, SHORTEST)
    parts = (span + part - 1) // part
    split = tl.arange(0, SPLITS)
    row = (t * SPLITS + split) * n + head
    largest = tl.load(stats + row * 2, mask=split < parts, other=float("-inf"))
    total = tl.load(stats + row * 2 + 1, mask=split < parts, other=0.0)
    top = tl.max(largest, 0)
    if sink is not None:
        logit = tl.load(sink + head).to(tl.float32)
        top = tl.maximum(top, logit)
    total = tl.sum(halving_rows((total * tl.exp(largest - top))[:, None], SPLITS, 1), 0)
    if sink is not None:
        total += tl.exp(logit - top)
    mixed = tl.zeros([BW], tl.float32)
    first = t * SPLITS * n + head
    # One part after another, and as many reads at once as registers allow.
    for s0 in range(0, loop_bound(parts, COMPILED), AHEAD):
        pieces = ()
        for i in tl.static_range(AHEAD):
            live = s0 + i < parts
            line = first + (s0 + i) * n
            at = line.to(tl.int64) * WIDTH + column
            most = tl.load(stats + line * 2, mask=live, other=float("-inf"))
            piece = tl.load(sums + at, mask=live & (column < WIDTH), other=0.0)
            pieces = pieces + (piece, tl.exp(most - top))
        for i in tl.static_range(AHEAD):
            mixed += pieces[2 * i] * pieces[2 * i + 1]
    return mixed / total


@triton.jit
def _join_kernel(
    sums,
    stats,
    lengths,
    window,
    sink,
    out,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    BW: tl.constexpr,
    AHEAD: tl.constexpr,
    COMPILED: tl.constexpr,
):
    head = tl.program_id(1)
    n = tl.num_programs(1)
    t = tl.program_id(2)
    column0 = tl.program_id(0) * BW
    span = tl.minimum(tl.load(lengths + t), window)
    mixed = joined_parts(
        sums, stats, span, sink, t, head, n, column0, WIDTH, SPLITS, SHORTEST, BW, AHEAD, COMPILED
    )
    column = column0 + tl.arange(0, BW)
    tl.store(out + (t * n + head) * WIDTH + column, mixed, mask=column < WIDTH)


def most_parts(
    kv: KvPages, window: int = NO_WINDOW, splits: int = SPLITS, shortest: int = SHORTEST_PART
) -> int:
    """Parts that the longest row with these page tables can have."""
    most = min(kv.table.shape[1] * kv.page_tokens, window)
    return min(splits, -(-most // shortest))


def join_parts(
    scratch: DecodeScratch,
    lengths: Tensor,
    out: Tensor,
    *,
    width: int,
    window: int = NO_WINDOW,
    sink: Tensor | None = None,
) -> None:
    """Sum what the parts of each row's heads mixed, with the sinks' share of nothing.

    Shapes:
        lengths [T] int32; sink [N] bfloat16 or float32; out [T, N, width] float32
    """
    rows, n = out.shape[:2]
    block = min(_JOIN_FLOATS, triton.next_power_of_2(width))
    _join_kernel[(triton.cdiv(width, block), n, rows)](
        scratch.sums, scratch.stats, lengths, window, sink, out,
        WIDTH=width, SPLITS=SPLITS, SHORTEST=SHORTEST_PART, BW=block, AHEAD=_JOIN_AHEAD,
        COMPILED=not INTERPRETED, num_warps=_JOIN_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
