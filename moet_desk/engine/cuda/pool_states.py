"""States of pooled attention on a device: entries and sums of all sequences, one memory a layer.

A layer's memory of entries begins with a ring for each slot, for the entries of a window; the
pooled entries of all pages lie behind. The sums of open windows are kept behind each of a
sequence's last 16 lengths. So a wrong guess leaves nothing that is read later, and a sequence goes
back to where its newest step began for nothing. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.engine.page_rows import PageRows, rows_needed
from moet_desk.engine.recurrent import SlotList, pending_of
from moet_desk.engine.spec import PooledAttention
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import POOL_STATES, pooled_key_bytes, window_ring
from moet_desk.kernels.triton.seen import Places, find_places


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """One layer's memory.

    Attributes:
        rows: uint8 [rings and pooled entries, 1, bytes].
        first: entries of all rings.
        ring: entries of one.
        form: of an entry.
        entries: the pooled ones on their pages, if the layer has some.
        keys: those of its indexer, likewise.
        sums, key_sums: of open windows, float32 [slots * POOL_STATES, numbers].
    """

    rows: Tensor
    first: int
    ring: int
    form: KvFormat
    entries: PageRows | None = None
    keys: PageRows | None = None
    sums: Tensor | None = None
    key_sums: Tensor | None = None

    def states(self) -> list[Tensor]:
        """The sums that it has."""
        return [sums for sums in (self.sums, self.key_sums) if sums is not None]


class PooledStates(SlotList):
    """States of all layers for some sequences at a time; see `engine.recurrent.StateSlots`.

    Args:
        mixers: of all layers, the MTP head's last if it runs.
        n_slots: sequences.
        form: of entries.
        n_pages, page_tokens: of the KV cache.
        device: where they are.

    Raises:
        ValueError: indexers choose among windows of several sizes.
    """

    def __init__(
        self,
        mixers: Sequence[PooledAttention],
        n_slots: int,
        form: KvFormat,
        *,
        n_pages: int,
        page_tokens: int,
        device: torch.device,
    ) -> None:
        super().__init__(n_slots)
        self._mixers, self._form = tuple(mixers), form
        chosen_from = {m.pool.ratio for m in mixers if m.pool and m.pool.indexer}
        if len(chosen_from) > 1:
            raise ValueError(f"indexers over windows of {sorted(chosen_from)} tokens")
        self._ratio = next(iter(chosen_from), 1)
        pages = n_pages, page_tokens
        self._layers = [_memory(mixer, n_slots, form, pages, device) for mixer in mixers]

    def find(self, runs: Tensor, positions: Tensor, places: Places) -> None:
        """Where rows find and leave things; see `find_places`."""
        find_places(runs, positions, places, ring=self._layers[0].ring, ratio=self._ratio)

    def layer(self, place: int) -> PoolMemory:
        """Of one layer with a state."""
        return self._layers[place]

    def pooled(self, layer: int) -> tuple[PageRows, PageRows | None] | None:
        """See `StateSlots`."""
        memory = self._layers[layer]
        return None if memory.entries is None else (memory.entries, memory.keys)

    @property
    def state_bytes(self) -> int:
        """Bytes of `to_bytes`."""
        return sum(mixer.state_bytes(self._form) for mixer in self._mixers)

    def to_bytes(self, slot: int, base: int, length: int) -> NDArray[np.uint8]:
        """See `StateSlots`."""
        pending_of(base, length)
        found = []
        for mixer, memory in zip(self._mixers, self._layers, strict=True):
            tail = memory.rows[self._tail(mixer, memory, slot, length), 0].flatten()
            size = (mixer.window - 1) * mixer.entry_bytes(self._form)
            found += [tail, tail.new_zeros(size - len(tail))]
            for sums in memory.states():
                found.append(sums[_kept(slot, length)].view(torch.uint8))
        flat: NDArray[np.uint8] = torch.cat(found).cpu().numpy()
        return flat

    def from_bytes(self, flat: NDArray[np.uint8], slot: int, length: int) -> None:
        """See `StateSlots`."""
        sizes = [mixer.state_bytes(self._form) for mixer in self._mixers]
        device = self._layers[0].rows.device
        parts = torch.split(torch.from_numpy(flat.copy()).to(device), sizes)
        for mixer, memory, own in zip(self._mixers, self._layers, parts, strict=True):
            at, width = self._tail(mixer, memory, slot, length), memory.rows.shape[2]
            memory.rows[at, 0] = own[: len(at) * width].view(len(at), width)
            numbers = own[(mixer.window - 1) * width :].clone().view(torch.float32)
            states = memory.states()
            split = torch.split(numbers, [sums.shape[1] for sums in states])
            for sums, part in zip(states, split, strict=True):
                sums[_kept(slot, length)] = part

    def _tail(self, mixer: PooledAttention, memory: PoolMemory, slot: int, length: int) -> Tensor:
        """Places of the entries that the next token sees beside its own, int64."""
        seen = torch.arange(max(0, length - mixer.window + 1), length)
        return (slot * memory.ring + seen % memory.ring).to(memory.rows.device)


def _kept(slot: int, length: int) -> int:
    """Where the sums behind so many tokens are."""
    return slot * POOL_STATES + length % POOL_STATES


def _memory(
    mixer: PooledAttention, n_slots: int, form: KvFormat, pages: tuple[int, int],
    device: torch.device,
) -> PoolMemory:  # fmt: skip
    ring, n_bytes, pool = window_ring(mixer.window), mixer.entry_bytes(form), mixer.pool
    first = n_slots * ring

    def empty(count: int, width: int) -> Tensor:
        return torch.zeros((count, width), dtype=torch.uint8, device=device)

    if pool is None:
        return PoolMemory(empty(first, n_bytes)[:, None], first, ring, form)
    count = rows_needed(*pages, pool.ratio)
    rows = empty(first + count, n_bytes)
    entries = PageRows.whole(rows[first:], *pages, pool.ratio)
    kept = (n_slots * POOL_STATES,)
    overlap = pool.indexer is not None
    sums = torch.zeros((*kept, (9 if overlap else 3) * mixer.head_dim), device=device)
    if pool.indexer is None:
        return PoolMemory(rows[:, None], first, ring, form, entries, sums=sums)
    dim = pool.indexer.head_dim
    keys = PageRows.whole(empty(count, pooled_key_bytes(form, dim)), *pages, pool.ratio)
    key_sums = torch.zeros((*kept, 9 * dim), device=device)
    return PoolMemory(rows[:, None], first, ring, form, entries, keys, sums, key_sums)
