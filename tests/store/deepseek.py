"""A tiny random DeepSeek-V3 checkpoint in several files, cut layer by layer like a released one."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from moet_desk.engine.families import plan_for
from tests.store.tiny import expert_shapes, write_weights

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def write_deepseek(folder: Path, *, shards: int = 5, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    plan = plan_for(CONFIG, path="config.json", names=[])
    shapes = {**plan.dense, **expert_shapes(plan)}
    tensors = {}
    for name, shape in shapes.items():
        is_bias = name.endswith("bias")
        values = torch.randn(shape, generator=generator) * 0.1
        tensors[name if is_bias else f"{name}.weight"] = values if is_bias else values.bfloat16()
    folder.mkdir(parents=True)
    write_weights(folder, tensors, shards=shards, by_layer=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "README.md").write_text("not needed")
