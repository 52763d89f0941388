"""Text files that go with a message: reading and checking them, and how the model is told.

A pasted text that is too long for the prompt is one as well. What the model reads is the file's
name and its text in a fence; the transcript shows a chip. Reading may happen in any thread.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet_desk.errors import MoetError, fail
from moet_desk.ui.text import clean, clean_line
from moet_desk.units import show_disk, show_memory

MAX_BYTES = 4 * 2**20
"""About a million tokens; longer texts fit no model's context."""
PASTE_CHARS, PASTE_LINES = 2000, 20
"""A longer paste becomes an attachment: the prompt has eight rows."""

_FENCE = re.compile(r"^`{3,}", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A text with a name. `n_tokens` is None until it was counted."""

    name: str
    text: str
    n_tokens: int | None = None

    @classmethod
    def from_stored(cls, record: Mapping[str, Any]) -> Attachment:
        """As the store keeps it."""
        tokens = record.get("n_tokens")
        known = tokens if isinstance(tokens, int) else None
        return cls(str(record.get("name", "?")), str(record.get("text", "")), known)

    def to_stored(self) -> dict[str, Any]:
        """What the store keeps."""
        return {"name": self.name, "text": self.text, "n_tokens": self.n_tokens}

    @property
    def words(self) -> str:
        """Name, size and tokens for one line."""
        tokens = "" if self.n_tokens is None else f", {self.n_tokens:,} tokens"
        return f"{self.name}, {show_disk(len(self.text.encode()))}{tokens}"


def read_attachment(path: Path) -> Attachment:
    """Read a text file.

    Raises:
        MoetError: MD-CHAT-04 it is no text or cannot be read, MD-CHAT-05 it is too large.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise _no_text(path, "it is not a file")
            if about.st_size > MAX_BYTES:
                raise _too_large(str(path), about.st_size)
            data = file.read(MAX_BYTES + 1)
    except OSError as problem:
        raise _no_text(path, problem.strerror or str(problem)) from problem
    if len(data) > MAX_BYTES:  # it grew, or is one of those that say 0
        raise _too_large(str(path), len(data))
    return Attachment(clean_line(path.name, 80), clean(_decoded(path, data)))


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting: a pipe that nobody writes to would hold up the app for ever."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _decoded(path: Path, data: bytes) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif b"\0" in data:
        raise _no_text(path, "it holds bytes that no text has (a picture, a program, an archive?)")
    else:
        encoding = "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as problem:
        reason = f"it is not UTF-8 (byte {problem.start:,})"
        raise _no_text(path, reason) from problem


def pasted(text: str, number: int) -> Attachment:
    """A pasted text as an attachment.

    Raises:
        MoetError: MD-CHAT-05, it is too large.
    """
    if len(text) > MAX_BYTES:
        raise _too_large("the pasted text", len(text))
    return Attachment("pasted text" if number == 1 else f"pasted text {number}", clean(text))


def is_long(text: str) -> bool:
    """Whether a paste is too much for the prompt."""
    return len(text) > PASTE_CHARS or text.count("\n") >= PASTE_LINES


def message_text(text: str, files: Sequence[Attachment]) -> str:
    """What the model reads of a message: the files, each fenced, then the text."""
    return "\n\n".join([*map(_fenced, files), *([text] if text else [])])


def _fenced(file: Attachment) -> str:
    longest = max((len(found) for found in _FENCE.findall(file.text)), default=2)
    fence = "`" * max(3, longest + 1)
    ending = "" if file.text.endswith("\n") else "\n"
    return f"{file.name}:\n{fence}\n{file.text}{ending}{fence}"


def _no_text(path: Path, reason: str) -> MoetError:
    return fail("MD-CHAT-04", path=str(path), reason=reason)


def _too_large(name: str, n_bytes: int) -> MoetError:
    return fail("MD-CHAT-05", name=name, size=show_memory(n_bytes), limit=show_memory(MAX_BYTES))
