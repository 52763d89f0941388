"""LongCat-Flash (Chat, Thinking): config keys and tensor names.

Two latent attentions per layer with scaled latents, a dense part behind each, and routed experts on
a shortcut around the second half; a softmax router with a selection bias, which may choose identity
experts too. The MTP head has a single attention and a dense part (kind L).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.parts import COMMON_KEYS, mla, softmax_router, spec_of
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import DenseFfn, Layer, Mla, MoeFfn, Spec
from moet_desk.store.pack_format import PackPlan

MATHS_KEYS = (COMMON_KEYS - {"num_hidden_layers"}) | frozenset(
    "num_layers num_hidden_layers ffn_hidden_size expert_ffn_hidden_size q_lora_rank kv_lora_rank"
    " qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim moe_topk zero_expert_num"
    " zero_expert_type routed_scaling_factor router_bias norm_topk_prob attention_bias"
    " attention_method mla_scale_q_lora mla_scale_kv_lora rope_interleave"
    " intermediate_size moe_intermediate_size".split()
)
"""Keys this file reads or checks. Others that change the maths are refused by name."""

UNUSED_KEYS = frozenset("num_nextn_predict_layers mtp_num_layers router_dtype".split())
"""Of the head, whose tensors say whether there is one, and of the router's storage."""

_HEAD, _LAYER = "model.mtp.", "model.mtp.layers.0."


def mtp_prefix(config: Mapping[str, Any]) -> str | None:
    """A tensor that an MTP head has; a head with other names is left out."""
    return f"{_LAYER}transformer_layer.mlp.down_proj"


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = Keys(config, path=path)
    keys.refuse_unknown(MATHS_KEYS | UNUSED_KEYS)
    for key, wanted in {
        "hidden_act": "silu", "attention_bias": False, "attention_method": "MLA",
        "zero_expert_type": "identity", "router_bias": False, "norm_topk_prob": False,
        "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "rope_interleave": True,
    }.items():  # fmt: skip
        keys.want(key, wanted)
    n_layers = keys.count("num_layers")
    keys.want("num_hidden_layers", 2 * n_layers)  # how transformers counts: attentions
    keys.want("intermediate_size", keys.count("ffn_hidden_size"))
    mixer, moe = _mixer(keys), _moe(keys)
    around = DenseFfn(keys.count("ffn_hidden_size"))
    layers = [Layer(i, mixer, moe, around) for i in range(n_layers)]
    mtp = Layer(n_layers, mixer, around) if has_mtp else None
    return spec_of(keys, layers, model_type="longcat_flash", mtp=mtp, norm_eps=1e-5)


def _mixer(keys: Keys) -> Mla:
    hidden, plain = keys.count("hidden_size"), mla(keys, norm_eps=1e-5)
    q_rank = keys.count("q_lora_rank")
    keys.want("qk_head_dim", plain.nope_dim + plain.rope_dim)
    theta = keys.rope_number("rope_theta", default=1e7)
    return replace(
        plain,
        rope=replace(plain.rope, base=theta),
        q_gain=(hidden / q_rank) ** 0.5,
        kv_gain=(hidden / plain.kv_rank) ** 0.5,
    )


def _moe(keys: Keys) -> MoeFfn:
    n_experts = keys.count("n_routed_experts", aliases=("num_local_experts",))
    n_identity = keys.count("zero_expert_num", default=0, least=0)
    top_k = keys.count("moe_topk", aliases=("num_experts_per_tok",))
    router = replace(
        softmax_router(keys, n_experts, top_k, renormalize=False),
        selection_bias=True,
        scale=keys.number("routed_scaling_factor", default=1.0),
        n_identity=n_identity,
    )
    inter = keys.multiple("expert_ffn_hidden_size", of=32)
    keys.want("moe_intermediate_size", inter)
    return MoeFfn(
        router=router,
        inter=inter,
        shared_inter=0,
        router_name="router.classifier",
        bias_name="router.e_score_correction_bias",
    )


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    router = spec.moe_ffn.router
    empty = [  # transformers saves matrices for identity experts, which it never reads
        f"model.layers.{layer}.mlp.experts.{expert}."
        for layer in spec.main_moe_layers
        for expert in range(router.n_experts, router.n_choices)
    ]
    made = plan_of(spec, ignored=(_HEAD, *empty))
    return made if spec.mtp is None else replace(made, renames=_head_names(spec.mtp, made))


def _head_names(mtp: Layer, plan: PackPlan) -> tuple[tuple[str, str], ...]:
    """Names of the MTP head, which here is the layer behind the last, as in other families. What
    else files have of it is left out: its embedding is a copy of the main one.
    """
    last = f"model.layers.{mtp.index}."
    special = {
        "enorm": f"{_LAYER}enorm.m",
        "hnorm": f"{_LAYER}hnorm.m",
        "shared_head.norm": f"{_HEAD}norm",
    }
    names = []
    for name in plan.dense:
        if name.startswith(last):
            part = name.removeprefix(last)
            inner = f"transformer_layer.{part}" if part.startswith("mlp.") else part
            names.append((special.get(part, _LAYER + inner), name))
    return tuple(names)
