"""`moet-desk eval`: what the qualities of a model cost, on text, on tasks and in long contexts.

Files are read before the model is loaded; each part is printed when it is measured, and with --json
all of them in one document at the end (docs/quality.md has its schema). Computes on the CPU. Runs
in the main thread. Absent figures are null, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moet_desk.cli.context import Invocation, engine_options, output_options
from moet_desk.cli.engine import opened_engine
from moet_desk.cli.eval_answers import Progress, Way, find_needles, run_tasks
from moet_desk.cli.eval_data import Task, nothing, read_tasks, read_texts
from moet_desk.cli.eval_report import Report, needle_part, task_part, text_part
from moet_desk.cli.models import complete_model
from moet_desk.cli.output import Meter
from moet_desk.engine.handle import DEFAULT_GATE, Codebook, EngineHandle, EngineOptions, Quality
from moet_desk.store.library import DEMO
from moet_desk.telemetry import CPU

if TYPE_CHECKING:
    from torch import Tensor

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
    sweep: tuple[float, ...]


def _gates(context: click.Context, option: click.Parameter, given: str | None) -> tuple[float, ...]:
    """The thresholds of `--sweep`, each once."""
    try:
        found = dict.fromkeys(float(one) for one in given.split(",")) if given else {}
    except ValueError:
        raise click.BadParameter("give numbers from 0 to 1 with commas between") from None
    if not all(0 <= one <= 1 for one in found):
        raise click.BadParameter("a gate is from 0 to 1")
    return tuple(found)


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
@click.option("--sweep", metavar="GATES", callback=_gates,
              help="Answer the tasks balanced at each of these gates (0,0.5,1).")  # fmt: skip
@click.option(
    "--codebook", "levels", type=click.Choice([one.value for one in Codebook]),
    default=Codebook.SYMMETRIC.value, show_default=True,
    help="Levels of 2-bit experts; asymmetric shows what the symmetry is worth.",
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
    sweep: tuple[float, ...],
    levels: str,
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
    if sweep and (tasks is None or Quality.BALANCED.value not in names or gate is not None):
        raise click.UsageError("--sweep is of balanced answers: --tasks FILE, and no --gate")
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
        sweep=sweep,
    )
    codebook = Codebook(levels)
    # one answer at a time: the memory that more would need can hold experts instead
    options = replace(
        engine_options(settings), device=CPU, save_heat=False, max_running=1, codebook=codebook,
        drafts="off", opportunistic=False,  # a measurement must come out the same again
    )  # fmt: skip
    pack = invocation.model_path(model)
    report = Report(invocation, model, codebook)
    if wishes.texts:
        _measure_texts(pack, options, wishes, report)
    if wishes.tasks is not None or wishes.needle:
        with opened_engine(pack, options, quiet=invocation.quiet) as handle:
            _measure_answers(handle, wishes, report)
    report.end()


# -- measuring -------------------------------------------------------------------------------


def _measure_texts(pack: Path, options: EngineOptions, wishes: Wishes, report: Report) -> None:
    from moet_desk.engine import evaluate as measuring  # brings in torch

    with measuring.opened_core(pack, options) as (core, text):
        size = core.plan.context
        cut = windows_of_files(text, wishes.texts, size=size, most_tokens=wishes.text_tokens)
        for (path, _), windows in zip(wishes.texts, cut, strict=True):
            with shown(path.name, "tokens", quiet=report.quiet) as progress:
                qualities = [q for q in wishes.qualities if q in measuring.PLANES]
                figures = measuring.measure(core, windows, qualities, progress)
            report.text(text_part(path, figures, size, len(windows)))


def _measure_answers(handle: EngineHandle, wishes: Wishes, report: Report) -> None:
    info = handle.model()
    gate = wishes.gate
    if gate is None:
        gate = info.default_gate if info is not None else DEFAULT_GATE
    if wishes.tasks is not None:
        path, tasks = wishes.tasks
        with shown(path.name, "answers", quiet=report.quiet) as progress:
            figures = run_tasks(
                handle, tasks, _ways(wishes, gate), path=path, max_tokens=wishes.max_tokens,
                progress=progress,
            )  # fmt: skip
        report.tasks(task_part(path, figures, wishes.max_tokens, None if wishes.sweep else gate))
    if wishes.needle:
        context = info.context if info is not None else 0
        with shown("Hidden numbers", "answers", quiet=report.quiet) as progress:
            found = find_needles(
                handle, wishes.qualities, context=context, trials=wishes.trials, gate=gate,
                progress=progress,
            )  # fmt: skip
        report.needle(needle_part(found, wishes.trials, gate))


def _ways(wishes: Wishes, gate: float) -> list[Way]:
    """How tasks are to be answered: balanced once, or once for each gate of a sweep."""
    gates = wishes.sweep or (gate,)
    return [
        way
        for quality in wishes.qualities
        for way in (
            [Way(quality, one) for one in gates] if quality is Quality.BALANCED else [Way(quality)]
        )
    ]


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
