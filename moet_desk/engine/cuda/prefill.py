"""Reading prompts on a device: chunks on a fixed grid, each expert brought once per chunk.

The twin is engine/prefill. A chunk stops after any layer when its turn is over, so that other
requests' answers go on: a turn is at most a layer longer than `TURN_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moet_desk.engine.card_faults import is_out_of_memory
from moet_desk.engine.cuda.blocks import LayerLaunches
from moet_desk.engine.cuda.chunk_blocks import ChunkLayer, ChunkRows, RoutedExperts
from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers, shaped
from moet_desk.engine.cuda.decode import CudaDecoder
from moet_desk.engine.cuda.expert_stream import ChunkExperts, Reading
from moet_desk.engine.cuda.head import HeadLaunches
from moet_desk.engine.cuda.shortcut import ChunkShortcut, ShortcutLaunches
from moet_desk.engine.cuda.step import StepModel
from moet_desk.engine.cuda.stream_chunk import StreamChunk, join_head
from moet_desk.engine.cuda.streams import StreamHeadLaunches, StreamLaunches, spread
from moet_desk.engine.draft import state_of
from moet_desk.engine.handle import PromptReading
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.engine.recurrent import pending_of
from moet_desk.engine.request import ActiveRequest
from moet_desk.engine.scheduler import TURN_S
from moet_desk.errors import MoetError
from moet_desk.kernels.triton.delta import RUN_COLUMNS
from moet_desk.kernels.triton.dense import embed
from moet_desk.kernels.triton.gemm import gemm, split
from moet_desk.kernels.triton.norms import rms_norm
from moet_desk.store.pack_format import Plane

_SCORED_ROWS = 8  # what the head of a step takes at once


@dataclass(slots=True)
class Chunk:
    """A chunk on its way through the layers.

    Attributes:
        rows: where it lies.
        reading: how its experts are computed.
        next_layer: index of the layer that comes next.
    """

    rows: ChunkRows
    reading: Reading
    next_layer: int = 0


class ChunkModel:
    """The layers of a model for prompt chunks, over a step's weights.

    Args:
        model: the step, which owns the weights.
        buffers: memory of a chunk.
        experts: the routed experts of a chunk.
    """

    def __init__(self, model: StepModel, buffers: ChunkBuffers, experts: ChunkExperts) -> None:
        self._model, self._b, self._experts = model, buffers, experts
        layers = [*model.layers, *([] if model.head is None else [model.head.layer])]
        self._layers = [self._of(layer) for layer in layers]

    def _of(
        self, layer: LayerLaunches | ShortcutLaunches | StreamLaunches
    ) -> ChunkLayer | ChunkShortcut | StreamChunk:
        model, b = self._model, self._b
        if isinstance(layer, StreamLaunches):
            scratch = model.buffers.attention
            return StreamChunk(layer, b, states=model.pooled_states, scratch=scratch)
        made = [
            ChunkLayer(
                half, b, cos=model.cos, sin=model.sin, interleaved=model.interleaved,
                eps=model.spec.norm_eps,
            )
            for half in (layer.halves if isinstance(layer, ShortcutLaunches) else [layer])
        ]  # fmt: skip
        return ChunkShortcut(layer, b, made) if isinstance(layer, ShortcutLaunches) else made[0]

    @property
    def n_layers(self) -> int:
        """Layers of the model, the MTP head's not among them."""
        return len(self._model.layers)

    @property
    def most_rows(self) -> int:
        """Rows of the largest chunk."""
        return self._b.rows

    def begin(self, tokens: Sequence[int], sequence: KvSequence, reading: Reading) -> Chunk:
        """Embed the tokens that follow what the sequence holds. Raises as `NgramRows.of`."""
        rows, ids = self._rows(tokens, sequence, reading)
        x, ngrams = self._b.x[: rows.n], self._model.ngrams
        embed(ids, self._model.embedding, x)
        if ngrams is not None:

            def product(seen: Tensor, out: Tensor) -> None:
                gemm(self._split(seen), ngrams.products, out, residual=out)

            ngrams.read_chunk(tokens, sequence, x, self._b.normed, product)
        if self._b.streams is not None:
            spread(self._b.x[: rows.n], self._b.streams.x[: rows.n])
        return Chunk(rows, reading)

    @property
    def _hidden(self) -> Tensor:
        """What rows are between layers."""
        return self._b.x if self._b.streams is None else self._b.streams.x

    def _rows(
        self, tokens: Sequence[int], sequence: KvSequence, reading: Reading, *, head: bool = False
    ) -> tuple[ChunkRows, Tensor]:
        """Rows behind what the sequence holds, and their tokens' ids on the device."""
        device, n, start = self._b.x.device, len(tokens), sequence.length
        slot, flat = sequence.slot, [0] * (2 * RUN_COLUMNS)
        if slot is not None and head:
            flat[0] = slot
        elif slot is not None:
            flat = [slot, pending_of(sequence.base, start), 0, 0, slot, 0, 0, 1]
            sequence.base = start + n - 1
        pages, ring = sequence.pages, sequence.ring_pages()
        host = torch.tensor([*flat, *tokens, *pages, *ring], dtype=torch.int32)
        if device.type == "cuda":
            host = host.pin_memory()
        lines = host.to(device, non_blocking=True)
        positions = torch.arange(start, start + n, dtype=torch.int32, device=device)
        sizes = [len(flat), n, len(pages), len(ring)]
        runs, ids, table, ring_table = torch.split(lines, sizes)
        rows = ChunkRows(
            start, reading.activations, positions, ids, table.view(1, -1), ring_table.view(1, -1),
            slot or 0, runs.view(2, -1),
        )  # fmt: skip
        return rows, ids

    def read_head(self, tokens: Sequence[int], sequence: KvSequence, reading: Reading) -> None:
        """Let the MTP head read the tokens behind the first rows of the chunk that was just read.

        Overwrites x. The sequence is the head's own; it moves on.

        Raises:
            MoetError: as `layer`.
        """
        head, b = self._model.head, self._b
        if head is None or not tokens:
            return
        rows, ids = self._rows(tokens, sequence, reading, head=True)
        if isinstance(head, StreamHeadLaunches):
            join_head(head, b, ids, self._model.embedding)
        else:
            self._join_head(head, rows, ids)
        experts = partial(_read_as, self._experts, reading)
        self._launch(len(self._model.layers), rows, experts)
        sequence.length += rows.n

    def _join_head(self, head: HeadLaunches, rows: ChunkRows, ids: Tensor) -> None:
        """x becomes what the MTP head's layer reads."""
        b, eps = self._b, self._model.spec.norm_eps
        for first in range(0, rows.n, b.block_rows):
            here = slice(first, min(first + b.block_rows, rows.n))
            x, normed = b.x[here], b.normed[: here.stop - first]
            rms_norm(x, self._model.final_norm, eps, out=normed)
            rms_norm(normed, head.hidden_norm, eps, out=normed)
            gemm(self._split(normed), head.w_hidden, x)
            embed(ids[here], self._model.embedding, normed)
            rms_norm(normed, head.token_norm, eps, out=normed)
            gemm(self._split(normed), head.w_token, x, residual=x)

    def _split(self, x: Tensor) -> Tensor:
        parts = shaped(self._b.parts, 2, *x.shape)
        split(x, parts)
        return parts

    def layer(self, chunk: Chunk) -> None:
        """Launch the next layer. Raises as `ChunkExperts.run`."""
        i = chunk.next_layer
        experts = partial(_read_as, self._experts, chunk.reading)
        self._launch(i, chunk.rows, experts)
        chunk.next_layer = i + 1

    def _launch(self, i: int, rows: ChunkRows, experts: RoutedExperts) -> None:
        layer = self._layers[i]
        if isinstance(layer, StreamChunk):
            layer.launch(rows, self._model.pool_memory(i), experts)
        elif isinstance(layer, ChunkShortcut):
            layer.launch(rows, self._model.both(i, rows.table), experts)
        elif i == len(self._model.layers):
            layer.launch(rows, self._model.memory_of_head(rows.table), experts)
        else:
            layer.launch(rows, self._model.memory(i, rows.table, rows.ring_table), experts)

    def logits(self, chunk: Chunk) -> Tensor:
        """Scores behind the chunk's last row, float32 [V] on the host; waits for the device."""
        return self._model.logits_of(self._hidden[chunk.rows.n - 1 : chunk.rows.n])[0]

    def scores(self, chunk: Chunk, at: int) -> Tensor:
        """Scores behind the rows from `at` on, at most `_SCORED_ROWS`; as `logits`, [T, V]."""
        return self._model.logits_of(self._hidden[at : min(at + _SCORED_ROWS, chunk.rows.n)])


