"""Deltas of an answer as parts that open, grow and close one after another.

Text, reasoning and each call are parts with a beginning and an end; some protocols tell their
streams this way. Pure; one `Parts` per answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

Delta = dict[str, Any]
"""A piece of an answer as OpenAI chats spell it: content, reasoning_content or tool_calls."""


class Kind(Enum):
    """What a part is."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class Verb(Enum):
    """What happens to a part."""

    OPENED = "opened"
    GREW = "grew"
    CLOSED = "closed"


@dataclass(slots=True)
class Part:
    """One part so far. `text` of a call are its arguments; only calls have `id` and `name`."""

    index: int
    kind: Kind
    text: str = ""
    id: str = ""
    name: str = ""


class Change(NamedTuple):
    """One thing that happened; `piece` is the new text of a part that grew."""

    verb: Verb
    part: Part
    piece: str = ""


class Parts:
    """Invariant: all parts but the last one are closed."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._open: Part | None = None

    def add(self, deltas: Sequence[Delta]) -> Iterator[Change]:
        """Take deltas and say what they change."""
        for delta in deltas:
            if reasoning := delta.get("reasoning_content"):
                yield from self._grow(Kind.REASONING, reasoning)
            if content := delta.get("content"):
                yield from self._grow(Kind.TEXT, content)
            for piece in delta.get("tool_calls", ()):
                function = piece["function"]
                if "id" in piece:
                    yield from self._begin(Kind.CALL, id=piece["id"], name=function["name"])
                if arguments := function.get("arguments"):
                    yield from self._grow(Kind.CALL, arguments)

    def end(self) -> Iterator[Change]:
        """The answer has ended."""
        if self._open is not None:
            yield Change(Verb.CLOSED, self._open)
            self._open = None

    def _begin(self, kind: Kind, **more: str) -> Iterator[Change]:
        yield from self.end()
        self._open = Part(len(self.all), kind, **more)
        self.all.append(self._open)
        yield Change(Verb.OPENED, self._open)

    def _grow(self, kind: Kind, piece: str) -> Iterator[Change]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        part = self.all[-1]
        part.text += piece
        yield Change(Verb.GREW, part, piece)
