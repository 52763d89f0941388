"""Kimi-K2.5 to K2.7, of which the text part is read: config keys and tensor names.

DeepSeek-V3's layers one level down, beside a vision part that is left out by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moet_desk.engine.families.config_keys import text_keys
from moet_desk.engine.families.deepseek_v3 import spec_from
from moet_desk.engine.families.parts import no_head
from moet_desk.engine.families.tensors import plan_of
from moet_desk.engine.spec import Spec
from moet_desk.store.pack_format import PackPlan

__all__ = ["mtp_prefix", "plan", "spec"]

WRAPPER_KEYS = frozenset(
    "text_config vision_config ignore_index media_placeholder_token_id use_unified_vision_chunk"
    " video_placeholder tie_word_embeddings encoder_only language_only".split()
)
"""Keys around the text model's, of pictures and films."""

GENERATION_KEYS = frozenset(
    "bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample"
    " early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty"
    " forced_bos_token_id forced_eos_token_id length_penalty max_length min_length"
    " no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix"
    " remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id suppress_tokens"
    " temperature tf_legacy_loss tokenizer_class top_k top_p torchscript typical_p"
    " use_bfloat16".split()
)
"""What transformers 4 writes of generation into a config that lies in another."""

_VISION = ("vision_tower.", "mm_projector.")

mtp_prefix = no_head


def spec(config: Mapping[str, Any], *, path: str, has_mtp: bool) -> Spec:
    """See `families.spec_for`. `has_mtp` changes nothing: these models have no head."""
    keys = text_keys(config, path=path, wrapper=WRAPPER_KEYS)
    keys.want("pruned_heads", {})
    made = spec_from(keys, GENERATION_KEYS | {"pruned_heads"}, has_mtp=False)
    return replace(made, model_type="kimi_k25")


def plan(spec: Spec) -> PackPlan:
    """See `families.plan_for`."""
    return replace(plan_of(spec, ignored=_VISION), renames=(("language_model.", ""),))
