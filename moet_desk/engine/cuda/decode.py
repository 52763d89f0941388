"""Decode on a device, over the captured step. The twin is engine/decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from moet_desk.engine.cuda.buffers import MAX_ROWS
from moet_desk.engine.cuda.step import StepModel, StepRow
from moet_desk.engine.draft import Acceptance
from moet_desk.engine.gate import Gate
from moet_desk.engine.request import ActiveRequest
from moet_desk.engine.sampling import Chosen
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import Plane


class CudaDecoder:
    """Makes tokens for the running requests, several rows per launch."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self.gate, self.acceptance = Gate(), Acceptance()

    def step(self, requests: Sequence[ActiveRequest]) -> None:
        """One token for each request. Rows that share a launch share its failure."""
        for plane in Plane:
            for group in _groups([r for r in requests if r.plane is plane]):
                self._step(group, plane)

    def first(self, request: ActiveRequest, logits: Tensor) -> None:
        """The first token, from the scores [V] behind a prompt that was just read on the device.

        If they are too unsure for a balanced answer, the prompt's last token is read again.
        """
        if request.tau is not None:
            self._model.judge(1)
            if self._unsure([request]):
                request.kv.length -= 1
                self._rerun([request], self._model.judge(1))
                return
        _accept(request, partial(request.sampler.choose, logits))

    def _step(self, requests: Sequence[ActiveRequest], plane: Plane) -> None:
        for request in requests:
            request.steps += 1
        picks = self._picks(requests, plane)
        if not picks:
            return
        unsure = self._unsure(requests)
        likeliest = self._model.judge(len(requests)) if unsure else []
        for i, (request, pick) in enumerate(zip(requests, picks, strict=True)):
            if i not in unsure:
                request.kv.length += 1
                _accept(request, pick)
        if unsure:  # last: it overwrites the logits that the others chose from
            self._rerun([requests[i] for i in unsure], [likeliest[i] for i in unsure])

    def _unsure(self, requests: Sequence[ActiveRequest]) -> list[int]:
        """Rows of the newest step that must be made again.

        Always the device's confidence: the host's could round differently, and who chooses a row's
        token depends on the rows beside it.
        """
        if all(request.tau is None for request in requests):
            return []
        sure = self._model.confidence(len(requests))
        return [i for i, r in enumerate(requests) if self.gate.is_unsure(r, sure[i])]

    def _rerun(self, requests: Sequence[ActiveRequest], before: Sequence[int | None]) -> None:
        """Read the newest tokens again with FP4 experts, which writes their KV anew, and go on.

        Args:
            requests: at most a launch; their lengths do not count the newest token yet.
            before: each row's likeliest token at 2 bits.
        """
        picks = self._picks(requests, Plane.FINE)
        if not picks:
            return
        after = self._model.judge(len(requests))
        for i, (request, pick) in enumerate(zip(requests, picks, strict=True)):
            self.gate.note_rerun(before[i], after[i])
            request.kv.length += 1
            _accept(request, pick)

    def _picks(
        self, requests: Sequence[ActiveRequest], plane: Plane
    ) -> Sequence[Callable[[], Chosen]]:
        """What takes each request's next token. Empty if the step failed; they have ended then."""
        try:
            return self._launch(requests, plane)
        except MoetError as error:
            for request in requests:
                request.fail(error)
            return ()

    def _launch(
        self, requests: Sequence[ActiveRequest], plane: Plane
    ) -> Sequence[Callable[[], Chosen]]:
        """Run the step. Tokens are chosen on the device unless one of the requests needs the host:
        then all are, from the same logits, with the same result.
        """
        rows = [StepRow(_newest(request), request.kv) for request in requests]
        samplers = [request.sampler for request in requests]
        draws = [draw for sampler in samplers if (draw := sampler.draw()) is not None]
        if len(draws) == len(rows):
            tokens = self._model.choose(rows, plane, draws)
            return [partial(sampler.take, tokens[i]) for i, sampler in enumerate(samplers)]
        logits = self._model.run(rows, plane)
        if any(request.tau is not None for request in requests):
            self._model.judge(len(rows))
        return [partial(sampler.choose, logits[i]) for i, sampler in enumerate(samplers)]


def _newest(request: ActiveRequest) -> int:
    """The token that a step reads: the answer's last one, or the prompt's."""
    return request.out_ids[-1] if request.out_ids else request.prompt_ids[-1]


def _accept(request: ActiveRequest, pick: Callable[[], Chosen]) -> None:
    """Take the next token; invalid numbers fail the request."""
    try:
        with torch.inference_mode():
            request.accept(pick())
    except MoetError as error:
        request.fail(error)


def _groups(requests: Sequence[ActiveRequest]) -> Iterable[Sequence[ActiveRequest]]:
    return (requests[i : i + MAX_ROWS] for i in range(0, len(requests), MAX_ROWS))
