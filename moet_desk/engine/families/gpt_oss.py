"""gpt-oss-20b and gpt-oss-120b: config keys and tensor names.

Grouped-query attention with sinks and biases, every other layer with a window; a router of softmax
over the chosen, and experts with biases and a GLU of their own. The matrices of all experts of a
layer are one tensor: as published in MXFP4 blocks, rows of gate and up in turn; in other formats
the same transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.parts import COMMON_KEYS, gqa, no_head, softmax_moe, spec_of
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import Layer, QkNorm, Spec
from moet_desk.kernels.kinds import Glu, Score
from moet_desk.store.pack_format import PackPlan

MATHS_KEYS = COMMON_KEYS | frozenset(
    "intermediate_size experts_per_token attention_bias sliding_window layer_types swiglu_limit"
    " swiglu_alpha initial_context_length".split()
)
"""Keys this file reads or checks; `initial_context_length` repeats what the rope says."""

_EPS, _THETA = 1e-5, 150000.0
_SLIDING, _FULL = "sliding_attention", "full_attention"

mtp_prefix = no_head


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = Keys(config, path=path)
    keys.refuse_unknown(MATHS_KEYS)
    keys.want("hidden_act", "silu")
    keys.want("attention_bias", wanted=True)
    keys.want("experts_per_token", keys.count("num_experts_per_tok"))
    if keys.rope_kind() != "yarn":  # files without one would mean another, built-in one
        raise keys.wrong("its rope is not of the type yarn")
    full = replace(
        gqa(keys, qk_norm=QkNorm.NONE, has_bias=True, rope_base=_THETA, norm_eps=_EPS),
        out_bias=True,
        has_sinks=True,
    )
    window = replace(full, window=keys.count("sliding_window"))
    plain = softmax_moe(keys, inter="intermediate_size", renormalize=False)
    moe = replace(
        plain,
        router=replace(plain.router, score=Score.TOPK_SOFTMAX, logit_bias=True),
        router_name="router",
        expert_bias=True,
        glu=Glu(
            limit=keys.number("swiglu_limit", default=7.0),
            alpha=keys.number("swiglu_alpha", default=1.702),
            shift=1.0,
        ),
    )
    kinds = _layer_types(keys)
    layers = [Layer(i, window if kind == _SLIDING else full, moe) for i, kind in enumerate(kinds)]
    return spec_of(keys, layers, model_type="gpt_oss", norm_eps=_EPS)


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    return replace(plan_of(spec), alternating=True)


def _layer_types(keys: Keys) -> list[str]:
    n_layers, kinds = keys.count("num_hidden_layers"), keys.get("layer_types")
    if kinds is None:
        return [_FULL if i % 2 else _SLIDING for i in range(n_layers)]
    known = isinstance(kinds, list) and all(kind in (_SLIDING, _FULL) for kind in kinds)
    if not known or len(kinds) != n_layers:
        raise keys.wrong(f"layer_types is {kinds!r}, {n_layers} of {_SLIDING} or {_FULL} expected")
    return list(kinds)
