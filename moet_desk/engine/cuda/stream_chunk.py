"""Layers between residual streams for the rows of a prompt chunk, over the step's weights.

The twin is engine/blocks/streams; a step's launches are in cuda/streams. Attention takes as many
rows at a time as a sequence's ring has room for, routed experts the whole chunk.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from moet_desk.engine.cuda.chunk_blocks import ChunkRows, RoutedExperts, add_experts, blocks_of
from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers, Room, shaped
from moet_desk.engine.cuda.pool_states import PooledStates, PoolMemory
from moet_desk.engine.cuda.pooled import PooledRows
from moet_desk.engine.cuda.products import ChunkProducts
from moet_desk.engine.cuda.stream_buffers import StreamBuffers
from moet_desk.engine.cuda.streams import StreamHeadLaunches, StreamLaunches
from moet_desk.engine.spec import PooledAttention
from moet_desk.kernels.triton.attention_parts import DecodeScratch
from moet_desk.kernels.triton.dense import embed
from moet_desk.kernels.triton.gemm import gemm, swiglu_split
from moet_desk.kernels.triton.norms import rms_norm
from moet_desk.kernels.triton.quant import plain_shape
from moet_desk.kernels.triton.streams import write_back


class StreamChunk:
    """One layer for a chunk.

    Args:
        layer: the step's launches, whose weights are shared.
        buffers: the chunk's.
        states: of all layers.
        scratch: of a step's attention, which some rows use at a time.
    """

    def __init__(
        self,
        layer: StreamLaunches,
        buffers: ChunkBuffers,
        *,
        states: PooledStates,
        scratch: DecodeScratch,
    ) -> None:
        self._layer, self._b, self._states, self._scratch = layer, buffers, states, scratch
        self._products = ChunkProducts(buffers.parts)

    def launch(self, chunk: ChunkRows, memory: PoolMemory, experts: RoutedExperts) -> None:
        """The streams of the chunk through the layer, whose states are in `memory`."""
        b, streams, every = self._b, chunk_streams(self._b), slice(0, chunk.n)
        for here in blocks_of(chunk, b):
            self._attend(here, chunk, memory)
        self._layer.around_ffn.begin_many(streams.x[every], streams.scratch)
        for here in blocks_of(chunk, b):
            self._route(here, chunk)
        add_experts(self._layer.ffn, b, chunk, experts, partial(self._share, chunk))
        write_back(streams.x[every], b.x[every], scratch=streams.scratch)

    def _attend(self, here: slice, chunk: ChunkRows, memory: PoolMemory) -> None:
        """The streams of a block of rows through attention."""
        b, streams, layer = self._b, chunk_streams(self._b), self._layer
        x, block, n = streams.x[here], b.x[here], here.stop - here.start
        normed, positions = b.normed[:n], chunk.positions[here]
        places = streams.pooled.places.of(slice(0, n))
        self._states.find(chunk.runs[:1].expand(n, -1), positions, places)
        rows = PooledRows(
            places, chunk.table.expand(n, -1), memory,
            sees_all=_sees_all(layer.mixer.mixer, chunk.start + here.stop),
            run=(chunk.slot, chunk.start + here.start),
        )  # fmt: skip
        layer.around_mixer.begin_many(x, streams.scratch)
        layer.around_mixer.enter(x, normed, streams.scratch)
        layer.mixer.launch(
            streams.pooled, self._products, normed, rows, block, scratch=self._scratch
        )
        write_back(x, block, scratch=streams.scratch)

    def _route(self, here: slice, chunk: ChunkRows) -> None:
        """Input, ids and weights of the routed experts for a block."""
        b, moe, streams, n = (
            self._b,
            self._layer.ffn,
            chunk_streams(self._b),
            here.stop - here.start,
        )
        normed = b.normed[:n]
        codes = shaped(b.codes, chunk.n, *plain_shape(normed.shape[1], chunk.activations))
        self._layer.around_ffn.enter(
            streams.x[here], normed, streams.scratch.of(here), codes=codes[here],
            scales=b.scales[here],
        )  # fmt: skip
        logits = b.router[:n]
        self._products(normed, moe.w_router, logits)
        moe.route(
            logits, chunk.tokens[here], ids=b.ids[here], weights=b.weights[here],
            share=b.share[here],
        )  # fmt: skip

    def _share(self, chunk: ChunkRows) -> None:
        """x = shared expert."""
        b, shared, streams = self._b, self._layer.ffn.shared, chunk_streams(self._b)
        if shared is None:
            b.x[: chunk.n].zero_()
            return
        for here in blocks_of(chunk, b):
            n = here.stop - here.start
            normed, gate_up = b.normed[:n], Room(b.wide).take(n, 2 * shared.inter)
            self._layer.around_ffn.enter(streams.x[here], normed, streams.scratch.of(here))
            self._products(normed, shared.w_in, gate_up)
            mid = Room(b.parts).take(2, n, shared.inter)
            swiglu_split(gate_up, mid, limit=shared.limit)
            gemm(mid, shared.w_down, b.x[here])


def join_head(head: StreamHeadLaunches, b: ChunkBuffers, tokens: Tensor, embedding: Tensor) -> None:
    """The streams of a chunk's first rows become what the MTP head's layer reads behind `tokens`,
    int32 [T].
    """
    streams, products, eps = chunk_streams(b), ChunkProducts(b.parts), head.layer.eps
    for first in range(0, tokens.shape[0], b.block_rows):
        here = slice(first, min(first + b.block_rows, tokens.shape[0]))
        x, normed = b.x[here], b.normed[: here.stop - first]
        embed(tokens[here], embedding, x)
        rms_norm(x, head.token_norm, eps, out=normed)
        products(normed, head.w_token, x)
        for i in range(streams.x.shape[1]):
            one = streams.x[here, i]
            rms_norm(one, head.hidden_norm, eps, out=normed)
            products(normed, head.w_hidden, one)
            one.add_(x)


def chunk_streams(b: ChunkBuffers) -> StreamBuffers:
    """The buffers of streams."""
    assert b.streams is not None, "a model with streams has buffers for them"  # noqa: S101
    return b.streams


def _sees_all(mixer: PooledAttention, length: int) -> bool:
    """Whether an indexer takes all windows that are closed behind so many tokens."""
    pool = mixer.pool
    if pool is None or pool.indexer is None:
        return True
    return length // pool.ratio <= pool.indexer.top_k
