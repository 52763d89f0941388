"""Anthropic's messages as its own client sees them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from moet_desk.api.messages import read_messages
from moet_desk.errors import MoetError, fail
from moet_desk.telemetry import Failed, Finished, FinishReason, TextDelta, Usage
from tests.api.fakes import MODEL, FakeEngine, Pause, eventually

HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {
        "name": "fetch_tide",
        "description": "Tides of a harbour",
        "input_schema": {"type": "object", "properties": {"harbour": {"type": "string"}}},
    }
]
CALL = '<tool_call>\n{"name": "fetch_tide", "arguments": {"harbour": "Oban"}}\n</tool_call>'


def ask(claude: anthropic.Anthropic, **more: Any) -> Any:
    given = {"model": "fake", "max_tokens": 50, "messages": HI, **more}
    return claude.messages.create(**given)


def streamed(claude: anthropic.Anthropic, **more: Any) -> tuple[list[Any], Any]:
    """All events, and the message that the client adds up."""
    given = {"model": "fake", "max_tokens": 50, "messages": HI, **more}
    with claude.messages.stream(**given) as stream:
        return list(stream), stream.get_final_message()


def test_text__whole_and_streamed__are_the_same(
    claude: anthropic.Anthropic, engine: FakeEngine
) -> None:
    engine.answer(*"한국어 글자 😀 done")
    answer = ask(claude)
    assert [block.text for block in answer.content] == ["한국어 글자 😀 done"]
    assert (answer.stop_reason, answer.role) == ("end_turn", "assistant")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 13)
    events, message = streamed(claude)
    assert [block.text for block in message.content] == ["한국어 글자 😀 done"]
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 13)
    assert events[0].type == "message_start"
    assert events[0].message.usage.input_tokens == 7
    assert [event.type for event in events[-3:]] == [
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_tool_use__round_trip(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.answer("Let me look.\n", *CALL, *CALL)
    whole = ask(claude, tools=TOOLS)
    _, message = streamed(claude, tools=TOOLS)
    for answer in (whole, message):
        text, first, second = answer.content
        assert text.text == "Let me look."
        assert (first.type, first.name, first.input) == (
            "tool_use", "fetch_tide", {"harbour": "Oban"},
        )  # fmt: skip
        assert first.id != second.id
        assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "high"}
    parts = [{"type": "text", "text": "low"}]
    other = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": parts}
    engine.answer("Both.")
    turn = {"role": "assistant", "content": whole.content}
    thanks = {"type": "text", "text": "And?"}
    ask(
        claude,
        tools=TOOLS,
        messages=[*HI, turn, {"role": "user", "content": [thanks, result, other]}],
    )
    got = engine.requests[-1]
    assert got.messages is not None
    _, assistant, *results, last = got.messages
    assert assistant["content"] == "Let me look."
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [
        {"harbour": "Oban"}, {"harbour": "Oban"},
    ]  # fmt: skip
    assert [(r["role"], r["tool_call_id"], r["content"]) for r in results] == [
        ("tool", first_id, text)
        for first_id, text in zip(
            [c["id"] for c in assistant["tool_calls"]], ["high", "low"], strict=True
        )
    ]
    assert last == {"role": "user", "content": "And?"}
    function = got.tools[0]["function"]
    assert function["parameters"] == TOOLS[0]["input_schema"]


def test_request__all_parameters__reach_the_engine(
    claude: anthropic.Anthropic, engine: FakeEngine
) -> None:
    ask(
        claude,
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}],
        stop_sequences=["END"],
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        extra_body={"quality": "exact", "temperature": 0.5, "top_p": 0.9, "top_k": 5},
    )
    got = engine.requests[0]
    assert got.messages == [{"role": "system", "content": "Be\n\nbrief"}, *HI]
    assert (got.sampling.temperature, got.sampling.top_p, got.sampling.top_k) == (0.5, 0.9, 5)
    assert (got.stop, got.max_tokens, got.quality.value) == (("END",), 50, "exact")


def test_stop_sequence__is_named(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.script = [TextDelta("a"), Finished(FinishReason.STOP, Usage(7, 1), "fast", stop="END")]
    answer = ask(claude, stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    _, message = streamed(claude, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


def test_cut_answer__says_so_and_reused_tokens_count_apart(
    claude: anthropic.Anthropic, engine: FakeEngine
) -> None:
    usage = Usage(7, 2, cached_tokens=4)
    engine.script = [TextDelta("a"), Finished(FinishReason.LENGTH, usage, "fast")]
    answer = ask(claude)
    assert answer.stop_reason == "max_tokens"
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (3, 4)


def test_count_tokens(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    counted = claude.messages.count_tokens(model="fake", messages=HI, system="s", tools=TOOLS)
    assert counted.input_tokens == 7
    assert engine.requests == []


def test_models__listed_in_this_protocol_too(claude: anthropic.Anthropic) -> None:
    (listed,) = claude.models.list(limit=5)
    assert (listed.id, listed.type, listed.display_name) == ("fake", "model", "fake")
    assert listed.created_at.year > 2020
    assert listed.lifecycle == "active"


def test_key__as_this_client_sends_it(endpoint: Any, claude: anthropic.Anthropic) -> None:
    assert ask(claude).content[0].text == "Hello"  # no key here: any is fine


def test_nothing_flows__pings(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    end = Finished(FinishReason.STOP, Usage(7, 1), "fast")
    engine.script = [Pause(0.25), TextDelta("a"), end]
    raw = claude.messages.with_streaming_response.create(
        model="fake", max_tokens=5, messages=HI, stream=True
    )
    with raw as response:
        text = "".join(response.iter_text())
    assert 1 <= text.count('event: ping\ndata: {"type":"ping"}\n\n') <= 3


def test_failure__in_its_words(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.script = [TextDelta("a"), Failed(fail("MD-ENG-04", reason="NaN", model="fake"))]
    with pytest.raises(anthropic.APIStatusError) as caught:
        streamed(claude)
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    engine.refusal = fail("MD-ENG-06", n_waiting=32)
    with pytest.raises(anthropic.APIStatusError) as caught:
        ask(claude)
    assert caught.value.status_code == 503
    assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    assert caught.value.response.headers["retry-after"] == "1"
    engine.refusal = None
    with pytest.raises(anthropic.NotFoundError):
        ask(claude, model="other")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        ask(claude, max_tokens=0)


def test_stream_closed_by_the_client__cancels(
    claude: anthropic.Anthropic, engine: FakeEngine
) -> None:
    end = Finished(FinishReason.STOP, Usage(7, 1), "fast")
    engine.script = [TextDelta("a"), Pause(30), end]
    with claude.messages.create(model="fake", max_tokens=5, messages=HI, stream=True) as stream:
        next(iter(stream))
        assert engine.busy == 1
    assert eventually(lambda: engine.busy == 0)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "assistant", "content": "Sure,"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_what_is_not_served__is_refused_by_name(more: dict[str, Any], named: str) -> None:
    body = json.dumps({"max_tokens": 5, "messages": HI, **more}).encode()
    with pytest.raises(MoetError, match="MD-API-04") as caught:
        read_messages(body, MODEL)
    assert named in caught.value.facts["parameter"]


def test_thinking__only_what_the_template_knows() -> None:
    body = json.dumps({"max_tokens": 5, "messages": HI, "thinking": {"type": "disabled"}}).encode()
    assert not read_messages(body, MODEL).chat_template_kwargs
    model = replace(MODEL, switches=("thinking", "reasoning_effort"), efforts=("low", "high"))
    assert read_messages(body, model).chat_template_kwargs == {"thinking": False}
    hard = {"max_tokens": 5, "messages": HI, "output_config": {"effort": "medium"}}
    switches = read_messages(json.dumps(hard).encode(), model).chat_template_kwargs
    assert switches == {"thinking": True, "reasoning_effort": "high"}


def test_thinking_budget__a_wish_that_a_model_without_reasoning_does_not_hear() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = json.dumps({"max_tokens": 5, "messages": HI, "thinking": thinking}).encode()
    assert read_messages(body, MODEL).budget is None
    model = replace(MODEL, thinks=True)
    assert read_messages(body, model).budget == 1024
    off = json.dumps(
        {"max_tokens": 5, "messages": HI, "thinking": {**thinking, "type": "disabled"}}
    )
    assert read_messages(off.encode(), model).budget is None


def test_tools_of_the_vendor__left_out_and_thinking_kept_for_the_template() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "x"}]}
    search = {"type": "web_search_20250305", "name": "web_search"}
    body = {"max_tokens": 5, "messages": [*HI, said, *HI], "tools": [search, *TOOLS]}
    request = read_messages(json.dumps(body).encode(), MODEL)
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["fetch_tide"]
    assert request.messages[1] == {
        "role": "assistant", "content": "x", "reasoning_content": "hm",
    }  # fmt: skip
