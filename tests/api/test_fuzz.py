"""Whatever is sent to whatever address: an answer or an error object, never a 500, never a hang.

The application is called in-process, with an engine whose answers are ready at once.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet_desk.api.app import build_app
from moet_desk.api.calls import Calls
from moet_desk.api.guard import EndpointOptions
from moet_desk.store.responses import ResponseStore
from tests.api.fakes import InstantEngine

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
TURN = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
COMMON = {
    "model": "fake", "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stream": True, "seed": 1,
    "quality": "fast", "gate": 0.5,
}  # fmt: skip
MORE = {
    "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
    "logit_bias": {"5": 1}, "stop": ["x"], "n": 2, "max_tokens": 5,
    "stream_options": {"include_usage": True}, "ignore_eos": True,
}  # fmt: skip

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **COMMON, **MORE,
        "messages": [
            {"role": "developer", "content": "d"}, TURN, CALLED,
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]},
        ],
        "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 6, "tools": [TOOL],
        "tool_choice": "auto", "parallel_tool_calls": False, "response_format": {"type": "text"},
        "reasoning_effort": "none", "chat_template_kwargs": {}, "modalities": ["text"],
    },
    "/v1/completions": {
        **COMMON, **MORE, "prompt": ["a", "b"], "logprobs": 1, "echo": False, "best_of": 2,
    },
    "/v1/messages": {
        **COMMON, "max_tokens": 5, "system": [{"type": "text", "text": "s"}],
        "messages": [
            TURN,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "r"},
                {"type": "text", "text": "x"},
            ]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5}, "stop_sequences": ["x"],
        "output_config": {"effort": "low"}, "metadata": {"user_id": "u"},
    },
    "/v1/messages/count_tokens": {"model": "fake", "messages": [TURN], "system": "s"},
    "/v1/responses": {
        **COMMON, "instructions": "i", "max_output_tokens": 5, "store": False,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "summary": [], "content": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": None}, {"type": "web_search"}],
        "tool_choice": "auto", "include": ["message.output_text.logprobs"], "top_logprobs": 1,
        "reasoning": {"effort": "none"}, "text": {"format": {"type": "text"}},
        "truncation": "auto", "metadata": {"a": "b"}, "previous_response_id": None,
    },
    "/tokenize": {"prompt": "x", "model": "fake"},
    "/detokenize": {"tokens": [1, 2, 3]},
}  # fmt: skip

JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, "", "x",
    "\u0000", "é", "\ufdd0", "<|end|>", "none", "auto", "tool", "max", "9" * 30, [], {}, [[]],
    [None], [{}], {"": None}, {"type": "text"}, {"type": "text", "text": 3}, IMAGE, TURN, CALLED,
    ["a"] * 40, [0] * 40, "x" * 3000, {"type": "json_schema"}, {"type": "function"}, CALL,
]  # fmt: skip


async def call(app: Any, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of one call; the client stays until the end."""
    got: list[Any] = []
    pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if not pieces:
            await asyncio.Event().wait()
        return pieces.pop()

    async def send(message: Any) -> None:
        got.append(message)

    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "query_string": b"",
        "raw_path": path.encode("utf-8", "surrogatepass"), "root_path": "", "scheme": "http",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    async with asyncio.timeout(5):
        await app(scope, receive, send)
    assert not got[-1].get("more_body")
    return got[0]["status"], b"".join(message.get("body", b"") for message in got)


