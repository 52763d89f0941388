"""Which of a chat template's variables steer reasoning, and what an effort sets them to.

Families differ: some switch reasoning on and off, some know levels, some both. A template is asked
which variables it reads, so a new model needs nothing here. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moet_desk.engine.handle import ModelInfo

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""Levels from least to most, beside "none"."""

_ON_OFF: Mapping[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "thinking_mode": ("enabled", "disabled"),
}
_LEVEL = "reasoning_effort"
SWITCHES = (*_ON_OFF, _LEVEL, "clear_thinking", "drop_thinking")
"""Variables that clients may set. The last two say whether older reasoning stays in the prompt."""

# What a template takes that only writes the word down, or compares it with one.
_USUAL_LEVELS = ("low", "medium", "high")


def levels_of(words: Collection[str]) -> tuple[str, ...]:
    """The efforts that a template tells apart, from the texts that stand in it."""
    found = tuple(effort for effort in EFFORTS if effort in words)
    return found if len(found) > 1 else _USUAL_LEVELS


def effort_switches(effort: str, model: ModelInfo) -> dict[str, Any]:
    """Values of the template's variables for an effort.

    A level that the template does not tell apart becomes the next higher one, else the highest.

    Raises:
        ValueError: not an effort, or the model cannot do it; the text says why.
    """
    if effort not in ("none", *EFFORTS):
        raise ValueError(f"it must be one of none, {', '.join(EFFORTS)}")
    on_off = [name for name in _ON_OFF if name in model.switches]
    if effort == "none":
        if not on_off and _LEVEL in model.switches:
            raise ValueError(f"this model always reasons; {model.efforts[0]} is the least")
        return {name: _ON_OFF[name][1] for name in on_off}
    if not on_off and _LEVEL not in model.switches:
        raise ValueError("this model does not reason before it answers")
    values = {name: _ON_OFF[name][0] for name in on_off}
    if _LEVEL in model.switches:
        values[_LEVEL] = _nearest(effort, model.efforts)
    return values


def _nearest(effort: str, levels: tuple[str, ...]) -> str:
    wanted = EFFORTS.index(effort)
    return next((level for level in levels if EFFORTS.index(level) >= wanted), levels[-1])
