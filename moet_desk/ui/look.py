"""What the app takes from the settings: its look, and how answers are asked for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moet_desk.engine.handle import Quality
from moet_desk.locations import TerminalFacts
from moet_desk.settings import Settings
from moet_desk.ui.chat_records import Wishes


@dataclass(frozen=True, slots=True)
class Look:
    """How the app looks and moves, from the settings."""

    theme: str = "moet-dark"
    glyphs: str = "auto"  # auto | unicode | ascii
    colour: bool = True
    motion: str = "full"  # full | reduced | none
    keys: Mapping[str, str] = field(default_factory=dict)
    terminal: str = ""  # TERM
    marks_reruns: bool = False


def look_of(settings: Settings, terminal: TerminalFacts) -> Look:
    """The look that settings and terminal ask for; NO_COLOR gives way to `ui.color = always`."""
    ui = settings.ui
    colour = ui.color == "always" or (ui.color == "auto" and not terminal.no_color)
    return Look(
        theme=ui.theme,
        glyphs=ui.glyphs,
        colour=colour,
        motion=ui.motion,
        keys=settings.keys,
        terminal=terminal.term,
        marks_reruns=ui.mark_reruns,
    )


def wishes_of(settings: Settings) -> Wishes:
    """How answers are asked for, from the settings."""
    answers = settings.answers
    return Wishes(
        quality=Quality(answers.quality),
        gate=answers.gate,
        temperature=answers.temperature,
        system=answers.system,
        max_tokens=answers.max_tokens,
    )
