"""What `moet-desk eval` measures with: texts and tasks from files, and haystacks of our own.

Reads whole files before anything is loaded, so that a wrong line costs seconds and not the
measurement before it. Pure but for reading; no engine. Runs in the main thread.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet_desk.cli.streams import is_text
from moet_desk.errors import MoetError, fail

ASSISTANT, END = "<|assistant|>", "<|end|>"
"""How the demo model's texts spell the begin and the end of an answer."""

SUBJECTS = ("baker", "ferryman", "clockmaker", "gardener", "postman", "tailor", "miller", "painter")
ACTIONS = (
    "opened the shutters", "swept the yard", "counted the barrels", "waited for the rain to stop",
    "mended an old coat", "carried water up the hill", "fed the grey horse", "read a long letter",
    "repaired the gate", "watched the boats come home",
)  # fmt: skip
TIMES = ("In the morning", "At noon", "After the market", "Before supper", "Late in the evening")
NEEDLE = "The number of the tower is {number}."
QUESTION = "What is the number of the tower?"
"""The filler holds no number, so whoever finds it has read it there."""


@dataclass(frozen=True, slots=True)
class Task:
    """A question with one right answer. Either a raw prompt, or a question for the template."""

    answer: str
    line: int  # of the file, from 1
    prompt: str | None = None
    question: str | None = None


def read_texts(path: Path) -> list[str]:
    """The documents of a file: each line's "text" of .jsonl, else the file as one document.

    Raises:
        MoetError: MD-EVAL-01..03.
    """
    if path.suffix == ".jsonl":
        found = [_string(path, number, entry, "text") for number, entry in _lines(path)]
    else:
        found = [_content(path)]
    texts = [text for text in found if text.strip()]
    if not texts:
        raise nothing(path, "no text")
    return texts


def read_tasks(path: Path, limit: int | None = None) -> list[Task]:
    """The first `limit` tasks of a .jsonl file; all its lines are checked.

    Raises:
        MoetError: MD-EVAL-01..03.
    """
    tasks = [_task(path, number, entry) for number, entry in _lines(path)]
    if not tasks:
        raise nothing(path, "no tasks")
    return tasks[:limit]


def nothing(path: Path, what: str) -> MoetError:
    """The error for a file without anything to measure."""
    return fail("MD-EVAL-03", path=str(path), what=what)


def bad_line(path: Path, number: int, reason: str) -> MoetError:
    """The error for a line that cannot be used."""
    return fail("MD-EVAL-02", path=str(path), line=number, reason=reason)


def check_length(path: Path, task: Task, n_tokens: int, context: int) -> None:
    """Refuse a task whose prompt of `n_tokens` leaves no room in the context: MD-EVAL-02."""
    if n_tokens >= context:
        reason = f"it has {n_tokens} tokens and the context holds {context}"
        raise bad_line(path, task.line, reason)


def is_right(task: Task, answer: str) -> bool:
    """Whether the text matches; of a sum only the result has to."""
    got, wanted = answer.strip(), task.answer.strip()
    if got == wanted:
        return True
    asked = task.question or (task.prompt or "").rsplit("<|user|>", 1)[-1]
    if not re.search(r"\d+ [-+*] \d+", asked):
        return False
    numbers = [re.findall(r"-?\d+", text) for text in (got, wanted)]
    return bool(numbers[0] and numbers[1]) and numbers[0][-1] == numbers[1][-1]


def haystack(n_sentences: int, depth: float, trial: int) -> tuple[str, str]:
    """A user's message with a number hidden at `depth` (0 begin, 1 end), and that number.

    The same arguments give the same text on every computer.
    """
    chance = random.Random(trial)
    number = str(chance.randint(100, 999))
    sentences = list(_filler(chance, n_sentences))
    sentences.insert(round(depth * n_sentences), NEEDLE.format(number=number))
    return f"{' '.join(sentences)} {QUESTION}", number


def holds(answer: str, number: str) -> bool:
    """Whether the answer says this number."""
    return number in re.findall(r"\d+", answer)


def _filler(chance: random.Random, n_sentences: int) -> Iterator[str]:
    for _ in range(n_sentences):
        when, who, what = map(chance.choice, (TIMES, SUBJECTS, ACTIONS))
        yield f"{when} the {who} {what}."


def _task(path: Path, number: int, entry: dict[str, Any]) -> Task:
    if "question" in entry:
        question = _string(path, number, entry, "question")
        return Task(_string(path, number, entry, "answer"), number, question=question)
    text = _string(path, number, entry, "text").removesuffix(END)
    before, mark, answer = text.rpartition(ASSISTANT)
    if not mark:
        raise bad_line(path, number, f'"text" holds no {ASSISTANT} with the right answer behind it')
    return Task(answer, number, prompt=before + mark)


def _string(path: Path, number: int, entry: dict[str, Any], name: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str):
        raise bad_line(path, number, f'it has no "{name}" that is a string')
    if not is_text(value):
        raise bad_line(path, number, f'"{name}" holds half a character (a lone \\u surrogate)')
    return value


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; empty lines are skipped."""
    lines: Sequence[str] = _content(path).split("\n")  # other line breaks may be inside of strings
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise bad_line(path, number, f"it is not JSON ({problem})") from problem
        if not isinstance(entry, dict):
            raise bad_line(path, number, "it is not a JSON object")
        yield number, entry


def _content(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except OSError as problem:
        raise _unreadable(path, problem.strerror or str(problem)) from problem
    except UnicodeDecodeError as problem:
        raise _unreadable(path, f"byte {problem.start} is not UTF-8") from problem


def _unreadable(path: Path, reason: str) -> MoetError:
    return fail("MD-EVAL-01", path=str(path), reason=reason)
