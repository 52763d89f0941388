from __future__ import annotations

import gc
import importlib
from pathlib import Path

import pytest

from moet_desk import __version__, cli
from moet_desk.errors import CATALOGUE, ExitCode, MoetError, fail
from tests.cli.conftest import Command


def test_version__both_ways(moet: Command) -> None:
    assert moet("--version").out == f"moet-desk {__version__}\n"
    assert moet("version").out == f"moet-desk {__version__}\n"
    assert moet("version", "--json").document == {"schema": 1, "version": __version__}


def test_app__while_it_is_imported__no_garbage_is_looked_for(
    moet: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def open_app(invocation: object) -> int:
        seen.append(gc.isenabled())
        raise fail("MD-TERM-03")

    monkeypatch.setattr("moet_desk.cli.app.open_app", open_app)
    assert "MD-TERM-03" in moet().err
    assert seen == [False]
    assert gc.isenabled()


def test_help__lists_every_command_without_importing_it(moet: Command) -> None:
    shown = moet("--help")
    assert shown.code == 0
    assert all(f"\n  {name} " in shown.out for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_command__has_help_and_the_global_options(moet: Command, name: str) -> None:
    shown = moet(name, "--help")
    assert shown.code == 0
    assert "Usage: moet-desk " + name in shown.out
    if name != "completion":
        assert "--data-dir" in shown.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sirve"], 'did you mean "serve"'),
        (["--nonsense"], "--nonsense"),
        (["pack"], "SOURCE"),
        (["run", "a", "b", "c"], "unexpected extra argument"),
        (["run", "x", "--temperature", "9"], "--temperature"),
        (["serve", "--port", "99999"], "--port"),
        (["pack", "x", "--memory-budget", "lots"], "lots"),
        (["config", "set", "ui.theme"], "Give a value"),
    ],
)
def test_wrong_usage__exit_2_and_words(moet: Command, arguments: list[str], words: str) -> None:
    result = moet(*arguments)
    assert result.code == ExitCode.USAGE
    assert words in result.err
    assert "MD-CLI-01" in result.err
    assert "Do: See: moet-desk" in result.err
    assert result.out == ""


@pytest.mark.parametrize("wanted", [["--json"], ["--format", "json"], ["--format=ndjson"]])
def test_wrong_usage__error_document_on_stdout(moet: Command, wanted: list[str]) -> None:
    result = moet("pack", *wanted)
    assert result.document["schema"] == 1
    assert result.error_code == "MD-CLI-01"


@pytest.mark.parametrize(
    "wanted", [["--json"], ["--format", "json"], ["--format=json"], ["--json", "--format=ndjson"]]
)
def test_unknown_option__before_the_format__error_document_all_the_same(
    moet: Command, wanted: list[str]
) -> None:
    result = moet("ls", "--nonsense", *wanted)
    assert result.error_code == "MD-CLI-01"
    is_line = result.out.count("\n") == 1
    assert is_line is (wanted[-1] == "--format=ndjson")


@pytest.mark.parametrize("arguments", [["--data-dir", "~nobody-of-this-name"], ["--data-dir", ""]])
def test_data_dir__cannot_be__said(moet: Command, arguments: list[str]) -> None:
    result = moet(*arguments, "ls", "--json")
    assert result.code == ExitCode.USAGE
    assert result.error_code in ("MD-CFG-03", "MD-CLI-01")


