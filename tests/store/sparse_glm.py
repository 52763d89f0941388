"""A tiny random GLM-5.2 in the layouts that are published: FP8 of its makers, NVFP4 of modelopt.

Names, types and which tensors are quantised are as released, written down here and not taken from
the family's plan; sizes are scaled down so that every grid of scales has edges.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.store.tiny import write_weights

HIDDEN, LAYERS, EXPERTS, INTER, DENSE = 160, 3, 4, 32, 192
HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 4, 48, 32, 24, 16, 32
INDEX_HEADS, INDEX_DIM, TOP_K, VOCAB = 16, 32, 8, 8192
OWN = (0, 2)  # layers with an indexer

CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
    "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "ep_size": 1,
    "eos_token_id": [1], "pad_token_id": 1, "first_k_dense_replace": 1, "head_dim": ROPE,
    "hidden_act": "silu", "hidden_size": HIDDEN, "index_head_dim": INDEX_DIM,
    "index_n_heads": INDEX_HEADS, "index_topk": TOP_K, "index_topk_freq": 2,
    "index_skip_topk_offset": 1, "index_share_for_mtp_iteration": True,
    "indexer_rope_interleave": True, "indexer_types": ["full", "shared", "full"],
    "initializer_range": 0.02, "intermediate_size": DENSE, "kv_lora_rank": KV_RANK,
    "max_position_embeddings": 2048, "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": INTER, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": HEADS, "num_experts_per_tok": 2, "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
    "q_lora_rank": Q_RANK, "qk_head_dim": NOPE + ROPE, "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE, "rms_norm_eps": 1e-5, "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "transformers_version": "5.0.2.dev0",
    "use_cache": True, "v_head_dim": VALUE, "vocab_size": VOCAB,
}  # fmt: skip
FP8 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
}  # fmt: skip
NVFP4 = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": None,
    "ignore": ["lm_head", "model.layers.*.self_attn*", "model.layers.3*"],
}  # fmt: skip
HF_QUANT = {
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.*.self_attn*", "model.layers.3*"],
    },
}  # fmt: skip

_ATTENTION = {
    "q_a_proj": (Q_RANK, HIDDEN), "q_b_proj": (HEADS * (NOPE + ROPE), Q_RANK),
    "kv_a_proj_with_mqa": (KV_RANK + ROPE, HIDDEN),
    "kv_b_proj": (HEADS * (NOPE + VALUE), KV_RANK), "o_proj": (HIDDEN, HEADS * VALUE),
}  # fmt: skip
_INDEXER = {"wq_b": (INDEX_HEADS * INDEX_DIM, Q_RANK), "wk": (INDEX_DIM, HIDDEN)}


class _Checkpoint:
    """Tensors under their full names, made one after the other."""

    def __init__(self, kind: str, seed: int) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._kind = kind
        self._source = torch.Generator().manual_seed(seed)

    def plain(self, name: str, *shape: int, around: float = 0.0, spread: float = 0.1) -> None:
        values = around + spread * torch.randn(shape, generator=self._source)
        self.tensors[name] = values if name.endswith("correction_bias") else values.bfloat16()

    def matrix(self, name: str, shape: tuple[int, int], *, kind: str) -> None:
        """A quantised product of the given kind; BF16 for any other."""
        if kind == "fp8":
            self._fp8(name, shape)
        elif kind == "nvfp4":
            self._nvfp4(name, shape)
        else:
            self.plain(f"{name}.weight", *shape)

    def _fp8(self, name: str, shape: tuple[int, int]) -> None:
        codes = (40 * torch.randn(shape, generator=self._source)).to(torch.float8_e4m3fn)
        blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
        scales = 0.002 + 0.001 * torch.rand(blocks, generator=self._source)
        self.tensors |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}

    def _nvfp4(self, name: str, shape: tuple[int, int]) -> None:
        rows, columns = shape
        codes = torch.randint(
            0, 256, (rows, columns // 2), generator=self._source, dtype=torch.uint8
        )
        scales = 1 + 8 * torch.rand(rows, columns // 16, generator=self._source)
        whole = 0.004 + 0.002 * float(torch.rand(1, generator=self._source))  # gate's is not up's
        self.tensors |= {
            f"{name}.weight": codes, f"{name}.weight_scale": scales.to(torch.float8_e4m3fn),
            f"{name}.weight_scale_2": torch.tensor(whole), f"{name}.input_scale": torch.tensor(3.0),
        }  # fmt: skip

    def mlp(self, name: str, inter: int, *, kind: str) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            shape = (HIDDEN, inter) if part == "down_proj" else (inter, HIDDEN)
            self.matrix(f"{name}.{part}", shape, kind=kind)

    def layer(self, index: int, *, sparse: bool, has_indexer: bool, kind: str) -> None:
        """A decoder layer; `kind` is that of its routed experts."""
        name = f"model.layers.{index}"
        own = "fp8" if self._kind == "fp8" else "bf16"  # modelopt quantises routed experts only
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self.plain(f"{name}.{norm}.weight", HIDDEN, around=1.0)
        attention = f"{name}.self_attn"
        for part, shape in _ATTENTION.items():
            self.matrix(f"{attention}.{part}", shape, kind=own)
        self.plain(f"{attention}.q_a_layernorm.weight", Q_RANK, around=1.0)
        self.plain(f"{attention}.kv_a_layernorm.weight", KV_RANK, around=1.0)
        if has_indexer:
            for part, shape in _INDEXER.items():
                self.matrix(f"{attention}.indexer.{part}", shape, kind=own)
            self.plain(f"{attention}.indexer.k_norm.weight", INDEX_DIM, around=1.0)
            self.plain(f"{attention}.indexer.k_norm.bias", INDEX_DIM)
            self.plain(f"{attention}.indexer.weights_proj.weight", INDEX_HEADS, HIDDEN)
        if not sparse:
            self.mlp(f"{name}.mlp", DENSE, kind=own)
            return
        self.plain(f"{name}.mlp.gate.weight", EXPERTS, HIDDEN)
        self.plain(f"{name}.mlp.gate.e_score_correction_bias", EXPERTS)
        self.mlp(f"{name}.mlp.shared_experts", INTER, kind=own)
        for expert in range(EXPERTS):
            self.mlp(f"{name}.mlp.experts.{expert}", INTER, kind=kind)


def tensors_of(kind: str, seed: int = 0) -> dict[str, Tensor]:
    """All tensors of the checkpoint; `kind` is "fp8" or "nvfp4"."""
    made = _Checkpoint(kind, seed)
    made.plain("model.embed_tokens.weight", VOCAB, HIDDEN, spread=1.0)
    made.plain("model.norm.weight", HIDDEN, around=1.0)
    made.plain("lm_head.weight", VOCAB, HIDDEN)
    for index in range(LAYERS):
        made.layer(index, sparse=index > 0, has_indexer=index in OWN, kind=kind)
    head = f"model.layers.{LAYERS}"
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        made.plain(f"{head}.{norm}.weight", HIDDEN, around=1.0)
    made.plain(f"{head}.eh_proj.weight", HIDDEN, 2 * HIDDEN)
    # modelopt leaves the head's experts as they were
    made.layer(LAYERS, sparse=True, has_indexer=True, kind="fp8" if kind == "fp8" else "bf16")
    # released files hold these twice
    for copy, of in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        made.tensors[f"{head}.{copy}.weight"] = made.tensors[f"{of}.weight"].clone()
    return made.tensors


def write_glm(folder: Path, kind: str, *, shards: int = 5, seed: int = 0) -> None:
    """Write the checkpoint, without a tokenizer."""
    folder.mkdir(parents=True)
    write_weights(folder, tensors_of(kind, seed), shards=shards, by_layer=True)
    config = {**CONFIG, "quantization_config": FP8 if kind == "fp8" else NVFP4}
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "nvfp4":
        (folder / "hf_quant_config.json").write_text(json.dumps(HF_QUANT))
