"""Tiny random checkpoints of LongCat-Flash and Lite in the released layout: names, dtypes, index,
MTP head.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from moet_desk.engine.families import plan_for
from tests.store.tiny import expert_shapes, write_weights

CONFIG: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    "vocab_size": 8192,
    "hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 2,
    "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "zero_expert_num": 4,
    "zero_expert_type": "identity",
    "moe_topk": 3,
    "routed_scaling_factor": 6.0,
    "router_bias": False,
    "attention_method": "MLA",
    "attention_bias": False,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000000.0,
    "max_position_embeddings": 512,
}
LITE: dict[str, Any] = {
    **CONFIG,
    "architectures": ["LongcatFlashNgramForCausalLM"],
    "model_type": "longcat_flash_ngram",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "eos_token_id": 2,
    "rope_theta": 5000000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 10, "beta_fast": 32, "beta_slow": 1, "mscale": 1,
        "mscale_all_dim": 1, "original_max_position_embeddings": 64,
    },
    "ngram_vocab_size_ratio": 3,
    "emb_neighbor_num": 5,
    "emb_split_num": 2,
}  # fmt: skip
_HEAD = "model.mtp.layers.0."
_TEMPLATE = (
    "{% for m in messages %}{{ '[Round 0] USER:' if m.role == 'user' else ' ASSISTANT:' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
    "{# <longcat_tool_call> #}"
)


def write_longcat(
    folder: Path, *, tokenizer: Path, shards: int = 3, config: dict[str, Any] = CONFIG
) -> None:
    """Products, norms and tables in bfloat16, the router and its bias in float32."""
    generator = torch.Generator().manual_seed(0)
    plan = plan_for(config, path="config.json", names=[])
    shapes = {**plan.dense, **_head_shapes(), **expert_shapes(plan)}
    tensors = {}
    for name, size in shapes.items():
        values = torch.randn(size, generator=generator) * 0.1
        stored = values if ".router." in name else values.bfloat16()
        tensors[name if name.endswith("bias") else f"{name}.weight"] = stored
    folder.mkdir(parents=True)
    write_weights(folder, tensors, shards=shards, by_layer=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    shutil.copy(tokenizer, folder / "tokenizer.json")


def _head_shapes() -> dict[str, tuple[int, ...]]:
    """The dense head's tensors, as they are called in the files."""
    hidden, inter = CONFIG["hidden_size"], CONFIG["ffn_hidden_size"]
    heads, latent = CONFIG["num_attention_heads"], CONFIG["kv_lora_rank"]
    nope, rope = CONFIG["qk_nope_head_dim"], CONFIG["qk_rope_head_dim"]
    rank, value = CONFIG["q_lora_rank"], CONFIG["v_head_dim"]
    return {
        "model.mtp.embed_tokens": (CONFIG["vocab_size"], hidden),
        "model.mtp.norm": (hidden,),
        _HEAD + "enorm.m": (hidden,),
        _HEAD + "hnorm.m": (hidden,),
        _HEAD + "eh_proj": (hidden, 2 * hidden),
        _HEAD + "input_layernorm": (hidden,),
        _HEAD + "post_attention_layernorm": (hidden,),
        _HEAD + "self_attn.q_a_proj": (rank, hidden),
        _HEAD + "self_attn.q_a_layernorm": (rank,),
        _HEAD + "self_attn.q_b_proj": (heads * (nope + rope), rank),
        _HEAD + "self_attn.kv_a_proj_with_mqa": (latent + rope, hidden),
        _HEAD + "self_attn.kv_a_layernorm": (latent,),
        _HEAD + "self_attn.kv_b_proj": (heads * (nope + value), latent),
        _HEAD + "self_attn.o_proj": (hidden, heads * value),
        _HEAD + "transformer_layer.mlp.gate_proj": (inter, hidden),
        _HEAD + "transformer_layer.mlp.up_proj": (inter, hidden),
        _HEAD + "transformer_layer.mlp.down_proj": (hidden, inter),
    }
