"""The wizard's pages as text: pure functions from records and a width to rows.

Every mark is a glyph and a word besides its colour; every row fits 80 columns. UI thread.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from textual.content import Content

from moet_desk.telemetry import LoadStep
from moet_desk.ui.desk import Fact, Fit, MachineView, Mark, Offer, PlanView, PlanWishes, TierRow
from moet_desk.ui.setup_steps import STEPS, Setup, Step, downloads, fields
from moet_desk.ui.text import clean, clean_line
from moet_desk.ui.theme import Glyphs, tier_variable
from moet_desk.ui.widgets.gauges import loading_lines, spread
from moet_desk.units import show_count, show_disk, show_duration, show_memory, show_rate

ROOM = 34
"""Columns of a tier's bar in a window of 80."""

_MARK_STYLES = {
    Mark.OK: "$status-ok",
    Mark.WARN: "bold $status-warn",
    Mark.BAD: "bold $status-bad",
    Mark.NOTE: "$dim",
    Mark.UNKNOWN: "$dim",
}
_FIT_MARKS = {
    Fit.BEST: Mark.OK,
    Fit.GOOD: Mark.OK,
    Fit.SLOW: Mark.WARN,
    Fit.NO_ROOM: Mark.BAD,
    Fit.UNKNOWN: Mark.UNKNOWN,
}
_QUALITY_WORDS = {
    "fast": "2-bit experts",
    "balanced": "4-bit ones where unsure",
    "exact": "the model as shipped",
}


def mark_glyph(mark: Mark, glyphs: Glyphs) -> str:
    """The character of a mark."""
    return {
        Mark.OK: glyphs.ok,
        Mark.WARN: glyphs.warn,
        Mark.BAD: glyphs.bad,
        Mark.NOTE: glyphs.dot,
        Mark.UNKNOWN: "?",
    }[mark]


def marked(mark: Mark, glyphs: Glyphs) -> Content:
    """A mark's character in its colour."""
    return Content.styled(mark_glyph(mark, glyphs), _MARK_STYLES[mark])


def wrapped(text: str, width: int, indent: int = 1) -> list[Content]:
    """A text of a hub, a file or ours as indented rows."""
    lines = textwrap.wrap(" ".join(clean(text).split()), max(20, width - indent - 1))
    return [Content(" " * indent + line) for line in lines]


def pointed(row: Content, glyphs: Glyphs, *, here: bool) -> Content:
    """A row of a list with the cursor's mark in its first column, which is not colour alone."""
    return Content.styled(glyphs.now, "bold") + row[1:] if here else row


def rows(lines: Sequence[Content]) -> Content:
    """Rows as one text."""
    return Content("\n").join(lines)


def head_line(setup: Setup, glyphs: Glyphs, width: int) -> Content:
    """The title and the steps, the present one reversed and in brackets."""
    title = "set-up" if setup.first is Step.MACHINE else "add a model"
    left = Content.styled(f" moet-desk {glyphs.dot} {title}", "bold")
    parts = []
    for number, step in enumerate(STEPS[STEPS.index(setup.first) :], start=1):
        text = f"{number} {step.value}"
        here = step is setup.step
        parts.append(Content.styled(f"[{text}]", "reverse bold") if here else Content(f" {text} "))
    return spread(left, Content(" ").join(parts), width)


# -- machine -----------------------------------------------------------------------------------


def machine_page(
    view: MachineView | None, *, elapsed_s: float, width: int, glyphs: Glyphs
) -> Content:
    """What this computer has, each thing with a mark, or that it is being looked at."""
    if view is None:
        seconds = show_duration(elapsed_s)
        return rows(
            [
                Content.styled(" Measuring this computer", "bold"),
                Content(""),
                Content(f" {glyphs.now} GPU, RAM and disk are looked at: {seconds}"),
            ]
        )
    lines = [Content.styled(" What this computer has", "bold"), Content("")]
    for fact in view.facts:
        lines += fact_lines(fact, width, glyphs)
    lines += [
        Content(""),
        Content(f" Models are kept in  {clean_line(view.models_dir, width - 22)}"),
        Content(f"                     {show_disk(view.free_bytes)} free"),
        Content(""),
        Content(f" {summary_words(view.facts)}"),
    ]
    return rows(lines)


def fact_lines(fact: Fact, width: int, glyphs: Glyphs) -> list[Content]:
    """A fact, and its second line if it has one."""
    head = Content.assemble(" ", marked(fact.mark, glyphs), f" {fact.name:<8}")
    lines = [head + clean_line(fact.text, width - 12)]
    lines += [
        Content.styled(part.plain, "$dim")
        for part in (wrapped(fact.detail, width, 11) if fact.detail else [])
    ]
    return lines


def summary_words(facts: Sequence[Fact]) -> str:
    """How many things are not in order, and that one can go on."""
    n_bad = sum(fact.mark is Mark.BAD for fact in facts)
    n_warn = sum(fact.mark is Mark.WARN for fact in facts)
    if not n_bad + n_warn:
        return "Everything is in order."
    parts = [f"{n_warn} warning{'s' * (n_warn != 1)}"] if n_warn else []
    parts += [f"{n_bad} problem{'s' * (n_bad != 1)}"] if n_bad else []
    return f"{', '.join(parts)}. You can go on; F7 says more about each."


# -- model -------------------------------------------------------------------------------------

OFFER_HEAD = " Model               Total Active  Download      Pack  Fit here    Forecast"


def size_words(n_bytes: int | None) -> str:
    """A disk size, "none" for nothing, "?" when it is not known."""
    if n_bytes is None:
        return "?"
    return show_disk(n_bytes) if n_bytes else "none"


