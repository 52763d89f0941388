"""Where the marked characters of a Markdown text end up when it is drawn.

Marks are ranges of source characters. The parser keeps no columns, so each drawn text is walked
along its source once more: markup, escapes and entities are stepped over, and every drawn character
finds the one it came from. Marks are an overlay: they never change what is parsed or drawn, and
where the walk loses its way (an address that is drawn decoded) characters stay unmarked. Pure.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from markdown_it.token import Token

from moet_desk.marked_text import Ranges, ranges_of

MARKS, DRAWN = "moet_marks", "moet_drawn"
"""Keys in a token's `meta`: ranges of its drawn characters, and those characters as a check."""

_NOWHERE = -1
_ENTITY = re.compile(r"&(?:#[xX][0-9a-fA-F]{1,6}|#\d{1,7}|\w{1,31});")
_SPACES = re.compile(r"\s+")
_IMAGE = "🖼  "  # what the Markdown widget draws before an image's text


def mark_tokens(tokens: Sequence[Token], source: str, marks: Ranges) -> None:
    """Put into each token that is drawn as text which of its characters are marked.

    Args:
        tokens: what a parser made of `source`.
        source: the Markdown.
        marks: its marked characters.
    """
    flags = [False] * len(source)
    for start, end in marks:
        flags[start:end] = [True] * (min(end, len(source)) - start)
    lines = _Lines(source)
    before = ""
    for token in tokens:
        if token.map is not None and token.type == "inline":
            places = lines.places_of(token, is_cell=before in ("th_open", "td_open"))
            drawn, of_content = _drawn(token)
            found = [places[at] if at != _NOWHERE else _NOWHERE for at in of_content]
            _put(token, drawn, found, flags)
        elif token.map is not None and token.type in ("fence", "code_block"):
            code = token.content.rstrip()
            _put(token, code, lines.places_of_code(token)[: len(code)], flags)
        before = token.type


def _put(token: Token, drawn: str, places: list[int], flags: list[bool]) -> None:
    found = ranges_of(at != _NOWHERE and flags[at] for at in places)
    if found:
        token.meta[MARKS], token.meta[DRAWN] = found, drawn


class _Lines:
    """The lines of a source, and where the contents of tokens lie in them."""

    def __init__(self, source: str) -> None:
        self._lines = source.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._cell_end = (_NOWHERE, 0)  # line and column behind the newest table cell

    def places_of(self, token: Token, *, is_cell: bool) -> list[int]:
        """Place in the source of each character of an inline token's content."""
        number = token.map[0] if token.map is not None else 0
        if is_cell:
            return self._places_of_cell(number, token.content)
        places: list[int] = []
        for part in token.content.split("\n"):
            places += self._places_in(number, part)
            places.append(self._starts[number + 1] - 1)  # the newline
            number += 1
        return places[:-1]

    def _places_in(self, number: int, part: str) -> list[int]:
        """The part ends its line, but for the closing marks of a heading."""
        line = self._lines[number].rstrip()
        wanted = part.rstrip()
        column = len(line) - len(wanted) if line.endswith(wanted) else line.find(wanted)
        start = self._starts[number] + column
        known = column >= 0
        return [start + i if known and i < len(wanted) else _NOWHERE for i in range(len(part))]

    def _places_of_cell(self, number: int, content: str) -> list[int]:
        """Cells of a row are found from left to right; an escaped bar has lost its backslash."""
        line, column = self._lines[number], 0
        if self._cell_end[0] == number:
            column = self._cell_end[1]
        places = []
        for char in content:
            at = line.find(char, column)
            places.append(self._starts[number] + at if at >= 0 else _NOWHERE)
            column = at + 1 if at >= 0 else column
        self._cell_end = (number, column)
        return places

    def places_of_code(self, token: Token) -> list[int]:
        """Place of each character of a code block's content."""
        number = token.map[0] if token.map is not None else 0
        number += token.type == "fence"
        places: list[int] = []
        for part in token.content.split("\n")[:-1]:
            line = self._lines[number]
            start = self._starts[number] + len(line) - len(part)
            known = line.endswith(part)
            places += [start + i if known else _NOWHERE for i in range(len(part))]
            places.append(self._starts[number + 1] - 1)
            number += 1
        return places


def _drawn(inline: Token) -> tuple[str, list[int]]:
    """The characters that are drawn for an inline token, and the place of each in its content."""
    walk = _Walk(inline.content)
    for child in inline.children or ():
        walk.take(child)
    return "".join(walk.drawn), walk.places


class _Walk:
    """Goes along the content of an inline token beside what is drawn of it."""

    def __init__(self, content: str) -> None:
        self._content = content
        self._at = 0
        self.drawn: list[str] = []
        self.places: list[int] = []

    def take(self, child: Token) -> None:
        """Step over the source of one child and note what it draws."""
        match child.type:
            case "text":
                self._text(child.content)
            case "softbreak" | "hardbreak":
                self._step_behind("\n")
                self._draw(" " if child.type == "softbreak" else "\n", self._at - 1)
            case "code_inline":
                self._step_behind(child.markup)
                self._code(child.content)
                self._step_behind(child.markup)
            case "link_open" if child.markup != "linkify":
                self._step_behind("<" if child.markup == "autolink" else "[")
            case "link_close" if child.markup != "linkify":
                self._leave_link(child.markup)
            case "image":
                for char in _IMAGE:
                    self._draw(char, _NOWHERE)
                self._step_behind("[")
                for grandchild in child.children or ():
                    self._text(grandchild.content)
                self._leave_link("")
            case _ if child.markup:
                self._step_behind(child.markup)

    def _draw(self, char: str, place: int) -> None:
        self.drawn.append(char)
        self.places.append(place)

    def _step_behind(self, markup: str) -> None:
        at = self._content.find(markup, self._at)
        if at >= 0:
            self._at = at + len(markup)

    def _leave_link(self, markup: str) -> None:
        """Step over the end of a link: "](address "title")" or ">"."""
        if markup == "autolink":
            self._step_behind(">")
            return
        self._step_behind("](")
        depth = 1
        for at in range(self._at, len(self._content)):
            escaped = self._content[at - 1] == "\\"
            depth += 0 if escaped else {"(": 1, ")": -1}.get(self._content[at], 0)
            if depth == 0:
                self._at = at + 1
                return

    def _text(self, text: str) -> None:
        """Text is drawn with each run of blanks as one."""
        end = 0
        for blanks in _SPACES.finditer(text):
            self._letters(text[end : blanks.start()])
            places = [self._place_of(char) for char in blanks[0]]
            self._draw(" ", places[0])
            end = blanks.end()
        self._letters(text[end:])

    def _letters(self, text: str) -> None:
        for char in text:
            self._draw(char, self._place_of(char))

    def _place_of(self, char: str) -> int:
        """Where a drawn character comes from: itself, escaped, or an entity."""
        at = self._at
        while at < len(self._content):
            entity = _ENTITY.match(self._content, at)
            if entity is not None and html.unescape(entity[0]) == char:
                self._at = entity.end()
                return at
            if self._content[at] == char:
                self._at = at + 1
                return at
            if not (self._content[at].isspace() or self._content[at] == "\\"):
                break
            at += 1
        return _NOWHERE

    def _code(self, code: str) -> None:
        """Code is drawn as it is, but for line ends and one blank at each end."""
        content = self._content
        for char in code:
            while self._at < len(content) and content[self._at].isspace() and char != " ":
                self._at += 1
            same = content[self._at : self._at + 1] in (char, "\n" if char == " " else char)
            self._draw(char, self._at if same else _NOWHERE)
            self._at += same
