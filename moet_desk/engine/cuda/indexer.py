"""An indexer's launches for the rows of a step and of a prompt chunk. The twin is blocks/indexer.

What it chose stays in the buffers for the layers behind that reuse it. Nothing of a step allocates,
waits or branches on data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moet_desk.engine.cuda.dense_weights import DenseSource
from moet_desk.engine.spec import Indexer
from moet_desk.kernels.triton.choose import choose
from moet_desk.kernels.triton.chosen_prefill import even_groups
from moet_desk.kernels.triton.dense import gemv
from moet_desk.kernels.triton.gemm import gemm
from moet_desk.kernels.triton.indexer import index_prepare, index_scores
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.prepare import Rotation


@dataclass(frozen=True, slots=True)
class IndexBuffers:
    """Room for a choice; float32 unless said.

    Attributes:
        key: [B, D]; queries, turned: [B, N, D]; heads: [B, N]: of a block of B rows.
        scores: [B, S], of a step's rows; a prompt's have room elsewhere.
        chosen, counts: int32 [R, K] and [R]: entries that each row looks at, by their numbers in a
            layer's memory; a prompt's by their places in the sequence.
    """

    key: Tensor
    queries: Tensor
    turned: Tensor
    heads: Tensor
    scores: Tensor
    chosen: Tensor
    counts: Tensor

    @classmethod
    def make(
        cls, indexer: Indexer, rows: int, *, block: int, entries: int, device: torch.device
    ) -> IndexBuffers:
        """Room for `rows` rows, in blocks, and for scores of `entries` tokens."""
        n, d = indexer.n_heads, indexer.head_dim

        def f32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(
            key=f32(block, d), queries=f32(block, n, d), turned=f32(block, n, d),
            heads=f32(block, n), scores=f32(block, entries),
            chosen=torch.zeros((rows, indexer.top_k), dtype=torch.int32, device=device),
            counts=torch.zeros(rows, dtype=torch.int32, device=device),
        )  # fmt: skip

    def n_bytes(self) -> int:
        """What all of it takes."""
        tensors = (getattr(self, name) for name in self.__dataclass_fields__)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class IndexerLaunches:
    """The indexer of one layer."""

    def __init__(self, indexer: Indexer, load: DenseSource, name: str) -> None:
        self._indexer = indexer
        self._w_query = load.matrix(name + "wq_b")
        self._w_key = load.matrix(name + "wk")
        self._w_heads = load.matrix(name + "weights_proj")
        self._norm, self._bias = load.vector(name + "k_norm"), load.vector(name + "k_norm.bias")

    def launch(
        self,
        b: IndexBuffers,
        normed: Tensor,
        latent: Tensor,
        rotation: Rotation,
        kv: KvPages,
        lengths: Tensor,
    ) -> None:
        """Keep the keys of a step's rows, and choose for them.

        Shapes:
            normed [T, H], latent [T, r_q] float32, lengths [T] int32
        """
        t = slice(0, normed.shape[0])
        gemv(normed, self._w_key, b.key[t])
        gemv(normed, self._w_heads, b.heads[t])
        gemv(latent, self._w_query, b.queries[t].flatten(1))
        self._prepare(b, rotation, kv)
        self._score(b, t, kv, lengths, b.scores[t])
        choose(b.scores[t], lengths, kv, b.chosen[t], b.counts[t])

    def launch_block(
        self,
        b: IndexBuffers,
        here: slice,
        normed: Tensor,
        latent: Tensor,
        rotation: Rotation,
        kv: KvPages,
        *,
        split: Callable[[Tensor], Tensor],
        start: int,
        scores: Tensor | None,
    ) -> None:
        """The same for rows `here` of a chunk, from position `start` on; without room for scores
        [rows at a time, S], only their keys are kept.
        """
        n_rows = normed.shape[0]
        parts, t = split(normed), slice(0, n_rows)
        gemm(parts, self._w_key, b.key[t])
        gemm(parts, self._w_heads, b.heads[t])
        gemm(split(latent), self._w_query, b.queries[t].flatten(1))
        self._prepare(b, rotation, kv)
        if scores is None:
            return
        lengths = rotation.positions + 1
        for own in even_groups(n_rows, len(scores)):
            pages, found = replace(kv, table=kv.table[own]), scores[: own.stop - own.start]
            to = slice(here.start + own.start, here.start + own.stop)
            self._score(b, own, pages, lengths[own], found[:, : start + own.stop])
            choose(found, lengths[own], None, b.chosen[to], b.counts[to])

    def _prepare(self, b: IndexBuffers, rotation: Rotation, kv: KvPages) -> None:
        t, indexer = slice(0, rotation.positions.shape[0]), self._indexer
        rotation = replace(rotation, interleaved=indexer.interleaved)
        index_prepare(
            b.key[t], self._norm, self._bias, indexer.norm_eps, b.queries[t], b.turned[t],
            rotation=rotation, kv=kv.of_index(),
        )  # fmt: skip

    def _score(
        self, b: IndexBuffers, own: slice, kv: KvPages, lengths: Tensor, scores: Tensor
    ) -> None:
        """For rows `own` of the block."""
        indexer = self._indexer
        index_scores(
            b.turned[own], b.heads[own], kv.of_index(), lengths, scores,
            scale=(indexer.n_heads * indexer.head_dim) ** -0.5,
        )  # fmt: skip
