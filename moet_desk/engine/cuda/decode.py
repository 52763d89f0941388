"""Decode on a device, over the captured step. The twin is engine/decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from moet_desk.engine.cuda.buffers import MAX_ROWS
from moet_desk.engine.cuda.step import StepModel, StepRow
from moet_desk.engine.request import ActiveRequest
from moet_desk.engine.sampling import Chosen
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import Plane


class CudaDecoder:
    """Makes tokens for the running requests, several rows per launch."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def step(self, requests: Sequence[ActiveRequest]) -> None:
        """One token for each request. Rows that share a launch share its failure."""
        for plane in Plane:
            for group in _groups([r for r in requests if r.plane is plane]):
                self._step(group, plane)

    def _step(self, requests: Sequence[ActiveRequest], plane: Plane) -> None:
        rows = [StepRow(request.out_ids[-1], request.kv) for request in requests]
        for request in requests:
            request.steps += 1
        try:
            picks = self._picks(requests, rows, plane)
        except MoetError as error:
            for request in requests:
                request.fail(error)
            return
        for request, pick in zip(requests, picks, strict=True):
            request.kv.length += 1
            _accept(request, pick)

    def _picks(
        self, requests: Sequence[ActiveRequest], rows: Sequence[StepRow], plane: Plane
    ) -> list[Callable[[], Chosen]]:
        """Run the step. Gives for each request what takes its next token, chosen on the device
        unless one of them needs the host: then all are, from the same logits, with the same result.
        """
        samplers = [request.sampler for request in requests]
        draws = [draw for sampler in samplers if (draw := sampler.draw()) is not None]
        if len(draws) < len(rows):
            logits = self._model.run(rows, plane)
            return [partial(sampler.choose, logits[i]) for i, sampler in enumerate(samplers)]
        tokens = self._model.choose(rows, plane, draws)
        return [partial(sampler.take, tokens[i]) for i, sampler in enumerate(samplers)]


def accept(request: ActiveRequest, logits: Tensor) -> None:
    """Choose and take the next token; invalid numbers fail the request."""
    _accept(request, partial(request.sampler.choose, logits))


def _accept(request: ActiveRequest, pick: Callable[[], Chosen]) -> None:
    try:
        with torch.inference_mode():
            request.accept(pick())
    except MoetError as error:
        request.fail(error)


def _groups(requests: Sequence[ActiveRequest]) -> Iterable[Sequence[ActiveRequest]]:
    return (requests[i : i + MAX_ROWS] for i in range(0, len(requests), MAX_ROWS))
