"""Decode on a device, over the captured step. The twin is engine/decode.

A request has a row for its newest token and one for each guess behind it. All rows are computed
together; then each request goes on along its rows for as long as the guesses were right. What rows
behind a wrong guess stored in the KV cache is overwritten: the sequence's length does not count it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from moet_desk.engine.cuda.step import StepModel
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.drafting import Drafting, Round
from moet_desk.engine.gate import Gate
from moet_desk.engine.request import ActiveRequest
from moet_desk.engine.sampling import Chosen
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import Plane

Pick = Callable[[], Chosen]
"""Takes the token behind a row."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of a request in a step: `tokens` are its newest one and guesses of the next ones."""

    request: ActiveRequest
    tokens: Sequence[int]

    @property
    def guesses(self) -> Sequence[int]:
        """What may follow the newest token."""
        return self.tokens[1:]


class CudaDecoder:
    """Makes tokens for the running requests, several rows per launch."""

    def __init__(self, model: StepModel, drafting: Drafting | None = None) -> None:
        self._model = model
        self.drafting = Drafting() if drafting is None else drafting
        self.gate = Gate()

    def step(self, requests: Sequence[ActiveRequest]) -> None:
        """A token for each request, and more where guesses were right. Rows that share a launch
        share its failure.
        """
        for plane in Plane:
            mine = [request for request in requests if request.plane is plane]
            if not mine:
                continue
            most = self._model.most_rows
            step = self.drafting.begin(mine, self.gate.rerun_s)
            runs = (Run(r, [_newest(r), *guesses][:most]) for r, guesses in step.runs)
            for group in _groups(runs, most):
                self._step(group, plane, step)
            self.drafting.end(step, self.gate.rerun_s)

    def first(self, request: ActiveRequest, logits: Tensor) -> None:
        """The first token, from the scores [V] behind a prompt that was just read on the device.

        What the model knew there is the step's first row of states. If the scores are too unsure
        for a balanced answer, the prompt's last token is read again.
        """
        if request.tau is not None:
            self._model.judge(1)
            if self.gate.is_unsure(request, self._model.confidence(1)[0]):
                request.kv.length -= 1
                self._rerun([request], self._model.judge(1))
                return
        self._note(request, 0, 1)
        _accept(request, partial(request.sampler.choose, logits))

    def _step(self, runs: Sequence[Run], plane: Plane, step: Round[ActiveRequest]) -> None:
        for run in runs:
            run.request.steps += 1
        picks = self._picks(runs, plane)
        if not picks:
            return
        sure = self._confidence(runs)
        unsure: list[tuple[ActiveRequest, int]] = []
        for run, first in zip(runs, _first_rows(runs), strict=True):
            rows = slice(first, first + len(run.tokens))
            before = run.request.kv.length
            n_right, stopped_at = self._go_along(run, picks[rows], sure[rows])
            self.drafting.checked(step, run.request, len(run.guesses), n_right)
            self._note(run.request, first, run.request.kv.length - before)
            if stopped_at is not None:
                unsure.append((run.request, first + stopped_at))
        if unsure:  # last: it overwrites the logits that the others chose from
            likeliest = self._model.judge(len(picks))
            self._rerun([request for request, _ in unsure], [likeliest[row] for _, row in unsure])

    def _go_along(
        self, run: Run, picks: Sequence[Pick], sure: Sequence[float]
    ) -> tuple[int, int | None]:
        """Take a token behind each row until one was guessed wrong.

        Returns:
            how many guesses were right, and the place of a row that is too unsure and must be made
            again, if there was one before a wrong one.
        """
        request, n_right, unsure = run.request, 0, None
        for i, pick in enumerate(picks):
            if self.gate.is_unsure(request, sure[i]):
                unsure = i
                break
            request.kv.length += 1
            token = _accept(request, pick)
            if request.ended or i == len(run.guesses) or token != run.guesses[i]:
                break
            n_right += 1
        return n_right, unsure

    def _note(self, request: ActiveRequest, first: int, count: int) -> None:
        """Let the head know what the newest step knew at rows that count."""
        if count and not request.ended and self.drafting.follows(request):
            self.drafting.note(request, self._model.states(first, count))

    def _confidence(self, runs: Sequence[Run]) -> Sequence[float]:
        """How sure each row of the newest step is; NaN, which nobody reads, if no one asks.

        Always the device's: the host's could round differently, and who chooses a row's token
        depends on the rows beside it.
        """
        count = sum(len(run.tokens) for run in runs)
        if all(run.request.tau is None for run in runs):
            return [float("nan")] * count
        return self._model.confidence(count)

    def _rerun(self, requests: Sequence[ActiveRequest], before: Sequence[int | None]) -> None:
        """Read the newest tokens again with FP4 experts, which writes their KV anew, and go on.

        Args:
            requests: at most a launch; their lengths do not count the newest token yet.
            before: each row's likeliest token at 2 bits.
        """
        began = time.monotonic()
        picks = self._picks([Run(request, [_newest(request)]) for request in requests], Plane.FINE)
        if not picks:
            return
        for i, request in enumerate(requests):
            self._note(request, i, 1)
        after = self._model.judge(len(requests))  # waits for the device: the time is all of it
        self.gate.note_time(requests, time.monotonic() - began)
        for i, (request, pick) in enumerate(zip(requests, picks, strict=True)):
            self.gate.note_rerun(before[i], after[i])
            request.kv.length += 1
            _accept(request, pick)

    def _picks(self, runs: Sequence[Run], plane: Plane) -> Sequence[Pick]:
        """What takes the token behind each row. Empty if the step failed; all have ended then."""
        try:
            return self._launch(runs, plane)
        except MoetError as error:
            for run in runs:
                run.request.fail(error)
            return ()

    def _launch(self, runs: Sequence[Run], plane: Plane) -> Sequence[Pick]:
        """Run the step. Tokens are chosen on the device unless one of the requests needs the host:
        then all are, from the same logits, with the same result.
        """
        rows = [
            (run.request, StepRow(token, run.request.kv, i))
            for run in runs
            for i, token in enumerate(run.tokens)
        ]
        steps = [row for _, row in rows]
        draws = [draw for r, row in rows if (draw := r.sampler.draw(row.ahead)) is not None]
        if len(draws) == len(rows):
            tokens = self._model.choose(steps, plane, draws)
            return [partial(r.sampler.take, tokens[i]) for i, (r, _) in enumerate(rows)]
        logits = self._model.run(steps, plane)
        if any(run.request.tau is not None for run in runs):
            self._model.judge(len(rows))
        return [partial(r.sampler.choose, logits[i]) for i, (r, _) in enumerate(rows)]


def _newest(request: ActiveRequest) -> int:
    """The token that a step reads: the answer's last one, or the prompt's."""
    return request.out_ids[-1] if request.out_ids else request.prompt_ids[-1]


def _accept(request: ActiveRequest, pick: Pick) -> int | None:
    """Take the next token; invalid numbers fail the request, and there is none."""
    try:
        with torch.inference_mode():
            chosen = pick()
            request.accept(chosen)
    except MoetError as error:
        request.fail(error)
        return None
    return chosen.token_id


def _first_rows(runs: Sequence[Run]) -> Iterator[int]:
    """The row of each run's newest token."""
    return accumulate((len(run.tokens) for run in runs[:-1]), initial=0)


def _groups(runs: Iterable[Run], most_rows: int) -> Iterator[Sequence[Run]]:
    """Neighbouring runs with no more rows together than a launch has."""
    group: list[Run] = []
    for run in runs:
        if sum(len(one.tokens) for one in group) + len(run.tokens) > most_rows:
            yield group
            group = []
        group.append(run)
    if group:
        yield group
