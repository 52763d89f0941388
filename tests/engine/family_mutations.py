"""What a wrong reading of a config would give: specs that must be told apart from the right one.

`MUTATIONS` is the table: for each tiny model the specs whose logits must differ, as
`test_family_maths.py` checks. `test_mutation_table.py` shows that it is complete for every
registered family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from moet_desk.engine.blocks import attention as latent
from moet_desk.engine.blocks import ffn
from moet_desk.engine.blocks.gqa import GqaBlock
from moet_desk.engine.spec import Gdn, Gqa, Mla, MoeFfn, QkNorm, Spec
from moet_desk.kernels.kinds import Score
from moet_desk.kernels.reference import experts as mlp
from moet_desk.kernels.reference import gated, route, weights_of

Mutation = Callable[[Spec], Spec]


def attention(**changes: Any) -> Mutation:
    """A spec with another attention; a callable value gets the old one."""

    def mutate(spec: Spec) -> Spec:
        layers = (
            layer
            if isinstance(layer.mixer, Gdn)
            else replace(layer, mixer=replace(layer.mixer, **_values(layer.mixer, changes)))
            for layer in spec.layers
        )
        return replace(spec, layers=tuple(layers))

    return mutate


def delta(**changes: Any) -> Mutation:
    """A spec with other DeltaNet layers."""

    def mutate(spec: Spec) -> Spec:
        layers = (
            replace(layer, mixer=replace(layer.mixer, **_values(layer.mixer, changes)))
            if isinstance(layer.mixer, Gdn)
            else layer
            for layer in spec.layers
        )
        return replace(spec, layers=tuple(layers))

    return mutate


def rope(**changes: Any) -> Mutation:
    return attention(rope=lambda old: replace(old, **_values(old, changes)))


def experts(**changes: Any) -> Mutation:
    def mutate(spec: Spec) -> Spec:
        other = replace(spec.moe_ffn, **_values(spec.moe_ffn, changes))
        layers = (
            replace(layer, ffn=other) if isinstance(layer.ffn, MoeFfn) else layer
            for layer in spec.layers
        )
        return replace(spec, layers=tuple(layers))

    return mutate


def router(**changes: Any) -> Mutation:
    return experts(router=lambda old: replace(old, **_values(old, changes)))


def _values(old: Any, changes: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value(getattr(old, key)) if callable(value) else value
        for key, value in changes.items()
    }


def fitted(spec: Spec, name: str, value: Tensor) -> Tensor:
    """A weight as blocks of a mutated spec take it: that of a norm of heads for all heads, and the
    reverse.
    """
    mixer, kind = spec.attention, name.rpartition(".")[2]
    if not isinstance(mixer, Gqa) or kind not in ("q_norm", "k_norm"):
        return value
    if mixer.qk_norm is QkNorm.FULL and len(value) == mixer.head_dim:
        return value.repeat(mixer.n_heads if kind == "q_norm" else mixer.n_keys)
    if mixer.qk_norm is QkNorm.HEAD and len(value) > mixer.head_dim:
        return value.view(-1, mixer.head_dim)
    return value


EVERYWHERE: dict[str, Mutation] = {
    "rope pairing": rope(interleaved=lambda flag: not flag),
    "rope base": rope(base=lambda base: 2 * base),
    "softmax scale": attention(softmax_scale=lambda scale: 1.01 * scale),
    "weights renormalised or not": router(renormalize=lambda flag: not flag),
    "routed scale": router(scale=lambda scale: 1.01 * scale),
    "one expert fewer per token": router(top_k=lambda k: k - 1),
    "another score": router(score=lambda s: Score.SOFTMAX if s is Score.SIGMOID else Score.SIGMOID),
}
GROUPED = {**EVERYWHERE, "rope on another part": rope(dim=lambda dim: dim // 2)}
WITH_NORM = {
    "no norm of queries and keys": attention(qk_norm=QkNorm.NONE),
    "norm of queries and keys over another width": attention(
        qk_norm=lambda width: QkNorm.HEAD if width is QkNorm.FULL else QkNorm.FULL
    ),
}
SIGMOID = {
    "no selection bias": router(selection_bias=False),
    "no shared expert": experts(shared_inter=0),
}
NO_GROUPS = {
    "no groups": router(n_groups=1, kept_groups=1),
    "one more group kept": router(kept_groups=lambda n: n + 1),
}
NO_YARN = {"no yarn": rope(yarn=None)}
OSS = {
    **{what: mutate for what, mutate in GROUPED.items() if what != "weights renormalised or not"},
    **NO_YARN,
    "yarn truncated": rope(yarn=lambda yarn: replace(yarn, truncate=True)),
    "no sinks": attention(has_sinks=False),
    "no windows": attention(window=None),
    "a wider window": attention(window=lambda size: size and size + 1),
    "a narrower window": attention(window=lambda size: size and size - 1),
    "windows in the other layers": attention(window=lambda size: None if size else 8),
    "no bias of queries, keys and values": attention(has_bias=False),
    "no bias of the output": attention(out_bias=False),
    "no bias of the router": router(logit_bias=False),
    "no bias of experts": experts(expert_bias=False),
    "another alpha": experts(glu=lambda glu: replace(glu, alpha=1.0)),
    "up without 1": experts(glu=lambda glu: replace(glu, shift=0.0)),
}
CLAMPED = {
    "no limit": experts(glu=lambda glu: replace(glu, limit=None)),
    "a higher limit": experts(glu=lambda glu: replace(glu, limit=0.31)),
}


def indexer(**changes: Any) -> Mutation:
    """A spec whose indexers are others, in the layers that have one."""
    return attention(indexer=lambda old: old and replace(old, **_values(old, changes)))


SPARSE = {
    "pairing of the indexer": indexer(interleaved=lambda flag: not flag),
    "one more chosen": indexer(top_k=lambda k: k + 1),
    "one fewer chosen": indexer(top_k=lambda k: k - 1),
    "all chosen": indexer(top_k=64),
}
DELTA: dict[str, Mutation] = {
    **GROUPED, **WITH_NORM,
    "softmax scale": attention(softmax_scale=lambda scale: 1.2 * scale),
    "rope on whole heads": rope(dim=lambda dim: 4 * dim),
    "no shared expert": experts(shared_inter=0),
    "no gate of the shared expert": experts(shared_gate=False),
    "norms without 1": lambda spec: replace(spec, norm_offset=0.0),
}  # fmt: skip
LONGCAT = {
    **EVERYWHERE,
    "no selection bias": router(selection_bias=False),
    "another scale of queries": attention(q_gain=lambda gain: 1.01 * gain),
    "no scale of queries": attention(q_gain=1.0),
    "another scale of latents": attention(kv_gain=lambda gain: 1.01 * gain),
    "no scale of latents": attention(kv_gain=1.0),
}
MUTATIONS: dict[str, dict[str, Mutation]] = {
    "v3_groups_yarn": {**EVERYWHERE, **SIGMOID, **NO_GROUPS, **NO_YARN},
    "v3_no_query_latent": {**EVERYWHERE, **SIGMOID, **NO_GROUPS, **NO_YARN},
    "kimi_k2": {**EVERYWHERE, **SIGMOID, **NO_YARN},
    "plain_rope": {**EVERYWHERE, **SIGMOID, **NO_GROUPS},
    "glm_lite": {**EVERYWHERE, **SIGMOID},
    "v32": {**EVERYWHERE, **SIGMOID, **NO_GROUPS, **NO_YARN, **SPARSE},
    "glm_dsa": {
        **EVERYWHERE, **SIGMOID, **SPARSE,
        "layers without an indexer see all": attention(reuses_choice=False),
    },
    "longcat": LONGCAT,
    "glm": {
        **GROUPED, **WITH_NORM, **SIGMOID,
        "no bias": attention(has_bias=False),
        "rope on whole heads": rope(dim=lambda dim: 2 * dim),
    },
    "glm_groups": {**GROUPED, **SIGMOID, **NO_GROUPS},
    "qwen3": {**GROUPED, **WITH_NORM},
    "qwen3_dense_yarn": {**GROUPED, **WITH_NORM, **NO_YARN},
    "olmoe": {**GROUPED, **WITH_NORM},
    "mixtral": GROUPED,
    "gpt_oss": OSS,
    "gpt_oss_clamped": {**OSS, **CLAMPED},
    "minimax": {
        **GROUPED, **WITH_NORM,
        "no selection bias": router(selection_bias=False),
        "rope on whole heads": rope(dim=lambda dim: 2 * dim),
    },
    "qwen3_next": DELTA,
    "qwen3_5": DELTA,
}  # fmt: skip


# -- the code ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wrong:
    """A mistake in a block that no field of a spec can make.

    Attributes:
        concerns: which models have what it is about.
        patches: places and what stands there instead.
    """

    concerns: Callable[[Spec], bool]
    patches: tuple[tuple[object, str, Any], ...]


def _bias_weighs(
    logits: Tensor, *, selection_bias: Tensor | None = None, **how: Any
) -> tuple[Tensor, Tensor]:
    ids, weights = route(logits, selection_bias=selection_bias, **how)
    if selection_bias is None:
        return ids, weights
    biased = weights_of(logits, ids, score=how["score"], renormalize=False, scale=1.0)
    biased = biased + selection_bias[ids]
    total = biased.sum(-1, keepdim=True) if how["renormalize"] else 1.0
    return ids, biased / total * how["scale"]


def _norm_behind_the_rope(self: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads come without their norm, with its weight beside them (`_with_weight`)."""
    plain, weight = heads
    return _NORMED(self, _TURNED(self, plain, cos, sin).flatten(1), weight)


