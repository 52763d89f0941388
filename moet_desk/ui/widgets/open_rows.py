"""The last rows of a text that is being written, while more of the same comes.

A paragraph to which plain words are added keeps all its rows but the last, and code all its lines.
So new words cost the same however long the block has become that they belong to. Whatever could
change the meaning of what stands there already is not taken here: then the block is drawn anew.
UI thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from textual.content import Content
from textual.strip import Strip

_LAST_WORD = re.compile(r"\S*\s*\Z")
_PLAIN_WORDS = re.compile(r"(?:[^\s`*_~\[\]()!<>&\\|.:@/]*[.:,;?]*(?: |\Z))*")
"""Words that Markdown takes as they are, whatever comes behind them: no marks, escapes, entities,
links, and nothing that could become an address (a dot or a colon inside)."""

_FENCE = re.compile(r"^ *(?:```|~~~)", re.MULTILINE)


class OpenRows(Protocol):
    """A block that may go on."""

    first: int
    """The first row of the block that may change."""

    def grow(self, new: str) -> list[Strip] | None:
        """Take more text; returns the rows from `first` as it was on, None if they cannot be told
        from this text alone. After None it is of no use any more.
        """
        ...


class OpenWords:
    """A paragraph, at the top or in an item of a list.

    Args:
        source: the Markdown it was drawn from, which ends with it.
        line: what stands in its last row.
        draw: draws text in rows of the paragraph's width.
        edges: what stands before the last row, and before the rows behind it; None: nothing.
        below: the rows below.
        first: see `OpenRows`.
    """

    def __init__(
        self,
        source: str,
        line: Content,
        draw: Callable[[Content], list[Strip]],
        edges: tuple[Strip, Strip] | None,
        below: list[Strip],
        first: int,
    ) -> None:
        match = _LAST_WORD.search(source)
        self._word = "" if match is None else match[0]  # with the blanks behind it
        self._line, self._draw, self._edges = line, draw, edges
        self._below, self.first = below, first

    def grow(self, new: str) -> list[Strip] | None:
        source = self._word + new
        if "  " in source or _PLAIN_WORDS.fullmatch(source) is None:
            return None
        blanks = self._word[len(self._word.rstrip(" ")) :]
        self._line += (blanks + new).rstrip(" ")
        self._word = source[source.rstrip(" ").rfind(" ") + 1 :]
        drawn = self._draw(self._line)
        rows = drawn
        if self._edges is not None:
            edge, next_edge = self._edges
            edges = [edge, *[next_edge] * (len(drawn) - 1)]
            rows = [Strip.join(pair) for pair in zip(edges, drawn, strict=True)]
        if len(drawn) > 1:
            self._begin_row(drawn[-1].text.rstrip(" "))
            self.first += len(drawn) - 1
        return rows + self._below

    def _begin_row(self, text: str) -> None:
        """The last row is another one now, with this text."""
        start = len(self._line) - len(text)
        self._line = self._line.divide([start])[1]
        if self._edges is not None:
            self._edges = (self._edges[1], self._edges[1])


class OpenCode:
    """A block of code whose end has not come.

    Args:
        code: its text so far.
        draw: draws lines of code that were not coloured yet.
        waits: whether code of so many characters need not be coloured anew yet.
        below: the rows below.
    """

    def __init__(
        self,
        code: str,
        draw: Callable[[str], list[Strip]],
        waits: Callable[[int], bool],
        below: list[Strip],
    ) -> None:
        self._length = len(code)
        shown = code.rstrip()
        self._line = code[shown.rfind("\n") + 1 :]  # the last one with words, and blank ones behind
        self._draw, self._waits = draw, waits
        self._below, self.first = below, shown.count("\n")

    def grow(self, new: str) -> list[Strip] | None:
        code = self._line + new
        self._length += len(new)
        if has_fence(code) or not self._waits(self._length):
            return None
        shown = code.rstrip()
        self._line = code[shown.rfind("\n") + 1 :]
        self.first += shown.count("\n")
        return self._draw(shown) + self._below


def has_fence(code: str) -> bool:
    """Whether a line of code could be the end of its block."""
    return _FENCE.search(code) is not None
