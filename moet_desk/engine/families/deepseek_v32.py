"""DeepSeek-V3.2: config keys and tensor names.

DeepSeek-V3 whose every layer looks at the tokens that its indexer chose. The indexer rotates
halves, the attention pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.deepseek_v3 import MATHS_KEYS
from moet_desk.engine.families.parts import dense_first, head_behind_last, mla, sigmoid_moe, spec_of
from moet_desk.engine.families.sparse import INDEX_KEYS, check_layers, with_indexer
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import DenseFfn, Spec
from moet_desk.store.pack_format import PackPlan

mtp_prefix = head_behind_last


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = Keys(config, path=path)
    keys.refuse_unknown(MATHS_KEYS | INDEX_KEYS)
    keys.want("hidden_act", "silu")
    keys.want("attention_bias", wanted=False)
    keys.want("moe_layer_freq", 1)
    mixer = with_indexer(keys, mla(keys), interleaved=False)
    layers, mtp = dense_first(keys, mixer, sigmoid_moe(keys), has_mtp=has_mtp, n_dense=3)
    check_layers(
        keys, ["dense" if isinstance(layer.ffn, DenseFfn) else "sparse" for layer in layers]
    )
    return spec_of(keys, layers, model_type="deepseek_v32", mtp=mtp)


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    return plan_of(spec)
