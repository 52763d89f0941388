"""A tiny random Kimi-K2.5 checkpoint in the released layout: a text part and a vision part under
names of their own, experts in int4, a tiktoken vocabulary.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch

from moet_desk.engine.families import plan_for
from tests.store.tiny import expert_shapes, quantization_config, store, write_weights

_BYTES, _SPECIAL = 256, ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>")
VOCAB = _BYTES + 16
TEXT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "vocab_size": VOCAB,
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "hidden_act": "silu",
    "attention_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "rope_scaling": {
        "type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 8,
    },
    "max_position_embeddings": 512, "tie_word_embeddings": False,
    # what transformers 4 writes beside it
    "do_sample": False, "top_k": 50, "num_beams": 1, "torchscript": False, "pruned_heads": {},
    "pad_token_id": VOCAB - 1, "chunk_size_feed_forward": 0, "sep_token_id": None,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
    "ignore_index": -100, "media_placeholder_token_id": 163605, "dtype": "bfloat16",
    "use_unified_vision_chunk": True, "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "tie_word_embeddings": False, "vision_config": {"vt_num_hidden_layers": 27},
    "text_config": {**TEXT, "quantization_config": quantization_config("int4-32")},
}  # fmt: skip
_VISION = {
    "vision_tower.patch_embed.proj.weight": (8, 4), "vision_tower.encoder.norm0.bias": (4,),
    "mm_projector.proj.0.weight": (4, 4),
}  # fmt: skip
_TEMPLATE = (
    "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}{# <|tool_call_begin|> #}"
)


def write_kimi(folder: Path, *, shards: int = 3) -> None:
    """Experts in int4 with groups of 32, all else in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    plan = plan_for(CONFIG, path="config.json", names=[])
    tensors: dict[str, torch.Tensor] = {}
    for name, size in plan.dense.items():
        values = (torch.randn(size, generator=generator) * 0.1).bfloat16()
        tensors[name if name.endswith("bias") else f"{name}.weight"] = values
    for name, shape in expert_shapes(plan).items():
        tensors |= store(name, shape, "int4-32", generator)
    tensors = {f"language_model.{name}": value for name, value in tensors.items()}
    tensors |= {name: torch.ones(size) for name, size in _VISION.items()}
    folder.mkdir(parents=True)
    write_weights(folder, tensors, shards=shards, by_layer=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    lines = (base64.b64encode(bytes((byte,))) + b" %d\n" % byte for byte in range(_BYTES))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    added = {str(_BYTES + i): {"content": text, "special": True} for i, text in enumerate(_SPECIAL)}
    settings = {
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
