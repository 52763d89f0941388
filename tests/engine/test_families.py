"""Configs that must be refused, each by name, before anything is read or written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moet_desk.engine.families import packed_head, plan_for, spec_for
from moet_desk.engine.model_shape import kv_token_bytes, state_bytes
from moet_desk.engine.spec import DenseFfn, Gdn, Gqa, Mla, QkNorm
from moet_desk.errors import MoetError
from moet_desk.kernels.kinds import Glu, KvFormat, Score


@pytest.fixture
def config(demo_source: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((demo_source / "config.json").read_text())
    return loaded


def test_spec__demo_config__as_documented(config: dict[str, Any]) -> None:
    spec = spec_for(config, path="config.json", has_mtp=True)
    assert (len(spec.layers), spec.hidden, spec.vocab, spec.context) == (9, 512, 8192, 2048)
    assert spec.main_moe_layers == tuple(range(1, 9))
    assert spec.mtp is not None
    assert spec.mtp.index == 9
    router = spec.moe_ffn.router
    assert (router.n_experts, router.top_k, router.scale, router.renormalize) == (32, 4, 1.0, True)
    mixer = spec.attention
    assert isinstance(mixer, Mla)
    assert (mixer.q_rank, mixer.kv_rank, mixer.rope.interleaved) == (None, 128, True)
    assert mixer.softmax_scale == 64**-0.5


def test_plan__mtp_tensors_absent__head_left_out(config: dict[str, Any]) -> None:
    plan = plan_for(config, path="config.json", names=["model.norm"])
    assert plan.moe_layers == tuple(range(1, 9))
    assert not any(name.startswith("model.layers.9.") for name in plan.dense)


def test_spec__yarn__softmax_scale_has_mscale_squared(config: dict[str, Any]) -> None:
    config["rope_scaling"] = {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    spec = spec_for(config, path="config.json", has_mtp=False)
    assert spec.attention.softmax_scale * 64**0.5 == pytest.approx(1.874, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "9"}, "num_hidden_layers is '9'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": 500}, "multiple of 32"),
        ({"moe_intermediate_size": 0}, "at least 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"n_group": 5}, "32 experts in 5 groups"),
        ({"topk_group": 3}, "3 kept"),
        ({"num_experts_per_tok": 64}, "64 of 32 experts"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.0}}, "factor of the rope is 0.0"),
        ({"first_k_dense_replace": 9}, "no layer with routed experts"),
        ({"index_topk": 2048, "index_n_heads": 64}, "index_n_heads, index_topk"),
    ],
)
def test_spec__wrong_or_unknown_key__refused_by_name(
    config: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(MoetError) as caught:
        spec_for({**config, **change}, path="some/config.json", has_mtp=False)
    assert caught.value.code == "MD-SRC-07"
    assert words in caught.value.cause
    assert "some/config.json" in caught.value.cause


@pytest.mark.parametrize("model_type", ["llama", "qwen4_exp", ""])
def test_spec__unknown_family__refused_with_the_known_ones(
    config: dict[str, Any], model_type: str
) -> None:
    with pytest.raises(MoetError) as caught:
        spec_for({**config, "model_type": model_type}, path="config.json", has_mtp=False)
    assert caught.value.code == "MD-PACK-01"
    assert "deepseek_v3" in caught.value.cause


def test_spec__no_model_type__refused() -> None:
    with pytest.raises(MoetError) as caught:
        spec_for({}, path="config.json", has_mtp=False)
    assert caught.value.code == "MD-SRC-07"


GLM_4_5_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
    "attention_dropout": 0.0, "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5,
    "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408, "norm_topk_prob": True, "num_attention_heads": 96,
    "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.54.0",
    "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 262144,
    "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
OLMOE: dict[str, Any] = {
    "model_type": "olmoe", "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024,
    "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
    "vocab_size": 50304,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
GLM_4_7_FLASH: dict[str, Any] = {
    "model_type": "glm4_moe_lite", "attention_bias": False, "eos_token_id": [154820, 154827],
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4,
    "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 1.8, "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
MINIMAX_M2: dict[str, Any] = {
    "model_type": "minimax_m2", "attn_type_list": [1] * 62, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
    "max_position_embeddings": 196608, "mtp_transformer_layers": 1, "num_attention_heads": 48,
    "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
    "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
    "quantization_config": {"quant_method": "fp8"}, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
    "rotary_dim": 64, "router_jitter_noise": 0.0, "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_mtp": True,
    "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "attention_bias": False, "decoder_sparse_step": 1,
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512,
    "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000000, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_6: dict[str, Any] = {
    "model_type": "qwen3_5_moe", "image_token_id": 248056, "vision_config": {"depth": 27},
    "tie_word_embeddings": False, "text_config": {
        **{
            key: value for key, value in QWEN3_NEXT.items()
            if key not in (
                "decoder_sparse_step", "intermediate_size", "rope_scaling", "rope_theta",
                "partial_rotary_factor", "use_sliding_window",
            )
        },
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "num_experts": 256,
        "num_experts_per_tok": 8, "vocab_size": 248320, "attn_output_gate": True,
        "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True,
        },
    },
}  # fmt: skip
PUBLISHED = {
    "glm": GLM_4_5_AIR, "qwen": QWEN3_30B, "olmoe": OLMOE, "mixtral": MIXTRAL,
    "flash": GLM_4_7_FLASH, "minimax": MINIMAX_M2, "oss": GPT_OSS_20B,
    "next": QWEN3_NEXT, "qwen3.6": QWEN3_6,
}  # fmt: skip


def test_spec__glm_4_5_air__as_published() -> None:
    spec = spec_for(GLM_4_5_AIR, path="config.json", has_mtp=True)
    mixer, moe = spec.layers[0].mixer, spec.moe_ffn
    assert isinstance(mixer, Gqa)
    assert (mixer.n_heads, mixer.n_keys, mixer.head_dim, mixer.has_bias) == (96, 8, 128, True)
    assert (mixer.rope.dim, mixer.rope.base, mixer.rope.interleaved) == (64, 1e6, False)
    assert mixer.qk_norm is QkNorm.NONE
    assert spec.layers[0].ffn == DenseFfn(10944)
    assert spec.main_moe_layers == tuple(range(1, 46))
    assert spec.mtp is not None
    assert spec.mtp.index == 46
    assert (moe.router.n_experts, moe.inter, moe.shared_inter) == (128, 1408, 1408)
    plan = plan_for(GLM_4_5_AIR, path="config.json", names=["model.layers.46.eh_proj"])
    assert plan.dense["model.layers.3.self_attn.k_proj.bias"] == (1024,)
    assert plan.dense["model.layers.46.self_attn.o_proj"] == (4096, 12288)
    assert "model.layers.46.shared_head.head" in plan.ignored


def test_spec__qwen3_30b__as_published() -> None:
    spec = spec_for(QWEN3_30B, path="config.json", has_mtp=False)
    mixer, router = spec.layers[0].mixer, spec.moe_ffn.router
    assert isinstance(mixer, Gqa)
    assert (mixer.n_keys, mixer.qk_norm, mixer.has_bias) == (4, QkNorm.HEAD, False)
    assert (mixer.rope.dim, mixer.rope.base) == (128, 1e7)
    assert (router.score, router.renormalize, router.top_k) == (Score.SOFTMAX, True, 8)
    assert spec.moe_ffn.shared_inter == 0
    assert len(spec.main_moe_layers) == 48


def test_spec__olmoe_and_mixtral__as_published() -> None:
    olmoe = spec_for(OLMOE, path="config.json", has_mtp=False)
    mixer = olmoe.layers[0].mixer
    assert isinstance(mixer, Gqa)
    assert (mixer.n_keys, mixer.head_dim, mixer.qk_norm) == (16, 128, QkNorm.FULL)
    assert not olmoe.moe_ffn.router.renormalize
    mixtral = spec_for(MIXTRAL, path="config.json", has_mtp=False)
    assert mixtral.moe_ffn.router.renormalize
    plan = plan_for(MIXTRAL, path="config.json", names=[])
    assert plan.gate == "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1"
    assert plan.down == "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2"
    assert plan.dense["model.layers.0.block_sparse_moe.gate"] == (8, 4096)


def test_spec__glm_4_7_flash__deepseek_parts_with_the_first_layer_dense() -> None:
    spec = spec_for(GLM_4_7_FLASH, path="config.json", has_mtp=True)
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Mla)
    assert (mixer.q_rank, mixer.kv_rank, mixer.nope_dim, mixer.v_dim) == (768, 512, 192, 256)
    assert (mixer.rope.interleaved, mixer.rope.base, mixer.latent_eps) == (True, 1e6, 1e-5)
    assert spec.main_moe_layers == tuple(range(1, 47))
    listed = {**GLM_4_7_FLASH, "mlp_layer_types": ["dense", *["sparse"] * 46]}
    assert spec_for(listed, path="config.json", has_mtp=True) == spec


def test_spec__minimax_m2__as_published() -> None:
    spec = spec_for(MINIMAX_M2, path="config.json", has_mtp=False)
    mixer, router = spec.layers[0].mixer, spec.moe_ffn.router
    assert isinstance(mixer, Gqa)
    assert (mixer.n_keys, mixer.qk_norm, mixer.rope.dim) == (8, QkNorm.FULL, 64)
    assert (router.score, router.selection_bias, router.renormalize) == (Score.SIGMOID, True, True)
    plan = plan_for(MINIMAX_M2, path="config.json", names=[])
    assert plan.dense["model.layers.0.block_sparse_moe.e_score_correction_bias"] == (256,)
    assert plan.dense["model.layers.0.self_attn.k_norm"] == (1024,)
    assert plan.up == "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3"


def test_spec__gpt_oss_20b__as_published() -> None:
    spec = spec_for(GPT_OSS_20B, path="config.json", has_mtp=False)
    mixers = [layer.mixer for layer in spec.layers]
    assert [mixer.window for mixer in mixers if isinstance(mixer, Gqa)] == [128, None] * 12
    first = mixers[0]
    assert isinstance(first, Gqa)
    assert (first.n_heads, first.n_keys, first.head_dim, first.has_sinks) == (64, 8, 64, True)
    assert (first.has_bias, first.out_bias, first.rope.base) == (True, True, 150000.0)
    assert first.rope.yarn is not None
    assert (first.rope.yarn.factor, first.rope.yarn.truncate) == (32.0, False)
    moe = spec.moe_ffn
    assert moe.glu == Glu(limit=7.0, alpha=1.702, shift=1.0)
    assert (moe.router.score, moe.router.logit_bias, moe.router.top_k) == (
        Score.TOPK_SOFTMAX, True, 4,
    )  # fmt: skip
    without = {key: value for key, value in GPT_OSS_20B.items() if key != "layer_types"}
    assert spec_for(without, path="config.json", has_mtp=False) == spec
    plan = plan_for(GPT_OSS_20B, path="config.json", names=[])
    assert plan.alternating
    assert plan.dense["model.layers.3.mlp.experts.gate_up_proj_bias"] == (32, 5760)
    assert plan.dense["model.layers.3.mlp.router.bias"] == (32,)
    assert plan.dense["model.layers.3.self_attn.sinks"] == (64,)


def test_spec__qwen3_next_and_3_6__as_published() -> None:
    spec = spec_for(QWEN3_NEXT, path="config.json", has_mtp=True)
    kinds = [isinstance(layer.mixer, Gdn) for layer in spec.layers]
    assert kinds == [True, True, True, False] * 12
    mixer, linear, moe = spec.attention, spec.recurrent[0], spec.moe_ffn
    assert isinstance(mixer, Gqa)
    assert (mixer.n_keys, mixer.head_dim, mixer.rope.dim, mixer.rope.base) == (2, 256, 64, 1e7)
    assert (mixer.out_gate, mixer.qk_norm, spec.norm_offset) == (True, QkNorm.HEAD, 1.0)
    assert (linear.channels, linear.n_values, linear.kernel, linear.fused) == (8192, 32, 4, True)
    assert isinstance(linear, Gdn)
    assert linear.state_bytes(KvFormat.BF16) == 32 * 128 * 128 * 4 + 3 * 8192 * 4
    assert (moe.shared_inter, moe.shared_gate, moe.router.renormalize) == (512, True, True)
    assert kv_token_bytes(spec, KvFormat.BF16) == 24576
    assert state_bytes(spec, KvFormat.BF16) == 3 * 36 * linear.state_bytes(KvFormat.BF16)
    plan = plan_for(QWEN3_NEXT, path="config.json", names=["mtp.fc"])
    assert plan.moe_layers[-1] == 48
    assert plan.dense["model.layers.0.linear_attn.in_proj_qkvz"] == (12288, 2048)
    assert plan.dense["model.layers.48.self_attn.q_proj"] == (8192, 2048)
    newer = spec_for(QWEN3_6, path="config.json", has_mtp=False)
    assert (len(newer.layers), newer.vocab, newer.n_kv_layers) == (40, 248320, 10)
    assert newer.recurrent[0] == replace(linear, fused=False)
    assert newer.attention == mixer
    inner = spec_for(QWEN3_6["text_config"], path="config.json", has_mtp=False)
    assert inner == newer
    for config in (QWEN3_6, QWEN3_6["text_config"]):
        assert packed_head(config, (0, 40), (), path="c")
        assert not packed_head(config, (0, 39), (), path="c")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("glm", {"head_dim": 72}, "heads have 72 numbers"),
        ("glm", {"num_key_value_heads": 5}, "96 heads cannot share 5"),
        ("glm", {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
        ("glm", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ("glm", {"scoring_func": "softmax"}, "scoring_func"),
        ("glm", {"topk_group": 3}, "3 kept"),
        ("glm", {"use_qk_norm": 1}, "use_qk_norm is 1"),
        ("glm", {"index_topk": 2048}, "index_topk"),
        ("qwen", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen", {"attention_bias": True}, "attention_bias"),
        ("qwen", {"mlp_only_layers": [48]}, "mlp_only_layers"),
        ("qwen", {"decoder_sparse_step": 49}, "all layers are dense"),
        ("qwen", {"num_experts_per_tok": 129}, "129 of 128 experts"),
        ("qwen", {"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ("qwen", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max"),
        ("qwen", {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("olmoe", {"attention_bias": True}, "attention_bias"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("mixtral", {"intermediate_size": 100}, "multiple of 32"),
        ("mixtral", {"attention_bias": False}, "attention_bias"),
        ("flash", {"mlp_layer_types": ["sparse"] * 47}, "mlp_layer_types"),
        ("flash", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("oss", {"rope_scaling": None}, "yarn"),
        ("oss", {"attention_bias": False}, "attention_bias"),
        ("oss", {"sliding_window": None}, "sliding_window is missing"),
        ("oss", {"layer_types": ["full_attention"] * 23}, "24 of sliding_attention"),
        ("oss", {"layer_types": ["linear_attention"] * 24}, "24 of sliding_attention"),
        ("oss", {"experts_per_token": 2}, "experts_per_token"),
        ("oss", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ("minimax", {"attn_type_list": [0] + [1] * 61}, "attn_type_list"),
        ("minimax", {"shared_intermediate_size": 1536}, "shared_intermediate_size"),
        ("minimax", {"layernorm_mlp_beta": 2.0}, "layernorm_mlp_beta"),
        ("minimax", {"use_routing_bias": False}, "use_routing_bias"),
        ("next", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("next", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("next", {"linear_num_key_heads": 12}, "32 heads of values cannot share 12"),
        ("next", {"layer_types": ["full_attention"] * 47}, "48 of linear_attention"),
        ("next", {"layer_types": ["linear_attention"] * 48}, "no layer has full_attention"),
        ("next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ("next", {"hc_mult": 4}, "hc_mult"),
        ("next", {"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ("qwen3.6", {"audio_config": {}}, "audio_config"),
        ("qwen3.6", {"text_config": 5}, "text_config is 5"),
        ("qwen3.6", {"text_config": {**QWEN3_6["text_config"], "hc_mult": 4}}, "hc_mult"),
        (
            "qwen3.6",
            {"text_config": {**QWEN3_6["text_config"], "attn_output_gate": False}},
            "attn_output_gate",
        ),
    ],
)
def test_spec__grouped_query_families__what_changes_the_maths_is_refused(
    name: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(MoetError) as caught:
        spec_for({**PUBLISHED[name], **change}, path="config.json", has_mtp=False)
    assert caught.value.code == "MD-SRC-07"
    assert words in caught.value.cause


def test_spec__qwen_with_dense_layers__named_ones_and_every_second() -> None:
    config = {**QWEN3_30B, "mlp_only_layers": [1, 5], "decoder_sparse_step": 2}
    spec = spec_for(config, path="config.json", has_mtp=False)
    dense = {layer.index for layer in spec.layers if isinstance(layer.ffn, DenseFfn)}
    assert dense == {5, *range(0, 48, 2), 1}
