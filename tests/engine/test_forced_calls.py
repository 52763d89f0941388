"""Forced calls in every format's own syntax, and what reads them back."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from moet_desk.engine.grammar import Constraint
from moet_desk.engine.handle import GenerateRequest
from moet_desk.engine.parsers.answers import CallFormat
from moet_desk.engine.parsers.events import Call
from moet_desk.engine.parsers.formats import make_parser
from moet_desk.engine.text import Text
from moet_desk.errors import MoetError
from tests.engine.json_forms import fits
from tests.engine.test_grammar import (
    TYPED,
    allowed,
    called,
    constraint,
    goes_through,
    json_request,
    text_of,
)
from tests.engine.test_parsers import TOOLS, corpus

WRITTEN = (
    "one call", "several arguments", "two calls", "no arguments", "nested object", "unicode",
    "code with indentation", "markup in a value", "quotes and backslashes", "empty string",
    "strings that look like other types", "all types",
)  # fmt: skip


@pytest.mark.parametrize(
    "with_tags",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["control tokens", "plain tags"],
)
@pytest.mark.parametrize("calls", CallFormat, ids=lambda calls: calls.value)
def test_calls__as_models_write_them__go_through(calls: CallFormat, with_tags: bool) -> None:
    text = text_of(calls, with_tags=with_tags)
    names = [tool["function"]["name"] for tool in TOOLS]
    n_tried = 0
    for case in corpus(calls):
        known = [event for event in case["events"] if event[0] == "call"]
        if case["name"] not in WRITTEN or known != case["events"]:
            continue
        if calls is CallFormat.HARMONY and len(known) > 1:
            continue  # an end token comes after each call
        written = case["text"].removesuffix("<|call|>")
        if calls is CallFormat.MISTRAL and not with_tags:
            entries = [{"name": event[1], "arguments": event[2]} for event in known]
            written = "[TOOL_CALLS] " + json.dumps(entries, ensure_ascii=False)
        assert goes_through(constraint(text, called(*names)), text, written), case["name"]
        n_tried += 1
    assert n_tried >= 9


@pytest.mark.parametrize("calls", CallFormat, ids=lambda calls: calls.value)
def test_calls__text_or_another_tool__does_not_go_through(calls: CallFormat) -> None:
    text = text_of(calls, with_tags=True)
    one = next(case["text"] for case in corpus(calls) if case["name"] == "one call")
    one = one.removesuffix("<|call|>")
    assert goes_through(constraint(text, called("fetch_tide")), text, one)
    assert not goes_through(constraint(text, called("now")), text, one)
    assert not goes_through(constraint(text, called("fetch_tide")), text, "I look. " + one)
    assert not goes_through(constraint(text, called("fetch_tide")), text, "")


@pytest.mark.parametrize(
    "calls", [c for c in CallFormat if c is not CallFormat.HARMONY], ids=lambda c: c.value
)
def test_calls__one_at_a_time(calls: CallFormat) -> None:
    text = text_of(calls, with_tags=True)
    two = next(case["text"] for case in corpus(calls) if case["name"] == "two calls")
    assert goes_through(constraint(text, called("fetch_tide")), text, two)
    assert not goes_through(constraint(text, called("fetch_tide", one_call=True)), text, two)


def test_calls__with_a_form__either() -> None:
    text = text_of(CallFormat.HERMES, with_tags=True)
    request = json_request({"enum": ["ok"]}, tools=TOOLS)
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert goes_through(constraint(text, request), text, '"ok"')
    assert goes_through(constraint(text, request), text, call)
    assert not goes_through(constraint(text, request), text, "ok")


def test_calls__schema_that_cannot_be_enforced__only_with_strict_an_error() -> None:
    text = text_of(CallFormat.HERMES, with_tags=True)
    function = {"name": "f", "parameters": {"type": "object", "not": {}}}
    request = GenerateRequest(tools=[{"type": "function", "function": function}], must_call=("f",))
    written = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert goes_through(constraint(text, request), text, written)
    with pytest.raises(MoetError) as caught:
        constraint(text, replace(request, tools=[{"function": {**function, "strict": True}}]))
    assert "tools: f: Unimplemented" in caught.value.cause
    with pytest.raises(MoetError):
        constraint(text, replace(request, must_call=("g",)))


def random_answer(made: Constraint, text: Text, rng: random.Random) -> str:
    ids: list[int] = []
    while (token := rng.choice(sorted(allowed(made, text)))) != 1:
        assert len(ids) < 2000
        made.take(token)
        ids.append(token)
    return text.decode(ids)


@pytest.mark.parametrize("with_tags", [True, False], ids=["control tokens", "plain tags"])
@pytest.mark.parametrize("calls", CallFormat, ids=lambda calls: calls.value)
def test_calls__any_answer_that_goes_through__is_read_as_valid_calls(
    calls: CallFormat, with_tags: bool
) -> None:
    text = text_of(calls, with_tags=with_tags)
    rng = random.Random(calls.value)
    schema = TYPED[0]["function"]["parameters"]
    request = GenerateRequest(tools=TYPED, must_call=("move",), one_call=True)
    for _ in range(3):
        made = constraint(text, request)
        if calls is CallFormat.HARMONY:  # reasoning goes on for long when tokens are random
            for token in text.encode("<|channel|>commentary"):
                made.take(token)
        answer = random_answer(made, text, rng)
        if calls is CallFormat.HARMONY:
            answer = "<|channel|>commentary" + answer
        parser = make_parser(text.answers, TYPED)
        parsed = parser.feed(answer) + parser.finish()
        assert parsed, answer
        for item in parsed:
            assert isinstance(item, Call), answer
            assert item.name == "move"
            assert fits(json.loads(item.arguments), schema), answer
