"""Slots for rows that the next layer will probably ask for, and how many of those it did ask for.

What a layer's router would choose for the input of the layer before is looked up like what it does
choose (`cache.lookup`), but counts as no use: a row that was brought for nothing is soon the
coldest. Called on the engine thread, in a lane of a step's graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.reference.cache import FREE
from moet_desk.kernels.triton.cache import MOST_PAIRS, GpuTables, give_slots


@dataclass(frozen=True, slots=True)
class AheadOutput:
    """Rows to bring ahead, for P pairs of a token and an expert.

    Attributes:
        n: int32 [1], how many; 0 until a look-up has written.
        row, slot: int32 [P], which and where to.
    """

    n: Tensor
    row: Tensor
    slot: Tensor

    @classmethod
    def empty(cls, n_pairs: int, *, device: torch.device | str) -> AheadOutput:
        """Room for a look-up's answer; until then nothing is to be brought."""
        row, slot = (
            torch.full((n_pairs,), FREE, dtype=torch.int32, device=device) for _ in range(2)
        )
        return cls(torch.zeros(1, dtype=torch.int32, device=device), row, slot)


@triton.jit(do_not_specialize=["layer"])
def _look_ahead_kernel(
    ids, most, chosen, before_n, before_row, counters, ahead,
    slot_of, owner, last_used, warmth, free, n_free, hand, clock, limit,
    miss_n, miss_row, miss_slot, layer,
    L: tl.constexpr, E: tl.constexpr, T: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, PAIRS)
    inside = i < T * K
    now = tl.load(clock) * L + layer + 1
    expert = tl.load(ids + i, mask=inside & (i % K < tl.load(most)), other=-1)
    valid = expert >= 0
    row = layer * E + expert
    slot = tl.load(slot_of + row, mask=valid, other=0)

    # of the rows that were brought ahead for the layer before, those that it asked for
    n_before = tl.load(before_n)
    brought = tl.load(before_row + i, mask=inside & (i < n_before), other=-1)
    its = tl.load(chosen + i, mask=inside, other=-1)
    its = tl.where(its < 0, -2, (layer - 1) * E + its)
    needed = tl.sum((brought[:, None] == its[None, :]).to(tl.int32), 1) > 0
    c = tl.arange(0, 2)
    total = ahead + (layer - 1) * 2 + c
    more = tl.where(c == 0, n_before, tl.sum(needed.to(tl.int32), 0))
    tl.store(total, tl.load(total) + more)

    other = tl.load(ids + i, mask=inside & (i % K < tl.load(most)), other=-1)
    same = (expert[:, None] == other[None, :]) & valid[:, None]
    first = valid & (tl.sum((same & (i[None, :] < i[:, None])).to(tl.int32), 1) == 0)
    tl.store(last_used + slot, now, mask=first & (slot >= 0))
    missing = (first & (slot < 0)).to(tl.int32)
    n_missing = tl.sum(missing, 0)
    tl.store(miss_row + tl.cumsum(missing, 0) - 1, row, mask=missing > 0)
    tl.debug_barrier()
    evicted = 0
    if n_missing > 0:  # rows of the layer before are being read
        n_left, at_slot, evicted = give_slots(
            n_missing, tl.load(n_free), tl.load(limit), tl.load(hand), miss_row, miss_slot,
            slot_of, owner, last_used, warmth, free, now - 1, now,
        )  # fmt: skip
        tl.store(n_free, n_left)
        tl.store(hand, at_slot)
    tl.store(miss_n, n_missing)
    evictions = counters + layer * 4 + 3
    tl.store(evictions, tl.load(evictions) + evicted)


def look_ahead(
    ids: Tensor,
    most: Tensor,
    tables: GpuTables,
    *,
    layer: int,
    chosen: Tensor,
    before: AheadOutput,
    out: AheadOutput,
) -> None:
    """Give slots to a layer's likely experts that have none, while the layer before it computes.

    `tables.ahead` counts, for the layer before, the rows that were brought ahead and those of them
    that it asked for.

    Args:
        ids: int32 [T, K], likely ones of each token, the likeliest first, distinct within a token.
        most: int32 [1], of each token's so many count.
        tables: changed in place. Slots of the layer before stay, and those that were given ahead
            of it, so there must be three times as many as pairs.
        layer: MoE layer, from 1.
        chosen: int32 [T, K], what the layer before asked for; below 0 for a pair that does not
            count.
        before: what was brought ahead for the layer before.
        out: written; not the same memory.

    Raises:
        ValueError: more pairs than `MOST_PAIRS`, than `out` takes, or too few slots.
    """
    n_tokens, top_k = ids.shape
    n_pairs = n_tokens * top_k
    if n_pairs > min(MOST_PAIRS, out.row.shape[0]) or 3 * n_pairs > tables.n_slots:
        raise ValueError(f"{n_pairs} pairs ahead do not fit {tables.n_slots} slots")
    padded = triton.next_power_of_2(n_pairs)
    _look_ahead_kernel[(1,)](
        ids, most, chosen, before.n, before.row, tables.counters, tables.ahead,
        tables.slot_of, tables.owner, tables.last_used, tables.warmth, tables.free, tables.n_free,
        tables.hand, tables.clock, tables.limit, out.n, out.row, out.slot, layer,
        tables.n_layers, tables.n_experts, n_tokens, top_k, padded,
        num_warps=1 if padded <= 16 else 4, maxnreg=128,
    )  # fmt: skip
