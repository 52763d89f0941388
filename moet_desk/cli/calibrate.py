"""`moet-desk calibrate`: choose from texts what a pack is to be used with, and keep it in the pack.

`gate` finds the confidence below which the quality `balanced` reruns a step (docs/quality.md has
the measurement and the schema of --json). Computes on the CPU. Runs in the main thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moet_desk.cli.bench_record import command_line, machine, rounded
from moet_desk.cli.context import Invocation, engine_options, global_options, output_options
from moet_desk.cli.eval_data import Task, check_length, read_tasks, read_texts
from moet_desk.cli.evaluate import shown, windows_of_files
from moet_desk.cli.models import complete_model
from moet_desk.cli.output import Format, print_document, print_event, print_table, print_text
from moet_desk.engine.gate_file import Measured
from moet_desk.errors import fail
from moet_desk.store.library import DEMO
from moet_desk.telemetry import CPU

if TYPE_CHECKING:
    from moet_desk.engine.gate_curve import Choice, Counts, Point
    from moet_desk.engine.handle import EngineOptions
    from moet_desk.engine.text import Text

_FILE = click.Path(path_type=Path)
_SHARE = click.FloatRange(0, 1)
_SHOWN_EVERY = 10
"""People see each so many-th threshold of the curve, and the chosen one."""


@click.group()
@global_options
def calibrate() -> None:
    """Fit a model's choices to texts; what is found is kept in its pack."""


@calibrate.command()
@click.argument("model", default=DEMO, shell_complete=complete_model)
@click.option("--text", "texts", multiple=True, type=_FILE, help="Text to read; may be repeated.")
@click.option("--tasks", type=_FILE, help="Questions with answers (.jsonl), as for eval.")
@click.option("--catch", default=0.9, type=_SHARE, show_default=True,
              help="Share of flips to catch.")  # fmt: skip
@click.option("--budget", default=0.15, type=_SHARE, show_default=True,
              help="Share of steps that may be rerun.")  # fmt: skip
