"""`moet-desk eval`: what the qualities of a model cost, on text, on tasks and in long contexts.

Files are read before the model is loaded; each part is printed when it is measured, and with --json
all of them in one document at the end (docs/quality.md has its schema). Computes on the CPU. Runs
in the main thread. Absent figures are null, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moet_desk.cli.bench_record import command_line, machine, rounded
from moet_desk.cli.context import Invocation, engine_options, output_options
from moet_desk.cli.engine import opened_engine
from moet_desk.cli.eval_answers import (
    DEPTHS,
    Found,
    Progress,
    TaskFigures,
    find_needles,
    run_tasks,
)
from moet_desk.cli.eval_data import Task, nothing, read_tasks, read_texts
from moet_desk.cli.models import complete_model
from moet_desk.cli.output import Format, Meter, print_document, print_event, print_table, print_text
from moet_desk.engine.handle import DEFAULT_GATE, EngineHandle, EngineOptions, Quality
from moet_desk.store.library import DEMO
from moet_desk.telemetry import CPU

if TYPE_CHECKING:
    from torch import Tensor

    from moet_desk.engine.evaluate import TextFigures
    from moet_desk.engine.text import Text

QUALITIES = tuple(quality.value for quality in Quality)
_FILE = click.Path(path_type=Path)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is to be measured. Files are read already."""

    qualities: tuple[Quality, ...]
    texts: tuple[tuple[Path, list[str]], ...]
    tasks: tuple[Path, list[Task]] | None
    needle: bool
    text_tokens: int | None
    max_tokens: int
    trials: int
    gate: float | None


@click.command("eval")
@click.argument("model", default=DEMO, shell_complete=complete_model)
@click.option("--text", "texts", multiple=True, type=_FILE, help="Text to read; may be repeated.")
@click.option("--tasks", type=_FILE, help="Questions with right answers (.jsonl).")
@click.option("--needle", is_flag=True, help="Find a number hidden in a long prompt.")
@click.option(
    "--quality", "names", multiple=True, type=click.Choice(QUALITIES), default=QUALITIES,
    help="What to measure; all by default. balanced has answers only.",
)  # fmt: skip
@click.option(
    "--gate", type=click.FloatRange(0, 1),
    help="Below which probability balanced makes a token again.",
)  # fmt: skip
@click.option("--text-tokens", type=click.IntRange(1), help="Read so much of each text at most.")
@click.option("--limit", type=click.IntRange(1), help="Only the first tasks.")
@click.option("--max-tokens", default=256, type=click.IntRange(1), help="Longest answer to a task.")
@click.option("--context", type=click.IntRange(256), help="Tokens of a window of text, and of the"
              " longest prompt with a hidden number.")  # fmt: skip
@click.option("--trials", default=3, type=click.IntRange(1, 100), help="Hidden numbers per place.")
@output_options
@click.pass_obj
def evaluate(
    invocation: Invocation,
    /,
    *,
    model: str,
    texts: tuple[Path, ...],
    tasks: Path | None,
    needle: bool,
    names: tuple[str, ...],
    gate: float | None,
    text_tokens: int | None,
    limit: int | None,
    max_tokens: int,
    context: int | None,
    trials: int,
) -> None:
    """Measure what the qualities of MODEL cost, against exact.

    Give --text, --tasks or --needle, or several of them. It computes on the CPU.
    """
    if not texts and tasks is None and not needle:
        raise click.UsageError("Say what to measure: --text FILE, --tasks FILE or --needle")
    if texts and set(names) == {Quality.BALANCED.value}:
        raise click.UsageError("balanced is measured on answers: --tasks FILE or --needle")
    settings = invocation.load_settings(memory__context=context).settings
    wishes = Wishes(
        qualities=tuple(quality for quality in Quality if quality.value in names),
        texts=tuple((path, read_texts(path)) for path in texts),
        tasks=None if tasks is None else (tasks, read_tasks(tasks, limit)),
        needle=needle,
        text_tokens=text_tokens,
        max_tokens=max_tokens,
        trials=trials,
        gate=settings.answers.gate if gate is None else gate,
    )
    # one answer at a time: the memory that more would need can hold experts instead
    options = replace(
        engine_options(settings), device=CPU, save_heat=False, max_running=1,
        opportunistic=False,  # a measurement must come out the same again
    )  # fmt: skip
    pack = invocation.model_path(model)
    report = _Report(invocation, model)
    if wishes.texts:
        _measure_texts(pack, options, wishes, report)
    if wishes.tasks is not None or wishes.needle:
        with opened_engine(pack, options, quiet=invocation.quiet) as handle:
            _measure_answers(handle, wishes, report)
    report.end()


