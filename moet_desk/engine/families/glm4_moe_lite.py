"""GLM-4.7-Flash: config keys and tensor names.

DeepSeek-V3's parts with other sizes. Its own files say which layers are dense in a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.deepseek_v3 import MATHS_KEYS
from moet_desk.engine.families.parts import dense_first, head_behind_last, mla, sigmoid_moe, spec_of
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import DenseFfn, Spec
from moet_desk.store.pack_format import PackPlan

_EPS = 1e-5

mtp_prefix = head_behind_last


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = Keys(config, path=path)
    keys.refuse_unknown(MATHS_KEYS | {"mlp_layer_types", "partial_rotary_factor"})
    keys.want("hidden_act", "silu")
    keys.want("attention_bias", wanted=False)
    keys.want("partial_rotary_factor", 1.0)
    keys.want("moe_layer_freq", 1)
    mixer, moe = mla(keys, norm_eps=_EPS), sigmoid_moe(keys)
    layers, mtp = dense_first(keys, mixer, moe, has_mtp=has_mtp, n_dense=1)
    kinds = ["dense" if isinstance(layer.ffn, DenseFfn) else "sparse" for layer in layers]
    keys.want("mlp_layer_types", kinds)
    return spec_of(keys, layers, model_type="glm4_moe_lite", mtp=mtp, norm_eps=_EPS)


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    return plan_of(spec)
