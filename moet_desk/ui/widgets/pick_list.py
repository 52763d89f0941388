"""A screen with a list and words under it: the frame that Endpoint, Settings and Log share.

The screens fill it; this draws the frame and the status line. UI thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import OptionList, Static

from moet_desk.telemetry import EngineSnapshot
from moet_desk.ui.desk import JobView
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.frame import SmallWindow, TabLine
from moet_desk.ui.widgets.gauges import StatusLine
from moet_desk.ui.widgets.job_lines import JobLines
from moet_desk.ui.widgets.key_line import KeyLine


class Rows(OptionList, inherit_bindings=False):
    """Rows that leave the keys left and right to their screen; they never scroll sideways."""

    BINDINGS: ClassVar[list[BindingType]] = list(OptionList.BINDINGS)


class ListScreen(Screen[None]):
    """See the module's paragraph. Subclasses set `MODE` and fill `#top`, `#rows` and `#words`."""

    MODE = ""
    DEFAULT_CSS = """
    ListScreen #top { height: auto; }
    ListScreen #rows { height: 1fr; border: none; background: $background; margin-top: 1; }
    ListScreen #words { height: auto; max-height: 8; padding: 1 1 0 1; }
    """

    def __init__(self, glyphs: Glyphs, *, plain: bool) -> None:
        super().__init__()
        self._glyphs = glyphs
        self._plain = plain
        self._drawn_once = False

    def compose(self) -> ComposeResult:
        yield TabLine(self.MODE, plain=self._plain)
        yield Static("", id="top", markup=False)
        yield Rows(id="rows", markup=False)
        yield Static("", id="words", markup=False)
        yield from self.more()
        yield JobLines(self._glyphs)
        yield StatusLine(self._glyphs)
        yield KeyLine()
        yield SmallWindow(self._glyphs)

    def more(self) -> ComposeResult:
        """Further widgets under the words."""
        yield from ()

    def on_mount(self) -> None:
        self._drawn_once = True
        self.list.focus()
        self.fill()

    def fill(self) -> None:
        """Draw everything."""

    @property
    def list(self) -> OptionList:
        """The rows."""
        return self.query_one("#rows", OptionList)

    def show(
        self, snapshot: EngineSnapshot, *, context_used: int, notes: tuple[str, ...],
        jobs: Sequence[JobView],
    ) -> None:  # fmt: skip
        """Draw a snapshot; called four times a second while in front."""
        if self._drawn_once:
            self.query_one(StatusLine).show(snapshot, context_used=context_used, notes=notes)
            self.query_one(JobLines).show(jobs)
            self.tick(snapshot)

    def tick(self, snapshot: EngineSnapshot) -> None:
        """What moves by itself."""

    def focus_list(self) -> None:
        """Let keys act on the rows."""
        self.list.focus()

    def set_rows(self, rows: Sequence[Content]) -> None:
        """Replace the rows; the cursor stays where it was."""
        at = self.list.highlighted or 0
        self.list.clear_options()
        self.list.add_options(list(rows))
        if rows:
            self.list.highlighted = min(at, len(rows) - 1)

    def put(self, name: str, content: Content) -> None:
        """Change a text if it has changed."""
        static = self.query_one(f"#{name}", Static)
        if static.content != content:
            static.update(content)