def check(path: str, status: int, body: bytes) -> None:
    """An answer that is whole, or an error object in the address's protocol."""
    assert status in (200, 400, 404, 405), (status, body)
    if status == 200 and body.startswith((b"data: ", b"event: ")):
        last = body.rstrip().rsplit(b"\n\n", 1)[-1]
        ends = (b"data: [DONE]", b"event: message_stop", b"event: response.")
        assert last.startswith(ends), last
        assert b'"error":{' not in body
        return
    answer = json.loads(body)
    if status != 200:
        error = answer["error"]
        assert error["message"]
        assert error["moet_code"].startswith("MD-API-"), answer
        assert (answer.get("type") == "error") == path.startswith("/v1/messages")


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a value with each of its keys."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(inner):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def mutated(choose: random.Random, body: dict[str, Any]) -> bytes:
    """A body with some values replaced, left out or added, or with damaged bytes."""
    body = copy.deepcopy(body)
    for key in choose.sample(list(body), choose.randrange(len(body))):
        del body[key]
    for _ in range(choose.randrange(1, 4)):
        spots = list(places(body))
        if not spots:
            break
        container, key = choose.choice(spots)
        kind = choose.random()
        if kind < 0.1:
            del container[key]
        elif kind < 0.2 and isinstance(container, list):
            container.insert(key, copy.deepcopy(choose.choice(JUNK)))
        else:
            container[key] = copy.deepcopy(choose.choice(JUNK))
    data = bytearray(json.dumps(body).encode())
    if choose.random() < 0.2:
        for _ in range(choose.randrange(1, 4)):
            at = choose.randrange(len(data) + 1)
            data[at : at + choose.randrange(3)] = choose.randbytes(choose.randrange(3))
    return bytes(data)


def run_mutations(n: int, seed: int) -> dict[int, int]:
    """Send damaged bodies; returns how often each status came."""
    engine = InstantEngine("One two.", CALL)
    app = build_app(engine, EndpointOptions(), ResponseStore(), Calls())
    choose = random.Random(seed)
    seen: dict[int, int] = {}

    async def main() -> None:
        for i in range(n):
            path = list(BODIES)[i % len(BODIES)]
            body = mutated(choose, BODIES[path])
            try:
                status, answer = await call(app, "POST", path, body)
                check(path, status, answer)
            except BaseException as error:
                raise AssertionError(f"{path} {body!r}") from error
            seen[status] = seen.get(status, 0) + 1

    asyncio.run(main())
    assert engine.busy == 0
    return seen


def test_valid_bodies__are_answered() -> None:
    app = build_app(InstantEngine("One two.", CALL), EndpointOptions(), ResponseStore(), Calls())

    async def main() -> None:
        for path, body in BODIES.items():
            for stream in (True, False):
                given = {**body, "stream": stream} if "stream" in body else body
                status, answer = await call(app, "POST", path, json.dumps(given).encode())
                assert status == 200, (path, answer)
                check(path, status, answer)

    asyncio.run(main())


def test_damaged_bodies__some() -> None:
    seen = run_mutations(700, seed=1)
    assert seen[200] > 30  # else nothing gets behind the checks
    assert seen[400] > 300


@pytest.mark.slow
def test_damaged_bodies__ten_thousand() -> None:
    seen = run_mutations(10_000, seed=2)
    assert seen[200] > 500
    assert seen[400] > 5_000


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """A method, an address and a body: often ones that fit, with values of any kind."""
    path = draw(
        st.sampled_from([*BODIES, "/v1/models", "/health", "/metrics"]) | st.text(max_size=20)
    )
    method = draw(st.sampled_from(["POST", "POST", "POST", "GET", "DELETE", "PUT", "HEAD"]))
    known = BODIES.get(path, {})
    if not known or draw(st.integers(0, 9)) == 0:
        return method, path, draw(st.binary(max_size=40))
    body = dict(known)
    for name in draw(st.lists(st.sampled_from(list(known)), max_size=3, unique=True)):
        body[name] = draw(VALUES)
    for name in draw(st.lists(st.sampled_from(list(known)), max_size=3, unique=True)):
        body.pop(name, None)
    return method, path, json.dumps(body).encode()


@given(calls())
@settings(max_examples=120, deadline=None)
def test_any_call__answer_or_error_object(given_call: tuple[str, str, bytes]) -> None:
    method, path, body = given_call
    app = build_app(InstantEngine(), EndpointOptions(), ResponseStore(), Calls())
    status, answer = asyncio.run(call(app, method, path, body))
    if method == "HEAD" or path == "/metrics":
        assert status in (200, 404, 405)
    else:
        check(path, status, answer)
