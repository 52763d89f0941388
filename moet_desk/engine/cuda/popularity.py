"""How uneven routing must be for a pool to answer a wanted share of look-ups. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

TOLERANCE = 0.003
"""How near the measured hit rate comes to the wanted one."""


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
    secant through the two enclosing measurements finds the goal in a few tries; it is kept away
    from the ends of the interval, so that noise cannot stall it.
    """
    tried: dict[float, float] = {}
    low: float | None = None
    high: float | None = None
    popularity = guess
    for _ in range(attempts):
        rate = tried[popularity] = rate_at(popularity)
        if abs(rate - goal) <= tolerance:
            break
        if rate < goal:
            low = popularity
        else:
            high = popularity
        if high is None:
            popularity *= 2
        elif low is None:
            popularity /= 2
        else:
            popularity = _between(low, high, tried, goal)
    return min(tried, key=lambda each: abs(tried[each] - goal))


def _between(low: float, high: float, tried: Mapping[float, float], goal: float) -> float:
    def log_misses(rate: float) -> float:
        return math.log(max(1 - rate, 1e-6))

    at_low, at_high = log_misses(tried[low]), log_misses(tried[high])
    share = (log_misses(goal) - at_low) / (at_high - at_low) if at_high != at_low else 0.5
    return low + (high - low) * min(max(share, 0.1), 0.9)
