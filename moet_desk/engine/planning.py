"""How a model would live on a computer: a plan with a forecast, or a refusal with figures.

`plan_model` is pure: a record of the computer, a model and what the user fixed go in. It sizes the
tiers with the functions that the loaders use, so a plan on paper is the plan that is loaded. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moet_desk.engine.dense_format import DenseFormat, cpu_dense_format, fit_device
from moet_desk.engine.handle import EngineOptions, Quality
from moet_desk.engine.model_shape import (
    check_kernels,
    cpu_kv_format,
    device_kv_format,
    loads_head,
    wishes_of,
    without_kernels,
)
from moet_desk.engine.planned_model import PlannedModel
from moet_desk.engine.spec import Mla, Spec
from moet_desk.errors import MoetError, fail
from moet_desk.forecast import (
    Forecast,
    TokenWork,
    balanced,
    forecast_cpu,
    forecast_device,
    speeds_of,
    token_work,
)
from moet_desk.kernels.kinds import KvFormat
from moet_desk.machine import Drive, Gpu, MachineFacts, choose_gpu
from moet_desk.plan import (
    KV_PAGE_TOKENS,
    DeviceBudget,
    ModelShape,
    TierBytes,
    TierPlan,
    contexts,
    pinned_budget,
    plan_tiers,
    ram_budget,
    split_ram,
    tier_bytes,
    vram_budget,
    with_context,
)
from moet_desk.units import show_disk

_SMALLEST_CONTEXT = 1024
_USELESS_TOK_PER_S = 0.5  # a plan that is slower is no help
_SMALLER_KV = ("fp8", "nvfp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """A plan that fits.

    Attributes:
        device: "cuda" or "cpu".
        gpu: the card, None on a CPU; `why` says why this one.
        budget: bytes that the plan may take where it computes, and of RAM.
        requests: how many can run at the same time, each with the whole context.
        prefix_bytes: of RAM beside the budget, for prompts that were read.
        options: what was fixed, with what the planner chose for a plan that is nearest.
        forecast: with the quality that was asked for.
    """

    model: str
    device: str
    gpu: Gpu | None
    why: str
    budget: DeviceBudget
    shape: ModelShape
    tiers: TierPlan
    bytes: TierBytes
    kv_format: KvFormat
    dense_format: DenseFormat
    requests: int
    options: EngineOptions
    prefix_bytes: int
    forecast: Forecast

    @property
    def ram_budget(self) -> int:
        """Bytes of RAM for all of it."""
        return self.budget.ram + self.prefix_bytes

    @property
    def ram_used(self) -> int:
        """Bytes of RAM that the tiers take, and prompts that were read."""
        tiers = self.bytes.arena if self.gpu is not None else self.bytes.total
        return tiers + self.prefix_bytes

    @property
    def base_slot_share(self) -> float:
        """Part of all experts that have a slot."""
        return min(1.0, self.tiers.base_slots / self.shape.n_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What does not fit, and the nearest plan that does.

    Attributes:
        error: what is short, with figures.
        nearest: the plan that comes nearest; None if none does.
        changes: command-line options that lead to it.
    """

    model: str
    error: MoetError
    nearest: ModelPlan | None = None
    changes: tuple[str, ...] = ()


def plan_model(
    machine: MachineFacts, model: PlannedModel, options: EngineOptions
) -> ModelPlan | Refusal:
    """Plan a model on a computer.

    Args:
        machine: measured, or read from a record.
        model: what is to be planned.
        options: what the user fixed, as the engine takes it; `device` "auto" takes a card if there
            is one.
    """
    try:
        check_disk(machine, model)
        return _fitting(machine, model, options)
    except MoetError as error:
        if error.code == "MD-DISK-01":
            return Refusal(model=model.name, error=error)
        refused = error
    for changed, words in _nearer(model, options):
        try:
            nearest = _fitting(machine, model, changed)
        except MoetError:
            continue
        if nearest.forecast.tok_per_s[1] < _USELESS_TOK_PER_S:
            continue
        return Refusal(model=model.name, error=refused, nearest=nearest, changes=words)
    return Refusal(model=model.name, error=refused)


def models_drive(machine: MachineFacts) -> Drive | None:
    """The drive that packs are on."""
    own = (drive for drive in machine.drives if drive.use == "models")
    return next(own, next(iter(machine.drives), None))


def check_disk(machine: MachineFacts, model: PlannedModel) -> None:
    """See that the pack has room.

    Raises:
        MoetError: MD-DISK-01.
    """
    drive = models_drive(machine)
    if model.is_installed or drive is None or model.pack_bytes <= drive.free:
        return
    raise fail(
        "MD-DISK-01",
        what=f"the pack of {model.name}",
        need=show_disk(model.pack_bytes),
        have=show_disk(drive.free),
        missing=show_disk(model.pack_bytes - drive.free),
        path=drive.folder,
        need_bytes=model.pack_bytes,
        have_bytes=drive.free,
    )


def _nearer(
    model: PlannedModel, options: EngineOptions
) -> Iterator[tuple[EngineOptions, tuple[str, ...]]]:
    """Changes of what the user fixed, the smallest first: context, KV, limits, then the CPU."""
    free = replace(options, pool_slots=None, fine_slots=None, arena_rows=None, prefill_chunk=None)
    for start in [options, free] if free != options else [options]:
        dropped = () if start is options else ("without fixed slots and rows",)
        for form in (options.kv_format, *_SMALLER_KV):
            kv = () if form == options.kv_format else (f"--kv-format {form}",)
            for context in _contexts(model, options):
                changed = replace(start, context=context, kv_format=form)
                yield changed, (*dropped, f"--context {context}", *kv)
    if options.ram_bytes is not None or options.vram_bytes is not None:
        yield replace(free, ram_bytes=None, vram_bytes=None), ("without --ram and --vram",)
    if options.device != "cpu":
        yield replace(free, device="cpu"), ("--device cpu",)


