"""What the rows of a step see of shared attention, and where what they add goes.

Twin: `reference.seen_entries`. A layer's memory of entries begins with a ring for each slot, in
which the entry of position p lies at p modulo the ring; the pooled entries' pages lie behind the
rings. A list names entries of both, so that attention reads it as a page table of pages of one.
Where things lie follows from slot and position alone: nothing is undone when a row was a wrong
guess, its places are written over. Launchers allocate nothing and ask the device nothing, so they
can be captured. Called on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.kv_sizes import POOL_STATES
from moet_desk.kernels.triton.kv_entries import KvPages

_ROWS, _LISTED = 64, 256
"""Rows whose places, and entries of a list, that a program finds."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows of a launch find and leave things, int32.

    Attributes:
        sources, targets: [T], slots of the sums of open windows before and behind each row.
        rings: [T], first entry of the ring of each row's sequence.
        closed: [T], windows with an indexer that are closed behind each row.
        positions: [T].
    """

    sources: Tensor
    targets: Tensor
    rings: Tensor
    closed: Tensor
    positions: Tensor

    @classmethod
    def make(cls, rows: int, device: torch.device) -> Places:
        """For up to `rows` rows."""
        made = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(5))
        return cls(*made)

    def of(self, rows: slice) -> Places:
        """Those of some rows, views."""
        return Places(
            self.sources[rows], self.targets[rows], self.rings[rows], self.closed[rows],
            self.positions[rows],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pooled:
    """Which pooled entries rows see.

    Attributes:
        kv: their pages, with each row's table; an entry of more tokens than a page has lies on the
            first of as many pages.
        ratio: tokens of an entry.
        spread: pages of one.
        first: entries before these pages in the layer's memory.
    """

    kv: KvPages
    ratio: int
    spread: int
    first: int


@triton.jit
def _places_kernel(
    runs,
    runs_stride,
    positions,
    sources,
    targets,
    rings,
    closed,
    held,
    n_rows,
    KEPT: tl.constexpr,
    RING: tl.constexpr,
    RATIO: tl.constexpr,
    B: tl.constexpr,
):
    t = tl.program_id(0) * B + tl.arange(0, B)
    inside = t < n_rows
    slot = tl.load(runs + t * runs_stride, mask=inside, other=0)
    position = tl.load(positions + t, mask=inside, other=0)
    tl.store(sources + t, slot * KEPT + position % KEPT, mask=inside)
    tl.store(targets + t, slot * KEPT + (position + 1) % KEPT, mask=inside)
    tl.store(rings + t, slot * RING, mask=inside)
    tl.store(closed + t, (position + 1) // RATIO, mask=inside)
    tl.store(held + t, position, mask=inside)


@triton.jit
def _list_kernel(
    positions,
    rings,
    table,
    table_stride,
    listed,
    listed_stride,
    lengths,
    first,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    SPREAD: tl.constexpr,
    B: tl.constexpr,
):
    t = tl.program_id(1)
    position = tl.load(positions + t)
    n_near = tl.minimum(position + 1, WINDOW)
    n_far = position * 0 if RATIO == 0 else (position + 1) // RATIO
    at = tl.program_id(0) * B + tl.arange(0, B)
    near = at < n_near
    entry = tl.load(rings + t) + (position + 1 - n_near + at) % RING
    if RATIO > 0:
        number = tl.where(near, 0, at - n_near)
        far = (at >= n_near) & (number < n_far)
        page = number // PAGE * SPREAD
        other = tl.load(table + t * table_stride + page, mask=far, other=0) * PAGE
        other += number % PAGE
        entry = tl.where(near, entry, first + other)
    tl.store(listed + t * listed_stride + at, entry, mask=at < n_near + n_far)
    if tl.program_id(0) == 0:
        tl.store(lengths + t, n_near + n_far)


def find_places(runs: Tensor, positions: Tensor, places: Places, *, ring: int, ratio: int) -> None:
    """Where the rows of a launch find and leave things.

    Args:
        runs: int32 [T, columns], each row's slot first; a stride of 0 gives all rows one.
        positions: int32 [T].
        places: gets them.
        ring: entries of a slot's ring.
        ratio: tokens of a window with an indexer; 1 where there is none.
    """
    rows = positions.shape[0]
    _places_kernel[(triton.cdiv(rows, _ROWS),)](
        runs, runs.stride(0), positions, places.sources, places.targets, places.rings,
        places.closed, places.positions, rows, KEPT=POOL_STATES, RING=ring, RATIO=ratio, B=_ROWS,
        num_warps=2,
    )  # fmt: skip


def list_seen(
    places: Places,
    pooled: Pooled | None,
    listed: Tensor,
    lengths: Tensor,
    *,
    window: int,
    ring: int,
) -> None:
    """Name the entries that each row sees: those of its window in order, then all pooled ones.
    Where an indexer chooses, `choose.list_chosen` does it.

    Shapes:
        listed int32 [T, S], wide enough for the longest row; lengths [T] int32
    """
    rows, width = listed.shape
    table, page, spread, ratio, first = listed, 1, 1, 0, 0
    if pooled is not None:
        table, page = pooled.kv.table, pooled.kv.page_tokens
        spread, ratio, first = pooled.spread, pooled.ratio, pooled.first
    _list_kernel[(triton.cdiv(width, _LISTED), rows)](
        places.positions, places.rings, table, table.stride(0), listed,
        listed.stride(0), lengths, first, WINDOW=window, RING=ring, RATIO=ratio, PAGE=page,
        SPREAD=spread, B=_LISTED, num_warps=2,
    )  # fmt: skip
