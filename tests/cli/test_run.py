from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest

from moet_desk.cli.context import Invocation
from moet_desk.engine.handle import (
    EngineHandle,
    EngineOptions,
    GenerateRequest,
    Quality,
    RequestStream,
)
from moet_desk.engine.scripted import Script, ScriptedEngine, ScriptedFailure
from moet_desk.errors import ExitCode
from tests.cli.conftest import SCRIPTED, Command, environment


class Recorder:
    """Plays a script in a new engine for each command, and keeps what it was asked."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.n_open = 0

    def start(self) -> EngineHandle:
        self.n_open += 1
        return _Recorded(self).start()


class _Recorded(ScriptedEngine):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.script)
        self._recorder = recorder

    def submit(self, request: GenerateRequest) -> RequestStream:
        self._recorder.requests.append(request)
        return super().submit(request)

    def close(self) -> None:
        self._recorder.n_open -= 1
        super().close()


@pytest.fixture
def script() -> Script:
    return Script(answers=("A first.", "A second.\n"), tokens_per_s=1e6, prompt_tok_per_s=1e6)


@pytest.fixture
def engine(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    engine = Recorder(script)

    def start_engine(pack: Path, options: EngineOptions | None = None) -> EngineHandle:
        return engine.start()

    monkeypatch.setattr("moet_desk.cli.engine.start_engine", start_engine)
    monkeypatch.setattr(Invocation, "model_path", lambda self, name: tmp_path / name)
    return engine


def pipe_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def last_user_text(engine: Recorder) -> Any:
    messages = engine.requests[-1].messages
    assert messages is not None
    return messages[-1]["content"]


def test_one_shot__prints_the_answer_and_nothing_else(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "")
    result = moet("run", "What is this?")
    assert (result.code, result.out, result.err) == (0, "A first.\n", "")
    assert last_user_text(engine) == "What is this?"
    assert engine.n_open == 0


def test_piped_text__comes_behind_the_prompt(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "line 1\nline 2\n")
    moet("run", "Summarise:")
    assert last_user_text(engine) == "Summarise:\n\nline 1\nline 2"
    pipe_in(monkeypatch, "only this\n")
    moet("run")
    assert last_user_text(engine) == "only this"


def test_nothing_to_ask__usage_error(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "")
    assert moet("run").code == ExitCode.USAGE
    assert engine.requests == []


def test_options__reach_the_engine(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "")
    sampling = "--temperature 0.3 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 7".split()
    limits = ["--max-tokens", "3", "--stop", "END", "--stop", "\n\n", "--exact", "--system", "Be."]
    moet("run", "Hi", *sampling, *limits)
    request = engine.requests[0]
    got = request.sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.seed) == (0.3, 0.9, 40, 0.1, 7)
    assert (request.max_tokens, request.stop) == (3, ("END", "\n\n"))
    assert request.quality is Quality.EXACT
    assert request.messages == [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": "Hi"},
    ]


def test_no_options__settings_and_the_model_decide(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "")
    moet("config", "set", "answers.system", "Be brief.")
    monkeypatch.setenv("MOET_DESK_ANSWERS_QUALITY", "exact")
    moet("run", "Hi")
    request = engine.requests[0]
    assert request.sampling.temperature is None
    assert request.quality is Quality.EXACT
    assert request.messages is not None
    assert request.messages[0] == {"role": "system", "content": "Be brief."}
    moet("run", "Hi", "--fast", "--system", "")
    assert engine.requests[1].quality is Quality.FAST
    assert engine.requests[1].messages == [{"role": "user", "content": "Hi"}]


def test_quality_and_gate__of_the_command_line_before_the_settings(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "")
    moet("config", "set", "answers.gate", "0.7")
    moet("config", "set", "answers.quality", "balanced")
    moet("run", "Hi")
    moet("run", "Hi", "--quality", "exact")
    moet("run", "Hi", "--exact")
    moet("run", "Hi", "--quality", "balanced", "--gate", "0")
    assert [(request.quality, request.gate) for request in engine.requests] == [
        (Quality.BALANCED, 0.7),
        (Quality.EXACT, 0.7),
        (Quality.EXACT, 0.7),
        (Quality.BALANCED, 0.0),
    ]
    for wrong in (["--quality", "best"], ["--gate", "1.1"], ["--gate", "much"]):
        assert moet("run", "Hi", *wrong).code == 2
    assert moet("config", "set", "answers.gate", "1.1").code != 0
    assert len(engine.requests) == 4


def test_raw__goes_around_the_template(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "")
    moet("run", "Once upon", "--raw")
    assert engine.requests[0].prompt == "Once upon"
    assert engine.requests[0].messages is None


def test_json__one_document_with_usage(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "")
    document = moet("run", "Hi", "--json").document
    assert (document["schema"], document["text"]) == (1, "A first.")
    assert (document["finish_reason"], document["quality"]) == ("stop", "fast")
    assert document["usage"]["completion_tokens"] > 0


def test_ndjson__pieces_add_up(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "")
    *pieces, last = moet("run", "Hi", "--format", "ndjson").events
    assert "".join(piece["text"] for piece in pieces) == "A first."
    assert (last["event"], last["finish_reason"]) == ("finished", "stop")


def test_interactive__turns_build_on_each_other(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "one\n\ntwo\n/quit\nthree\n")
    result = moet("run", "-i")
    assert (result.code, result.out) == (0, "A first.\n\nA second.\n\n")
    assert engine.requests[-1].messages == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "A first."},
        {"role": "user", "content": "two"},
    ]


@pytest.mark.parametrize(
    "arguments",
    [["-i", "demo", "a question"], ["-i", "--raw"], ["-i", "--json"], ["--plain", "--json", "Hi"]],
)
def test_interactive__wrong_company__usage_error(
    moet: Command, engine: Recorder, arguments: list[str]
) -> None:
    assert moet("run", *arguments).code == ExitCode.USAGE


@pytest.mark.parametrize(
    "script",
    [
        Script(
            answers=("some text",),
            tokens_per_s=1e6,
            failures={0: ScriptedFailure("MD-ENG-04", {"reason": "NaN"}, after_tokens=1)},
        )
    ],
)
def test_engine_fails__exit_code_and_error_document(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "")
    result = moet("run", "Hi", "--json")
    assert result.code == ExitCode.ENGINE
    assert result.error_code == "MD-ENG-04"
    assert engine.n_open == 0


@pytest.mark.parametrize(
    "script",
    [
        Script(
            answers=("some text", "other text"),
            tokens_per_s=1e6,
            failures={
                0: ScriptedFailure("MD-NVME-04", after_tokens=1),
                1: ScriptedFailure("MD-GPU-07", after_tokens=1, ends_engine=True),
            },
        )
    ],
)
def test_interactive__card_lost__what_was_said_and_the_end_with_its_exit_code(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "one\ntwo\nthree\n")
    result = moet("run", "-i")
    assert result.code == ExitCode.ENGINE
    assert result.out == "someother"
    assert "MD-NVME-04" in result.err  # that turn failed, and the talk went on
    assert "MD-GPU-07" in result.err
    assert "Traceback" not in result.err
    assert len(engine.requests) == 2
    assert engine.n_open == 0


@pytest.mark.parametrize("script", [Script(load_failure=ScriptedFailure("MD-RAM-01"))])
def test_loading_fails__its_exit_code(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "")
    assert moet("run", "Hi").code == ExitCode.NO_ROOM
    assert engine.n_open == 0


def test_unknown_model__exit_3(moet: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, "")
    result = moet("run", "no-such", "Hi", "--json")
    assert (result.code, result.error_code) == (ExitCode.NOT_FOUND, "MD-LIB-01")
    assert moet("run", "no-such", "Hi", "--plain").err.startswith("Error: ")
    assert "Error: " not in moet("run", "no-such", "Hi").err


# -- with a real terminal, pipe and signals --------------------------------------------------


def hear_sigint() -> None:
    """Background jobs of a shell ignore SIGINT, and so do their children; a command hears it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def open_terminal(data_dir: Path, *arguments: str, speed: float) -> pexpect.spawn[str]:
    return pexpect.spawn(
        sys.executable,
        [str(SCRIPTED), str(speed), *arguments],
        env=environment(data_dir),  # type: ignore[arg-type]
        encoding="utf-8",
        timeout=20,
        echo=False,
        preexec_fn=hear_sigint,
    )


