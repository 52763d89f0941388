"""Mixtral 8x7B and 8x22B: config keys and tensor names.

Plain grouped-query attention; a softmax router whose chosen weights add up to one. Tensor names of
the experts are their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.parts import COMMON_KEYS, gqa, no_head, softmax_moe, spec_of
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import Layer, QkNorm, Spec
from moet_desk.store.pack_format import PackPlan

MATHS_KEYS = COMMON_KEYS | frozenset("intermediate_size sliding_window router_jitter_noise".split())
"""Keys this file reads or checks; noise on the router is for training."""

_EPS = 1e-5

mtp_prefix = no_head


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = Keys(config, path=path)
    keys.refuse_unknown(MATHS_KEYS)
    keys.want("hidden_act", "silu")
    keys.want("sliding_window", None)
    mixer = gqa(keys, qk_norm=QkNorm.NONE, rope_base=1e6, norm_eps=_EPS)
    moe = softmax_moe(keys, inter="intermediate_size", renormalize=True, name="block_sparse_moe.")
    moe = replace(moe, projections=("w1", "w3", "w2"))
    layers = [Layer(i, mixer, moe) for i in range(keys.count("num_hidden_layers"))]
    return spec_of(keys, layers, model_type="mixtral", norm_eps=_EPS)


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    return plan_of(spec)
