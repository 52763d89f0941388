"""What every screen shares: the line of tabs at the top and the notice in too small a window.

UI thread. The tabs only post what was clicked; the app changes screens.
"""

from __future__ import annotations

from textual import events
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from moet_desk.errors import fail
from moet_desk.ui.theme import Glyphs

MIN_COLUMNS, MIN_ROWS = 80, 24
TABS = (
    ("chat", "F2 Chat"), ("cache", "F3 Cache"), ("models", "F4 Models"),
    ("endpoint", "F5 Endpoint"), ("settings", "F6 Settings"), ("doctor", "F7 Doctor"),
    ("log", "F8 Log"),
)  # fmt: skip


class TabLine(Widget):
    """The screens that exist, the active one reversed and in brackets; below it, in the place of
    the rule, a line that every screen has to say.
    """

    DEFAULT_CSS = """
    TabLine { height: 1; }
    TabLine.-says { border: none; height: 2; }
    """

    class Clicked(Message):
        """A tab was clicked."""

        def __init__(self, mode: str) -> None:
            super().__init__()
            self.mode = mode

    def __init__(self, active: str, *, plain: bool) -> None:
        super().__init__()
        self._active = active
        self._plain = plain
        self._says: Content | None = None

    def say(self, line: Content | None) -> None:
        """Show a line of the window's width under the tabs, or the rule again."""
        if line is self._says or (line and self._says and line.is_same(self._says)):
            return
        self._says = line
        self.set_class(line is not None, "-says")
        self.refresh(layout=False)

    def _parts(self) -> list[tuple[str, str]]:
        """Mode and drawn text of each tab."""
        return [
            (mode, f"[{text}]" if self._plain and mode == self._active else f" {text} ")
            for mode, text in TABS
        ]

    def render(self) -> Content:
        drawn = [
            Content.styled(text, "reverse bold" if mode == self._active else "")
            for mode, text in self._parts()
        ]
        tabs = Content(" ") + Content("").join(drawn)
        return tabs if self._says is None else tabs + "\n" + self._says

    def on_click(self, event: events.Click) -> None:
        if event.y > 0:
            return
        start = 1
        for mode, text in self._parts():
            if start <= event.x < start + len(text):
                self.post_message(self.Clicked(mode))
            start += len(text)


class SmallWindow(Widget):
    """Covers a screen below 80 x 24 and says so; everything behind it goes on."""

    DEFAULT_CSS = """
    SmallWindow {
        display: none; layer: notice; width: 100%; height: 100%; background: $background;
        padding: 1;
    }
    """

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__()
        self._glyphs = glyphs

    def render(self) -> Content:
        columns, rows = self.app.size
        notice = fail(
            "MD-TERM-01",
            want_columns=MIN_COLUMNS,
            want_rows=MIN_ROWS,
            columns=columns,
            rows=rows,
        )
        words = (f"{notice.title}  {notice.code}", notice.cause, notice.do, notice.safe)
        return Content("\n\n".join([*words, "Ctrl+Q Quit"]))

    def on_resize(self) -> None:
        self.refresh()