def test_config__home_folder_in_its_path(
    moet: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shown = moet("--config=~/mine.toml", "config", "paths", "--json").document
    assert shown["config_file"] == str(tmp_path / "mine.toml")


@pytest.mark.parametrize("value", ["2020-01-01", "nan", "[1979-05-27T07:32:00Z]", "{a = inf}"])
def test_settings_file__value_that_json_does_not_know__error_document(
    moet: Command, data_dir: Path, value: str
) -> None:
    data_dir.mkdir()
    (data_dir / "config.toml").write_text(f"[ui]\ntheme = {value}\n")
    result = moet("config", "list", "--json")
    assert result.code == ExitCode.USAGE
    assert result.error_code == "MD-CFG-03"
    assert not any(bad in result.out for bad in (": NaN", ": Infinity"))


@pytest.mark.parametrize(
    "command",
    ["pull a/b --limit-rate 0", "handoff vllm olmoe-1b-7b --gpu-memory 0"],
)
def test_size__nothing__is_not_taken_for_no_limit(moet: Command, command: str) -> None:
    result = moet(*command.split(), "--json")
    assert (result.code, result.error_code) == (ExitCode.USAGE, "MD-CLI-01")
    assert "too small" in result.err


@pytest.mark.parametrize(
    ("command", "event"),
    [
        ("version", "version"),
        ("config list", "settings"),
        ("config get ui.theme", "setting"),
        ("config set ui.theme moet-light", "setting"),
        ("config paths", "paths"),
        ("handoff vllm olmoe-1b-7b", "handoff"),
        ("launch aider", "launch"),
    ],
)
def test_ndjson__a_document_is_one_event_on_one_line(
    moet: Command, command: str, event: str
) -> None:
    (printed,) = moet(*command.split(), "--format", "ndjson").events
    document = moet(*command.split(), "--json").document
    assert printed.pop("event") == event
    assert printed == document


@pytest.mark.parametrize("size", ["9" * 400, "9999999999TiB"])
def test_size__beyond_all_computers__said(moet: Command, size: str) -> None:
    result = moet("plan", "demo", "--vram", size, "--json")
    assert (result.code, result.error_code) == (ExitCode.USAGE, "MD-CLI-01")


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_catalogue_error__exit_code_and_four_lines(
    moet: Command, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    def refuse(*_: object) -> MoetError:
        raise fail(code, need="3 GB")

    monkeypatch.setattr("moet_desk.cli.settings.print_text", refuse)
    result = moet("version")
    assert result.code == CATALOGUE[code].exit
    first, cause, do, *_ = result.err.splitlines()
    assert first.endswith(f"  {code}")
    assert cause.startswith("  ")
    assert do.startswith("  Do: ")
    assert "Traceback" not in result.err


def test_bug__says_where_the_report_is(moet: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("moet_desk.cli.settings.print_text", break_down)
    result = moet("version")
    assert result.code == ExitCode.FAILED
    assert "MD-BUG-01" in result.err
    assert "Traceback" not in result.err


def test_interrupt__exit_130(moet: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moet_desk.cli.settings.print_text", interrupt)
    assert moet("version").code == ExitCode.INTERRUPTED


def test_no_command__without_terminal__points_to_run_and_serve(moet: Command) -> None:
    result = moet()
    assert result.code == ExitCode.USAGE
    assert "MD-TERM-03" in result.err
    assert "moet-desk run" in result.err


def test_global_options__before_or_after_the_command(moet: Command, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for arguments in (
        ["--data-dir", str(other), "config", "paths", "--json"],
        ["config", "paths", "--json", "--data-dir", str(other)],
        ["config", "--data-dir", str(other), "paths", "--json"],
    ):
        assert moet(*arguments).document["models_dir"] == str(other / "models")
    config = tmp_path / "my.toml"
    shown = moet("--config", str(config), "config", "paths", "--json").document
    assert shown["config_file"] == str(config)


def test_config__set_get_list_default(moet: Command, data_dir: Path) -> None:
    assert moet("config", "get", "answers.quality").out == "fast\n"
    assert moet("config", "set", "answers.quality", "exact").code == 0
    assert moet("config", "get", "answers.quality").out == "exact\n"
    listed = moet("config", "list", "--json").document["settings"]
    (quality,) = (row for row in listed if row["name"] == "answers.quality")
    assert (quality["value"], quality["source"], quality["default"]) == ("exact", "file", "fast")
    assert "answers.quality" in moet("config", "list").out
    assert moet("config", "set", "answers.quality", "--default").code == 0
    assert moet("config", "get", "answers.quality", "--json").document["source"] == "default"


def test_config__wrong_name_or_value__exit_2(moet: Command) -> None:
    assert moet("config", "get", "answers.qualty", "--json").error_code == "MD-CFG-02"
    wrong = moet("config", "set", "answers.quality", "best", "--json")
    assert (wrong.code, wrong.error_code) == (ExitCode.USAGE, "MD-CFG-03")


def test_config__key_is_hidden_in_lists(moet: Command) -> None:
    assert "s3cret" not in moet("config", "set", "endpoint.key", "s3cret").err
    assert "s3cret" not in moet("config", "list").out
    assert "s3cret" not in moet("config", "list", "--json").out
    assert moet("config", "get", "endpoint.key").out == "s3cret\n"


def test_config__overridden_by_the_environment__says_so(
    moet: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOET_DESK_ANSWERS_QUALITY", "exact")
    assert "MOET_DESK_ANSWERS_QUALITY" in moet("config", "set", "answers.quality", "fast").err
    assert "MOET_DESK_ANSWERS_QUALITY" not in moet("-q", "config", "set", "ui.motion", "none").err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion__is_a_script_for_the_shell(moet: Command, shell: str) -> None:
    result = moet("completion", shell)
    assert result.code == 0
    assert "_MOET_DESK_COMPLETE" in result.out


def test_table__every_entry_is_a_command() -> None:
    for name, (place, words) in cli.COMMANDS.items():
        module, _, attribute = place.partition(":")
        assert getattr(importlib.import_module(module), attribute).name == name
        assert words.endswith(".")
