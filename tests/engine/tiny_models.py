"""Tiny random models of every family that runs, made and saved by transformers.

Init 0.02 shows a wrong epsilon, 0.25 shows wrong rope, groups or bias use. The packer makes FP4
rows of the experts; transformers then runs on the values of those rows, so only arithmetic can
differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moet_desk.kernels.reference import expand_fine
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader

TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "max_position_embeddings": 512,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 128,
}  # fmt: skip
KIMI_YARN = {
    **YARN, "rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "v3_groups_yarn": {**TINY, "rope_parameters": YARN},
    "v3_no_query_latent": {**TINY, "rope_parameters": YARN, "q_lora_rank": None, "topk_group": 1},
    "kimi_k2": {
        **TINY, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
        "rope_parameters": KIMI_YARN,
    },
    "plain_rope": {
        **TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "norm_topk_prob": False, "n_shared_experts": 2,
    },
    "glm_lite": {
        **{key: value for key, value in TINY.items() if key != "first_k_dense_replace"},
        "model_type": "glm4_moe_lite", "n_routed_experts": 8, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-6,  # transformers' latent norms have it whatever the config says
    },
    "v32": {
        **TINY, "model_type": "deepseek_v32", "rope_parameters": YARN, "index_topk": 8,
        "index_head_dim": 16, "index_n_heads": 16,
    },
    "glm_dsa": {
        **{key: value for key, value in TINY.items() if key != "first_k_dense_replace"},
        "model_type": "glm_moe_dsa", "num_hidden_layers": 6, "n_routed_experts": 8, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "qk_nope_head_dim": 24, "v_head_dim": 32,
        "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16, "index_topk_freq": 2,
        "index_skip_topk_offset": 3, "rms_norm_eps": 1e-6,
    },
    "longcat": {
        "model_type": "longcat_flash", "vocab_size": 256, "hidden_size": 64, "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "q_lora_rank": 32,
        "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 8,
        "v_head_dim": 16, "moe_topk": 3, "n_routed_experts": 8, "zero_expert_num": 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,  # as for glm_lite
    },
}  # fmt: skip
"""Families with latent attention, by what is special. Index heads are many: with few, all of a
token's products may be negative, and scores that tie at 0 are chosen in any order by transformers.
"""

TINY_GQA: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 512,
}  # fmt: skip
TINY_GLM: dict[str, Any] = {
    **TINY_GQA, "model_type": "glm4_moe", "num_hidden_layers": 3, "head_dim": 32,
    "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip
TINY_QWEN: dict[str, Any] = {
    **TINY_GQA, "model_type": "qwen3_moe", "head_dim": 32, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_experts": 8, "norm_topk_prob": True,
}  # fmt: skip
QWEN_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
TINY_OSS: dict[str, Any] = {
    **TINY_GQA, "model_type": "gpt_oss", "head_dim": 16, "intermediate_size": 32,
    "num_local_experts": 8, "sliding_window": 8, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
GQA_CONFIGS: dict[str, dict[str, Any]] = {
    "glm": TINY_GLM,
    "glm_groups": {
        **TINY_GLM, "n_group": 4, "topk_group": 2, "use_qk_norm": False, "n_shared_experts": 2,
        "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
    "qwen3": TINY_QWEN,
    "qwen3_dense_yarn": {
        **TINY_QWEN, "num_hidden_layers": 3, "mlp_only_layers": [1], "rope_parameters": QWEN_YARN,
        "norm_topk_prob": False, "tie_word_embeddings": True,
    },
    "olmoe": {
        **TINY_GQA, "model_type": "olmoe", "num_key_value_heads": 4, "intermediate_size": 32,
        "num_experts": 8, "eos_token_id": 2,
    },
    "mixtral": {
        **TINY_GQA, "model_type": "mixtral", "intermediate_size": 32, "num_local_experts": 8,
    },
    "gpt_oss": TINY_OSS,
    "gpt_oss_clamped": {
        **TINY_OSS, "swiglu_limit": 0.3, "swiglu_alpha": 1.3, "layer_types": [
            "full_attention", "sliding_attention", "full_attention",
        ], "num_hidden_layers": 3, "sliding_window": 5,
    },
    "minimax": {
        **TINY_GQA, "model_type": "minimax_m2", "head_dim": 32, "rotary_dim": 16,
        "intermediate_size": 32, "num_local_experts": 8, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
"""Families with grouped-query attention."""

TINY_NEXT: dict[str, Any] = {
    **TINY_GQA, "model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 32,
    "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "num_experts": 8,
}  # fmt: skip
DELTA_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": TINY_NEXT,
    "qwen3_5": {
        **{key: value for key, value in TINY_NEXT.items() if key != "intermediate_size"},
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 5, "linear_value_head_dim": 24,
        "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        },
    },
}  # fmt: skip
"""Families with gated DeltaNet. What transformers computes whole and step by step differs by up to
3e-4 of the scores' spread, so 1e-3 is asked for.
"""

MODELS = {**CONFIGS, **GQA_CONFIGS, **DELTA_CONFIGS}

LENGTH = 40
IDS = torch.randint(3, 256, (LENGTH,), generator=torch.Generator().manual_seed(2))


def random_model(kwargs: dict[str, Any], init: float) -> Any:
    """transformers' model; its family is `model_type`, DeepSeek-V3 if that is not given."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**{"model_type": "deepseek_v3", **kwargs}, initializer_range=init)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    spread = torch.Generator().manual_seed(1)
    with torch.no_grad():
        tensors = [*model.named_parameters(), *model.named_buffers()]
        for name, value in tensors:
            if "norm" in name or "bias" in name:  # constants would hide a norm that is left out
                value.add_(torch.randn(value.shape, generator=spread) * 0.1)
    return model


