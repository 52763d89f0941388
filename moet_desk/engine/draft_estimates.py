"""What guessing costs and brings, from what steps took: means, and what they say of steps that were
never made. Pure; the decisions are `draft_control`'s. Engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

LEARN_STEPS = 4  # plain steps before the first guess
TRIED = 4  # guesses at a place before the next place is tried
MEMORY = 16  # measurements that a mean remembers
CAUTION = 1.25
HEAD_SHARE = 0.5  # of a plain step, for one read of a head that was never timed
OUTLIER = 3.0


class Source(Enum):
    """Who guesses."""

    OFF = "off"
    MTP = "mtp"
    LOOKUP = "lookup"


GUESSERS = (Source.MTP, Source.LOOKUP)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a step was like.

    Attributes:
        results: by request: guesses made, and how many were right before the first wrong one.
        n_tokens: that all its requests got.
        check_s: seconds of its rows, without reruns of the gate: a token has these anyway.
        guess_s: seconds of guessing.
        behind_s: seconds in which heads read what they had not read yet.
        aside_s: seconds of asking what to guess, and of keeping what a head may be asked about.
    """

    results: tuple[tuple[int, int], ...]
    n_tokens: int
    check_s: float
    guess_s: float = 0.0
    behind_s: float = 0.0
    aside_s: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return sum(1 + guessed for guessed, _ in self.results)


@dataclass(slots=True)
class Mean:
    """The mean of the newest measurements: of all at first, then fading."""

    value: float = 0.0
    n: int = 0

    def add(self, x: float) -> None:
        """A measurement; what is far above the others is taken for an accident."""
        if self.n >= TRIED:
            x = min(x, OUTLIER * self.value)
        self.n = min(self.n + 1, MEMORY)
        self.value += (x - self.value) / self.n

    def count(self, hit: bool) -> None:
        """A yes or no, of which the mean is the share."""
        self.n = min(self.n + 1, MEMORY)
        self.value += (hit - self.value) / self.n

    def doubt(self) -> None:
        """Let the next measurements count for more."""
        self.n = min(self.n, TRIED)


class Estimates:
    """What is known of the steps of one regime.

    Args:
        n_requests: answers side by side.
        one_by_one: rows are read one after the other, none behind a wrong guess. Then a row is a
            plain step by itself, and its time is known from every step: a busy computer cannot
            make guesses look cheap.
    """

    def __init__(self, n_requests: int, *, one_by_one: bool = False) -> None:
        self.n_requests = n_requests
        self._one_by_one = one_by_one
        self.rows: dict[int, Mean] = {}  # seconds of a step's rows
        self.head = Mean()  # seconds of one read of the head
        self.right: dict[Source, list[Mean]] = {source: [] for source in GUESSERS}

    @property
    def plain_s(self) -> float | None:
        """Seconds of a step without guesses; None until it is known."""
        mean = self.rows.get(self.n_requests)
        return mean.value if mean is not None and mean.n >= LEARN_STEPS else None

    def note(self, source: Source, seen: Seen) -> None:
        """A step was made; one without guesses says what steps take without."""
        if self._one_by_one:
            self.rows.setdefault(1, Mean()).add(seen.check_s / max(1, seen.n_tokens))
        else:
            self.rows.setdefault(seen.rows, Mean()).add(self._plausible(seen))
        n_guessed = sum(guessed for guessed, _ in seen.results)
        if source is Source.MTP and n_guessed:
            self.head.add(seen.guess_s / n_guessed)
        if source is not Source.OFF:
            self._note_right(self.right[source], seen.results)

    def _plausible(self, seen: Seen) -> float:
        """Seconds of the rows; a first run that compiled something says nothing of the next."""
        plain = self.plain_s
        if plain is None:
            return seen.check_s
        return min(seen.check_s, 2 * plain * seen.rows / self.n_requests)

    def _note_right(self, means: list[Mean], results: Sequence[tuple[int, int]]) -> None:
        """Shares of guesses that were right where those before them were."""
        for guessed, right in results:
            means += [Mean() for _ in range(guessed - len(means))]
            for place in range(min(guessed, right + 1)):
                means[place].count(place < right)

    def gain(self, source: Source, counts: Sequence[int], behind: int) -> float:
        """Speed of a step with guesses over that of plain ones. What was never seen is hoped for:
        a first guess is right and a first further row is free.
        """
        plain = self.plain_s
        assert plain is not None, "asked before plain steps are known"  # noqa: S101
        tokens = self.n_requests + sum(
            reach for count in counts for reach in self._reaches(source, count)
        )
        rows_s = self._rows_s(self.n_requests + sum(counts))
        taken = plain * tokens if self._one_by_one else rows_s
        if source is Source.MTP:
            taken += self.head.value * (sum(counts) + behind)
        return tokens / self.n_requests * plain / taken if taken > 0 else 1.0

    def _reaches(self, source: Source, count: int) -> Iterator[float]:
        """The chance of each place that all guesses up to it are right."""
        reach, share = 1.0, 1.0
        for place in range(count):
            means = self.right[source]
            share = means[place].value if place < len(means) and means[place].n else share
            reach *= share
            yield reach

    def _rows_s(self, rows: int) -> float:
        """Seconds of a step; between and beyond what was measured on straight lines."""
        known = sorted(self.rows)
        if rows in self.rows:
            return self.rows[rows].value
        below = [r for r in known if r < rows]
        above = [r for r in known if r > rows]
        low = below[-1]
        if above:
            high = above[0]
        elif len(below) > 1:
            low, high = below[0], below[-1]
        else:
            return self.rows[low].value
        slope = (self.rows[high].value - self.rows[low].value) / (high - low)
        return max(self.rows[low].value + slope * (rows - low), 0.0)

    def worst(self, source: Source, counts: Sequence[int], behind: int) -> float:
        """Plain steps that are lost if no guess is right. A step of n rows takes no longer than n
        of one row, and a read of the head no longer than half a plain step.
        """
        plain = self.plain_s
        assert plain is not None, "asked before plain steps are known"  # noqa: S101
        rows = self.n_requests + sum(counts)
        mean = self.rows.get(rows)
        taken = rows / self.n_requests
        if mean is not None and mean.n >= TRIED:
            taken = min(taken, CAUTION * mean.value / plain)
        if source is Source.MTP:
            head = HEAD_SHARE
            if self.head.n >= TRIED:
                head = CAUTION * self.head.value / plain
            taken += head * (sum(counts) + behind)
        return taken - 1.0

    def lost(self, seen: Seen) -> float:
        """Plain steps that a step with guesses took more than its tokens would have without; what
        its rows cannot have cost is an accident. 0 while plain steps are not known.
        """
        plain = self.plain_s
        if plain is None:
            return 0.0
        guessing_s = seen.guess_s + seen.behind_s
        if self._one_by_one:
            return guessing_s / plain
        most = OUTLIER * plain * seen.rows / self.n_requests
        return (min(seen.check_s, most) + guessing_s) / plain - seen.n_tokens / self.n_requests

    def refresh(self) -> None:
        """Plain steps come that say what they take now: let them count."""
        self.rows[self.n_requests].doubt()

    def tried(self, source: Source) -> int:
        """Places at which this guesser was seen often enough."""
        return sum(mean.n >= TRIED for mean in self.right[source])

    def doubt(self, source: Source) -> None:
        """A probe begins: let what it shows count."""
        for mean in (*self.right[source], self.head):
            mean.doubt()
        for rows, mean in self.rows.items():
            if rows != self.n_requests:
                mean.doubt()
