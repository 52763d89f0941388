"""The bytes on the wire, with raw sockets: framing, keep-alive, hang-ups, limits."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from moet_desk.api.guard import EndpointOptions
from moet_desk.api.server import Endpoint
from moet_desk.engine.scripted import Script, ScriptedEngine
from moet_desk.errors import fail
from moet_desk.telemetry import (
    Event,
    Failed,
    Finished,
    FinishReason,
    PrefillProgress,
    TextDelta,
    Usage,
)
from tests.api.fakes import FakeEngine, Pause, eventually

END = Finished(FinishReason.STOP, Usage(7, 1), "fast")
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


@contextlib.contextmanager
def connected(endpoint: Endpoint) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", endpoint.options.port), timeout=5) as link:
        yield link


def head(path: str, *, method: str = "POST", length: int = 0, extra: str = "") -> bytes:
    host = "" if "Host:" in extra else "Host: localhost\r\n"
    return f"{method} {path} HTTP/1.1\r\n{host}{extra}Content-Length: {length}\r\n\r\n".encode()


def post(link: socket.socket, body: object, *, extra: str = "") -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    link.sendall(head("/v1/chat/completions", length=len(data), extra=extra) + data)


def read_until(link: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        piece = link.recv(65536)
        if not piece:
            break
        data += piece
    return data


def response(link: socket.socket) -> tuple[int, Any]:
    """Status and JSON body of a short response."""
    start = read_until(link, b"\r\n\r\n")
    top, _, body = start.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", top).group(1))  # type: ignore[union-attr]
    while len(body) < length:
        body += link.recv(65536)
    return int(top.split()[1]), json.loads(body)


def call(endpoint: Endpoint, body: object, *, extra: str = "") -> tuple[int, Any]:
    with connected(endpoint) as link:
        post(link, body, extra=extra)
        return response(link)


def get(endpoint: Endpoint, path: str, *, extra: str = "", method: str = "GET") -> tuple[int, Any]:
    with connected(endpoint) as link:
        link.sendall(head(path, method=method, extra=extra))
        return response(link)


def stream_events(endpoint: Endpoint, **more: Any) -> list[str]:
    """The events of a stream, comments included, chunk framing removed."""
    with connected(endpoint) as link:
        post(link, {**CHAT, "stream": True, **more})
        _, _, data = read_until(link, b"\r\n0\r\n\r\n").partition(b"\r\n\r\n")
    text = b"".join(re.findall(rb"[0-9a-f]+\r\n(.*?)\r\n", data, re.DOTALL)).decode()
    assert text.endswith("\n\n")
    return text.split("\n\n")[:-1]


def test_stream__framing__role_once_and_done_last(endpoint: Endpoint) -> None:
    *chunks, done = stream_events(endpoint)
    assert done == "data: [DONE]"
    deltas = [json.loads(c.removeprefix("data: "))["choices"][0]["delta"] for c in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]


def test_stream__empty_answer__still_has_role_and_reason(
    endpoint: Endpoint, engine: FakeEngine
) -> None:
    engine.script = [END]
    role, last, done = stream_events(endpoint)
    assert '"role":"assistant"' in role
    assert '"finish_reason":"stop"' in last
    assert done == "data: [DONE]"


def test_stream__failure__error_event_and_no_done(endpoint: Endpoint, engine: FakeEngine) -> None:
    engine.script = [TextDelta("Hel"), Failed(fail("MD-ENG-04", reason="NaN", model="fake"))]
    last = stream_events(endpoint)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["moet_code"] == "MD-ENG-04"


def test_stream__bug_in_the_engine__error_event(endpoint: Endpoint, engine: FakeEngine) -> None:
    engine.script = [TextDelta("Hel"), Failed(ZeroDivisionError("detail"))]
    last = stream_events(endpoint)[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["moet_code"] == "MD-BUG-01"
    assert "detail" not in last


def test_stream__nothing_flows__keep_alive_comments(endpoint: Endpoint, engine: FakeEngine) -> None:
    # Progress events wake the endpoint but do not reach the client: comments must still come.
    reading: list[Event | Pause] = []
    for done in range(8):
        reading += [PrefillProgress(done, 8), Pause(0.06)]
    engine.script = [*reading, TextDelta("a"), END]
    events = stream_events(endpoint)
    n_comments = events.count(": keep-alive")
    assert 2 <= n_comments <= 5
    assert events[:n_comments] == [": keep-alive"] * n_comments
    assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [[Pause(60), END], [TextDelta("a"), Pause(60), END]])
def test_hang_up__twenty_clients__nothing_keeps_running(
    endpoint: Endpoint, engine: FakeEngine, script: list[Event | Pause], stream: bool
) -> None:
    engine.script = script
    with contextlib.ExitStack() as links:
        for _ in range(20):
            post(links.enter_context(connected(endpoint)), {**CHAT, "stream": stream})
        assert eventually(lambda: engine.busy == 20, timeout_s=5)
    assert eventually(lambda: engine.busy == 0)
    assert engine.cancelled == 20


def test_slow_reader__engine_goes_on_and_nothing_is_lost() -> None:
    words = "word " * 8_000
    script = Script(
        answers=(words,), tokens_per_s=1e6, prompt_tok_per_s=1e6, n_layers=1, n_experts=2, top_k=1
    )
    engine = ScriptedEngine(script).start()
    endpoint = Endpoint(engine, EndpointOptions(port=0))
    endpoint.start()
    try:
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.settimeout(10)
            link.connect(("127.0.0.1", endpoint.options.port))
            post(link, {**CHAT, "model": script.model, "stream": True})
            read_until(link, b"word")
            # The client reads nothing now: the answer must not wait for it.
            assert eventually(lambda: engine.snapshot().tokens >= 8_000, timeout_s=20)
            data = read_until(link, b"[DONE]")
    finally:
        endpoint.stop()
        engine.close()
    texts = re.findall(rb'"content":"([^"]*)"', data)
    assert b"".join(texts).count(b"word") >= 7_000  # the first ones were read before
    assert len(texts) < 4_000  # joined, not one frame for each of 8,000 tokens


def test_hang_up__inside_the_body__server_goes_on(endpoint: Endpoint, engine: FakeEngine) -> None:
    with connected(endpoint) as link:
        link.sendall(head("/v1/chat/completions", length=500) + b'{"model"')
    assert call(endpoint, CHAT)[0] == 200
    assert len(engine.requests) == 1


def test_stop__cancels_running_answers() -> None:
    engine = FakeEngine()
    endpoint = Endpoint(engine, EndpointOptions(port=0))
    endpoint.start()
    engine.script = [TextDelta("a"), Pause(60), END]
    with connected(endpoint) as link:
        post(link, {**CHAT, "stream": True})
        read_until(link, b'"a"')
        started = time.monotonic()
        endpoint.stop()
        assert time.monotonic() - started < 4
        assert b"[DONE]" not in read_until(link, b"[DONE]")
    assert eventually(lambda: engine.busy == 0)
    assert not endpoint.is_running


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        {},
        {"messages": 3},
        {"messages": []},
        {"messages": [3]},
        {**CHAT, "temperature": "hot"},
        {**CHAT, "max_tokens": 5.5},
        {**CHAT, "max_tokens": True},
        {**CHAT, "stop": [1]},
        {**CHAT, "stream": "yes"},
        {**CHAT, "logit_bias": {"5": "much"}},
        {**CHAT, "quality": "best"},
        {**CHAT, "gate": 1.5},
        {**CHAT, "gate": -0.1},
        {**CHAT, "gate": "wide"},
        {**CHAT, "tools": "all"},
        {**CHAT, "seed": 2**80},
    ],
)
def test_bad_body__400_with_error_object(endpoint: Endpoint, body: object) -> None:
    status, answer = call(endpoint, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["moet_code"] in ("MD-API-04", "MD-API-05")
    assert answer["error"]["message"]


def test_large_body__413(engine: FakeEngine) -> None:
    endpoint = Endpoint(engine, EndpointOptions(port=0, max_body_bytes=1000))
    endpoint.start()
    try:
        status, answer = call(endpoint, {**CHAT, "user": "x" * 2000})
        assert (status, answer["error"]["moet_code"]) == (413, "MD-API-08")
        assert call(endpoint, CHAT)[0] == 200
    finally:
        endpoint.stop()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/health", 405)],
)
def test_unknown_address__error_object(
    endpoint: Endpoint, method: str, path: str, status: int
) -> None:
    got, answer = get(endpoint, path, method=method)
    assert got == status
    assert answer["error"]["moet_code"] == "MD-API-10"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("POST", "/v1/responses/resp_1", {"GET", "HEAD", "DELETE"}),
    ],
)
def test_wrong_method__says_what_is_allowed(
    endpoint: Endpoint, method: str, path: str, allowed: set[str]
) -> None:
    answer = httpx.request(method, endpoint.address + path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == allowed


def test_health__counts_requests(endpoint: Endpoint) -> None:
    status, answer = get(endpoint, "/health")
    assert status == 200
    assert (answer["status"], answer["requests_running"]) == ("ok", 0)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "["])
def test_foreign_host_name__403(endpoint: Endpoint, host: str) -> None:
    status, answer = get(endpoint, "/v1/models", extra=f"Host: {host}\r\n")
    assert (status, answer["error"]["moet_code"]) == (403, "MD-API-07")


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:1", "127.0.0.1:5", "[::1]:5", "127.1.2.3"]
)
def test_own_host_name__served(endpoint: Endpoint, host: str) -> None:
    assert get(endpoint, "/v1/models", extra=f"Host: {host}\r\n")[0] == 200


def test_foreign_page__403_and_no_cors_headers(endpoint: Endpoint, engine: FakeEngine) -> None:
    for origin in ("https://evil.example", "null"):
        status, answer = call(endpoint, CHAT, extra=f"Origin: {origin}\r\n")
        assert (status, answer["error"]["moet_code"]) == (403, "MD-API-09")
    assert engine.requests == []
    with connected(endpoint) as link:
        post(link, CHAT, extra="Origin: http://localhost:3000\r\n")
        assert b"access-control" not in read_until(link, b"\r\n\r\n").lower()
