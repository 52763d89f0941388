"""Answers of another server as a model here would have written them: reasoning in tags.

Servers send reasoning and calls apart from the text; readers of a `RequestStream` know one text.
Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from moet_desk.engine.parsers.answers import THINK, AnswerFormat

WRITTEN = AnswerFormat(think=THINK)
"""How these texts are read; servers that send reasoning within the text mostly use these tags."""

_TICKS = re.compile(r"`+")


class _Part(Enum):
    NOTHING = 0
    REASONING = 1
    CONTENT = 2


@dataclass(slots=True)
class _Call:
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class Writer:
    """Turns the parts of one answer into pieces of its text. Owned by one thread."""

    def __init__(self) -> None:
        self._last = _Part.NOTHING
        self._calls: dict[int, _Call] = {}

    def reasoning(self, text: str) -> str:
        """The next piece of what the model says to itself."""
        if not text:
            return ""
        tag = "" if self._last is _Part.REASONING else THINK.open
        self._last = _Part.REASONING
        return tag + text

    def content(self, text: str) -> str:
        """The next piece of text for the reader."""
        if not text:
            return ""
        tag = THINK.close if self._last is _Part.REASONING else ""
        self._last = _Part.CONTENT
        return tag + text

    def call(self, index: int, name: str, arguments: str) -> None:
        """The next piece of a call; shown at the end, as calls may come interleaved."""
        call = self._calls.setdefault(index, _Call())
        call.name += name
        call.arguments.append(arguments)

    def end(self) -> str:
        """The calls, each in a block of code."""
        shown = []
        for _, call in sorted(self._calls.items()):
            text = f"{call.name} {''.join(call.arguments)}".strip()
            ticks = "`" * max(3, 1 + max(map(len, _TICKS.findall(text)), default=0))
            gap = "\n\n" if self._last is _Part.CONTENT else ""
            shown.append(self.content(f"{gap}{ticks}call\n{text}\n{ticks}"))
        self._calls.clear()
        return "".join(shown)
