"""Memory of prompt reading, made once: a chunk's rows, and room for a block of them at a time.

Attention and dense products run block by block, so only the residual stream and what the experts
need exist for the whole chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from moet_desk.engine.cuda.chunk_sizes import STREAM_PARTS, ChunkShape
from moet_desk.engine.cuda.indexer import IndexBuffers
from moet_desk.engine.cuda.pooled_sizes import CHUNK_SPLITS
from moet_desk.engine.cuda.stream_buffers import StreamBuffers
from moet_desk.engine.spec import Spec, indexer_of
from moet_desk.kernels.triton.prefill_attention import PrefillScratch


@dataclass(frozen=True, slots=True)
class ChunkBuffers:
    """Activations of a chunk of up to M rows, in blocks of up to B rows. float32 unless said.

    Attributes:
        x: [M, H], the residual stream.
        codes, scales: flat int8 and [M, H/32], the experts' input.
        ids, weights: [M, K] int32 and float32.
        normed: [B, H].
        router: [B, E], identity experts too.
        share: [M], weights of identity experts, added up.
        kept: [B, H] if there are any, what they give.
        wide: flat; the joined projections, the queries, or gate and up of a block.
        narrow: flat; rotary queries, then what the heads mixed.
        parts: flat bfloat16; an input of a dense product in two parts.
        attention: entries of the sequence, decoded.
        index: of sparse attention, if it is.
        streams: of a model with residual streams; x is what a layer's blocks read and give then.
        mid, mid_codes, mid_scales, part: flat; a batch of experts' pairs.
    """

    x: Tensor
    codes: Tensor
    scales: Tensor
    ids: Tensor
    weights: Tensor
    normed: Tensor
    router: Tensor
    share: Tensor
    kept: Tensor
    wide: Tensor
    narrow: Tensor
    parts: Tensor
    attention: PrefillScratch
    mid: Tensor
    mid_codes: Tensor
    mid_scales: Tensor
    part: Tensor
    index: IndexBuffers | None
    streams: StreamBuffers | None

    @classmethod
    def make(cls, spec: Spec, rows: int, *, context: int, device: torch.device) -> ChunkBuffers:
        """Room for chunks of `rows` tokens of sequences of up to `context`."""
        size = ChunkShape.of(spec, rows, context=context)
        block, top_k, indexer = size.block, size.top_k, indexer_of(spec)

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            x=new(rows, spec.hidden),
            codes=new(rows * 2 * spec.hidden, dtype=torch.int8),
            scales=new(rows, spec.hidden // 32),
            ids=new(rows, top_k, dtype=torch.int32),
            weights=new(rows, top_k),
            normed=new(block, spec.hidden),
            router=new(block, size.n_choices),
            share=new(rows),
            kept=new(size.kept // spec.hidden, spec.hidden),
            wide=new(size.wide),
            narrow=new(size.narrow),
            parts=new(size.parts, dtype=torch.bfloat16),
            attention=PrefillScratch.make(
                size.entries, size.kv_rank, size.rope_dim, per_entry=size.per_entry, device=device
            ),
            mid=new(rows * size.inter),
            mid_codes=new(rows * 2 * size.inter, dtype=torch.int8),
            mid_scales=new(rows * (size.inter // 32)),
            part=new(rows * spec.hidden),
            index=None
            if indexer is None
            else IndexBuffers.make(indexer, rows, block=block, entries=0, device=device),
            streams=StreamBuffers.make(
                spec,
                rows,
                block=block,
                splits=CHUNK_SPLITS,
                context=context,
                device=device,
                parts=STREAM_PARTS,
            ),
        )

    @property
    def rows(self) -> int:
        """Most rows of a chunk."""
        return self.x.shape[0]

    @property
    def block_rows(self) -> int:
        """Most rows of a block."""
        return self.normed.shape[0]

    def scores(self, rope_dim: int) -> Tensor:
        """Room for an indexer's scores [rows, S]: that of expanded keys, not there yet."""
        entries = self.attention.ropes.numel() // rope_dim
        rows = self.attention.expanded.numel() // entries
        return shaped(self.attention.expanded, rows, entries)

    def n_bytes(self) -> int:
        """What all of it takes."""
        fields = [getattr(self, name) for name in self.__dataclass_fields__]
        tensors = [field for field in fields if isinstance(field, Tensor)]
        scratch = self.attention
        tensors += [scratch.parts, scratch.ropes, scratch.expanded]
        own = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        own += 0 if self.index is None else self.index.n_bytes()
        return own + (0 if self.streams is None else self.streams.n_bytes())


class Room:
    """Hands out a flat buffer from its beginning on."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._at = buffer, 0

    def take(self, *shape: int) -> Tensor:
        """The next piece, contiguous."""
        size = prod(shape)
        piece = self._buffer[self._at : self._at + size]
        self._at += size
        return piece.view(shape)

    def rest(self) -> Tensor:
        """What was not taken yet."""
        return self._buffer[self._at :]


def shaped(flat: Tensor, *shape: int) -> Tensor:
    """The beginning of a flat buffer as a tensor of some shape."""
    return flat[: prod(shape)].view(shape)
