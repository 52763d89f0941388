"""The catalogue's widths are those of published config.json files: both give the same matrices."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from moet_desk.catalogue import find_entry
from moet_desk.engine.families import spec_for
from moet_desk.engine.families.tensors import dense_shapes
from moet_desk.engine.model_shape import kv_token_bytes
from moet_desk.engine.planned_model import spec_of
from moet_desk.engine.spec import Spec
from moet_desk.errors import MoetError
from moet_desk.kernels.kinds import KvFormat
from tests.engine.test_deepseek_v4_config import FLASH
from tests.engine.test_families import GPT_OSS_20B
from tests.engine.test_longcat import RELEASED as LONGCAT
from tests.engine.test_ngrams import RELEASED as LITE

_GLM: dict[str, Any] = {
    "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "hidden_act": "silu",
    "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 1000000, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "vocab_size": 151552, "use_cache": True, "attention_dropout": 0.0,
}  # fmt: skip
_QWEN35: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "attention_bias": False, "attn_output_gate": True,
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "num_experts": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "num_experts_per_tok": 8,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 248320,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1,
    "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
_V3: dict[str, Any] = {
    **_LATENT, "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_group": 8,
    "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
    "vocab_size": 129280, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
_SHARED = ["shared"] * 3
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v4-flash": FLASH,
    "deepseek-v3.1": _V3,
    "kimi-k2-0905": {
        **_V3, "model_type": "kimi_k2", "n_routed_experts": 384, "num_attention_heads": 64,
        "num_key_value_heads": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "vocab_size": 163840, "max_position_embeddings": 262144, "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "seq_aux": True,
        "aux_loss_alpha": 0.001, "rope_scaling": {**_V3["rope_scaling"], "factor": 64.0},
    },
    "glm-5.2": {
        **_LATENT, "model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12288,
        "head_dim": 192, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_head_dim": 256,
        "v_head_dim": 256, "num_hidden_layers": 78, "num_attention_heads": 64,
        "num_key_value_heads": 64, "n_routed_experts": 256, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "vocab_size": 154880,
        "max_position_embeddings": 1048576, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5,
        "rope_interleave": True, "moe_router_dtype": "float32", "pretraining_tp": 1,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75, "index_head_dim": 128,
        "index_n_heads": 32, "index_topk": 2048, "index_topk_freq": 4, "index_topk_pattern": None,
        "index_skip_topk_offset": 3, "indexer_rope_interleave": True,
        "index_share_for_mtp_iteration": True,
        "indexer_types": ["full"] * 3 + [*_SHARED, "full"] * 18 + _SHARED,
    },
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": {
        **GPT_OSS_20B, "num_hidden_layers": 36, "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "longcat-flash": LONGCAT,
    "longcat-flash-lite": LITE,
    "glm-4.7": {
        **_GLM, "hidden_size": 5120, "intermediate_size": 12288, "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536, "n_routed_experts": 160, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3, "num_hidden_layers": 92, "use_qk_norm": True,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_router_dtype": "float32",
    },
    "glm-4.5-air": {
        **_GLM, "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1, "num_hidden_layers": 46, "use_qk_norm": False,
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite", "attention_bias": False, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 10240, "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536, "topk_method": "noaux_tc", "norm_topk_prob": True,
        "num_attention_heads": 20, "n_group": 1, "topk_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 1, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4,
        "first_k_dense_replace": 1, "num_hidden_layers": 47, "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False,
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "vocab_size": 154880, "scoring_func": "sigmoid",
    },
    "minimax-m2.7": {
        "model_type": "minimax_m2", "attn_type_list": [1] * 62, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
        "max_position_embeddings": 204800, "mtp_transformer_layers": 1, "num_attention_heads": 48,
        "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
        "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_mtp": True,
        "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    },
    "qwen3.6-35b-a3b": {
        **_QWEN35, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "linear_num_value_heads": 32, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3-coder-480b": {
        "model_type": "qwen3_moe", "attention_dropout": 0.0, "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 8192,
        "max_position_embeddings": 262144, "max_window_layers": 62, "mlp_only_layers": [],
        "moe_intermediate_size": 2560, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts": 160, "num_experts_per_tok": 8, "num_hidden_layers": 62,
        "num_key_value_heads": 8, "output_router_logits": False, "qkv_bias": False,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0, "sliding_window": None,
        "tie_word_embeddings": False, "use_cache": True, "use_qk_norm": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3.5-122b-a10b": {
        **_QWEN35, "hidden_size": 3072, "num_hidden_layers": 48, "num_attention_heads": 32,
        "linear_num_value_heads": 64, "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
    },
}  # fmt: skip


def matrices(spec: Spec) -> list[tuple[int, ...]]:
    """All but the tables of V4's first layers, which name experts by token ids."""
    named = (spec.vocab, spec.moe_ffn.router.top_k)
    shapes = (shape for _, shape in dense_shapes(spec) if shape != named)
    return sorted(shape for shape in shapes if len(shape) == 2 and prod(shape) > 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_catalogue__widths__those_of_the_published_config(name: str) -> None:
    entry = find_entry(name)
    assert entry is not None
    spec, own = spec_for(PUBLISHED[name], path=name, has_mtp=False), spec_of(entry)
    router = spec.moe_ffn.router
    assert (entry.layers, entry.moe_layers) == (len(spec.layers), len(spec.main_moe_layers))
    assert (entry.experts, entry.top_k) == (router.n_experts, router.top_k)
    assert (entry.hidden, entry.inter) == (spec.hidden, spec.moe_ffn.inter)
    assert entry.context == spec.context
    assert matrices(own) == matrices(spec)
    assert kv_token_bytes(own, KvFormat.BF16) == kv_token_bytes(spec, KvFormat.BF16)
    assert router.mean_used == own.moe_ffn.router.mean_used


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("glm-4.7", "moe_router_dtype", "bfloat16"),
        ("glm-5.2", "moe_router_dtype", "bfloat16"),
        ("qwen3.6-35b-a3b", "output_gate_type", "sigmoid"),
        ("qwen3-coder-480b", "qkv_bias", True),
        ("qwen3-coder-480b", "use_qk_norm", False),
        ("qwen3-coder-480b", "shared_expert_intermediate_size", 512),
    ],
)
def test_spec_for__other_value_of_a_published_key__refused(
    name: str, key: str, value: object
) -> None:
    with pytest.raises(MoetError, match=key):
        spec_for({**PUBLISHED[name], key: value}, path=name, has_mtp=False)


@pytest.mark.parametrize("gate", ["silu", "swish"])
def test_spec_for__gate_by_either_of_its_names__same_model(gate: str) -> None:
    plain = PUBLISHED["qwen3.6-35b-a3b"]
    named = {**plain, "output_gate_type": gate}
    assert spec_for(named, path="", has_mtp=True) == spec_for(plain, path="", has_mtp=True)
