"""Whether to guess, who guesses and how far: decisions from what steps took and what was right.

Pure: no clock, no model. Times are measured by `drafting` and come in here, so the cost of a
model's head, of a step's further rows and of the expert bytes these ask for are all in them. What
is decided changes how soon an answer comes, never what it says.

Guessing is bounded by an account in plain steps (steps without guesses). Every token earns a
hundred and twenty-fifth of one; a step that took longer than its tokens would have without guesses
pays the difference, and every step what was spent on its way: where one takes half a millisecond,
asking is dear. No step is taken that could overdraw, and with an empty account nobody asks. So over
any 500 tokens at most `MOST_SPARE + 500 * EARNED` = 8 plain steps are lost, 1.6 %, whatever the
estimates say. Engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moet_desk.engine.draft_estimates import (
    GUESSERS,
    TRIED,
    Estimates,
    Mean,
    Seen,
    Source,
)
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import DraftChoice

HOPELESS_GAIN = 0.9  # a probe ends early
LEAST_GAIN = 1.03
"""Below this speed over plain steps guessing is not worth its trouble (design §10)."""

EARNED, MOST_SPARE = 0.008, 4.0
SAVED_UP = 2.0  # from an empty account on nothing is spent until there is this much
REFRESH_STEPS, PLAIN_STEPS = 40, 3
"""Steps with guesses, and the plain ones behind them, so that their time stays known."""

PROBE_STEPS = 8
FIRST_REST, LONGEST_REST = 48, 4096  # tokens between fruitless probes
WON_STEPS = 32  # steps with a gain after which rests are short again
DEEPER_STEPS = 128  # steps with a gain before one place more is looked at again
HELD_STEPS = 6
"""Steps for which a decision against guesses stands unasked."""

FOLLOWED_TOKENS = 64  # that a head nobody asks may be behind; with more it stops reading along


@dataclass(frozen=True, slots=True)
class Regime:
    """Steps that are alike: experts of the same plane, and as many answers side by side."""

    plane: Plane
    is_gated: bool
    n_requests: int


@dataclass(frozen=True, slots=True)
class Offer:
    """How many tokens could be guessed in a step, for each of its requests.

    Attributes:
        mtp, lookup: most guesses by request, 0 for none.
        behind: reads that the heads must make up for first.
        most_rows: of the step, guesses and requests together.
    """

    mtp: tuple[int, ...] = ()
    lookup: tuple[int, ...] = ()
    behind: int = 0
    most_rows: int = 8

    def counts(self, source: Source, depth: int) -> tuple[int, ...]:
        """Guesses by request at a depth."""
        offered = self.mtp if source is Source.MTP else self.lookup
        return tuple(min(depth, most) for most in offered)


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do in a step. `gain` is the speed expected of it, 1 as without guesses."""

    source: Source = Source.OFF
    depth: int = 0
    gain: float | None = None
    is_probe: bool = False


OFF = Choice()


class Policy(Protocol):
    """Decides about guesses. `sources` are those that it may choose."""

    @property
    def sources(self) -> tuple[Source, ...]: ...

    def follows(self, plane: Plane) -> bool:
        """Whether the head should read along with a request that begins."""
        ...

    def saves(self) -> bool:
        """Whether nothing may be spent now: a head that reads along stops."""
        ...

    def holds(self, regime: Regime) -> bool:
        """Whether there is no guessing in the next step, whatever could be offered."""
        ...

    def choose(self, regime: Regime, offer: Offer) -> Choice:
        """What to do in the next step, if the policy does not hold."""
        ...

    def note(self, regime: Regime, choice: Choice, seen: Seen) -> None:
        """The step that was chosen last has been made."""
        ...

    def passed(self, regime: Regime, n_tokens: int, aside_s: float) -> None:
        """The step for which the policy held has been made: `n_tokens` of all its requests, and
        `aside_s` as in `Seen`.
        """
        ...

    def view(self) -> DraftChoice:
        """The newest decision and its numbers."""
        ...


@dataclass(slots=True)
class Fixed:
    """The same in every step, whatever it brings."""

    source: Source = Source.OFF
    depth: int = 0

    @property
    def sources(self) -> tuple[Source, ...]:
        """See `Policy`."""
        return (self.source,)

    def follows(self, plane: Plane) -> bool:
        """See `Policy`."""
        return self.source is Source.MTP

    def saves(self) -> bool:
        """See `Policy`."""
        return False

    def holds(self, regime: Regime) -> bool:
        """See `Policy`."""
        return self.source is Source.OFF

    def choose(self, regime: Regime, offer: Offer) -> Choice:
        """See `Policy`."""
        return Choice(self.source, self.depth)

    def note(self, regime: Regime, choice: Choice, seen: Seen) -> None:
        """See `Policy`."""

    def passed(self, regime: Regime, n_tokens: int, aside_s: float) -> None:
        """See `Policy`."""

    def view(self) -> DraftChoice:
        """See `Policy`."""
        return DraftChoice(self.source.value, self.source.value, self.depth)


