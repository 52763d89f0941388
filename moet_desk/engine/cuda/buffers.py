"""Static memory of the decode step: every tensor that its launches read or write.

A captured graph remembers addresses, so all of this is made once, for the most rows a step can
have. Host inputs travel in one packed copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moet_desk.engine.cuda.chunk_sizes import projected_width
from moet_desk.engine.cuda.delta import DeltaBuffers
from moet_desk.engine.cuda.indexer import IndexBuffers
from moet_desk.engine.cuda.pooled_sizes import STEP_SPLITS
from moet_desk.engine.cuda.stream_buffers import StreamBuffers
from moet_desk.engine.sampling import Draw
from moet_desk.engine.spec import (
    Attention,
    Mla,
    PooledAttention,
    Spec,
    dense_widths,
    indexer_of,
)
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.triton.attention_parts import DecodeScratch
from moet_desk.kernels.triton.delta import RUN_COLUMNS
from moet_desk.kernels.triton.quant import planar_shape
from moet_desk.kernels.triton.sampling import SampleScratch, wish

MAX_ROWS = 8
"""Most rows of one step: 1 + drafts of one answer, or several answers side by side."""

RUN_AT, PAGES_AT = 3, 3 + RUN_COLUMNS
"""Where in a row's line its run and its page table begin."""

_WISH_BYTES, _DRAW_BYTES = 4 * 8, 2 * 8  # of a row: four float64, two int64


