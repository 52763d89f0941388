"""What the planner has to know of a model, from its spec and the sizes of its rows.

The loaders and `moet-desk plan` both come through here, so that a plan on paper is the plan that is
loaded. No torch. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from moet_desk.engine.cuda.chunk_sizes import BLOCK_ROWS, chunk_choices
from moet_desk.engine.cuda.pooled_sizes import pooled_mixers
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.spec import (
    STATES_KEPT,
    Gqa,
    Layer,
    Mla,
    MoeFfn,
    PooledAttention,
    Rings,
    Spec,
    Stateful,
)
from moet_desk.errors import fail
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import SHARED_BLOCK, index_key_bytes
from moet_desk.kernels.row_sizes import ExpertLayout
from moet_desk.plan import (
    KV_PAGE_TOKENS,
    ModelShape,
    TierPlan,
    Windows,
    Wishes,
    choose_kv_format,
    kv_tokens,
)


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


def without_kernels(spec: Spec) -> str:
    """The part of a model that only a CPU computes so far; empty if there is none."""
    mixer = spec.attention
    if isinstance(mixer, PooledAttention) and not _has_kernels(mixer):
        return f"pooled attention with heads of {mixer.head_dim}, {mixer.rope.dim} of which rotate"
    return ""


def _has_kernels(mixer: PooledAttention) -> bool:
    return mixer.head_dim % SHARED_BLOCK == 0 and mixer.rope.dim == SHARED_BLOCK


def mtp_of(spec: Spec) -> Layer:
    """The layer of a model's MTP head. Raises MD-ENG-05: it has none."""
    if spec.mtp is None:
        raise fail("MD-ENG-05", model=spec.model_type, reason="its files hold none")
    return spec.mtp


def loads_head(spec: Spec, options: EngineOptions, *, on_card: bool) -> bool:
    """Whether the model's MTP head is loaded, which takes room for its experts and its KV.

    "auto" loads it where it can gain: a CPU reads rows one by one (ADR 4), so a right guess saves
    nothing there. `EngineOptions.draft_head` says otherwise, for measurements.
    """
    if spec.mtp is None:
        return False
    wanted = on_card if options.draft_head is None else options.draft_head
    return options.drafts == "mtp" or (options.drafts == "auto" and wanted)


def check_head(spec: Spec, options: EngineOptions) -> None:
    """Raises MD-ENG-05: the head is asked for by name, and the model has none."""
    if options.drafts == "mtp":
        mtp_of(spec)


def running_layers(spec: Spec, *, with_head: bool) -> tuple[int, ...]:
    """Model layer numbers of the MoE layers that run: the head's is the last one if it guesses and
    has experts.

    Raises:
        MoetError: as `mtp_of`.
    """
    if with_head and isinstance(mtp_of(spec).ffn, MoeFfn):
        return (*spec.main_moe_layers, mtp_of(spec).index)
    return spec.main_moe_layers


def kv_token_bytes(
    spec: Spec, form: KvFormat, *, with_head: bool = False, on_card: bool = False
) -> int:
    """KV bytes of one token in the layers that keep every token, the MTP head's too if loaded. On a
    card a pooled entry has a page for itself, if it is of more tokens than a page.
    """
    mixer = spec.attention
    if isinstance(mixer, PooledAttention):
        layers = (m for m in spec.recurrent if isinstance(m, PooledAttention))
        each = [m.token_bytes(form) * (_pages_of(m) if on_card else 1) for m in layers]
        # windows alone grow by nothing; sizes are divided by this
        return max(1, ceil(sum(each)))
    n_layers = spec.n_kv_layers + with_head - len(ring_layers(spec))
    n_bytes = n_layers * mixer.entry_bytes(form)
    if isinstance(mixer, Mla) and mixer.indexer is not None:
        keys = len(index_layers(spec, with_head=with_head))
        n_bytes += keys * index_key_bytes(form, mixer.indexer.head_dim)
    return n_bytes


