"""What a quality costs on text: likelihood of the real next token, and distance from `exact`.

Runs the CPU engine's parts without its thread, every quality over the same chunk before the next
one, so that their scores can be compared and forgotten: memory holds the scores of `SLICE` tokens,
however long the text is. Called from the main thread; nothing else may use the core meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moet_desk import hardware
from moet_desk.engine.gate import confidence
from moet_desk.engine.gate_curve import Counts
from moet_desk.engine.handle import (
    EngineOptions,
    GenerateRequest,
    Quality,
    RequestStream,
    Sampling,
)
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.engine.loader import Core, load
from moet_desk.engine.request import ActiveRequest
from moet_desk.engine.sampling import Sampler
from moet_desk.engine.text import Text
from moet_desk.errors import fail
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import Failed

SLICE = 64
"""Tokens whose scores are in memory at once: with 160,000 words, 80 MB for each quality."""

PLANES: Mapping[Quality, Plane] = {Quality.FAST: Plane.BASE, Quality.EXACT: Plane.FINE}


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a quality's next-token distributions are from those of `exact`."""

    kl_mean: float  # KL(exact || quality), nats per token
    top1_agreement: float  # share of tokens where both find the same token likeliest
    largest_margin: float | None  # nats `exact` puts between the two where they disagree most


@dataclass(frozen=True, slots=True)
class TextFigures:
    """What was measured on one text. Nats per token."""

    tokens: int  # that were scored
    nll: Mapping[Quality, float]
    distance: Mapping[Quality, Distance]  # of qualities other than exact, if exact was measured


class Tally:
    """Sums over scored tokens; holds no scores itself."""

    def __init__(self, qualities: Sequence[Quality], *, model: str) -> None:
        self._model = model  # for the words of an error
        self._compared: list[Quality] = []
        if Quality.EXACT in qualities:
            self._compared = [quality for quality in qualities if quality is not Quality.EXACT]
        self._nll = dict.fromkeys(qualities, 0.0)
        self._kl = dict.fromkeys(self._compared, 0.0)
        self._agreed = dict.fromkeys(self._compared, 0)
        self._margin: dict[Quality, float] = {}
        self.tokens = 0

    def add(self, logits: Mapping[Quality, Tensor], targets: Tensor) -> None:
        """Count tokens whose scores are known.

        Shapes:
            logits [T, V] each, targets [T] int64: the tokens that really follow

        Raises:
            MoetError: MD-ENG-04, scores that are no numbers.
        """
        _check_finite(logits, self._model)
        scores = {quality: torch.log_softmax(x.double(), -1) for quality, x in logits.items()}
        for quality, score in scores.items():
            self._nll[quality] -= float(score.gather(1, targets[:, None]).sum())
        for quality in self._compared:
            self._compare(quality, scores[Quality.EXACT], scores[quality])
        self.tokens += len(targets)

    def figures(self) -> TextFigures:
        """Means over everything added; at least one token must have been."""
        n = self.tokens
        nll = {quality: total / n for quality, total in self._nll.items()}
        distance = {
            quality: Distance(
                kl_mean=max(self._kl[quality] / n, 0.0),  # rounding may leave it a hair below
                top1_agreement=self._agreed[quality] / n,
                largest_margin=self._margin.get(quality),
            )
            for quality in self._compared
        }
        return TextFigures(n, nll, distance)

    def _compare(self, quality: Quality, exact: Tensor, other: Tensor) -> None:
        self._kl[quality] += float((exact.exp() * (exact - other)).sum())
        best, picked = exact.argmax(-1, keepdim=True), other.argmax(-1, keepdim=True)
        differ = (best != picked)[:, 0]
        self._agreed[quality] += len(differ) - int(differ.sum())
        if differ.any():
            margins = (exact.gather(1, best) - exact.gather(1, picked))[differ]
            self._margin[quality] = max(float(margins.max()), self._margin.get(quality, 0.0))


class FlipTally:
    """Reduces scores to what a gate sees (`fast` alone) and what it should have caught."""

    def __init__(self, counts: Counts, *, model: str) -> None:
        self._counts = counts
        self._model = model
        self.tokens = 0

    def add(self, logits: Mapping[Quality, Tensor], targets: Tensor) -> None:
        """Count tokens; shapes and errors as those of `Tally.add`."""
        _check_finite(logits, self._model)
        fast, exact = logits[Quality.FAST], logits[Quality.EXACT]
        confidences = torch.softmax(fast.double(), -1).amax(-1)
        flips = fast.argmax(-1) != exact.argmax(-1)
        for sure, flip in zip(confidences.tolist(), flips.tolist(), strict=True):
            self._counts.add(sure, flip=flip)
        self.tokens += len(targets)


