"""Tiny random DeepSeek-V4 models of transformers under released names, and their packs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moet_desk.kernels.reference import expand_fine
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader

WINDOW, SPARSE, HEAVY = 0, 4, 16
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 48, "qk_rope_head_dim": 16,
    "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "n_routed_experts": 8,
    "n_shared_experts": 1, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
    "index_n_heads": 16, "index_head_dim": 32, "index_topk": 4, "sliding_window": 8,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0,
    "num_hash_layers": 3, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 32, "beta_fast": 32,
        "beta_slow": 1,
    },
    "compress_ratios": [WINDOW, WINDOW, SPARSE, HEAVY, SPARSE, WINDOW], "expert_dtype": "fp4",
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
"""As released, sizes scaled down: all kinds of layers, with a table of experts and without."""

ON_CARD: dict[str, Any] = {
    **CONFIG, "head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64,
}  # fmt: skip
"""The same with heads that a card's kernels take."""

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def random_v4(config: dict[str, Any], init: float) -> Any:
    """transformers' model of a released config, its constants spread and its table random."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    same = set(CONFIG) - {
        "model_type", "qk_rope_head_dim", "compress_ratios", "num_hash_layers", "rope_scaling",
        "topk_method", "expert_dtype",
    }  # fmt: skip
    n_layers, scaling = config["num_hidden_layers"], dict(config["rope_scaling"])
    n_hashed = config["num_hash_layers"]
    ratios = config["compress_ratios"][:n_layers]
    names = {WINDOW: "sliding_attention", SPARSE: _SPARSE}
    kinds = [names.get(ratio, _HEAVY) for ratio in ratios]
    torch.manual_seed(0)
    made = DeepseekV4Config(
        **{key: config[key] for key in same},
        initializer_range=init,
        partial_rotary_factor=config["qk_rope_head_dim"] / config["head_dim"],
        layer_types=kinds,
        compress_rates={_SPARSE: SPARSE, _HEAVY: max(*ratios, SPARSE + 1)},
        mlp_layer_types=["hash_moe"] * n_hashed + ["moe"] * (n_layers - n_hashed),
        rope_parameters={"rope_type": scaling.pop("type"), **scaling},
    )
    model = DeepseekV4ForCausalLM(made).eval().float()
    spread = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):
                scores = torch.rand(len(value), config["n_routed_experts"], generator=spread)
                value.copy_(scores.topk(value.shape[1]).indices)
            elif (value.dim() < 2 or "hc_" in name or "ape" in name) and "inv_freq" not in name:
                value.add_(torch.randn(value.shape, generator=spread) * 0.1)
    return model


def released_name(saved: str) -> str:
    """What a tensor that transformers saved is called in released files."""
    if saved == "lm_head.weight":
        return "head.weight"
    short = saved.removeprefix("model.").replace("embed_tokens.", "embed.")
    return short.replace("hc_head.hc_", "hc_head_").replace("attn.norm.", "attn.kv_norm.")


def save_v4(
    model: Any, config: dict[str, Any], folder: Path, more: dict[str, Tensor] | None = None
) -> None:
    """Write the model, and `more` tensors, as a released source in float32."""
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    state = {released_name(name): value for name, value in load_file(file).items()}
    save_file(state | (more or {}), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def with_values(config: dict[str, Any], values: Callable[[str], Tensor], folder: Path) -> Any:
    """transformers' model of a released config with tensors by their released names."""
    model = random_v4(config, 0.02)
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    state = load_file(file)
    made = {name: values(released_name(name)).to(value.dtype) for name, value in state.items()}
    assert all(made[name].shape == value.shape for name, value in state.items())
    save_file(made, file, metadata={"format": "pt"})
    return type(model).from_pretrained(folder).eval().float()


def use_packed_v4(model: Any, pack: Path) -> None:
    """Give the transformers model the expert weights that the pack holds."""
    reader = PackReader.open(pack)
    meta, layout = reader.meta, reader.layout
    base, fine = bytearray(meta.base_stride), bytearray(meta.fine_stride)
    slot = torch.empty(layout.slot_floats)
    split = layout.gate_up.n * layout.gate_up.k
    for row in range(meta.n_rows):
        reader.read_row(Plane.BASE, row, memoryview(base))
        reader.read_row(Plane.FINE, row, memoryview(fine))
        expand_fine(*(torch.frombuffer(x, dtype=torch.uint8) for x in (base, fine)), layout, slot)
        layer, expert = divmod(row, meta.n_experts)
        if layer >= len(model.model.layers):
            break  # the head's
        experts = model.model.layers[layer].mlp.experts
        gate_up, down = experts.gate_up_proj.data[expert], experts.down_proj.data[expert]
        gate_up.copy_(slot[:split].view(gate_up.T.shape).T)
        down.copy_(slot[split:].view(down.T.shape).T)
    reader.close()
