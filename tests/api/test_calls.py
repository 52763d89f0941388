"""The list of calls: who, what, how far, and stopping one from outside."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from moet_desk.api.calls import client_name
from moet_desk.api.guard import EndpointOptions
from moet_desk.api.server import Endpoint
from moet_desk.engine.scripted import Script, ScriptedEngine
from moet_desk.telemetry import CallState, EndpointCall

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Endpoint]:
    script = Script(answers=("word " * 400,), tokens_per_s=200.0, prompt_tok_per_s=1e6)
    engine = ScriptedEngine(script).start()
    endpoint = Endpoint(engine, EndpointOptions(port=0, note=tmp_path / "run" / "endpoint.json"))
    endpoint.start()
    yield endpoint
    endpoint.stop()
    engine.close()


def wait_for(endpoint: Endpoint, state: CallState) -> EndpointCall:
    end = time.monotonic() + 10
    while endpoint.calls.views()[0].state is not state:
        assert time.monotonic() < end, endpoint.calls.views()[0]
        time.sleep(0.01)
    return endpoint.calls.views()[0]


def test_calls__an_answer__counted_while_written_and_after(served: Endpoint) -> None:
    base = f"{served.address}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="moet-demo", messages=HI, max_tokens=60, stream=True
        )
        next(iter(stream))
        now = served.calls.views()[0]
        assert now.goes_on
        assert (now.client, now.route) == ("OpenAI/Python", "chat, stream")
        assert (now.prompt_tokens, now.status, now.model) == (4, 200, "moet-demo")
        list(stream)
    done = wait_for(served, CallState.DONE)
    assert done.n_tokens == 60
    assert done.tok_per_s == pytest.approx(200, rel=0.5)
    assert done.first_s is not None
    assert done.queue_s is not None
    assert 0 <= done.queue_s <= done.first_s < done.total_s


def test_calls__refused__status_and_reason_in_the_list(served: Endpoint) -> None:
    body = {"model": "gpt-4o", "messages": HI}
    httpx.post(f"{served.address}/v1/chat/completions", json=body)
    call = wait_for(served, CallState.FAILED)
    assert (call.status, call.n_tokens) == (404, None)
    assert call.error.startswith("MD-API-02")
    assert "gpt-4o" in call.error
    httpx.get(f"{served.address}/v1/nothing", headers={"host": "evil.example"})
    assert wait_for(served, CallState.FAILED).error.startswith("MD-API-07")
    httpx.get(f"{served.address}/v1/models")
    assert wait_for(served, CallState.DONE).route == "/v1/models"
    httpx.get(f"{served.address}/health")
    assert len(served.calls.views()) == 3


def test_calls__stopped_here__client_is_told_and_nothing_runs_on(served: Endpoint) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"messages": HI}
        answers.append(httpx.post(f"{served.address}/v1/chat/completions", json=body))

    asking = threading.Thread(target=ask)
    asking.start()
    end = time.monotonic() + 10
    while not served.calls.views() or served.calls.views()[0].state is not CallState.WRITING:
        assert time.monotonic() < end
        time.sleep(0.01)
    number = served.calls.views()[0].number
    assert served.calls.stop(number)
    asking.join(10)
    assert answers[0].status_code == 500
    assert answers[0].json()["error"]["code"] == "MD-ENG-04"
    stopped = wait_for(served, CallState.STOPPED)
    assert 0 < (stopped.n_tokens or 0) < 400
    assert not served.calls.stop(number)
    assert not served.calls.stop(99)


def test_calls__client_hangs_up__stopped(served: Endpoint) -> None:
    body = {"messages": HI, "stream": True}
    with httpx.stream("POST", f"{served.address}/v1/chat/completions", json=body) as stream:
        next(stream.iter_bytes())
    stopped = wait_for(served, CallState.STOPPED)
    assert stopped.route == "chat, stream"
    assert (stopped.n_tokens or 0) < 400  # the whole answer


def test_note__says_where_it_listens_while_it_does(served: Endpoint, tmp_path: Path) -> None:
    note = tmp_path / "run" / "endpoint.json"
    assert json.loads(note.read_text())["address"] == served.address
    served.stop()
    assert not note.exists()


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("curl/8.5.0", "curl"),
        ("OpenAI/Python 1.66", "OpenAI/Python"),
        ("opencode/v0.3 ai-sdk/4", "opencode"),
        ("", "?"),
        ("plain", "plain"),
        ("x" * 80, "x" * 24),
    ],
)
def test_client_name__the_product_without_its_version(agent: str, name: str) -> None:
    assert client_name(agent) == name
