"""The answers that `moet-desk eval` has made: tasks with one right answer, and hidden numbers.

Asks through the same handle as a chat, greedily and one answer at a time. Runs in the main thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from moet_desk.cli.engine import ask
from moet_desk.cli.eval_data import Task, bad_line, haystack, holds, is_right
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
class TaskScore:
    """How one quality did."""

    right: int
    cut: int  # answers that ended at the limit of tokens
    rerun_share: float | None  # of a balanced answer's tokens that were made again


@dataclass(frozen=True, slots=True)
class LengthRatio:
    """Tokens of answers divided by those of `exact`, task by task."""

    median: float
    geometric_mean: float


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """What came of the tasks."""

    tasks: int
    scores: Mapping[Quality, TaskScore]
    lengths: Mapping[Quality, LengthRatio]  # of qualities other than exact, if exact was measured


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
    qualities: Sequence[Quality],
    *,
    path: Path,
    max_tokens: int,
    gate: float,
    progress: Progress,
) -> TaskFigures:
    """Have every task answered in every quality.

    `path` is the file they are from, for the words of an error; `gate` is of balanced answers.

    Raises:
        MoetError: MD-EVAL-02 a task longer than the context (before any is answered); the engine
            refused or failed a request.
        KeyboardInterrupt: Ctrl+C.
    """
    _check_lengths(handle, tasks, path)
    right, cut = dict.fromkeys(qualities, 0), dict.fromkeys(qualities, 0)
    rerun = dict.fromkeys(qualities, 0)
    lengths: dict[Quality, list[int]] = {quality: [] for quality in qualities}
    total = len(tasks) * len(qualities)
    for number, task in enumerate(tasks):
        for place, quality in enumerate(qualities):
            request = replace(_request(task, quality, max_tokens), gate=gate)
            text, finished = _answer(handle, request)
            right[quality] += is_right(task, text)
            cut[quality] += finished.reason is FinishReason.LENGTH
            rerun[quality] += finished.usage.rerun_tokens or 0
            lengths[quality].append(finished.usage.completion_tokens)
            progress(number * len(qualities) + place + 1, total)
    ratios: dict[Quality, LengthRatio] = {
        quality: length_ratio(lengths[quality], lengths[Quality.EXACT])
        for quality in qualities
        if quality is not Quality.EXACT and Quality.EXACT in qualities
    }
    scores = {
        quality: TaskScore(
            right[quality],
            cut[quality],
            rerun[quality] / sum(lengths[quality]) if quality is Quality.BALANCED else None,
        )
        for quality in qualities
    }
    return TaskFigures(len(tasks), scores, ratios)


def _check_lengths(handle: EngineHandle, tasks: Sequence[Task], path: Path) -> None:
    info = handle.model()
    for task in tasks:
        n_tokens = handle.count_tokens(_request(task, Quality.EXACT, 1))
        if info is not None and n_tokens >= info.context:
            reason = f"it has {n_tokens} tokens and the context holds {info.context}"
            raise bad_line(path, task.line, reason)


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
