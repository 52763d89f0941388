"""What can be folded: a line that says what is hidden, and the reasoning of a model. UI thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.marked_markdown import needs_other_rows
from moet_desk.units import show_duration

_CHUNK_CHARS = 1500  # a growing Static costs more with each flush


class Fold(Static):
    """A line with a glyph that shows whether what it belongs to is open; a click posts `Clicked`.

    Its owner folds and unfolds.
    """

    DEFAULT_CSS = "Fold { height: 1; color: $dim; } Fold:hover { color: $accent; }"

    class Clicked(Message):
        """The line was clicked."""

        def __init__(self, fold: Fold) -> None:
            super().__init__()
            self.fold = fold

    def __init__(self, glyphs: Glyphs, *, is_open: bool = False) -> None:
        super().__init__("", classes="fold", markup=False)
        self._glyphs = glyphs
        self.is_open = is_open

    def say(self, words: str) -> None:
        """Draw the line."""
        glyph = self._glyphs.fold if self.is_open else self._glyphs.unfold
        self.update(Content(f"{glyph} {words}"), layout=False)  # it has one row

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.post_message(self.Clicked(self))


class ThoughtFold(Vertical):
    """What a model said to itself: a line with time and tokens, and the text when it is open."""

    DEFAULT_CSS = """
    ThoughtFold { height: auto; padding: 0 0 0 3; display: none; }
    ThoughtFold > .thought { height: auto; color: $dim; padding: 0 0 0 2; }
    ThoughtFold.-open { padding: 0 0 1 3; }
    """

    def __init__(self, glyphs: Glyphs, *, is_open: bool) -> None:
        super().__init__()
        self._line = Fold(glyphs, is_open=is_open)
        self._text = ""
        self._words = ""
        self._drawn: list[_Chunk] = []
        self._chunk = 0  # where the last one begins

    def compose(self) -> ComposeResult:
        self._line.remove_class("fold")
        yield self._line

    @property
    def is_open(self) -> bool:
        """Whether the text is shown."""
        return self._line.is_open

    async def show(self, text: str, meta: Mapping[str, Any], *, is_done: bool) -> None:
        """Draw the reasoning so far. `meta` may hold `thought_s` and `thought_tokens`."""
        if not text:
            return
        self.display = True
        seconds, tokens = meta.get("thought_s"), meta.get("thought_tokens")
        words = "thought" if is_done else "thinking"
        words += "" if not seconds else f"{' for' if is_done else ''} {show_duration(seconds)}"
        words += f", {tokens:,} tokens" if tokens else ""
        self._text = text
        if words != self._words:
            self._words = words
            self._line.say(words)
        if self.is_open:
            await self._draw()

    async def open(self, is_open: bool) -> None:
        """Unfold it, or fold it."""
        self._line.is_open = is_open
        self._line.say(self._words)
        self.set_class(is_open, "-open")
        if is_open:
            await self._draw()
        for chunk in self._drawn:
            chunk.display = is_open

    async def _draw(self) -> None:
        self.add_class("-open")
        while True:
            rest = self._text[self._chunk :]
            cut = rest.rfind("\n", 0, _CHUNK_CHARS) + 1 if len(rest) > _CHUNK_CHARS else 0
            cut = cut or (_CHUNK_CHARS if len(rest) > _CHUNK_CHARS else len(rest))
            is_last = cut == len(rest)
            if not self._drawn or self._drawn[-1].is_full:
                self._drawn.append(_Chunk())
                await self.mount(self._drawn[-1])
            content = Content(rest[:cut].rstrip("\n").expandtabs(4))
            self._drawn[-1].update(content, layout=needs_other_rows(self._drawn[-1], content))
            if is_last:
                return
            self._drawn[-1].is_full = True
            self._chunk += cut

    async def on_fold_clicked(self, event: Fold.Clicked) -> None:
        event.stop()
        await self.open(not self.is_open)


class _Chunk(Static):
    """A stretch of reasoning; a full one does not grow any more."""

    def __init__(self) -> None:
        super().__init__("", classes="thought", markup=False)
        self.is_full = False
