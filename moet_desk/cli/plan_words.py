"""A plan in words, as a table, and as fields of JSON. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moet_desk.units import show_disk, show_memory

if TYPE_CHECKING:
    from moet_desk.engine.planned_model import PlannedModel
    from moet_desk.engine.planning import ModelPlan, Refusal
    from moet_desk.forecast import Forecast
    from moet_desk.machine import MachineFacts

Row = tuple[str, str, str, str]


def as_text(model: PlannedModel, answer: ModelPlan | Refusal, facts: MachineFacts) -> str:
    """The whole answer for people: what does not fit, the tiers, the forecast."""
    lines = [f"{model.name}{_where(answer)}"]
    if model.not_yet:
        lines.append(f"Does not run yet: {model.not_yet}. This is what it would take.")
    plan = _plan_of(answer)
    if plan is None:
        dense = f"Its dense stack alone takes {show_memory(model.dense_bytes)} as stored."
        lines += [_refusal(answer), f"No smaller plan fits either. {dense}"]
        return "\n".join([*filter(None, lines), *_disk_line(model, facts)])
    if plan is not answer:
        lines += [_refusal(answer), f"The nearest plan that fits: {_changes(model, answer)}"]
    lines += ["", *table(tier_rows(model, plan)), *_disk_line(model, facts), ""]
    lines += [*forecast_lines(plan.forecast), *_identity_lines(model)]
    for title in obstacles(plan, facts):
        lines.append(f"Before the card can be used: {title}. See: moet-desk doctor")
    if model.stands_in:
        lines.append("What reading a prompt takes on a card is estimated: it has no kernels yet.")
    return "\n".join(lines)


_OBSTACLES = ("torch", "driver", "compiler")
"""Checks of the doctor that keep a card from being used."""


def obstacles(plan: ModelPlan, facts: MachineFacts) -> list[str]:
    """What has to be mended before a plan for a card can be loaded."""
    from moet_desk.doctor import examine

    if plan.gpu is None:
        return []
    return [found.title for found in examine(facts).findings if found.check in _OBSTACLES]


def _where(answer: ModelPlan | Refusal) -> str:
    plan = _plan_of(answer)
    if plan is None:
        return ""
    if plan.gpu is not None:
        return f" on {plan.gpu.name} ({plan.why})"
    return f" on the CPU ({plan.why})"


def _plan_of(answer: ModelPlan | Refusal) -> ModelPlan | None:
    from moet_desk.engine.planning import Refusal

    return answer.nearest if isinstance(answer, Refusal) else answer


def _refusal(answer: ModelPlan | Refusal) -> str:
    from moet_desk.engine.planning import Refusal

    if not isinstance(answer, Refusal):
        return ""
    return f"{answer.error.title}: {answer.error.cause} ({answer.error.code})"


def _changes(model: PlannedModel, answer: ModelPlan | Refusal) -> str:
    from moet_desk.engine.planning import Refusal

    if not isinstance(answer, Refusal):
        return ""
    options = [word for word in answer.changes if word.startswith("--")]
    words = [word for word in answer.changes if not word.startswith("--")]
    command = " ".join(["moet-desk plan", model.name, *options])
    return ", ".join([command, *words])


def tier_rows(model: PlannedModel, plan: ModelPlan) -> list[Row]:
    """Part, place, size, what it is; totals with their budgets."""
    shape, tiers, sizes = plan.shape, plan.tiers, plan.bytes
    place = "VRAM" if plan.gpu is not None else "RAM"
    of = f"of {shape.n_rows:,}"
    context = f"{tiers.context:,} tokens, {plan.requests} requests, {plan.kv_format.value}"
    rows: list[Row] = [
        ("Part", "Where", "Size", "What"),
        ("dense stack", place, show_memory(sizes.dense), _dense_words(model, plan)),
        ("context", place, show_memory(sizes.kv), context),
        ("work, graphs", place, show_memory(sizes.work), "activations, captured steps"),
        ("prompt chunk", place, show_memory(sizes.chunk), f"{tiers.prefill_chunk:,} tokens"),
        ("2-bit pool", place, show_memory(sizes.base_slots), f"{tiers.base_slots:,} {of} experts"),
        ("hot FP4 set", place, show_memory(sizes.fine_slots), f"{tiers.fine_slots:,} {of}"),
    ]
    base = ("2-bit rows", "RAM", show_memory(sizes.arena_base), f"{tiers.arena_base_rows:,} {of}")
    fine = ("FP4 rows", "RAM", show_memory(sizes.arena_fine), f"{tiers.arena_fine_rows:,} {of}")
    if plan.gpu is not None:
        used = f"of {show_memory(plan.budget.vram)} it may take"
        rows.append(("total", "VRAM", show_memory(sizes.compute), used))
    may = f"of {show_memory(plan.ram_budget)} it may take"
    if plan.prefix_bytes:
        what = "kept, so that a chat is not read again"
        rows.append(("read prompts", "RAM", show_memory(plan.prefix_bytes), what))
    rows += [base, fine, ("total", "RAM", show_memory(plan.ram_used), may)]
    rows.append(("only there", "drive", show_disk(sizes.nvme_only), "read while answering"))
    if model.spec.ngrams is not None:
        n_rows = model.spec.ngrams.n_tables
        what = f"of n-grams: {n_rows} rows are read for a token, not in the forecast"
        rows.append(("tables", "drive", show_disk(model.table_bytes), what))
    rows.append(("pack", "drive", show_disk(model.pack_bytes), "all experts and the dense stack"))
    return rows


def _dense_words(model: PlannedModel, plan: ModelPlan) -> str:
    from moet_desk.engine.dense_format import DenseFormat

    if plan.dense_format is DenseFormat.STORED:
        return "weights that are no routed experts"
    stored = show_memory(model.dense_bytes)
    return f"weights that are no routed experts, rounded to 8 bits ({stored} as stored)"


def table(rows: list[Row]) -> list[str]:
    """Aligned columns, the sizes to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        f"{part:<{widths[0]}}  {place:<{widths[1]}}  {size:>{widths[2]}}  {what}"
        for part, place, size, what in rows
    ]


