"""`chat --connect`: keys are kept and never shown; the app itself on another server."""

from __future__ import annotations

import fcntl
import io
import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from moet_desk.api.guard import EndpointOptions
from moet_desk.api.server import Endpoint
from moet_desk.engine.remote_wire import Server
from moet_desk.errors import ExitCode
from moet_desk.store.chats import ChatStore, Window
from tests.api.fakes import FakeEngine
from tests.cli.conftest import Command
from tests.cli.terminal import ENTER, F2, F3, Terminal

KEY = "sk-topsecret"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Server, str | None]]:
    """What the app would have been opened on."""
    from moet_desk.cli import app
    from moet_desk.engine import remote

    seen: list[tuple[Server, str | None]] = []
    monkeypatch.setattr(remote, "connect", lambda server, model: seen.append((server, model)))
    monkeypatch.setattr(app, "open_connected", lambda _invocation, connect: connect() or 0)
    monkeypatch.delenv("MOET_DESK_CONNECT_KEY", raising=False)
    return seen


def test_key__asked_for_kept_for_that_server_alone_and_forgotten(
    moet: Command,
    data_dir: Path,
    opened: list[tuple[Server, str | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chat(address: str, *more: str, typed: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        shown = moet("chat", "--connect", address, *more)
        assert shown.code == 0, shown.err
        assert KEY not in shown.out + shown.err
        return opened[-1][0].key

    assert chat("http://desk:8000", "--ask-key", typed=f"{KEY}\n") == KEY
    file = data_dir / "server-keys.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert chat("http://desk:8000/v1/") == KEY
    for other in ("http://desk:8001", "https://desk:8000", "http://desk2:8000"):
        assert chat(other) == ""
    monkeypatch.setenv("MOET_DESK_CONNECT_KEY", "from-the-environment")
    assert chat("http://desk:8000") == "from-the-environment"
    assert moet("config", "list").code == 0  # the variable is no unknown setting
    monkeypatch.delenv("MOET_DESK_CONNECT_KEY")

    file.chmod(0o640)
    refused = moet("chat", "--connect", "http://desk:8000")
    assert (refused.code, "MD-CONN-07" in refused.err) == (ExitCode.USAGE, True)
    file.chmod(0o600)
    assert chat("http://desk:8000", "--ask-key", typed="\n") == ""
    assert json.loads(file.read_text())["keys"] == {}


def test_key__over_a_network_without_encryption__is_said(
    moet: Command, opened: list[tuple[Server, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOET_DESK_CONNECT_KEY", KEY)
    for address, said in (
        ("http://desk:80", True),
        ("https://desk", False),
        ("http://[::1]:1", False),
    ):
        shown = moet("chat", "--connect", address, "--model", "m")
        assert ("without encryption" in shown.err) is said
        assert KEY not in shown.err
    assert opened[-1][1] == "m"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "m"),
        ("--ask-key",),
        ("--connect", "desk"),
        ("--connect", "https://me:secret@desk"),
    ],
)
def test_usage__refused(moet: Command, arguments: tuple[str, ...]) -> None:
    shown = moet("chat", *arguments)
    assert (shown.code, "MD-CLI-01" in shown.err) == (ExitCode.USAGE, True)
    assert "secret" not in shown.err


def test_key__with_other_characters__is_refused(
    moet: Command, opened: list[tuple[Server, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOET_DESK_CONNECT_KEY", "a\nHost: b")
    assert moet("chat", "--connect", "http://desk").code == ExitCode.USAGE
    assert not opened


def test_no_terminal__says_what_to_use(moet: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "MD-TERM-03" in moet("chat", "--connect", "http://desk").err
    assert "MD-TERM-03" in moet("chat").err


@pytest.fixture
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    endpoint = Endpoint(engine, EndpointOptions(port=0, key=KEY))
    endpoint.start()
    yield engine, endpoint.address
    endpoint.stop()


@pytest.mark.slow
def test_app__on_another_server__chats_beside_one_of_this_computer(
    data_dir: Path, served: tuple[FakeEngine, str]
) -> None:
    engine, address = served
    engine.answer("Written ", "elsewhere.")
    (data_dir / "run").mkdir(parents=True)
    with (data_dir / "run" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # an engine runs on this data folder
        more = {"MOET_DESK_CONNECT_KEY": KEY}
        app = Terminal(data_dir, 0, more, arguments=("chat", "--connect", address))
        app.wait_for("fake is ready")
        app.child.send("Hello")
        app.press(ENTER, until="Written elsewhere.")
        app.press(F3, until="No experts here")
        app.press(F2, until="Written elsewhere.")
        app.press("\x0e", until="fake is ready")  # Ctrl+N
        app.child.send("unsent")
        app.wait_for("unsent")
        assert app.quit() == 0
    assert ChatStore.open(data_dir / "chats.sqlite3").new_draft()[0] == ""
    kept = ChatStore.open(data_dir / "chats.sqlite3", window=Window.CONNECTED).new_draft()
    assert kept[0] == "unsent"
    for file in data_dir.rglob("*"):
        if file.is_file():
            assert KEY.encode() not in file.read_bytes(), file
    assert (data_dir / "logs" / "connected.log").is_file()


@pytest.mark.slow
def test_app__nobody_answers__says_so_in_the_terminal(data_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    app = Terminal(data_dir, 0, arguments=("chat", "--connect", f"http://127.0.0.1:{port}"))
    assert app.ended() == ExitCode.NETWORK
    assert "MD-CONN-01" in app.text
