"""Offers and plans as the wizard shows them. Pure: facts, models and wishes in, records out.

The planner is the one of `moet-desk plan`; this module only turns its answers into rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moet_desk.catalogue import CatalogueEntry
from moet_desk.cli.output import SCHEMA
from moet_desk.cli.plan_words import as_fields, show_range
from moet_desk.engine.handle import EngineOptions, Quality
from moet_desk.engine.planned_model import PlannedModel
from moet_desk.engine.planning import ModelPlan, Refusal, plan_model
from moet_desk.errors import MoetError
from moet_desk.machine import MachineFacts, choose_gpu
from moet_desk.telemetry import Tier
from moet_desk.ui.desk import Fit, Offer, PlanView, PlanWishes, TierPart, TierRow
from moet_desk.units import GIB, MIB, show_count, show_memory

USABLE_TOK_PER_S = 5.0
"""About as quick as people read; what is slower is offered as slow."""

_KEEP_FREE = (256 * MIB, 512 * MIB, *(n * GIB for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)))
_SMALLEST_CONTEXT = 1024


def options_for(facts: MachineFacts, options: EngineOptions, wishes: PlanWishes) -> EngineOptions:
    """What the engine is told: the settings, and what was wished for this model.

    Memory that is kept free is taken from what is free now, on the card if one computes; only then
    the RAM for experts is wished for apart.
    """
    options = replace(
        options,
        quality=Quality(wishes.quality),
        context=options.context if wishes.context is None else wishes.context,
    )
    gpu = None if options.device == "cpu" else choose_gpu(facts.gpus)
    if gpu is not None and wishes.ram is not None:
        options = replace(options, ram_bytes=wishes.ram)
    if wishes.keep_free is None:
        return options
    if gpu is not None:
        most = max(1, gpu.gpu.vram_free - wishes.keep_free)
        return replace(options, vram_bytes=min(most, options.vram_bytes or most))
    return replace(options, ram_bytes=max(1, facts.memory.available - wishes.keep_free))


def plan_view(
    facts: MachineFacts, model: PlannedModel, options: EngineOptions, wishes: PlanWishes
) -> PlanView:
    """The plan of a model with these wishes; if it does not fit, the nearest one and the reason."""
    answer = plan_model(facts, model, options_for(facts, options, wishes))
    plan = answer.nearest if isinstance(answer, Refusal) else answer
    problem = answer.error if isinstance(answer, Refusal) else None
    fields = {"schema": SCHEMA, **as_fields(model, answer, facts)}
    contexts = context_choices(model.spec.context)
    if plan is None:
        context = wishes.context or contexts[0]
        free = wishes.keep_free or 0
        choices = keep_free_choices(facts.memory.available, free)
        return PlanView((), context, contexts, free, choices, problem=problem, document=fields)
    available = _available(facts, plan)
    ram = 0 if plan.gpu is None else wishes.ram or plan.ram_budget
    kept = available - (plan.budget.vram if plan.gpu is not None else plan.ram_budget)
    kept = wishes.keep_free if wishes.keep_free is not None else max(0, kept)
    return PlanView(
        rows=tier_rows(facts, model, plan),
        context=plan.tiers.context if problem is None else wishes.context or plan.tiers.context,
        contexts=contexts,
        keep_free=kept,
        keep_frees=keep_free_choices(available, kept),
        forecast=forecast_words(plan),
        notes=_notes(model, answer),
        problem=problem,
        ram=ram,
        rams=ram_choices(facts.memory.available, ram) if ram else (),
        document=fields,
    )


def _available(facts: MachineFacts, plan: ModelPlan) -> int:
    return plan.gpu.vram_free if plan.gpu is not None else facts.memory.available


def context_choices(model_context: int) -> tuple[int, ...]:
    """Powers of two up to the model's own context, and that."""
    steps, step = [], _SMALLEST_CONTEXT
    while step < model_context:
        steps.append(step)
        step *= 2
    return (*steps, model_context)


def keep_free_choices(available: int, kept: int) -> tuple[int, ...]:
    """Round amounts below what is free, and the one in use."""
    return tuple(sorted({*(size for size in _KEEP_FREE if size < available), kept}))


def ram_choices(available: int, ram: int) -> tuple[int, ...]:
    """Round amounts of RAM for experts up to what is free, and the one in use."""
    steps = (GIB << n for n in range(12))
    return tuple(sorted({*(size for size in steps if size < available), ram}))


def forecast_words(plan: ModelPlan) -> str:
    """The forecast as what it is."""
    return f"{show_range(plan.forecast)} tokens/s, not a promise; limited by {plan.forecast.limit}"


def _notes(model: PlannedModel, answer: ModelPlan | Refusal) -> tuple[str, ...]:
    notes = []
    if isinstance(answer, Refusal) and answer.nearest is not None:
        notes.append(f"Shown is the nearest plan that fits: {', '.join(answer.changes)}.")
    if model.not_yet:
        notes.append(f"It does not run yet: {model.not_yet}.")
    return tuple(notes)


