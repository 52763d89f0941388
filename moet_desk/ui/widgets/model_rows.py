"""Rows of the models screen as text: packs, and what stands under the list. Pure. UI thread."""

from __future__ import annotations

from textual.content import Content

from moet_desk.telemetry import EngineState
from moet_desk.ui.desk import JobState, JobView, PackCondition, PackView
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.job_lines import job_glyph
from moet_desk.ui.widgets.problem import problem_content
from moet_desk.ui.widgets.setup_pages import wrapped
from moet_desk.units import show_disk

PACK_HEAD = " Name                      State             Size   Family          Gate"

_MORE_KEYS = " C Change plan  R Repair  O Open folder  / Filter  S Sign in to the hub"
"""Keys that the footer has no room for; a test compares them with the bindings."""

_STYLES = {
    PackCondition.READY: "$status-ok",
    PackCondition.PACKING: "bold $status-warn",
    PackCondition.PAUSED: "$status-idle",
    PackCondition.INCOMPLETE: "$status-idle",
    PackCondition.DAMAGED: "bold $status-bad",
    PackCondition.OTHER_FORMAT: "bold $status-warn",
}


def condition_glyph(condition: PackCondition, glyphs: Glyphs) -> str:
    """The character of a pack's state."""
    return {
        PackCondition.READY: glyphs.states[EngineState.NO_MODEL],
        PackCondition.PACKING: job_glyph(JobState.RUNNING, glyphs),
        PackCondition.PAUSED: job_glyph(JobState.PAUSED, glyphs),
        PackCondition.INCOMPLETE: job_glyph(JobState.PAUSED, glyphs),
        PackCondition.DAMAGED: glyphs.bad,
        PackCondition.OTHER_FORMAT: "?",
    }[condition]


def pack_row(pack: PackView, glyphs: Glyphs, *, loaded: bool) -> Content:
    """One pack: glyph and word of its state, size, family, calibrated gate."""
    glyph, style = condition_glyph(pack.condition, glyphs), _STYLES[pack.condition]
    word = pack.progress or pack.condition.value
    if loaded:
        glyph, word = glyphs.states[EngineState.READY], "loaded"
    gate = "-" if pack.gate is None else f"{pack.gate:.2f}"
    return Content.assemble(
        f" {clean_line(pack.name, 24):<24} ",
        (glyph, style),
        f" {clean_line(word, 13):<13} {show_disk(pack.n_bytes):>9}   ",
        f"{clean_line(pack.family, 14):<14} {gate:>5}",
    )


def pack_notes(pack: PackView, glyphs: Glyphs, width: int) -> list[Content]:
    """What stands under the list about a pack."""
    lines = [Content.styled(f" {clean_line(pack.name, width - 2)}", "bold")]
    for detail in pack.details:
        lines += wrapped(detail, width)
    if pack.error is not None:
        lines.append(problem_content(pack.error, glyphs))
    return [*lines, Content.styled(_MORE_KEYS, "$dim")]


def job_notes(job: JobView, glyphs: Glyphs, width: int) -> list[Content]:
    """What stands under the list about a job."""
    lines = [Content.styled(f" {clean_line(f'{job.model}: {job.kind}', width - 2)}", "bold")]
    if job.error is not None:
        lines.append(problem_content(job.error, glyphs))
    return lines + [Content(f" {clean_line(word, width - 2)}") for word in job.words]


def delete_question(pack: PackView) -> tuple[str, str]:
    """Title and text of the question before a pack is deleted."""
    parts = [f"{show_disk(pack.n_bytes)} become free. Chats are kept."]
    parts += [pack.again] if pack.again else []
    return f"Delete {clean_line(pack.name, 40)}?", " ".join(parts)
