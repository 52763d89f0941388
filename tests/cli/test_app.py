"""The app on a real terminal, from its very first start."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import httpx
import pytest

from moet_desk.errors import ExitCode
from tests.cli.conftest import Command
from tests.cli.terminal import DOWN, END, ENTER, ESCAPE, F2, F4, F7, HOME, RIGHT, Terminal
from tests.cli.tiny_repo import write_repo
from tests.store.hub_server import Fault, HubServer, Repo

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def to_the_models(app: Terminal) -> None:
    app.wait_for("What this computer has")
    app.press(ENTER, until="It needs no network")


def ask(app: Terminal, text: str) -> None:
    app.child.send(text)
    app.wait_for(text)
    app.press(ENTER, until="tok/s")


def test_first_start__enter_alone__answers_serves_and_closes(
    data_dir: Path, spawn: Command
) -> None:
    port = free_port()
    app = Terminal(data_dir, port)
    to_the_models(app)
    app.press(ENTER, until="How Demo model will live")
    app.press(ENTER, until="demo is ready")
    ask(app, "Say hello.")
    health = httpx.get(f"http://127.0.0.1:{port}/health").json()
    assert (health["status"], health["model"]) == ("ok", "demo")

    second = spawn("serve", "--port", "0", "--json")
    assert (second.code, second.error_code) == (ExitCode.BUSY, "MD-ENG-01")

    app.press(F4, until="● loaded")
    app.press("v", until="verify")
    app.wait_for("done")
    app.press(F7, until=" ok, ")
    app.press(F2, until="Say hello.")
    assert app.quit() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")
    assert spawn("ls", "--json").document["models"][0]["state"] == "ready"

    again = Terminal(data_dir, port)  # no wizard: the model that was used last
    again.wait_for("demo is ready")
    assert again.quit() == 0


def test_wizard__closed_window__goes_on_where_it_was(data_dir: Path) -> None:
    app = Terminal(data_dir, 0)
    to_the_models(app)
    app.press(ENTER, until="[3 Plan]")
    app.press(DOWN, DOWN, RIGHT, until="balanced")
    app.kill()
    again = Terminal(data_dir, 0)
    again.wait_for("[3 Plan]")
    again.wait_for("balanced")
    again.press(ENTER, until="demo is ready")
    assert "balanced" in again.text
    assert again.quit() == 0


def test_pull__window_closed_meanwhile__job_goes_on_and_the_model_answers(
    data_dir: Path, tmp_path: Path, spawn: Command
) -> None:
    hub = HubServer()
    try:
        write_repo(tmp_path / "tiny")
        hub.repos["test/tiny"] = Repo(tmp_path / "tiny")
        hub.faults = lambda path, n: Fault("slow", seconds=0.01) if "00001" in path else None
        more = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1"}
        app = Terminal(data_dir, 0, more)
        to_the_models(app)
        app.press(END, ENTER, until="owner/name")
        app.child.send("test/tiny")
        app.wait_for("test/tiny")
        app.press(ENTER, until="3 MoE layers x 8 experts")
        app.press(ENTER, until="How tiny will live")
        app.press(ENTER, until="[4 Get and pack]")
        app.wait_for("Download")
        app.kill()

        jobs = json.loads(spawn("ps", "--json").out)["jobs"]
        assert [job["model"] for job in jobs] == ["tiny"]
        again = Terminal(data_dir, 0, more)
        again.wait_for("tiny is ready")
        ask(again, "Hello")  # random weights talk until the context is full
        again.press(ESCAPE, until="stopped by you")
        again.press(F4, until="● loaded")
        assert again.quit() == 0
    finally:
        hub.close()
    assert spawn("ls", "--json").document["models"][0]["name"] == "tiny"


def test_pull__demo_checkpoint_as_a_repository__added_beside_the_demo(
    data_dir: Path, spawn: Command
) -> None:
    from moet_desk.store.library import embedded_source

    assert spawn("pack", "demo").code == 0
    hub = HubServer()
    try:
        hub.repos["test/other"] = Repo(embedded_source())
        app = Terminal(data_dir, 0, {"HF_ENDPOINT": hub.url})
        app.wait_for("demo is ready")
        app.press(F4, until="deepseek_v3")
        app.press("a", until="Which model?")
        app.wait_for("OLMoE")
        app.press(END, until="From Hugging Face")
        app.press(ENTER, until="owner/name")
        app.child.send("test/other")
        app.press(ENTER, until="9 MoE layers x 32 experts")
        app.press(ENTER, until="How other will live")
        app.press(ENTER, until="other is ready")
        ask(app, "What is 17 + 25?")
        app.press(F4, until="● loaded")
        app.press(HOME, "d", until="Delete demo?")
        app.press(RIGHT, ENTER, until="free again")
        assert app.quit() == 0
    finally:
        hub.close()
    time.sleep(0.1)
    assert [m["name"] for m in spawn("ls", "--json").document["models"]] == ["other"]