def _contexts(model: PlannedModel, options: EngineOptions) -> Iterator[int]:
    """The wish if the model allows it, else powers of two below it."""
    most = min(options.context or model.spec.context, model.spec.context)
    yield most
    step = 1 << (most - 1).bit_length() - 1 if most > 1 else 1
    while step >= _SMALLEST_CONTEXT:
        yield step
        step //= 2


def _fitting(machine: MachineFacts, model: PlannedModel, options: EngineOptions) -> ModelPlan:
    if options.device == "cpu":
        return _on_cpu(machine, model, options, "that is what was asked for")
    if options.device == "cuda":
        check_kernels(model.spec)
    elif part := without_kernels(model.spec):
        return _on_cpu(machine, model, options, f"for {part} a card has no kernels yet")
    choice = choose_gpu(machine.gpus)
    if choice is None:
        why = machine.gpu_problem or "no card is new enough"
        if options.device == "cuda":
            raise fail("MD-GPU-01", reason=why)
        return _on_cpu(machine, model, options, why)
    return _on_device(machine, model, options, choice.gpu, choice.why)


def _on_device(
    machine: MachineFacts, model: PlannedModel, options: EngineOptions, gpu: Gpu, why: str
) -> ModelPlan:
    memory = machine.memory
    ram = options.ram_bytes or pinned_budget(memory.available, memory.total, is_wsl=machine.is_wsl)
    ram, prefix_bytes = split_ram(ram, options.prefix_bytes)
    budget = DeviceBudget(vram_budget(gpu.vram_free, options.vram_bytes), ram)
    form = device_kv_format(options.kv_format, model.spec)
    with_head = loads_head(model.spec, options, on_card=True)
    token_bytes = model.kv_token_bytes(form, with_head=with_head)
    fit = fit_device(
        options.dense_format,
        lambda wishes: model.device_shape(form, wishes, with_head=with_head),
        model.dense_saving,
        budget,
        contexts(wishes_of(options), model.spec.context, token_bytes, budget.vram),
    )
    shape, tiers = fit.shape, fit.tiers
    speeds = speeds_of(machine, gpu, models_drive(machine))

    def forecast(exact: bool) -> Forecast:
        work = _work(model, shape, tiers, exact=exact, on_device=True)
        return forecast_device(work, speeds)

    return ModelPlan(
        model=model.name, device="cuda", gpu=gpu, why=why, budget=budget, shape=shape, tiers=tiers,
        bytes=tier_bytes(shape, tiers, fit.wishes, on_device=True), kv_format=form,
        dense_format=fit.dense, requests=_requests(tiers), options=options,
        prefix_bytes=prefix_bytes,
        forecast=_of_quality(options.quality, forecast(exact=False), forecast(exact=True)),
    )  # fmt: skip


def _on_cpu(
    machine: MachineFacts, model: PlannedModel, options: EngineOptions, why: str
) -> ModelPlan:
    ram = options.ram_bytes or ram_budget(machine.memory.available)
    ram, prefix_bytes = split_ram(ram, options.prefix_bytes)
    with_head = loads_head(model.spec, options, on_card=False)
    token_bytes = model.kv_token_bytes(KvFormat.BF16, with_head=with_head)
    wishes = with_context(wishes_of(options), model.spec.context, token_bytes, ram)
    form = cpu_kv_format(options.kv_format, model.spec, wishes, ram)
    shape = model.cpu_shape(form, with_head=with_head)
    tiers = plan_tiers(shape, ram, wishes)
    speeds = speeds_of(machine, None, models_drive(machine))

    def forecast(exact: bool) -> Forecast:
        work = _work(model, shape, tiers, exact=exact, on_device=False)
        return forecast_cpu(work, speeds)

    return ModelPlan(
        model=model.name, device="cpu", gpu=None, why=why, budget=DeviceBudget(0, ram),
        shape=shape, tiers=tiers, bytes=tier_bytes(shape, tiers, wishes, on_device=False),
        kv_format=form, dense_format=cpu_dense_format(options.dense_format),
        requests=_requests(tiers), options=options, prefix_bytes=prefix_bytes,
        forecast=_of_quality(options.quality, forecast(exact=False), forecast(exact=True)),
    )  # fmt: skip


def _requests(tiers: TierPlan) -> int:
    return tiers.kv_pages * KV_PAGE_TOKENS // max(tiers.context, 1)


def _of_quality(quality: Quality, fast: Forecast, exact: Forecast) -> Forecast:
    if quality is Quality.EXACT:
        return exact
    return fast if quality is Quality.FAST else balanced(fast, exact)


def fixed_parts(spec: Spec) -> int:
    """Attentions with what follows them, the forecast's unit of fixed time. Residual streams, mixed
    before and behind both halves of a layer, take a fifth as long again, and an indexer that scores
    a sequence's entries and chooses of them a third (bench/records).
    """
    attentions = sum(layer.n_mixers for layer in spec.layers)
    mixers = (layer.mixer for layer in spec.layers)
    choosing = sum(isinstance(one, Mla) and one.indexer is not None for one in mixers)
    return round(attentions * (1 if spec.streams is None else 1.2) + choosing / 3)


def _work(
    model: PlannedModel, shape: ModelShape, tiers: TierPlan, *, exact: bool, on_device: bool
) -> TokenWork:
    spec = model.spec
    return token_work(
        shape, tiers, layers=fixed_parts(spec),
        moe_layers=len(spec.main_moe_layers), exact=exact, on_device=on_device,
    )  # fmt: skip
