"""How many of a token's likely experts are brought ahead for the next layer. Pure.

A row that was not needed cost a transfer that others may have waited for, and somebody its slot;
one that was needed saved most of its transfer. So guesses are few where few of them are right.
"""

from __future__ import annotations

JUDGED_ROWS = 64
"""Rows that must have been brought before their use says something."""

FAIR_SHARE, GOOD_SHARE = 0.3, 0.6
"""Of the rows brought, those that were needed: with less, fewer are guessed; with more, more. When
the demo model's routing was played with times of an H200, 48 % still paid (bench/lookahead.py).
"""

REST_STEPS = 4096
"""Without guesses, before one is tried again."""


class AheadControl:
    """Decides it from what was brought and needed lately.

    Attributes:
        most: experts of each token that are guessed, from 0 to `top_k`.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self.most = top_k
        self._brought = self._needed = self._rested = 0

    def note(self, brought: int, needed: int, steps: int) -> int:
        """Take into account what some steps did, and say what holds from here on.

        Args:
            brought: rows, for one layer ahead.
            needed: those of them that the layer asked for.
            steps: how many there were.
        """
        if not self.most:
            self._rested += steps
            if self._rested >= REST_STEPS:
                self.most = 1
            return self.most
        self._brought += brought
        self._needed += needed
        if self._brought >= JUDGED_ROWS:
            share = self._needed / self._brought
            if share < FAIR_SHARE:
                self.most //= 2 if share >= FAIR_SHARE / 2 else self._top_k + 1
            elif share >= GOOD_SHARE:
                self.most = min(self._top_k, 2 * self.most)
            self._brought = self._needed = self._rested = 0
        return self.most
