"""Text with marks: however it is cut and put together, each character keeps its mark."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from moet_desk.marked_text import MarkedText, cut_ranges, join_ranges, ranges_of, shift_ranges

FLAGS = st.lists(st.booleans(), max_size=40)


def flags_of(marked: MarkedText) -> list[bool]:
    flags = [False] * len(marked)
    for start, end in marked.marks:
        assert 0 <= start < end <= len(marked)
        flags[start:end] = [True] * (end - start)
    return flags


def text_of(flags: list[bool]) -> MarkedText:
    return MarkedText("".join("ab"[flag] for flag in flags), ranges_of(flags))


@given(FLAGS, st.lists(st.integers(0, 40), max_size=8))
def test_pieces__joined__are_the_whole_text_with_its_ranges(
    flags: list[bool], cuts: list[int]
) -> None:
    whole = text_of(flags)
    assert flags_of(whole) == flags
    joined = MarkedText()
    places = [0, *sorted(cuts), len(flags)]
    for start, end in pairwise(places):
        joined += whole.cut(start, end)
    assert joined == whole


@given(FLAGS, FLAGS, FLAGS)
def test_add__three__grouping_does_not_matter(a: list[bool], b: list[bool], c: list[bool]) -> None:
    first, second, third = text_of(a), text_of(b), text_of(c)
    assert (first + second) + third == first + (second + third) == text_of(a + b + c)


@given(FLAGS, st.integers(0, 45), st.integers(0, 45))
def test_cut__any_stretch__flags_of_its_characters(flags: list[bool], start: int, end: int) -> None:
    assert flags_of(text_of(flags).cut(start, end)) == flags[start:end]
    assert flags_of(text_of(flags).cut(start)) == flags[start:]


def test_ranges__edges() -> None:
    assert MarkedText.whole("", marked=True) == MarkedText()
    assert MarkedText.whole("ab", marked=True).marks == ((0, 2),)
    assert MarkedText.whole("ab", marked=False).marks == ()
    assert join_ranges(((0, 2),), ((2, 3), (5, 6))) == ((0, 3), (5, 6))
    assert join_ranges(((0, 2),), ((3, 4),)) == ((0, 2), (3, 4))
    assert shift_ranges(((0, 2), (4, 5)), 3) == ((3, 5), (7, 8))
    assert cut_ranges(((0, 2), (4, 9)), 2, 4) == ()
