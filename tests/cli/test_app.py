"""The app on a real terminal, from its very first start."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import httpx
import pexpect
import pyte
import pytest

from moet_desk.errors import ExitCode
from tests.cli.conftest import Command, environment

pytestmark = pytest.mark.slow


class Terminal:
    """The app in a terminal of 80 x 24."""

    def __init__(self, data_dir: Path, port: int) -> None:
        variables = environment(data_dir) | {
            "LANG": "C.UTF-8",
            "MOET_DESK_ENDPOINT_PORT": str(port),
        }
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "moet_desk"],
            env=variables,  # type: ignore[arg-type]
            dimensions=(24, 80),
            encoding="utf-8",
        )
        self._screen = pyte.Screen(80, 24)
        self._stream = pyte.Stream(self._screen)

    def wait_for(self, text: str, timeout_s: float = 40) -> None:
        """Draw what comes until `text` is on the screen."""
        end = time.monotonic() + timeout_s
        while not any(text in line for line in self._screen.display):
            assert time.monotonic() < end, "\n".join(self._screen.display)
            try:
                self._stream.feed(self.child.read_nonblocking(65536, 0.1))
            except pexpect.TIMEOUT:
                continue


def test_first_start__packs_chats_serves_and_closes(data_dir: Path, spawn: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    app = Terminal(data_dir, port)
    app.wait_for("packing the model")
    app.wait_for("demo is ready")

    app.child.send("Say hello.")
    app.wait_for("Say hello.")
    app.child.send("\r")
    app.wait_for("tok/s")
    health = httpx.get(f"http://127.0.0.1:{port}/health").json()
    assert (health["status"], health["model"]) == ("ok", "demo")

    second = spawn("serve", "--port", "0", "--json")
    assert (second.code, second.error_code) == (ExitCode.BUSY, "MD-ENG-01")

    app.child.sendcontrol("q")
    app.child.expect(pexpect.EOF, timeout=20)
    app.child.close()
    assert app.child.exitstatus == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")
    assert spawn("ls", "--json").document["models"][0]["state"] == "ready"
