"""Guessing around a step: asks the policy, has tokens guessed, tells the policy what came of it.

The decoders open a round before a step and close it behind it. Engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from moet_desk.engine.draft import (
    Acceptance,
    Drafted,
    Drafter,
    LookupDrafter,
    MtpDrafter,
    room_of,
    state_of,
)
from moet_desk.engine.draft_control import OFF, Choice, Control, Fixed, Offer, Policy, Regime
from moet_desk.engine.draft_estimates import GUESSERS, Seen, Source
from moet_desk.engine.handle import EngineOptions
from moet_desk.errors import MoetError

MOST_GUESSES = 7
"""For a request: a step has 8 rows at most."""


class Answering(Drafted, Protocol):
    """As much of an `ActiveRequest` as a round touches."""

    tau: float | None

    def note_drafts(self, n_guessed: int, n_right: int) -> None:
        """A step checked guesses of its tokens."""
        ...

    def fail(self, error: Exception) -> None:
        """End with an error."""
        ...


R = TypeVar("R", bound=Answering)


@dataclass(slots=True)
class Round(Generic[R]):
    """A step on its way.

    Attributes:
        held: nobody was asked.
        runs: requests whose guessing did not fail, with the guesses of each.
        began: seconds, when its rows could begin.
        asked_s: seconds in which it was found out what to do.
    """

    regime: Regime
    held: bool
    choice: Choice
    runs: list[tuple[R, list[int]]]
    began: float
    n_tokens_before: int
    rerun_s_before: float
    asked_s: float
    guess_s: float
    behind_s: float
    results: list[tuple[int, int]] = field(default_factory=list)


class Drafting:
    """Has tokens guessed and counts what was right.

    Args:
        policy: decides.
        mtp, lookup: who can be asked.
        most_rows: of a step.
        clock: seconds.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        mtp: MtpDrafter | None = None,
        lookup: Drafter | None = None,
        most_rows: int = 1 + MOST_GUESSES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy: Policy = Fixed() if policy is None else policy
        self.mtp = mtp
        self._lookup: Drafter = LookupDrafter() if lookup is None else lookup
        self._most_rows, self._clock = most_rows, clock
        self.acceptance = Acceptance()
        self._kept_s = 0.0  # seconds of this step, so far, in which heads were told of it

    def follows(self, request: Drafted) -> bool:
        """Whether the head reads what the request reads. Decided when it is first asked."""
        if self.mtp is None:
            return False
        if request.draft is None:
            state_of(request).follows = self.policy.follows(request.plane)
        return state_of(request).follows

    def restored(self, request: Drafted, *, head_too: bool) -> None:
        """The beginning of the prompt was not read but put into its pages, with what the head keeps
        of it or without: then the head has missed something.
        """
        if not self.follows(request):
            return
        if head_too:
            state_of(request).sequence.length = request.kv.length
        else:
            state_of(request).follows = False

    def note(self, request: Drafted, hidden: Tensor) -> None:
        """The model has read tokens of the request, whose states are `hidden` [T, H]; they may be
        overwritten afterwards.
        """
        if self.mtp is None or not self.follows(request):
            return
        began = self._clock()
        if request.out_ids and self.policy.saves():
            state_of(request).part()
        else:
            self.mtp.note(request, hidden)
        self._kept_s += self._clock() - began

    def begin(self, requests: Sequence[R], rerun_s: float) -> Round[R]:
        """Have tokens guessed for requests of one plane; one whose guessing fails ends.

        `rerun_s`: what the gate has spent so far.
        """
        regime = Regime(requests[0].plane, any(r.tau is not None for r in requests), len(requests))
        began = self._clock()
        held = self.policy.holds(regime)
        choice = OFF if held else self.policy.choose(regime, self._offer(requests))
        self._kept_s = 0.0
        marks = [self._clock()]
        runs = [(r, list[int]()) for r in requests]
        if choice.source is Source.MTP:
            runs = [(r, g) for r, g in runs if self._tried(r, self._catch_up) is not None]
        marks.append(self._clock())
        if choice.source is not Source.OFF:
            found = [(r, self._tried(r, lambda r: self._guesses(r, choice))) for r, _ in runs]
            runs = [(r, guesses) for r, guesses in found if guesses is not None]
        marks.append(self._clock())
        return Round(
            regime, held, choice, runs, began=marks[2], rerun_s_before=rerun_s,
            asked_s=marks[0] - began,
            n_tokens_before=sum(len(r.out_ids) for r in requests),
            guess_s=marks[2] - marks[1], behind_s=marks[1] - marks[0],
        )  # fmt: skip

    def checked(self, step: Round[R], request: R, n_guessed: int, n_right: int) -> None:
        """The first `n_right` guesses for a request were right."""
        request.note_drafts(n_guessed, n_right)
        self.acceptance.note(n_guessed, n_right)
        step.results.append((n_guessed, n_right))

    def end(self, step: Round[R], rerun_s: float) -> None:
        """The step is made. One in which a request failed teaches nothing."""
        if len(step.results) != step.regime.n_requests:
            return
        n_tokens = sum(len(r.out_ids) for r, _ in step.runs) - step.n_tokens_before
        aside_s = step.asked_s + self._kept_s
        if step.held:
            self.policy.passed(step.regime, n_tokens, aside_s)
            return
        again_s = rerun_s - step.rerun_s_before
        check_s = self._clock() - step.began - again_s - self._kept_s
        seen = Seen(tuple(step.results), n_tokens, check_s, step.guess_s, step.behind_s, aside_s)
        self.policy.note(step.regime, step.choice, seen)

    def _offer(self, requests: Sequence[R]) -> Offer:
        rooms = [min(MOST_GUESSES, max(0, room_of(r))) for r in requests]
        mtp = tuple(room if self.follows(r) else 0 for r, room in zip(requests, rooms, strict=True))
        looks = Source.LOOKUP in self.policy.sources
        lookup = tuple(
            len(self._lookup.propose(r, room)) if looks else 0
            for r, room in zip(requests, rooms, strict=True)
        )
        behind = 0
        if self.mtp is not None:
            behind = sum(self.mtp.behind(r) for r, n in zip(requests, mtp, strict=True) if n)
        return Offer(mtp, lookup, behind, self._most_rows)

    def _catch_up(self, request: R) -> list[int]:
        if self.mtp is not None and self.follows(request):
            self.mtp.catch_up(request)
        return []

    def _guesses(self, request: R, choice: Choice) -> list[int]:
        if choice.source is Source.LOOKUP:
            return self._lookup.propose(request, choice.depth)
        if self.mtp is None or not self.follows(request):
            return []
        return self.mtp.propose(request, choice.depth)

    def _tried(self, request: R, guess: Callable[[R], list[int]]) -> list[int] | None:
        """Guesses; None if that failed, which ends the request."""
        try:
            return guess(request)
        except MoetError as error:
            request.fail(error)
            return None


def drafting_of(
    options: EngineOptions,
    mtp: MtpDrafter | None,
    *,
    widths: Sequence[int] = (),
    one_by_one: bool = False,
) -> Drafting:
    """What the options ask for.

    Args:
        options: the engine's.
        mtp: the model's head, if it is loaded.
        widths: numbers of rows that a step should have; none: any.
        one_by_one: whether the decoder reads rows one after the other.
    """
    depth = min(options.draft_depth, MOST_GUESSES)
    if options.drafts == "auto":
        sources = GUESSERS if mtp is not None else (Source.LOOKUP,)
        return Drafting(Control(depth, sources, frozenset(widths), one_by_one), mtp=mtp)
    source = Source(options.drafts)
    return Drafting(Fixed(source, 0 if source is Source.OFF else depth), mtp=mtp)
