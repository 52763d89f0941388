"""Text of which some characters are marked, and the ranges that say which.

Used for the parts of an answer that came from tokens made again with FP4 experts. Ranges count
characters, end before their second number, are in order, and neither touch nor overlap, so equal
marks are equal ranges however the text was put together. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]


def join(pieces: Iterable[MarkedText]) -> MarkedText:
    """All pieces one behind the other, in time that grows with their length."""
    texts: list[str] = []
    marks: list[tuple[int, int]] = []
    length = 0
    for piece in pieces:
        for start, end in piece.marks:
            if marks and marks[-1][1] == start + length:
                start = marks.pop()[0] - length
            marks.append((start + length, end + length))
        texts.append(piece.text)
        length += len(piece.text)
    return MarkedText("".join(texts), tuple(marks))


def join_ranges(first: Ranges, second: Ranges) -> Ranges:
    """Ranges one behind the other; two that touch become one."""
    if first and second and first[-1][1] == second[0][0]:
        return (*first[:-1], (first[-1][0], second[0][1]), *second[1:])
    return first + second


def shift_ranges(ranges: Ranges, by: int) -> Ranges:
    """The same ranges, `by` characters further on."""
    return tuple((start + by, end + by) for start, end in ranges) if by else ranges


def cut_ranges(ranges: Ranges, start: int, end: int) -> Ranges:
    """What of the ranges lies from `start` to before `end`, counted from `start`."""
    inside = ((max(a, start), min(b, end)) for a, b in ranges if a < end and b > start)
    return tuple((a - start, b - start) for a, b in inside if a < b)


def ranges_of(flags: Iterable[bool]) -> Ranges:
    """The runs of true flags."""
    found: list[tuple[int, int]] = []
    for at, flag in enumerate(flags):
        if flag and found and found[-1][1] == at:
            found[-1] = (found[-1][0], at + 1)
        elif flag:
            found.append((at, at + 1))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text with its marks. Adding two keeps the marks of both."""

    text: str = ""
    marks: Ranges = ()

    @classmethod
    def whole(cls, text: str, *, marked: bool) -> MarkedText:
        """A text that is marked from end to end, or not at all."""
        return cls(text, ((0, len(text)),) if marked and text else ())

    def __add__(self, other: MarkedText) -> MarkedText:
        marks = join_ranges(self.marks, shift_ranges(other.marks, len(self.text)))
        return MarkedText(self.text + other.text, marks)

    def __len__(self) -> int:
        return len(self.text)

    def cut(self, start: int, end: int | None = None) -> MarkedText:
        """The characters from `start` to before `end` (the end of the text), with their marks."""
        end = len(self.text) if end is None else end
        return MarkedText(self.text[start:end], cut_ranges(self.marks, start, end))
