"""The files that go with the next message, a line each, above the prompt. UI thread.

Tokens are counted in threads; the screen's timer polls for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from textual import events
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from moet_desk.ui.attachments import Attachment
from moet_desk.ui.background import Background
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.gauges import spread

_MOST_LINES = 3


class Chips(Widget):
    """See the module's paragraph. A click on the cross at the end of a line takes the file away."""

    DEFAULT_CSS = "Chips { height: auto; max-height: 4; padding: 0 1; display: none; }"

    class Changed(Message):
        """A file came, went, or was counted."""

    def __init__(self, glyphs: Glyphs, *, count: Callable[[str], int | None]) -> None:
        """`count` counts tokens, in a thread; None: there is no model to ask."""
        super().__init__()
        self._glyphs = glyphs
        self._count = count
        self._files: list[Attachment] = []
        self._counting: list[tuple[Attachment, Background[int | None]]] = []
        self._room = 0

    @property
    def files(self) -> tuple[Attachment, ...]:
        """What goes with the next message."""
        return tuple(self._files)

    def put(self, files: Iterable[Attachment]) -> None:
        """Replace them all."""
        files = tuple(files)
        self._counting.clear()
        self._files = []
        for file in files:
            self._add(file)
        self._draw()

    def add(self, file: Attachment) -> None:
        """One more."""
        self._add(file)
        self._draw()
        self.post_message(self.Changed())

    def _add(self, file: Attachment) -> None:
        self._files.append(file)
        if file.n_tokens is None:
            call = Background(lambda: self._count(file.text), name="count-tokens")
            self._counting.append((file, call))

    def take_away(self, index: int = -1) -> bool:
        """Take one away, by default the last. False: there is none."""
        if not self._files:
            return False
        self._files.pop(index)
        self._draw()
        self.post_message(self.Changed())
        return True

    def poll(self, context: int) -> None:
        """Draw what was counted since; `context` is how many tokens the model can hold.

        Another context is another model, which counts differently.
        """
        if context and context != self._room:
            self._room = context
            self.put(replace(file, n_tokens=None) for file in self._files)
        ended = [(file, call) for file, call in self._counting if call.ended]
        self._counting = [pair for pair in self._counting if pair not in ended]
        for file, call in ended:
            if call.result is not None and file in self._files:
                at = self._files.index(file)
                self._files[at] = replace(file, n_tokens=call.result)
                self.post_message(self.Changed())
        if ended:
            self._draw()

    def _draw(self) -> None:
        self.display = bool(self._files)
        self.refresh(layout=True)

    def _line(self, file: Attachment, width: int) -> Content:
        words = f"{self._glyphs.file} {clean_line(file.words, width)}"
        line = Content.styled(words, "$accent")
        if any(file is counted for counted, _ in self._counting):
            line += Content.styled("  counting", "$dim")
        elif self._room and (file.n_tokens or 0) >= self._room:
            words = f"  {self._glyphs.warn} more than the model holds ({self._room:,})"
            line += Content.styled(words, "bold $status-warn")
        return spread(line, Content.styled(f"{self._glyphs.close}", "$dim"), width)

    def render(self) -> Content:
        width = self.size.width
        lines = [self._line(file, width) for file in self._files[:_MOST_LINES]]
        more = len(self._files) - _MOST_LINES
        if more > 0:
            lines.append(Content.styled(f"  and {more} more", "$dim"))
        return Content("\n").join(lines)

    def on_click(self, event: events.Click) -> None:
        if event.x >= self.size.width - 3 and event.y < min(_MOST_LINES, len(self._files)):
            self.take_away(event.y)
