from __future__ import annotations

import json
from typing import Any

import pytest

from moet_desk.api.bodies import error_body
from moet_desk.api.schemas import MAX_ANSWERS, MAX_STOP_STRINGS, REFUSED, read_chat, to_generate
from moet_desk.engine.handle import GrammarKind
from moet_desk.errors import CATALOGUE, MoetError, fail
from tests.api.fakes import MODEL

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def generate(**more: Any) -> Any:
    body = json.dumps({**CHAT, **more}).encode()
    return to_generate(read_chat(body), MODEL, client="test")


@pytest.mark.parametrize(
    "given", [{"thinking_budget": 0}, {"reasoning": {"max_tokens": 0}},
              {"thinking_budget": 0, "reasoning": {"max_tokens": 9, "other": 1}}],
)  # fmt: skip
def test_thinking_budget__reaches_the_engine(given: dict[str, Any]) -> None:
    assert generate(**given).thinking_budget == 0
    assert generate().thinking_budget is None


def test_reasoning__nested_effort__counts_unless_the_flat_one_is_given() -> None:
    assert generate(reasoning={"effort": "none"}).template == {}
    with pytest.raises(MoetError, match="MD-API-04"):
        generate(reasoning={"effort": "high"})
    assert generate(reasoning={"effort": "high"}, reasoning_effort="none").template == {}


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("thinking_budget", -1),
        *((name, "x") for name in REFUSED),
        ("n", MAX_ANSWERS + 1),
        ("n", 0),
        ("reasoning_effort", "high"),  # the model's template knows none
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", "must"),
        ("tool_choice", {"type": "custom"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": None}}),
        ("modalities", ["text", "audio"]),
        ("top_logprobs", 2),  # without logprobs
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_completion_tokens", -1),
        ("stop", ["x"] * (MAX_STOP_STRINGS + 1)),
        ("logit_bias", {"100": 1}),  # the vocabulary holds 0 to 99
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"two": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"5": 101}),
    ],
)
def test_parameter_that_changes_the_answer__refused_by_name(parameter: str, value: Any) -> None:
    with pytest.raises(MoetError) as caught:
        generate(**{parameter: value})
    assert caught.value.code == "MD-API-04"
    assert error_body(caught.value)["error"]["param"] == parameter


@pytest.mark.parametrize(
    "more",
    [
        {"user": "me", "metadata": {"a": 1}, "store": True, "service_tier": "auto"},
        {"prediction": {"type": "content", "content": "x"}, "prompt_cache_key": "k"},
        {"anything_at_all": 1},
        {"reasoning_effort": "none", "chat_template_kwargs": {}},
        {"n": 1, "response_format": {"type": "text"}, "modalities": ["text"]},
        dict.fromkeys(REFUSED),
        {"functions": [], "echo": False, "best_of": 1, "typical_p": 1.0, "min_tokens": 0},
        {"temperature": None, "stop": None, "tools": None, "logit_bias": None},
        {"stop": "", "tools": [], "tool_choice": "auto"},
    ],
)
def test_harmless_parameter__ignored(more: dict[str, Any]) -> None:
    assert generate(**more) == generate()


def test_extra_body__counts_as_given_but_loses_to_the_body() -> None:
    got = generate(extra_body={"top_k": 5, "min_p": 0.1}, min_p=0.2)
    assert (got.sampling.top_k, got.sampling.min_p) == (5, 0.2)


def test_max_completion_tokens__wins_over_the_old_name() -> None:
    assert generate(max_tokens=5, max_completion_tokens=9).max_tokens == 9
    assert generate(max_tokens=5).max_tokens == 5


def test_zero_temperature__is_not_the_default() -> None:
    assert generate(temperature=0).sampling.temperature == 0


def test_logprobs__without_alternatives() -> None:
    assert generate(logprobs=True).top_logprobs == 0
    assert generate(logprobs=False).top_logprobs is None


def test_wrong_type__names_the_parameter() -> None:
    with pytest.raises(MoetError) as caught:
        generate(temperature="hot")
    body = error_body(caught.value)["error"]
    assert (body["param"], body["moet_code"]) == ("temperature", "MD-API-05")


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_error_body__every_catalogue_row__has_words_and_a_type(code: str) -> None:
    body = error_body(fail(code))["error"]
    assert body["message"]
    assert body["moet_code"] == code
    client_fault = CATALOGUE[code].http < 500
    assert (body["type"] == "server_error") is not client_fault


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("now", "later")]


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, ('{"type": "object"}', True)),
        ({"type": "json_schema", "json_schema": {"schema": {"a": 1}}}, ('{"a": 1}', True)),
        (
            {"type": "json_schema", "json_schema": {"schema": {"a": 1}, "strict": False}},
            ('{"a": 1}', False),
        ),
    ],
)
def test_response_format__becomes_a_grammar(given: Any, want: Any) -> None:
    grammar = generate(response_format=given).grammar
    if want is None:
        assert grammar is None
    else:
        assert grammar.kind is GrammarKind.JSON_SCHEMA
        assert (grammar.text, grammar.strict) == want


@pytest.mark.parametrize(
    ("given", "names", "one_call"),
    [
        ({"tool_choice": "auto"}, (), False),
        ({"tool_choice": "required"}, ("now", "later"), False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("now", "later"), True),
        ({"tool_choice": {"type": "function", "function": {"name": "later"}}}, ("later",), True),
    ],
)
def test_tool_choice__names_what_must_be_called(
    given: Any, names: tuple[str, ...], one_call: bool
) -> None:
    request = generate(tools=TOOLS, **given)
    assert (request.must_call, request.one_call, request.tools) == (names, one_call, TOOLS)


def test_tool_choice__unknown_function__refused() -> None:
    with pytest.raises(MoetError) as caught:
        generate(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "never"}})
    assert "'never'" in caught.value.cause
