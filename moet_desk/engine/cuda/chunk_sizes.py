"""How much device memory a prompt chunk needs. No torch, so that plans can be made without it.

`chunk_buffers` makes the memory from these counts, `expert_stream` the staging places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

from moet_desk.engine.cuda.pooled_sizes import CHUNK_SPLITS, PooledSizes, pooled_mixers
from moet_desk.engine.spec import Gdn, Gqa, Mla, PooledAttention, Spec, dense_widths, indexer_of
from moet_desk.kernels.kv_sizes import POOL_ROWS
from moet_desk.kernels.row_sizes import GROUP, ExpertLayout
from moet_desk.plan import ChunkSize
from moet_desk.store.pack_format import Plane
from moet_desk.units import MIB

CHUNKS = (8192, 4096, 2048, 1024, 512, 256)
"""Tokens of a prompt chunk that the planner may choose from."""

BLOCK_ROWS = 2048
"""Rows whose queries exist at the same time: 64 heads of 512 take 256 MiB."""

EXPANDED_BYTES = 512 * MIB
"""Most room for keys and values made from latents; heads are taken in turns when more are needed.
"""

DELTA_BLOCK = 64
"""Tokens whose changes of a state are solved for together, as `kernels.triton.delta_chunk` has it.
"""

SCALE_BLOCK = 128
"""Rows of an e4m3 weight that share a scale, as `kernels.triton.dense_weight` has it."""

STREAM_PARTS = 16
"""Parts in which the products of residual streams are made: 128 programs of 64 rows for the 512
that attention takes at a time.
"""

TURNS = 2
"""Batches of both planes that the staging memory holds: one is read while the other is filled."""

STAGE_BYTES = 256 * MIB
"""Most staging memory: 8 experts of DeepSeek-V4-Flash in a batch, 36 places for 2-bit rows."""

AHEAD_BYTES, LARGE_CHUNK = 256 * MIB, 8192
"""More of it where a plan has room, experts are as large as that, and chunks need all of them: what
comes while a layer's attention runs need not come while its experts do, which are done sooner than
their rows.
"""

MOST_BATCHED = 32
"""Experts of a batch at most: more would not fill the device better."""

_BF16, _F32, _INT32 = 2, 4, 4


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Counts of numbers in the buffers of a chunk of up to `rows` tokens; see `ChunkBuffers`.

    Attributes:
        entries: places for decoded entries of the sequence, whole pages.
        per_entry: floats of keys and values for each of them.
    """

    rows: int
    block: int
    hidden: int
    inter: int
    top_k: int
    n_choices: int
    kept: int
    wide: int
    narrow: int
    parts: int
    entries: int
    per_entry: int
    kv_rank: int
    rope_dim: int
    index: int  # numbers of four bytes that sparse attention needs beside
    streams: int  # likewise of residual streams and pooled attention

    @classmethod
    def of(cls, spec: Spec, rows: int, *, context: int) -> ChunkShape:
        """For chunks of `rows` tokens of sequences of up to `context`."""
        mixer, moe, block = spec.attention, spec.moe_ffn, min(rows, BLOCK_ROWS)
        entries = -(-context // 64) * 64
        if isinstance(mixer, PooledAttention):
            own, entries, block = _of_pooled(mixer), 0, min(rows, POOL_ROWS)
        else:
            own = _of_mla(mixer, entries) if isinstance(mixer, Mla) else _of_gqa(mixer)
        inter = max([moe.shared_inter, *dense_widths(spec), 1])
        fed = 2 * inter + (spec.hidden + 1 if moe.shared_gate else 0)
        states = [_of_gdn(linear) for linear in spec.delta[:1]]
        every = [own, *states]
        scores = max((linear.n_values for linear in spec.delta), default=0)
        return cls(
            rows=rows, block=block, hidden=spec.hidden, inter=moe.inter, top_k=moe.router.top_k,
            n_choices=moe.router.n_choices,
            kept=block * spec.hidden if moe.router.n_identity else 0,
            wide=block * max(fed, *(part.projected for part in every)),
            narrow=block * max(part.narrow for part in every) + DELTA_BLOCK**2 * scores,
            parts=2 * block * max(spec.hidden, inter, *(part.inputs for part in every)),
            entries=entries,
            per_entry=own.per_entry, kv_rank=own.kv_rank, rope_dim=own.rope_dim,
            index=_of_indexer(spec, rows, block),
            streams=_of_streams(spec, rows, block, context),
        )  # fmt: skip

    @property
    def n_bytes(self) -> int:
        """What all the buffers take."""
        rows, block = self.rows, self.block
        codes = 2 * rows * (self.hidden + self.inter)  # int8
        scales = rows * (self.hidden + self.inter) // GROUP
        floats = 2 * rows * self.hidden + scales + rows * self.top_k + rows * self.inter
        floats += block * (self.hidden + self.n_choices) + self.kept + rows
        floats += self.wide + self.narrow
        halves = self.parts + 2 * self.entries * self.kv_rank
        floats += self.entries * (self.rope_dim + self.per_entry)
        floats += self.index + self.streams
        return codes + _F32 * floats + _BF16 * halves + _INT32 * rows * self.top_k


@dataclass(frozen=True, slots=True)
class _Attention:
    """Numbers that attention needs.

    Attributes:
        projected: of a row, for what its products give.
        narrow: of a row, for what attention reads and gives.
        inputs: of a row, the widest input of a product behind the first.
        per_entry, kv_rank, rope_dim: of a decoded entry; grouped-query attention reads pages.
    """

    projected: int
    narrow: int
    inputs: int
    per_entry: int = 0
    kv_rank: int = 0
    rope_dim: int = 0


def _of_gqa(mixer: Gqa) -> _Attention:
    queries = mixer.n_heads * mixer.head_dim
    return _Attention(projected_width(mixer), 2 * queries, queries)


def projected_width(mixer: Gqa) -> int:
    """Numbers of a row behind the first product: queries, keys, values, gates of the output."""
    queries = mixer.n_heads * mixer.head_dim * (2 if mixer.out_gate else 1)
    return queries + 2 * mixer.n_keys * mixer.head_dim


def _of_gdn(mixer: Gdn) -> _Attention:
    n, values = mixer.n_values, mixer.n_values * mixer.value_dim
    # of each row what it takes of the state, its products with a block's keys, and its decay; the
    # last block's products are whole, however few rows it has
    scratch = n * (mixer.key_dim + DELTA_BLOCK + 1)
    return _Attention(mixer.channels + values + 2 * n, mixer.channels + values + scratch, values)


def _of_mla(mixer: Mla, entries: int) -> _Attention:
    width, heads = mixer.nope_dim + mixer.v_dim, mixer.n_heads * mixer.v_dim
    least = SCALE_BLOCK // gcd(SCALE_BLOCK, width) * width  # groups begin at a scale block
    inputs = max(heads, mixer.q_rank or 0)
    return _Attention(
        projected=_query_width(mixer),
        narrow=mixer.n_heads * mixer.rope_dim + inputs,
        inputs=inputs,
        per_entry=min(mixer.n_heads * width, max(least, EXPANDED_BYTES // _F32 // entries)),
        kv_rank=mixer.kv_rank,
        rope_dim=mixer.rope_dim,
    )


def _of_pooled(mixer: PooledAttention) -> _Attention:
    low = mixer.out_groups * mixer.out_rank
    return _Attention(projected=1, narrow=1, inputs=max(mixer.q_rank, low))


def _of_streams(spec: Spec, rows: int, block: int, context: int) -> int:
    """Numbers of `StreamBuffers`."""
    if spec.streams is None:
        return 0
    n, width = spec.streams.n, spec.streams.n * spec.hidden
    made = 2 * n + n * n
    connections = STREAM_PARTS * (made + n * n + 4) + made  # as `kernels.triton.streams` has it
    size = PooledSizes.of(pooled_mixers(spec, with_head=True), context)
    pooled = size.numbers(block, CHUNK_SPLITS)
    return rows * (width + connections) + pooled


def _of_indexer(spec: Spec, rows: int, block: int) -> int:
    """Numbers of `IndexBuffers`; scores have the room of expanded keys."""
    indexer = indexer_of(spec)
    if indexer is None:
        return 0
    n, d = indexer.n_heads, indexer.head_dim
    return block * (d + 2 * n * d + n) + rows * (indexer.top_k + 1)


def _query_width(mixer: Mla) -> int:
    """Floats a row needs in `wide` for projections: joined ones, then all queries."""
    queries = mixer.n_heads * (mixer.nope_dim + mixer.rope_dim)
    joined = (mixer.q_rank or queries) + mixer.kv_rank + mixer.rope_dim
    return joined + (queries if mixer.q_rank else 0)


def chunk_bytes(spec: Spec, rows: int, *, context: int) -> int:
    """What `ChunkBuffers.make` takes, without making it."""
    return ChunkShape.of(spec, rows, context=context).n_bytes


def batch_size(layout: ExpertLayout, n_experts: int) -> int:
    """Experts of a batch: as the staging memory holds them of both planes."""
    each = TURNS * (layout.base_stride + layout.fine_stride)
    return max(1, min(MOST_BATCHED, n_experts, STAGE_BYTES // each))


def staging_bytes(layout: ExpertLayout, n_experts: int) -> int:
    """Device memory for staging alone."""
    return batch_size(layout, n_experts) * TURNS * (layout.base_stride + layout.fine_stride)


def ahead_bytes(layout: ExpertLayout, n_experts: int, rows: int) -> int:
    """More device memory for staging that pays for chunks of so many tokens, whole places of it."""
    both = layout.base_stride + layout.fine_stride
    if rows < LARGE_CHUNK or batch_size(layout, n_experts) == min(MOST_BATCHED, n_experts):
        return 0
    return AHEAD_BYTES // both * both


def stage_bytes(layout: ExpertLayout, n_experts: int) -> int:
    """Device memory for staging, and for a batch's decoded weights."""
    decoded = batch_size(layout, n_experts) * layout.slot_floats
    return staging_bytes(layout, n_experts) + decoded


def most_places(layout: ExpertLayout, n_experts: int) -> Mapping[Plane, int]:
    """Rows of each plane that can be in staging at the same time."""
    n_bytes = staging_bytes(layout, n_experts)
    both = n_bytes // (layout.base_stride + layout.fine_stride)
    return {Plane.BASE: n_bytes // layout.base_stride, Plane.FINE: both}


def chunk_choices(
    spec: Spec, layout: ExpertLayout, *, context: int, wished: int | None
) -> tuple[ChunkSize, ...]:
    """Sizes of a prompt chunk and what each takes; none is longer than the context."""
    sizes = [n for n in CHUNKS if n <= context] or [context] if wished is None else [wished]
    n_experts = spec.moe_ffn.router.n_experts
    stage = stage_bytes(layout, n_experts)
    return tuple(
        ChunkSize(
            n, stage + chunk_bytes(spec, n, context=context), ahead_bytes(layout, n_experts, n)
        )
        for n in sizes
    )
