"""OLMoE-1B-7B: config keys and tensor names.

As many key heads as query heads, a norm over the whole width of queries and of keys; a softmax
router whose weights stay as they are, and no shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.parts import COMMON_KEYS, gqa, no_head, softmax_moe, spec_of
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import Layer, QkNorm, Spec
from moet_desk.store.pack_format import PackPlan

MATHS_KEYS = COMMON_KEYS | frozenset(
    "intermediate_size norm_topk_prob attention_bias clip_qkv".split()
)
"""Keys this file reads or checks. Others that change the maths are refused by name."""

_EPS = 1e-5

mtp_prefix = no_head


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = Keys(config, path=path)
    keys.refuse_unknown(MATHS_KEYS)
    keys.want("hidden_act", "silu")
    keys.want("attention_bias", wanted=False)
    keys.want("clip_qkv", None)  # the released models have it off
    mixer = gqa(keys, qk_norm=QkNorm.FULL, norm_eps=_EPS)
    renormalize = keys.flag("norm_topk_prob", default=False)
    moe = softmax_moe(keys, inter="intermediate_size", renormalize=renormalize)
    layers = [Layer(i, mixer, moe) for i in range(keys.count("num_hidden_layers"))]
    return spec_of(keys, layers, model_type="olmoe", norm_eps=_EPS)


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    return plan_of(spec)
