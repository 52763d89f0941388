"""Tokenize, detokenize, metrics, and what errors must not tell."""

from __future__ import annotations

import re
import socket
from typing import Any

import httpx
import pytest

from moet_desk.api.bodies import anthropic_error_body, error_body
from moet_desk.api.guard import EndpointOptions
from moet_desk.api.metrics import metrics_text
from moet_desk.api.server import Endpoint
from moet_desk.engine.handle import GenerateRequest
from moet_desk.engine.scripted import Script, ScriptedEngine
from moet_desk.errors import CATALOGUE, fail
from moet_desk.telemetry import EngineSnapshot, EngineState, VramView
from tests.api.fakes import FakeEngine


def post(endpoint: Endpoint, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{endpoint.address}{path}", json=body)


def test_tokenize__and_back(endpoint: Endpoint) -> None:
    answer = post(endpoint, "/tokenize", prompt="tide").json()
    assert answer == {"count": 4, "max_model_len": 2048, "tokens": list(b"tide")}
    text = post(endpoint, "/detokenize", tokens=answer["tokens"]).json()
    assert text == {"prompt": "tide"}


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
    ],
)
def test_bad_body__names_the_parameter(
    endpoint: Endpoint, path: str, body: dict[str, Any], parameter: str
) -> None:
    answer = post(endpoint, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)


def test_metrics__every_line_is_well_formed_and_a_family_stands_once() -> None:
    engine = ScriptedEngine(Script(model='odd "name"\\'))
    engine.submit(GenerateRequest(prompt="hello there"))
    engine.advance(2.0)
    text = metrics_text(engine.snapshot())
    sample = re.compile(r'moet_desk_[a-z_]+(\{([a-z]+="(\\.|[^"\\])*",?)+\})? -?[0-9.e+-]+')
    families = re.findall(r"^# TYPE (\S+) (counter|gauge)$", text, re.MULTILINE)
    assert len(families) == len(set(families)) > 20
    for line in text.splitlines():
        assert line.startswith("# ") or sample.fullmatch(line), line
    assert 'model="odd \\"name\\"\\\\"' in text
    assert re.search(r"^moet_desk_tokens_total [1-9]", text, re.MULTILINE)
    assert len(re.findall(r"^moet_desk_state.* 1$", text, re.MULTILINE)) == 1
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in families)


def test_metrics__a_card__what_slots_take_of_it() -> None:
    text = metrics_text(EngineSnapshot(vram=VramView(free=7, slots=5, changes=3)))
    for name, value in (("slot_bytes", 5), ("vram_free_bytes", 7), ("slot_changes_total", 3)):
        assert re.search(rf"^moet_desk_{name} {value}$", text, re.MULTILINE), name
    assert "vram_free_bytes" not in metrics_text(EngineSnapshot())


def test_metrics__nothing_known_yet__is_left_out(endpoint: Endpoint) -> None:
    text = metrics_text(EngineSnapshot(state=EngineState.LOADING))
    assert "None" not in text
    assert "decode_tokens_per_second" not in text
    answer = httpx.get(f"{endpoint.address}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "moet_desk_requests_running 0" in answer.text


def test_metrics__want_the_key(engine: FakeEngine) -> None:
    endpoint = Endpoint(engine, EndpointOptions(port=0, key="s3cret"))
    endpoint.start()
    try:
        url = f"{endpoint.address}/metrics"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"x-api-key": "s3cret"}).status_code == 200
        assert httpx.get(url, headers={"x-api-key": "s3cre"}).status_code == 401
        bad = {"authorization": "Bearer no", "x-api-key": "s3cret"}
        assert httpx.get(url, headers=bad).status_code == 401
        refused = httpx.post(f"{endpoint.address}/v1/messages", json={}).json()
        assert refused["error"]["type"] == "authentication_error"
        assert "s3cret" not in str(refused)
    finally:
        endpoint.stop()


SECRET = "/home/someone/.local/share/moet-desk/models/x/experts.base"


@pytest.mark.parametrize("code", sorted(code for code, row in CATALOGUE.items() if row.http >= 500))
def test_error_of_ours__does_not_tell_where_files_are(code: str) -> None:
    facts = dict.fromkeys(("path", "log", "source", "dest"), SECRET)
    reason = f"OSError: [Errno 5] Input/output error: '{SECRET}'"
    error = fail(code, **facts, reason=reason, why=f" ({SECRET})")
    for body in (error_body(error)["error"], anthropic_error_body(error)["error"]):
        assert "someone" not in str(body)
        assert "/home" not in str(body)


def test_error_of_ours__keeps_its_words() -> None:
    error = fail("MD-ENG-04", reason="step 3/4 failed and/or stopped at 1.5 s", model="m")
    assert "step 3/4 failed and/or stopped at 1.5 s" in error_body(error)["error"]["message"]


def test_key__is_in_no_log_and_no_error(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    endpoint = Endpoint(engine, EndpointOptions(port=0, key="s3cret"))
    endpoint.start()
    engine.refusal = ZeroDivisionError("inside")
    try:
        headers = {"authorization": "Bearer s3cret"}
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        url = f"{endpoint.address}/v1/chat/completions?key=s3cret"
        answer = httpx.post(url, headers=headers, json=chat)
        assert answer.status_code == 500
        assert "s3cret" not in answer.text
    finally:
        endpoint.stop()
    ours = [record for record in caplog.records if record.name.startswith("moet_desk")]
    told = " ".join(f"{record.getMessage()} {record.exc_info}" for record in ours)
    assert "ZeroDivisionError" in told
    assert "s3cret" not in told


def test_body_that_does_not_come__ends_the_wait(engine: FakeEngine) -> None:
    endpoint = Endpoint(engine, EndpointOptions(port=0, body_timeout_s=0.2))
    endpoint.start()
    try:
        with socket.create_connection(("127.0.0.1", endpoint.options.port), timeout=5) as link:
            link.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                b'Content-Length: 500\r\n\r\n{"model"'
            )
            answer = link.recv(65536)
        assert answer.startswith(b"HTTP/1.1 400")
    finally:
        endpoint.stop()
    assert engine.requests == []
