"""Answers and parts, whatever splits their text."""

from __future__ import annotations

from typing import Any

import pytest

from moet_desk.api.chat import ChatWriter, chat_message, envelope
from moet_desk.api.messages_wire import MessagesWriter
from moet_desk.api.parts import Delta, Kind, Parts, Verb
from moet_desk.api.relay import Answer
from moet_desk.api.responses import read_responses
from moet_desk.api.responses_wire import ResponsesWriter
from moet_desk.api.schemas import ChatRequest
from moet_desk.telemetry import Finished, FinishReason, TextDelta, Usage
from tests.api.fakes import MODEL

FIRST = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
REST = [{"index": 0, "function": {"arguments": piece}} for piece in ('{"x"', ": 1}")]
# A text "1" stands for this delta, "2" for the next one, and so on.
SPLIT: list[Delta] = [
    {"reasoning_content": "hm"},
    {"reasoning_content": "m"},
    {"content": "Let me "},
    {"content": "look."},
    {"tool_calls": [FIRST]},
    *({"tool_calls": [piece]} for piece in REST),
    {"content": "Done."},
]
END = Finished(FinishReason.STOP, Usage(7, 8), "fast")


class Spelt:
    """Deltas that the test spells by number."""

    has_calls = True
    is_full = False

    def add(self, text: str) -> list[Delta]:
        return [SPLIT[int(digit) - 1] for digit in text]

    def end(self) -> list[Delta]:
        return []


def answered(*texts: str) -> Answer:
    answer = Answer(0, Spelt(), 7)
    for text in texts:
        answer.take(TextDelta(text))
    answer.take(END)
    return answer


@pytest.mark.parametrize("texts", ["12345678", ("12", "345", "678"), ("12345678",)])
def test_answer__however_it_is_cut__same_parts(texts: Any) -> None:
    answer = answered(*texts)
    parts = [(part.kind, part.text) for part in answer.parts.all]
    assert parts == [
        (Kind.REASONING, "hmm"), (Kind.TEXT, "Let me look."), (Kind.CALL, '{"x": 1}'),
        (Kind.TEXT, "Done."),
    ]  # fmt: skip
    message = chat_message(answer)
    assert message["content"] == "Let me look.Done."
    assert message["reasoning_content"] == "hmm"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert answer.reason == "tool_calls"


def test_reasoning_tokens__only_of_events_that_are_all_reasoning() -> None:
    answer = answered("1", "23", "4")
    assert answer.reasoning_tokens == 1
    writer = ChatWriter(ChatRequest(messages=[]), envelope(MODEL, "0", name=None, prefix="c"))
    usage = writer.whole([answer])["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 1}
    plain = writer.whole([answered("3")])["usage"]
    assert "completion_tokens_details" not in plain


def test_messages__order_of_parts_is_kept() -> None:
    body = MessagesWriter("m").whole([answered(*"12345678")])
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use", "text"]
    assert body["content"][0]["thinking"] == "hmm"
    assert body["content"][2]["input"] == {"x": 1}


def test_responses__order_of_parts_is_kept_and_goes_into_the_next_request() -> None:
    kept: list[dict[str, Any]] = []
    request = read_responses(b'{"input": "hi"}')
    writer = ResponsesWriter(request, "m", keep=lambda body, message: kept.append(message))
    body = writer.whole([answered(*"12345678")])
    assert [item["type"] for item in body["output"]] == [
        "reasoning", "message", "function_call", "message",
    ]  # fmt: skip
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert kept == [chat_message(answered(*"12345678"))]


def test_messages__call_that_was_cut__has_no_input_yet() -> None:
    body = MessagesWriter("m").whole([answered("5", "6")])
    assert body["content"][0]["input"] == {}


def test_parts__every_opened_one_is_closed_before_the_next() -> None:
    parts = Parts()
    changes = [*parts.add(SPLIT), *parts.end(), *parts.end()]
    verbs = [(change.verb, change.part.index) for change in changes if change.verb is not Verb.GREW]
    assert verbs == [(verb, i) for i in range(4) for verb in (Verb.OPENED, Verb.CLOSED)]
