"""The calls of the endpoint, for the screen that lists them: who asks what, and how far it is.

Owns a record of the newest calls; bodies and texts are never in it. Written in the endpoint's loop,
read and stopped from any thread: each field is set in one step, and readers get frozen copies.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from moet_desk.engine.handle import RequestStream
from moet_desk.errors import MoetError
from moet_desk.telemetry import (
    CallState,
    EndpointCall,
    Event,
    Failed,
    Finished,
    FinishReason,
    PrefillProgress,
    TextDelta,
)

KEPT = 100
_CLIENT_CHARS = 24
_SCOPE_KEY = "moet_desk.call"
_UNLISTED = ("/health", "/metrics")  # monitors call these every few seconds
_ROUTES: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count tokens",
    "/v1/responses": "responses",
}


class Call:
    """One call as it goes on. The endpoint's loop writes it."""

    def __init__(self, number: int, client: str, route: str) -> None:
        self.number = number
        self.client = client
        self.route = route
        self.model = ""
        self.streams: Sequence[RequestStream] = ()
        self.state = CallState.QUEUED
        self.error = ""
        self.status: int | None = None
        self.n_tokens = 0
        self.prompt_tokens: int | None = None
        self.prompt_done = 0
        self._wall_s = time.time()
        self._began_s = time.monotonic()
        self._read_s: float | None = None  # the engine has begun to read
        self._first_s: float | None = None  # the first text has come
        self._last_s: float | None = None
        self._first_tokens = 0
        self._n_open = 0
        self._stopped = False

    def answered_by(self, streams: Sequence[RequestStream], *, model: str, streamed: bool) -> None:
        """The engine has taken it."""
        self.model = model
        self.streams = streams
        self._n_open = len(streams)
        self.prompt_tokens = streams[0].prompt_tokens if streams else 0
        self.route += ", stream" if streamed else ""

    def note(self, event: Event) -> None:
        """An event of one of its answers."""
        now_s = time.monotonic()
        match event:
            case PrefillProgress(done=done):
                self.state = CallState.READING
                self.prompt_done = done
                self._read_s = self._read_s or now_s
            case TextDelta(n_tokens=n_tokens):
                self.state = CallState.WRITING
                self.n_tokens += n_tokens
                if self._first_s is None:
                    self._first_s, self._first_tokens = now_s, n_tokens
                self._last_s = now_s
            case Finished(reason=reason):
                self._n_open -= 1
                self._stopped = self._stopped or reason is FinishReason.CANCELLED
            case Failed(error=error):
                self.failed(error)

    def failed(self, error: Exception) -> None:
        """It cannot be answered, or not to its end."""
        if isinstance(error, MoetError):
            self.error = f"{error.code}  {error.cause}"
        else:
            self.error = type(error).__name__

    def end(self) -> None:
        """Nothing is sent any more."""
        self._last_s = self._last_s or time.monotonic()
        if self._stopped or self._n_open > 0:
            self.state = CallState.STOPPED
        else:
            bad = bool(self.error) or (self.status or 0) >= 400
            self.state = CallState.FAILED if bad else CallState.DONE
        self.streams = ()

    def stop(self) -> None:
        """Ask the engine to stop its answers. Any thread."""
        self._stopped = True
        for stream in self.streams:
            if not stream.ended:
                stream.cancel()

    def view(self) -> EndpointCall:
        """As it is now. Any thread."""
        first_s, last_s, read_s = self._first_s, self._last_s, self._read_s
        since_first = None if first_s is None or last_s is None else last_s - first_s
        n_timed = self.n_tokens - self._first_tokens
        return EndpointCall(
            number=self.number,
            wall_s=self._wall_s,
            client=self.client,
            route=self.route,
            model=self.model,
            state=self.state,
            prompt_tokens=self.prompt_tokens,
            prompt_done=self.prompt_done,
            n_tokens=self.n_tokens if self.prompt_tokens is not None else None,
            queue_s=None if read_s is None else read_s - self._began_s,
            first_s=None if first_s is None else first_s - self._began_s,
            total_s=(last_s or time.monotonic()) - self._began_s,
            tok_per_s=n_timed / since_first if since_first and n_timed > 0 else None,
            status=self.status,
            error=self.error,
        )


class Calls:
    """The newest calls. See the module's paragraph."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque(maxlen=KEPT)
        self._numbers = itertools.count(1)

    def begin(self, scope: MutableMapping[str, Any]) -> Call:
        """Note an HTTP request that has come in."""
        headers = {name: value for name, value in scope.get("headers", ()) if name == b"user-agent"}
        agent = headers.get(b"user-agent", b"").decode("latin-1")
        path = str(scope["path"])
        call = Call(next(self._numbers), client_name(agent), _ROUTES.get(path, path))
        scope[_SCOPE_KEY] = call
        if path not in _UNLISTED:
            self._calls.append(call)
        return call

    def views(self) -> tuple[EndpointCall, ...]:
        """All that are kept, the newest first. Any thread."""
        return tuple(call.view() for call in reversed(self._calls.copy()))

    def stop(self, number: int) -> bool:
        """Stop one that goes on; False if there is none. Any thread."""
        for call in self._calls.copy():
            if call.number == number and call.streams:
                call.stop()
                return True
        return False


def call_of(scope: Mapping[str, Any]) -> Call:
    """The call that an HTTP request belongs to."""
    call: Call = scope[_SCOPE_KEY]
    return call


def client_name(agent: str) -> str:
    """The program's name out of a User-Agent header: "curl", "OpenAI/Python"; "?" without one."""
    product = agent.split()[0] if agent.split() else "?"
    name, _, version = product.rpartition("/")
    is_version = version[:1].isdigit() or version[:1] == "v"
    return (name if name and is_version else product)[:_CLIENT_CHARS]
