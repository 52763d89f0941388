"""Tiny random models as GGUF, as converters write them: the same rows and logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moet_desk.store.model_source import ModelSource
from moet_desk.store.pack_format import BASE_FILE, FINE_FILE, Plane
from moet_desk.store.quant_formats import decode
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.tiny_models import DELTA_CONFIGS, GQA_CONFIGS, random_model, save_source
from tests.store.gguf_files import delta_converted, write_fields

ARCH = {
    "glm4_moe": "glm4moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "mixtral": "llama",
    "minimax_m2": "minimax-m2", "qwen3_next": "qwen3next", "qwen3_5_moe_text": "qwen35moe",
}  # fmt: skip
NAMES = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "num_experts_per_tok": "expert_used_count",
    "n_routed_experts": "expert_count", "num_experts": "expert_count",
    "num_local_experts": "expert_count", "head_dim": "attention.key_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count", "rotary_dim": "rope.dimension_count",
    "routed_scaling_factor": "expert_weights_scale", "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count", "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size", "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip
"""config.json -> fields of an architecture, as converters write them."""


def fields_of(config: dict[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in config.items() if value is not None and key in NAMES}
    fields = {NAMES[key]: value for key, value in known.items()}
    rope = config.get("rope_parameters") or config
    fields["rope.freq_base"] = float(rope["rope_theta"])
    if config["model_type"] == "glm4_moe":
        share = rope.get("partial_rotary_factor", 0.5)
        fields["rope.dimension_count"] = int(config["head_dim"] * share)
        fields |= {"expert_gating_func": 2, "expert_weights_norm": config["norm_topk_prob"]}
    if config["model_type"] == "minimax_m2":
        fields["expert_feed_forward_length"] = config["intermediate_size"]
    if "linear_value_head_dim" in config:
        fields["ssm.inner_size"] = config["linear_value_head_dim"] * fields["ssm.time_step_rank"]
        fields["rope.dimension_count"] = int(config["head_dim"] * rope["partial_rotary_factor"])
        fields["full_attention_interval"] = 4
    return fields


CASES = [
    name
    for name, config in GQA_CONFIGS.items()
    if name != "qwen3_dense_yarn" and config["model_type"] in ARCH
]


@pytest.mark.parametrize("case", CASES)
def test_pack__family_as_gguf__has_the_rows_and_logits_of_its_folder(
    case: str, tmp_path: Path
) -> None:
    save_source(random_model(GQA_CONFIGS[case], 0.25), tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    tensors = {
        name.removesuffix(".weight"): values.numpy()
        for name, values in load_file(tmp_path / "folder" / "model.safetensors").items()
    }
    arch = ARCH[config["model_type"]]
    write_fields(tmp_path / "m.gguf", arch, fields_of(config), tensors)
    packs = [
        pack_source(tmp_path / source, tmp_path / "packs" / source)
        for source in ("folder", "m.gguf")
    ]
    for name in (BASE_FILE, FINE_FILE):
        assert (packs[0] / name).read_bytes() == (packs[1] / name).read_bytes()
    ids = torch.randint(3, 256, (24,), generator=torch.Generator().manual_seed(2)).tolist()
    logits = []
    for pack in packs:
        with loaded(pack) as core:
            logits.append(logits_of(core, ids, plane=Plane.FINE))
    assert torch.equal(*logits)


# three heads of values for each of two of keys: an order and its reverse differ
NEXT = {**DELTA_CONFIGS["qwen3_next"], "linear_num_value_heads": 6}
QWEN35 = {
    **{key: value for key, value in DELTA_CONFIGS["qwen3_5"].items() if key != "layer_types"},
    "num_hidden_layers": 4, "linear_num_value_heads": 6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("tiny", "cut"), [(NEXT, True), (NEXT, False), (QWEN35, True)], ids=["next", "older", "3.5"]
)
def test_pack__gated_deltanet_as_gguf__what_the_converter_did_is_undone(
    tiny: dict[str, Any], cut: bool, tmp_path: Path
) -> None:
    save_source(random_model(tiny, 0.25), tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    tensors = {
        name.removesuffix(".weight"): values.numpy()
        for name, values in load_file(tmp_path / "folder" / "model.safetensors").items()
    }
    arch = ARCH[config["model_type"]]
    stored = delta_converted(arch, config, tensors, cut=cut)
    write_fields(tmp_path / "m.gguf", arch, fields_of(config), stored)
    index = ModelSource.open(tmp_path / "m.gguf").index
    assert set(index.names()) == set(tensors)
    for name, values in tensors.items():
        got = decode(index, name)
        assert got.shape == values.shape, name
        assert np.allclose(got.numpy(), values, rtol=2e-7, atol=2e-7), name
    packs = [
        pack_source(tmp_path / source, tmp_path / "packs" / source)
        for source in ("folder", "m.gguf")
    ]
    for name in (BASE_FILE, FINE_FILE):
        assert (packs[0] / name).read_bytes() == (packs[1] / name).read_bytes()
    ids = torch.randint(3, 256, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    logits = []
    for pack in packs:
        with loaded(pack, activations="float", kv_format="f32") as core:
            logits.append(logits_of(core, ids, plane=Plane.FINE))
    assert (logits[0] - logits[1]).abs().max() < 1e-4 * logits[0].std()