def test_terminal__ctrl_c_stops_the_answer_and_the_talk_goes_on(data_dir: Path) -> None:
    child = open_terminal(data_dir, "run", speed=30)
    child.expect("/quit")
    child.expect("> ")
    child.sendline("tell me")
    child.expect("three")
    child.sendintr()
    child.expect("> ")
    assert "ten one two three four five six seven eight nine ten one" not in str(child.before)
    child.sendline("again")
    child.expect("Second answer")
    child.expect("> ")
    child.sendintr()
    child.expect("ends")
    child.sendline("/quit")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_terminal__one_shot_ctrl_c__exit_130_without_traceback(data_dir: Path) -> None:
    child = open_terminal(data_dir, "run", "demo", "tell me", speed=30)
    child.expect("three")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == ExitCode.INTERRUPTED
    assert "Traceback" not in str(child.before)


def test_reader_leaves__ends_quietly(data_dir: Path) -> None:
    command = [sys.executable, str(SCRIPTED), "200", "run", "Hi"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, env=environment(data_dir), **pipes
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(5)
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(20) == 0


def test_killed_by_sigint_in_a_script__exit_130(data_dir: Path) -> None:
    command = [sys.executable, str(SCRIPTED), "20", "run", "Hi"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment(data_dir),
        preexec_fn=hear_sigint,
    ) as child:
        assert child.stdout is not None
        child.stdout.read(5)
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(20) == ExitCode.INTERRUPTED


# -- plain text for screen readers -----------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        Script(
            answers=(
                "A short one. Then a sentence that goes on for a while, as they do! And more."
                "\n\n\n- a \x1b[31mred\tpoint\n```\ncode  stays. As it is\n```" + " word" * 60,
            ),
            tokens_per_s=1e6,
            prompt_tok_per_s=1e6,
        )
    ],
)
def test_plain__whole_lines_and_a_sentence_around_them(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "")
    result = moet("run", "--plain", "Hi")
    assert result.code == 0
    *short, long, rest = result.out.splitlines()
    assert short == [
        "A short one. Then a sentence that goes on for a while, as they do!",
        "And more.",
        "- a [31mred point",
        "```",
        "code  stays. As it is",
    ]
    assert long.startswith("``` word word")
    assert len(long) <= 240
    assert (long + " " + rest).count("word") == 60
    told = result.err.splitlines()
    assert told[:2] == ["Loading demo.", "The answer:"]
    assert told[2].startswith("End of the answer: ")
    assert told[2].endswith("per second, fast quality.")
    assert len(told) == 3


