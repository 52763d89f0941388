"""The endpoint beside the app: on and off, from one model to the next, and where others find it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from moet_desk.api.guard import EndpointOptions
from moet_desk.cli.app_endpoint import AppEndpoint
from moet_desk.cli.launch import noted_address
from moet_desk.engine.handle import EngineHandle
from moet_desk.engine.scripted import Script, ScriptedEngine
from moet_desk.telemetry import EndpointState
from tests.cli.conftest import Command

HI = {"messages": [{"role": "user", "content": "hi"}]}


def model(name: str) -> ScriptedEngine:
    return ScriptedEngine(Script(answers=("Hello.",), tokens_per_s=1e4, model=name)).start()


def wait_for(endpoint: AppEndpoint, state: EndpointState) -> None:
    end = time.monotonic() + 20
    while endpoint.view().state is not state:
        assert time.monotonic() < end, endpoint.view()
        time.sleep(0.01)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[AppEndpoint, EngineHandle]]:
    endpoint = AppEndpoint(EndpointOptions(port=0, note=tmp_path / "data/run/endpoint.json"))
    assert endpoint.view().state is EndpointState.WAITS
    served = endpoint.serve(model("one"))
    wait_for(endpoint, EndpointState.RUNNING)
    yield endpoint, served
    served.close()


def test_off_and_on__address_stays_and_so_do_the_calls(
    opened: tuple[AppEndpoint, EngineHandle],
) -> None:
    endpoint, _ = opened
    address = endpoint.view().address
    assert httpx.post(f"{address}/v1/chat/completions", json=HI).status_code == 200
    endpoint.stop()
    assert endpoint.view().state is EndpointState.OFF
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")
    endpoint.start()
    assert endpoint.view().state is EndpointState.RUNNING
    assert endpoint.view().address == address
    assert httpx.get(f"{address}/health").json()["model"] == "one"
    assert [call.route for call in endpoint.view().calls] == ["chat"]
    assert not endpoint.stop_call(1)


def test_next_model__served_at_the_same_address__unless_it_is_off(
    opened: tuple[AppEndpoint, EngineHandle],
) -> None:
    endpoint, first = opened
    address = endpoint.view().address
    first.close()
    assert endpoint.view().state is EndpointState.WAITS
    second = endpoint.serve(model("two"))
    wait_for(endpoint, EndpointState.RUNNING)
    assert httpx.get(f"{address}/health").json()["model"] == "two"
    endpoint.stop()
    second.close()
    third = endpoint.serve(model("three"))
    time.sleep(0.2)
    assert endpoint.view().state is EndpointState.OFF
    third.close()


def test_port_in_use__the_view_says_so__and_it_can_be_tried_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = AppEndpoint(EndpointOptions(port=taken.getsockname()[1]))
        served = endpoint.serve(model("one"))
        wait_for(endpoint, EndpointState.FAILED)
        error = endpoint.view().error
        assert error is not None
        assert error["code"] == "MD-API-01"
    endpoint.start()
    assert endpoint.view().state is EndpointState.RUNNING
    assert endpoint.view().error is None
    served.close()


def test_launch__free_port__the_real_one_is_used(
    opened: tuple[AppEndpoint, EngineHandle], moet: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOET_DESK_ENDPOINT_PORT", "0")
    shown = moet("launch", "codex", "--json").document
    assert shown["endpoint_answers"] is True
    [config] = shown["files"].values()
    assert f'base_url = "{opened[0].view().address}/v1"' in config
    assert 'model = "one"' in config


def test_noted_address__no_note_a_broken_one_or_a_dead_process__none(tmp_path: Path) -> None:
    note = tmp_path / "endpoint.json"
    assert noted_address(note) is None
    for text in ("", "{", "[]", "{}", '{"pid": "x", "address": "a"}', '{"pid": 9999999999}'):
        note.write_text(text)
        assert noted_address(note) is None
    note.write_text(f'{{"pid": {os.getpid()}, "address": "http://h:1"}}')
    assert noted_address(note) == "http://h:1"
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    note.write_text(f'{{"pid": {ended.pid}, "address": "http://h:1"}}')
    assert noted_address(note) is None