class StepInputs:
    """What the host says before a step, a line per row in each of three tables."""

    def __init__(self, max_pages: int, device: torch.device, *, has_rings: bool = False) -> None:
        width = PAGES_AT + (2 if has_rings else 1) * max_pages
        self._max_pages = max_pages
        self._ring_at = width - max_pages  # without rings both tables are the same
        n_bytes = MAX_ROWS * (_WISH_BYTES + _DRAW_BYTES + 4 * width)
        pinned = device.type == "cuda"
        self._host = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
        # int32 [MAX_ROWS, width]: token id, position, visible length, the run's
        # numbers as `kernels.triton.delta` has them, page table, with rings that of their layers
        wishes, draws, lines = (table.numpy() for table in _tables(self._host))
        self._wishes, self._draws, self._lines = wishes, draws, lines  # a store takes a tenth so
        self._pages: list[list[int] | None] = [None] * MAX_ROWS  # as they lie in the lines
        self._rings = list(self._pages)
        self._device_wishes, self._device_draws, self._device_lines = _tables(self._device)
        self._ids = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._lengths = torch.zeros_like(self._ids)

    def set_row(
        self, row: int, token: int, position: int, pages: list[int], ring: list[int]
    ) -> None:
        """A row reads a token at a position of a sequence with these pages, and those of layers
        with a window, which it takes in turn. A list of pages never changes: a sequence that has
        other pages has another list.
        """
        line = self._lines[row]
        line[:3] = token, position, position + 1
        if self._pages[row] is not pages:
            line[PAGES_AT : PAGES_AT + len(pages)] = pages
            self._pages[row] = pages
        if ring and self._rings[row] is not ring:
            line[self._ring_at : self._ring_at + len(pages)] = np.resize(ring, len(pages))
            self._rings[row] = ring

    def set_runs(self, runs: Sequence[Sequence[int]]) -> None:
        """Each row's numbers of its run, for mixers that have states."""
        self._lines[: len(runs), RUN_AT:PAGES_AT] = runs

    def set_draw(self, row: int, draw: Draw) -> None:
        """How the device chooses a row's token."""
        self._wishes[row] = wish(
            temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p, min_p=draw.min_p
        )
        seed = (draw.seed + 2**63) % 2**64 - 2**63  # the same number modulo 2**64, as int64
        self._draws[row] = seed, draw.position

    def send(self) -> None:
        """Copy the host's tables over; ordered before the launches that follow on the stream."""
        self._device.copy_(self._host, non_blocking=True)

    def unpack(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids, positions, lengths [T] int32 and page table [T, max_pages] int32 (a view)."""
        lines = self._device_lines[:rows]
        ids, positions, lengths = self._ids[:rows], self._positions[:rows], self._lengths[:rows]
        ids.copy_(lines[:, 0])
        positions.copy_(lines[:, 1])
        lengths.copy_(lines[:, 2])
        return ids, positions, lengths, lines[:, PAGES_AT : PAGES_AT + self._max_pages]

    def ring_table(self, rows: int) -> Tensor:
        """Page table [T, max_pages] int32 of layers with a window (a view)."""
        return self._device_lines[:rows, self._ring_at :]

    def runs(self, rows: int) -> Tensor:
        """The table of runs [T, RUN_COLUMNS] int32 (a view)."""
        return self._device_lines[:rows, RUN_AT:PAGES_AT]

    def draws(self, rows: int) -> tuple[Tensor, Tensor]:
        """Wishes [T, 4] float64 and draws [T, 2] int64, views, as `sample` takes them."""
        return self._device_wishes[:rows], self._device_draws[:rows]


def _tables(memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Wishes, draws and lines in one block of bytes; 8-byte numbers lie first, aligned."""
    at = MAX_ROWS * _WISH_BYTES
    end = at + MAX_ROWS * _DRAW_BYTES
    wishes, draws = memory[:at].view(torch.float64), memory[at:end].view(torch.int64)
    lines = memory[end:].view(torch.int32)
    return wishes.view(MAX_ROWS, -1), draws.view(MAX_ROWS, -1), lines.view(MAX_ROWS, -1)


class Choices:
    """Each row's chosen token and how sure the model is, on the device and back on the host.

    Attributes:
        tokens: int32 [MAX_ROWS] on the device.
        confidence: float32 [MAX_ROWS] on the device; NaN where a row's logits are no numbers.
        scratch: working memory of the choice.

    Raises:
        ValueError: the vocabulary is larger than the kernels take.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        shape = (2, MAX_ROWS)
        pinned = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(shape, dtype=torch.int32, device=device)
        self.tokens, self.confidence = self._device[0], self._device[1].view(torch.float32)
        self.scratch = SampleScratch.make(MAX_ROWS, vocab, device=device)

    def fetch(self) -> None:
        """Copy the results to the host; they are there once the stream was waited for."""
        self._host.copy_(self._device, non_blocking=True)

    def read(self, rows: int) -> list[int | None]:
        """The fetched tokens; None for a row whose logits hold NaN or infinity."""
        sure = self.read_confidence(rows)
        tokens: list[int] = self._host[0, :rows].tolist()
        return [None if math.isnan(p) else token for token, p in zip(tokens, sure, strict=True)]

    def read_confidence(self, rows: int) -> list[float]:
        """The fetched probabilities of the likeliest tokens, before temperature."""
        sure: list[float] = self._host[1, :rows].view(torch.float32).tolist()
        return sure


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Activations of a step, float32 unless said; rows first. See `make` for the widths."""

    x: Tensor
    normed: Tensor
    joined: Tensor
    q_latent_in: Tensor  # the query latent, or nothing
    queries: Tensor  # behind the query latent, or ready for grouped-query attention, or nothing
    q_rope: Tensor  # this and the next two: of MLA
    q_latent: Tensor
    mixed: Tensor
    heads: Tensor
    router: Tensor
    ids: Tensor  # int32; below 0 for an identity expert
    weights: Tensor
    share: Tensor  # weights of identity experts, added up
    codes: Mapping[Activations, Tensor]  # int32; a step uses one kind
    scales: Tensor
    hidden: Tensor
    hidden_codes: Mapping[Activations, Tensor]  # likewise
    hidden_scales: Tensor
    part: Tensor
    shared_mid: Tensor
    shared_out: Tensor
    shared_gate: Tensor
    logits: Tensor
    attention: DecodeScratch
    index: IndexBuffers | None  # of sparse attention
    delta: DeltaBuffers | None  # of layers with a state
    streams: StreamBuffers | None  # of a model with residual streams

    @classmethod
    def make(cls, spec: Spec, device: torch.device, *, context: int) -> StepBuffers:
        """Room for `MAX_ROWS` rows of a model with layers of one shape, of sequences of up to
        `context` tokens.
        """
        indexer = indexer_of(spec)
        width, moe, rows = _Widths.of(spec.attention), spec.moe_ffn, MAX_ROWS
        n = spec.attention.n_heads
        top_k, pairs = moe.router.top_k, rows * moe.router.top_k
        dense = dense_widths(spec)

        def f32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        def i32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def codes(n_rows: int, width: int) -> dict[Activations, Tensor]:
            return {kind: i32(n_rows, *planar_shape(width, kind)) for kind in Activations}

        return cls(
            x=f32(rows, spec.hidden),
            normed=f32(rows, spec.hidden),
            joined=f32(rows, width.joined),
            q_latent_in=f32(rows, width.q_latent_in),
            queries=f32(rows, width.queries),
            q_rope=f32(rows, n, width.q_rope),
            q_latent=f32(rows, n, width.latent),
            mixed=f32(rows, n, width.latent),
            heads=f32(rows, n * width.value),
            router=f32(rows, moe.router.n_choices),
            ids=i32(rows, top_k),
            weights=f32(rows, top_k),
            share=f32(rows),
            codes=codes(rows, spec.hidden),
            scales=f32(rows, spec.hidden // 32),
            hidden=f32(pairs, moe.inter),
            hidden_codes=codes(pairs, moe.inter),
            hidden_scales=f32(pairs, moe.inter // 32),
            part=f32(pairs, spec.hidden),
            shared_mid=f32(rows, max([moe.shared_inter, *dense, 1])),
            shared_out=f32(rows, spec.hidden),
            shared_gate=f32(rows, 1),
            logits=f32(rows, spec.vocab),
            attention=DecodeScratch.make(rows, n, width.mixed, device=device),
            index=None
            if indexer is None
            else IndexBuffers.make(indexer, rows, block=rows, entries=context, device=device),
            delta=DeltaBuffers.make(spec.delta[0], rows, device) if spec.delta else None,
            streams=StreamBuffers.make(
                spec, rows, block=rows, splits=STEP_SPLITS, context=context, device=device
            ),
        )


@dataclass(frozen=True, slots=True)
class _Widths:
    """Numbers of a row in attention; 1 for what there is not. The last four are of one head."""

    joined: int
    q_latent_in: int
    queries: int
    q_rope: int
    latent: int
    value: int
    mixed: int  # what scores weigh and add up

    @classmethod
    def of(cls, mixer: Attention | PooledAttention) -> _Widths:
        if isinstance(mixer, PooledAttention):
            return cls(1, 1, 1, q_rope=1, latent=1, value=1, mixed=mixer.head_dim)
        if not isinstance(mixer, Mla):
            queries, d = mixer.n_heads * mixer.head_dim, mixer.head_dim
            return cls(projected_width(mixer), 1, queries, q_rope=1, latent=1, value=d, mixed=d)
        r, dr = mixer.kv_rank, mixer.rope_dim
        queries = mixer.n_heads * (mixer.nope_dim + dr)
        return cls(
            joined=(mixer.q_rank or queries) + r + dr,
            q_latent_in=mixer.q_rank or 1,
            queries=queries if mixer.q_rank else 1,
            q_rope=dr, latent=r, value=mixer.v_dim, mixed=r,
        )  # fmt: skip