def _disk_line(model: PlannedModel, facts: MachineFacts) -> list[str]:
    from moet_desk.engine.planning import models_drive

    drive = models_drive(facts)
    if model.is_installed or drive is None:
        return []
    download = model.download_bytes
    size = "of a size that is not known" if download is None else f"of {show_disk(download)}"
    return [f"Download {size}; {show_disk(drive.free)} are free in {drive.folder}."]


def forecast_lines(forecast: Forecast) -> list[str]:
    """The forecast as what it is, and what it rests on."""
    low, high = (percent(rate) for rate in forecast.hit_rate)
    near, far = (percent(rate) for rate in forecast.ram_hit_rate)
    basis = ", ".join(f"{name} {source}" for name, source in forecast.basis)
    return [
        f"Forecast, not a measurement: {show_range(forecast)} tokens/s, one answer at a time.",
        f"Limited by {forecast.limit}. Assumed: {low} to {high} of look-ups find their expert in a",
        f"slot, {near} to {far} in a slot or in RAM. Rates: {basis}.",
    ]


def _identity_lines(model: PlannedModel) -> list[str]:
    router = model.spec.moe_ffn.router
    if not router.n_identity:
        return []
    chosen, used = router.top_k, f"{router.mean_used:.0f}"
    return [
        f"Of the {chosen} experts that a token chooses in a layer, {used} on average have weights."
    ]


def percent(part: float) -> str:
    """A part as "96 %", without rounding up to all of it."""
    return f"{min(99, round(100 * part)) if part < 1 else 100} %"


