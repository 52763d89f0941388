"""`ls --available`: the models that are known, and how they would do on a computer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moet_desk.cli.context import Invocation, engine_options
from moet_desk.cli.output import Format, print_document, print_event, print_table, print_text
from moet_desk.cli.plan_words import plan_fields, show_range
from moet_desk.units import show_count, show_disk

if TYPE_CHECKING:
    from moet_desk.catalogue import CatalogueEntry
    from moet_desk.engine.handle import EngineOptions
    from moet_desk.engine.planning import ModelPlan, Refusal
    from moet_desk.machine import MachineFacts


def list_available(invocation: Invocation, record: Path | None, *, fit: bool) -> None:
    """Print the catalogue; with `fit` beside what each model would do on the computer.

    Raises:
        MoetError: MD-CAT-01, MD-CFG-.., MD-PLAN-05.
    """
    from moet_desk.catalogue import load_catalogue

    entries = load_catalogue()
    if not fit:
        rows = [entry_row(entry) for entry in entries]
        _print(invocation, rows, [_entry_fields(entry) for entry in entries])
        return
    from moet_desk.cli.machine import machine_facts

    facts = machine_facts(invocation, record)
    options = engine_options(invocation.load_settings().settings)
    answers = fit_answers(facts, options)
    table = [fit_row(entry, answer) for entry, answer in answers]
    _print(invocation, table, [_fit_fields(entry, answer) for entry, answer in answers], fit=True)


Answer = tuple["CatalogueEntry", "ModelPlan | Refusal"]


def fit_answers(facts: MachineFacts, options: EngineOptions) -> list[Answer]:
    """The plan of every known model on a computer, those that run first."""
    from moet_desk.catalogue import load_catalogue
    from moet_desk.engine.planned_model import from_catalogue
    from moet_desk.engine.planning import plan_model

    entries = sorted(load_catalogue(), key=lambda entry: not _runs(entry))
    return [(entry, plan_model(facts, from_catalogue(entry), options)) for entry in entries]


HEAD = ["Model", "Total", "Active", "Context", "Pack", "RAM from", "Licence", "Runs"]
FIT_HEAD = ["Model", "Runs", "Pack", "Fits", "Context", "GPU", "RAM", "Forecast", "Limited by"]


def entry_row(entry: CatalogueEntry) -> list[str]:
    """A line of the list."""
    active = "?" if entry.active_b is None else f"{entry.active_b:g}B"
    return [
        entry.name,
        f"{entry.params_b:g}B",
        active,
        show_count(entry.context),
        show_disk(entry.pack_bytes),
        f"{entry.ram_gib} GiB",
        entry.licence,
        "yes" if _runs(entry) else "not yet",
    ]


def fit_row(entry: CatalogueEntry, answer: ModelPlan | Refusal) -> list[str]:
    """A line of the fit table: shares of experts on the card and in RAM, and the forecast."""
    from moet_desk.engine.planning import Refusal

    head = [entry.name, "yes" if _runs(entry) else "not yet", show_disk(entry.pack_bytes)]
    plan = answer.nearest if isinstance(answer, Refusal) else answer
    fits = "yes" if plan is answer else "no"
    if isinstance(answer, Refusal) and plan is None:
        return [*head, "no", "-", "-", "-", "-", f"{answer.error.title} ({answer.error.code})"]
    if plan is None:
        raise ValueError("a plan is missing")
    if isinstance(answer, Refusal):
        fits = "with " + " ".join(answer.changes)
    in_ram = min(1.0, plan.tiers.arena_base_rows / plan.shape.n_rows)
    return [
        *head,
        fits,
        show_count(plan.tiers.context),
        f"{100 * plan.base_slot_share:.0f} %" if plan.gpu is not None else "-",
        f"{100 * in_ram:.0f} %",
        f"{show_range(plan.forecast)} t/s",
        plan.forecast.limit,
    ]


def _runs(entry: CatalogueEntry) -> bool:
    from moet_desk.engine.families import runs

    return runs(entry.family) and not entry.not_yet


def _print(
    invocation: Invocation,
    rows: list[list[str]],
    fields: list[dict[str, Any]],
    *,
    fit: bool = False,
) -> None:
    if invocation.format is Format.JSON:
        print_document({"models": fields})
    elif invocation.format is Format.NDJSON:
        for row in fields:
            print_event("model", **row)
    else:
        print_table([FIT_HEAD if fit else HEAD, *rows])
        if fit:
            print_text("GPU, RAM: part of the experts there. Forecasts are ranges, not promises.")


def _entry_fields(entry: CatalogueEntry) -> dict[str, Any]:
    from moet_desk.engine.planned_model import from_catalogue

    return {
        "name": entry.name,
        "title": entry.title,
        "repo": entry.repo,
        "revision": entry.revision,
        "family": entry.family,
        "licence": entry.licence,
        "params_b": entry.params_b,
        "active_params_b": entry.active_b,
        "context_tokens": entry.context,
        "pack_bytes": entry.pack_bytes,
        "download_bytes": entry.download_bytes,
        "recommended_ram_gib": entry.ram_gib,
        "runs": _runs(entry),
        "not_yet": None if _runs(entry) else from_catalogue(entry).not_yet,
        "unknown": list(entry.unknown),
    }


def _fit_fields(entry: CatalogueEntry, answer: ModelPlan | Refusal) -> dict[str, Any]:
    from moet_desk.engine.planning import Refusal

    fields = _entry_fields(entry)
    if not isinstance(answer, Refusal):
        return fields | {"fits": True, "plan": plan_fields(answer)}
    nearest = None if answer.nearest is None else plan_fields(answer.nearest)
    fields |= {"fits": False, "error": answer.error.to_dict(), "changes": list(answer.changes)}
    return fields | {"nearest": nearest}
