"""Text from elsewhere: made inert, split where both parts render as the whole, held back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet_desk.ui.text import (
    SEGMENT_CHARS,
    Cleaner,
    clean,
    clean_line,
    find_all,
    find_split,
    markdown_parser,
    shown_length,
    split_segments,
)

MARKDOWN_PIECES = [
    "a", "word ", "1", "2.", " ", "  ", "    ", "\n", "\n\n", "- ", "1. ", "* ", "+ ", "# ", "## ",
    "```", "```py\n", "~~~\n", "> ", "|", "|a|b|\n|-|-|\n", "---", "===", "**", "`", "***\n",
    "[x]: http://a", "[x]", "<b>", "<!--", "<pre>", "\t", "=", "-", "\\", "&amp;", "é", "漢", "🦊",
]  # fmt: skip
markdown = st.lists(st.sampled_from(MARKDOWN_PIECES), max_size=30).map("".join)


@settings(max_examples=400, deadline=None)
@given(markdown, markdown)
def test_find_split__any_text_and_any_rest__parts_render_as_the_whole(text: str, rest: str) -> None:
    cut = find_split(text)
    if cut is None:
        return
    render = markdown_parser().render
    assert 0 < cut < len(text)
    assert render(text[:cut]) + render(text[cut:] + rest) == render(text + rest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one paragraph\nof two lines\n", None),
        ("first\n\nsecond\n", "second\n"),
        ("first\n\nsecond, not yet complete", None),
        ("intro\n\n```py\na = 1\n\nb = 2\n", "```py\na = 1\n\nb = 2\n"),
        ("- one\n\n- two\n\n- three\n", None),
        ("text\n\n| a | b |\n|---|---|\n| 1 | 2 |\n", "| a | b |\n|---|---|\n| 1 | 2 |\n"),
        ("1. a\n\n1", None),
    ],
)
def test_find_split__known_texts__cut_before_the_last_block(
    text: str, expected: str | None
) -> None:
    cut = find_split(text)
    assert (None if cut is None else text[cut:]) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(markdown, min_size=60, max_size=90).map("\n\n".join))
def test_split_segments__long_text__stretches_render_as_the_whole(text: str) -> None:
    render = markdown_parser().render
    parts = split_segments(text)
    assert "".join(parts) == text
    assert "".join(map(render, parts)) == render(text)


def test_split_segments__paragraphs__about_the_wanted_length() -> None:
    parts = split_segments("Some words in a paragraph.\n\n" * 400)
    assert all(SEGMENT_CHARS * 0.7 < len(part) < SEGMENT_CHARS * 1.5 for part in parts[:-1])


ESCAPES = [
    "\x1b", "[", "]", "3", "1m", "m", "\x07", "\\", "a", "\r", "\n", "\x9b", "P", ";", " ", "c",
    "\x00", "\x9c", "\u202e", "\u2028", "\x7f", "\ud800", "漢",
]  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from(ESCAPES), max_size=14))
def test_cleaner__any_pieces__as_for_the_whole_and_inert(pieces: list[str]) -> None:
    cleaner = Cleaner()
    out = "".join(cleaner.feed(piece) for piece in pieces)
    assert out == clean("".join(pieces))
    assert not any(ord(c) < 32 and c not in "\t\n" for c in out)
    assert not set(out) & set("\x1b\x7f\x9b\u202e\u2028\ud800")
    assert clean(out) == out


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]52;c;aGk=\x1b\\b", "ab"),
        ("a\x1b]0;never ends\nnext line", "a\nnext line"),
        ("one\r\ntwo\rthree", "one\ntwo\nthree"),
        ("\x1bc\x1b(Breset", "reset"),
        ("tab\tstays", "tab\tstays"),
        ("[b]not markup[/b]", "[b]not markup[/b]"),
        ("family 👨‍👩‍👧 漢字", "family 👨‍👩‍👧 漢字"),
    ],
)
def test_clean__sequences__removed_and_text_kept(raw: str, expected: str) -> None:
    assert clean(raw) == expected


def test_clean_line__long_text__one_line_with_an_ellipsis() -> None:
    assert clean_line("a\nb\x1b[1mc", 10) == "a bc"
    assert clean_line("x" * 20, 10) == "x" * 9 + "…"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("item\n1", "item\n"),
        ("item\n1. a", "item\n1. a"),
        ("code\n``", "code\n"),
        ("title\n---", "title\n"),
        ("done\n", "done\n"),
    ],
)
def test_shown_length__last_line_may_become_a_block__waits(text: str, shown: str) -> None:
    assert text[: shown_length(text)] == shown


def test_find_all__any_case__places() -> None:
    assert find_all("Fox, fox and FOXES", " fox ") == [(0, 3), (5, 8), (13, 16)]
    assert find_all("a.b", ".") == [(1, 2)]
    assert find_all("anything", " ") == []
    assert find_all("Straße", "s") == []  # as long as "strasse" when folded
