"""A recording that is being played, as the screens see it. Plain data and a protocol; no numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Of playing, times the real one."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded, where and when; the header line of every screen says it."""

    model: str
    machine: str  # the card, else the processor
    date: str  # as ISO-8601 has it, without the time
    length_s: float
    made_up: bool  # the weights are
    has_words: bool  # questions and answers are in it
    note: str


@dataclass(frozen=True, slots=True)
class Question:
    """It is time to ask this again; the next request gets the recorded answer."""

    text: str
    quality: str


@dataclass(frozen=True, slots=True)
class Rewound:
    """The place went back: what was said so far is said again."""


Cue = Question | Rewound


class Playback(Protocol):
    """Controls of a recording. All of the UI thread."""

    @property
    def recording(self) -> Recording: ...
    @property
    def position_s(self) -> float:
        """Seconds from its beginning to the place that is shown."""
        ...

    @property
    def speed(self) -> float:
        """One of `SPEEDS`."""
        ...

    @property
    def paused(self) -> bool: ...
    @property
    def ended(self) -> bool:
        """Whether the end is shown."""
        ...

    def advance(self) -> list[Cue]:
        """Show what is due now. Returns what the chat has to do, in order."""
        ...

    def pause(self, paused: bool) -> None:
        """Stop or go on; going on at the end begins anew."""
        ...

    def seek(self, position_s: float) -> None:
        """Go to a place; one outside is moved inside."""
        ...

    def change_speed(self, steps: int) -> None:
        """So many steps along `SPEEDS`, up to its ends."""
        ...
