"""Lines of code in the colours of Textual's Markdown, at a fraction of its cost.

Textual looks a language up among all and turns each word into a span of a text that is wrapped
again. Here a lexer is kept for each language, and words go straight into rows. UI thread.
"""

from __future__ import annotations

from functools import lru_cache

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import _TokenType
from pygments.util import ClassNotFound
from rich.segment import Segment
from rich.style import Style as Ink
from textual.content import Content
from textual.highlight import (
    ANSIDarkHighlightTheme,
    ANSILightHighlightTheme,
    HighlightTheme,
    guess_language,
    highlight,
)
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions
from textual.widget import Widget

_UNWRAPPED = 1 << 16
_TAB = 8  # as Textual draws it


class CodeColours:
    """Colours code for one widget, whose app has the theme."""

    def __init__(self, widget: Widget) -> None:
        self._widget = widget
        self._options = RenderOptions(widget._get_style, {})
        self._inks: dict[_TokenType, Ink | None] = {}
        self._look: object = None

    def content(self, code: str, language: str) -> Content:
        """The code as Textual colours it."""
        code = code or " "
        return highlight(code, language=_known(code, language), theme=self._theme)

    def lines(self, code: str, language: str, style: Style) -> list[Strip]:
        """The lines of some code, on the look of the block."""
        if not code:  # its language may not be complete
            return [Strip([Segment("", style.rich_style)])]
        if "\t" in code:  # Textual finds the words behind it elsewhere
            return self.draw(self.content(code, language), style)
        theme = self._theme
        if self._look != (look := (self._widget.app.theme, theme, style)):
            self._inks, self._look = {}, look
        rows: list[list[Segment]] = [[]]
        for kind, text in _lexer(_known(code, language)).get_tokens(code):
            if kind not in self._inks:
                self._inks[kind] = self._ink(kind, theme, style)
            ink = self._inks[kind]
            first, *others = text.split("\n")
            if first:
                rows[-1].append(Segment(first, ink))
            rows += [[Segment(part, ink)] if part else [] for part in others]
        n_lines = code.count("\n") + 1
        blank = Segment("", style.rich_style)
        return [Strip(row or [blank]) for row in rows[:n_lines]]

    def draw(self, content: Content, style: Style) -> list[Strip]:
        """The lines of coloured code."""
        return content.render_strips(_UNWRAPPED, None, style, self._options)

    @property
    def _theme(self) -> type[HighlightTheme]:
        app = self._widget.app
        if not app.native_ansi_color:
            return HighlightTheme
        return ANSIDarkHighlightTheme if app.current_theme.dark else ANSILightHighlightTheme

    def _ink(self, kind: _TokenType, theme: type[HighlightTheme], style: Style) -> Ink | None:
        """The look of words of one kind: that of the nearest kind that has one."""
        sample = Content(".")
        while kind is not None:
            if look := theme.STYLES.get(kind):
                sample = sample.stylize(look)
                break
            kind = kind.parent
        (row,) = self.draw(sample.stylize_before("$text"), style)
        return next(iter(row)).style


def plain_lines(code: str, style: Style) -> list[Strip]:
    """Lines of code in one colour."""
    ink = style.rich_style
    return [Strip([Segment(line.expandtabs(_TAB), ink)]) for line in code.split("\n")]


def _known(code: str, language: str) -> str:
    """A language that there is a lexer for."""
    language = language or guess_language(code, None)
    return language if _lexer(language).aliases[:1] != ["text"] else "text"


@lru_cache(maxsize=64)
def _lexer(language: str) -> Lexer:
    options = {"stripnl": False, "ensurenl": True, "tabsize": _TAB}
    try:
        return get_lexer_by_name(language, **options)
    except ClassNotFound:  # costs 20,000 calls each time
        return get_lexer_by_name("text", **options)
