"""Reading prompts: chunks on a fixed grid, tokens grouped by expert, no decode slot evicted.

The chunk size comes from the plan and chunks start at multiples of it, so what a prompt computes to
depends on the prompt and the plan alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

import torch
from torch import Tensor

from moet_desk.engine.blocks.expert_math import ExpertMath
from moet_desk.engine.blocks.ffn import NO_EXPERT
from moet_desk.engine.decode import Decoder
from moet_desk.engine.handle import PromptReading
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.model import Model
from moet_desk.engine.request import ActiveRequest
from moet_desk.engine.residency import Residency
from moet_desk.engine.scheduler import TURN_S
from moet_desk.errors import MoetError
from moet_desk.kernels.reference import combine
from moet_desk.store.pack_format import Plane

_SLICE = 16  # rows whose scores are made at once: a vocabulary each


class PrefillExperts:
    """Routed experts of many tokens: each is read once and serves all tokens that chose it."""

    def __init__(self, residency: Residency, math: ExpertMath, plane: Plane) -> None:
        self._residency = residency
        self._math = math
        self._plane = plane

    def __call__(self, moe_layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`."""
        n_tokens, top_k = ids.shape
        chosen = ids.flatten()
        by_expert = torch.argsort(chosen, stable=True)  # places in [T * K], grouped by expert
        experts, counts = torch.unique_consecutive(chosen[by_expert], return_counts=True)
        parts = x.new_empty((n_tokens * top_k, x.shape[1]))
        codes, scales = self._math.prepare(x)
        groups = torch.split(by_expert, counts.tolist())
        for expert, places in zip(experts.tolist(), groups, strict=True):
            if expert == NO_EXPERT:
                parts[places] = 0.0
                continue
            slot = self._residency.read(self._plane, moe_layer, expert)
            tokens = places // top_k
            parts[places] = self._math.mlp(
                codes[tokens], scales[tokens], slot, moe_layer=moe_layer, expert=expert
            )
        return combine(parts.view(n_tokens, top_k, -1), weights)


class Prefiller:
    """Reads prompts into the KV cache, a chunk at a time.

    Args:
        model, kv: the model and the pages it writes to.
        experts: of each plane.
        decoder: its gate judges the first token of a balanced answer too.
        chunk: tokens of a chunk.
        clock: seconds.

    Attributes:
        fast_uses_fine: whether prompts of fast requests look into 4-bit slots.
        head_keeps_up: whether the MTP head has read a chunk as soon as the model has. Here it waits
            with the last token for the one behind it.
    """

    fast_uses_fine = False
    head_keeps_up = False

    def __init__(
        self,
        model: Model,
        kv: KvCache,
        experts: dict[Plane, PrefillExperts],
        *,
        decoder: Decoder,
        chunk: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._kv = kv
        self._experts = experts
        self._decoder = decoder
        self.chunk, self._clock = chunk, clock
        self._open: tuple[ActiveRequest, Generator[None, None, Tensor]] | None = None
        self.prompts = PromptReading.CPU  # with the experts of the answer

    def step(self, request: ActiveRequest) -> int:
        """Go on with the request's next chunk; after the last one the answer gets its first token.

        Returns:
            how many tokens were read: 0 while a chunk is on its way. A request that fails ends
            with its error.
        """
        start, ends = request.kv.length, self._clock() + TURN_S
        end = min(start - start % self.chunk + self.chunk, len(request.prompt_ids))
        try:
            layers = self._layers_of(request, start, end)
            hidden = None
            while hidden is None:
                try:
                    next(layers)
                except StopIteration as read:
                    hidden = read.value
                else:
                    if self._clock() >= ends:
                        return 0
            self._open = None
            self._close(request, start, end, hidden)
        except MoetError as error:
            self._open = None
            request.fail(error)
        return end - start

    def _layers_of(
        self, request: ActiveRequest, start: int, end: int
    ) -> Generator[None, None, Tensor]:
        """The layers of the chunk on its way, if it is this request's; else of its next one."""
        if self._open is None or self._open[0] is not request:
            ids, experts = torch.tensor(request.prompt_ids[start:end]), self._experts[request.plane]
            self._open = request, self._model.layers(ids, self._kv, request.kv, experts)
        return self._open[1]

    def _close(self, request: ActiveRequest, start: int, end: int, hidden: Tensor) -> None:
        """The chunk was read; behind the last one comes the answer's first token.

        Shapes:
            hidden [end - start, H]
        """
        if request.request.prompt_logprobs:
            for at in range(0, len(hidden), _SLICE):
                logits = self._decoder.scores(hidden[at : at + _SLICE])
                request.note_prompt(start + at, logits)
        request.note_read()
        if end < len(request.prompt_ids):
            self._decoder.drafting.note(request, hidden)
        elif not request.ended:  # it is, if no token of an answer was asked for
            logits = self._decoder.gated(request, request.prompt_ids[-1], hidden)
            request.accept(request.sampler.choose(logits))

    def hidden(self, ids: Tensor, sequence: KvSequence, plane: Plane) -> Tensor:
        """Read one chunk and return its hidden states: ids [T] int64 -> [T, H] float32."""
        return self._model.forward(ids, self._kv, sequence, self._experts[plane])
