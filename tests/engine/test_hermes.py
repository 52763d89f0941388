from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet_desk.engine.parsers.arguments import ToolBook
from moet_desk.engine.parsers.base import TagParser
from moet_desk.engine.parsers.events import Call, Content, Parsed, joined
from moet_desk.engine.parsers.hermes import CLOSE, HERMES, OPEN

TIDE = '<tool_call>\n{"name": "fetch_tide", "arguments": {"harbour": "Oban"}}\n</tool_call>'
OBAN = '{"harbour": "Oban"}'


def parse(*pieces: str) -> list[Parsed]:
    parser = TagParser(HERMES, ToolBook(), think=None)
    parsed = [event for piece in pieces for event in parser.feed(piece)]
    return joined(parsed + parser.finish())


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("", []),
        ("Just text.\n", [Content("Just text.\n")]),
        (TIDE, [Call(0, "fetch_tide", OBAN)]),
        (f"Let me look.\n\n{TIDE}\n", [Content("Let me look."), Call(0, "fetch_tide", OBAN)]),
        (TIDE + "\n" + TIDE, [Call(0, "fetch_tide", OBAN), Call(1, "fetch_tide", OBAN)]),
        (TIDE + " done", [Call(0, "fetch_tide", OBAN), Content(" done")]),
        # closing tags left out, as models do
        (TIDE.removesuffix(CLOSE), [Call(0, "fetch_tide", OBAN)]),
        (TIDE.removesuffix(CLOSE) + TIDE, [Call(n, "fetch_tide", OBAN) for n in (0, 1)]),
        ('<tool_call>{"name": "now"}</tool_call>', [Call(0, "now", "{}")]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [Call(0, "now", "{}")]),
        # arguments encoded twice
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [Call(0, "f", '{"a": 1}')],
        ),
        # raw newline in a string
        (
            '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
            [Call(0, "f", '{"a": "x\\ny"}')],
        ),
        # a closing tag as text of an argument
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            [Call(0, "f", '{"a": "</tool_call>"}')],
        ),
        ("a < b <tool", [Content("a < b <tool")]),
    ],
)
def test_parse__answer__text_and_calls(answer: str, expected: list[Parsed]) -> None:
    assert parse(answer) == expected
    assert parse(*answer) == expected


@pytest.mark.parametrize(
    "answer",
    [
        "<tool_call>not json</tool_call> and on",
        '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": ""}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "plain"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        "<tool_call>[1, 2]</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": "cut o',
        " \n <tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_parse__damaged_block__comes_out_as_text(answer: str) -> None:
    assert parse(answer) == [Content(answer)]


def test_parse__damaged_block__does_not_hide_the_next_call() -> None:
    damaged = '<tool_call>{"name": "f, "arguments": {}}</tool_call>'
    assert parse(damaged + TIDE) == [Content(damaged), Call(0, "fetch_tide", OBAN)]


def test_feed__text_before_a_call__is_released_at_once() -> None:
    parser = TagParser(HERMES, ToolBook(), think=None)
    assert parser.feed("Hello <") == [Content("Hello")]
    assert parser.feed("b") == [Content(" <b")]
    assert parser.feed("\n<tool_call>{") == []


_PIECES = st.sampled_from([OPEN, CLOSE, TIDE, '{"name": "f"}', '"', "\\", " ", "\n", "x", "<", "{"])


@given(st.lists(_PIECES, max_size=8).map("".join), st.data())
def test_parse__any_cut__gives_the_same_events(answer: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    parsed = parse(*pieces)
    assert parsed == parse(answer) == parse(*answer)
    for item in parsed:
        if isinstance(item, Call):
            assert isinstance(json.loads(item.arguments), dict)
    if not any(isinstance(item, Call) for item in parsed):
        assert "".join(item.text for item in parsed if isinstance(item, Content)) == answer
