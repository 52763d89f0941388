"""Reasoning on the wire: apart from the text, before it, and never in the same delta."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from moet_desk.engine.parsers.answers import THINK, AnswerFormat, CallFormat, PromptEnd
from tests.api.fakes import FakeEngine

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "now", "parameters": {}}}]


@pytest.mark.parametrize(
    ("end", "pieces"),
    [
        (PromptEnd.UNSAID, ("<think>\nA thou", "ght.</think>Answer")),
        (PromptEnd.REASONING, ("A thou", "ght.</th", "ink>Answer")),
    ],
)
def test_reasoning__stream_and_whole__split_the_same(
    client: openai.OpenAI, engine: FakeEngine, end: PromptEnd, pieces: tuple[str, ...]
) -> None:
    engine.answers, engine.prompt_end = AnswerFormat(CallFormat.GLM47, THINK), end
    engine.answer(*pieces)
    whole = client.chat.completions.create(model="fake", messages=MESSAGES).choices[0].message
    assert (whole.content, whole.model_extra["reasoning_content"]) == ("Answer", "A thought.")
    chunks = client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = [(delta.model_extra or {}).get("reasoning_content") for delta in deltas]
    assert not any(t and delta.content for t, delta in zip(thoughts, deltas, strict=True))
    assert "".join(t or "" for t in thoughts) == "A thought."
    assert "".join(delta.content or "" for delta in deltas) == "Answer"


def test_reasoning__model_without__tags_are_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer("<think>a</think>b")
    whole = client.chat.completions.create(model="fake", messages=MESSAGES).choices[0].message
    assert whole.content == "<think>a</think>b"
    assert "reasoning_content" not in (whole.model_extra or {})


def test_call__kimi__its_own_id_goes_out(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answers = AnswerFormat(CallFormat.KIMI_K2, THINK)
    call = "<|tool_call_begin|>functions.now:4<|tool_call_argument_begin|>{}<|tool_call_end|>"
    engine.answer("<think>I look.", call)
    choice = client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS).choices[0]
    assert [call.id for call in choice.message.tool_calls] == ["functions.now:4"]
    assert choice.message.model_extra["reasoning_content"] == "I look."
    assert choice.finish_reason == "tool_calls"