@dataclass(slots=True)
class _Rest:
    """When a guesser that does not pay is tried again. Tokens are counted by its book."""

    interval: int = FIRST_REST
    due: int = 0
    left: int = 0  # steps of a probe that are to come
    won: int = 0  # steps with a gain since it last had none
    deeper_in: int = DEEPER_STEPS
    deeper_left: int = 0


class _Book:
    """What a regime's steps showed, and which guesser rests there."""

    def __init__(self, n_requests: int, *, one_by_one: bool) -> None:
        self.estimates = Estimates(n_requests, one_by_one=one_by_one)
        self.n_requests = n_requests
        self.n_tokens = 0  # by request
        self.since_plain = 0
        self.plain_left = 0  # plain steps that are to come
        self.held = 0  # of them, that nobody is asked about
        self.rests = {source: _Rest() for source in GUESSERS}

    def note(self, source: Source, seen: Seen) -> None:
        """A step was made."""
        self.n_tokens += max(1, seen.n_tokens // self.n_requests)
        self.since_plain = 0 if seen.rows == self.n_requests else self.since_plain + 1
        self.estimates.note(source, seen)


@dataclass(slots=True)
class Control:
    """Chooses by what was measured.

    Args:
        depth: most guesses for a request.
        sources: who could guess.
        widths: numbers of rows that a step may have; empty: any.
        one_by_one: see `Estimates`.
    """

    depth: int
    sources: tuple[Source, ...] = GUESSERS
    widths: frozenset[int] = frozenset()
    one_by_one: bool = False
    spare: float = MOST_SPARE  # plain steps that may be lost now
    probes: int = 0
    _saving: bool = False
    _books: dict[Regime, _Book] = field(default_factory=dict)
    _newest: tuple[Regime, Choice] | None = None

    def follows(self, plane: Plane) -> bool:
        """See `Policy`: if the head guesses, or will be tried again before it is far behind."""
        if Source.MTP not in self.sources or self._saving:
            return False
        books = [book for regime, book in self._books.items() if regime.plane is plane]
        rests = [(book.rests[Source.MTP], book.n_tokens) for book in books]
        return not rests or any(
            rest.won or rest.left or rest.due - n_tokens <= FOLLOWED_TOKENS
            for rest, n_tokens in rests
        )

    def saves(self) -> bool:
        """See `Policy`."""
        return self._saving

    def holds(self, regime: Regime) -> bool:
        """See `Policy`: in steps behind one whose guesses were of no use, and while it saves."""
        book = self._book(regime)
        if not book.held and not self._saving:
            return False
        book.held = max(0, book.held - 1)
        self._newest = (regime, OFF)
        return True

    def choose(self, regime: Regime, offer: Offer) -> Choice:
        """See `Policy`."""
        book = self._book(regime)
        chosen = self._chosen(book, offer)
        self._newest = (regime, chosen)
        return chosen

    def _book(self, regime: Regime) -> _Book:
        if regime not in self._books:
            self._books[regime] = _Book(regime.n_requests, one_by_one=self.one_by_one)
        return self._books[regime]

    def _chosen(self, book: _Book, offer: Offer) -> Choice:
        if book.estimates.plain_s is None:
            return OFF
        if book.since_plain >= REFRESH_STEPS and not book.plain_left:
            book.plain_left = PLAIN_STEPS
            book.estimates.refresh()
        if book.plain_left:
            book.plain_left -= 1
            return OFF
        found = [choice for s in self.sources if (choice := self._best(book, s, offer)) is not None]
        paying = [choice for choice in found if (choice.gain or 0) >= LEAST_GAIN]
        for choice in found:
            if choice not in paying:
                self._lost(book, choice.source)
        if paying:
            best = max(paying, key=lambda choice: choice.gain or 0)
            return self._deeper(book, best, offer)
        for choice in found:
            if self._probes(book, choice):
                return Choice(choice.source, choice.depth, choice.gain, is_probe=True)
        if any((*offer.mtp, *offer.lookup)):
            book.held = HELD_STEPS
        return OFF

    def _best(self, book: _Book, source: Source, offer: Offer) -> Choice | None:
        """The depth of a guesser that promises most, of those that can be paid for."""
        deepest = min(self.depth, book.estimates.tried(source) + 1)
        choices = [
            Choice(source, depth, book.estimates.gain(source, counts, offer.behind))
            for depth in range(1, deepest + 1)
            if self._fits(book, source, counts := offer.counts(source, depth), depth, offer)
        ]
        return max(choices, key=lambda choice: choice.gain or 0, default=None)

    def _fits(
        self, book: _Book, source: Source, counts: Sequence[int], depth: int, offer: Offer
    ) -> bool:
        if depth > max(counts, default=0):
            return False
        rows = book.n_requests + sum(counts)
        if rows > offer.most_rows or (self.widths and rows not in self.widths):
            return False
        return book.estimates.worst(source, counts, offer.behind) <= self.spare

    def _deeper(self, book: _Book, best: Choice, offer: Offer) -> Choice:
        """The choice, or now and then one place more, which may have become worth it."""
        rest = book.rests[best.source]
        rest.won, rest.left = rest.won + 1, 0
        if rest.won >= WON_STEPS:
            rest.interval = FIRST_REST
        rest.deeper_in -= 1
        if rest.deeper_in <= 0:
            rest.deeper_in, rest.deeper_left = DEEPER_STEPS, TRIED
        if rest.deeper_left:
            rest.deeper_left -= 1
            depth = best.depth + 1
            counts = offer.counts(best.source, depth)
            if depth <= self.depth and self._fits(book, best.source, counts, depth, offer):
                for mean in book.estimates.right[best.source][best.depth :]:
                    mean.doubt()
                return Choice(best.source, depth, best.gain, is_probe=True)
        return best

    def _lost(self, book: _Book, source: Source) -> None:
        """A guesser has stopped paying: it rests from now on."""
        rest = book.rests[source]
        if rest.won >= WON_STEPS:
            rest.due = book.n_tokens + rest.interval
        rest.won = 0

    def _probes(self, book: _Book, choice: Choice) -> bool:
        """Whether a guesser that does not pay is looked at in this step."""
        rest = book.rests[choice.source]
        if not rest.left:
            if book.n_tokens < rest.due:
                return False
            rest.left = PROBE_STEPS
            self.probes += 1
            book.estimates.doubt(choice.source)
        rest.left -= 1
        seen = PROBE_STEPS - rest.left > TRIED
        if not rest.left or (seen and (choice.gain or 0) < HOPELESS_GAIN):
            rest.left = 0
            rest.due = book.n_tokens + rest.interval
            rest.interval = min(2 * rest.interval, LONGEST_REST)
        return True

    def note(self, regime: Regime, choice: Choice, seen: Seen) -> None:
        """See `Policy`."""
        book = self._book(regime)
        lost = 0.0 if choice.source is Source.OFF else book.estimates.lost(seen)
        self._account(book, seen.n_tokens, seen.aside_s, lost)
        book.note(choice.source, seen)

    def passed(self, regime: Regime, n_tokens: int, aside_s: float) -> None:
        """See `Policy`."""
        book = self._book(regime)
        book.n_tokens += max(1, n_tokens // book.n_requests)
        book.since_plain = 0
        self._account(book, n_tokens, aside_s, 0.0)

    def _account(self, book: _Book, n_tokens: int, aside_s: float, lost: float) -> None:
        plain = book.estimates.plain_s
        spent = lost if plain is None else lost + aside_s / plain
        self.spare = min(self.spare + EARNED * n_tokens / book.n_requests - spent, MOST_SPARE)
        self._saving = self.spare < (SAVED_UP if self._saving else 0.0)

    def view(self) -> DraftChoice:
        """See `Policy`."""
        if self._newest is None:
            return DraftChoice("auto")
        regime, choice = self._newest
        book = self._books[regime]
        right = book.estimates.right.get(choice.source) or book.estimates.right[self.sources[0]]
        return DraftChoice(
            "auto", choice.source.value, choice.depth, gain=choice.gain, is_probe=choice.is_probe,
            acceptance=tuple(mean.value for mean in right if mean.n),
            rows_ms=_milliseconds(book.estimates.rows),
            guess_ms=1e3 * book.estimates.head.value if book.estimates.head.n else None,
            spare_steps=self.spare, probes=self.probes,
        )  # fmt: skip


def _milliseconds(rows: Mapping[int, Mean]) -> tuple[tuple[int, float], ...]:
    return tuple((n, 1e3 * mean.value) for n, mean in sorted(rows.items()))
