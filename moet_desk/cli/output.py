"""What commands print: data on stdout, words on stderr, and errors in one shape.

Owns the three formats (for people, one JSON document, a JSON event per line) and the meter of long
work. Imports no more than errors and units. Runs in the thread of the command.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from moet_desk.cli.streams import forget, harmless, takes_unicode, write_words
from moet_desk.errors import MoetError
from moet_desk.units import show_duration

SCHEMA = 1
"""Fields of a document are only ever added inside one schema number."""


class _Plain:
    wanted = False


def be_plain(wanted: bool) -> None:
    """Whether the words of this process are for a screen reader, whatever the terminal can do."""
    _Plain.wanted = wanted


def is_plain() -> bool:
    """Whether nothing may be drawn again and no sign stand for a word: it was asked for, or the
    terminal cannot move its cursor.
    """
    if _Plain.wanted or not sys.stderr.isatty():
        return _Plain.wanted
    from moet_desk.config import read_terminal  # what costs time at the start is only read here

    return read_terminal().is_dumb


def prints_lines() -> bool:
    """Whether answers are printed by whole lines; a file gets the text as it is, if that was not
    asked for.
    """
    return _Plain.wanted or (sys.stdout.isatty() and is_plain())


class Format(Enum):
    """How a command prints its data."""

    HUMAN = "human"
    JSON = "json"
    NDJSON = "ndjson"


def print_document(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout."""
    _write_json({"schema": SCHEMA, **document}, indent=1)


def print_event(event: str, **fields: Any) -> None:
    """One JSON event on a line of its own, at once."""
    _write_json({"schema": SCHEMA, "event": event, **fields})


def print_result(wanted: Format, event: str, fields: Mapping[str, Any]) -> None:
    """All that a command prints for programs: a document, or the same as one event on one line."""
    if wanted is Format.NDJSON:
        print_event(event, **fields)
    else:
        print_document(fields)


def print_text(text: str) -> None:
    """Data for people on stdout."""
    _write(harmless(text) if sys.stdout.isatty() else text)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows of equal length as aligned columns; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print_text("  ".join(cells).rstrip())


def say(text: str) -> None:
    """Words on stderr."""
    write_words(text + "\n")


def report_error(error: MoetError, wanted: Format) -> int:
    """Print an error in the wanted format and return its exit code."""
    mark = "✗" if (sys.stderr.encoding or "").lower().startswith("utf") else "x"
    mark = "Error:" if is_plain() else mark
    lines = [f"{mark} {error.title}  {error.code}", f"  {error.cause}", f"  Do: {error.do}"]
    # facts may come from a model's files, which must not steer the terminal
    say(harmless("\n".join([*lines, f"  {error.safe}"] if error.safe else lines)))
    try:
        if wanted is Format.JSON:
            print_document({"error": error.to_dict()})
        elif wanted is Format.NDJSON:
            print_event("error", error=error.to_dict())
        sys.stdout.flush()
    except OSError:  # its reader has gone, or the disk below it is full: the words were said
        forget(sys.stdout)
    return error.spec.exit


def _write_json(document: Mapping[str, Any], indent: int | None = None) -> None:
    text = json.dumps(document, ensure_ascii=False, indent=indent)
    if not takes_unicode(text):
        text = json.dumps(document, indent=indent)
    _write(text)


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Meter:
    """Shows how far long work is: a line that is redrawn on a terminal, a line now and then
    elsewhere.

    `show` may be called as often as one likes.
    """

    REDRAW_S = 0.1
    LINE_S = 5.0
    WIDTH = 24

    def __init__(self, *, quiet: bool = False, now: Callable[[], float] = time.monotonic) -> None:
        self._quiet = quiet
        self._now = now
        self._plain = is_plain()
        self._on_terminal = sys.stderr.isatty() and not self._plain
        self._name = ""
        self._since_s = self._last_s = now()
        self._open = False  # a redrawn line waits for its end

    def show(self, name: str, done: int, total: int, figures: str) -> None:
        """Report `done` of `total`; `figures` says it with units."""
        if self._quiet:
            return
        now_s = self._now()
        is_new = name != self._name
        if is_new:
            self.close()
            self._name, self._since_s, self._last_s = name, now_s, now_s
        wait_s = self.REDRAW_S if self._on_terminal else self.LINE_S
        is_due = now_s - self._last_s >= wait_s or (is_new and (self._on_terminal or self._plain))
        if done < total and not is_due:
            return
        self._last_s = now_s
        text = self._line(done, total, figures, now_s - self._since_s)
        if self._on_terminal:
            write_words(f"\r\x1b[K{text}")
            self._open = True
        else:
            write_words(text + "\n")

    def close(self) -> None:
        """End the line that is being redrawn."""
        if self._open:
            write_words("\n")
        self._open = False

    def _line(self, done: int, total: int, figures: str, seconds: float) -> str:
        share = done / total if total else 1.0
        filled = round(share * self.WIDTH)
        bar = "#" * filled + "-" * (self.WIDTH - filled)
        left = ""
        if 0 < done < total and seconds > 1:
            left = f"  {show_duration(seconds * (total - done) / done)} left"
        if self._plain:
            parts = [f"{share:.0%}" if total else "", figures, left.strip()]
            return ", ".join([self._name, *filter(None, parts)])
        return f"{self._name:<18} [{bar}] {share:4.0%}  {figures}{left}"
