"""From an engine's events to the client, the same for every protocol. Read this after app.py.

Owns the loop over the events of one call: answers that grow, keep-alives while nothing flows, the
end when a client hangs up, and what a failure does. What a protocol writes is its `Writer`. A
failure before the first byte is an HTTP error; one in mid-stream is the protocol's own error event
and the end of the stream without its mark of a good end, so that clients do not take the text for
complete. Runs in the endpoint's loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from moet_desk.api.feed import EventFeed, open_feed
from moet_desk.api.parts import Change, Delta, Kind, Parts
from moet_desk.engine.handle import RequestStream
from moet_desk.errors import MoetError, fail
from moet_desk.telemetry import (
    Event,
    Failed,
    Finished,
    FinishReason,
    TextDelta,
    TokenLogprob,
    Usage,
)

log = logging.getLogger(__name__)

_QUIET_S = 60.0  # how often a call without a stream looks up


class Deltas(Protocol):
    """What splits the text of one answer into content, reasoning and calls."""

    @property
    def has_calls(self) -> bool:
        """Whether the answer made a call."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether the request wants no more of this answer."""
        ...

    def add(self, text: str) -> list[Delta]:
        """Deltas of the next piece of text."""
        ...

    def end(self) -> list[Delta]:
        """Deltas of text that was held back."""
        ...


class Answer:
    """One answer as it grows.

    Attributes:
        index: its place among the answers of the call.
        prompt_tokens: of its prompt.
        parts: what it says so far.
        changes: what the newest event did to the parts.
        finished: the engine's last event, None before it.
        reason: why it ended, in OpenAI's words; "" before that.
        reasoning_tokens: about how many tokens its reasoning took.
        note: is told every event.
    """

    def __init__(
        self,
        index: int,
        deltas: Deltas,
        prompt_tokens: int,
        note: Callable[[Event], None] = lambda _event: None,
    ) -> None:
        self.index = index
        self.note = note
        self.prompt_tokens = prompt_tokens
        self.parts = Parts()
        self.changes: list[Change] = []
        self.finished: Finished | None = None
        self.reason = ""
        self.reasoning_tokens = 0
        self._deltas = deltas
        self._logprobs: list[TokenLogprob] = []

    def text(self, kind: Kind = Kind.TEXT) -> str:
        """All its text of a kind."""
        return "".join(part.text for part in self.parts.all if part.kind is kind)

    @property
    def wants_no_more(self) -> bool:
        """Whether the engine can stop, although it has not."""
        return self.finished is None and self._deltas.is_full

    def take(self, event: TextDelta | Finished) -> list[Delta]:
        """Add what an event brings.

        Raises:
            MoetError: MD-ENG-04, the engine gave the answer up.
        """
        if isinstance(event, TextDelta):
            self._logprobs += event.logprobs
            deltas = self._deltas.add(event.text)
            if deltas and all("reasoning_content" in delta for delta in deltas):
                self.reasoning_tokens += event.n_tokens
            self.changes = list(self.parts.add(deltas))
            return deltas
        deltas = self._deltas.end()
        self.changes = [*self.parts.add(deltas), *self.parts.end()]
        self.reason = _finish_word(event, self._deltas)
        self.finished = event
        return deltas

    def take_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities since the last call."""
        taken, self._logprobs = self._logprobs, []
        return taken


def _finish_word(finished: Finished, deltas: Deltas) -> str:
    if finished.reason is FinishReason.CANCELLED and not deltas.is_full:
        raise fail("MD-ENG-04", reason="The engine stopped this answer before its end", model="")
    if deltas.has_calls and finished.reason is not FinishReason.LENGTH:
        return "tool_calls"
    return finished.reason.value


def total_usage(answers: Sequence[Answer], n_prompts: int = 1) -> Usage:
    """Counts of all answers of a call, which are in the order of its prompts. Each prompt counts
    once, however many answers it has.
    """
    each = [answer.finished.usage for answer in answers if answer.finished is not None]
    first = each[0]
    if len(each) == 1:
        return first
    balanced = first.rerun_tokens is not None
    of_prompts = each[:: len(each) // n_prompts]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in of_prompts),
        completion_tokens=sum(usage.completion_tokens for usage in each),
        cached_tokens=sum(usage.cached_tokens for usage in of_prompts),
        rerun_tokens=sum(usage.rerun_tokens or 0 for usage in each) if balanced else None,
        rerun_s=sum(usage.rerun_s or 0.0 for usage in each) if balanced else None,
        opportunistic=first.opportunistic,
    )


class Writer(Protocol):
    """How a protocol writes the answers of one call."""

    keep_alive: bytes

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of answers that have ended."""
        ...

    def start(self, answers: Sequence[Answer]) -> bytes:
        """What a stream begins with."""
        ...

    def add(self, answer: Answer, deltas: list[Delta]) -> bytes:
        """What was added to an answer; it has ended if `answer.reason` is set."""
        ...

    def close(self, answers: Sequence[Answer]) -> bytes:
        """What follows the end of all answers."""
        ...

    def failed(self, error: MoetError) -> bytes:
        """The last event of a stream that failed."""
        ...


