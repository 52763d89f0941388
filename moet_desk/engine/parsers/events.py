"""What a parser of answers tells: reasoning, text, calls; and what every parser offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model says to itself; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """One complete call. `arguments` is the text of a JSON object; `id` is the model's own, if its
    format has ids that must be said back.
    """

    index: int
    name: str
    arguments: str
    id: str | None = None


Parsed = Reasoning | Content | Call


class Parser(Protocol):
    """Feed it the answer's text; it returns what is certain by now."""

    def feed(self, text: str) -> list[Parsed]:
        """Take the next piece of the answer."""
        ...

    def finish(self) -> list[Parsed]:
        """The answer has ended: return all that was held back."""
        ...


def joined(parsed: Sequence[Parsed]) -> list[Parsed]:
    """Join neighbouring texts of a kind and drop empty ones."""
    out: list[Parsed] = []
    for item in parsed:
        last = out[-1] if out else None
        if isinstance(item, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + item.text)
        elif isinstance(item, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + item.text)
        elif isinstance(item, Call) or item.text:
            out.append(item)
    return out
