"""OpenAI's responses as the official client sees them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from moet_desk.api.guard import EndpointOptions
from moet_desk.api.responses import conversation, read_responses, to_chat
from moet_desk.api.server import Endpoint
from moet_desk.errors import MoetError, fail
from moet_desk.telemetry import (
    Failed,
    Finished,
    FinishReason,
    TextDelta,
    TokenLogprob,
    Usage,
)
from tests.api.fakes import FakeEngine, Pause, eventually

FLAT: Any = [{"type": "function", "name": "fetch_tide", "parameters": None, "strict": False}]
CALL = '<tool_call>\n{"name": "fetch_tide", "arguments": {"harbour": "Oban"}}\n</tool_call>'


def ask(client: openai.OpenAI, given: Any = "hi", **more: Any) -> Any:
    return client.responses.create(model="fake", input=given, **more)


def test_text__whole_and_streamed__are_the_same(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer(*"한국어 글자 😀 done")
    answer = ask(client, instructions="Be brief.", metadata={"a": "b"})
    assert (answer.status, answer.output_text) == ("completed", "한국어 글자 😀 done")
    assert (answer.usage.input_tokens, answer.usage.total_tokens) == (7, 20)
    assert answer.usage.input_tokens_details.cache_write_tokens == 0
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    events = list(ask(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == "한국어 글자 😀 done"
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == [
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    last = events[-1].response
    assert last.output_text == "한국어 글자 😀 done"
    assert last.output[0].id == events[2].item.id == events[4].item_id
    assert events[0].response.id == last.id


def test_calls__round_trip(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer("Let me look.\n", *CALL, *CALL)
    answer = ask(client, tools=FLAT)
    text, first, second = answer.output
    assert text.content[0].text == "Let me look."
    assert (first.type, first.name, json.loads(first.arguments)) == (
        "function_call", "fetch_tide", {"harbour": "Oban"},
    )  # fmt: skip
    events = list(ask(client, tools=FLAT, stream=True))
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert [e.output_index for e in done] == [1, 2]
    assert "".join(pieces) == "".join(e.arguments for e in done)
    assert len({item.id for item in events[-1].response.output}) == 3
    engine.answer("High.")
    parts = [{"type": "input_text", "text": "low"}]
    results = [
        {"type": "function_call_output", "call_id": first.call_id, "output": "high"},
        {"type": "function_call_output", "call_id": second.call_id, "output": parts},
    ]
    question = {"role": "user", "content": "hi"}
    history = [question, *[item.model_dump() for item in answer.output], *results]
    ask(client, history, tools=FLAT)
    stateless = engine.requests[-1].messages
    ask(client, results, tools=FLAT, previous_response_id=answer.id)
    assert engine.requests[-1].messages == stateless
    assert stateless is not None
    user, assistant, *rest = stateless
    assert user == question
    assert assistant["content"] == "Let me look."
    assert [call["id"] for call in assistant["tool_calls"]] == [first.call_id, second.call_id]
    assert [(m["role"], m["content"]) for m in rest] == [("tool", "high"), ("tool", "low")]
    assert engine.requests[-1].tools[0]["function"]["name"] == "fetch_tide"


def test_previous_response__goes_on_without_its_instructions(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    first = ask(client, "one", instructions="Shout.")
    engine.answer("B")
    second = ask(client, "two", previous_response_id=first.id, stream=True)
    last = list(second)[-1].response
    engine.answer("C")
    ask(client, "three", previous_response_id=last.id, instructions="Whisper.")
    assert engine.requests[-1].messages == [
        {"role": "system", "content": "Whisper."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "three"},
    ]


def test_kept__can_be_read_and_deleted_if_not_declined(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    kept = ask(client)
    assert client.responses.retrieve(kept.id).output_text == "Hello"
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(kept.id)
    private = ask(client, store=False)
    for gone in (kept, private):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(client, previous_response_id=gone.id)
        assert caught.value.code == "previous_response_not_found"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone.id)


def test_kept__over_a_restart(engine: FakeEngine, tmp_path: Path) -> None:
    ids = []
    for question in ("one", "two"):
        endpoint = Endpoint(engine, EndpointOptions(port=0, responses=tmp_path / "r.sqlite3"))
        endpoint.start()
        try:
            with openai.OpenAI(base_url=f"{endpoint.address}/v1", api_key="none") as client:
                more = {"previous_response_id": ids[-1]} if ids else {}
                ids.append(ask(client, question, **more).id)
        finally:
            endpoint.stop()
    assert engine.requests[-1].messages == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "two"},
    ]


def test_cut_answer__is_incomplete(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer("cut", reason=FinishReason.LENGTH)
    answer = ask(client, max_output_tokens=1)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert list(ask(client, stream=True))[-1].type == "response.incomplete"
    assert engine.requests[0].max_tokens == 1


def test_logprobs__with_the_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    token = TokenLogprob(1, b"a", -0.5, ((1, b"a", -0.5),))
    end = Finished(FinishReason.STOP, Usage(7, 2), "fast")
    engine.script = [TextDelta("", logprobs=(token,)), TextDelta("x", logprobs=(token,)), end]
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    content = ask(client, **asked).output[0].content[0]
    assert [entry.logprob for entry in content.logprobs] == [-0.5, -0.5]
    events = list(ask(client, stream=True, **asked))
    assert events[-1].response.output[0].content[0].logprobs == content.logprobs
    assert engine.requests[0].top_logprobs == 1


def test_failure__event_without_a_completed_response(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.script = [TextDelta("a"), Failed(fail("MD-ENG-04", reason="NaN", model="fake"))]
    events = list(ask(client, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(events[-1].response.id)
    with pytest.raises(openai.InternalServerError):
        ask(client)


def test_stream_closed_by_the_client__cancels(client: openai.OpenAI, engine: FakeEngine) -> None:
    end = Finished(FinishReason.STOP, Usage(7, 1), "fast")
    engine.script = [TextDelta("a"), Pause(30), end]
    with ask(client, stream=True) as stream:
        next(iter(stream))
        assert engine.busy == 1
    assert eventually(lambda: engine.busy == 0)


MIXED = [
    {"type": "web_search"},
    {"type": "custom", "name": "patch"},
    {"type": "function", "function": {"name": "nested", "parameters": {}}},
    {"type": "function", "name": "flat"},
    {"type": "image_generation"},
]


def test_tools__both_shapes_and_others_left_out() -> None:
    body = json.dumps({"input": "hi", "tools": MIXED, "tool_choice": "auto"}).encode()
    chat = to_chat(read_responses(body), [{"role": "user", "content": "hi"}])
    assert [tool["function"]["name"] for tool in chat.tools or ()] == ["nested", "flat"]


def test_reasoning_items__join_the_answer_they_belong_to() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "message", "role": "user", "content": "q2"},
    ]
    said = conversation(read_responses(json.dumps({"input": items}).encode()), ())
    assert said[1] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    assert len(said) == 3


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": []}, "messages"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ],
)
def test_what_is_not_served__is_refused_by_name(more: dict[str, Any], named: str) -> None:
    def read(body: bytes) -> None:
        request = read_responses(body)
        to_chat(request, conversation(request, ()))

    with pytest.raises(MoetError) as caught:
        read(json.dumps({"input": "x", **more}).encode())
    assert (caught.value.code, caught.value.facts["parameter"]) == ("MD-API-04", named)


def test_effort__of_a_model_that_reasons(client: openai.OpenAI, engine: FakeEngine) -> None:
    assert engine.info is not None
    with pytest.raises(openai.BadRequestError, match="does not reason"):
        ask(client, reasoning={"effort": "high"})
    switches = ("enable_thinking", "reasoning_effort")
    engine.info = replace(engine.info, switches=switches, efforts=("low", "high"))
    ask(client, reasoning={"effort": "medium"})
    assert engine.requests[-1].template == {"enable_thinking": True, "reasoning_effort": "high"}