def tier_rows(facts: MachineFacts, model: PlannedModel, plan: ModelPlan) -> tuple[TierRow, ...]:
    """The bars of the plan: card, RAM and drive."""
    sizes = plan.bytes
    compute = (
        TierPart("fixed", sizes.dense + sizes.work + sizes.chunk),
        TierPart("context", sizes.kv),
        TierPart("2-bit experts", sizes.base_slots, Tier.BASE),
        TierPart("4-bit experts", sizes.fine_slots, Tier.FINE),
    )
    arena = (TierPart("packed experts", sizes.arena_base + sizes.arena_fine, Tier.RAM),)
    drive = TierRow(
        "N", "drive", model.pack_bytes, (TierPart("the pack", model.pack_bytes, Tier.NVME),)
    )
    total = facts.memory.total
    if plan.gpu is None:
        return _filled("R", "RAM", total, (*compute, *arena), "system and you"), drive
    return (
        _filled("G", "GPU", plan.gpu.vram_total, compute, "free and others"),
        _filled("R", "RAM", total, arena, "system and you"),
        drive,
    )


def _filled(letter: str, name: str, total: int, parts: Sequence[TierPart], rest: str) -> TierRow:
    spare = max(0, total - sum(part.n_bytes for part in parts))
    kept = tuple(part for part in parts if part.n_bytes)
    return TierRow(letter, name, total, (*kept, TierPart(rest, spare, spare=True)))


# -- offers ------------------------------------------------------------------------------------


def catalogue_offer(entry: CatalogueEntry, answer: ModelPlan | Refusal, *, ready: bool) -> Offer:
    """A model of the catalogue, with how it would do here."""
    plan = None if isinstance(answer, Refusal) else answer
    fit = fit_of(answer)
    return Offer(
        id=entry.name,
        title=entry.title,
        total=_billions(entry.params_b),
        active="?" if entry.active_b is None else _billions(entry.active_b),
        download_bytes=entry.download_bytes,
        pack_bytes=entry.pack_bytes,
        fit=fit,
        reason=reason_words(answer),
        forecast="" if plan is None else f"{show_range(plan.forecast)} t/s",
        licence=entry.licence,
        revision="" if entry.revision == "pin" else entry.revision,
        about=(f"{entry.repo}, {show_count(entry.context)} tokens of context at most",),
        ready=ready,
    )


def _billions(value: float) -> str:
    return f"{value / 1000:.1f}T" if value >= 999.5 else f"{value:.0f}B"


def fit_of(answer: ModelPlan | Refusal) -> Fit:
    """How a plan does, by the slow end of its forecast: who is sent for hundreds of GB must not be
    disappointed. BEST is given by comparing, in `ranked`.
    """
    if isinstance(answer, Refusal):
        return Fit.NO_ROOM
    return Fit.GOOD if answer.forecast.tok_per_s[0] >= USABLE_TOK_PER_S else Fit.SLOW


def reason_words(answer: ModelPlan | Refusal) -> str:
    """Why it fits so."""
    if isinstance(answer, Refusal):
        return _sentence(answer.error)
    place = "on the GPU" if answer.gpu is not None else "ready in RAM"
    in_ram = min(1.0, answer.tiers.arena_base_rows / answer.shape.n_rows)
    shares = f"{100 * answer.base_slot_share:.0f} % of its experts {place}"
    budget = answer.budget.vram if answer.gpu is not None else answer.ram_budget
    rest = f"{100 * in_ram:.0f} % packed in RAM, the rest on the drive"
    return f"{shares}, {rest}; it may take {show_memory(budget)}."


def _sentence(error: MoetError) -> str:
    return error.cause[:1].upper() + error.cause[1:]


def judged(offer: Offer, facts: MachineFacts, model: PlannedModel, options: EngineOptions) -> Offer:
    """An offer whose files are known, with how it would do here."""
    answer = plan_model(facts, replace(model, is_installed=offer.ready), options)
    plan = None if isinstance(answer, Refusal) else answer
    short = offer.fit is Fit.NO_ROOM
    return replace(
        offer,
        fit=Fit.NO_ROOM if short else fit_of(answer),
        reason=offer.reason if short else reason_words(answer),
        forecast="" if plan is None else f"{show_range(plan.forecast)} t/s",
    )


_ORDER = (Fit.BEST, Fit.GOOD, Fit.SLOW, Fit.UNKNOWN, Fit.NO_ROOM)


def ranked(offers: Sequence[tuple[Offer, float]]) -> tuple[Offer, ...]:
    """Offers with their parameter count: what fits first, the largest good one is the best."""
    order = sorted(offers, key=lambda pair: (_ORDER.index(pair[0].fit), -pair[1]))
    found = [offer for offer, _ in order]
    if found and found[0].fit is Fit.GOOD:
        found[0] = replace(found[0], fit=Fit.BEST)
    return tuple(found)