def sse(body: object, event: str | None = None) -> bytes:
    """One server-sent event, with a name where the protocol has them."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


def as_moet_error(error: Exception) -> MoetError:
    """A catalogue error for any failure; details of a bug go to the log only."""
    if isinstance(error, MoetError):
        return error
    log.error("the engine failed a request", exc_info=error)
    return fail("MD-BUG-01", reason=type(error).__name__, log="moet-desk.log")


def _advance(
    answers: Sequence[Answer], feed: EventFeed, index: int, event: Event
) -> list[Delta] | None:
    """Give an event to its answer. None: it is no news of the answer.

    Raises:
        MoetError: the answer failed.
    """
    answers[index].note(event)
    if isinstance(event, Failed):
        raise as_moet_error(event.error)
    if not isinstance(event, TextDelta | Finished):
        return None
    deltas = answers[index].take(event)
    if answers[index].wants_no_more:
        feed.cancel_one(index)
    return deltas


async def whole(
    streams: Sequence[RequestStream],
    answers: Sequence[Answer],
    writer: Writer,
    receive: Receive,
) -> dict[str, Any] | None:
    """Wait for the end of all answers; None if the client hung up.

    Raises:
        MoetError: one of them failed.
    """
    async with open_feed(streams, receive) as feed:
        while not feed.hung_up:
            for index, event in await feed.next(_QUIET_S):
                _advance(answers, feed, index, event)
            if all(answer.finished is not None for answer in answers):
                return writer.whole(answers)
    return None


class Relay:
    """The response of a streamed call (an ASGI application for one request)."""

    def __init__(
        self,
        streams: Sequence[RequestStream],
        answers: Sequence[Answer],
        writer: Writer,
        *,
        keep_alive_s: float,
    ) -> None:
        self._streams = streams
        self._answers = answers
        self._writer = writer
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        async with open_feed(self._streams, receive) as feed:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in self._frames(feed):
                # Waits while the client does not read; the engine then holds its text back.
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _frames(self, feed: EventFeed) -> AsyncIterator[bytes]:
        flowed = time.monotonic()
        if start := self._writer.start(self._answers):
            yield start
        while not feed.hung_up:
            quiet_s = time.monotonic() - flowed
            if quiet_s >= self._keep_alive_s:
                flowed, quiet_s = time.monotonic(), 0.0
                yield self._writer.keep_alive
            frames, goes_on = self._written(feed, await feed.next(self._keep_alive_s - quiet_s))
            if frames:
                flowed = time.monotonic()
                yield frames
            if not goes_on:
                return

    def _written(self, feed: EventFeed, events: list[tuple[int, Event]]) -> tuple[bytes, bool]:
        """What some events look like, and whether more is to come."""
        frames: list[bytes] = []
        try:
            for index, event in events:
                deltas = _advance(self._answers, feed, index, event)
                if deltas is not None:
                    frames.append(self._writer.add(self._answers[index], deltas))
            if any(answer.finished is None for answer in self._answers):
                return b"".join(frames), True
            frames.append(self._writer.close(self._answers))
        except MoetError as error:
            frames.append(self._writer.failed(error))
        return b"".join(frames), False