class _Report:
    """Prints each part when it comes, in the format that was asked for."""

    def __init__(self, invocation: Invocation, model: str) -> None:
        self._format = invocation.format
        self.quiet = invocation.quiet
        self._head = {**machine(), "command": command_line(), "model": model, "device": CPU}
        self._parts: dict[str, Any] = {"texts": None, "tasks": None, "needle": None}

    def text(self, part: dict[str, Any]) -> None:
        self._parts["texts"] = [*(self._parts["texts"] or ()), part]
        self._show("text", part, _text_rows)

    def tasks(self, part: dict[str, Any]) -> None:
        self._parts["tasks"] = part
        self._show("tasks", part, _task_rows)

    def needle(self, part: dict[str, Any]) -> None:
        self._parts["needle"] = part
        self._show("needle", part, _needle_rows)

    def end(self) -> None:
        if self._format is Format.JSON:
            print_document({**self._head, **self._parts})
        elif self._format is Format.NDJSON:
            print_event("finished", **self._head)

    def _show(
        self, name: str, part: dict[str, Any], rows: Callable[[dict[str, Any]], list[list[str]]]
    ) -> None:
        if self._format is Format.HUMAN:
            print_text(_title(name, part))
            print_table(rows(part))
            print_text("")
        elif self._format is Format.NDJSON:
            print_event(name, **part)


# -- measuring -------------------------------------------------------------------------------


def _measure_texts(pack: Path, options: EngineOptions, wishes: Wishes, report: _Report) -> None:
    from moet_desk.engine import evaluate as measuring  # brings in torch

    with measuring.opened_core(pack, options) as (core, text):
        size = core.plan.context
        cut = windows_of_files(text, wishes.texts, size=size, most_tokens=wishes.text_tokens)
        for (path, _), windows in zip(wishes.texts, cut, strict=True):
            with shown(path.name, "tokens", quiet=report.quiet) as progress:
                qualities = [q for q in wishes.qualities if q in measuring.PLANES]
                figures = measuring.measure(core, windows, qualities, progress)
            report.text(_text_part(path, figures, size, len(windows)))


def _measure_answers(handle: EngineHandle, wishes: Wishes, report: _Report) -> None:
    info = handle.model()
    gate = wishes.gate
    if gate is None:
        gate = info.default_gate if info is not None else DEFAULT_GATE
    if wishes.tasks is not None:
        path, tasks = wishes.tasks
        with shown(path.name, "answers", quiet=report.quiet) as progress:
            figures = run_tasks(
                handle,
                tasks,
                wishes.qualities,
                path=path,
                max_tokens=wishes.max_tokens,
                gate=gate,
                progress=progress,
            )
        report.tasks(_task_part(path, figures, wishes.max_tokens, gate))
    if wishes.needle:
        context = info.context if info is not None else 0
        with shown("Hidden numbers", "answers", quiet=report.quiet) as progress:
            found = find_needles(
                handle, wishes.qualities, context=context, trials=wishes.trials, gate=gate,
                progress=progress,
            )  # fmt: skip
        report.needle(_needle_part(found, wishes.trials, gate))


def windows_of_files(
    text: Text,
    files: Sequence[tuple[Path, list[str]]],
    *,
    size: int,
    most_tokens: int | None,
) -> list[list[Tensor]]:
    """The windows of each file, `most_tokens` scored tokens of each at most.

    Raises:
        MoetError: MD-EVAL-03 a file has too little text.
    """
    from moet_desk.engine.evaluate import windows_of

    cut = [
        windows_of(text, documents, size=size, most_tokens=most_tokens) for _, documents in files
    ]
    for (path, _), windows in zip(files, cut, strict=True):
        if not windows:
            raise nothing(path, "no text of two tokens or more")
    return cut


@contextmanager
def shown(name: str, unit: str, *, quiet: bool) -> Iterator[Progress]:
    """What a measurement tells its progress to; printed on stderr unless quiet."""
    meter = Meter(quiet=quiet)
    try:
        yield lambda done, total: meter.show(name, done, total, f"{done}/{total} {unit}")
    finally:
        meter.close()


