"""MiniMax-M2, M2.1, M2.5 and M2.7: config keys and tensor names.

Grouped-query attention with a norm over the whole width of queries and of keys, and rope on a part
of each head; a sigmoid router with a selection bias, and no shared expert. The config speaks of MTP
modules, but the files hold none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.parts import COMMON_KEYS, gqa, no_head, sigmoid_router, spec_of
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import Layer, MoeFfn, QkNorm, Spec
from moet_desk.store.pack_format import PackPlan

MATHS_KEYS = COMMON_KEYS | frozenset(
    "intermediate_size rotary_dim partial_rotary_factor use_qk_norm qk_norm_type scoring_func"
    " use_routing_bias routed_scaling_factor attn_type_list sliding_window attn_window_size"
    " shared_intermediate_size layernorm_full_attention_beta layernorm_linear_attention_beta"
    " layernorm_mlp_beta router_jitter_noise".split()
)
"""Keys this file reads or checks; noise on the router is for training."""

UNUSED_KEYS = frozenset(
    "use_mtp num_mtp_modules mtp_transformer_layers mlp_intermediate_size shared_moe_mode"
    " swa_rope_theta max_model_len".split()
)
"""Of parts that these models do not have."""

mtp_prefix = no_head


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = Keys(config, path=path)
    keys.refuse_unknown(MATHS_KEYS | UNUSED_KEYS)
    n_layers = keys.count("num_hidden_layers")
    for key, wanted in {
        "hidden_act": "silu", "use_qk_norm": True, "qk_norm_type": "per_layer",
        "use_routing_bias": True, "attn_type_list": [1] * n_layers, "sliding_window": None,
        "attn_window_size": None, "shared_intermediate_size": 0,
        "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
    }.items():  # fmt: skip
        keys.want(key, wanted)
    share = 1.0
    if keys.get("rotary_dim") is not None:
        share = keys.count("rotary_dim") / keys.count("head_dim")
    mixer = gqa(keys, qk_norm=QkNorm.FULL, rotary_share=share, rope_base=5e6)
    moe = MoeFfn(
        router=sigmoid_router(keys, renormalize=True),
        inter=keys.multiple("intermediate_size", of=32),
        shared_inter=0,
        name="block_sparse_moe.",
        bias_name="e_score_correction_bias",
        projections=("w1", "w3", "w2"),
    )
    return spec_of(keys, [Layer(i, mixer, moe) for i in range(n_layers)], model_type="minimax_m2")


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    return plan_of(spec)
