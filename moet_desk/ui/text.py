"""Pure functions over text from models, files and servers: make it inert, split it, hold it back.

Nothing here knows a widget. The rules: such text is never markup, carries no control characters,
and a streamed answer is cut only where both parts render as the whole does. Any thread.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.token import Token

from moet_desk.marked_text import MarkedText

SEGMENT_CHARS = 1500
"""Wanted length of one Markdown widget. Flushes into a longer one cost more and more (12 to 26 ms
at 13 KB), with rotation they stay at about 17 ms (measured on 2 cores, 2026-11-29)."""

_LINE_ENDS = frozenset("\n\x0b\x0c\x85\u2028\u2029")
_TOUCHED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""C0 but tab and newline, DEL, C1, line separators, bidirectional overrides, surrogates, BOM."""


class _State(Enum):
    TEXT = 0
    ESCAPE = 1  # after ESC
    CONTROL = 2  # in ESC [ ... : colours, cursor movement
    STRING = 3  # in ESC ] P X ^ _ ... : titles, clipboard, device strings
    STRING_ESCAPE = 4  # after ESC inside a string


class Cleaner:
    """Takes text in pieces and returns it without escape sequences and control characters.

    Only a newline ends lines in what comes out. A sequence that is cut between two pieces is
    removed as well; an unfinished one ends with its line, so it cannot swallow an answer. Owned by
    the reader of one stream.
    """

    __slots__ = ("_after_return", "_state")

    def __init__(self) -> None:
        self._state = _State.TEXT
        self._after_return = False

    def feed(self, piece: str) -> str:
        """Return the clean part of the next piece."""
        untouched = self._state is _State.TEXT and not self._after_return
        if untouched and _TOUCHED.search(piece) is None:
            return piece
        return "".join(self._step(char) for char in piece)

    def feed_marked(self, piece: MarkedText) -> MarkedText:
        """`feed`; each clean character keeps the mark of the one that brought it out."""
        if not piece.marks:
            return MarkedText(self.feed(piece.text))
        joined, end = MarkedText(), 0
        for start, stop in piece.marks:
            joined += MarkedText(self.feed(piece.text[end:start]))
            joined += MarkedText.whole(self.feed(piece.text[start:stop]), marked=True)
            end = stop
        return joined + MarkedText(self.feed(piece.text[end:]))

    def _step(self, char: str) -> str:
        state, self._state = self._state, _State.TEXT
        if state is _State.CONTROL and " " <= char <= "~":
            self._state = _State.TEXT if char >= "@" else _State.CONTROL
            return ""
        if state is _State.STRING and char != "\n":
            if char not in "\x07\x9c":
                self._state = _State.STRING_ESCAPE if char == "\x1b" else _State.STRING
            return ""
        if state is _State.STRING_ESCAPE and char == "\\":
            return ""
        if state in (_State.ESCAPE, _State.STRING_ESCAPE) and " " <= char <= "~":
            self._state = _AFTER_ESCAPE.get(char, _State.TEXT if char >= "0" else _State.ESCAPE)
            return ""
        return self._plain(char)

    def _plain(self, char: str) -> str:
        after_return, self._after_return = self._after_return, char == "\r"
        if char == "\n" and after_return:
            return ""
        if char == "\r" or char in _LINE_ENDS:
            return "\n"
        if char == "\x1b":
            self._state = _State.ESCAPE
            return ""
        if _TOUCHED.match(char) is None:
            return char
        return "\ufffd" if "\ud800" <= char <= "\udfff" else ""


_AFTER_ESCAPE = {"[": _State.CONTROL} | dict.fromkeys("]PX^_", _State.STRING)


def clean(text: str) -> str:
    """Return a whole text without escape sequences and control characters."""
    return Cleaner().feed(text)


def clean_line(text: str, limit: int) -> str:
    """`clean` for one line of at most `limit` characters, e.g. a title."""
    line = " ".join(clean(text).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


@cache
def markdown_parser() -> MarkdownIt:
    """The parser of all model text.

    No HTML (it would vanish from the screen) and no link references (they would reach across a
    split of the text).
    """
    parser = MarkdownIt("gfm-like")
    return parser.disable(["html_block", "html_inline", "reference"])


def find_split(text: str) -> int | None:
    """Find where a growing Markdown text may be cut into two that render as the whole.

    The cut is before the last top-level block whose first line is complete, hence never inside a
    fence, table, list, quote or paragraph, whatever is appended later. Markdown reads blocks from
    top to bottom and keeps nothing between top-level blocks, which makes both parts exact.

    Returns:
        Index of the first character after the cut, or None if there is no such place.
    """
    start = last_block(markdown_parser().parse(text), text)
    return sum(len(line) + 1 for line in text.split("\n")[:start]) or None


def last_block(tokens: Sequence[Token], text: str) -> int:
    """The line where the last top-level block of a parsed text begins whose first line is complete.

    See `find_split`. 0: there is no such block but the first one.
    """
    last_line = text.count("\n")
    starts = [t.map[0] for t in tokens if t.level == 0 and t.map is not None and t.nesting >= 0]
    return next((start for start in reversed(starts) if start < last_line), 0)


def split_segments(text: str) -> list[str]:
    """Cut a Markdown text into stretches of about `SEGMENT_CHARS` that render as the whole.

    The last one may still grow. A block that is longer than a stretch stays in one piece.
    """
    parts: list[str] = []
    while len(text) >= SEGMENT_CHARS:
        cut = find_split(text[: SEGMENT_CHARS * 4 // 3]) or find_split(text)
        if cut is None:
            break
        parts.append(text[:cut])
        text = text[cut:]
    return [*parts, text]


def find_all(text: str, wanted: str) -> list[tuple[int, int]]:
    """Where a text stands in another, whatever the case; nothing where folding changes lengths."""
    folded, wanted = text.casefold(), wanted.strip().casefold()
    if not wanted or len(folded) != len(text):
        return []
    return [match.span() for match in re.finditer(re.escape(wanted), folded)]


def code_blocks(text: str) -> list[str]:
    """The blocks of code in a Markdown text, without their fences."""
    tokens = markdown_parser().parse(text)
    return [token.content for token in tokens if token.type in ("fence", "code_block")]


_MARKERS_ONLY = re.compile(r"[ \t]*[-+*#>`~|=_:.)\d \t]*")


def shown_length(text: str) -> int:
    """How many characters of a growing text can be drawn now.

    A last line of nothing but marker characters ("1", "``", "--") may still become a list, a
    fence or a heading, and drawing it early would make blocks flicker; it waits for more.
    """
    start = text.rfind("\n") + 1
    return start if _MARKERS_ONLY.fullmatch(text, start) else len(text)
