"""What the planner has to know of a model, from its spec and the sizes of its rows.

The loaders and `moet-desk plan` both come through here, so that a plan on paper is the plan that is
loaded. No torch. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from moet_desk.engine.cuda.chunk_sizes import chunk_choices
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.spec import Spec
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.row_sizes import ExpertLayout
from moet_desk.plan import ModelShape, Wishes, choose_kv_format, kv_tokens


@dataclass(frozen=True, slots=True)
class RowSizes:
    """The layout of an expert, and bytes from one row to the next in the pack."""

    layout: ExpertLayout
    base_stride: int
    fine_stride: int

    @classmethod
    def of(cls, layout: ExpertLayout) -> RowSizes:
        """As the packer would make them."""
        return cls(layout, layout.base_stride, layout.fine_stride)


def wishes_of(options: EngineOptions) -> Wishes:
    """What the user fixed."""
    return Wishes(
        context=options.context, base_slots=options.pool_slots, fine_slots=options.fine_slots,
        arena_rows=options.arena_rows, prefill_chunk=options.prefill_chunk,
        max_running=options.max_running,
    )  # fmt: skip


def kv_token_bytes(spec: Spec, form: KvFormat, drafts: str = "off") -> int:
    """KV bytes of one token, all layers together, the MTP head's too if it guesses."""
    entry_bytes = spec.layers[0].mixer.entry_bytes(form)
    return (len(spec.layers) + (drafts == "mtp")) * entry_bytes


def _n_rows(spec: Spec, drafts: str) -> int:
    """Experts of the layers that run: the MTP head's is one of them if it guesses."""
    return (len(spec.main_moe_layers) + (drafts == "mtp")) * spec.moe_ffn.router.n_experts


def device_kv_format(wanted: str) -> KvFormat:
    """Storage format of KV on a device; "auto" leaves it to us."""
    return KvFormat.BF16 if wanted == "auto" else KvFormat(wanted)


def cpu_kv_format(wanted: str, spec: Spec, wishes: Wishes, ram_bytes: int) -> KvFormat:
    """Storage format of KV on a CPU with `ram_bytes` to use; "auto" leaves it to us."""
    if wanted != "auto":
        return KvFormat(wanted)
    n_tokens = kv_tokens(wishes, spec.context)
    return choose_kv_format(kv_token_bytes(spec, KvFormat.F32), n_tokens, ram_bytes)


def device_shape(
    spec: Spec,
    sizes: RowSizes,
    form: KvFormat,
    wishes: Wishes,
    *,
    dense_bytes: int,
    drafts: str = "off",
) -> ModelShape:
    """The model as `plan_device_tiers` takes it; `dense_bytes` as stored."""
    context = wishes.context or spec.context
    chunks = chunk_choices(spec, sizes.layout, context=context, wished=wishes.prefill_chunk)
    return ModelShape(
        n_rows=_n_rows(spec, drafts),
        top_k=spec.moe_ffn.router.top_k,
        base_stride=sizes.base_stride,
        fine_stride=sizes.fine_stride,
        slot_bytes=0,
        dense_bytes=dense_bytes,
        kv_token_bytes=kv_token_bytes(spec, form, drafts),
        model_context=spec.context,
        chunks=chunks,
    )


def cpu_shape(
    spec: Spec, sizes: RowSizes, form: KvFormat, *, dense_bytes: int, drafts: str = "off"
) -> ModelShape:
    """The model as `plan_tiers` takes it; `dense_bytes` as stored."""
    return ModelShape(
        n_rows=_n_rows(spec, drafts),
        top_k=spec.moe_ffn.router.top_k,
        base_stride=sizes.base_stride,
        fine_stride=sizes.fine_stride,
        slot_bytes=sizes.layout.slot_floats * 4,
        dense_bytes=4 * dense_bytes,  # FP8 becomes float32
        kv_token_bytes=kv_token_bytes(spec, form, drafts),
        model_context=spec.context,
    )
