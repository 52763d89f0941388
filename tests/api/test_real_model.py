"""The endpoint over the demo model with its own weights: what no played engine can show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from moet_desk.api.guard import EndpointOptions
from moet_desk.api.server import Endpoint
from moet_desk.engine.handle import EngineHandle, EngineOptions, start_engine
from tests.api.fakes import eventually

pytestmark = pytest.mark.slow

QUESTION = "Is it raining in Paris?"
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = '{"weather": "sunny", "temperature": 21}'


@pytest.fixture(scope="module")
def demo(demo_pack: Path) -> Iterator[tuple[EngineHandle, str]]:
    """The engine, and the endpoint's address."""
    handle = start_engine(demo_pack, EngineOptions(save_heat=False, prefill_chunk=16))
    assert handle.wait_ready(120)
    endpoint = Endpoint(handle, EndpointOptions(port=0))
    endpoint.start()
    yield handle, endpoint.address
    endpoint.stop()
    handle.close()


@pytest.fixture
def client(demo: tuple[EngineHandle, str]) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{demo[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_tools__round_trip_by_its_own_weights(client: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    messages: Any = [{"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(
        model="demo", messages=messages, tools=[tool], temperature=0, stream=False
    ).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": WEATHER}]
    chunks = client.chat.completions.create(
        model="demo", messages=messages, tools=[tool], temperature=0, stream=True
    )
    answer = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert "21" in answer
    assert "Paris" in answer


def test_tools__the_same_in_the_other_protocols(
    client: Any, demo: tuple[EngineHandle, str]
) -> None:
    flat: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    asked = client.responses.create(model="demo", input=QUESTION, tools=[flat], temperature=0)
    (called,) = asked.output
    assert called.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": called.call_id, "output": WEATHER}
    told = client.responses.create(
        model="demo", input=[result], previous_response_id=asked.id, tools=[flat], temperature=0
    )
    claude: Any = anthropic.Anthropic(base_url=demo[1], api_key="none")
    with claude:
        more: Any = {"extra_body": {"temperature": 0}, "model": "demo", "max_tokens": 60}
        more["tools"] = [{"name": "get_weather", "input_schema": SCHEMA}]
        question: Any = {"role": "user", "content": QUESTION}
        with claude.messages.stream(messages=[question], **more) as stream:
            message = stream.get_final_message()
        (use,) = message.content
        assert (message.stop_reason, use.input) == ("tool_use", {"city": "Paris"})
        back: Any = {"type": "tool_result", "tool_use_id": use.id, "content": WEATHER}
        turns: Any = [
            question,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [back]},
        ]
        answer = claude.messages.create(messages=turns, **more)
    assert told.output_text == answer.content[0].text
    assert "21" in told.output_text
    assert answer.usage.input_tokens == told.usage.input_tokens


def test_hang_up__no_token_is_made_for_nobody(demo: tuple[EngineHandle, str]) -> None:
    handle, address = demo
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        more: Any = {"extra_body": {"ignore_eos": True}, "stream": True}
        stories: Any = [{"role": "user", "content": "Tell me a story."}]
        stream = client.chat.completions.create(model="demo", messages=stories, **more)
        next(iter(stream))
        assert eventually(lambda: handle.snapshot().requests_running == 1)
        stream.close()
    assert eventually(lambda: handle.snapshot().requests_running == 0, timeout_s=1)
    before = handle.snapshot().tokens
    assert not eventually(lambda: handle.snapshot().tokens > before, timeout_s=0.3)


def test_echo__log_probabilities_of_a_prompt__those_of_writing_it(client: Any) -> None:
    start = "The goat has number 792. The tower has"
    written = client.completions.create(
        model="demo", prompt=start, temperature=0, max_tokens=24, logprobs=2
    ).choices[0]
    text = start + written.text
    read = client.completions.create(
        model="demo", prompt=text, max_tokens=0, echo=True, logprobs=2
    ).choices[0]
    assert read.text == text
    n = len(written.logprobs.tokens)
    assert "".join(read.logprobs.tokens) == text
    assert read.logprobs.tokens[-n:] == written.logprobs.tokens
    assert read.logprobs.token_logprobs[-n:] == pytest.approx(
        written.logprobs.token_logprobs, abs=0.01
    )
    top = read.logprobs.top_logprobs[-n:]
    assert [max(one, key=one.__getitem__) for one in top] == written.logprobs.tokens
    assert read.logprobs.text_offset[-n] == len(start)


def test_several_answers__seed__each_as_if_alone(client: Any) -> None:
    asked: Any = {
        "model": "demo", "temperature": 1.0, "max_tokens": 12,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "frequency_penalty": 0.5, "logit_bias": {"5": -100},
    }  # fmt: skip
    both = client.chat.completions.create(**asked, n=2, seed=7).choices
    alone = [client.chat.completions.create(**asked, seed=s).choices[0] for s in (7, 8)]
    assert [choice.message.content for choice in both] == [c.message.content for c in alone]
    assert both[0].message.content != both[1].message.content
