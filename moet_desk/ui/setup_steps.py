"""The wizard's decisions: five steps, what Enter and Esc do in each, what is kept. Pure.

    machine -> model -> plan -> get and pack -> start

"Add a model" is the same without the first step. The state is a frozen record; the screen draws it
and carries out what these functions answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from moet_desk.ui.desk import (
    ASK_BYTES,
    Fit,
    JobState,
    JobView,
    Offer,
    PlanView,
    PlanWishes,
)

SCHEMA = 1


class Step(Enum):
    """The steps; the values are their titles, in order."""

    MACHINE = "Machine"
    MODEL = "Model"
    PLAN = "Plan"
    GET = "Get and pack"
    START = "Start"


STEPS = tuple(Step)


@dataclass(frozen=True, slots=True)
class Setup:
    """Where the wizard is and what was answered so far."""

    step: Step = Step.MACHINE
    first: Step = Step.MACHINE  # Step.MODEL when a model is added
    offer: str | None = None  # id of the chosen offer
    wishes: PlanWishes = field(default_factory=PlanWishes)
    job: str | None = None
    model: str | None = None  # name of the pack, once getting it has begun
    open: bool = False  # whether the wizard was in front, so that the next start shows it
    limit: int | None = None  # bytes per second that a download may take


def back(setup: Setup) -> Setup | None:
    """The step before; None leaves the wizard. A job goes on; answers stay."""
    at = STEPS.index(setup.step)
    if setup.step is setup.first or at == 0:
        return None
    if setup.step is Step.START:  # there is nothing to get any more
        return replace(setup, step=Step.PLAN, job=None)
    return replace(setup, step=STEPS[at - 1])


def after_plan(setup: Setup, offer: Offer) -> Setup:
    """The step after the plan: a model that is there already is only started."""
    return replace(setup, step=Step.START if offer.ready else Step.GET)


def recommended(offers: Sequence[Offer], *, first_run: bool) -> str | None:
    """The offer that Enter takes.

    On the first run it is one that needs no download, so that the first answer is there soon; later
    it is the one that fits best and is not here yet.
    """
    free = [offer.id for offer in offers if offer.download_bytes == 0]
    new = [offer for offer in offers if not offer.ready and offer.id not in free]
    fits = [offer.id for offer in new if offer.fit in (Fit.BEST, Fit.GOOD)]
    order = [*free, *fits] if first_run else [*fits, *free]
    return order[0] if order else (offers[0].id if offers else None)


def question(offer: Offer) -> tuple[str, str] | None:
    """Title and text of what is asked before a large download, None if nothing has to be asked.

    An unknown size is asked for as well.
    """
    from moet_desk.units import show_disk

    n_bytes = offer.download_bytes
    if offer.ready or (n_bytes is not None and n_bytes <= ASK_BYTES):
        return None
    if n_bytes is None:
        return (
            f"Download {offer.title}?",
            "How large it is is not known yet. It can be paused at any time; what is there is"
            " kept.",
        )
    parts = [f"{show_disk(n_bytes)} come over the network."]
    if offer.pack_bytes is not None:
        parts.append(f"The pack takes {show_disk(offer.pack_bytes)}.")
    if offer.peak_bytes is not None:
        parts.append(f"At most {show_disk(offer.peak_bytes)} of disk are used meanwhile.")
    parts.append("It can be paused at any time; what is there is kept.")
    return f"Download {show_disk(n_bytes)}?", " ".join(parts)


def size_is_open(offer: Offer) -> bool:
    """Whether its headers have to be read before anybody can agree to the download."""
    return offer.download_bytes is None and not offer.ready and offer.fit is not Fit.NO_ROOM


def obstacle(offer: Offer, plan: PlanView | None) -> str | None:
    """Why an offer cannot be got as planned, None if it can."""
    if plan is not None and plan.problem is not None:
        return f"{plan.problem.cause} {plan.problem.do}"
    if offer.fit is Fit.NO_ROOM and not offer.ready:
        return offer.reason or "It does not fit this computer."
    return None


# -- the values of the plan --------------------------------------------------------------------

QUALITIES = ("fast", "balanced", "exact")
LIMITS = tuple(n * 1_000_000 for n in (1, 2, 5, 10, 20, 50, 100, 200))
"""Rates that a download may be limited to, in bytes per second; beyond them it has no limit."""


def fields(plan: PlanView | None, *, downloads: bool) -> tuple[str, ...]:
    """The values that can be changed, from above."""
    found = [] if plan is None else ["context", "keep free"]
    found += ["RAM"] if plan is not None and plan.rams else []
    return (*found, "answers", *(("limit",) if downloads else ()))


def downloads(offer: Offer) -> bool:
    """Whether anything of it comes over the network."""
    return not offer.ready and offer.download_bytes != 0


def change_limit(limit: int | None, by: int) -> int | None:
    """Move the limit of the line by a place; above the highest there is none."""
    choices = (*LIMITS, None)
    at = choices.index(limit) if limit in choices else len(LIMITS)
    return choices[max(0, min(len(LIMITS), at + by))]


def change(wishes: PlanWishes, plan: PlanView, name: str, by: int) -> PlanWishes:
    """Move one value of the plan by a place; it stays at its ends."""
    if name == "context":
        return replace(wishes, context=_moved(plan.contexts, plan.context, by))
    if name == "RAM":
        return replace(wishes, ram=_moved(plan.rams, plan.ram, by))
    if name == "keep free":
        return replace(wishes, keep_free=_moved(plan.keep_frees, plan.keep_free, by))
    at = QUALITIES.index(wishes.quality) + by
    return replace(wishes, quality=QUALITIES[max(0, min(len(QUALITIES) - 1, at))])


def _moved(choices: Sequence[int], value: int, by: int) -> int:
    if not choices:
        return value
    if value in choices:
        at = choices.index(value) + by
    else:  # between two choices: to the next one in that direction
        lower = sum(choice < value for choice in choices)
        at = lower if by > 0 else lower - 1
    return choices[max(0, min(len(choices) - 1, at))]


# -- the job -----------------------------------------------------------------------------------


def follow_job(setup: Setup, jobs: Sequence[JobView]) -> Setup:
    """What the state of the job makes of the wizard: done goes on, lost goes back to the plan."""
    if setup.step is not Step.GET or setup.job is None:
        return setup
    found = next((job for job in jobs if job.id == setup.job), None)
    if found is None:
        return replace(setup, step=Step.PLAN, job=None)
    if found.state is JobState.DONE:
        return replace(setup, step=Step.START, job=None)
    return setup


# -- what is kept ------------------------------------------------------------------------------


def to_kept(setup: Setup) -> dict[str, Any]:
    """The record as plain values, for a file."""
    wishes = setup.wishes
    return {
        "schema": SCHEMA,
        "step": setup.step.name.lower(),
        "first": setup.first.name.lower(),
        "offer": setup.offer,
        "context": wishes.context,
        "keep_free_bytes": wishes.keep_free,
        "ram_bytes": wishes.ram,
        "quality": wishes.quality,
        "limit_bytes_per_s": setup.limit,
        "job": setup.job,
        "model": setup.model,
        "open": setup.open,
    }


def from_kept(kept: Mapping[str, Any]) -> Setup | None:
    """The record of a file; None if it holds none or another schema's.

    A value of a wrong type counts as not answered: the file may have been edited, and the wizard is
    the place to answer it again.
    """
    if kept.get("schema") != SCHEMA:
        return None
    names = {step.name.lower(): step for step in STEPS}
    step, first = (names.get(str(kept.get(key))) for key in ("step", "first"))
    if step is None:
        return None
    quality = kept.get("quality")
    wishes = PlanWishes(
        context=_whole(kept.get("context")),
        keep_free=_whole(kept.get("keep_free_bytes")),
        quality=quality if quality in QUALITIES else "fast",
        ram=_whole(kept.get("ram_bytes")),
    )
    limit = _whole(kept.get("limit_bytes_per_s"))
    first = first if first in (Step.MACHINE, Step.MODEL) else Step.MACHINE
    offer, job, model = (_text(kept.get(key)) for key in ("offer", "job", "model"))
    needs = {Step.PLAN: offer, Step.GET: offer, Step.START: model}
    if step in needs and needs[step] is None:
        step = Step.MODEL
    is_open = kept.get("open") is True
    return Setup(step, first, offer, wishes, job, model, is_open, limit)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
