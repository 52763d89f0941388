from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from moet_desk.cli.context import Invocation
from moet_desk.cli.serve import _serve_until
from moet_desk.engine.handle import EngineOptions, GenerateRequest
from moet_desk.engine.scripted import Script, ScriptedEngine, ScriptedFailure
from moet_desk.errors import ExitCode, MoetError, fail
from tests.cli.conftest import SCRIPTED, Command, environment


@contextmanager
def serving(data_dir: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    command = [sys.executable, str(SCRIPTED), "200", "serve", "--format", "ndjson", *options]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(data_dir),
    ) as child:
        try:
            assert child.stdout is not None
            yield child, json.loads(child.stdout.readline())
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)],
)
def test_serve__answers_until_a_signal_ends_it(
    data_dir: Path, number: signal.Signals, code: ExitCode
) -> None:
    with serving(data_dir, "--port", "0") as (child, ready):
        assert (ready["event"], ready["model"], ready["pid"]) == ("ready", "demo", child.pid)
        with openai.OpenAI(base_url=ready["address"], api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "hi"}], max_tokens=3
            )
            assert answer.choices[0].message.content == "one two three"
        child.send_signal(number)
        assert child.wait(20) == code
        assert child.stderr is not None
        words = child.stderr.read()
        assert "Stopped." in words
        assert "Traceback" not in words
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{ready['address']}/models")


def test_serve__suspended_in_an_answer__the_rest_comes_when_it_wakes(data_dir: Path) -> None:
    with serving(data_dir, "--port", "0") as (child, ready):
        url, pieces = f"{ready['address']}/chat/completions", []
        ask = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        with httpx.Client(timeout=30) as http, http.stream("POST", url, json=ask) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"] or [{"delta": {}}]
                    pieces.append(choice["delta"].get("content") or "")
                if len(pieces) == 5:
                    child.send_signal(signal.SIGSTOP)
                    time.sleep(0.3)
                    child.send_signal(signal.SIGCONT)
        whole = "one two three four five six seven eight nine ten " * 5
        assert "".join(pieces).strip() == whole.strip()


def test_serve__model_put_away_and_loaded_again__the_port_stays(data_dir: Path) -> None:
    with serving(data_dir, "--port", "0") as (_, ready), httpx.Client(timeout=20) as http:
        address, ask = ready["address"], {"messages": [{"role": "user", "content": "hi"}]}
        gone = http.post(f"{address}/models/demo/unload")
        assert (gone.status_code, gone.json()["state"]) == (200, "no model")
        refused = http.post(f"{address}/chat/completions", json=ask)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert http.get(f"{address}/models").json()["data"] == []
        assert http.get(address.removesuffix("/v1") + "/health").json()["state"] == "no model"
        back = http.post(f"{address}/models/demo/load")
        assert (back.status_code, back.json()["id"]) == (200, "demo")
        answer = http.post(f"{address}/chat/completions", json={**ask, "max_tokens": 2})
        assert answer.json()["choices"][0]["message"]["content"]


def test_serve__device__goes_to_the_engine(
    moet: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices: list[str] = []

    def start_engine(pack: Path, options: EngineOptions) -> None:
        devices.append(options.device)
        raise fail("MD-GPU-01", reason="the driver shows none")

    monkeypatch.setattr("moet_desk.engine.handle.start_engine", start_engine)
    monkeypatch.setattr(Invocation, "model_path", lambda self, name: tmp_path / name)
    result = moet("serve", "--port", "0", "--device", "cuda")
    assert (result.code, devices) == (ExitCode.UNFIT, ["cuda"])
    assert "MD-GPU-01" in result.err


def test_serve__second_instance__exit_8_with_the_pid(data_dir: Path, spawn: Command) -> None:
    with serving(data_dir, "--port", "0") as (child, _):
        second = spawn("serve", "--port", "0", "--json", scripted=100)
        assert (second.code, second.error_code) == (ExitCode.BUSY, "MD-ENG-01")
        assert str(child.pid) in second.err
        beside = spawn("run", "hi", scripted=1000)
        assert (beside.code, beside.err) == (0, "")


def test_serve__port_in_use__exit_8_with_another_port(spawn: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = spawn("serve", "--port", str(port), "--json", scripted=100)
    assert (result.code, result.error_code) == (ExitCode.BUSY, "MD-API-01")
    assert result.document["error"]["next_port"] > port


def test_serve__network_without_key__exit_2(spawn: Command) -> None:
    result = spawn("serve", "--host", "0.0.0.0", "--port", "0", "--json", scripted=100)
    assert (result.code, result.error_code) == (ExitCode.USAGE, "MD-API-06")


def test_serve__card_lost__ends_with_that_error_and_its_facts() -> None:
    lost = ScriptedFailure("MD-GPU-07", {"name": "NVIDIA X", "reason": "gone"}, ends_engine=True)
    engine = ScriptedEngine(Script(failures={0: lost}, prompt_tok_per_s=1e6))
    engine.advance(1)
    engine.submit(GenerateRequest(prompt="Hi"))
    engine.advance(1)
    with pytest.raises(MoetError) as caught:
        _serve_until(engine, threading.Event())
    assert caught.value.code == "MD-GPU-07"
    assert caught.value.cause == "NVIDIA X: gone."
