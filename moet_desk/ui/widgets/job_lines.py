"""Jobs as text: their page in the wizard, one line each in lists and above the status line.

Pure functions, and the widget that stands above the status line. Time left is shown after a few
seconds of data only, and never without "about". UI thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widget import Widget

from moet_desk.ui.desk import JobState, JobStep, JobView
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.gauges import bar, spread
from moet_desk.ui.widgets.problem import problem_content
from moet_desk.units import show_disk, show_rate

SHOWN_JOBS = 2
"""Rows above the status line; more jobs are counted there and listed on the models screen."""

_STYLES = {
    JobState.RUNNING: "bold $status-warn",
    JobState.PAUSED: "$status-idle",
    JobState.STALLED: "bold $status-bad",
    JobState.FAILED: "bold $status-bad",
    JobState.DONE: "$status-ok",
}


def job_glyph(state: JobState, glyphs: Glyphs) -> str:
    """The character of a job's state."""
    return {
        JobState.RUNNING: glyphs.now,
        JobState.PAUSED: "=" if glyphs.name == "ascii" else "‖",
        JobState.STALLED: glyphs.warn,
        JobState.FAILED: glyphs.bad,
        JobState.DONE: glyphs.ok,
    }[state]


def left_words(step: JobStep) -> str:
    """About how long a step takes still; empty while its rate is not known."""
    if not step.rate or step.finished or step.total <= step.done:
        return ""
    return f"about {_foreseen((step.total - step.done) / step.rate)} left"


def _foreseen(seconds: float) -> str:
    """What can be foreseen: 10 s below two minutes, then minutes, then quarters of an hour."""
    if seconds < 115:
        return f"{max(1, round(seconds / 10)) * 10} s"
    quarters = round(seconds / 900)
    if quarters < 4:
        return f"{round(seconds / 60)} m"
    return f"{quarters // 4} h" + (f" {quarters % 4 * 15} m" if quarters % 4 else "")


def figures(step: JobStep) -> str:
    """Done of total, and the rate, in the step's unit."""
    if step.unit == "bytes":
        parts = [f"{show_disk(step.done)} of {show_disk(step.total)}"]
        parts += [show_rate(step.rate)] if step.rate else []
    else:
        parts = [f"{step.done:,} of {step.total:,} {step.unit}"]
        parts += [f"{step.rate:.0f} {step.unit}/s"] if step.rate else []
    return "   ".join([*parts, *([left_words(step)] if left_words(step) else [])])


def share(step: JobStep) -> float:
    """How much of a step is done, from 0 to 1."""
    if step.finished:
        return 1.0
    return step.done / step.total if step.total else 0.0


def state_words(job: JobView) -> str:
    """The state of a job in words: "paused by you", "MD-NET-01 No network"."""
    if job.error is not None:
        return f"{job.error.title}  {job.error.code}"
    if job.state is JobState.PAUSED:
        return "paused"
    if job.state is JobState.STALLED:
        return "has said nothing for a while"
    if job.state is JobState.DONE:
        return "done"
    step = job.step
    return "starting" if step is None else (left_words(step) or step.note or step.name.lower())


def job_line(job: JobView, glyphs: Glyphs, width: int) -> Content:
    """One job in one row: glyph, model and verb, bar, percent, state."""
    name = clean_line(f"{job.model} {job.kind}", 26)
    step = job.step
    part = share(step) if step is not None else 0.0
    part = 1.0 if job.state is JobState.DONE else part
    head = Content.assemble(
        " ", (job_glyph(job.state, glyphs), _STYLES[job.state]), f" {name:<26} "
    )
    drawn = Content.styled(bar(part, 20, glyphs), "$status-ok")
    text = f" {part * 100:3.0f} %  {state_words(job)}"
    return (head + drawn + text).truncate(width, ellipsis=True)


def job_page(job: JobView | None, *, title: str, width: int, glyphs: Glyphs) -> Content:
    """A job in the wizard: each step with its bar and figures, the last events in words."""
    note = Content.styled("you can close this; it goes on ", "$dim")
    lines = [spread(Content.styled(f" {clean_line(title, 44)}", "bold"), note, width), Content("")]
    if job is None:
        return Content("\n").join([*lines, Content(f" {glyphs.now} Starting")])
    for step in job.steps:
        lines += _step_lines(step, job, width, glyphs)
    if job.step is None and job.state is JobState.RUNNING:
        lines.append(Content(f" {glyphs.now} Starting: what there is to do is looked up"))
    if job.state in (JobState.PAUSED, JobState.STALLED):
        glyph = (job_glyph(job.state, glyphs), _STYLES[job.state])
        words = f" {state_words(job).capitalize()}. What is done is kept. P goes on."
        lines += [Content(""), Content.assemble(" ", glyph, words)]
    if job.error is not None:
        lines += [Content(""), problem_content(job.error, glyphs)]
    if job.words:
        lines += [Content("")]
        lines += [Content.styled(f" {clean_line(word, width - 2)}", "$dim") for word in job.words]
    return Content("\n").join(lines)


def _step_lines(step: JobStep, job: JobView, width: int, glyphs: Glyphs) -> list[Content]:
    if step.finished:
        done = Content.assemble(" ", (glyphs.ok, "$status-ok"), f" {step.name:<11}")
        return [done + Content.styled(clean_line(step.note, width - 16), "$dim")]
    if not step.total:
        waiting = clean_line(step.note, width - 16)
        return [Content.assemble(f" {glyphs.todo} ", f"{step.name:<11}", (waiting, "$dim"))]
    room = max(10, width - 26)
    head = Content.assemble(
        " ", (job_glyph(job.state, glyphs), _STYLES[job.state]), f" {step.name:<11}"
    )
    drawn = Content.styled(bar(share(step), room, glyphs), "$status-ok")
    lines = [head + drawn + f" {share(step) * 100:3.0f} %", Content(" " * 14 + figures(step))]
    return [*lines, Content(" " * 14 + clean_line(step.note, width - 16))] if step.note else lines


class JobLines(Widget):
    """Running and stopped jobs above the status line, one row each; no row without a job."""

    DEFAULT_CSS = "JobLines { height: auto; max-height: 3; display: none; }"

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__()
        self._glyphs = glyphs
        self._jobs: tuple[JobView, ...] = ()

    def show(self, jobs: Sequence[JobView]) -> None:
        """Show these jobs; finished ones are left out."""
        jobs = tuple(job for job in jobs if job.state is not JobState.DONE)
        if jobs == self._jobs:
            return
        grown = len(jobs) != len(self._jobs)
        self._jobs = jobs
        self.display = bool(jobs)
        self.refresh(layout=grown)

    def render(self) -> Content:
        width = self.size.width
        lines = [job_line(job, self._glyphs, width) for job in self._jobs[:SHOWN_JOBS]]
        n_more = len(self._jobs) - SHOWN_JOBS
        lines += [Content(f"   and {n_more} more, F4 lists them")] if n_more > 0 else []
        return Content("\n").join(lines)