def _check_finite(logits: Mapping[Quality, Tensor], model: str) -> None:
    if not all(bool(x.isfinite().all()) for x in logits.values()):
        reason = "The model computed scores that are no numbers"
        raise fail("MD-ENG-04", reason=reason, model=model)


@contextmanager
def opened_core(pack: Path, options: EngineOptions) -> Iterator[tuple[Core, Text]]:
    """The parts of the CPU engine, with room for one text in every quality.

    Raises:
        MoetError: as `loader.load` and `Text.load`.
    """
    torch.set_num_threads(options.threads or hardware.engine_threads(hardware.probe().cores))
    text = Text.load(pack)
    core = load(pack, replace(options, max_running=len(PLANES), save_heat=False))
    try:
        yield core, text
    finally:
        core.close()


def windows_of(
    text: Text, documents: Iterable[str], *, size: int, most_tokens: int | None = None
) -> list[Tensor]:
    """Ids of the documents, int32, cut into windows of at most `size`.

    Every window begins with bos if the model's texts do, and knows nothing of the one before it.
    What a window's first token cannot tell is not scored, so windows of one token are left out.
    `most_tokens` limits the scored tokens of all together.
    """
    windows: list[Tensor] = []
    left = math.inf if most_tokens is None else most_tokens
    for document in documents:
        ids = text.encode_prompt(document)
        start = ids[:1] if ids[:1] == [text.bos_id] else []
        body, room = ids[len(start) :], size - len(start)
        for at in range(0, len(body), room):
            window = [*start, *body[at : at + room]][: int(min(left + 1, size))]
            if len(window) > 1:
                windows.append(torch.tensor(window, dtype=torch.int32))
                left -= len(window) - 1
            if left <= 0:
                return windows
    return windows


