"""Memory of prompt reading, made once: a chunk's rows, and room for a block of them at a time.

Attention and dense products run block by block, so only the residual stream and what the experts
need exist for the whole chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

import torch
from torch import Tensor

from moet_desk.engine.spec import DenseFfn, Mla, Spec
from moet_desk.kernels.triton.dense import SCALE_BLOCK
from moet_desk.kernels.triton.prefill_attention import PrefillScratch

BLOCK_ROWS = 2048
"""Rows whose queries exist at the same time: 64 heads of 512 take 256 MiB."""

EXPANDED_BYTES = 512 << 20
"""Most room for keys and values made from latents; heads are taken in turns when more are needed.
"""


@dataclass(frozen=True, slots=True)
class ChunkBuffers:
    """Activations of a chunk of up to M rows, in blocks of up to B rows. float32 unless said.

    Attributes:
        x: [M, H], the residual stream.
        codes, scales: flat int8 and [M, H/32], the experts' input.
        ids, weights: [M, K] int32 and float32.
        normed: [B, H].
        router: [B, E].
        wide: flat; the joined projections, the queries, or gate and up of a block.
        narrow: flat; rotary queries, then what the heads mixed.
        parts: flat bfloat16; an input of a dense product in two parts.
        attention: entries of the sequence, decoded.
        mid, mid_codes, mid_scales, part: flat; a batch of experts' pairs.
    """

    x: Tensor
    codes: Tensor
    scales: Tensor
    ids: Tensor
    weights: Tensor
    normed: Tensor
    router: Tensor
    wide: Tensor
    narrow: Tensor
    parts: Tensor
    attention: PrefillScratch
    mid: Tensor
    mid_codes: Tensor
    mid_scales: Tensor
    part: Tensor

    @classmethod
    def make(cls, spec: Spec, rows: int, *, context: int, device: torch.device) -> ChunkBuffers:
        """Room for chunks of `rows` tokens of sequences of up to `context`."""
        mixer, moe, block = spec.layers[0].mixer, spec.moe_ffn, min(rows, BLOCK_ROWS)
        width = mixer.nope_dim + mixer.v_dim
        dense = [layer.ffn.inter for layer in spec.layers if isinstance(layer.ffn, DenseFfn)]
        inter = max([moe.shared_inter, *dense])
        entries = -(-context // 64) * 64
        least = SCALE_BLOCK // gcd(SCALE_BLOCK, width) * width  # groups begin at a scale block
        per_entry = min(mixer.n_heads * width, max(least, EXPANDED_BYTES // 4 // entries))

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        n, r, dr = mixer.n_heads, mixer.kv_rank, mixer.rope_dim
        heads = n * mixer.v_dim
        return cls(
            x=new(rows, spec.hidden),
            codes=new(rows * 2 * spec.hidden, dtype=torch.int8),
            scales=new(rows, spec.hidden // 32),
            ids=new(rows, moe.router.top_k, dtype=torch.int32),
            weights=new(rows, moe.router.top_k),
            normed=new(block, spec.hidden),
            router=new(block, moe.router.n_experts),
            wide=new(block * max(_query_width(mixer), 2 * inter)),
            narrow=new(block * (n * dr + max(heads, mixer.q_rank or 0))),
            parts=new(
                2 * block * max(spec.hidden, mixer.q_rank or 0, heads, inter), dtype=torch.bfloat16
            ),
            attention=PrefillScratch.make(entries, r, dr, per_entry=per_entry, device=device),
            mid=new(rows * moe.inter),
            mid_codes=new(rows * 2 * moe.inter, dtype=torch.int8),
            mid_scales=new(rows * (moe.inter // 32)),
            part=new(rows * spec.hidden),
        )

    @property
    def rows(self) -> int:
        """Most rows of a chunk."""
        return self.x.shape[0]

    @property
    def block_rows(self) -> int:
        """Most rows of a block."""
        return self.normed.shape[0]

    def n_bytes(self) -> int:
        """What all of it takes."""
        tensors = [getattr(self, name) for name in self.__dataclass_fields__ if name != "attention"]
        scratch = self.attention
        tensors += [scratch.parts, scratch.ropes, scratch.expanded]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _query_width(mixer: Mla) -> int:
    """Floats a row needs in `wide` for projections: joined ones, then all queries."""
    queries = mixer.n_heads * (mixer.nope_dim + mixer.rope_dim)
    joined = (mixer.q_rank or queries) + mixer.kv_rank + mixer.rope_dim
    return joined + (queries if mixer.q_rank else 0)


def chunk_bytes(spec: Spec, rows: int, *, context: int) -> int:
    """What `ChunkBuffers.make` takes, without making it."""
    return ChunkBuffers.make(spec, rows, context=context, device=torch.device("meta")).n_bytes()


def shaped(flat: Tensor, *shape: int) -> Tensor:
    """The beginning of a flat buffer as a tensor of some shape."""
    return flat[: prod(shape)].view(shape)