def _read_as(
    experts: ChunkExperts,
    reading: Reading,
    layer: int,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    meanwhile: Callable[[], None],
) -> None:
    experts.run(layer, reading, ids, weights, out, meanwhile)


class CudaPrefiller:
    """Reads prompts into the KV cache, some layers of a chunk at a time.

    Args:
        model: the layers.
        decoder: takes the first token.
        chunk: tokens of a chunk; chunks begin at multiples of it.
        fast: how prompts of fast and balanced requests are read.
        make_room: gives memory of the card back.
        clock: seconds.

    Attributes:
        head_keeps_up: see `engine.prefill.Prefiller`.
    """

    head_keeps_up = True

    def __init__(
        self,
        model: ChunkModel,
        decoder: CudaDecoder,
        *,
        chunk: int,
        fast: Reading,
        make_room: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._decoder = model, decoder
        self.chunk, self._fast, self._clock = chunk, fast, clock
        self._make_room = make_room
        self.prompts = PromptReading.FP4 if fast is Reading.FAST_FP4 else PromptReading.NO_ROOM
        self._open: tuple[ActiveRequest, Chunk] | None = None

    @property
    def fast_uses_fine(self) -> bool:
        """Whether prompts of fast requests look into 4-bit slots."""
        return Plane.FINE in self._fast.planes

    def step(self, request: ActiveRequest) -> int:
        """Go on with the request's next chunk; after the last one the answer gets its first token.

        Returns:
            how many tokens were read: 0 while a chunk is on its way. A request that fails ends
            with its error.
        """
        ends = self._clock() + TURN_S
        try:
            chunk = self._read(request, ends)
            if chunk is None:
                return 0
            self._open = None
            return self._close(request, chunk)
        except MoetError as error:
            self._open = None
            request.fail(error)
            return 0

    def _read(self, request: ActiveRequest, ends: float) -> Chunk | None:
        """As `_read_layers`; a chunk that did not fit on the card is begun anew once.

        Not where a layer keeps more than an entry for each token: half a chunk has then changed
        what it began from.
        """
        try:
            return self._read_layers(request, ends)
        except RuntimeError as error:
            keeps_more = request.kv.slot is not None or bool(request.kv.ring)
            if keeps_more or not is_out_of_memory(error):
                raise
        self._open = None  # out here nothing holds what the first attempt had on the card
        self._make_room()
        return self._read_layers(request, ends)

    def _read_layers(self, request: ActiveRequest, ends: float) -> Chunk | None:
        """The chunk behind all layers; None if the turn is over before."""
        chunk = self._chunk_of(request)
        while chunk.next_layer < self._model.n_layers:
            self._model.layer(chunk)
            if self._clock() >= ends and chunk.next_layer < self._model.n_layers:
                return None
        return chunk

    def _chunk_of(self, request: ActiveRequest) -> Chunk:
        """The chunk on its way, if it is this request's; else its next one."""
        if self._open is not None and self._open[0] is request:
            return self._open[1]
        start = request.kv.length
        end = min(start - start % self.chunk + self.chunk, len(request.prompt_ids))
        reading = self._fast if request.plane is Plane.BASE else Reading.EXACT
        chunk = self._model.begin(request.prompt_ids[start:end], request.kv, reading)
        self._open = (request, chunk)
        return chunk

    def _close(self, request: ActiveRequest, chunk: Chunk) -> int:
        """Count the chunk's tokens as read; the last chunk gives the first token."""
        begin, n = chunk.rows.start, chunk.rows.n
        is_last = begin + n == len(request.prompt_ids)
        if request.request.prompt_logprobs:
            for at in range(0, n, _SCORED_ROWS):
                request.note_prompt(begin + at, self._model.scores(chunk, at))
        logits = self._model.logits(chunk) if is_last else None
        if self._decoder.drafting.follows(request):
            behind = request.prompt_ids[begin + 1 : begin + n + 1]
            self._model.read_head(behind, state_of(request).sequence, chunk.reading)
        request.kv.length += n
        request.note_read()
        if logits is not None and not request.ended:  # it has, if no token was asked for
            self._decoder.first(request, logits)
        return n
