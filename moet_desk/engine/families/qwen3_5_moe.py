"""Qwen3.5 and Qwen3.6 with experts, of which the text part is read: config keys and tensor names.

Qwen3-Next's layers; the products of a DeltaNet's input are stored one by one. The released config
and names have a level for the text model, beside a vision part that is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moet_desk.engine.families.config_keys import text_keys
from moet_desk.engine.families.qwen3_next import HYBRID_KEYS, head_names, hybrid, mtp_prefix
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import Spec
from moet_desk.store.pack_format import PackPlan

__all__ = ["mtp_prefix", "plan", "spec"]

MATHS_KEYS = HYBRID_KEYS | frozenset(
    "attn_output_gate mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings"
    " norm_topk_prob mlp_only_layers".split()
)
"""Keys of the text model that this file reads or checks."""

WRAPPER_KEYS = frozenset(
    "text_config vision_config image_token_id video_token_id vision_start_token_id"
    " vision_end_token_id tie_word_embeddings language_model_only".split()
)
"""Keys around them, of pictures and films."""

_POSITIONS = frozenset("mrope_section mrope_interleaved".split())
"""How a place in a picture turns a head; text has the same place in all three of its parts."""


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`."""
    keys = text_keys(config, path=path, wrapper=WRAPPER_KEYS)
    keys.refuse_unknown(MATHS_KEYS)
    for key, wanted in {
        "attn_output_gate": True, "mamba_ssm_dtype": "float32", "norm_topk_prob": True,
        "mtp_use_dedicated_embeddings": False, "mlp_only_layers": [],
    }.items():  # fmt: skip
        keys.want(key, wanted)
    return hybrid(
        keys, model_type="qwen3_5_moe", fused=False, renormalize=True, has_mtp=has_mtp,
        rope_keys=_POSITIONS,
    )  # fmt: skip


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    made = plan_of(spec)
    renames = (("model.language_model.", "model."), *head_names(spec))
    return replace(made, renames=renames, ignored=(*made.ignored, "model.visual."))
