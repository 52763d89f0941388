"""The Log screen: the end of the log file, by level, as it grows. UI thread."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content

from moet_desk.telemetry import EngineSnapshot
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.pick_list import ListScreen

_TAIL_BYTES = 128 * 1024
_SHOWN = 500
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


class LogScreen(ListScreen):
    """See the module's paragraph."""

    MODE = "log"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "level", "Level", id="log.level"),
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
        self._lines: list[str] = []

    def tick(self, snapshot: EngineSnapshot) -> None:
        if not self._paused:
            self._look()

    def fill(self) -> None:
        self._seen = None
        self._look()

    def _look(self) -> None:
        try:
            found = self._file.stat()
            now = (found.st_size, found.st_mtime_ns)
        except OSError:
            now = (0, 0)
        if now == self._seen:
            return
        self._seen = now
        self._lines = at_level(read_tail(self._file), self._least)[-_SHOWN:]
        self.set_rows([
            Content.styled(f" {clean_line(line, 400)}", _STYLES.get(level_of(line) or "", ""))
            for line in self._lines
        ])  # fmt: skip
        if self._lines:
            self.list.highlighted = len(self._lines) - 1
        self._draw_top()

    def _draw_top(self) -> None:
        state = "paused" if self._paused else "live"
        words = f" Log   {self._file}   from {self._least.lower()} on, {state}"
        self.put("top", Content.styled(words, "bold"))
        self.put("words", Content("" if self._lines else "Nothing at this level."))

    def action_level(self) -> None:
        """Go on to the next level."""
        self._least = LEVELS[(LEVELS.index(self._least) + 1) % len(LEVELS)]
        self.fill()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._draw_top()

    def action_copy(self) -> None:
        """Copy the lines that are shown."""
        self.app.copy_to_clipboard("\n".join(self._lines))
        self.notify("The lines are on the clipboard, if the terminal allows it.")
