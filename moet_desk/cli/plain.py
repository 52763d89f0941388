"""Answers as whole lines, for screen readers and for terminals that cannot move their cursor.

Nothing is drawn again, nothing is coloured, and a line is only written when it is whole: a line of
the text, or a sentence of a long one. Pure but for what `write` does. Main thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from moet_desk.telemetry import Finished, FinishReason

_LEAST_CHARS = 40  # shorter sentences wait for the next one: every line is an event to a reader
_MOST_CHARS = 240
_SENTENCE_END = re.compile(r"[.!?:;][\"')\]]*\s|[。！？]")
_DROPPED = dict.fromkeys(set(range(32)) - {10} | set(range(127, 160)))
_DROPPED[9] = ord(" ")


class PlainText:
    """Takes pieces of a text and writes its lines as they become whole; blank ones are left out."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._held = ""

    def feed(self, piece: str) -> None:
        """More text."""
        self._held += piece.translate(_DROPPED)
        while (end := self._line_end()) is not None:
            line, self._held = self._held[:end], self._held[end:]
            self._put(line)

    def end(self) -> None:
        """The text ends here."""
        self._put(self._held)
        self._held = ""

    def _put(self, line: str) -> None:
        if line.strip():
            self._write(line.rstrip())

    def _line_end(self) -> int | None:
        """Where the first whole line of what is held ends; None: it is not whole yet."""
        newline = self._held.find("\n")
        line = self._held if newline < 0 else self._held[:newline]
        found = _SENTENCE_END.search(line, _LEAST_CHARS)
        if found is not None and found.end() < len(line):
            return found.end()
        if len(line) > _MOST_CHARS:
            blank = line.rfind(" ", _LEAST_CHARS, _MOST_CHARS)
            return _MOST_CHARS if blank < 0 else blank + 1
        return None if newline < 0 else newline + 1


def end_words(finished: Finished) -> str:
    """How an answer ended, as a sentence."""
    usage = finished.usage
    how = {
        FinishReason.STOP: "End of the answer",
        FinishReason.LENGTH: "The answer was cut off at its longest",
        FinishReason.CANCELLED: "Stopped",
    }[finished.reason]
    rate = usage.completion_tokens / usage.decode_s if usage.decode_s > 0 else 0
    speed = f", {rate:.0f} per second" if rate else ""
    return f"{how}: {usage.completion_tokens} tokens{speed}, {finished.quality} quality."
