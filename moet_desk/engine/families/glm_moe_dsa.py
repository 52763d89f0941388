"""GLM-5, 5.1 and 5.2: config keys and tensor names.

DeepSeek-V3.2's parts with other sizes; the indexer rotates pairs. In 5.2 most layers have no
indexer and look at what the nearest one before them with an indexer chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moet_desk.engine.families.config_keys import Keys
from moet_desk.engine.families.deepseek_v3 import MATHS_KEYS
from moet_desk.engine.families.parts import dense_first, head_behind_last, mla, sigmoid_moe, spec_of
from moet_desk.engine.families.sparse import (
    INDEX_KEYS,
    OWN,
    REUSED,
    check_layers,
    reusing,
    with_indexer,
)
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import DenseFfn, Spec
from moet_desk.store.pack_format import PackPlan

_SCHEDULE_KEYS = frozenset(
    "indexer_types index_topk_pattern index_topk_freq index_skip_topk_offset"
    " index_share_for_mtp_iteration".split()
)
"""The last one saves time in later guesses of the MTP head; a guess decides nothing, so it is not
followed here.
"""

_EPS = 1e-5

mtp_prefix = head_behind_last


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = Keys(config, path=path)
    keys.refuse_unknown(MATHS_KEYS | INDEX_KEYS | _SCHEDULE_KEYS)
    keys.want("hidden_act", "silu")
    keys.want("attention_bias", wanted=False)
    keys.want("moe_layer_freq", 1)
    mixer = with_indexer(keys, mla(keys, norm_eps=_EPS), interleaved=True)
    layers, mtp = dense_first(keys, mixer, sigmoid_moe(keys), has_mtp=has_mtp, n_dense=3)
    check_layers(
        keys, ["dense" if isinstance(layer.ffn, DenseFfn) else "sparse" for layer in layers]
    )
    layers = reusing(layers, _choosers(keys, len(layers)))
    return spec_of(keys, layers, model_type="glm_moe_dsa", mtp=mtp, norm_eps=_EPS)


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    return plan_of(spec)


def _choosers(keys: Keys, n_layers: int) -> list[str]:
    """Of each layer "full" or "shared": a list, else a pattern, else every so many layers."""
    kinds = keys.get("indexer_types")
    if kinds is None:
        kinds = keys.get("index_topk_pattern")
        if isinstance(kinds, str):
            kinds = [{"F": OWN, "S": REUSED}.get(letter, letter) for letter in kinds]
    if kinds is None:
        every = keys.count("index_topk_freq", default=1)
        offset = keys.count("index_skip_topk_offset", default=2, least=0)
        kinds = [REUSED if max(i - offset + 1, 0) % every else OWN for i in range(n_layers)]
    known = isinstance(kinds, list) and all(kind in (OWN, REUSED) for kind in kinds)
    if not known or len(kinds) != n_layers:
        raise keys.wrong(f"indexer_types is {kinds!r}, {n_layers} of {OWN} or {REUSED} expected")
    if kinds[0] == REUSED:
        raise keys.wrong("the first layer has no choice before it that it could reuse")
    return list(kinds)
