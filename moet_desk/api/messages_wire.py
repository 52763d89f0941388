"""Anthropic's messages, going out: an answer as one body or as a stream of named events.

Owns this protocol's words and framing; the loop is `relay`'s. Runs in the endpoint's loop.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moet_desk.api.bodies import anthropic_error_body
from moet_desk.api.parts import Change, Delta, Kind, Part, Verb
from moet_desk.api.relay import Answer, sse
from moet_desk.errors import MoetError
from moet_desk.telemetry import Usage

_STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class MessagesWriter:
    """The `relay.Writer` of messages."""

    keep_alive = sse({"type": "ping"}, "ping")

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = f"msg_{uuid.uuid4().hex}"

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `relay.Writer`."""
        (answer,) = answers
        return self._message(answer, content=[_whole_block(part) for part in answer.parts.all])

    def start(self, answers: Sequence[Answer]) -> bytes:
        """See `relay.Writer`."""
        message = self._message(answers[0], content=[])
        return _event({"type": "message_start", "message": message})

    def add(self, answer: Answer, deltas: list[Delta]) -> bytes:
        """See `relay.Writer`."""
        return b"".join(map(_change_event, answer.changes))

    def close(self, answers: Sequence[Answer]) -> bytes:
        """See `relay.Writer`."""
        (answer,) = answers
        delta = {"stop_reason": _reason(answer), "stop_sequence": _stop_sequence(answer)}
        last = {"type": "message_delta", "delta": delta, "usage": _usage(answer)}
        return _event(last) + _event({"type": "message_stop"})

    def failed(self, error: MoetError) -> bytes:
        """See `relay.Writer`."""
        return _event(anthropic_error_body(error))

    def _message(self, answer: Answer, *, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": _reason(answer),
            "stop_sequence": _stop_sequence(answer),
            "usage": _usage(answer),
        }


def _whole_block(part: Part) -> dict[str, Any]:
    block = _empty_block(part)
    if part.kind is Kind.CALL:
        return {**block, "input": _arguments(part.text)}
    return {**block, "thinking" if part.kind is Kind.REASONING else "text": part.text}


def _arguments(text: str) -> dict[str, Any]:
    """Arguments as an object; those of an answer that was cut may be none yet."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


def _reason(answer: Answer) -> str | None:
    if answer.finished is None:
        return None
    if answer.reason == "stop" and answer.finished.stop is not None:
        return "stop_sequence"
    return _STOP_REASONS[answer.reason]


def _stop_sequence(answer: Answer) -> str | None:
    if answer.finished is None or _reason(answer) != "stop_sequence":
        return None
    return answer.finished.stop


def _usage(answer: Answer) -> dict[str, Any]:
    """Counts; before the end those of the prompt. Tokens whose KV was reused count apart."""
    usage = answer.finished.usage if answer.finished else Usage(answer.prompt_tokens, 0)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _event(body: dict[str, Any]) -> bytes:
    return sse(body, body["type"])


def _change_event(change: Change) -> bytes:
    part = change.part
    if change.verb is Verb.OPENED:
        begin = {"type": "content_block_start", "index": part.index}
        return _event({**begin, "content_block": _empty_block(part)})
    if change.verb is Verb.CLOSED:
        return _event({"type": "content_block_stop", "index": part.index})
    return _event({"type": "content_block_delta", "index": part.index, "delta": _delta(change)})


def _empty_block(part: Part) -> dict[str, Any]:
    if part.kind is Kind.CALL:
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
    if part.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(change: Change) -> dict[str, Any]:
    if change.part.kind is Kind.CALL:
        return {"type": "input_json_delta", "partial_json": change.piece}
    if change.part.kind is Kind.REASONING:
        return {"type": "thinking_delta", "thinking": change.piece}
    return {"type": "text_delta", "text": change.piece}
