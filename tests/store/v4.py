"""A tiny random DeepSeek-V4 checkpoint in the released layout, its MTP head and script with it.

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

HIDDEN, LAYERS, EXPERTS, INTER, HEADS, DIM, ROPE = 160, 3, 4, 64, 4, 64, 16
Q_RANK, GROUPS, O_RANK, STREAMS, VOCAB = 96, 2, 80, 4, 8192
INDEX_HEADS, INDEX_DIM, TOP_K, WINDOW, RATIOS = 16, 32, 4, 8, (0, 4, 128)
N_HASHED = 1

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1,
    "compress_ratios": [*RATIOS, 0], "compress_rope_theta": 160000, "expert_dtype": "fp4",
    "hc_eps": 1e-6, "hc_mult": STREAMS, "hc_sinkhorn_iters": 20, "head_dim": DIM,
    "hidden_act": "silu", "hidden_size": HIDDEN, "index_head_dim": INDEX_DIM,
    "index_n_heads": INDEX_HEADS, "index_topk": TOP_K, "initializer_range": 0.02,
    "max_position_embeddings": 1024, "moe_intermediate_size": INTER, "n_routed_experts": EXPERTS,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": HEADS,
    "num_experts_per_tok": 2, "num_hash_layers": N_HASHED, "num_hidden_layers": LAYERS,
    "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": GROUPS,
    "o_lora_rank": O_RANK, "q_lora_rank": Q_RANK, "qk_rope_head_dim": ROPE,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 64,
        "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
    "sliding_window": WINDOW, "swiglu_limit": 10.0, "tie_word_embeddings": False,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.57.1",
    "use_cache": True, "vocab_size": VOCAB,
}  # fmt: skip
SCRIPT = '''"""How the model's prompts are written."""
bos_token = "<s>"
REASONING_EFFORT_MAX = "Think for long.\\n\\n"
TOOLS_TEMPLATE = """## Tools

{tool_schemas}
Call them as {dsml_token} says.
"""
'''


class _Checkpoint:
    """Tensors under their full names, made one after the other."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._source = torch.Generator().manual_seed(seed)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._source)

    def bf16(self, name: str, *shape: int, around: float = 0.0, spread: float = 0.1) -> None:
        self.tensors[name] = (around + spread * self._randn(*shape)).bfloat16()

    def f32(self, name: str, *shape: int) -> None:
        self.tensors[name] = 0.1 * self._randn(*shape)

    def fp8(self, name: str, rows: int, columns: int) -> None:
        """Codes with a power of two per block of 128 x 128."""
        blocks = (-(-rows // 128), -(-columns // 128))
        powers = torch.randint(116, 119, blocks, generator=self._source, dtype=torch.uint8)
        codes = (40 * self._randn(rows, columns)).to(torch.float8_e4m3fn)
        scale = powers.view(torch.float8_e8m0fnu)
        self.tensors |= {f"{name}.weight": codes, f"{name}.scale": scale}

    def fp4(self, name: str, rows: int, columns: int) -> None:
        """Two codes in a byte with a power of two per 32 of them."""
        shape = (rows, columns // 2)
        codes = torch.randint(-128, 128, shape, generator=self._source, dtype=torch.int8)
        shape = (rows, columns // 32)
        powers = torch.randint(121, 124, shape, generator=self._source, dtype=torch.uint8)
        scale = powers.view(torch.float8_e8m0fnu)
        self.tensors |= {f"{name}.weight": codes, f"{name}.scale": scale}

    def compressor(self, name: str, ratio: int, dim: int, *, overlap: bool) -> None:
        width = 2 * dim if overlap else dim
        self.bf16(f"{name}.wkv.weight", width, HIDDEN)
        self.bf16(f"{name}.wgate.weight", width, HIDDEN)
        self.f32(f"{name}.ape", ratio, width)
        self.bf16(f"{name}.norm.weight", dim, around=1.0)

    def attention(self, name: str, ratio: int) -> None:
        self.fp8(f"{name}.wq_a", Q_RANK, HIDDEN)
        self.bf16(f"{name}.q_norm.weight", Q_RANK, around=1.0)
        self.fp8(f"{name}.wq_b", HEADS * DIM, Q_RANK)
        self.fp8(f"{name}.wkv", DIM, HIDDEN)
        self.bf16(f"{name}.kv_norm.weight", DIM, around=1.0)
        self.f32(f"{name}.attn_sink", HEADS)
        self.fp8(f"{name}.wo_a", GROUPS * O_RANK, HEADS // GROUPS * DIM)
        self.fp8(f"{name}.wo_b", HIDDEN, GROUPS * O_RANK)
        if ratio:
            self.compressor(f"{name}.compressor", ratio, DIM, overlap=ratio == 4)
        if ratio == 4:
            self.fp8(f"{name}.indexer.wq_b", INDEX_HEADS * INDEX_DIM, Q_RANK)
            self.bf16(f"{name}.indexer.weights_proj.weight", INDEX_HEADS, HIDDEN)
            self.compressor(f"{name}.indexer.compressor", ratio, INDEX_DIM, overlap=True)

    def layer(self, name: str, ratio: int, *, hashed: bool) -> None:
        n = STREAMS
        for part in ("attn", "ffn"):
            self.bf16(f"{name}.{part}_norm.weight", HIDDEN, around=1.0)
            self.f32(f"{name}.hc_{part}_fn", 2 * n + n * n, n * HIDDEN)
            self.f32(f"{name}.hc_{part}_base", 2 * n + n * n)
            self.f32(f"{name}.hc_{part}_scale", 3)
        self.attention(f"{name}.attn", ratio)
        self.bf16(f"{name}.ffn.gate.weight", EXPERTS, HIDDEN)
        if hashed:
            scores = torch.rand(VOCAB, EXPERTS, generator=self._source)
            self.tensors[f"{name}.ffn.gate.tid2eid"] = scores.topk(2).indices
        else:
            self.f32(f"{name}.ffn.gate.bias", EXPERTS)
        for part, shape in (
            ("w1", (INTER, HIDDEN)),
            ("w3", (INTER, HIDDEN)),
            ("w2", (HIDDEN, INTER)),
        ):
            self.fp8(f"{name}.ffn.shared_experts.{part}", *shape)
            for expert in range(EXPERTS):
                self.fp4(f"{name}.ffn.experts.{expert}.{part}", *shape)

    def end(self, name: str) -> None:
        self.f32(f"{name}hc_head_fn", STREAMS, STREAMS * HIDDEN)
        self.f32(f"{name}hc_head_base", STREAMS)
        self.f32(f"{name}hc_head_scale", 1)


def tensors_of(seed: int = 0) -> dict[str, Tensor]:
    """All tensors of the checkpoint."""
    made = _Checkpoint(seed)
    made.bf16("embed.weight", VOCAB, HIDDEN, spread=1.0)
    made.bf16("norm.weight", HIDDEN, around=1.0)
    made.bf16("head.weight", VOCAB, HIDDEN)
    made.end("")
    for index, ratio in enumerate(RATIOS):
        made.layer(f"layers.{index}", ratio, hashed=index < N_HASHED)
    for norm in ("enorm", "hnorm", "norm"):
        made.bf16(f"mtp.0.{norm}.weight", HIDDEN, around=1.0)
    made.fp8("mtp.0.e_proj", HIDDEN, HIDDEN)
    made.fp8("mtp.0.h_proj", HIDDEN, HIDDEN)
    made.end("mtp.0.")
    made.layer("mtp.0", 0, hashed=False)
    return made.tensors


def write_v4(folder: Path, *, shards: int = 5, seed: int = 0) -> None:
    """Write the checkpoint without a tokenizer; its prompts are in a script, as released."""
    folder.mkdir(parents=True)
    write_weights(folder, tensors_of(seed), shards=shards, by_layer=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "encoding").mkdir()
    (folder / "encoding" / "encoding_dsv4.py").write_text(SCRIPT)
