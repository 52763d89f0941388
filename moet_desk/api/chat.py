"""Chat completions: answers as one JSON body or as a stream of server-sent events.

Owns how text becomes deltas, for all protocols that have chats, and this protocol's framing: role
once, usage only when asked for, `[DONE]`. Runs in the endpoint's loop.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moet_desk.api.bodies import error_body, logprob_body, usage_body
from moet_desk.api.parts import Delta, Kind, Part
from moet_desk.api.relay import Answer, sse, total_usage
from moet_desk.api.schemas import ChatRequest
from moet_desk.engine.handle import ModelInfo, RequestStream
from moet_desk.engine.parsers.answers import PromptEnd
from moet_desk.engine.parsers.events import Call, Parsed, Reasoning
from moet_desk.engine.parsers.formats import make_parser
from moet_desk.errors import MoetError

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all bodies of one answer share."""

    model: str
    fingerprint: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A body of type `kind` around `choices`."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint, "choices": choices, **more}


def envelope(model: ModelInfo, version: str, *, name: str | None, prefix: str) -> Envelope:
    """Same fingerprint, seed and request: same answer, unless it ends in "opportunistic".

    `name` is what the client calls the model, `prefix` what ids begin with.
    """
    mark = "_opportunistic" if model.opportunistic else ""
    return Envelope(
        model=name or model.name,
        fingerprint=f"fp_{model.identity[:12]}_{version}{mark}",
        id=f"{prefix}-{uuid.uuid4().hex}",
    )


class ChatDeltas:
    """Turns engine text into OpenAI deltas: reasoning apart, and calls if the request has tools."""

    __slots__ = ("_n_calls", "_one_call", "_parser")

    def __init__(self, request: ChatRequest, stream: RequestStream) -> None:
        self._parser = make_parser(
            stream.answers,
            (request.tools or ()) if request.wants_calls else (),
            in_reasoning=stream.prompt_end is PromptEnd.REASONING,
        )
        self._one_call = request.parallel_tool_calls is False
        self._n_calls = 0

    @property
    def has_calls(self) -> bool:
        """Whether the answer made a call."""
        return self._n_calls > 0

    @property
    def is_full(self) -> bool:
        """Whether the request wants no more: it asked for one call at a time and has it."""
        return self._one_call and self.has_calls

    def add(self, text: str) -> list[Delta]:
        """Deltas of the next piece of text."""
        return self._deltas(self._parser.feed(text))

    def end(self) -> list[Delta]:
        """Deltas of text that was held back."""
        return self._deltas(self._parser.finish())

    def _deltas(self, parsed: list[Parsed]) -> list[Delta]:
        deltas: list[Delta] = []
        for item in parsed:
            if self.is_full:
                break
            if isinstance(item, Call):
                self._n_calls += 1
                deltas += _call_deltas(item)
            else:
                kind = "reasoning_content" if isinstance(item, Reasoning) else "content"
                deltas.append({kind: item.text})
        return deltas


def _call_deltas(call: Call) -> list[Delta]:
    # Index always; id, type and name only in the first delta of a call (field cases 37, 38).
    first = {
        "index": call.index,
        "id": call.id or f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": ""},
    }
    rest = {"index": call.index, "function": {"arguments": call.arguments}}
    return [{"tool_calls": [first]}, {"tool_calls": [rest]}]


class ChatWriter:
    """The `relay.Writer` of chat completions."""

    keep_alive = KEEP_ALIVE

    def __init__(self, request: ChatRequest, shared: Envelope) -> None:
        self._shared = shared
        self._wants_logprobs = bool(request.logprobs)
        self._wants_usage = request.wants_usage
        self._has_role: set[int] = set()  # answers whose role was sent

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `relay.Writer`."""
        choices = [
            {
                "index": answer.index,
                "message": {**chat_message(answer), "refusal": None},
                "logprobs": self._logprobs(answer),
                "finish_reason": answer.reason,
            }
            for answer in answers
        ]
        usage = _usage(answers)
        return self._shared.wrap("chat.completion", choices, usage=usage)

    def start(self, answers: Sequence[Answer]) -> bytes:
        """Nothing: the role comes with the first text."""
        return b""

    def add(self, answer: Answer, deltas: list[Delta]) -> bytes:
        """See `relay.Writer`; the end is an empty delta with the reason."""
        sent = [*deltas, {}] if answer.reason else deltas
        if sent and answer.index not in self._has_role:
            self._has_role.add(answer.index)
            sent = [{"role": "assistant", "content": ""}, *sent]
        return b"".join(self._chunk(answer, delta, is_last=not delta) for delta in sent)

    def close(self, answers: Sequence[Answer]) -> bytes:
        """See `relay.Writer`."""
        if not self._wants_usage:
            return DONE
        usage = _usage(answers)
        return sse(self._shared.wrap("chat.completion.chunk", [], usage=usage)) + DONE

    def failed(self, error: MoetError) -> bytes:
        """See `relay.Writer`."""
        return sse(error_body(error))

    def _chunk(self, answer: Answer, delta: Delta, *, is_last: bool) -> bytes:
        choice: dict[str, Any] = {"index": answer.index, "delta": delta, "finish_reason": None}
        if is_last:
            choice["finish_reason"] = answer.reason
        # Those of text that is held back wait for it, so that they come with the right chunk.
        if "role" not in delta and (logprobs := self._logprobs(answer)) and logprobs["content"]:
            choice["logprobs"] = logprobs
        return sse(self._shared.wrap("chat.completion.chunk", [choice]))

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return {"content": [logprob_body(token) for token in answer.take_logprobs()]}


def chat_message(answer: Answer) -> dict[str, Any]:
    """The answer as the message that goes into the conversation."""
    content, reasoning = answer.text(), answer.text(Kind.REASONING)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [_call_body(part) for part in answer.parts.all if part.kind is Kind.CALL]
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    reasoning_tokens = sum(answer.reasoning_tokens for answer in answers)
    return usage_body(total_usage(answers), reasoning_tokens)


def _call_body(part: Part) -> dict[str, Any]:
    function = {"name": part.name, "arguments": part.text}
    return {"id": part.id, "type": "function", "function": function}
