"""GLM-4.5, 4.5-Air, 4.6 and 4.7: config keys and tensor names.

Grouped-query attention with a bias on queries, keys and values and rope on half of each head, the
large ones with a norm per head; otherwise as DeepSeek-V3, its MTP head too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.parts import (
    COMMON_KEYS,
    dense_first,
    gqa,
    head_behind_last,
    sigmoid_moe,
    spec_of,
)
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import QkNorm, Spec
from moet_desk.store.pack_format import PackPlan

MATHS_KEYS = COMMON_KEYS | frozenset(
    "first_k_dense_replace n_shared_experts moe_intermediate_size intermediate_size n_group"
    " topk_group norm_topk_prob scoring_func topk_method routed_scaling_factor"
    " num_nextn_predict_layers attention_bias use_qk_norm partial_rotary_factor"
    " moe_router_dtype".split()
)
"""Keys this file reads or checks. Others that change the maths are refused by name."""

_EPS = 1e-5

mtp_prefix = head_behind_last


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = Keys(config, path=path)
    keys.refuse_unknown(MATHS_KEYS)
    keys.want("hidden_act", "silu")
    mixer = gqa(
        keys,
        qk_norm=QkNorm.HEAD if keys.flag("use_qk_norm", default=False) else QkNorm.NONE,
        has_bias=keys.flag("attention_bias", default=False),
        rotary_share=0.5,
        norm_eps=_EPS,
    )
    layers, mtp = dense_first(keys, mixer, sigmoid_moe(keys), has_mtp=has_mtp)
    return spec_of(keys, layers, model_type="glm4_moe", mtp=mtp, norm_eps=_EPS)


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    return plan_of(spec)
