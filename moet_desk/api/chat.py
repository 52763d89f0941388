"""Chat completions: an engine's events as one JSON body or as a stream of server-sent events.

Owns the framing (role once, usage only when asked for, `[DONE]`, keep-alive comments while nothing
flows) and what a failure looks like on the wire. A failure before the first byte is an HTTP error;
one in mid-stream is `data: {"error": ...}` and the end of the stream without `[DONE]`, which
clients raise as an error instead of taking the text for complete. Runs in the endpoint's loop.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from moet_desk.api.feed import EventFeed, open_feed
from moet_desk.api.schemas import ChatRequest, error_body, logprob_body, usage_body
from moet_desk.engine.handle import ModelInfo, RequestStream
from moet_desk.engine.parsers.answers import PromptEnd
from moet_desk.engine.parsers.events import Call, Parsed, Reasoning
from moet_desk.engine.parsers.formats import make_parser
from moet_desk.errors import MoetError, fail
from moet_desk.telemetry import Failed, Finished, FinishReason, PrefillProgress, TextDelta

log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

Delta = dict[str, Any]


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all bodies of one answer share."""

    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A body of type `kind` around `choices`."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint, "choices": choices, **more}


def envelope(model: ModelInfo, version: str) -> Envelope:
    """Same fingerprint, seed and request: same answer, unless it ends in "opportunistic"."""
    mark = "_opportunistic" if model.opportunistic else ""
    return Envelope(model=model.name, fingerprint=f"fp_{model.identity[:12]}_{version}{mark}")


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


def _finish_word(finished: Finished, deltas: ChatDeltas) -> str:
    """The finish reason on the wire.

    Raises:
        MoetError: MD-ENG-04, the engine gave the answer up.
    """
    if finished.reason is FinishReason.CANCELLED and not deltas.is_full:
        raise fail("MD-ENG-04", reason="The engine stopped this answer before its end", model="")
    if deltas.has_calls and finished.reason is not FinishReason.LENGTH:
        return "tool_calls"
    return finished.reason.value


def as_moet_error(error: Exception) -> MoetError:
    """A catalogue error for any failure; details of a bug go to the log only."""
    if isinstance(error, MoetError):
        return error
    log.error("the engine failed a request", exc_info=error)
    return fail("MD-BUG-01", reason=type(error).__name__, log="moet-desk.log")


# -- one body --------------------------------------------------------------------------------


async def whole_answer(
    request: ChatRequest, stream: RequestStream, *, receive: Receive, shared: Envelope
) -> dict[str, Any] | None:
    """Wait for the end of the answer; None if the client hung up.

    Raises:
        MoetError: the engine failed the request.
    """
    deltas = ChatDeltas(request, stream)
    made: list[Delta] = []
    logprobs: list[dict[str, Any]] = []
    async with open_feed(stream, receive) as feed:
        while not feed.hung_up:
            for event in await feed.next(timeout_s=60):
                if isinstance(event, TextDelta):
                    made += deltas.add(event.text)
                    logprobs += map(logprob_body, event.logprobs)
                    if deltas.is_full:
                        feed.cancel()
                elif isinstance(event, Failed):
                    raise as_moet_error(event.error)
                elif isinstance(event, Finished):
                    made += deltas.end()
                    choice = {
                        "index": 0,
                        "message": _message(made),
                        "logprobs": {"content": logprobs} if request.logprobs else None,
                        "finish_reason": _finish_word(event, deltas),
                    }
                    usage = usage_body(event.usage)
                    return shared.wrap("chat.completion", [choice], usage=usage)
    return None


def _message(deltas: list[Delta]) -> dict[str, Any]:
    """The message that the deltas add up to."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        thoughts.append(delta.get("reasoning_content", ""))
        texts.append(delta.get("content", ""))
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                calls.append({key: piece[key] for key in ("id", "type", "function")})
            else:
                function = calls[-1]["function"]
                function["arguments"] += piece["function"]["arguments"]
    content = "".join(texts)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


# -- stream ----------------------------------------------------------------------------------


class ChatStream:
    """The response of a streamed chat completion (an ASGI application for one request)."""

    def __init__(
        self,
        request: ChatRequest,
        stream: RequestStream,
        *,
        shared: Envelope,
        keep_alive_s: float,
    ) -> None:
        self._request = request
        self._stream = stream
        self._shared = shared
        self._keep_alive_s = keep_alive_s
        self._deltas = ChatDeltas(request, stream)
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is held back
        self._has_role = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        async with open_feed(self._stream, receive) as feed:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in self._frames(feed):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _frames(self, feed: EventFeed) -> AsyncIterator[bytes]:
        flowed = time.monotonic()
        while not feed.hung_up:
            quiet_s = time.monotonic() - flowed
            if quiet_s >= self._keep_alive_s:
                flowed, quiet_s = time.monotonic(), 0.0
                yield KEEP_ALIVE
            for event in await feed.next(self._keep_alive_s - quiet_s):
                if isinstance(event, PrefillProgress):
                    continue
                if isinstance(event, Finished | Failed):
                    yield self._last(event)
                    return
                frames = b"".join(map(sse, self._text_chunks(event)))
                if frames:
                    flowed = time.monotonic()
                    yield frames
                if self._deltas.is_full:
                    feed.cancel()

    def _last(self, event: Finished | Failed) -> bytes:
        """All that follows the text: held back text, reason, usage, end; or an error."""
        try:
            if isinstance(event, Failed):
                raise as_moet_error(event.error)
            chunks = self._chunks(self._deltas.end())
            reason = _finish_word(event, self._deltas)
        except MoetError as error:
            return sse(error_body(error))
        chunks += self._chunks([{}], reason=reason)
        if self._request.wants_usage:
            usage = usage_body(event.usage)
            chunks.append(self._shared.wrap("chat.completion.chunk", [], usage=usage))
        return b"".join(map(sse, chunks)) + DONE

    def _text_chunks(self, event: TextDelta) -> list[dict[str, Any]]:
        self._logprobs += map(logprob_body, event.logprobs)
        return self._chunks(self._deltas.add(event.text))

    def _chunks(self, deltas: list[Delta], *, reason: str | None = None) -> list[dict[str, Any]]:
        if deltas and not self._has_role:
            self._has_role = True
            deltas = [{"role": "assistant", "content": ""}, *deltas]
        chunks: list[dict[str, Any]] = []
        for delta in deltas:
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
            if self._logprobs and "role" not in delta:
                choice["logprobs"] = {"content": self._logprobs}
                self._logprobs = []
            chunks.append(self._shared.wrap("chat.completion.chunk", [choice]))
        if reason is not None:
            chunks[-1]["choices"][0]["finish_reason"] = reason
        return chunks