def show_range(forecast: Forecast) -> str:
    """Tokens per second with two figures: "47-110"."""
    low, high = (_two_figures(value) for value in forecast.tok_per_s)
    return low if low == high else f"{low}-{high}"


def _two_figures(value: float) -> str:
    if value >= 99.5:
        return f"{round(value, -1):.0f}"
    if value >= 9.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.1 else "below 0.1"


# -- JSON ------------------------------------------------------------------------------------


def as_fields(
    model: PlannedModel, answer: ModelPlan | Refusal, facts: MachineFacts
) -> dict[str, Any]:
    """The answer as fields; what is not known is None."""
    from moet_desk.engine.planning import ModelPlan, models_drive

    fits = isinstance(answer, ModelPlan)
    drive = models_drive(facts)
    fields: dict[str, Any] = {
        "model": model.name,
        "fits": fits,
        "runs": not model.not_yet,
        "not_yet": model.not_yet or None,
        "disk": {
            "download_bytes": model.download_bytes,
            "pack_bytes": model.pack_bytes,
            "table_bytes": model.table_bytes,
            "free_bytes": drive.free if drive is not None else None,
            "installed": model.is_installed,
        },
    }
    if isinstance(answer, ModelPlan):
        return fields | plan_fields(answer) | {"obstacles": obstacles(answer, facts)}
    nearest = answer.nearest
    fields["error"] = answer.error.to_dict()
    fields["nearest"] = None
    if nearest is not None:
        fields["nearest"] = {"changes": list(answer.changes), **plan_fields(nearest)}
    return fields


def plan_fields(plan: ModelPlan) -> dict[str, Any]:
    """A plan that fits."""
    tiers, sizes = plan.tiers, plan.bytes
    return {
        "device": plan.device,
        "why": plan.why,
        "gpu": None if plan.gpu is None else _gpu_fields(plan),
        "ram": {
            "budget_bytes": plan.ram_budget,
            "used_bytes": plan.ram_used,
            "prefix_bytes": plan.prefix_bytes,
            "base_rows": tiers.arena_base_rows,
            "base_rows_bytes": sizes.arena_base,
            "fine_rows": tiers.arena_fine_rows,
            "fine_rows_bytes": sizes.arena_fine,
        },
        "parts": {
            "dense_bytes": sizes.dense,
            "dense_format": plan.dense_format.value,
            "kv_bytes": sizes.kv,
            "work_bytes": sizes.work,
            "chunk_bytes": sizes.chunk,
            "base_slots": tiers.base_slots,
            "base_slots_bytes": sizes.base_slots,
            "fine_slots": tiers.fine_slots,
            "fine_slots_bytes": sizes.fine_slots,
        },
        "rows": plan.shape.n_rows,
        "nvme_only_bytes": sizes.nvme_only,
        "context_tokens": tiers.context,
        "requests": plan.requests,
        "kv_format": plan.kv_format.value,
        "prefill_chunk_tokens": tiers.prefill_chunk,
        "quality": plan.options.quality.value,
        "forecast": _forecast_fields(plan.forecast),
    }


def _gpu_fields(plan: ModelPlan) -> dict[str, Any]:
    gpu = plan.gpu
    return {
        "name": gpu.name if gpu else None,
        "uuid": gpu.uuid if gpu else None,
        "total_bytes": gpu.vram_total if gpu else None,
        "budget_bytes": plan.budget.vram,
        "used_bytes": plan.bytes.compute,
    }


def _forecast_fields(forecast: Forecast) -> dict[str, Any]:
    return {
        "decode_tok_per_s": [round(value, 2) for value in forecast.tok_per_s],
        "limit": forecast.limit,
        "hit_rate": [round(value, 4) for value in forecast.hit_rate],
        "ram_hit_rate": [round(value, 4) for value in forecast.ram_hit_rate],
        "wait_share": [round(value, 3) for value in forecast.wait_share],
        "basis": dict(forecast.basis),
        "kind": "forecast",
    }
