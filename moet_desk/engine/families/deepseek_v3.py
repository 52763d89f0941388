"""DeepSeek-V3 family (V3, R1, V3.1, Kimi-K2 text, and the demo model): config keys and tensor
names.

MLA attention with interleaved rope; the first layers dense, the others with routed experts, a
sigmoid router with a selection bias, and one shared expert. The MTP head is one more layer after
the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.parts import (
    COMMON_KEYS,
    dense_first,
    head_behind_last,
    mla,
    sigmoid_moe,
    spec_of,
)
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import Spec
from moet_desk.store.pack_format import PackPlan

MATHS_KEYS = COMMON_KEYS | frozenset(
    "first_k_dense_replace qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim"
    " kv_lora_rank q_lora_rank n_shared_experts moe_intermediate_size intermediate_size n_group"
    " topk_group norm_topk_prob scoring_func topk_method routed_scaling_factor"
    " num_nextn_predict_layers rope_interleave attention_bias moe_layer_freq"
    " moe_router_dtype".split()
)
"""Keys this file reads or checks. Others that change the maths are refused by name."""

mtp_prefix = head_behind_last


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    return spec_from(Keys(config, path=path), has_mtp=has_mtp)


def spec_from(keys: Keys, harmless: frozenset[str] = frozenset(), *, has_mtp: bool) -> Spec:
    """The spec of these keys, wherever they lay; `harmless` may be there and say nothing."""
    keys.refuse_unknown(MATHS_KEYS | harmless)
    keys.want("hidden_act", "silu")
    keys.want("attention_bias", wanted=False)
    keys.want("moe_layer_freq", 1)
    layers, mtp = dense_first(keys, mla(keys), sigmoid_moe(keys), has_mtp=has_mtp)
    return spec_of(keys, layers, model_type="deepseek_v3", mtp=mtp)


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    return plan_of(spec)
