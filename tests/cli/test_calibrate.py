"""`calibrate gate` on the demo model: its document, its table, what it keeps, and wrong input."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from moet_desk.engine import evaluate
from moet_desk.engine.gate_file import Measured, read_gate
from moet_desk.engine.handle import Quality
from moet_desk.errors import ExitCode
from moet_desk.store.pack_format import GATE_FILE
from tests.cli.conftest import Command


@pytest.fixture
def packed(demo_pack: Path, data_dir: Path) -> Path:
    folder = data_dir / "models" / "demo"
    shutil.copytree(demo_pack, folder)
    return folder


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text("The miller waited for the wind, and it came in the evening. " * 6)
    return path


def test_gate__one_text__document_and_file_agree(moet: Command, packed: Path, story: Path) -> None:
    before = moet("show", "--json").document
    assert before["gate_tau"] is None
    assert before["gate"] == {"tau": 0.6, "source": "built in", "date": None, "budget": None,
                              "rerun": None, "caught": None}  # fmt: skip
    assert "below 0.60 (built in)" in moet("show").out
    assert "gate tau" not in moet("show").out
    result = moet("calibrate", "gate", "demo", "--text", str(story), "--text-tokens", "60",
                  "--budget", "0.5", "--json")  # fmt: skip
    assert result.code == 0, result.err
    document = result.document
    assert document["texts"] == [{"file": "story.txt", "tokens": 60, "windows": 1}]
    assert (document["tokens"], document["target"], document["budget"]) == (60, 0.9, 0.5)
    assert document["flips"] > 0
    assert len(document["curve"]) == 101
    assert document["stored"] == str(packed / GATE_FILE)
    kept = read_gate(packed)
    assert kept is not None
    assert (kept.tau, kept.limit.value) == (document["tau"], document["limit"])
    assert (kept.tokens, kept.flips, kept.texts) == (60, document["flips"], ["story.txt"])
    assert document["rerun"] <= 0.5
    assert "60/60 tokens" in result.err
    after = moet("show", "--json").document
    assert after["gate_tau"] == kept.tau
    assert after["gate"] == {"tau": kept.tau, "source": "pack", "date": kept.date, "budget": 0.5,
                             "rerun": document["rerun"], "caught": document["caught"]}  # fmt: skip
    assert f"below {kept.tau:.2f} (calibrated {kept.date}" in moet("show").out
    assert moet("config", "set", "answers.gate", "0.7").code == 0
    wished = moet("show", "--json").document
    assert (wished["gate_tau"], wished["gate"]["tau"], wished["gate"]["source"]) == (
        kept.tau, 0.7, "settings",
    )  # fmt: skip
    assert f"{kept.tau}" in moet("show").out.split("gate tau")[1]


def test_gate__tasks__only_tokens_of_exact_answers_count(
    moet: Command, packed: Path, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    lines = [
        {"text": "<|user|>What is 12 + 30?<|end|><|assistant|>unlike what it says<|end|>"},
        {"question": "Who mended the coat?", "answer": "The tailor."},
        {"question": "Not asked", "answer": "."},
    ]
    tasks.write_text("\n".join(map(json.dumps, lines)))
    given = ("--limit", "2", "--max-tokens", "40")
    result = moet("calibrate", "gate", "--tasks", str(tasks), *given, "--budget", "1", "--json")
    assert result.code == 0, result.err
    document = result.document
    answers = moet("eval", "--tasks", str(tasks), *given, "--quality", "exact", "--json", "-q")
    assert "2/2 answers" in result.err
    (text,) = document["texts"]
    assert (text["file"], text["windows"]) == ("tasks.jsonl", 2)
    assert (
        text["tokens"]
        == document["tokens"]
        == answers.document["tasks"]["qualities"]["exact"]["tokens"]
    )
    assert document["measured"] == "answers"
    kept = read_gate(packed)
    if document["flips"]:
        assert kept is not None
        assert (kept.measured, kept.tokens) == (Measured.ANSWERS, document["tokens"])
    else:
        assert kept is None


def test_gate__file_from_before_answers_could_be_measured__is_of_text(
    moet: Command, packed: Path, story: Path
) -> None:
    moet("calibrate", "gate", "--text", str(story), "--text-tokens", "40", "-q")
    path = packed / GATE_FILE
    entries = json.loads(path.read_text())
    assert entries.pop("measured") == "text"
    path.write_text(json.dumps(entries))
    kept = read_gate(packed)
    assert kept is not None
    assert kept.measured is Measured.TEXT


def test_gate__for_people__table_with_the_chosen_one(
    moet: Command, packed: Path, story: Path
) -> None:
    given = ("--text", str(story), "--text-tokens", "40", "-q")
    result = moet("calibrate", "gate", *given, "--catch", "0.5", "--budget", "1")
    assert (result.code, result.err) == (0, "")
    kept = read_gate(packed)
    assert kept is not None
    (line,) = [line for line in result.out.splitlines() if line.endswith("chosen")]
    assert line.startswith(f"{kept.tau:.2f} ")
    assert f"Kept {kept.tau:.2f}, the smallest that catches 50%" in result.out
    short = moet("calibrate", "gate", *given, "--budget", "0")
    assert "Kept 0.00, which catches most within 0% of reruns" in short.out


def test_gate__no_flips__nothing_is_kept(
    moet: Command, packed: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = evaluate.PLANES[Quality.EXACT]
    monkeypatch.setattr(evaluate, "PLANES", dict.fromkeys(evaluate.PLANES, plane))
    given = ("calibrate", "gate", "--text", str(story), "--text-tokens", "10", "-q")
    (event,) = moet(*given, "--format", "ndjson").events
    assert (event["event"], event["flips"], event["tokens"]) == ("gate", 0, 10)
    assert event["tau"] is event["limit"] is event["stored"] is event["curve"][5]["caught"] is None
    assert "Nothing was chosen" in moet(*given).out
    assert not (packed / GATE_FILE).exists()


def test_gate__wrong_input__as_eval_says_it(moet: Command, packed: Path, tmp_path: Path) -> None:
    assert moet("calibrate", "gate").code == ExitCode.USAGE
    both = moet("calibrate", "gate", "--text", "a", "--tasks", "b")
    assert both.code == ExitCode.USAGE
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"question": "What is it, " * 900, "answer": "."}))
    refused = moet("calibrate", "gate", "--tasks", str(long), "--json")
    assert refused.error_code == "MD-EVAL-02"
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"text": " "}))
    for path, code in ((tmp_path / "none", "MD-EVAL-01"), (short, "MD-EVAL-03")):
        assert moet("calibrate", "gate", "--text", str(path), "--json").error_code == code
    text = ("--text", str(short))
    assert moet("calibrate", "gate", *text, "--catch", "1.2").code == ExitCode.USAGE
    good = tmp_path / "good.txt"
    good.write_text("A grey horse.")
    found = moet("calibrate", "gate", "none", "--text", str(good), "--json")
    assert found.error_code == "MD-LIB-01"


def test_gate__folder_that_cannot_be_written__said_before_the_work(
    moet: Command, packed: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
    result = moet("calibrate", "gate", "--text", str(story), "--json")
    assert result.error_code == "MD-DISK-03"
    assert "tokens" not in result.err
