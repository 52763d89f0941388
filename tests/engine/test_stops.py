"""Stop strings across chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_desk.engine.checks import check_stops
from moet_desk.engine.stops import StopScanner
from moet_desk.errors import MoetError


def _scan(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    shown = ""
    for chunk in chunks:
        safe, matched = scanner.push(chunk)
        shown += safe
        if matched is not None:
            return shown, matched
    return shown + scanner.flush(), None


def test_push__stop_across_two_chunks__found_and_not_shown() -> None:
    """Field case 32."""
    assert _scan(["beta gamma"], ["alpha beta", " gamma", " delta"]) == ("alpha ", "beta gamma")


def test_flush__prefix_of_a_stop_at_the_end__not_lost() -> None:
    """Field case 31: "UNO DUE TRE" with the stop "TRE\\nAAAAAAAA"."""
    assert _scan(["TRE\nAAAAAAAA"], ["UNO", " DUE", " TRE"]) == ("UNO DUE TRE", None)


def test_push__nothing_like_a_stop__nothing_is_held() -> None:
    scanner = StopScanner(["###", "END"])
    assert scanner.push("hello E") == ("hello ", None)
    assert scanner.push("nough #") == ("Enough ", None)
    assert scanner.push("1") == ("#1", None)
    assert scanner.flush() == ""


def test_push__two_stops__the_one_complete_first_wins() -> None:
    assert _scan(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")
    assert _scan(["bc", "abc"], ["xabcd"]) == ("x", "abc")


def test_push__after_a_match__nothing_more_comes_out() -> None:
    scanner = StopScanner(["."])
    assert scanner.push("a.b") == ("a", ".")
    assert scanner.push("c") == ("", ".")
    assert scanner.flush() == ""


@given(
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    st.text("ab.", max_size=24),
    st.data(),
)
def test_push__any_chunking__same_as_the_whole(
    stops: list[str], text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    chunks = [text[a:b] for a, b in pairwise(edges)]
    ends = [(i, s) for i in range(len(text) + 1) for s in stops if text[:i].endswith(s)]
    expected: tuple[str, str | None] = (text, None)
    if ends:
        end, stop = min(ends, key=lambda pair: (pair[0], -len(pair[1])))
        expected = (text[: end - len(stop)], stop)
    assert _scan(stops, chunks) == expected == _scan(stops, list(text))


@pytest.mark.parametrize("stops", [[""], ["x" * 2000], ["x"] * 17])
def test_check_stops__cannot_be_honoured__refused(stops: list[str]) -> None:
    with pytest.raises(MoetError) as caught:
        check_stops(stops)
    assert caught.value.facts["parameter"] == "stop"
