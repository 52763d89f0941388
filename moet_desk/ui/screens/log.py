"""The Log screen: the end of the log file by level and words, as it grows. UI thread.

The cursor follows the end while it stands there; moved up, it stays on its record.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList

from moet_desk.telemetry import EngineSnapshot
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.filter_line import FilterLine, matches
from moet_desk.ui.widgets.pick_list import ListScreen

_TAIL_BYTES = 128 * 1024
_SHOWN = 500
_NOTHING = "Nothing at this level with these words."
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_STYLES = {"WARNING": "$status-warn", "ERROR": "$status-bad", "CRITICAL": "$status-bad"}


def read_tail(path: Path) -> list[str]:
    """The last whole lines of a file; none if it is not there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    lines = data.decode("utf-8", "replace").splitlines()
    return lines[1:] if size > _TAIL_BYTES else lines


def at_level(lines: list[str], least: str) -> list[str]:
    """The records of at least that level, with the lines that belong to them."""
    wanted = (*LEVELS[LEVELS.index(least) :], "CRITICAL")
    kept, keeps = [], False
    for line in lines:
        level = level_of(line)
        keeps = keeps if level is None else level in wanted
        if keeps:
            kept.append(line)
    return kept


def level_of(line: str) -> str | None:
    """The level of a record's first line; None for a line that goes on with one."""
    parts = line.split(maxsplit=2)
    known = (*LEVELS, "CRITICAL")
    return parts[1] if len(parts) > 1 and parts[1] in known else None


Record = tuple[str, ...]
"""One record of the log: its line, and those that go on with it (a traceback)."""


def records(lines: Sequence[str]) -> list[Record]:
    """Lines put together to records; what goes on with a record that is not here stands alone."""
    found: list[list[str]] = []
    for line in lines:
        if level_of(line) is None and found:
            found[-1].append(line)
        else:
            found.append([line])
    return [tuple(record) for record in found]


class LogScreen(ListScreen):
    """See the module's paragraph."""

    MODE = "log"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "level", "Level", id="log.level"),
        Binding("slash", "filter", "Search", id="log.filter"),
        Binding("f", "follow", "Follow", id="log.follow"),
        Binding("space", "pause", "Pause", id="log.pause"),
        Binding("c", "copy", "Copy", id="log.copy"),
        Binding("escape", "app.go('chat')", "Chat", id="log.back"),
    ]

    def __init__(self, file: Path, glyphs: Glyphs, *, plain: bool) -> None:
        super().__init__(glyphs, plain=plain)
        self._file = file
        self._least = "INFO"
        self._paused = False
        self._seen: tuple[int, int] | None = None
        self._shown: list[Record] = []

    def more(self) -> ComposeResult:
        yield FilterLine(self.fill, self.focus_list)

    def tick(self, snapshot: EngineSnapshot) -> None:
        if not self._paused:
            self._look()

    def fill(self) -> None:
        self._seen = None
        self._look()

    @property
    def record(self) -> Record | None:
        """The one under the cursor."""
        at = self.list.highlighted
        return self._shown[at] if at is not None and at < len(self._shown) else None

    @property
    def follows(self) -> bool:
        """Whether the cursor is at the end, and goes on with it."""
        at = self.list.highlighted
        return at is None or at >= len(self._shown) - 1

    def _look(self) -> None:
        try:
            found = self._file.stat()
            now = (found.st_size, found.st_mtime_ns)
        except OSError:
            now = (0, 0)
        if now == self._seen:
            return
        self._seen = now
        wanted = self.query_one(FilterLine).text
        marked, follows = self.record, self.follows
        lines = at_level(read_tail(self._file), self._least)
        self._shown = [r for r in records(lines) if matches(wanted, *r)][-_SHOWN:]
        self.set_rows([self._row(record) for record in self._shown])
        if self._shown:
            stays = not follows and marked is not None and marked in self._shown
            self.list.highlighted = (
                self._shown.index(marked) if stays and marked else len(self._shown) - 1
            )
        self._draw()

    def _row(self, record: Record) -> Content:
        more = f"   +{len(record) - 1} lines" if len(record) > 1 else ""
        text = f" {clean_line(record[0], 400)}{more}"
        return Content.styled(text, _STYLES.get(level_of(record[0]) or "", ""))

    def _draw(self) -> None:
        state = "paused" if self._paused else "follows" if self.follows else "F follows"
        words = f" Log   from {self._least.lower()} on, {state}   {self._file}"
        self.put("top", Content.styled(words, "bold"))
        lines = self.record or (_NOTHING,)
        self.put("words", Content("\n".join(clean_line(line, 400) for line in lines)))

    def on_option_list_option_highlighted(self, _event: OptionList.OptionHighlighted) -> None:
        self._draw()

    def on_option_list_option_selected(self, _event: OptionList.OptionSelected) -> None:
        if self.record is not None:
            self.app.copy_to_clipboard("\n".join(self.record))
            self.notify("The record is on the clipboard, if the terminal allows it.")

    def action_level(self) -> None:
        """Go on to the next level."""
        self._least = LEVELS[(LEVELS.index(self._least) + 1) % len(LEVELS)]
        self.fill()

    def action_filter(self) -> None:
        """Show only records with certain words."""
        self.query_one(FilterLine).open()

    def action_follow(self) -> None:
        """Go to the end and stay there."""
        self._paused = False
        if self._shown:
            self.list.highlighted = len(self._shown) - 1
        self.fill()

    def action_pause(self) -> None:
        """Freeze the list; what comes is drawn later."""
        self._paused = not self._paused
        self._draw()

    def action_copy(self) -> None:
        """Copy the records that are shown."""
        self.app.copy_to_clipboard("\n".join(line for record in self._shown for line in record))
        self.notify("The records shown are on the clipboard, if the terminal allows it.")
