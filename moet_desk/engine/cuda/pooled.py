"""Pooled attention on a device: its launches for the rows of a step, or of a block of a prompt.

The twin is engine/blocks/pooled; rows read what rows before them left in the layer's memory
(`pool_states`). Nothing here allocates, waits or branches on data, so a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from moet_desk.engine.cuda.dense_weights import DenseSource
from moet_desk.engine.cuda.pool_states import PoolMemory
from moet_desk.engine.cuda.pooled_run import Question, RunBuffers, kept_queries, look
from moet_desk.engine.cuda.pooled_sizes import (
    CHUNK_SPLITS,
    LOOKING_ROWS,
    Kind,
    PooledSizes,
    seen_most,
)
from moet_desk.engine.cuda.products import GroupedWeight, Products
from moet_desk.engine.page_rows import PageRows
from moet_desk.engine.spec import PooledAttention, PoolIndexer
from moet_desk.kernels.kv_sizes import POOL_STATES
from moet_desk.kernels.triton.attention_parts import DecodeScratch
from moet_desk.kernels.triton.choose import list_chosen
from moet_desk.kernels.triton.dense import NormOf
from moet_desk.kernels.triton.head_parts import head_parts
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.pooled_keys import prepare_queries, score_windows, store_keys
from moet_desk.kernels.triton.pooled_scores import prepare_run
from moet_desk.kernels.triton.pooling import finish, pool, pool_run
from moet_desk.kernels.triton.prepare import Rotation
from moet_desk.kernels.triton.seen import Places, Pooled, list_seen
from moet_desk.kernels.triton.shared_attention import shared_decode
from moet_desk.kernels.triton.shared_prefill import Run


@dataclass(frozen=True, slots=True)
class PooledBuffers:
    """Of R rows, float32 unless said; of B rows that look at the same time what is behind `scores`.

    Attributes:
        joined: [R, r_q + D]; latent: [R, r_q].
        arrived: int32 [1], see `NormOf`.
        pooling: [R, values, logits, weights of an indexer's heads].
        means: [R, D]; key_means: [R, D_i], of windows that close.
        one, other: flat, [R, N, D]: heads on their way in, and out.
        low: [R, G * r].
        index_one, index_other: [R, N_i, D_i].
        held: [numbers of a state].
        places: of rows.
        splits: parts of a row's entries.
        scores: [B, S].
        kinds: of layers; listed, seen: int32 [kinds, B, L], [kinds, B], what rows see and how much.
        run: of a prompt's rows, in the place of these.
    """

    joined: Tensor
    latent: Tensor
    arrived: Tensor
    pooling: Tensor
    means: Tensor
    key_means: Tensor
    one: Tensor
    other: Tensor
    low: Tensor
    index_one: Tensor
    index_other: Tensor
    held: Tensor
    places: Places
    splits: int
    scores: Tensor
    kinds: tuple[Kind, ...]
    listed: Tensor
    seen: Tensor
    run: RunBuffers | None

    @classmethod
    def make(cls, size: PooledSizes, rows: int, splits: int, device: torch.device) -> PooledBuffers:
        """For up to `rows` rows."""
        looking = LOOKING_ROWS[splits]

        def f32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        def i32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        index = (rows, size.index_heads, size.index_dim)
        return cls(
            joined=f32(rows, size.joined), latent=f32(rows, size.latent),
            arrived=i32(1),
            pooling=f32(rows, size.pooling), means=f32(rows, size.head_dim),
            key_means=f32(rows, size.index_dim), one=f32(rows * size.queries),
            other=f32(rows * size.queries), low=f32(rows, size.low), index_one=f32(*index),
            index_other=f32(*index), held=f32(size.held),
            places=Places.make(rows, device), splits=splits, scores=f32(looking, size.scored),
            kinds=size.kinds, listed=i32(len(size.kinds), looking, size.listed),
            seen=i32(len(size.kinds), looking),
            run=RunBuffers.make(size, rows, device) if splits == CHUNK_SPLITS else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows and the memory that they belong to.

    Attributes:
        places: of them.
        table: int32 [T, pages of a sequence].
        memory: of the layer.
        sees_all: whether an indexer need not score for them: all that is closed is taken.
        run: slot and first position, of rows that are of one sequence and follow each other.
        listed: kinds of layers whose lists are made, which all layers of a step share.
    """

    places: Places
    table: Tensor
    memory: PoolMemory
    sees_all: bool = False
    run: tuple[int, int] | None = None
    listed: set[Kind] = field(default_factory=set)

    @property
    def n(self) -> int:
        """How many."""
        return self.table.shape[0]

    def at(self, memory: PoolMemory) -> PooledRows:
        """The same rows in another layer of the step."""
        return replace(self, memory=memory)

    def pages(self, rows: PageRows, n: int | None = None) -> KvPages:
        """Pooled entries or keys as the rows see them, or the first ones."""
        return KvPages(rows.memory, self.table[:n], self.memory.form)


class Aside(Protocol):
    """Lanes for launches that need not wait for those of the main one (`blocks.Branch`)."""

    def beside(
        self, lane: int = 0, *, since: Callable[[], None] | None = None
    ) -> AbstractContextManager[None]: ...

    def fork(self) -> Callable[[], None]: ...

    def join(self, lane: int = 0) -> None: ...


_POOLS, _INDEX = 1, 2
"""Lanes: of what is kept of the rows, and of what an indexer chooses for them. Both come before the
product for the queries, which takes all the card: attention waits for their short launches.
"""


class _InOrder:
    """No lanes: one launch after the other."""

    def beside(
        self, lane: int = 0, *, since: Callable[[], None] | None = None
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def fork(self) -> Callable[[], None]:
        return lambda: None

    def join(self, lane: int = 0) -> None:
        return


class _Compressor:
    """Pools entries or keys of `dim` numbers."""

    def __init__(self, load: DenseSource, name: str, eps: float) -> None:
        self.places, self.norm = load.vector(name + "ape"), load.vector(name + "norm")
        self.eps = eps

    def read(
        self, b: PooledBuffers, joined: Tensor, sums: Tensor, rows: PooledRows, means: Tensor
    ) -> None:
        """Add rows to open windows; `means` gets those that close."""
        places, overlap = rows.places, sums.shape[1] == 9 * means.shape[1]
        if rows.run is None:
            pool(
                joined, self.places, places.positions, sums, places.sources, places.targets,
                means, overlap=overlap,
            )  # fmt: skip
            return
        slot, start = rows.run
        held = b.held[: sums.shape[1]]
        held.copy_(sums[slot * POOL_STATES + start % POOL_STATES])
        pool_run(joined, self.places, start, held, sums, places.targets, means, overlap=overlap)


class _PoolIndexerLaunches:
    def __init__(self, indexer: PoolIndexer, load: DenseSource, name: str, eps: float) -> None:
        self.indexer = indexer
        self.compressor = _Compressor(load, name + "compressor.", eps)
        self.w_query = load.matrix(name + "wq_b")


class PooledLaunches:
    """The mixer of one layer.

    Args:
        mixer: what it is.
        load: reads the weights.
        name: of the mixer.
        turns: cos and sin of its rope, [positions, 32].
        context: longest sequence.
    """

    def __init__(
        self,
        mixer: PooledAttention,
        load: DenseSource,
        name: str,
        *,
        turns: tuple[Tensor, Tensor],
        context: int,
    ) -> None:
        self.mixer, self._turns, self._width = mixer, turns, seen_most(mixer, context)
        self._kind = Kind.of(mixer)
        self._w_in = load.matrix(name + "wq_a", name + "wkv")
        self._q_norm, self._kv_norm = load.vector(name + "q_norm"), load.vector(name + "kv_norm")
        self._w_query = load.matrix(name + "wq_b")
        self._sinks = load.vector(name + "attn_sink")
        self._w_low = GroupedWeight.of(load.matrix(name + "wo_a"), mixer.out_groups)
        self._w_out = load.matrix(name + "wo_b")
        self._compressor: _Compressor | None = None
        self._index: _PoolIndexerLaunches | None = None
        if mixer.pool is None:
            return
        below, eps = [name + "compressor."], mixer.norm_eps
        self._compressor = _Compressor(load, below[0], eps)
        if mixer.pool.indexer is not None:
            self._index = _PoolIndexerLaunches(mixer.pool.indexer, load, name + "indexer.", eps)
            below.append(name + "indexer.compressor.")
        parts = [one + part for one in below for part in ("wkv", "wgate")]
        if self._index is not None:
            parts.append(name + "indexer.weights_proj")
        self._w_pool = load.matrix(*parts)
        self._pooled_width = 2 * self._compressor.places.shape[1]

    def launch(
        self,
        b: PooledBuffers,
        products: Products,
        normed: Tensor,
        rows: PooledRows,
        out: Tensor,
        *,
        scratch: DecodeScratch,
        branch: Aside | None = None,
    ) -> None:
        """Take rows in, and give what they see; what is kept of them, and what an indexer chooses,
        in lanes of a branch, if there is one.

        Shapes:
            normed, out [T, H] float32; may not be the same memory
        """
        mixer, t, places = self.mixer, slice(0, rows.n), rows.places
        aside = _InOrder() if branch is None else branch
        rotation = Rotation(places.positions, *self._turns, interleaved=True)
        looks = self._index is not None and not rows.sees_all
        fork = aside.fork()
        latent = NormOf(self._q_norm, mixer.norm_eps, b.latent[t], b.arrived)
        products.normed(normed, self._w_in, b.joined[t], latent)
        with aside.beside(_POOLS, since=fork):
            self._pool_keys(b, products, normed, rows, rotation)
            if not looks:
                self._pool_entries(b, rows)
                if rows.run is None:
                    self._list(b, rows)
        if looks:
            with aside.beside(_INDEX):
                self._ask(b, products, rows, rotation)
                aside.join(_POOLS)  # keys of these rows, and how heads count
                if rows.run is None:
                    self._choose(b, rows)
        with aside.beside(_POOLS):
            finish(
                b.joined[t, mixer.q_rank :], self._kv_norm, mixer.norm_eps, *self._turns,
                places.positions, rows.memory.rows, places.rings, rows.memory.form, ratio=1,
                ring=rows.memory.ring,
            )  # fmt: skip
            if looks:  # not before the keys, for which the choice waits
                self._pool_entries(b, rows)
        shape = (rows.n, mixer.n_heads, mixer.head_dim)
        size = rows.n * mixer.n_heads * mixer.head_dim
        one = b.one[:size].view(shape)
        products(b.latent[t], self._w_query, one.flatten(1))
        aside.join(_POOLS)
        if looks:
            aside.join(_INDEX)
        room = b.other[:size]
        if rows.run is not None:
            back = self._look(b, rows, one, room, rotation, *rows.run)
        else:
            back = room.view(rows.n, mixer.out_groups, -1).transpose(0, 1)
            listed, seen = self._lists(b, rows)
            shared_decode(
                one, KvPages(rows.memory.rows, listed, rows.memory.form), seen, self._sinks, back,
                rotation=rotation, eps=mixer.norm_eps, scale=mixer.softmax_scale, scratch=scratch,
                splits=b.splits,
            )  # fmt: skip
        products.grouped(back, self._w_low, b.low[t])
        products(b.low[t], self._w_out, out)

    def _pool_keys(
        self,
        b: PooledBuffers,
        products: Products,
        normed: Tensor,
        rows: PooledRows,
        rotation: Rotation,
    ) -> None:
        """What rows give to open windows, and the indexer's keys of those that close."""
        t, pooled, memory = slice(0, rows.n), self.mixer.pool, rows.memory
        if pooled is None:
            return
        values = b.pooling[t, : self._w_pool.n]
        products(normed, self._w_pool, values)  # how an indexer's heads count is behind
        if self._index is None or memory.keys is None or memory.key_sums is None:
            return
        keys, width = self._index.compressor, self._pooled_width
        keys.read(b, values[:, width:], memory.key_sums, rows, b.key_means[t])
        store_keys(
            b.key_means[t], keys.norm, keys.eps, ratio=pooled.ratio, rotation=rotation,
            kv=rows.pages(memory.keys),
        )  # fmt: skip

    def _pool_entries(self, b: PooledBuffers, rows: PooledRows) -> None:
        """Entries of windows that close."""
        mixer, t, places, memory = self.mixer, slice(0, rows.n), rows.places, rows.memory
        own = self._compressor
        if own is None or mixer.pool is None:
            return
        assert memory.entries is not None, "a pool has memory"  # noqa: S101
        assert memory.sums is not None, "of both kinds"  # noqa: S101
        own.read(b, b.pooling[t, : self._pooled_width], memory.sums, rows, b.means[t])
        finish(
            b.means[t], own.norm, own.eps, *self._turns, places.positions, memory.entries.memory,
            rows.table, memory.form, ratio=mixer.pool.ratio, spread=memory.entries.spread,
        )  # fmt: skip

    def _ask(
        self, b: PooledBuffers, products: Products, rows: PooledRows, rotation: Rotation
    ) -> None:
        """Make the indexer's queries ready."""
        if self._index is None:
            return
        one, other = (x[: rows.n] for x in (b.index_one, b.index_other))
        products(b.latent[: rows.n], self._index.w_query, one.flatten(1))
        prepare = prepare_queries if rows.run is None else prepare_run
        form = rows.memory.form
        prepare(one, kept_queries(other, form), form, rotation=rotation)

    def _look(
        self,
        b: PooledBuffers,
        rows: PooledRows,
        heads: Tensor,
        room: Tensor,
        rotation: Rotation,
        slot: int,
        start: int,
    ) -> Tensor:
        """What rows of a prompt see, in the place of their queries: heads [T, N, D] in, two parts
        [2, G, T, N / G * D] out.
        """
        mixer, memory = self.mixer, rows.memory
        assert b.run is not None, "a prompt has buffers for its rows"  # noqa: S101
        parts = room.view(torch.bfloat16).view(2, *heads.shape)
        head_parts(heads, parts, rotation=rotation, eps=mixer.norm_eps)
        pooled, question = self._pooled(rows, 1), None
        n_pooled = 0 if pooled is None else (start + rows.n) // pooled.ratio
        if self._index is not None and memory.keys is not None and not rows.sees_all:
            indexer, width = self._index.indexer, self._w_pool.n
            question = Question(
                kept_queries(b.index_other[: rows.n], memory.form),
                b.pooling[: rows.n, width - indexer.n_heads : width],
                rows.pages(memory.keys, 1), rows.places.closed[: rows.n],
                (indexer.n_heads * indexer.head_dim) ** -0.5,
            )  # fmt: skip
        run = Run(start, memory.ring, slot * memory.ring, mixer.window, pooled, n_pooled)
        back = heads.view(torch.bfloat16).view(2, mixer.out_groups, rows.n, -1)
        look(
            b.run, parts, run, memory, self._sinks, back, rotation=rotation,
            scale=mixer.softmax_scale, question=question,
        )  # fmt: skip
        return back

    def _lists(self, b: PooledBuffers, rows: PooledRows) -> tuple[Tensor, Tensor]:
        """Of what the rows see: int32 [T, S], and how much that is, [T]."""
        kind = b.kinds.index(self._kind)
        return b.listed[kind, : rows.n, : self._width], b.seen[kind, : rows.n]

    def _list(self, b: PooledBuffers, rows: PooledRows) -> None:
        """Name all entries of the rows' windows and of closed ones, once for layers of a kind."""
        if self._kind in rows.listed:
            return
        rows.listed.add(self._kind)
        list_seen(
            rows.places, self._pooled(rows), *self._lists(b, rows), window=self.mixer.window,
            ring=rows.memory.ring,
        )  # fmt: skip

    def _choose(self, b: PooledBuffers, rows: PooledRows) -> None:
        """Name those that the indexer chooses, and those of the rows' windows."""
        memory, places, pooled, t = rows.memory, rows.places, self._pooled(rows), slice(0, rows.n)
        assert self._index is not None, "the caller looked"  # noqa: S101
        assert pooled is not None, "an indexer is over windows"  # noqa: S101
        assert memory.keys is not None, "of which it has keys"  # noqa: S101
        indexer, width = self._index.indexer, self._w_pool.n
        score_windows(
            kept_queries(b.index_other[t], memory.form),
            b.pooling[t, width - indexer.n_heads : width], rows.pages(memory.keys), places.closed,
            b.scores[t],
            scale=(indexer.n_heads * indexer.head_dim) ** -0.5,
        )  # fmt: skip
        list_chosen(
            b.scores[t], places, pooled, *self._lists(b, rows), top_k=indexer.top_k,
            window=self.mixer.window, ring=memory.ring,
        )  # fmt: skip

    def _pooled(self, rows: PooledRows, n: int | None = None) -> Pooled | None:
        """Which pooled entries the rows, or the first ones, see or choose from."""
        entries, pooled = rows.memory.entries, self.mixer.pool
        if pooled is None or entries is None:
            return None
        return Pooled(rows.pages(entries, n), pooled.ratio, entries.spread, rows.memory.first)