def test_plain__talk__says_whose_turn_it_is(
    moet: Command, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "one\ntwo\n")
    result = moet("run", "-i", "--plain")
    assert result.out == "A first.\nA second.\n"
    assert result.err.count("Your turn.") == 3
    assert result.err.count("The answer:") == 2


def test_dumb_terminal__no_cursor_is_moved_and_no_line_drawn_again(data_dir: Path) -> None:
    child = pexpect.spawn(
        sys.executable, [str(SCRIPTED), "200", "run"], encoding="utf-8", timeout=20, echo=False,
        env=environment(data_dir) | {"TERM": "dumb"},  # type: ignore[arg-type]
    )  # fmt: skip
    child.expect("Your turn.\r\n")
    seen = str(child.before)
    child.sendline("tell me")
    child.expect("End of the answer: [^\r]*\r\n")
    seen += str(child.before) + str(child.after)
    child.expect("Your turn.")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert "nine ten one two" in seen
    assert "\x1b" not in seen
    assert "\r" not in seen.replace("\r\n", "")
    assert "> " not in seen


def test_dumb_terminal__app__says_what_to_use_instead(data_dir: Path) -> None:
    child = pexpect.spawn(
        sys.executable, ["-m", "moet_desk"], encoding="utf-8", timeout=20,
        env=environment(data_dir) | {"TERM": "dumb"},  # type: ignore[arg-type]
    )  # fmt: skip
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == ExitCode.USAGE
    assert "Error: This terminal cannot draw screens  MD-TERM-04" in str(child.before)
    assert "moet-desk run -i --plain" in str(child.before)
    assert "\x1b" not in str(child.before)
