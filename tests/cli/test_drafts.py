"""Guesses on the command line: from flags and settings to the engine, and what bench says."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet_desk.cli import bench
from moet_desk.cli.context import Invocation
from moet_desk.engine.handle import EngineHandle, EngineOptions
from moet_desk.engine.scripted import Script, ScriptedEngine
from moet_desk.errors import ExitCode
from moet_desk.telemetry import DraftChoice, DraftCounters
from tests.cli.conftest import Command

CHOICE = DraftChoice(
    "auto", "mtp", 2, gain=1.4236, acceptance=(0.7,), rows_ms=((1, 20.0), (3, 26.1234)),
    guess_ms=1.5, spare_steps=5.25, probes=3,
)  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[EngineOptions]:
    """How engines were asked to run."""
    made: list[EngineOptions] = []

    def start_engine(pack: Path, options: EngineOptions | None = None) -> EngineHandle:
        assert options is not None
        made.append(options)
        script = Script(
            answers=("word " * 20,), tokens_per_s=1e4, prompt_tok_per_s=1e6, context=512,
            drafts=CHOICE,
        )  # fmt: skip
        return ScriptedEngine(script).start()

    monkeypatch.setattr("moet_desk.cli.engine.start_engine", start_engine)
    monkeypatch.setattr("moet_desk.engine.handle.start_engine", start_engine)
    monkeypatch.setattr(Invocation, "model_path", lambda self, name: tmp_path / name)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    return made


def test_run__flags_settings_and_nobody__in_this_order(
    moet: Command, asked: list[EngineOptions]
) -> None:
    assert moet("run", "demo", "Hi").code == 0
    assert moet("config", "set", "engine.drafts", "lookup").code == 0
    assert moet("config", "set", "engine.draft_depth", "5").code == 0
    moet("run", "demo", "Hi")
    moet("run", "demo", "Hi", "--drafts", "mtp", "--draft-depth", "1")
    assert [(options.drafts, options.draft_depth) for options in asked] == [
        ("auto", 3), ("lookup", 5), ("mtp", 1),
    ]  # fmt: skip
    assert [options.draft_head for options in asked] == [None] * 3


@pytest.mark.parametrize("command", ["run", "serve", "bench"])
@pytest.mark.parametrize("wrong", [["--drafts", "eagle"], ["--draft-depth", "8"]])
def test_options__wrong__usage_error(moet: Command, command: str, wrong: list[str]) -> None:
    assert moet(command, "demo", *wrong).code == ExitCode.USAGE


def test_bench__record__steps_guesses_and_the_decision(
    moet: Command, asked: list[EngineOptions]
) -> None:
    arguments = ("bench", "--no-pack", "--repeat", "2", "--drafts", "auto")
    record = moet(*arguments, "--json").document
    assert asked[0].drafts == "auto"
    assert record["drafts"] == {
        "asked": "auto", "source": "mtp", "depth": 2, "gain": 1.424, "guessed": [], "right": [],
        "step_ms_by_rows": {"1": 20.0, "3": 26.123}, "guess_ms": 1.5, "spare_steps": 5.25,
        "probes": 3,
    }  # fmt: skip
    assert record["acceptance"] is None
    assert 0.9 < record["tokens_per_step"] <= 1
    assert record["steps_per_s"]["median"] > 0
    out = moet(*arguments).out
    assert "tokens each" in out
    assert "guesses       auto, now mtp 2, x1.42 expected" in out


def test_bench__guesses__of_the_measured_answers_alone() -> None:
    before, after = DraftCounters((10,), (4,)), DraftCounters((30, 20), (18, 5))
    more = bench._more_drafts(after, before)
    assert more == DraftCounters((20, 20), (14, 5))
    assert bench._shares(more) == [0.7, 0.25]
    assert bench._shares(DraftCounters((0, 4), (0, 1))) == [None, 0.25]
    assert bench._shares(DraftCounters()) is None


@pytest.mark.parametrize(
    ("drafts", "shares", "words"),
    [
        ({"asked": "off", "source": "off", "depth": 0, "gain": None}, None, "off"),
        ({"asked": "auto", "source": "off", "depth": 0, "gain": None}, [0.5], "right 50%"),
        ({"asked": "mtp", "source": "mtp", "depth": 2, "gain": None}, [0.71, None], "71%, -"),
    ],
)
def test_bench__words__who_how_far_how_often(
    drafts: dict[str, object], shares: list[float | None] | None, words: str
) -> None:
    said = bench._draft_words({"drafts": drafts, "acceptance": shares})
    assert said.endswith(words)
    assert "None" not in said