def _with_weight(self: Any, x: Tensor, weight: Tensor | None) -> Any:
    return _NORMED(self, x, None), weight


_NORMED, _TURNED = GqaBlock._normed, GqaBlock._turned


def _is_mla(spec: Spec) -> bool:
    return isinstance(spec.attention, Mla)


def _has_norms(spec: Spec) -> bool:
    return isinstance(spec.attention, Gqa) and spec.attention.qk_norm is not QkNorm.NONE


CODE = {
    "the selection bias weighs": Wrong(
        lambda spec: spec.moe_ffn.router.selection_bias, ((ffn, "route", _bias_weighs),)
    ),
    "latents without their norms": Wrong(
        _is_mla, ((latent, "rms_norm", lambda x, weight, eps: x * weight),)
    ),
    "norm of queries and keys behind the rope": Wrong(
        _has_norms,
        (
            (GqaBlock, "_normed", _with_weight),
            (GqaBlock, "_turned", _norm_behind_the_rope),
        ),
    ),
    "gate and up of experts exchanged": Wrong(
        lambda spec: True, ((mlp, "gated", lambda gate, up, glu: gated(up, gate, glu)),)
    ),
    "gate and up of the shared expert exchanged": Wrong(
        lambda spec: spec.moe_ffn.shared_inter > 0,
        ((ffn, "gated", lambda gate, up, glu: gated(up, gate, glu)),),
    ),
}
"""Tried for every family that they concern."""
