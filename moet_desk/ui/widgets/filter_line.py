"""The line under a list that says which of its rows are shown: "/" opens it, Esc ends it.

It filters nothing itself: the screen asks for `text` when it fills its list. UI thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Input, Static


def matches(wanted: str, *texts: str) -> bool:
    """Whether every word of `wanted` is in one of the texts, whatever their case."""
    whole = "\n".join(texts).casefold()
    return all(word in whole for word in wanted.casefold().split())


class FilterLine(Horizontal):
    """`changed` is called after every change, `leave` when the list is to have the focus again."""

    DEFAULT_CSS = """
    FilterLine { height: 1; margin: 1 0 0 0; display: none; }
    FilterLine Static { width: 3; }
    FilterLine Input { width: 1fr; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "All rows", id="filter.close"),
        Binding("down", "leave", "To the list", id="filter.list", show=False),
    ]

    def __init__(self, changed: Callable[[], None], leave: Callable[[], object]) -> None:
        super().__init__(id="filter")
        self._changed = changed
        self._leave = leave

    def compose(self) -> ComposeResult:
        yield Static(Content(" / "), markup=False)
        yield Input(placeholder="only rows with these words", compact=True)

    @property
    def text(self) -> str:
        return self.query_one(Input).value if self.display else ""

    def open(self) -> None:
        """Show the line and type into it."""
        self.display = True
        self.query_one(Input).focus()

    def action_close(self) -> None:
        """Show all rows again."""
        self.query_one(Input).value, self.display = "", False
        self._changed()
        self._leave()

    def action_leave(self) -> None:
        """Keep the filter and go to the list."""
        self._leave()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._changed()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._leave()