# -- figures as a document -------------------------------------------------------------------


def _text_part(path: Path, figures: TextFigures, size: int, n_windows: int) -> dict[str, Any]:
    qualities: dict[str, Any] = {}
    for quality, nll in figures.nll.items():
        distance = figures.distance.get(quality)
        against = asdict(distance) if distance is not None else {}
        qualities[quality.value] = {
            "nll": rounded(nll, 6),
            "perplexity": rounded(math.exp(nll), 4) if nll < _LARGEST_NLL else None,
            "kl_mean": rounded(against.get("kl_mean"), 6),
            "top1_agreement": rounded(against.get("top1_agreement"), 6),
            "largest_margin": rounded(against.get("largest_margin"), 4),
        }
    head = {
        "file": path.name,
        "tokens": figures.tokens,
        "windows": n_windows,
        "window_tokens": size,
    }
    return {**head, "qualities": qualities}


_LARGEST_NLL = 700.0
"""Beyond it the perplexity is no float any more."""


def _task_part(path: Path, figures: TaskFigures, max_tokens: int, gate: float) -> dict[str, Any]:
    qualities: dict[str, Any] = {}
    for quality, score in figures.scores.items():
        ratio = figures.lengths.get(quality)
        against = asdict(ratio) if ratio is not None else {}
        qualities[quality.value] = {
            "right": score.right,
            "share": rounded(score.right / figures.tasks, 4),
            "cut": score.cut,
            "rerun_share": rounded(score.rerun_share, 4),
            "length_ratio_median": rounded(against.get("median"), 4),
            "length_ratio_geometric_mean": rounded(against.get("geometric_mean"), 4),
        }
    head = {"file": path.name, "tasks": figures.tasks, "max_tokens": max_tokens}
    head["gate"] = gate
    return {**head, "qualities": qualities}


def _needle_part(found: Sequence[Found], trials: int, gate: float) -> dict[str, Any]:
    places = [
        {
            "quality": one.quality.value,
            "context": one.context,
            "depth": one.depth,
            "found": one.found,
            "share": rounded(one.found / one.trials, 4),
        }
        for one in found
    ]
    return {"trials": trials, "gate": gate, "places": places}


# -- figures for people ----------------------------------------------------------------------


def _title(name: str, part: dict[str, Any]) -> str:
    if name == "text":
        return f"{part['file']}, {part['tokens']} tokens, {part['windows']} windows"
    if name == "tasks":
        return f"{part['file']}, {part['tasks']} tasks"
    return f"Hidden numbers found, {part['trials']} for each place"


def _text_rows(part: dict[str, Any]) -> list[list[str]]:
    head = ["quality", "nll", "perplexity", "KL to exact", "same top token", "largest margin"]
    rows = [
        [
            quality,
            _figure(one["nll"], ".4f"),
            _figure(one["perplexity"], ".2f"),
            _figure(one["kl_mean"], ".4f"),
            _figure(one["top1_agreement"], ".2%"),
            _figure(one["largest_margin"], ".2f"),
        ]
        for quality, one in part["qualities"].items()
    ]
    return [head, *rows]


def _task_rows(part: dict[str, Any]) -> list[list[str]]:
    head = ["quality", "right", "share", "cut", "made again", "length, median"]
    head.append("length, geometric mean")
    rows = [
        [
            quality,
            str(one["right"]),
            _figure(one["share"], ".1%"),
            str(one["cut"]),
            _figure(one["rerun_share"], ".1%"),
            _figure(one["length_ratio_median"], ".3f"),
            _figure(one["length_ratio_geometric_mean"], ".3f"),
        ]
        for quality, one in part["qualities"].items()
    ]
    return [head, *rows]


def _needle_rows(part: dict[str, Any]) -> list[list[str]]:
    places = part["places"]
    shares = {(one["quality"], one["context"], one["depth"]): one["share"] for one in places}
    lines = dict.fromkeys((one["quality"], one["context"]) for one in places)
    head = ["quality", "context", *(f"at {depth:.0%}" for depth in DEPTHS)]
    rows = [
        [quality, str(context), *(f"{shares[quality, context, depth]:.0%}" for depth in DEPTHS)]
        for quality, context in lines
    ]
    return [head, *rows]


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
