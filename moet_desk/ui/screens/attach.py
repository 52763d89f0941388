"""Choosing a text file to attach: a path that completes itself, and what is in its folder.

UI thread. Folders are listed as they are typed; one that is slow or huge is cut at some entries.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.gauges import spread
from moet_desk.units import show_disk

_WIDTH = 68
_MOST_READ = 5000
_MOST_SHOWN = 200


def list_folder(typed: str, start: Path) -> list[os.DirEntry[str]]:
    """What a typed path may go on with: folders first, then files, by name.

    Args:
        typed: the path so far; its last part may be anywhere in a name.
        start: the folder that a relative path begins in.

    Raises:
        OSError: the folder cannot be read.
    """
    folder, part = split_typed(typed, start)
    wanted = part.casefold()
    with os.scandir(folder) as entries:
        read = list(itertools.islice(entries, _MOST_READ))
    shown = [
        entry
        for entry in read
        if wanted in entry.name.casefold() and (wanted.startswith(".") or entry.name[0] != ".")
    ]
    return sorted(shown, key=lambda entry: (not _is_folder(entry), entry.name.casefold()))


def split_typed(typed: str, start: Path) -> tuple[Path, str]:
    """The folder of a typed path, and the part of a name behind it."""
    head, slash, part = typed.rpartition("/")
    return start / Path(head + slash).expanduser(), part


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _size(entry: os.DirEntry[str]) -> str:
    try:
        return show_disk(entry.stat().st_size)
    except OSError:
        return ""


class AttachDialog(ModalScreen[Path | None]):
    """Closes with the file, None for none."""

    DEFAULT_CSS = """
    AttachDialog { align: center middle; }
    AttachDialog > Vertical {
        width: 74; max-width: 100%; height: 80%; padding: 0 1;
        background: $surface; border: round $primary;
    }
    AttachDialog Input { border: none; height: 1; margin: 1 0; padding: 0 1; }
    AttachDialog OptionList { height: 1fr; border: none; padding: 0; background: $surface; }
    AttachDialog Static { height: auto; color: $dim; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Close", id="attach.close"),
        Binding("down", "move(1)", "Down", id="attach.down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", id="attach.up", show=False, priority=True),
        Binding("tab", "complete", "Complete", id="attach.complete", priority=True),
    ]

    def __init__(self, start: Path, *, glyphs: Glyphs) -> None:
        super().__init__()
        self._start = start
        self._glyphs = glyphs
        self._entries: list[os.DirEntry[str]] = []

    def compose(self) -> ComposeResult:
        with Vertical() as frame:
            frame.border_title = "Attach a text file"
            frame.border_subtitle = "Enter attaches, Tab completes, Esc closes"
            yield Input(placeholder="name, or a path like ~/notes/", compact=True)
            yield OptionList()
            yield Static("", markup=False)

    def on_mount(self) -> None:
        self._fill("")
        self.query_one(Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def _fill(self, typed: str) -> None:
        folder, _ = split_typed(typed, self._start)
        words = clean_line(str(folder), _WIDTH)
        try:
            self._entries = list_folder(typed, self._start)
        except OSError as problem:
            self._entries = []
            words = f"{words}: {problem.strerror or problem}"
        more = len(self._entries) - _MOST_SHOWN
        words += f", {more:,} more here" if more > 0 else ""
        self.query_one(Static).update(Content(words))
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options([self._option(entry) for entry in self._entries[:_MOST_SHOWN]])
        if self._entries:
            options.highlighted = 0

    def _option(self, entry: os.DirEntry[str]) -> Option:
        is_folder = _is_folder(entry)
        name = clean_line(entry.name, _WIDTH - 16) + ("/" if is_folder else "")
        size = Content.styled("" if is_folder else _size(entry), "$dim")
        return Option(spread(Content(name), size, _WIDTH))

    def _marked(self) -> os.DirEntry[str] | None:
        at = self.query_one(OptionList).highlighted
        return None if at is None or at >= len(self._entries) else self._entries[at]

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._take()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._take()

    def _take(self) -> None:
        """Enter a folder, or close with the file."""
        entry = self._marked()
        if entry is not None and not _is_folder(entry):
            self.dismiss(Path(entry.path))
        elif entry is not None:
            self.action_complete()
        elif typed := self.query_one(Input).value.strip():
            self.dismiss(self._start / Path(typed).expanduser())  # what is wrong is said there

    def action_complete(self) -> None:
        """Write the marked name out."""
        entry, field = self._marked(), self.query_one(Input)
        if entry is not None:
            head, slash, _ = field.value.rpartition("/")
            field.value = head + slash + entry.name + ("/" if _is_folder(entry) else "")
            field.cursor_position = len(field.value)
            field.focus()

    def action_move(self, by: int) -> None:
        options = self.query_one(OptionList)
        if by > 0:
            options.action_cursor_down()
        else:
            options.action_cursor_up()

    def action_close(self) -> None:
        self.dismiss(None)