@click.option("--text-tokens", type=click.IntRange(1), help="Read so much of each text at most.")
@click.option("--limit", type=click.IntRange(1), help="Only the first tasks.")
@click.option("--max-tokens", default=256, type=click.IntRange(1), help="Longest answer to a task.")
@output_options
@click.pass_obj
def gate(
    invocation: Invocation,
    /,
    *,
    model: str,
    texts: tuple[Path, ...],
    tasks: Path | None,
    catch: float,
    budget: float,
    text_tokens: int | None,
    limit: int | None,
    max_tokens: int,
) -> None:
    """Find the confidence below which balanced reruns a step of MODEL.

    Compares fast with exact on every token of the texts (--text), or of the answers that exact
    gives to tasks (--tasks), and keeps the result in the pack. It computes on the CPU.
    """
    if bool(texts) == (tasks is not None):
        raise click.UsageError("Say what to measure on: --text FILE, or --tasks FILE")
    files = tuple((path, read_texts(path)) for path in texts)
    asked = None if tasks is None else _Asked(tasks, read_tasks(tasks, limit), max_tokens)
    settings = invocation.load_settings().settings
    options = replace(
        engine_options(settings), device=CPU, save_heat=False, opportunistic=False, drafts="off"
    )
    pack = invocation.model_path(model)
    if not os.access(pack, os.W_OK):  # before the work, not after it
        raise fail("MD-DISK-03", path=str(pack), reason="Permission denied")
    if asked is None:
        found = _measure_texts(pack, options, files, text_tokens, quiet=invocation.quiet)
    else:
        found = _measure_answers(pack, options, asked, quiet=invocation.quiet)

    from moet_desk.engine.gate_curve import choose

    choice = choose(found.counts.curve(), target=catch, budget=budget)
    stored = None if choice is None else _store(pack, found, choice, catch, budget)
    result = _document(found, choice, catch, budget, stored)
    if invocation.format is Format.HUMAN:
        _print_for_people(found, choice, catch, budget)
        return
    head = {**machine(), "command": command_line(), "model": model, "device": CPU}
    if invocation.format is Format.JSON:
        print_document({**head, **result})
    else:
        print_event("gate", **head, **result)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The tasks of `--tasks`."""

    path: Path
    tasks: list[Task]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class _Found:
    """What was counted, on what."""

    measured: Measured

    counts: Counts
    identity: str  # of the pack
    texts: list[dict[str, Any]]


def _measure_texts(
    pack: Path,
    options: EngineOptions,
    files: Sequence[tuple[Path, list[str]]],
    text_tokens: int | None,
    *,
    quiet: bool,
) -> _Found:
    from moet_desk.engine.evaluate import count_flips, opened_core  # brings in torch
    from moet_desk.engine.gate_curve import Counts

    counts = Counts()
    texts = []
    with opened_core(pack, options) as (core, text):
        size = core.plan.context
        cut = windows_of_files(text, files, size=size, most_tokens=text_tokens)
        for (path, _), windows in zip(files, cut, strict=True):
            before = counts.tokens
            with shown(path.name, "tokens", quiet=quiet) as progress:
                count_flips(core, windows, counts, progress)
            tokens = counts.tokens - before
            texts.append({"file": path.name, "tokens": tokens, "windows": len(windows)})
        return _Found(Measured.TEXT, counts, core.reader.meta.identity, texts)


def _measure_answers(pack: Path, options: EngineOptions, asked: _Asked, *, quiet: bool) -> _Found:
    """Judge the steps that a gate would judge in answers: none of a question's tokens.

    The answers are what `exact` says, not the wanted ones: only those are what `balanced` should
    come to, and a model seldom words an answer as a file does.
    """
    from moet_desk.engine.evaluate import answer_exactly, count_answer_flips, opened_core
    from moet_desk.engine.gate_curve import Counts

    counts, name = Counts(), asked.path.name
    with opened_core(pack, options) as (core, text):
        prompts = [_prompt_ids(text, task) for task in asked.tasks]
        for task, ids in zip(asked.tasks, prompts, strict=True):
            check_length(asked.path, task, len(ids), core.plan.context)
        answers = []
        with shown(name, "answers", quiet=quiet) as progress:
            for ids in prompts:
                answers.append(answer_exactly(core, text, ids, asked.max_tokens))
                progress(len(answers), len(prompts))
        with shown(f"{name}, reruns", "answers", quiet=quiet) as progress:
            count_answer_flips(core, answers, counts, progress)
        texts = [{"file": name, "tokens": counts.tokens, "windows": len(answers)}]
        return _Found(Measured.ANSWERS, counts, core.reader.meta.identity, texts)


def _prompt_ids(text: Text, task: Task) -> list[int]:
    if task.question is None:
        return text.encode_prompt(task.prompt or "")
    return text.encode_chat([{"role": "user", "content": task.question}])


def _store(pack: Path, found: _Found, choice: Choice, catch: float, budget: float) -> Path:
    import datetime

    from moet_desk.engine.gate_file import SCHEMA, Calibration, GatePoint, write_gate

    counts = found.counts
    made = Calibration(
        schema=SCHEMA,
        identity=found.identity,
        tau=choice.point.tau,
        limit=choice.limit,
        target=catch,
        budget=budget,
        # a choice needs flips, so no share is unknown
        curve=[GatePoint(one.tau, one.rerun or 0.0, one.caught or 0.0) for one in counts.curve()],
        tokens=counts.tokens,
        flips=counts.flips,
        texts=[one["file"] for one in found.texts],
        measured=found.measured,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    return write_gate(pack, made)


# -- what is printed -------------------------------------------------------------------------


def _document(
    found: _Found, choice: Choice | None, catch: float, budget: float, stored: Path | None
) -> dict[str, Any]:
    chosen = _rounded_point(choice.point) if choice else dict.fromkeys(("tau", "rerun", "caught"))
    return {
        "measured": found.measured.value,
        "texts": found.texts,
        "tokens": found.counts.tokens,
        "flips": found.counts.flips,
        "target": catch,
        "budget": budget,
        **chosen,
        "limit": choice.limit.value if choice else None,
        "curve": [_rounded_point(point) for point in found.counts.curve()],
        "stored": str(stored) if stored else None,
    }


def _rounded_point(point: Point) -> dict[str, Any]:
    return {name: rounded(value, 6) for name, value in asdict(point).items()}


def _print_for_people(found: _Found, choice: Choice | None, catch: float, budget: float) -> None:
    print_text(f"{found.counts.tokens} tokens, {found.counts.flips} flips")
    rows = [["tau", "rerun", "flips caught", ""]]
    for at, point in enumerate(found.counts.curve()):
        is_chosen = choice is not None and point == choice.point
        if is_chosen or at % _SHOWN_EVERY == 0:
            mark = "chosen" if is_chosen else ""
            rows.append([f"{point.tau:.2f}", _percent(point.rerun), _percent(point.caught), mark])
    print_table(rows)
    print_text(_verdict(choice, catch, budget))


def _verdict(choice: Choice | None, catch: float, budget: float) -> str:
    from moet_desk.engine.gate_curve import Limit

    if choice is None:
        return "Nothing was chosen or kept: fast and exact agree everywhere. Read more text."
    tau = f"{choice.point.tau:.2f}"
    if choice.limit is Limit.TARGET:
        return f"Kept {tau}, the smallest that catches {catch:.0%} of the flips."
    return (
        f"Kept {tau}, which catches most within {budget:.0%} of reruns;"
        f" {catch:.0%} of the flips would take more."
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