@torch.inference_mode()
def measure(
    core: Core,
    windows: Sequence[Tensor],
    qualities: Sequence[Quality],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TextFigures:
    """Score windows (at least one, of two tokens or more) in every quality.

    `progress` is told how many tokens were scored and how many there are.

    Raises:
        MoetError: MD-NVME-04, MD-PACK-.. an expert could not be read, MD-ENG-04.
    """
    tally = Tally(qualities, model=core.reader.path.name)
    _score_all(core, windows, tally, qualities, progress)
    return tally.figures()


@torch.inference_mode()
def count_flips(
    core: Core,
    windows: Sequence[Tensor],
    counts: Counts,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Count how sure `fast` is at every scored token, and where `exact` prefers another one.

    `progress` and errors as those of `measure`.
    """
    tally = FlipTally(counts, model=core.reader.path.name)
    _score_all(core, windows, tally, tuple(PLANES), progress)


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and the answer to it, as one window: ids [T] int32, T at least n_prompt + 1."""

    ids: Tensor
    n_prompt: int


@torch.inference_mode()
def answer_exactly(core: Core, text: Text, prompt_ids: Sequence[int], limit: int) -> Answered:
    """Let `exact` answer greedily, by the way a chat takes; its end token counts as said.

    The prompt must leave room for a token in the context. `limit` is the most tokens of the answer.

    Raises:
        MoetError: MD-NVME-04, MD-PACK-.. an expert could not be read, MD-ENG-04.
    """
    sampling, model = Sampling(temperature=0), core.reader.path.name
    ids = list(prompt_ids)
    sampler = Sampler(
        sampling, text.defaults, prompt_ids=ids, vocab=core.spec.vocab, top_logprobs=None,
        model=model,
    )  # fmt: skip
    asked = GenerateRequest(prompt_ids=ids, quality=Quality.EXACT, sampling=sampling)
    stream = RequestStream(model, lambda _: None)
    limit = min(limit, core.plan.context - len(ids))
    request = ActiveRequest(asked, stream, ids, text=text, sampler=sampler, limit=limit)
    request.kv = _reserve(core, request.most_tokens)
    try:
        while not request.ended:
            if request.reading:
                core.prefiller.step(request)
            else:
                core.decoder.step([request])
    finally:
        core.kv.release(request.kv)
    for event in stream.take():
        if isinstance(event, Failed):
            raise event.error
    return Answered(torch.tensor([*ids, *request.out_ids], dtype=torch.int32), len(ids))


@torch.inference_mode()
def count_answer_flips(
    core: Core,
    answers: Sequence[Answered],
    counts: Counts,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Count the steps of answers alone, and where a rerun really comes to what `exact` says.

    It reads one token with FP4 experts behind a prompt and an answer that were read with 2 bits, as
    for `balanced`, so it may still differ from `exact`, even where `fast` does not. `progress` is
    told answers. Errors as those of `measure`.
    """
    for done, one in enumerate(answers, 1):
        ids, sequences = one.ids.long(), [_reserve(core, len(one.ids)) for _ in PLANES]
        try:
            fast = _choices(core, one, sequences[0], Plane.BASE)
            exact = _choices(core, one, sequences[1], Plane.FINE)
            reruns = _reruns_on_the_way if core.kv.forgets else _reruns
            again = reruns(core, ids, sequences[0], one.n_prompt - 1)
            for (sure, said), (_, wanted), token in zip(fast, exact, again, strict=True):
                counts.add(sure, flip=said != wanted, stays=token != wanted)
        finally:
            for sequence in sequences:
                core.kv.release(sequence)
        progress(done, len(answers))


def _reruns(core: Core, ids: Tensor, sequence: KvSequence, first: int) -> list[int]:
    """Likeliest token behind each of `ids` from `first` on but the last, each read with FP4 experts
    where all before it were read with 2 bits, as `sequence` was.
    """
    found = []
    # from behind, so that the KV before a step is still that of 2 bits
    for place in reversed(range(first, len(ids) - 1)):
        core.kv.rewind(sequence, place)
        found.append(_token_behind(core, ids[place : place + 1], sequence))
    return found[::-1]


def _reruns_on_the_way(core: Core, ids: Tensor, sequence: KvSequence, first: int) -> list[int]:
    """The same where a sequence cannot go back far: everything is read once more on the way."""
    core.kv.rewind(sequence, 0)
    for start in range(0, first, core.prefiller.chunk):
        end = min(start + core.prefiller.chunk, first)
        core.prefiller.hidden(ids[start:end], sequence, Plane.BASE)
    found = []
    for place in range(first, len(ids) - 1):
        token = ids[place : place + 1]
        found.append(_token_behind(core, token, sequence))
        core.kv.rewind(sequence, place)
        core.prefiller.hidden(token, sequence, Plane.BASE)
    return found


def _token_behind(core: Core, token: Tensor, sequence: KvSequence) -> int:
    hidden = core.prefiller.hidden(token, sequence, Plane.FINE)
    return int(core.model.logits(hidden)[0].argmax())


def _choices(
    core: Core, one: Answered, sequence: KvSequence, plane: Plane
) -> list[tuple[float, int]]:
    """Confidence and likeliest token of each step, prompt and answer read in one plane."""
    ids, chunk = one.ids.long(), core.prefiller.chunk
    hidden = [
        core.prefiller.hidden(ids[start : start + chunk], sequence, plane)
        for start in range(0, len(ids), chunk)
    ]
    steps = torch.cat(hidden)[one.n_prompt - 1 : -1]
    chosen: list[tuple[float, int]] = []
    for at in range(0, len(steps), SLICE):
        logits = core.model.logits(steps[at : at + SLICE])
        _check_finite({Quality.FAST: logits}, core.reader.path.name)
        chosen += [(confidence(row), int(row.argmax())) for row in logits]
    return chosen


class _Adder(Protocol):
    """What takes the scores of each slice."""

    tokens: int  # so far

    def add(self, logits: Mapping[Quality, Tensor], targets: Tensor) -> None: ...


def _score_all(
    core: Core,
    windows: Sequence[Tensor],
    tally: _Adder,
    qualities: Sequence[Quality],
    progress: Callable[[int, int], None],
) -> None:
    total = sum(len(window) - 1 for window in windows)
    for window in windows:
        _score(core, window.long(), tally, qualities, lambda done: progress(done, total))


def _score(
    core: Core,
    ids: Tensor,
    tally: _Adder,
    qualities: Sequence[Quality],
    progress: Callable[[int], None],
) -> None:
    sequences = {quality: _reserve(core, len(ids)) for quality in qualities}
    try:
        chunk = core.prefiller.chunk
        for start in range(0, len(ids), chunk):
            part, following = ids[start : start + chunk], ids[start + 1 : start + chunk + 1]
            hidden = {
                quality: core.prefiller.hidden(part, sequences[quality], PLANES[quality])
                for quality in qualities
            }
            for at in range(0, len(following), SLICE):
                targets = following[at : at + SLICE]
                upto = at + len(targets)
                logits = {
                    quality: core.model.logits(states[at:upto])
                    for quality, states in hidden.items()
                }
                tally.add(logits, targets)
            progress(tally.tokens)
    finally:
        for sequence in sequences.values():
            core.kv.release(sequence)


def _reserve(core: Core, n_tokens: int) -> KvSequence:
    sequence = core.kv.reserve(n_tokens)
    if sequence is None:
        raise RuntimeError("a window is longer than the context that was planned")
    return sequence
