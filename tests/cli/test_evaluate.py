"""`eval`: files and what is wrong with them, arithmetic of answers, and the command on the demo."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moet_desk.cli import eval_answers
from moet_desk.cli.eval_answers import length_ratio
from moet_desk.cli.eval_data import Task, haystack, holds, is_right, read_tasks, read_texts
from moet_desk.errors import ExitCode
from tests.cli.conftest import Command

SUM = "<|user|>What is 2 + 3?<|end|><|assistant|>2 + 3 = 5.<|end|>"
FACT = (
    "<|user|>The tower has number 7. What is the number of the tower?<|end|><|assistant|>7<|end|>"
)


@pytest.fixture
def packed(demo_pack: Path, data_dir: Path) -> Path:
    folder = data_dir / "models" / "demo"
    shutil.copytree(demo_pack, folder)
    return folder


def jsonl(path: Path, *entries: Any) -> Path:
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# -- the command -----------------------------------------------------------------------------


def test_eval__text_and_tasks__one_document(moet: Command, packed: Path, tmp_path: Path) -> None:
    plain = tmp_path / "story.txt"
    plain.write_text("The miller waited for the wind, and the wind came in the evening.")
    tasks = jsonl(tmp_path / "tasks.jsonl", {"text": SUM}, {"text": FACT}, {"text": SUM})
    result = moet(
        "eval", "--text", str(plain), "--tasks", str(tasks), "--limit", "2", "--max-tokens", "24",
        "--context", "256", "--text-tokens", "12", "--gate", "0.9", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    document = result.document
    assert document["needle"] is None
    assert list(document["texts"][0]["qualities"]) == ["fast", "exact"]
    assert (document["model"], document["device"]) == ("demo", "cpu")
    (text,) = document["texts"]
    assert (text["file"], text["tokens"], text["window_tokens"]) == ("story.txt", 12, 256)
    fast, exact = text["qualities"]["fast"], text["qualities"]["exact"]
    assert fast["perplexity"] == pytest.approx(2.718281828 ** fast["nll"], rel=1e-3)
    assert fast["kl_mean"] > 0
    assert 0 < fast["top1_agreement"] <= 1
    assert exact["kl_mean"] is exact["top1_agreement"] is exact["largest_margin"] is None
    assert document["tasks"]["tasks"] == 2
    answers = document["tasks"]["qualities"]
    assert answers["exact"]["right"] <= 2
    assert answers["exact"]["length_ratio_median"] is None
    assert answers["fast"]["length_ratio_geometric_mean"] > 0
    assert document["tasks"]["gate"] == 0.9
    assert 0 < answers["balanced"]["rerun_share"] <= 1
    assert answers["fast"]["rerun_share"] is answers["exact"]["rerun_share"] is None
    assert "12/12 tokens" in result.err
    assert "6/6 answers" in result.err


def test_eval__sweep__a_row_for_each_gate(moet: Command, packed: Path, tmp_path: Path) -> None:
    tasks = jsonl(tmp_path / "tasks.jsonl", {"text": SUM}, {"text": FACT})
    given = ("eval", "--tasks", str(tasks), "--max-tokens", "12", "--sweep", "0,1,0", "-q")
    document = moet(*given, "--json").document
    part = document["tasks"]
    assert document["codebook"] == "symmetric"
    assert part["gate"] is None
    assert list(part["qualities"]) == ["fast", "exact"]
    never, always = part["sweep"]
    fast, exact = part["qualities"]["fast"], part["qualities"]["exact"]
    assert (never["gate"], always["gate"]) == (0, 1)
    assert (never["rerun_share"], fast["rerun_share"]) == (0, None)
    assert always["rerun_share"] > 0.5
    for name in ("right", "share", "cut", "length_ratio_median", "length_ratio_geometric_mean"):
        assert never[name] == fast[name]  # no token is made again: the same answers
    assert all(one["tok_per_s"] > 0 for one in (fast, exact, never, always))
    lines = moet(*given).out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:6]] == [
        "fast", "exact", "balanced, gate 0", "balanced, gate 1",
    ]  # fmt: skip


def test_eval__asymmetric_levels__said_and_only_fast_differs(
    moet: Command, packed: Path, tmp_path: Path
) -> None:
    text = jsonl(tmp_path / "t.jsonl", {"text": "The grey horse carried water up the hill."})
    given = ("eval", "--text", str(text), "-q")
    one = moet(*given, "--json").document
    other = moet(*given, "--codebook", "asymmetric", "--json").document
    assert (one["codebook"], other["codebook"]) == ("symmetric", "asymmetric")
    before, after = one["texts"][0]["qualities"], other["texts"][0]["qualities"]
    assert before["exact"] == after["exact"]
    assert before["fast"]["kl_mean"] != after["fast"]["kl_mean"]
    assert "2-bit levels: asymmetric" in moet(*given, "--codebook", "asymmetric").out


def test_eval__text_for_balanced_alone__refused(moet: Command, packed: Path) -> None:
    result = moet("eval", "--text", __file__, "--quality", "balanced")
    assert result.code == 2
    assert "--tasks" in result.err


def test_eval__only_fast__null_where_exact_would_be_needed(
    moet: Command, packed: Path, tmp_path: Path
) -> None:
    text = jsonl(tmp_path / "t.jsonl", {"text": "A grey horse."}, {"text": "A brown cow."})
    result = moet("eval", "--text", str(text), "--quality", "fast", "--format", "ndjson", "-q")
    assert (result.code, result.err) == (0, "")
    assert [event["event"] for event in result.events] == ["text", "finished"]
    assert list(result.events[0]["qualities"]) == ["fast"]
    assert result.events[0]["qualities"]["fast"]["kl_mean"] is None
    assert moet("eval", "--text", str(text), "--quality", "fast", "-q").out.splitlines()[2].split()[
        -3:
    ] == ["-", "-", "-"]


def test_eval__needle__share_for_every_size_and_depth(
    moet: Command, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_answers, "DEPTHS", (0.5,))
    result = moet(
        "eval", "--needle", "--trials", "1", "--context", "256", "--quality", "exact", "--json"
    )
    assert result.code == 0, result.err
    needle = result.document["needle"]
    assert needle["trials"] == 1
    places = needle["places"]
    assert [(one["context"], one["depth"]) for one in places] == [(64, 0.5), (128, 0.5), (256, 0.5)]
    assert all(one["share"] in {0, 1} for one in places)
    assert (result.document["texts"], result.document["tasks"]) == (None, None)


# -- wrong input -----------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--text", "--tasks"])
@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, "MD-EVAL-01", "No such file"),
        (b"", "MD-EVAL-03", "holds no t"),
        (b"\n  \n", "MD-EVAL-03", "holds no t"),
        (b'{"text": "\xff"}', "MD-EVAL-01", "byte 10 is not UTF-8"),
        (b'{"text": "<|assistant|>ok"}\n{"text"\n', "MD-EVAL-02", "line 2: it is not JSON"),
        (b"[1]\n", "MD-EVAL-02", "line 1: it is not a JSON object"),
        (b'{"text": "<|assistant|>a\\ud800"}\n', "MD-EVAL-02", 'line 1: "text" holds half a'),
        (b'\n{"text": 7}\n', "MD-EVAL-02", 'line 2: it has no "text" that is a string'),
    ],
)
def test_eval__file_that_cannot_be_used__code_cause_and_next_step(
    moet: Command, tmp_path: Path, option: str, content: bytes | None, code: str, words: str
) -> None:
    path = tmp_path / "given.jsonl"
    if content is not None:
        path.write_bytes(content)
    result = moet("eval", option, str(path), "--json")
    assert result.code == ExitCode.USAGE
    assert result.error_code == code
    assert words in result.document["error"]["cause"]
    assert result.document["error"]["do"]
    assert "Nothing on disk was changed" in result.err
    if content is not None:
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("entry", "words"),
    [({"text": "no answer"}, "holds no <|assistant|>"), ({"question": "1?"}, 'no "answer"')],
)
def test_eval__task_without_an_answer__names_the_line(
    moet: Command, tmp_path: Path, entry: Any, words: str
) -> None:
    path = jsonl(tmp_path / "tasks.jsonl", {"text": SUM}, entry)
    result = moet("eval", "--tasks", str(path), "--limit", "1", "--json")
    assert (result.code, result.error_code) == (ExitCode.USAGE, "MD-EVAL-02")
    assert "line 2" in result.err
    assert words in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--needle", "--context", "10"],
        ["--needle", "--quality", "better"],
        ["--needle", "--sweep", "0.5"],
        ["--tasks", "t.jsonl", "--sweep", "0.5,"],
        ["--tasks", "t.jsonl", "--sweep", "0.5,1.5"],
        ["--tasks", "t.jsonl", "--sweep", "nan"],
        ["--tasks", "t.jsonl", "--sweep", "0.5", "--gate", "0.5"],
        ["--tasks", "t.jsonl", "--sweep", "0.5", "--quality", "fast"],
        ["--needle", "--codebook", "lopsided"],
    ],
)
def test_eval__wrong_usage__exit_2(moet: Command, arguments: list[str]) -> None:
    result = moet("eval", *arguments, "--json")
    assert (result.code, result.error_code) == (ExitCode.USAGE, "MD-CLI-01")


def test_eval__no_such_model__says_so(moet: Command, tmp_path: Path) -> None:
    text = jsonl(tmp_path / "t.jsonl", {"text": "A horse."})
    result = moet("eval", "nothing", "--text", str(text), "--json")
    assert (result.code, result.error_code) == (ExitCode.NOT_FOUND, "MD-LIB-01")


def test_eval__task_longer_than_the_context__refused_before_any_answer(
    moet: Command, packed: Path, tmp_path: Path
) -> None:
    long = SUM.replace("What", "What, " * 300 + "what")
    tasks = jsonl(tmp_path / "tasks.jsonl", {"text": SUM}, {"text": long})
    result = moet("eval", "--tasks", str(tasks), "--context", "256", "--json")
    assert (result.code, result.error_code) == (ExitCode.USAGE, "MD-EVAL-02")
    assert "line 2: it has" in result.err
    assert "answers" not in result.err


def test_eval__ctrl_c_in_an_answer__ends_the_command(
    moet: Command, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = jsonl(tmp_path / "t.jsonl", {"text": "A grey horse."})
    tasks = jsonl(tmp_path / "tasks.jsonl", {"text": SUM}, {"text": FACT})
    real = eval_answers.ask

    def interrupted(handle: Any, request: Any, on_text: Any) -> Any:
        return replace(real(handle, replace(request, max_tokens=1), on_text), interrupted=True)

    monkeypatch.setattr(eval_answers, "ask", interrupted)
    result = moet("eval", "--text", str(text), "--tasks", str(tasks))
    assert result.code == ExitCode.INTERRUPTED
    assert "t.jsonl, " in result.out  # what was measured before stays on the screen
    assert "tasks.jsonl" not in result.out


# -- data and arithmetic ---------------------------------------------------------------------


def test_read__both_kinds_of_files(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("One.\n\nTwo.", encoding="utf-8-sig")
    assert read_texts(plain) == ["One.\n\nTwo."]
    lines = jsonl(tmp_path / "a.jsonl", {"text": "One\u2028."}, {"text": " "}, {"text": "Two."})
    assert read_texts(lines) == ["One\u2028.", "Two."]
    tasks = jsonl(tmp_path / "b.jsonl", {"text": SUM}, {"question": "1 + 1?", "answer": "2"})
    assert read_tasks(tasks) == [
        Task("2 + 3 = 5.", 1, prompt="<|user|>What is 2 + 3?<|end|><|assistant|>"),
        Task("2", 2, question="1 + 1?"),
    ]
    assert len(read_tasks(tasks, limit=1)) == 1


@pytest.mark.parametrize(
    ("question", "wanted", "answer", "right"),
    [
        ("What is 2 + 3?", "2 + 3 = 5.", "It is 5.", True),
        ("What is 2 + 3?", "2 + 3 = 5.", "5 of 6", False),
        ("What is 2 + 3?", "five", "5", False),
        ("Which number?", "It is 5.", "5", False),
        ("Which number?", "It is 5.", " It is 5.\n", True),
    ],
)
def test_is_right(question: str, wanted: str, answer: str, right: bool) -> None:
    assert is_right(Task(wanted, 1, question=question), answer) is right
    prompt = f"<|system|>1 + 1<|end|><|user|>{question}<|end|><|assistant|>"
    assert is_right(Task(wanted, 1, prompt=prompt), answer) is right


def test_length_ratio__pairs__median_and_geometric_mean() -> None:
    ratio = length_ratio([10, 20, 5], [10, 10, 10])
    assert ratio.median == 1
    assert ratio.geometric_mean == pytest.approx(1)
    assert length_ratio([8, 2], [2, 2]).geometric_mean == pytest.approx(2)


def test_haystack__depth__where_the_number_is() -> None:
    first, number = haystack(10, 0, 3)
    last, same = haystack(10, 1, 3)
    needle = f"The number of the tower is {number}."
    assert same == number
    assert haystack(10, 1, 4)[1] != number
    assert first.startswith(needle)
    assert last.endswith(f"{needle} What is the number of the tower?")
    assert first.count(".") == last.count(".") == 11
    assert holds(f"It is {number}!", number)
    assert not holds(f"It is {number}0.", number)
