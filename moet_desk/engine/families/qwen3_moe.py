"""Qwen3-30B-A3B, Qwen3-235B-A22B and Qwen3-Coder: config keys and tensor names.

Grouped-query attention with a norm per head; a softmax router and no shared expert. Some layers may
be dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.parts import COMMON_KEYS, gqa, no_head, softmax_moe, spec_of
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import DenseFfn, Layer, QkNorm, Spec
from moet_desk.store.pack_format import PackPlan

MATHS_KEYS = COMMON_KEYS | frozenset(
    "moe_intermediate_size intermediate_size norm_topk_prob attention_bias use_sliding_window"
    " sliding_window max_window_layers mlp_only_layers decoder_sparse_step qkv_bias"
    " use_qk_norm shared_expert_intermediate_size".split()
)
"""Keys this file reads or checks. `sliding_window` and `max_window_layers` mean nothing without
`use_sliding_window`; Qwen3-Coder says its biases, norms and shared experts in words of its own.
"""

mtp_prefix = no_head


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = Keys(config, path=path)
    keys.refuse_unknown(MATHS_KEYS)
    keys.want("hidden_act", "silu")
    keys.want("attention_bias", wanted=False)
    keys.want("qkv_bias", wanted=False)
    keys.want("use_qk_norm", wanted=True)
    keys.want("shared_expert_intermediate_size", 0)
    keys.want("use_sliding_window", wanted=False)
    mixer = gqa(keys, qk_norm=QkNorm.HEAD)
    renormalize = keys.flag("norm_topk_prob", default=False)
    moe = softmax_moe(keys, inter="moe_intermediate_size", renormalize=renormalize)
    step = keys.count("decoder_sparse_step", default=1)
    n_layers = keys.count("num_hidden_layers")
    dense = keys.indices("mlp_only_layers", below=n_layers)
    dense |= {i for i in range(n_layers) if (i + 1) % step}
    if len(dense) == n_layers:
        raise keys.wrong("all layers are dense")
    plain = DenseFfn(keys.count("intermediate_size")) if dense else moe
    layers = [Layer(i, mixer, plain if i in dense else moe) for i in range(n_layers)]
    return spec_of(keys, layers, model_type="qwen3_moe")


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    return plan_of(spec)
