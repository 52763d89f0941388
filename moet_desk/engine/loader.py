"""From a pack and a plan to everything the engine thread works with.

Each part of loading reports a `LoadStep`, so a screen can show what, how much and how fast. The
order is: index, dense layers, rows to RAM, hot rows to slots. Called in the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moet_desk import hardware
from moet_desk.engine import heat
from moet_desk.engine.ablation import AsymmetricTransfer
from moet_desk.engine.blocks.expert_math import ExpertForm, ExpertMath, load_form
from moet_desk.engine.blocks.ffn import Experts
from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.decode import DecodeExperts, Decoder, OpportunisticExperts
from moet_desk.engine.dense_format import PLAIN, DenseFormat, cpu_dense_format, may_round
from moet_desk.engine.draft import CpuHead, MtpDrafter
from moet_desk.engine.drafting import drafting_of
from moet_desk.engine.families import packed_head, spec_for
from moet_desk.engine.handle import Codebook, EngineOptions
from moet_desk.engine.kv_cache import KvCache
from moet_desk.engine.load_report import LoadReport
from moet_desk.engine.model import Model
from moet_desk.engine.model_shape import (
    RowSizes,
    check_head,
    cpu_kv_format,
    cpu_shape,
    index_layers,
    kv_token_bytes,
    loads_head,
    mtp_of,
    n_kv_layers,
    rings_of,
    running_layers,
    wishes_of,
)
from moet_desk.engine.mtp import MtpHead
from moet_desk.engine.planned_model import loaded_bytes
from moet_desk.engine.prefill import Prefiller, PrefillExperts
from moet_desk.engine.residency import Residency
from moet_desk.engine.spec import Spec
from moet_desk.engine.stream_model import StreamHead, StreamModel
from moet_desk.engine.transfer import Transfer
from moet_desk.kernels.kinds import Activations, KvFormat
from moet_desk.kernels.reference import dense_values, quantize_dense
from moet_desk.plan import (
    KV_PAGE_TOKENS,
    TierPlan,
    plan_tiers,
    ram_budget,
    split_ram,
    with_context,
)
from moet_desk.store.arena import Arena
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from moet_desk.telemetry import LoadStep

if TYPE_CHECKING:
    from moet_desk.engine.cuda.vram import VramKeeper


@dataclass(frozen=True, slots=True)
class Core:
    """A loaded model with its tiers. Every field belongs to the engine thread."""

    reader: PackReader
    spec: Spec
    plan: TierPlan
    model: Model
    kv: KvCache
    arena: Arena
    residency: Residency
    decoder: Decoder
    prefiller: Prefiller
    prefix_bytes: int  # of RAM
    dense_format: DenseFormat
    device: str = "cpu"
    vram: VramKeeper | None = None  # there is no card

    def close(self) -> None:
        """Release files and memory."""
        self.arena.close()
        self.reader.close()


def load(
    pack: Path,
    options: EngineOptions,
    show: Callable[[tuple[LoadStep, ...]], None] = lambda steps: None,
) -> Core:
    """Load a pack.

    Raises:
        MoetError: the pack is incomplete, damaged or of another version (MD-PACK-..), the family
            is unknown (MD-PACK-01), or it does not fit (MD-RAM-01, MD-PLAN-..).
    """
    with ExitStack() as undo:  # what was opened before something fails
        core = _load(pack, options, LoadReport(show), undo)
        undo.pop_all()
    return core


def _load(pack: Path, options: EngineOptions, report: LoadReport, undo: ExitStack) -> Core:
    report.begin("Read the pack index")
    reader = PackReader.open(pack)
    undo.callback(reader.close)
    has_mtp = _has_mtp(reader)
    spec = spec_for(reader.config(), path=str(pack / "config.json"), has_mtp=has_mtp)
    budget = options.ram_bytes or ram_budget(hardware.probe().ram_available)
    ram, prefix_bytes = split_ram(budget, options.prefix_bytes)
    check_head(spec, options)
    with_head = loads_head(spec, options, on_card=False)
    form, plan = _plan(reader, spec, options, ram, with_head=with_head)
    report.end()

    report.begin("Dense layers", total=_dense_bytes(reader))
    weights = Weights(
        _counted(reader, report, cpu_dense_format(options.dense_format)),
        table=reader.dense_rows,
    )
    model = model_of(spec, weights, context=plan.context)
    experts = load_form(spec, weights)
    kv = KvCache(
        spec.attention,
        n_layers=n_kv_layers(spec, with_head=with_head),
        n_pages=plan.kv_pages,
        page_tokens=KV_PAGE_TOKENS,
        form=form,
        index_layers=index_layers(spec, with_head=with_head),
        recurrent=spec.recurrent,
        rings=rings_of(spec, plan, options.max_running),
    )
    report.end()

    arena = Arena(reader, base_rows=plan.arena_base_rows, fine_rows=plan.arena_fine_rows)
    undo.callback(arena.close)
    transfer = _transfer(arena, reader, options)
    residency = _residency(spec, plan, reader, transfer, with_head=with_head)
    _warm(pack, plan, arena, residency, report)
    math = {plane: _expert_math(reader, experts, plane, options) for plane in Plane}
    decode: dict[Plane, Experts] = {
        plane: DecodeExperts(residency, math[plane], plane) for plane in Plane
    }
    if options.opportunistic:
        decode[Plane.BASE] = OpportunisticExperts(residency, math)
    prefill = {plane: PrefillExperts(residency, math[plane], plane) for plane in Plane}
    head = None
    if with_head:
        head = MtpDrafter(CpuHead(head_of(model, weights), kv, one=decode, many=prefill))
    decoder = Decoder(
        model, kv, residency, decode, drafting=drafting_of(options, head, one_by_one=True)
    )
    prefiller = Prefiller(model, kv, prefill, decoder=decoder, chunk=plan.prefill_chunk)
    return Core(
        reader, spec, plan, model, kv, arena, residency, decoder, prefiller, prefix_bytes,
        cpu_dense_format(options.dense_format),
    )  # fmt: skip


def model_of(spec: Spec, weights: Weights, *, context: int) -> Model:
    """The model of a spec, for sequences of up to `context` tokens."""
    if spec.streams is not None:
        return StreamModel(spec, spec.streams, weights)
    return Model(spec, weights, context=context)


def head_of(model: Model, weights: Weights) -> MtpHead | StreamHead:
    """Its MTP head. Raises MD-ENG-05: it has none."""
    layer, streams = mtp_of(model.spec), model.spec.streams
    if isinstance(model, StreamModel) and streams is not None:
        return StreamHead(model, streams, layer, weights)
    return MtpHead(model, layer, weights)


def _expert_math(
    reader: PackReader, form: ExpertForm, plane: Plane, options: EngineOptions
) -> ExpertMath:
    kind = Activations.INT8 if plane is Plane.BASE else Activations.INT15
    activations = None if options.activations == "float" else kind
    return ExpertMath(reader.layout, activations, form)


def _has_mtp(reader: PackReader) -> bool:
    names, path = reader.dense.names(), str(reader.path)
    return packed_head(reader.config(), reader.meta.moe_layers, names, path=path)


def _dense_bytes(reader: PackReader) -> int:
    return loaded_bytes(reader.path)


def _plan(
    reader: PackReader, spec: Spec, options: EngineOptions, ram: int, *, with_head: bool
) -> tuple[KvFormat, TierPlan]:
    sizes = RowSizes(reader.layout, reader.meta.base_stride, reader.meta.fine_stride)
    wishes = with_context(
        wishes_of(options),
        spec.context,
        kv_token_bytes(spec, KvFormat.BF16, with_head=with_head),
        ram,
    )
    form = cpu_kv_format(options.kv_format, spec, wishes, ram)
    dense_bytes = _dense_bytes(reader)
    shape = cpu_shape(spec, sizes, form, dense_bytes=dense_bytes, with_head=with_head)
    return form, plan_tiers(shape, ram, wishes)


def _counted(
    reader: PackReader, report: LoadReport, form: DenseFormat
) -> Callable[[str], torch.Tensor]:
    def load_one(name: str) -> torch.Tensor:
        tensor, info = reader.dense_tensor(name), reader.dense.info(name)
        report.advance(info.bytes)
        if form is DenseFormat.INT8 and info.format.name in PLAIN and may_round(name, info.shape):
            return dense_values(*quantize_dense(tensor))
        return tensor

    return load_one


def _transfer(arena: Arena, reader: PackReader, options: EngineOptions) -> Transfer:
    asymmetric = options.codebook is Codebook.ASYMMETRIC
    return (AsymmetricTransfer if asymmetric else Transfer)(arena, reader.layout)


def _residency(
    spec: Spec, plan: TierPlan, reader: PackReader, transfer: Transfer, *, with_head: bool
) -> Residency:
    return Residency(
        transfer,
        moe_layers=running_layers(spec, with_head=with_head),
        n_experts=reader.meta.n_experts,
        base_slots=plan.base_slots,
        fine_slots=plan.fine_slots,
        top_k=spec.moe_ffn.router.top_k,
    )


def _warm(
    pack: Path, plan: TierPlan, arena: Arena, residency: Residency, report: LoadReport
) -> None:
    """Rows to RAM and hot rows to slots, the hottest of the last run first.

    Fine rows stay on disk until an exact answer asks for them.
    """
    sizes = residency.sizes()
    saved = heat.read(pack)
    residency.restore_heat(saved)
    hot = [row for row, _ in saved if 0 <= row < sizes.rows]
    order = hot + sorted(set(range(sizes.rows)) - set(hot))
    n_base = min(plan.arena_base_rows, sizes.rows)
    report.begin("Experts to RAM", total=n_base * sizes.row_bytes)
    arena.preload(Plane.BASE, order[:n_base], progress=report.advance)
    report.end()
    report.begin("Hot experts to slots", total=plan.base_slots, unit="slots")
    residency.preload(order[: plan.base_slots], progress=report.advance)
    report.end()
