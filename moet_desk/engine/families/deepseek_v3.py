"""DeepSeek-V3 family (V3, R1, V3.1, Kimi-K2 text, and the demo model): config keys and tensor
names.

MLA attention with interleaved rope; the first layers dense, the others with routed experts, a
sigmoid router with a selection bias, and one shared expert. The MTP head is one more layer after
the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.parts import (
    COMMON_KEYS,
    dense_first,
    head_behind_last,
    rope,
    sigmoid_moe,
    spec_of,
)
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import Mla, Spec
from moet_desk.store.pack_format import PackPlan

MATHS_KEYS = COMMON_KEYS | frozenset(
    "first_k_dense_replace qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim"
    " kv_lora_rank q_lora_rank n_shared_experts moe_intermediate_size intermediate_size n_group"
    " topk_group norm_topk_prob scoring_func topk_method routed_scaling_factor"
    " num_nextn_predict_layers rope_interleave attention_bias moe_layer_freq".split()
)
"""Keys this file reads or checks. Others that change the maths are refused by name."""

mtp_prefix = head_behind_last


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = Keys(config, path=path)
    keys.refuse_unknown(MATHS_KEYS)
    keys.want("hidden_act", "silu")
    keys.want("attention_bias", wanted=False)
    keys.want("moe_layer_freq", 1)
    layers, mtp = dense_first(keys, _mixer(keys), sigmoid_moe(keys), has_mtp=has_mtp)
    return spec_of(keys, layers, model_type="deepseek_v3", mtp=mtp)


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    return plan_of(spec)


def _mixer(keys: Keys) -> Mla:
    nope_dim, rope_dim = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
    interleaved = keys.flag("rope_interleave", default=True)
    turns = rope(keys, rope_dim, interleaved=interleaved)
    scale = (nope_dim + rope_dim) ** -0.5
    if turns.yarn is not None and turns.yarn.mscale_all_dim:
        # the released attention multiplies the softmax scale by mscale squared
        mscale = 0.1 * turns.yarn.mscale_all_dim * math.log(turns.yarn.factor) + 1.0
        scale *= mscale * mscale if turns.yarn.factor > 1 else 1.0
    return Mla(
        n_heads=keys.count("num_attention_heads"),
        q_rank=keys.count("q_lora_rank") if keys.get("q_lora_rank") is not None else None,
        kv_rank=keys.count("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=keys.count("v_head_dim"),
        softmax_scale=scale,
        latent_eps=keys.number("rms_norm_eps", default=1e-6),
        rope=turns,
    )
