"""How uneven routing must be for a pool to answer a wanted share of look-ups. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

TOLERANCE = 0.003
"""How near the measured hit rate comes to the wanted one."""

_BEYOND = 1.1
"""Of a way beyond what was measured: a goal that lies between two measurements is soon found."""


def find_popularity(
    rate_at: Callable[[float], float],
    goal: float,
    *,
    guess: float,
    tolerance: float = TOLERANCE,
    attempts: int = 8,
) -> float:
    """The popularity, of those tried, whose measured hit rate is nearest to the goal.

    More popularity means more hits. The logarithm of the miss rate falls nearly in a line, so a
    secant through two measurements finds the goal in a few tries. Between enclosing ones it is kept
    away from the ends, so that noise cannot stall it. Beyond the last one it goes a little further
    than the line says, at most to half or twice of it: few hits make slow steps.
    """
    tried: dict[float, float] = {}
    low: float | None = None
    high: float | None = None
    popularity = guess
    for _ in range(attempts):
        rate = tried[popularity] = rate_at(popularity)
        if abs(rate - goal) <= tolerance:
            break
        before = high if low is None else low
        if rate < goal:
            low = popularity
        else:
            high = popularity
        if low is None or high is None:
            popularity *= _further(before, popularity, tried, goal)
        else:
            popularity = low + (high - low) * min(max(_share(low, high, tried, goal), 0.1), 0.9)
    return min(tried, key=lambda each: abs(tried[each] - goal))


def _further(before: float | None, last: float, tried: Mapping[float, float], goal: float) -> float:
    """The factor from the last popularity to the next, when all were on one side of the goal."""
    most = 2.0 if tried[last] < goal else 0.5
    if before is None:
        return most
    share = _share(before, last, tried, goal)
    factor = 1 + _BEYOND * (share - 1) * (last - before) / last
    return min(max(factor, 1.05), most) if most > 1 else max(min(factor, 0.95), most)


def _share(first: float, second: float, tried: Mapping[float, float], goal: float) -> float:
    """Where a line through two measurements meets the goal: 0 at the first, 1 at the second; the
    middle if it does not.
    """

    def log_misses(rate: float) -> float:
        return math.log(max(1 - rate, 1e-6))

    at_first, at_second = log_misses(tried[first]), log_misses(tried[second])
    if at_first == at_second:
        return 0.5
    return (log_misses(goal) - at_first) / (at_second - at_first)
