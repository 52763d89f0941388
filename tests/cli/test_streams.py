"""stdin, stdout and stderr that are closed, gone, full, or of another encoding."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moet_desk.cli.output import print_document
from moet_desk.errors import ExitCode
from tests.cli.conftest import SCRIPTED, Command, environment

MOET = f"{sys.executable} -m moet_desk"


def shell(data_dir: Path, line: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    environ = environment(data_dir) | {"LANG": "C.UTF-8", **more}
    return subprocess.run(["bash", "-c", line], capture_output=True, env=environ, timeout=60)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("command", "code"),
    [("ls", 0), ("nosuch", ExitCode.USAGE), ("rm demo", ExitCode.NOT_FOUND)],
)
def test_closed__command_ends_as_ever(data_dir: Path, closed: str, command: str, code: int) -> None:
    ended = shell(data_dir, f"{MOET} {command} {closed}")
    assert ended.returncode == code
    assert b"MD-BUG" not in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_closed__its_number_is_given_to_no_other_file(data_dir: Path) -> None:
    code = (
        "from moet_desk.cli.streams import make_usable; make_usable();"
        "import os; print(os.open('/dev/null', os.O_RDONLY) > 2)"
    )
    ended = shell(data_dir, f'{sys.executable} -c "{code}" <&- 2>&-')
    assert ended.stdout == b"True\n"


def test_stderr_has_no_reader__work_goes_on_to_its_end(data_dir: Path) -> None:
    """A meter that nobody can see must not stop what it measures."""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "moet_desk", "pack", "demo"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=writer,
        env=environment(data_dir),
        timeout=60,
    )
    os.close(writer)
    assert ended.returncode == 0
    listed = shell(data_dir, f"{MOET} ls --json")
    assert json.loads(listed.stdout)["models"][0]["state"] == "ready"


@pytest.mark.parametrize("command", ["ls --json", "config list", "version"])
def test_stdout_is_full__words_and_no_traceback(data_dir: Path, command: str) -> None:
    ended = shell(data_dir, f"{MOET} {command} >/dev/full")
    assert ended.returncode == ExitCode.FAILED
    assert b"MD-DISK-04" in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_stderr_is_full__exit_code_and_document_stay(data_dir: Path) -> None:
    ended = shell(data_dir, f"{MOET} show nosuch --json 2>/dev/full")
    assert ended.returncode == ExitCode.NOT_FOUND
    assert json.loads(ended.stdout)["error"]["code"] == "MD-LIB-01"


@pytest.mark.parametrize(
    "more",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C.UTF-8"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
)
@pytest.mark.parametrize("name", ["é", r"\xff\xfe"])
def test_json__whatever_the_encoding__is_utf8(
    data_dir: Path, more: dict[str, str], name: str
) -> None:
    ended = shell(data_dir, f"{MOET} show $'{name}' --json", **more)
    document = json.loads(ended.stdout.decode("utf-8"))
    assert document["error"]["code"] == "MD-LIB-01"
    assert ended.returncode == ExitCode.NOT_FOUND


def test_answer__encoding_has_no_such_letter__the_rest_comes(data_dir: Path) -> None:
    line = f"{sys.executable} {SCRIPTED} 500 run 'é ☃' </dev/null"
    ended = shell(data_dir, line, PYTHONIOENCODING="ascii")
    assert ended.returncode == 0
    assert ended.stdout.isascii()


@pytest.mark.parametrize(
    "line",
    [
        r"printf '\xff\xfe' | {run} What?",
        r"{run} $'\xff' </dev/null",
        r"{run} What? --system $'\xff' </dev/null",
        r"{run} What? --stop $'\xff' </dev/null",
    ],
)
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_run__not_utf8__said(data_dir: Path, line: str, locale: str) -> None:
    run = f"{sys.executable} {SCRIPTED} 500 run --json"
    ended = shell(data_dir, line.replace("{run}", run), LC_ALL=locale)
    assert ended.returncode == ExitCode.USAGE
    assert "not text in UTF-8" in json.loads(ended.stdout)["error"]["cause"]


def test_talk__a_line_that_is_not_utf8__the_others_are_answered(data_dir: Path) -> None:
    line = rf"printf 'Hi\n\xff\nHi\n' | {sys.executable} {SCRIPTED} 500 run -i"
    ended = shell(data_dir, line)
    assert ended.returncode == 0
    assert ended.stderr.count(b"not text in UTF-8") == 1
    assert ended.stdout.count(b"\n\n") >= 2


def test_error__words_of_others_do_not_steer_the_terminal(moet: Command) -> None:
    result = moet("show", "a\x1b]0;title\x07\x9b31mb")
    assert "a]0;title31mb" in result.err
    assert "\x1b" not in result.err
    assert "\x9b" not in result.err


def test_document__no_letters_beyond_ascii_where_stdout_is_not_utf8(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_document({"a": "é"})
    assert "é" in capsys.readouterr().out
    monkeypatch.setattr("moet_desk.cli.output.takes_unicode", lambda text: False)
    print_document({"a": "é"})
    assert json.loads(out := capsys.readouterr().out)["a"] == "é"
    assert out.isascii()


def test_interrupt__while_the_program_is_imported__no_traceback(data_dir: Path) -> None:
    """Ctrl+C in the first tenth of a second: click is being imported then."""
    slow = "import sys, time; sys.path.insert(0, '.'); import moet_desk.__main__ as m\n"
    slow += "class Slow:\n def find_spec(self, name, *a):\n"
    slow += "  if name == 'moet_desk.cli': print('now', flush=True); time.sleep(20)\n"
    slow += "sys.meta_path.insert(0, Slow()); m.main()"
    with subprocess.Popen(
        [sys.executable, "-c", slow],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(data_dir),
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"now\n"
        time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, words = child.communicate(timeout=30)
    assert child.returncode == ExitCode.INTERRUPTED
    assert words == b""
