"""Qwen3-Next-80B-A3B and Qwen3-Coder-Next: config keys and tensor names.

Three layers of gated DeltaNet for each one of grouped-query attention, which has a norm per head,
an output gate and rope on a quarter of each head; a softmax router, and a shared expert with a
gate. Weights of norms are stored without the 1 they are added to. The files hold an MTP head that
the config does not speak of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.parts import (
    COMMON_KEYS,
    gdn,
    gqa,
    head_behind_last,
    softmax_moe,
    spec_of,
)
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import Layer, QkNorm, Spec
from moet_desk.store.pack_format import PackPlan

HYBRID_KEYS = COMMON_KEYS | frozenset(
    "moe_intermediate_size shared_expert_intermediate_size attention_bias layer_types"
    " full_attention_interval linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim"
    " linear_num_key_heads linear_num_value_heads partial_rotary_factor output_gate_type".split()
)
"""Keys that `hybrid` reads or checks; `output_gate_type` is of the norm behind a DeltaNet."""

MATHS_KEYS = HYBRID_KEYS | frozenset(
    "intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers"
    " use_sliding_window".split()
)
"""Keys this file reads or checks; `intermediate_size` is of dense layers, and there are none."""

_LINEAR, _FULL = "linear_attention", "full_attention"
_HEAD = "mtp."


def mtp_prefix(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Under which names an MTP head lies: the released ones, in GGUF those of a further layer."""
    inner = config.get("text_config")
    behind = head_behind_last(inner if isinstance(inner, Mapping) else config)
    return (_HEAD,) if behind is None else (_HEAD, behind)


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = Keys(config, path=path)
    keys.refuse_unknown(MATHS_KEYS)
    keys.want("decoder_sparse_step", 1)
    keys.want("mlp_only_layers", [])
    keys.want("use_sliding_window", wanted=False)
    renormalize = keys.flag("norm_topk_prob", default=True)
    return hybrid(
        keys, model_type="qwen3_next", fused=True, renormalize=renormalize, has_mtp=has_mtp
    )


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    return replace(plan_of(spec), renames=head_names(spec))


def hybrid(
    keys: Keys,
    *,
    model_type: str,
    fused: bool,
    renormalize: bool,
    has_mtp: bool,
    rope_keys: frozenset[str] = frozenset(),
) -> Spec:
    """A model of these layers.

    Args:
        keys: of the language model's config.
        model_type: its family.
        fused: how files hold the products of a DeltaNet's input.
        renormalize: whether the chosen experts' weights add up to one.
        has_mtp: whether the MTP head's tensors are there.
        rope_keys: parameters of the rope that mean nothing for text.
    """
    keys.want("hidden_act", "silu")
    keys.want("attention_bias", wanted=False)
    keys.choice("output_gate_type", {"silu": None, "swish": None}, default="silu")  # one function
    full = replace(
        gqa(keys, qk_norm=QkNorm.HEAD, rotary_share=0.25, rope_keys=rope_keys), out_gate=True
    )
    linear = gdn(keys, fused=fused)
    moe = replace(
        softmax_moe(keys, inter="moe_intermediate_size", renormalize=renormalize),
        shared_inter=keys.multiple("shared_expert_intermediate_size", of=32),
        shared_name="shared_expert.",
        shared_gate=True,
    )
    kinds = _layer_types(keys)
    layers = [Layer(i, linear if kind == _LINEAR else full, moe) for i, kind in enumerate(kinds)]
    mtp = Layer(len(layers), full, moe) if has_mtp else None
    made = spec_of(keys, layers, model_type=model_type, mtp=mtp)
    return replace(made, norm_offset=1.0)


def head_names(spec: Spec) -> tuple[tuple[str, str], ...]:
    """Names of the MTP head, which here is the layer behind the last, as in other families."""
    last = f"model.layers.{len(spec.layers)}."
    return (
        (f"{_HEAD}layers.0.", last),
        (f"{_HEAD}fc", f"{last}eh_proj"),
        (f"{_HEAD}pre_fc_norm_embedding", f"{last}enorm"),
        (f"{_HEAD}pre_fc_norm_hidden", f"{last}hnorm"),
        (f"{_HEAD}norm", f"{last}shared_head.norm"),
    )


def _layer_types(keys: Keys) -> list[str]:
    n_layers, kinds = keys.count("num_hidden_layers"), keys.get("layer_types")
    step = keys.count("full_attention_interval", default=4)
    if kinds is None:
        kinds = [_LINEAR if (i + 1) % step else _FULL for i in range(n_layers)]
    known = isinstance(kinds, list) and all(kind in (_LINEAR, _FULL) for kind in kinds)
    if not known or len(kinds) != n_layers:
        raise keys.wrong(f"layer_types is {kinds!r}, {n_layers} of {_LINEAR} or {_FULL} expected")
    if _FULL not in kinds:
        raise keys.wrong(f"no layer has {_FULL}")
    return list(kinds)