def _pages_of(mixer: PooledAttention) -> int:
    """Pages that share a pooled entry."""
    return 1 if mixer.pool is None else max(1, mixer.pool.ratio // KV_PAGE_TOKENS)


def n_kv_layers(spec: Spec, *, with_head: bool) -> int:
    """Layers of the KV cache; the MTP head's is one if it stores an entry of each token."""
    return spec.n_kv_layers + (with_head and not isinstance(mtp_of(spec).mixer, Stateful))


def index_layers(spec: Spec, *, with_head: bool) -> tuple[int, ...]:
    """Layers of the KV cache whose attention has an indexer, the MTP head's being the last one."""
    layers = (*spec.layers, mtp_of(spec)) if with_head else spec.layers
    return tuple(i for i, layer in enumerate(layers) if _has_indexer(layer))


def ring_layers(spec: Spec) -> tuple[int, ...]:
    """Layers of the KV cache that keep the last entries alone: those with a window, if others have
    none.
    """
    places = [
        place
        for place, layer in zip(kv_places(spec), spec.layers, strict=True)
        if isinstance(layer.mixer, Gqa) and layer.mixer.window
    ]
    return tuple(places) if len(places) < spec.n_kv_layers else ()


def rings_of(spec: Spec, plan: TierPlan, max_running: int) -> Rings:
    """Those layers as the cache takes them."""
    return Rings(ring_layers(spec), spec.window, plan.ring_pages, max_running)


def windows_of(spec: Spec, form: KvFormat) -> Windows:
    """Those layers as the planner counts them; a card has `BLOCK_ROWS` as `most_rows`."""
    layers = len(ring_layers(spec))
    return Windows(spec.window if layers else 0, layers * spec.attention.entry_bytes(form))


def _has_indexer(layer: Layer) -> bool:
    return isinstance(layer.mixer, Mla) and layer.mixer.indexer is not None


def state_bytes(spec: Spec, form: KvFormat, *, with_head: bool = False) -> int:
    """Bytes of a sequence that do not grow with it: its states, as often as they are kept."""
    n_bytes = sum(mixer.state_bytes(form) for mixer in spec.recurrent)
    if with_head and isinstance(mixer := mtp_of(spec).mixer, Stateful):
        n_bytes += mixer.state_bytes(form)
    return STATES_KEPT * n_bytes


def slot_bytes(spec: Spec, form: KvFormat, *, with_head: bool = False) -> int:
    """The same on a card, which keeps one state and what led away from it."""
    pooled = pooled_mixers(spec, with_head=with_head)
    n_bytes = sum(mixer.slot_bytes(form) for mixer in pooled)
    return n_bytes + sum(mixer.slot_bytes for mixer in spec.delta)


def kv_places(spec: Spec) -> tuple[int, ...]:
    """Of each layer: its place among those that store entries, or among those with a state."""
    places, n_kv, n_states = [], 0, 0
    for layer in spec.layers:
        if isinstance(layer.mixer, Stateful):
            places.append(n_states)
            n_states += 1
        else:
            places.append(n_kv)
            n_kv += layer.n_mixers
    return tuple(places)


def check_kernels(spec: Spec) -> None:
    """Raises MD-GPU-10: a card does not run the model."""
    if part := without_kernels(spec):
        raise fail("MD-GPU-10", model=spec.model_type, part=part)


def _n_rows(spec: Spec, *, with_head: bool) -> int:
    """Experts of the layers that run: the MTP head's too if it is loaded."""
    return len(running_layers(spec, with_head=with_head)) * spec.moe_ffn.router.n_experts


def device_kv_format(wanted: str, spec: Spec) -> KvFormat:
    """Storage format of KV on a device; "auto" leaves it to us."""
    if wanted != "auto":
        return KvFormat(wanted)
    is_pooled = isinstance(spec.attention, PooledAttention)
    return KvFormat.FP8 if is_pooled else KvFormat.BF16  # the former as released


def cpu_kv_format(wanted: str, spec: Spec, wishes: Wishes, ram_bytes: int) -> KvFormat:
    """Storage format of KV on a CPU with `ram_bytes` to use; "auto" leaves it to us."""
    if wanted != "auto":
        return KvFormat(wanted)
    if isinstance(spec.attention, PooledAttention):
        return KvFormat.FP8  # as its released forward rounds entries
    n_tokens = kv_tokens(wishes, spec.context)
    return choose_kv_format(kv_token_bytes(spec, KvFormat.F32), n_tokens, ram_bytes)


def device_shape(
    spec: Spec,
    sizes: RowSizes,
    form: KvFormat,
    wishes: Wishes,
    *,
    dense_bytes: int,
    with_head: bool = False,
) -> ModelShape:
    """The model as `plan_device_tiers` takes it; `dense_bytes` as stored."""
    context = wishes.context or spec.context
    chunks = chunk_choices(spec, sizes.layout, context=context, wished=wishes.prefill_chunk)
    return ModelShape(
        n_rows=_n_rows(spec, with_head=with_head),
        top_k=spec.moe_ffn.router.top_k,
        mean_used=spec.moe_ffn.router.mean_used,
        base_stride=sizes.base_stride,
        fine_stride=sizes.fine_stride,
        slot_bytes=0,
        dense_bytes=dense_bytes,
        kv_token_bytes=kv_token_bytes(spec, form, with_head=with_head, on_card=True),
        model_context=spec.context,
        state_bytes=slot_bytes(spec, form, with_head=with_head),
        chunks=chunks,
        windows=replace(windows_of(spec, form), most_rows=BLOCK_ROWS),
    )


def cpu_shape(
    spec: Spec, sizes: RowSizes, form: KvFormat, *, dense_bytes: int, with_head: bool = False
) -> ModelShape:
    """The model as `plan_tiers` takes it; `dense_bytes` as stored."""
    return ModelShape(
        n_rows=_n_rows(spec, with_head=with_head),
        top_k=spec.moe_ffn.router.top_k,
        mean_used=spec.moe_ffn.router.mean_used,
        base_stride=sizes.base_stride,
        fine_stride=sizes.fine_stride,
        slot_bytes=sizes.layout.slot_floats * 4,
        dense_bytes=4 * dense_bytes,  # FP8 becomes float32
        kv_token_bytes=kv_token_bytes(spec, form, with_head=with_head),
        model_context=spec.context,
        state_bytes=state_bytes(spec, form, with_head=with_head),
        windows=windows_of(spec, form),
    )
