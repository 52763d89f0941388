"""The line that searches in the open chat: a field, and which of how many is shown. UI thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import Input, Static

from moet_desk.ui.chat_records import Turn


def find_turns(turns: Iterable[Turn], query: str) -> list[Turn]:
    """Messages that contain a text, whatever its case, in their order."""
    wanted = query.strip().casefold()
    if not wanted:
        return []
    return [
        turn
        for turn in turns
        if wanted in turn.text.casefold()
        or wanted in turn.thought.casefold()
        or any(wanted in file.name.casefold() for file in turn.files)
    ]


class FindLine(Horizontal):
    """Posts `Changed`, `Wanted` and `Closed`."""

    DEFAULT_CSS = """
    FindLine { display: none; height: 1; padding: 0 1; background: $panel; }
    FindLine Static { width: auto; }
    FindLine Input { width: 1fr; border: none; height: 1; padding: 0 1; background: $panel; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,up", "want(-1)", "Older", id="find.older", priority=True),
        Binding("down", "want(1)", "Newer", id="find.newer", priority=True),
        Binding("escape", "close", "Close", id="find.close"),
    ]

    class Changed(Message):
        """Another text is looked for."""

        def __init__(self, query: str) -> None:
            super().__init__()
            self.query_text = query

    class Wanted(Message):
        """The match before (-1) or behind (1) the one that is shown."""

        def __init__(self, by: int) -> None:
            super().__init__()
            self.by = by

    class Closed(Message):
        """Back to the prompt."""

    def compose(self) -> ComposeResult:
        yield Static("Find ", markup=False)
        yield Input(compact=True, placeholder="in this chat, in all versions of its messages")
        yield Static("", id="found", markup=False)

    def open(self, query: str = "") -> None:
        """Show it and put the caret there; a text is looked for at once."""
        self.display = True
        field = self.query_one(Input)
        if query:
            field.value = query
        field.focus()
        field.cursor_position = len(field.value)
        self.post_message(self.Changed(field.value))

    def say(self, words: str) -> None:
        """Which of how many is shown."""
        self.query_one("#found", Static).update(words)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display:
            self.post_message(self.Changed(event.value))

    def action_want(self, by: int) -> None:
        self.post_message(self.Wanted(by))

    def action_close(self) -> None:
        self.display = False
        self.post_message(self.Closed())
