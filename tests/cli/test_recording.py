"""Recordings on the command line: made beside an answer, found by name, and shown."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from moet_desk.cli import recording
from moet_desk.engine.trace_file import Asked, Said, read_trace
from moet_desk.errors import ExitCode, MoetError
from tests.cli.conftest import Command
from tests.cli.terminal import Terminal

F3, F12 = "\x1bOR", "\x1b[24~"


@pytest.mark.slow
def test_run__record_trace__the_question_and_its_answer_are_in_it(
    spawn: Command, tmp_path: Path
) -> None:
    path = tmp_path / "a.mdtrace"
    result = spawn("run", "demo", "Count.", "--record-trace", str(path), scripted=500)
    assert (result.code, result.out.startswith("one two")) == (0, True)
    assert "Recorded: " in result.err
    trace = read_trace(path)
    asked = [word for word in trace.words if isinstance(word, Asked)]
    said = "".join(word.text for word in trace.words if isinstance(word, Said))
    assert [word.text for word in asked] == ["Count."]
    assert said.strip() == result.out.strip()
    machine = trace.header.machine
    assert machine["gpu"] is None
    assert machine["cores"]


def test_run__record_trace_into_no_folder__refused_before_the_answer(
    moet: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moet_desk.cli import engine
    from moet_desk.cli.context import Invocation
    from moet_desk.engine.scripted import Script, ScriptedEngine

    monkeypatch.setattr(engine, "start_engine", lambda *_: ScriptedEngine(Script()).start())
    monkeypatch.setattr(Invocation, "model_path", lambda self, name: Path(name))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    path = tmp_path / "none" / "a.mdtrace"
    result = moet("run", "demo", "Hi", "--record-trace", str(path), "--json")
    assert (result.code, result.error_code) == (ExitCode.FAILED, "MD-TRACE-05")


def test_find_trace__no_name_name_and_file__or_what_there_is(tmp_path: Path) -> None:
    shipped = recording.shipped_traces()
    best = recording.find_trace("")
    assert recording.find_trace("demo").header.model.name == "demo"
    assert recording.find_trace(str(shipped["demo"])).header.model.name == "demo"
    assert best.header == recording.find_trace(sorted(shipped)[0]).header
    with pytest.raises(MoetError) as caught:
        recording.find_trace("nothing")
    assert caught.value.code == "MD-TRACE-01"
    assert "demo" in caught.value.do


def test_demo_trace__wrong_use__says_what_is_wrong(moet: Command, tmp_path: Path) -> None:
    assert moet("--demo-trace=demo", "ls").code == ExitCode.USAGE
    assert moet("--demo-trace", str(tmp_path / "none")).code == ExitCode.NOT_FOUND
    (tmp_path / "bad").write_bytes(b"nonsense")
    assert moet("--demo-trace", str(tmp_path / "bad")).code == ExitCode.DAMAGED
    no_terminal = moet("--demo-trace")
    assert no_terminal.code == ExitCode.USAGE
    assert "MD-TERM-03" in no_terminal.err


@pytest.mark.slow
def test_demo_trace__on_a_terminal__plays_and_leaves_no_chat(data_dir: Path) -> None:
    app = Terminal(data_dir, 0, arguments=["--demo-trace", "demo"])
    app.wait_for("Recording: demo")
    app.wait_for("tok/s")
    app.press(F3, until="hit %")
    app.press(F12, until="paused")
    assert app.quit() == 0
    assert not (data_dir / "chats.sqlite3").exists()
