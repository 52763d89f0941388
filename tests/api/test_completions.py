"""Text completions as the official client sees them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from moet_desk.api.completions import MAX_CHOICES, completion_requests, read_completion
from moet_desk.errors import MoetError
from moet_desk.telemetry import Finished, FinishReason, TextDelta, TokenLogprob, Usage
from tests.api.fakes import MODEL, FakeEngine

A, B = TokenLogprob(97, b"a", -0.5, ((97, b"a", -0.5), (98, b"b", -1.0))), TokenLogprob(
    0xE2, b"\xe2", -1.5
)  # fmt: skip
REST = TokenLogprob(0x82, b"\x82\xac!", float("-inf"))


def ask(client: openai.OpenAI, prompt: Any = "Once", **more: Any) -> Any:
    return client.completions.create(model="fake", prompt=prompt, **more)


def test_text__whole_and_streamed__are_the_same(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = ask(client)
    assert (answer.object, answer.choices[0].text) == ("text_completion", "Hello")
    assert (answer.choices[0].finish_reason, answer.usage.total_tokens) == ("stop", 9)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    *texts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == "Hello"
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None, None, "stop"]
    assert (last.choices, last.usage.completion_tokens) == ([], 2)


def test_request__all_parameters__reach_the_engine(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    ask(client, [5, 6], max_tokens=9, seed=4, stop="x", logprobs=3, temperature=0, echo=False)
    (got,) = engine.requests
    assert (got.prompt_ids, got.prompt, got.messages) == ([5, 6], None, None)
    assert (got.max_tokens, got.sampling.seed, got.stop, got.top_logprobs) == (9, 4, ("x",), 3)
    assert not got.prompt_logprobs
    ask(client)
    assert engine.requests[1].max_tokens == 16
    assert engine.requests[1].prompt == "Once"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_answers__numbered_and_counted(
    client: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    counted = {"stream_options": {"include_usage": True}} if stream else {}
    answer = ask(client, ["p", "q"], n=2, seed=8, stream=stream, **counted)
    chunks = list(answer) if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    texts: dict[int, str] = {}
    for choice in choices:
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == dict.fromkeys(range(4), "Hello")
    assert [got.prompt for got in engine.requests] == ["p", "p", "q", "q"]
    assert [got.sampling.seed for got in engine.requests] == [8, 9, 8, 9]
    # Every prompt has 7 tokens and counts once, every answer 2.
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (14, 8, 22)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs__four_lists_with_places_in_characters(
    client: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    end = Finished(FinishReason.STOP, Usage(7, 3), "fast")
    engine.script = [TextDelta("a", logprobs=(A,)), TextDelta("€!", logprobs=(B, REST)), end]
    answer = ask(client, logprobs=2, stream=stream)
    found = [c.choices[0].logprobs for c in answer] if stream else [answer.choices[0].logprobs]
    tokens = [token for logprobs in found for token in logprobs.tokens]
    assert tokens == ["a", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}" * 2 + "!"]
    assert [v for logprobs in found for v in logprobs.token_logprobs] == [-0.5, -1.5, -9999.0]
    assert [place for logprobs in found for place in logprobs.text_offset] == [0, 1, 1]
    assert found[0].top_logprobs[0] == {"a": -0.5, "b": -1.0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Once", list(b"Once")])
def test_echo__the_prompt_comes_first(
    client: openai.OpenAI, engine: FakeEngine, prompt: Any, stream: bool
) -> None:
    answer = ask(client, prompt, echo=True, stream=stream)
    text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text
    assert text == "OnceHello"


def test_echo_with_logprobs__scores_of_the_prompt(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    # what tools that measure do: only the prompt, no answer
    engine.script = [Finished(FinishReason.LENGTH, Usage(2, 0), "fast", prompt=(A,))]
    answer = ask(client, "xa", echo=True, logprobs=0, max_tokens=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("xa", "length")
    assert choice.logprobs.tokens == ["x", "a"]
    assert choice.logprobs.token_logprobs == [None, -0.5]
    assert choice.logprobs.text_offset == [0, 1]
    assert engine.requests[0].prompt_logprobs
    assert engine.requests[0].max_tokens == 0


@pytest.mark.parametrize(
    ("more", "parameter"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["x"] * (MAX_CHOICES + 1)}, "prompt"),
        ({"prompt": ["x"] * (MAX_CHOICES // 2 + 1), "n": 2}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"tools": [1]}, "tools"),
        ({"stream": True, "echo": True, "logprobs": 1}, "logprobs"),
        ({"n": 9}, "n"),
    ],
)
def test_what_is_not_served__is_refused_by_name(more: dict[str, Any], parameter: str) -> None:
    with pytest.raises(MoetError) as caught:
        read_completion(json.dumps({"prompt": "x", **more}).encode())
    assert (caught.value.code, caught.value.facts["parameter"]) == ("MD-API-04", parameter)


def test_best_of__as_many_as_n_is_as_usual() -> None:
    request = read_completion(b'{"prompt": "x", "n": 2, "best_of": 2, "echo": true}')
    assert len(completion_requests(request, MODEL, client="")) == 2
