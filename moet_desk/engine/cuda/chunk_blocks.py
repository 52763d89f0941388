"""The launches of one decoder layer for the rows of a prompt chunk, over the step's weights.

The twins are engine/blocks; the launches of a decode step are in cuda/blocks. Attention and dense
products take a block of rows at a time, routed experts the whole chunk (cuda/expert_stream).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moet_desk.engine.cuda.blocks import (
    DenseLaunches,
    GqaLaunches,
    LayerLaunches,
    MlaLaunches,
    MoeLaunches,
)
from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers, Room, shaped
from moet_desk.engine.cuda.delta import ChunkStates, GdnLaunches
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.triton.chosen_prefill import chosen_prefill
from moet_desk.kernels.triton.delta import DeltaMemory
from moet_desk.kernels.triton.dense_weight import DenseWeight
from moet_desk.kernels.triton.gates import gated
from moet_desk.kernels.triton.gemm import gemm, split, swiglu_split
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.norms import rms_norm
from moet_desk.kernels.triton.prefill_attention import gqa_prefill, mla_prefill
from moet_desk.kernels.triton.prepare import Rotation, mla_prepare, rotate_queries
from moet_desk.kernels.triton.quant import plain_shape, rms_norm_quantize

RoutedExperts = Callable[[int, Tensor, Tensor, Tensor, Callable[[], None]], None]
"""Adds a layer's routed experts: (MoE layer, ids, weights, out, meanwhile), see `ChunkExperts.run`.
"""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """A chunk of one sequence on the device.

    Attributes:
        start: position of its first row.
        activations: of the routed experts.
        positions, tokens: int32 [M].
        table: int32 [1, pages], of the sequence; ring_table: of layers with a window, likewise.
        slot: of the sequence's states, if it has some.
        runs: int32 [2, RUN_COLUMNS], as `ChunkStates` has it.
    """

    start: int
    activations: Activations
    positions: Tensor
    tokens: Tensor
    table: Tensor
    ring_table: Tensor
    slot: int
    runs: Tensor

    @property
    def n(self) -> int:
        """Rows."""
        return self.positions.shape[0]


class ChunkLayer:
    """One layer for a chunk.

    Args:
        layer: the step's launches, whose weights are shared.
        buffers: the chunk's.
        cos, sin: the rope table; eps: of the layer's norms; interleaved: how rope pairs dims.
    """

    def __init__(
        self,
        layer: LayerLaunches,
        buffers: ChunkBuffers,
        *,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        eps: float,
    ) -> None:
        self._layer, self._b, self._eps = layer, buffers, eps
        self._cos, self._sin, self._interleaved = cos, sin, interleaved

    def launch(
        self, chunk: ChunkRows, memory: KvPages | DeltaMemory, experts: RoutedExperts
    ) -> None:
        """x of the chunk through the layer, whose KV entries and indexer's keys, or state, are in
        `memory`.
        """
        ffn = self._layer.ffn
        for here in blocks_of(chunk, self._b):
            self.attend(here, chunk, memory)
            if isinstance(ffn, MoeLaunches):
                self.route(ffn, here, chunk)
            else:
                self.feed(ffn, here)
        if isinstance(ffn, MoeLaunches):
            add_experts(ffn, self._b, chunk, experts)

    def attend(self, here: slice, chunk: ChunkRows, memory: KvPages | DeltaMemory) -> None:
        """x += attention of a block of the chunk's rows."""
        rotation = Rotation(chunk.positions[here], self._cos, self._sin, self._interleaved)
        self._attend(here, rotation, self._own(chunk, here, memory), chunk.start + here.start)

    def feed(self, ffn: DenseLaunches, here: slice) -> None:
        """x += a dense part of a block, which reads the normed x."""
        x = self._b.x[here]
        normed = self._b.normed[: x.shape[0]]
        rms_norm(x, self._layer.ffn_norm, self._eps, out=normed)
        self._feed(ffn, normed, x)

    def _own(
        self, chunk: ChunkRows, here: slice, memory: KvPages | DeltaMemory
    ) -> KvPages | ChunkStates:
        """The memory as rows `here` see it."""
        if isinstance(memory, KvPages):
            return replace(memory, table=memory.table.expand(here.stop - here.start, -1))
        begins, ends = here.start == 0, here.stop == chunk.n
        return ChunkStates(memory, chunk.slot, chunk.runs, begins=begins, ends=ends)

    def _attend(
        self, here: slice, rotation: Rotation, kv: KvPages | ChunkStates, start: int
    ) -> None:
        """x += attention of a block of rows, which begin at position `start`."""
        x = self._b.x[here]
        attention, normed = self._layer.attention, self._b.normed[: x.shape[0]]
        rms_norm(x, self._layer.attention_norm, self._eps, out=normed)
        if isinstance(attention, GdnLaunches):
            assert isinstance(kv, ChunkStates), "layers with a state have no pages"  # noqa: S101
            heads = attention.mix_block(
                self._split(normed), rotation.positions, kv, start=start,
                wide=Room(self._b.wide), narrow=Room(self._b.narrow),
            )  # fmt: skip
            gemm(self._split(heads), attention.w_out, x, residual=x)
            return
        assert isinstance(kv, KvPages), "attention has pages"  # noqa: S101
        if isinstance(attention, MlaLaunches):
            heads = self._mla(attention, here, normed, rotation, kv, start)
            gemm(self._split(heads), attention.w_out, x, residual=x)
        else:
            heads = self._gqa(attention, normed, rotation, kv, start)
            gemm(self._split(heads), attention.w_out, x, bias=attention.out_bias, residual=x)

    def _gqa(
        self, gqa: GqaLaunches, normed: Tensor, rotation: Rotation, kv: KvPages, start: int
    ) -> Tensor:
        """What the heads mixed [rows, N * D], in `narrow`."""
        b, mixer, rows = self._b, gqa.mixer, normed.shape[0]
        shape = (rows, mixer.n_heads, mixer.head_dim)
        joined, narrow = Room(b.wide).take(rows, gqa.w_in.n), Room(b.narrow)
        gemm(self._split(normed), gqa.w_in, joined, bias=gqa.bias)
        queries, heads = narrow.take(*shape), narrow.take(*shape)
        plain, gate = gqa.apart(joined)
        gqa.prepare(plain, queries, rotation, kv)
        gqa_prefill(
            queries, kv, heads, n_keys=mixer.n_keys, start=start, scale=mixer.softmax_scale,
            window=mixer.window, sink=gqa.sinks,
        )  # fmt: skip
        mixed = heads.view(rows, -1)
        if gate is not None:
            gated(mixed, gate, mixed)
        return mixed

    def _mla(
        self, mla: MlaLaunches, here: slice, normed: Tensor, rotation: Rotation, kv: KvPages,
        start: int,
    ) -> Tensor:  # fmt: skip
        """What the heads mixed [rows, N * dv], in `narrow`."""
        b, mixer, rows = self._b, mla.mixer, normed.shape[0]
        chosen = b.index.chosen if b.index is not None and mla.is_sparse else None
        sees_all = chosen is None or start + rows <= chosen.shape[1]
        n, head = mixer.n_heads, mixer.nope_dim + mixer.rope_dim
        wide, narrow = Room(b.wide), Room(b.narrow)
        joined = wide.take(rows, mla.w_in.n)
        gemm(self._split(normed), mla.w_in, joined)
        q_rope = narrow.take(rows, n, mixer.rope_dim)
        if mixer.q_rank is None:
            mla_prepare(
                joined, mla.latent_norm, mixer.latent_eps, rotation=rotation, kv=kv, q_out=q_rope
            )
            queries = joined[:, : n * head].view(rows, n, head)
        else:
            latent = Room(narrow.rest()).take(rows, mixer.q_rank)
            mla_prepare(
                joined, mla.latent_norm, mixer.latent_eps, rotation=rotation, kv=kv,
                q_out=latent, q_weight=mla.q_norm,
            )  # fmt: skip
            if mla.indexer is not None and b.index is not None:
                mla.indexer.launch_block(
                    b.index, here, normed, latent, rotation, kv, split=self._split, start=start,
                    scores=None if sees_all else b.scores(mixer.rope_dim),
                )  # fmt: skip
            flat = wide.take(rows, n * head)
            gemm(self._split(latent), mla.w_q, flat)
            queries = flat.view(rows, n, head)
            rotate_queries(queries, q_rope, rotation=rotation)
        heads, nope = narrow.take(rows, n * mixer.v_dim), queries[..., : mixer.nope_dim]
        if b.index is None or sees_all:
            mla_prefill(
                nope, q_rope, kv, mla.w_latent, heads,
                start=start, scale=mixer.softmax_scale, scratch=b.attention,
            )  # fmt: skip
        else:
            chosen_prefill(
                nope, q_rope, kv, mla.w_latent, b.index.chosen[here], b.index.counts[here], heads,
                entries=start + rows, scale=mixer.softmax_scale, scratch=b.attention,
            )  # fmt: skip
        return heads

    def _feed(
        self, ffn: DenseLaunches, normed: Tensor, x: Tensor, w_gate: DenseWeight | None = None
    ) -> None:
        """x += W_down(silu(W_gate n) * W_up n), which a sigmoid of `w_gate` n may weigh."""
        rows, wide = x.shape[0], Room(self._b.wide)
        gate_up, parts = wide.take(rows, 2 * ffn.inter), self._split(normed)
        gemm(parts, ffn.w_in, gate_up)
        own: Tensor | None = None
        if w_gate is not None:
            own = wide.take(rows, 1)
            gemm(parts, w_gate, own)
        mid = Room(self._b.parts).take(2, rows, ffn.inter)
        swiglu_split(gate_up, mid, limit=ffn.limit)
        if own is None:
            gemm(mid, ffn.w_down, x, residual=x)
            return
        given = wide.take(*x.shape)
        gemm(mid, ffn.w_down, given)
        gated(given, own, x, residual=x)

    def route(self, moe: MoeLaunches, here: slice, chunk: ChunkRows) -> None:
        """Input, ids and weights of the routed experts for a block; x += shared expert. What
        identity experts give is in `kept` then.
        """
        b, router, x = self._b, moe.router, self._b.x[here]
        normed = b.normed[: x.shape[0]]
        codes = shaped(b.codes, chunk.n, *plain_shape(x.shape[1], chunk.activations))
        rms_norm_quantize(
            x, self._layer.ffn_norm, self._eps,
            out=normed, codes=codes[here], scales=b.scales[here],
        )  # fmt: skip
        logits = b.router[: x.shape[0]]
        gemm(self._split(normed), moe.w_router, logits, bias=moe.logit_bias)
        moe.route(
            logits, chunk.tokens[here], ids=b.ids[here], weights=b.weights[here],
            share=b.share[here],
        )  # fmt: skip
        if router.n_identity:
            torch.mul(normed, b.share[here, None], out=b.kept[: x.shape[0]])
        if moe.shared is not None:
            self._feed(moe.shared, normed, x, moe.w_shared_gate)

    def _split(self, x: Tensor) -> Tensor:
        """Two bfloat16 parts of x, for `gemm`; valid until the next call."""
        parts = Room(self._b.parts).take(2, *x.shape)
        split(x, parts)
        return parts


def blocks_of(chunk: ChunkRows, b: ChunkBuffers) -> Iterator[slice]:
    """The chunk's rows, as many at a time as there is room for."""
    for first in range(0, chunk.n, b.block_rows):
        yield slice(first, min(first + b.block_rows, chunk.n))


def _nothing() -> None:
    return


def add_experts(
    moe: MoeLaunches, b: ChunkBuffers, chunk: ChunkRows, experts: RoutedExperts,
    meanwhile: Callable[[], None] = _nothing,
) -> None:  # fmt: skip
    """x += the routed experts of the whole chunk; x is there when `meanwhile` was called."""
    ids = b.ids[: chunk.n]
    if moe.router.n_identity:  # behind all experts, where none looks for them
        ids = ids.masked_fill(ids < 0, moe.router.n_experts)
    # ascending: the sum of a token's experts then does not depend on the batches
    ids, order = ids.sort(dim=1)
    weights = b.weights[: chunk.n].gather(1, order)
    experts(moe.moe_layer, ids, weights, b.x[: chunk.n], meanwhile)
