"""Answers of another server as one Markdown text: reasoning as a quote, calls as blocks of code.

The chat keeps and shows one text per answer. What goes back to the server must be the answer alone,
so the quote has a form that `without_reasoning` finds again. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

_HEAD = "> **Reasoning**\n>\n> "
_RULE = "\n\n---\n\n"  # its own lines all begin with ">" or are empty
_QUOTE = re.compile(r"^> \*\*Reasoning\*\*\n(?:>.*\n|\n)*?(?:---\n+|(?:>.*)?\Z)", re.MULTILINE)
_QUOTE_CHARS = 700
"""From here on a quote ends with its paragraph and another begins: the screens draw long text in
parts of about 1500 characters, and cut it between blocks only."""
_TICKS = re.compile(r"`+")


class _Part(Enum):
    NOTHING = 0
    REASONING = 1
    CONTENT = 2
    CALL = 3


@dataclass(slots=True)
class _Call:
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class Shown:
    """Turns the parts of one answer into pieces of its text. Owned by one thread."""

    def __init__(self) -> None:
        self._last = _Part.NOTHING
        self._newlines = 0  # of reasoning, that wait for what follows
        self._quoted = 0  # characters of this quote
        self._calls: dict[int, _Call] = {}

    def reasoning(self, text: str) -> str:
        """The next piece of what the model says to itself."""
        begins = self._last is not _Part.REASONING
        if begins:
            text = text.lstrip("\n")
        if not text:
            return ""
        shown = [self._gap() + _HEAD] if begins else []
        if begins:
            self._newlines = self._quoted = 0
        self._last = _Part.REASONING
        for i, line in enumerate(text.split("\n")):
            self._newlines += i > 0
            if line:
                shown.append(self._break() + line)
                self._quoted += len(line)
        return "".join(shown)

    def _break(self) -> str:
        """The newlines before the next line of reasoning, as they stand in the quote."""
        n, self._newlines = self._newlines, 0
        if n >= 2 and self._quoted >= _QUOTE_CHARS:
            self._quoted = 0
            return "\n\n> "
        return "\n>" * (n - 1) + "\n> " if n else ""

    def content(self, text: str) -> str:
        """The next piece of text for the reader."""
        if self._last in (_Part.REASONING, _Part.CALL):
            text = text.lstrip("\n")  # models leave a gap of their own
            if text:
                text = self._gap() + text
        if text:
            self._last = _Part.CONTENT
        return text

    def call(self, index: int, name: str, arguments: str) -> None:
        """The next piece of a call; shown at the end, as calls may come interleaved."""
        call = self._calls.setdefault(index, _Call())
        call.name += name
        call.arguments.append(arguments)

    def end(self) -> str:
        """The calls."""
        shown = []
        for _, call in sorted(self._calls.items()):
            text = f"{call.name} {''.join(call.arguments)}".strip()
            ticks = "`" * max(3, 1 + max(map(len, _TICKS.findall(text)), default=0))
            shown.append(f"{self._gap()}{ticks}call\n{text}\n{ticks}")
            self._last = _Part.CALL
        self._calls.clear()
        return "".join(shown)

    def _gap(self) -> str:
        if self._last is _Part.REASONING:
            return _RULE
        return "" if self._last is _Part.NOTHING else "\n\n"


def without_reasoning(text: str) -> str:
    """An answer as the server gets it back."""
    return _QUOTE.sub("", text)
