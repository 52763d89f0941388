"""Static memory of the decode step: every tensor that its launches read or write.

A captured graph remembers addresses, so all of this is made once, for the most rows a step can
have. Host inputs travel in one packed copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moet_desk.engine.spec import DenseFfn, Spec
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.triton.attention import DecodeScratch
from moet_desk.kernels.triton.quant import planar_shape

MAX_ROWS = 8
"""Most rows of one step: 1 + drafts of one answer, or several answers side by side."""


class StepInputs:
    """What the host says before a step: int32, one line per row.

    Layout of a line: token id, position, visible length, then the page table.
    """

    def __init__(self, max_pages: int, device: torch.device) -> None:
        width = 3 + max_pages
        pinned = device.type == "cuda"
        self.host = torch.zeros((MAX_ROWS, width), dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros((MAX_ROWS, width), dtype=torch.int32, device=device)
        self._ids = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._lengths = torch.zeros_like(self._ids)

    def send(self) -> None:
        """Copy the host's lines over; ordered before the launches that follow on the stream."""
        self._device.copy_(self.host, non_blocking=True)

    def unpack(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids, positions, lengths [T] int32 and page table [T, max_pages] int32 (a view)."""
        lines = self._device[:rows]
        ids, positions, lengths = self._ids[:rows], self._positions[:rows], self._lengths[:rows]
        ids.copy_(lines[:, 0])
        positions.copy_(lines[:, 1])
        lengths.copy_(lines[:, 2])
        return ids, positions, lengths, lines[:, 3:]


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Activations of a step, float32 unless said; rows first. See `make` for the widths."""

    x: Tensor
    normed: Tensor
    joined: Tensor
    q_latent_in: Tensor  # the query latent, or nothing
    queries: Tensor  # after the query latent, or nothing
    q_rope: Tensor
    q_latent: Tensor
    mixed: Tensor
    heads: Tensor
    router: Tensor
    ids: Tensor  # int32
    weights: Tensor
    codes: Mapping[Activations, Tensor]  # int32; a step uses one kind
    scales: Tensor
    hidden: Tensor
    hidden_codes: Mapping[Activations, Tensor]  # likewise
    hidden_scales: Tensor
    part: Tensor
    shared_mid: Tensor
    shared_out: Tensor
    logits: Tensor
    attention: DecodeScratch

    @classmethod
    def make(cls, spec: Spec, device: torch.device) -> StepBuffers:
        """Room for `MAX_ROWS` rows of a model with MLA layers of one shape."""
        mixer, moe, rows = spec.layers[0].mixer, spec.moe_ffn, MAX_ROWS
        n, r, dr = mixer.n_heads, mixer.kv_rank, mixer.rope_dim
        head = mixer.nope_dim + dr
        q_in = mixer.q_rank or n * head
        top_k, pairs = moe.router.top_k, rows * moe.router.top_k
        dense = [layer.ffn.inter for layer in spec.layers if isinstance(layer.ffn, DenseFfn)]

        def f32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        def i32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def codes(n_rows: int, width: int) -> dict[Activations, Tensor]:
            return {kind: i32(n_rows, *planar_shape(width, kind)) for kind in Activations}

        return cls(
            x=f32(rows, spec.hidden),
            normed=f32(rows, spec.hidden),
            joined=f32(rows, q_in + r + dr),
            q_latent_in=f32(rows, mixer.q_rank or 1),
            queries=f32(rows, n * head if mixer.q_rank else 1),
            q_rope=f32(rows, n, dr),
            q_latent=f32(rows, n, r),
            mixed=f32(rows, n, r),
            heads=f32(rows, n * mixer.v_dim),
            router=f32(rows, moe.router.n_experts),
            ids=i32(rows, top_k),
            weights=f32(rows, top_k),
            codes=codes(rows, spec.hidden),
            scales=f32(rows, spec.hidden // 32),
            hidden=f32(pairs, moe.inter),
            hidden_codes=codes(pairs, moe.inter),
            hidden_scales=f32(pairs, moe.inter // 32),
            part=f32(pairs, spec.hidden),
            shared_mid=f32(rows, max([moe.shared_inter, *dense, 1])),
            shared_out=f32(rows, spec.hidden),
            logits=f32(rows, spec.vocab),
            attention=DecodeScratch.make(rows, n, r, device=device),
        )
