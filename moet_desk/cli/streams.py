"""stdin, stdout and stderr as they were given: closed, gone, full, or of another encoding.

Owns that none of these is a surprise to a command. Imports nothing of ours. Main thread.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

# Text for a terminal must not steer it: no control characters but newline and tab.
_CONTROLS = dict.fromkeys(set(range(32)) - {9, 10} | set(range(127, 160)))


def make_usable() -> None:
    """Open what is closed on nothing, and take text that an encoding does not know.

    A file that is opened while one of the first three descriptors is free would get its number,
    and whatever a library prints would go into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    _forgive(sys.stdin, "surrogateescape")  # who reads asks `is_text`
    _forgive(sys.stdout, "replace")


def _forgive(stream: TextIO, errors: str) -> None:
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors=errors)


def is_text(text: str) -> bool:
    """Whether a text that came in was text in its encoding; other bytes are surrogates in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def takes_unicode(text: str) -> bool:
    """Whether stdout takes a JSON text as it is: it is UTF-8, and so is the text."""
    encoding = (sys.stdout.encoding or "utf-8").lower().replace("_", "-")
    return encoding in ("utf-8", "utf8") and is_text(text)


def harmless(text: str) -> str:
    """A text without what would steer a terminal."""
    return text.translate(_CONTROLS)


def write_words(text: str) -> None:
    """Write to stderr. That nobody can read it there stops no work."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        forget(sys.stderr)


def forget(stream: TextIO) -> None:
    """Let what a stream still holds, and whatever comes, go nowhere instead of complaining."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