def randomize(layer: Any, init: float) -> None:
    """Give a layer of its own random weights of this spread; norms and biases lie around 1."""
    spread = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, value in layer.state_dict().items():
            if "norm" in name or "bias" in name:
                value.copy_(1 + 0.1 * torch.randn(value.shape, generator=spread))
            else:
                value.copy_(init * torch.randn(value.shape, generator=spread))


def save_source(model: Any, folder: Path) -> None:
    """The model under released names: one tensor per expert and projection."""
    model.save_pretrained(folder)


def use_packed_experts(model: Any, pack: Path) -> None:
    """Give the transformers model the expert weights that the pack holds."""
    reader = PackReader.open(pack)
    meta, layout = reader.meta, reader.layout
    base, fine = bytearray(meta.base_stride), bytearray(meta.fine_stride)
    slot = torch.empty(layout.slot_floats)
    split = layout.gate_up.n * layout.gate_up.k
    state = model.state_dict()
    for row in range(meta.n_rows):
        reader.read_row(Plane.BASE, row, memoryview(base))
        reader.read_row(Plane.FINE, row, memoryview(fine))
        buffers = [torch.frombuffer(part, dtype=torch.uint8) for part in (base, fine)]
        expand_fine(*buffers, layout, slot)
        layer, expert = divmod(row, meta.n_experts)
        experts = f"model.layers.{meta.moe_layers[layer]}.mlp.experts."
        gate_up, down = state[experts + "gate_up_proj"], state[experts + "down_proj"]
        # a slot holds both matrices transposed
        if experts + "down_proj_bias" in state:  # as gpt-oss has them, gate and up in turn
            gate, up = slot[:split].view(gate_up[expert].shape).chunk(2, 1)
            gate_up[expert].copy_(torch.stack([gate, up], -1).flatten(1))
            down[expert].copy_(slot[split:].view(down[expert].shape))
            continue
        gate_up[expert].copy_(slot[:split].view(gate_up[expert].T.shape).T)
        down[expert].copy_(slot[split:].view(down[expert].T.shape).T)
    reader.close()
