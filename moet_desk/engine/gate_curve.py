"""Where a gate on confidence should be: what each threshold costs and catches, and which to take.

A gate reruns the decode steps whose likeliest token has a probability below tau under 2-bit
experts. A flip is a step where FP4 experts find another token likeliest. Pure: counts only, so
memory does not grow with the text. Any thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

GRID = tuple(k / 100 for k in range(101))
"""The thresholds that are looked at."""


@dataclass(frozen=True, slots=True)
class Point:
    """What one threshold does. Shares are 0 to 1, and None of nothing."""

    tau: float
    rerun: float | None  # of all steps
    caught: float | None  # of all flips; of answers, those a rerun mends less those it makes


class Limit(Enum):
    """What decided a threshold; the values are stored and shown."""

    TARGET = "target"  # the smallest that catches what was asked for
    BUDGET = "budget"  # it catches less: more reruns are not allowed


@dataclass(frozen=True, slots=True)
class Choice:
    """The threshold to use, and why."""

    point: Point
    limit: Limit


class Counts:
    """How many steps and flips lie below each threshold."""

    def __init__(self) -> None:
        # bin i: what thresholds from GRID[i] on rerun; the last bin is never rerun
        self._steps = [0] * (len(GRID) + 1)
        self._flips = [0] * (len(GRID) + 1)
        self._mended = [0] * (len(GRID) + 1)

    @property
    def tokens(self) -> int:
        return sum(self._steps)

    @property
    def flips(self) -> int:
        return sum(self._flips)

    def add(self, confidence: float, *, flip: bool, stays: bool = False) -> None:
        """Count one step whose likeliest token has this probability.

        `stays` says that a rerun finds another token than `exact`, be the step a flip or not.
        """
        at = bisect_right(GRID, confidence)  # a step is rerun strictly below tau only
        self._steps[at] += 1
        self._flips[at] += flip
        self._mended[at] += flip - stays

    def curve(self) -> list[Point]:
        """What every threshold of the grid does. Reruns never fall along it, nor does what is
        caught unless reruns make flips of their own; then it may, and is never below 0.
        """
        tokens, flips = self.tokens, self.flips
        rerun = caught = 0
        points = []
        for at, tau in enumerate(GRID):
            rerun += self._steps[at]
            caught += self._mended[at]
            points.append(Point(tau, _share(rerun, tokens), _share(max(0, caught), flips)))
        return points


def choose(curve: Sequence[Point], *, target: float, budget: float) -> Choice | None:
    """The smallest threshold that catches `target` of the flips and reruns no more than `budget`.

    If there is none, the smallest of those that catch most within the budget. None if there were no
    flips: then nothing is known about catching them.
    """
    known = [
        (point, point.caught)
        for point in curve
        if point.caught is not None and point.rerun is not None and point.rerun <= budget
    ]
    for point, caught in known:
        if caught >= target:
            return Choice(point, Limit.TARGET)
    if not known:
        return None
    best, _ = max(known, key=lambda one: one[1])  # the first, so the smallest, of equals
    return Choice(best, Limit.BUDGET)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
