"""KV pages: what attention remembers of each sequence, in the storage format of the plan.

Owned by the engine thread. A sequence holds whole pages, reserved when it is admitted, so it never
runs out in the middle of an answer. State contract: `reserve`, `write` (append), `length` as the
mark, and `rewind`. Entries are made and read by `kernels.reference.kv_formats`: of MLA a latent and
a rotary key, of grouped-query attention all heads' keys and values. Layers whose attention has an
indexer keep its keys on the same pages, under the same rules. Layers with a window keep the last
entries alone, on few pages that a sequence takes in turn. Layers with a state of fixed size store
nothing for each token; their states (`recurrent`) are the sequence's. A sequence with either goes
back less far. Of the latter, pooled attention has entries of closed windows on the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.engine.page_rows import PageRows
from moet_desk.engine.recurrent import States, StateSlots
from moet_desk.engine.spec import Attention, Mla, PooledAttention, Rings, Stateful
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import index_key_bytes, pooled_key_bytes
from moet_desk.kernels.reference import (
    gqa_read,
    gqa_write,
    index_read,
    index_write,
    mla_read,
    mla_write,
    pooled_key_read,
    pooled_key_write,
    shared_read,
    shared_write,
)


@dataclass(slots=True)
class KvSequence:
    """Pages of one sequence and how many tokens they hold.

    Attributes:
        ring: pages in layers with a window.
        choice: while tokens are read, what the newest layer with an indexer chose for them, bool
            [T, S]; None: all that they may see.
        tokens: ids of the tokens, where the model's embedding looks back at them; those from
            `length` on mean nothing.
        slot, base: of its states on a device, if it has some there (`recurrent.StateSlots`).
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    in_a_row: bool = True  # the pages follow each other, so reading needs no gather
    choice: Tensor | None = field(default=None, compare=False, repr=False)
    states: States = field(default_factory=States)  # of mixers that have some
    slot: int | None = None
    base: int = 0
    ring: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def ring_pages(self) -> list[int]:
        """The page of a layer with a window for each page of the others."""
        times = -(-len(self.pages) // max(1, len(self.ring)))
        return (self.ring * times)[: len(self.pages)]

    def remember(self, at: int, ids: Sequence[int]) -> None:
        """Tokens from place `at` on, in place of what was there."""
        missing = at - len(self.tokens)
        self.tokens += [0] * missing  # a measurement begins behind tokens that never were
        self.tokens[at:] = ids

    def fork(self) -> KvSequence:
        """The same tokens on the same pages, to read ahead of them: neither sees the other's
        states.
        """
        return replace(self, states=self.states.fork())


@dataclass(frozen=True, slots=True)
class _Pool:
    """Pages of one layer with pooled attention: entries, and the indexer's keys if it has one."""

    mixer: PooledAttention
    ratio: int
    entries: PageRows
    keys: PageRows | None

    @property
    def rows(self) -> list[PageRows]:
        return [self.entries] if self.keys is None else [self.entries, self.keys]


class KvCache:
    """Pages for `n_layers` layers of equal shape.

    Args:
        mixer: the attention whose entries are stored.
        n_layers: layers that store.
        n_pages, page_tokens: pool size.
        form: storage format of an entry.
        device: where the pages are.
        index_layers: layers, of `n_layers`, whose attention has an indexer.
        recurrent: mixers of the layers that have a state instead.
        slots: such states on a device, and the pooled entries beside them.
        rings: layers, of `n_layers`, that keep the last entries alone.
    """

    def __init__(
        self,
        mixer: Attention | PooledAttention,
        *,
        n_layers: int,
        n_pages: int,
        page_tokens: int,
        form: KvFormat,
        device: torch.device | None = None,
        index_layers: Sequence[int] = (),
        recurrent: Sequence[Stateful] = (),
        slots: StateSlots | None = None,
        rings: Rings | None = None,
    ) -> None:
        self.form = form
        self.page_tokens = page_tokens
        self.entry_bytes = mixer.entry_bytes(form)
        self._mixer = mixer
        self._recurrent, self._slots = tuple(recurrent), slots
        self._state_bytes = sum(mixer.state_bytes(form) for mixer in recurrent)
        if slots is not None:
            self._state_bytes = slots.state_bytes
        rings = rings or Rings((), window=0, pages=0, sequences=0)
        whole = [i for i in range(n_layers) if i not in rings.layers]
        entry = (page_tokens, self.entry_bytes)
        shape = (len(whole), n_pages, *entry)
        self._pages = torch.zeros(shape, dtype=torch.uint8, device=device)
        shape = (len(rings.layers), rings.pages * rings.sequences, *entry)
        self._ring_pages = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._rings, self._free_ring = rings, list(range(shape[1]))
        self._of_layer: dict[int, Tensor] = dict(zip(whole, self._pages, strict=True))
        self._of_layer |= dict(zip(rings.layers, self._ring_pages, strict=True))
        self._index_dim = mixer.indexer.head_dim if isinstance(mixer, Mla) and mixer.indexer else 0
        key = (n_pages, page_tokens, index_key_bytes(form, self._index_dim))
        self._index = {i: torch.zeros(key, dtype=torch.uint8, device=device) for i in index_layers}
        self._pools = {
            i: _pool_of(
                mixer, n_pages, page_tokens, form, None if slots is None else slots.pooled(i)
            )
            for i, mixer in enumerate(recurrent)
            if isinstance(mixer, PooledAttention) and mixer.pool is not None
        }
        self._free = list(range(n_pages))

    @property
    def n_layers(self) -> int:
        """Layers that keep the entries of all tokens."""
        return int(self._pages.shape[0])

    @property
    def state_bytes(self) -> int:
        """Of what `take_out` gives: the states, an MTP head's among them if it has one here."""
        return self._state_bytes

    @property
    def forgets(self) -> bool:
        """Whether a sequence cannot go back to any length."""
        return self.has_rings or bool(self._recurrent or self._slots)

    @property
    def has_rings(self) -> bool:
        """Whether some layers keep the last entries alone."""
        return bool(self._rings.layers)

    def is_ring(self, layer: int) -> bool:
        """Whether a layer's pages are taken in turn (`KvSequence.ring`)."""
        return layer in self._rings.layers

    @property
    def free_tokens(self) -> int:
        """Tokens that could still be reserved."""
        return len(self._free) * self.page_tokens

    def pages(self, layer: int) -> Tensor:
        """All pages of one layer, uint8 [n_pages, page_tokens, entry_bytes], for device kernels."""
        return self._of_layer[layer]

    def index_pages(self, layer: int) -> Tensor | None:
        """The keys of a layer's indexer on all pages, uint8 [n_pages, page_tokens, bytes of a
        key]; None if it has none.
        """
        return self._index.get(layer)

    def reserve(self, n_tokens: int) -> KvSequence | None:
        """Pages for a new sequence of up to `n_tokens`, and states on a device; None if too few
        are free.
        """
        count = -(-n_tokens // self.page_tokens)
        in_ring = min(count, self._rings.pages)
        if count > len(self._free) or in_ring > len(self._free_ring):
            return None
        slot = None if self._slots is None else self._slots.take()
        if self._slots is not None and slot is None:
            return None
        start = self._run_of(count)
        pages = self._free[start : start + count]
        del self._free[start : start + count]
        ring, self._free_ring = self._free_ring[:in_ring], self._free_ring[in_ring:]
        # kernels load entries before a window along with it: not another sequence's invalid ones
        self._ring_pages[:, ring] = 0
        in_a_row = pages[-1] - pages[0] == count - 1
        return KvSequence(pages, in_a_row=in_a_row, slot=slot, ring=ring)

    def release(self, sequence: KvSequence) -> None:
        """Give a sequence's pages back."""
        self._free = sorted(self._free + sequence.pages)
        self._free_ring += sequence.ring
        sequence.pages, sequence.ring, sequence.tokens = [], [], []
        sequence.length = 0
        sequence.states.clear()
        if self._slots is not None and sequence.slot is not None:
            self._slots.give_back(sequence.slot)
            sequence.slot, sequence.base = None, 0

    def rewind(self, sequence: KvSequence, length: int) -> None:
        """Forget the tokens from `length` on: with states, only as far as `recurrent` says; with
        rings, by a step's rows.
        """
        sequence.length = min(sequence.length, length)

    def take_out(self, sequence: KvSequence, start: int, count: int) -> NDArray[np.uint8]:
        """A copy of entries in RAM: uint8 [n_layers, count, entry_bytes]. Flat, if there is more:
        the last ones of a window in layers with one, the indexers' keys, pooled entries of windows
        that these tokens close, then the states behind the last of them; with pools, the count in 8
        bytes before all. With windows or states these tokens are the newest ones.

        Raises:
            ValueError: the states there were not kept.
        """
        pages, places = self._rows_of(sequence.pages, start, count)
        rows = self._pages[:, pages, places]
        more = [index[pages, places].flatten() for index in self._index.values()]
        if self._rings.layers:
            ring = self._rows_of(sequence.ring, *self._seen(start, count))
            more.insert(0, self._ring_pages[:, ring[0], ring[1]].flatten())
        if more:
            rows = torch.cat([rows.flatten(), *more])
        copy: NDArray[np.uint8] = rows.cpu().numpy()
        if self._slots is not None and sequence.slot is not None:
            states = self._slots.to_bytes(sequence.slot, sequence.base, start + count)
        elif self._recurrent:
            states = sequence.states.to_bytes(start + count, self._recurrent, self.form)
        else:
            return copy
        parts = [copy.ravel()]
        if self._pools:
            parts.insert(0, np.array([count], np.int64).view(np.uint8))
        for pool in self._pools.values():
            closed = torch.arange(start // pool.ratio, (start + count) // pool.ratio)
            parts += [r.at(sequence.pages, closed).flatten().cpu().numpy() for r in pool.rows]
        return np.concatenate([*parts, states])

    def put_in(self, sequence: KvSequence, start: int, entries: NDArray[np.uint8]) -> None:
        """Store what `take_out` gave, in any shape, at `start`. The length is the caller's."""
        flat = entries.reshape(-1)
        own = flat[: len(flat) - self._state_bytes]
        states = flat[len(own) :]
        if self._pools:
            count = int(own[:8].copy().view(np.int64)[0])
            own = self._put_in_pools(sequence, start, count, own[8:])
        count = self._put_in_rows(sequence, start, own, count if self._pools else None)
        if self._slots is not None and sequence.slot is not None:
            self._slots.from_bytes(states, sequence.slot, start + count)
            sequence.base = start + count
        elif self._recurrent:
            sequence.states.from_bytes(states, start + count, self._recurrent, self.form)

    def _put_in_rows(
        self, sequence: KvSequence, start: int, own: NDArray[np.uint8], count: int | None
    ) -> int:
        """Entries and keys of each token; returns how many tokens, if that is not known."""
        n_layers, size, n_ring = self.n_layers, self.entry_bytes, len(self._rings.layers)
        keys = [index.shape[-1] for index in self._index.values()]  # bytes each
        if count is None:
            count = len(own) // ((n_layers + n_ring) * size + sum(keys))
            if len(own) > (n_layers + n_ring) * size * self._rings.window > 0:
                count = (len(own) - n_ring * self._rings.window * size) // (n_layers * size)
        on_device = torch.from_numpy(own).to(self._pages.device)
        seen = self._seen(start, count)
        in_ring = n_ring * seen[1] * size
        parts = [n_layers * count * size, in_ring, *(count * key for key in keys)]
        rows, last, *others = torch.split(on_device, parts)
        pages, places = self._rows_of(sequence.pages, start, count)
        self._pages[:, pages, places] = rows.view(n_layers, count, size)
        if n_ring:
            of_ring, at = self._rows_of(sequence.ring, *seen)
            self._ring_pages[:, of_ring, at] = last.view(n_ring, seen[1], size)
        for index, other in zip(self._index.values(), others, strict=True):
            index[pages, places] = other.view(count, -1)
        return count

    def _put_in_pools(
        self, sequence: KvSequence, start: int, count: int, flat: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Pooled entries, which lie behind the rest; returns the rest."""
        end = len(flat)
        for pool in reversed(self._pools.values()):
            first, behind = start // pool.ratio, (start + count) // pool.ratio
            for rows in reversed(pool.rows):
                n_bytes = (behind - first) * rows.row_bytes
                if n_bytes:
                    part = torch.from_numpy(flat[end - n_bytes : end].copy())
                    rows.store(sequence.pages, first, part.view(behind - first, -1))
                end -= n_bytes
        return flat[:end]

    def _seen(self, start: int, count: int) -> tuple[int, int]:
        """Of some tokens the last ones that what follows may look at in a layer with a window."""
        if not self._rings.layers:
            return start, 0
        kept = min(count, self._rings.window)
        return start + count - kept, kept

    def _rows_of(self, own: Sequence[int], start: int, count: int) -> tuple[Tensor, Tensor]:
        """Page, of these, and place in it of tokens, int64 [count] each."""
        at, device = torch.arange(start, start + count), self._pages.device
        pages = torch.tensor(own)[at // self.page_tokens % len(own)]
        return pages.to(device), (at % self.page_tokens).to(device)

    def write(self, layer: int, sequence: KvSequence, first: Tensor, second: Tensor) -> None:
        """Store entries for the tokens behind `sequence.length`, which the caller moves on later.

        Shapes:
            MLA: latent [T, r] and k_rope [T, d_r]; GQA: k and v [T, M, D]; float32, rotated
        Raises:
            ValueError: in a layer with a window, the first ones could not look back any more.
        """
        encode = mla_write if isinstance(self._mixer, Mla) else gqa_write
        entries = encode(first, second, self.form)
        own = sequence.ring if self.is_ring(layer) else sequence.pages
        behind = len(entries) + self._rings.window - 1
        if self.is_ring(layer) and min(behind, sequence.length + len(entries)) > self._held(own):
            raise ValueError(f"{len(entries)} tokens at once do not fit behind the window")
        self._store(self._of_layer[layer], own, sequence.length, entries)

    def _held(self, own: Sequence[int]) -> int:
        """Entries that a sequence's pages hold."""
        return len(own) * self.page_tokens

    def write_index(self, layer: int, sequence: KvSequence, keys: Tensor) -> None:
        """Store an indexer's keys beside the entries of the same tokens: [T, D] float32."""
        entries = index_write(keys, self.form)
        self._store(self._index[layer], sequence.pages, sequence.length, entries)

    def _store(self, pages: Tensor, own: Sequence[int], at: int, entries: Tensor) -> None:
        """Entries [T, bytes] uint8 from place `at` on into a layer's pages [n_pages, page_tokens,
        bytes], of which a sequence has its `own`.
        """
        PageRows.of(pages).store(own, at, entries)

    def read(
        self, layer: int, sequence: KvSequence, length: int, *, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The entries from `first` to `length`, float32: what `write` got, with S tokens for T. In
        a layer with a window there are only those that it keeps.
        """
        pages = self._of_layer[layer]
        if not self.is_ring(layer):
            return self._decoded(self._first(pages, sequence, length)[first:])
        return self._decoded(PageRows.of(pages).between(sequence.ring, first, length))

    def read_at(self, layer: int, sequence: KvSequence, places: Tensor) -> tuple[Tensor, Tensor]:
        """The entries at some places of the sequence, int64 [K]: as `read`, with K for S."""
        pages = torch.tensor(sequence.pages)[places // self.page_tokens]
        return self._decoded(self._of_layer[layer][pages, places % self.page_tokens])

    def read_index(self, layer: int, sequence: KvSequence, length: int) -> Tensor:
        """An indexer's first `length` keys, [S, D] float32."""
        entries = self._first(self._index[layer], sequence, length)
        return index_read(entries, self.form, self._index_dim)

    def _first(self, pages: Tensor, sequence: KvSequence, length: int) -> Tensor:
        """The sequence's first entries [length, bytes] of a layer's pages."""
        return PageRows.of(pages).first(sequence.pages, length, in_a_row=sequence.in_a_row)

    # -- pooled attention; `layer` counts those with a state ---------------------------------------

    def write_pooled(
        self, layer: int, sequence: KvSequence, first: int, entries: Tensor, keys: Tensor | None
    ) -> None:
        """Store entries of closed windows from number `first` on, and the indexer's keys of them.

        Shapes:
            entries [n, D], keys [n, D_i], float32, rotated
        """
        pool = self._pools[layer]
        encoded = shared_write(entries, self.form, pool.mixer.rope.dim)
        pool.entries.store(sequence.pages, first, encoded)
        if pool.keys is not None and keys is not None:
            pool.keys.store(sequence.pages, first, pooled_key_write(keys, self.form))

    def read_pooled(
        self, layer: int, sequence: KvSequence, count: int, places: Tensor | None = None
    ) -> Tensor:
        """The first `count` entries of closed windows, or those at some places of them, int64 [K]:
        [count or K, D] float32.
        """
        pool, mixer = self._pools[layer], self._pools[layer].mixer
        if places is None:
            found = pool.entries.first(sequence.pages, count, in_a_row=sequence.in_a_row)
        else:
            found = pool.entries.at(sequence.pages, places)
        return shared_read(found, self.form, mixer.head_dim, mixer.rope.dim)

    def read_pooled_keys(self, layer: int, sequence: KvSequence, count: int) -> Tensor:
        """The indexer's keys of the first `count` closed windows, [count, D] float32.

        Raises:
            ValueError: the layer has no indexer.
        """
        pool = self._pools[layer]
        indexer = None if pool.mixer.pool is None else pool.mixer.pool.indexer
        if pool.keys is None or indexer is None:
            raise ValueError(f"layer {layer} has no indexer")
        found = pool.keys.first(sequence.pages, count, in_a_row=sequence.in_a_row)
        return pooled_key_read(found, self.form, indexer.head_dim)

    def _decoded(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        mixer = self._mixer
        if isinstance(mixer, PooledAttention):
            raise TypeError("pooled attention stores no entry of each token")
        if isinstance(mixer, Mla):
            return mla_read(entries, self.form, mixer.kv_rank, mixer.rope_dim)
        return gqa_read(entries, self.form, mixer.n_keys, mixer.head_dim, mixer.head_dim)

    def _run_of(self, count: int) -> int:
        """Where in the free list `count` neighbouring pages begin; 0 if there is no such run."""
        free = self._free
        for start in range(len(free) - count + 1):
            if free[start + count - 1] - free[start] == count - 1:
                return start
        return 0


def _pool_of(
    mixer: PooledAttention,
    n_pages: int,
    page_tokens: int,
    form: KvFormat,
    held: tuple[PageRows, PageRows | None] | None,
) -> _Pool:
    pool = mixer.pool
    if pool is None:
        raise TypeError("a layer without pooled entries")
    if held is not None:
        return _Pool(mixer, pool.ratio, *held)
    n_bytes = mixer.entry_bytes(form)
    entries = PageRows.make(n_pages, page_tokens, pool.ratio, n_bytes, None)
    keys = None
    if pool.indexer is not None:
        n_bytes = pooled_key_bytes(form, pool.indexer.head_dim)
        keys = PageRows.make(n_pages, page_tokens, pool.ratio, n_bytes, None)
    return _Pool(mixer, pool.ratio, entries, keys)
