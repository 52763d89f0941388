"""The answers that `moet-desk eval` has made: tasks with one right answer, and hidden numbers.

Asks through the same handle as a chat, greedily and one answer at a time. Runs in the main thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

from moet_desk.cli.engine import ask
from moet_desk.cli.eval_data import Task, check_length, haystack, holds, is_right
from moet_desk.engine.handle import EngineHandle, GenerateRequest, Quality, Sampling
from moet_desk.telemetry import Finished, FinishReason

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEEDLE_ANSWER = 32
"""Tokens kept for the answer that names the hidden number."""
SPARE = 4
"""Tokens by which one prompt may be longer with the number at another depth."""

Progress = Callable[[int, int], None]
"""Called with how many answers there are and how many there will be."""


@dataclass(frozen=True, slots=True)
class Way:
    """How answers are made: a quality, and of balanced ones the gate."""

    quality: Quality
    gate: float | None = None


EXACT = Way(Quality.EXACT)


@dataclass(frozen=True, slots=True)
class TaskScore:
    """How one way did."""

    right: int
    tokens: int  # of all answers, their end tokens included
    cut: int  # answers that ended at the limit of tokens
    rerun_share: float | None  # of a balanced answer's tokens that were made again
    tok_per_s: float | None  # of writing, without reading the prompts


@dataclass(frozen=True, slots=True)
class LengthRatio:
    """Tokens of answers divided by those of `exact`, task by task."""

    median: float
    geometric_mean: float


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """What came of the tasks."""

    tasks: int
    scores: Mapping[Way, TaskScore]
    lengths: Mapping[Way, LengthRatio]  # of ways other than exact, if exact was measured


@dataclass(frozen=True, slots=True)
class Found:
    """How often a hidden number was found at one place."""

    quality: Quality
    context: int  # tokens of the prompt at most, with the room for the answer
    depth: float
    found: int
    trials: int


def run_tasks(
    handle: EngineHandle,
    tasks: Sequence[Task],
    ways: Sequence[Way],
    *,
    path: Path,
    max_tokens: int,
    progress: Progress,
) -> TaskFigures:
    """Have every task answered in every way; `path` is their file, for the words of an error.

    Raises:
        MoetError: MD-EVAL-02 a task longer than the context (before any is answered); the engine
            refused or failed a request.
        KeyboardInterrupt: Ctrl+C.
    """
    _check_lengths(handle, tasks, path)
    sums = {way: _Sums() for way in ways}
    total = len(tasks) * len(ways)
    for number, task in enumerate(tasks):
        for place, way in enumerate(ways):
            request = replace(_request(task, way.quality, max_tokens), gate=way.gate)
            text, finished = _answer(handle, request)
            sums[way].add(finished, right=is_right(task, text))
            progress(number * len(ways) + place + 1, total)
    ratios: dict[Way, LengthRatio] = {
        way: length_ratio(sums[way].lengths, sums[EXACT].lengths)
        for way in ways
        if way != EXACT and EXACT in sums
    }
    return TaskFigures(len(tasks), {way: sums[way].score() for way in ways}, ratios)


@dataclass(slots=True)
class _Sums:
    """What is counted of one way's answers."""

    right: int = 0
    cut: int = 0
    rerun: int | None = None
    write_s: float = 0.0
    lengths: list[int] = field(default_factory=list)  # tokens, task by task

    def add(self, finished: Finished, *, right: bool) -> None:
        usage = finished.usage
        self.right += right
        self.cut += finished.reason is FinishReason.LENGTH
        self.write_s += usage.decode_s
        self.lengths.append(usage.completion_tokens)
        if usage.rerun_tokens is not None:
            self.rerun = (self.rerun or 0) + usage.rerun_tokens

    def score(self) -> TaskScore:
        tokens = sum(self.lengths)
        return TaskScore(
            right=self.right,
            tokens=tokens,
            cut=self.cut,
            rerun_share=None if self.rerun is None else self.rerun / tokens,
            tok_per_s=tokens / self.write_s if self.write_s else None,
        )


def _check_lengths(handle: EngineHandle, tasks: Sequence[Task], path: Path) -> None:
    info = handle.model()
    for task in tasks:
        n_tokens = handle.count_tokens(_request(task, Quality.EXACT, 1))
        if info is not None:
            check_length(path, task, n_tokens, info.context)


def length_ratio(lengths: Sequence[int], exact: Sequence[int]) -> LengthRatio:
    """Compare lengths pair by pair; an answer has one token at least, if only its end."""
    ratios = [one / other for one, other in zip(lengths, exact, strict=True)]
    return LengthRatio(median(ratios), math.exp(fmean(map(math.log, ratios))))


def find_needles(
    handle: EngineHandle,
    qualities: Sequence[Quality],
    *,
    context: int,
    trials: int,
    gate: float,
    progress: Progress,
) -> list[Found]:
    """Hide numbers in a quarter, a half and all of the context, and ask for them.

    Raises:
        MoetError: the engine refused or failed a request.
        KeyboardInterrupt: Ctrl+C.
    """
    figures: list[Found] = []
    sizes = (context // 4, context // 2, context)
    total = len(sizes) * len(DEPTHS) * len(qualities) * trials
    for size in sizes:
        n_sentences = _fitting(handle, size - NEEDLE_ANSWER, trials)
        for depth in DEPTHS:
            for quality in qualities:
                found = 0
                for trial in range(trials):
                    question, number = haystack(n_sentences, depth, trial)
                    request = replace(_chat(question, quality, NEEDLE_ANSWER), gate=gate)
                    found += holds(_answer(handle, request)[0], number)
                    progress(len(figures) * trials + trial + 1, total)
                figures.append(Found(quality, size, depth, found, trials))
    return figures


def _fitting(handle: EngineHandle, n_tokens: int, trials: int) -> int:
    """Sentences of filler with which the prompt of each trial stays within `n_tokens`."""

    def fits(n_sentences: int) -> bool:
        return all(
            handle.count_tokens(_chat(haystack(n_sentences, 0.5, trial)[0], Quality.FAST, 1))
            <= n_tokens - SPARE
            for trial in range(trials)
        )

    low, high = 0, n_tokens // 4  # a sentence of the filler has more than four tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _request(task: Task, quality: Quality, max_tokens: int) -> GenerateRequest:
    if task.question is not None:
        return _chat(task.question, quality, max_tokens)
    return GenerateRequest(
        prompt=task.prompt,
        quality=quality,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=0),
        client="eval",
    )


def _chat(question: str, quality: Quality, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        messages=[{"role": "user", "content": question}],
        quality=quality,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=0),
        client="eval",
    )


def _answer(handle: EngineHandle, request: GenerateRequest) -> tuple[str, Finished]:
    answer = ask(handle, request, lambda text: None)
    if answer.interrupted:
        raise KeyboardInterrupt
    return answer.text, answer.finished
