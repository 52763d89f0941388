"""From the flag and the setting to the engine's options, and what a record of bench says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet_desk.cli import bench
from moet_desk.cli.context import Invocation
from moet_desk.engine.handle import EngineHandle, EngineOptions
from moet_desk.engine.scripted import Script, ScriptedEngine
from moet_desk.errors import ExitCode
from moet_desk.telemetry import CPU
from tests.cli.conftest import Command


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The devices that engines were asked for."""
    devices: list[str] = []

    def start_engine(pack: Path, options: EngineOptions | None = None) -> EngineHandle:
        assert options is not None
        devices.append(options.device)
        script = Script(answers=("Yes.",), tokens_per_s=1e6, prompt_tok_per_s=1e6)
        return ScriptedEngine(script).start()

    monkeypatch.setattr("moet_desk.cli.engine.start_engine", start_engine)
    monkeypatch.setattr("moet_desk.engine.handle.start_engine", start_engine)
    monkeypatch.setattr(Invocation, "model_path", lambda self, name: tmp_path / name)
    return devices


def test_run__nobody_says__auto(
    moet: Command, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOET_DESK_ENGINE_DEVICE")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert moet("run", "demo", "Hi").code == 0
    assert asked == ["auto"]


def test_run__flag__wins_over_the_setting(
    moet: Command, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOET_DESK_ENGINE_DEVICE")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert moet("config", "set", "engine.device", "cpu").code == 0
    moet("run", "demo", "Hi")
    moet("run", "demo", "Hi", "--device", "cuda")
    assert asked == ["cpu", "cuda"]


def test_bench__flag__reaches_the_engine(
    moet: Command, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_measure", lambda *_: None)
    monkeypatch.setattr(bench, "_record", lambda *_: {})
    result = moet("bench", "--no-pack", "--device", "cuda", "--json")
    assert (result.code, asked) == (0, ["cuda"])


@pytest.mark.parametrize("command", ["run", "serve", "bench"])
def test_device__unknown__usage_error(moet: Command, command: str) -> None:
    result = moet(command, "demo", "--device", "tpu")
    assert result.code == ExitCode.USAGE
    assert "auto" in result.err


def test_bench__shape_and_device__refused(moet: Command) -> None:
    result = moet("bench", "--shape", "gpt-oss-120b", "--device", "cuda")
    assert result.code == ExitCode.USAGE
    assert "--device cannot be used with --shape" in result.err


def test_bench__record__names_the_card_only_if_there_was_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "driver", lambda: "580.1")
    assert bench._card("NVIDIA X") == {"gpu": "NVIDIA X", "driver": "580.1"}
    assert bench._card(CPU) == {}