def offer_row(offer: Offer, glyphs: Glyphs, width: int) -> Content:
    """One line of the list of models."""
    mark = _FIT_MARKS[offer.fit]
    text = f" {clean_line(offer.title, 19):<19} {offer.total:>5} {offer.active:>6}"
    text += f" {size_words(offer.download_bytes):>9} {size_words(offer.pack_bytes):>9}  "
    fit = "ready here" if offer.ready else offer.fit.value
    forecast = clean_line(offer.forecast, max(4, width - 69))  # 68 before it, and a scroll bar
    return Content.assemble(text, marked(mark, glyphs), f" {fit:<10} ", forecast)


def offer_notes(offer: Offer, width: int, glyphs: Glyphs) -> list[Content]:
    """What stands under the list about the chosen model."""
    known = [offer.title, offer.licence, offer.revision and f"revision {offer.revision}"]
    between = f" {glyphs.dot} "
    lines = wrapped(between.join(clean_line(part, 48) for part in known if part), width)
    for text in (offer.reason, *offer.about):
        if text:
            lines += wrapped(text, width)
    return lines


# -- plan --------------------------------------------------------------------------------------


def plan_page(
    offer: Offer, plan: PlanView | None, wishes: PlanWishes, *, field: str, width: int,
    glyphs: Glyphs, limit: int | None = None,
) -> Content:  # fmt: skip
    """Where the model will live, the values that can be changed, the forecast."""
    names = fields(plan, downloads=downloads(offer))
    title = clean_line(offer.title, width - 44)
    head = Content.styled(f" How {title} will live on this computer", "bold")
    if plan is None:
        words = "Its plan is made when the model is here and its shape is known."
        values = _values(None, wishes, limit)
        lines = [head, Content(""), *wrapped(words, width), Content("")]
        return rows(lines + [_value_line(n, values[n], n == field, glyphs) for n in names])
    lines = [spread(head, Content.styled("chosen automatically ", "$dim"), width), Content("")]
    for row in plan.rows:
        lines += tier_bar(row, width, glyphs)
    values = _values(plan, wishes, limit)
    lines += [Content(""), *(_value_line(n, values[n], n == field, glyphs) for n in names)]
    lines.append(Content(""))
    if plan.forecast:
        lines += wrapped(f"Forecast    {plan.forecast}", width)
    for note in plan.notes:
        lines += [Content.assemble(" ", marked(Mark.WARN, glyphs)) + wrapped(note, width - 2)[0]]
        lines += wrapped(note, width - 2, 3)[1:] if len(note) > width - 4 else []
    if plan.problem is not None:
        bad = Content.assemble(" ", marked(Mark.BAD, glyphs), f" {plan.problem.title}  ")
        lines += [bad + Content.styled(plan.problem.code, "$dim")]
        lines += wrapped(f"{plan.problem.cause} Do: {plan.problem.do}", width, 3)
    return rows(lines)


def tier_bar(row: TierRow, width: int, glyphs: Glyphs) -> list[Content]:
    """The bar of one memory, and its parts in words under it."""
    room = ROOM + max(0, width - 80)
    total = row.total_bytes or sum(part.n_bytes for part in row.parts) or 1
    head = f" {row.letter} {row.name:<5} {show_memory(row.total_bytes):>9}  "
    bar, used = Content(head), 0
    for at, part in enumerate(row.parts):
        end = round(sum(p.n_bytes for p in row.parts[: at + 1]) / total * room)
        cells = max(0, min(end, room) - used)
        used += cells
        char, style = glyphs.unused, "$dim"
        if part.tier is not None:
            char, style = glyphs.tier(part.tier), f"${tier_variable(part.tier)}"
        elif not part.spare:
            char, style = "=", "$foreground"
        bar += Content.styled(char * cells, style)
    words = f" {glyphs.column} ".join(
        f"{part.label} {show_memory(part.n_bytes)}" for part in row.parts
    )
    under = textwrap.wrap(words, max(30, width - 5))
    return [bar, *(Content.styled("    " + line, "$dim") for line in under)]


def _values(plan: PlanView | None, wishes: PlanWishes, limit: int | None) -> dict[str, str]:
    """The values that can be changed, in words."""
    values = {
        "answers": f"{wishes.quality}: {_QUALITY_WORDS[wishes.quality]}",
        "limit": "none, a download may take the whole line"
        if limit is None
        else f"{show_rate(limit)} of the line at most",
    }
    if plan is not None:
        most = show_count(max(plan.contexts or (0,)))
        values["context"] = f"{show_count(plan.context)} of {most} tokens"
        values["keep free"] = f"{show_memory(plan.keep_free)} for the desktop and other programs"
        values["RAM"] = f"{show_memory(plan.ram)} for packed experts at most"
    return values


def _value_line(name: str, value: str, chosen: bool, glyphs: Glyphs) -> Content:
    pointer = glyphs.now if chosen else " "
    text = f" {pointer} {name[:1].upper() + name[1:]:<11}< {value} >"
    return Content.styled(text, "bold reverse") if chosen else Content(text)


# -- start -------------------------------------------------------------------------------------


def start_page(
    name: str, steps: Sequence[LoadStep], *, elapsed_s: float, width: int, glyphs: Glyphs
) -> Content:
    """The loading steps, as the chat shows them."""
    seconds = Content.styled(show_duration(elapsed_s) + " ", "$dim")
    head = spread(Content.styled(f" Loading {clean_line(name, 40)}", "bold"), seconds, width)
    return rows([head, Content(""), *loading_lines(steps, width=width, glyphs=glyphs)])
