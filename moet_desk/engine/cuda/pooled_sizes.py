"""How wide the buffers of pooled attention are. No torch, so that plans can be made without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moet_desk.engine.spec import PooledAttention, Spec
from moet_desk.kernels.kv_sizes import window_ring

STEP_SPLITS, CHUNK_SPLITS = 64, 8
"""Parts that a row's entries are cut into: of a step's few rows many, to use the whole card."""

LOOKING_ROWS = {STEP_SPLITS: 8, CHUNK_SPLITS: 0}
"""Rows of a step that look at entries at the same time; those of a prompt are in `pooled_run`."""

CHOOSING_ROWS, CHOOSING_SCORES = 64, 1 << 22
"""Rows of a prompt that choose at the same time: so many, or more while these scores have room."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What decides which entries a token sees: layers of one kind without an indexer see the same.

    Attributes:
        window: tokens whose own entries it sees.
        ratio: tokens of a pooled entry; 0 where there are none.
        chooses: whether an indexer chooses among these.
    """

    window: int
    ratio: int
    chooses: bool

    @classmethod
    def of(cls, mixer: PooledAttention) -> Kind:
        """That of a layer."""
        pool = mixer.pool
        if pool is None:
            return cls(mixer.window, 0, chooses=False)
        return cls(mixer.window, pool.ratio, pool.indexer is not None)


@dataclass(frozen=True, slots=True)
class PooledSizes:
    """Widths of a model's pooled attention, over all of its layers; 1 for what there is not.

    Attributes:
        joined: query latent and entry; latent: the former.
        pooling: values and logits of both compressors, and weights of an indexer's heads.
        queries: of all heads; low: between the products of the output.
        index_heads, index_dim, top_k: of the indexer.
        scored: entries that it scores.
        listed: entries that a row sees; kinds: of layers, by what their rows see.
        ring: entries of a sequence's ring.
    """

    joined: int
    latent: int
    head_dim: int
    pooling: int
    queries: int
    low: int
    index_heads: int
    index_dim: int
    top_k: int
    scored: int
    listed: int
    kinds: tuple[Kind, ...]
    ring: int

    @classmethod
    def of(cls, mixers: Sequence[PooledAttention], context: int) -> PooledSizes:
        """For sequences of up to `context` tokens."""
        first = mixers[0]
        indexers = [m.pool.indexer for m in mixers if m.pool and m.pool.indexer]
        return cls(
            joined=first.q_rank + first.head_dim, latent=first.q_rank, head_dim=first.head_dim,
            pooling=max([1, *(_pooling_width(m) for m in mixers)]),
            queries=first.n_heads * first.head_dim, low=first.out_groups * first.out_rank,
            index_heads=max([1, *(i.n_heads for i in indexers)]),
            index_dim=max([1, *(i.head_dim for i in indexers)]),
            top_k=max([1, *(i.top_k for i in indexers)]),
            scored=max([1, *(-(-context // m.pool.ratio) for m in mixers if m.pool)]),
            listed=max(seen_most(m, context) for m in mixers),
            kinds=tuple(dict.fromkeys(Kind.of(m) for m in mixers)),
            ring=window_ring(first.window),
        )  # fmt: skip

    def numbers(self, rows: int, splits: int) -> int:
        """Numbers of four bytes in `PooledBuffers` of so many rows."""
        index = self.index_heads * 2 * self.index_dim + self.index_dim
        row = self.joined + self.latent + self.head_dim + self.pooling + 2 * self.queries
        step = LOOKING_ROWS[splits] * (self.scored + len(self.kinds) * (self.listed + 1))
        chunk = self._run_numbers(rows) if splits == CHUNK_SPLITS else 0
        one = 1  # counts a product's programs
        return rows * (row + self.low + index + 5) + step + chunk + self.held + one

    @property
    def decoded(self) -> int:
        """Numbers of what a prompt's rows may see."""
        return (self.ring + self.scored) * self.head_dim

    def choosing(self, rows: int) -> int:
        """Rows of a prompt's block of so many that choose at the same time."""
        return min(rows, max(CHOOSING_ROWS, CHOOSING_SCORES // self.scored))

    def _run_numbers(self, rows: int) -> int:
        return self.decoded + 1 + self.choosing(rows) * (self.scored + self.top_k + 1)

    @property
    def held(self) -> int:
        """Most sums of one layer's open windows, of entries or of keys."""
        return 9 * max(self.head_dim, self.index_dim)


def _pooling_width(mixer: PooledAttention) -> int:
    if mixer.pool is None:
        return 1
    if mixer.pool.indexer is None:
        return 2 * mixer.head_dim
    indexer = mixer.pool.indexer
    return 4 * (mixer.head_dim + indexer.head_dim) + indexer.n_heads


def seen_most(mixer: PooledAttention, context: int) -> int:
    """Most entries that a token sees."""
    if mixer.pool is None:
        return mixer.window
    if mixer.pool.indexer is None:
        return mixer.window + -(-context // mixer.pool.ratio)
    return mixer.window + mixer.pool.indexer.top_k


def pooled_mixers(spec: Spec, *, with_head: bool) -> tuple[PooledAttention, ...]:
    """Pooled attention of all layers in their order, the MTP head's last if it runs."""
    layers = spec.layers if spec.mtp is None or not with_head else (*spec.layers, spec.mtp)
    return tuple(layer.mixer for layer in layers if isinstance(layer.mixer, PooledAttention))
