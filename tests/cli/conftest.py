"""Commands run in this process or in one of their own, on a data folder of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from moet_desk import cli
from tests.store.hub_server import HubServer, Repo

ROOT = Path(__file__).resolve().parents[2]
SCRIPTED = Path(__file__).with_name("scripted_main.py")

HubOf = Callable[[str, Path], HubServer]

ON_CPU = {"MOET_DESK_ENGINE_DEVICE": "cpu"}
"""These suites test the CPU engine, also where there is a GPU."""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON document on stdout; there must be nothing else."""
        return json.loads(self.out)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error_code(self) -> str:
        code: str = self.document["error"]["code"]
        return code


Command = Callable[..., Result]


def environment(data_dir: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if "MOET_DESK" not in name}
    paths = os.pathsep.join([str(ROOT), *filter(None, [clean.get("PYTHONPATH")])])
    ours = {"MOET_DESK_DATA_DIR": str(data_dir), **ON_CPU}
    return {**clean, "PYTHONPATH": paths, "TERM": "xterm", **ours}


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    monkeypatch.setenv("MOET_DESK_DATA_DIR", str(folder))
    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def hub_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubOf]:
    """Starts a hub on localhost that has one repository, and is the program's hub from then on."""
    started = []

    def start(name: str, source: Path) -> HubServer:
        server = HubServer()
        started.append(server)
        server.repos[name] = Repo(source)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture
def moet(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process."""

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        code = cli.main(arguments)
        printed = capsys.readouterr()
        return Result(int(code), printed.out, printed.err)

    return call


@pytest.fixture
def spawn(data_dir: Path) -> Command:
    """Run a command in a process of its own and wait for its end."""

    def call(*arguments: str, stdin: str = "", scripted: float = 0) -> Result:
        start = [str(SCRIPTED), str(scripted)] if scripted else ["-m", "moet_desk"]
        ended = subprocess.run(
            [sys.executable, *start, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            env=environment(data_dir),
            timeout=60,
        )
        return Result(ended.returncode, ended.stdout, ended.stderr)

    return call
