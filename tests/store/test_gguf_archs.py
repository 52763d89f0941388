"""Architectures: config.json from the fields that converters write, names against the package's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from moet_desk.engine.families import plan_for
from moet_desk.errors import MoetError
from moet_desk.store.gguf.archs import ARCHS, arch_of, config_of
from moet_desk.store.gguf.fields import Fields
from moet_desk.store.model_source import ModelSource
from moet_desk.store.quant_formats import decode
from tests.store.gguf_files import write_fields

A = gguf.MODEL_ARCH
ARCH_OF = {gguf.MODEL_ARCH_NAMES[arch]: arch for arch in A}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
MLP = ("gate_proj", "up_proj", "down_proj")
MIXTRALS = ("llama", "minimax-m2")
"""Those whose experts have Mixtral's names."""
DELTA = {
    "qwen3next": ("in_proj_qkvz", "in_proj_ba"),
    "qwen35moe": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}
"""Those with gated DeltaNet, and what its input is multiplied by."""


def f32(value: float) -> float:
    return float(np.float32(value))


AIR = {
    "block_count": 47, "context_length": 131072, "embedding_length": 4096,
    "feed_forward_length": 10944, "attention.head_count": 96, "attention.head_count_kv": 8,
    "rope.freq_base": f32(1e6), "attention.layer_norm_rms_epsilon": f32(1e-5),
    "expert_used_count": 8, "attention.key_length": 128, "attention.value_length": 128,
    "rope.dimension_count": 64, "expert_count": 128, "expert_feed_forward_length": 1408,
    "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": 2,
    "expert_weights_scale": 1.0, "expert_weights_norm": True, "nextn_predict_layers": 1,
}  # fmt: skip
QWEN = {
    "block_count": 48, "context_length": 40960, "embedding_length": 2048,
    "feed_forward_length": 6144, "attention.head_count": 32, "attention.head_count_kv": 4,
    "rope.freq_base": f32(1e6), "attention.layer_norm_rms_epsilon": f32(1e-6),
    "expert_used_count": 8, "attention.key_length": 128, "attention.value_length": 128,
    "expert_count": 128, "expert_feed_forward_length": 768,
}  # fmt: skip
OLMOE = {
    "block_count": 16, "context_length": 4096, "embedding_length": 2048,
    "feed_forward_length": 1024, "attention.head_count": 16, "attention.head_count_kv": 16,
    "rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": f32(1e-5),
    "expert_used_count": 8, "expert_count": 64,
}  # fmt: skip
MIXTRAL = {
    "block_count": 32, "context_length": 32768, "embedding_length": 4096,
    "feed_forward_length": 14336, "attention.head_count": 32, "attention.head_count_kv": 8,
    "rope.freq_base": f32(1e6), "attention.layer_norm_rms_epsilon": f32(1e-5),
    "expert_used_count": 2, "expert_count": 8, "rope.dimension_count": 128, "vocab_size": 32000,
}  # fmt: skip
MINIMAX = {
    "block_count": 62, "context_length": 196608, "embedding_length": 3072,
    "feed_forward_length": 1536, "attention.head_count": 48, "attention.head_count_kv": 8,
    "rope.freq_base": 5e6, "attention.layer_norm_rms_epsilon": f32(1e-6), "expert_used_count": 8,
    "attention.key_length": 128, "attention.value_length": 128, "expert_count": 256,
    "expert_gating_func": 2, "expert_feed_forward_length": 1536, "rope.dimension_count": 64,
}  # fmt: skip
OSS = {
    "block_count": 24, "context_length": 131072, "embedding_length": 2880,
    "feed_forward_length": 2880, "attention.head_count": 64, "attention.head_count_kv": 8,
    "rope.freq_base": 150000.0, "attention.layer_norm_rms_epsilon": f32(1e-5),
    "expert_used_count": 4, "attention.key_length": 64, "attention.value_length": 64,
    "expert_count": 32, "attention.sliding_window": 128, "expert_feed_forward_length": 2880,
    "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}  # fmt: skip
NEXT = {
    "block_count": 48, "context_length": 262144, "embedding_length": 2048,
    "feed_forward_length": 5120, "attention.head_count": 16, "attention.head_count_kv": 2,
    "rope.freq_base": 1e7, "attention.layer_norm_rms_epsilon": f32(1e-6), "expert_used_count": 10,
    "attention.key_length": 256, "attention.value_length": 256, "expert_count": 512,
    "expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 512,
    "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16,
    "ssm.time_step_rank": 32, "ssm.inner_size": 4096, "rope.dimension_count": 64,
}  # fmt: skip
QWEN36 = {
    **NEXT, "block_count": 41, "nextn_predict_layers": 1, "expert_count": 256,
    "expert_used_count": 8, "full_attention_interval": 4,
    "rope.dimension_sections": [11, 11, 10, 0],
}  # fmt: skip
V3 = {
    "block_count": 61, "context_length": 163840, "embedding_length": 7168,
    "feed_forward_length": 18432, "attention.head_count": 128, "attention.head_count_kv": 1,
    "rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": f32(1e-6),
    "expert_used_count": 8, "expert_group_count": 8, "expert_group_used_count": 4,
    "expert_gating_func": 2, "leading_dense_block_count": 3, "vocab_size": 129280,
    "attention.q_lora_rank": 1536, "attention.kv_lora_rank": 512, "attention.key_length": 576,
    "attention.value_length": 512, "attention.key_length_mla": 192,
    "attention.value_length_mla": 128, "expert_feed_forward_length": 2048, "expert_count": 256,
    "expert_shared_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True,
    "rope.dimension_count": 64, "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 4096,
    "rope.scaling.yarn_log_multiplier": f32(0.1),
}  # fmt: skip

REAL: dict[str, tuple[str, dict[str, Any], set[str], dict[str, Any]]] = {
    "GLM-4.5-Air": (
        "glm4moe", AIR, {"blk.0.attn_q.bias"},
        {
            "model_type": "glm4_moe", "num_hidden_layers": 46, "num_nextn_predict_layers": 1,
            "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
            "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": False,
            "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "max_position_embeddings": 131072,
        },
    ),
    "GLM-4.6": (
        "glm4moe", AIR | {"expert_weights_scale": 2.5},
        {"blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"},
        {"use_qk_norm": True, "routed_scaling_factor": 2.5},
    ),
    "Qwen3-30B-A3B": (
        "qwen3moe", QWEN, set(),
        {
            "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
            "head_dim": 128, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        },
    ),
    "OLMoE-1B-7B": (
        "olmoe", OLMOE, set(),
        {
            "model_type": "olmoe", "num_experts": 64, "intermediate_size": 1024,
            "norm_topk_prob": False, "num_key_value_heads": 16, "head_dim": 128,
        },
    ),
    "Mixtral-8x7B": (
        "llama", MIXTRAL, set(),
        {
            "model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 14336,
            "num_experts_per_tok": 2, "head_dim": 128, "num_key_value_heads": 8,
        },
    ),
    "MiniMax-M2": (
        "minimax-m2", MINIMAX, set(),
        {
            "model_type": "minimax_m2", "rotary_dim": 64, "head_dim": 128, "rope_theta": 5e6,
            "intermediate_size": 1536, "num_local_experts": 256, "num_key_value_heads": 8,
            "scoring_func": "sigmoid",
        },
    ),
    "gpt-oss-20b": (
        "gpt-oss", OSS, set(),
        {
            "model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4,
            "sliding_window": 128, "intermediate_size": 2880, "head_dim": 64,
            "num_key_value_heads": 8, "attention_bias": True, "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        },
    ),
    "Qwen3-Next-80B": (
        "qwen3next", NEXT, set(),
        {
            "model_type": "qwen3_next", "num_hidden_layers": 48, "num_experts": 512,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10, "norm_topk_prob": True, "head_dim": 256,
            "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rope_theta": 1e7,
            "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        },
    ),
    "Qwen3.6-35B-A3B": (
        "qwen35moe", QWEN36, set(),
        {
            "model_type": "qwen3_5_moe", "num_hidden_layers": 40, "num_experts": 256,
            "num_experts_per_tok": 8, "partial_rotary_factor": 0.25, "norm_topk_prob": True,
        },
    ),
    "DeepSeek-V3": (
        "deepseek2", V3, set(),
        {
            "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_key_value_heads": 128,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "kv_lora_rank": 512, "q_lora_rank": 1536, "n_routed_experts": 256, "n_group": 8,
            "topk_group": 4, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
            "rope_scaling": {
                "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
                "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        },
    ),
}  # fmt: skip


def fields_of(arch: str, own: dict[str, Any]) -> Fields:
    named = {f"{arch}.{key}": value for key, value in own.items()}
    return Fields({"general.architecture": arch, **named}, file="m.gguf")


def config(arch: str, own: dict[str, Any], names: set[str]) -> dict[str, Any]:
    fields = fields_of(arch, own)
    return config_of(fields, arch_of(fields), names=names, vocab=1000, tied_head=False)


@pytest.mark.parametrize("model", REAL)
def test_config_of__published_model__is_its_config_json(model: str) -> None:
    arch, own, names, want = REAL[model]
    got = config(arch, own, names)
    assert {key: got.get(key) for key in want} == want
    assert got["vocab_size"] == 1000


@pytest.mark.parametrize(
    ("arch", "own", "words"),
    [
        ("deepseek2", V3 | {"attention.scale": 0.5}, "not known here: attention.scale"),
        ("qwen3moe", QWEN | {"rope.dimension_count": 64}, "a part of each head"),
        ("llama", MIXTRAL | {"attention.value_length": 64}, "differ in width"),
        ("glm4moe", AIR | {"expert_gating_func": 1}, "router is softmax"),
        ("qwen3moe", QWEN | {"block_count": True}, "a count was expected"),
        ("qwen3moe", QWEN | {"attention.head_count": [32, 16]}, "a count was expected"),
        ("qwen3moe", QWEN | {"rope.freq_base": "x"}, "a number was expected"),
        ("deepseek2", V3 | {"expert_weights_norm": 1}, "true or false was expected"),
        ("deepseek2", V3 | {"rope.scaling.type": 5}, "a text was expected"),
        ("gpt-oss", OSS | {"attention.temperature_scale": 2.0}, "attention.temperature_scale"),
        (
            "gpt-oss",
            {k: v for k, v in OSS.items() if k != "attention.sliding_window"},
            "attention.sliding_window is missing",
        ),
        ("olmoe", {"expert_count": 4}, "block_count is missing"),
        ("qwen3next", NEXT | {"rope.dimension_sections": [1]}, "rope.dimension_sections"),
        ("qwen35moe", QWEN36 | {"ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms"),
    ],
)
def test_config_of__field_that_cannot_be__is_named(
    arch: str, own: dict[str, Any], words: str
) -> None:
    with pytest.raises(MoetError) as caught:
        config(arch, own, set())
    assert caught.value.code == "MD-GGUF-05"
    assert words in caught.value.cause


def test_config_of__one_value_per_layer_all_equal__is_that_value() -> None:
    own = QWEN | {"attention.head_count_kv": [4] * 48}
    assert config("qwen3moe", own, set())["num_key_value_heads"] == 4


def released_names(arch: str) -> list[str]:
    """A layer's tensors as published, those that converters take one by one."""
    layer, moe = "model.layers.3.", "model.layers.3.mlp."
    top = ["model.embed_tokens", "model.norm", "lm_head"]
    norms = [layer + "input_layernorm", layer + "post_attention_layernorm"]
    attention = [f"{layer}self_attn.{part}" for part in ATTENTION]
    if arch in DELTA:
        linear = layer + "linear_attn."
        own = [f"{linear}{part}" for part in (*DELTA[arch], "conv1d", "A_log", "norm", "out_proj")]
        shared = [f"{moe}shared_expert.{part}" for part in MLP]
        return [*top, *norms, *attention, *own, *shared, moe + "gate", moe + "shared_expert_gate"]
    if arch in MIXTRALS:
        own = attention if arch == "minimax-m2" else attention[:4]
        return [*top, *norms, *own, layer + "block_sparse_moe.gate"]
    found = [*top, *norms, moe + ("router" if arch == "gpt-oss" else "gate")]
    if arch == "gpt-oss":
        return [*found, *attention[:4], layer + "self_attn.sinks"]
    if arch == "deepseek2":
        parts = "q_proj q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm o_proj"
        found += [f"{layer}self_attn.{part}" for part in (*parts.split(), "kv_b_proj")]
    else:
        found += attention
    if arch in ("deepseek2", "glm4moe"):
        found += [moe + part for part in MLP] + [f"{moe}shared_experts.{part}" for part in MLP]
    if arch == "glm4moe":
        head = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens")
        found += [layer + part for part in head]
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_names__those_of_the_package_and_back__are_the_released_ones(arch: str) -> None:
    table = gguf.get_tensor_name_map(ARCH_OF[arch], 8)
    known = ARCHS[arch]
    for name in released_names(arch):
        stored = table.get_name(name)
        assert stored is not None, name
        inside = stored.startswith("blk.3.")
        found = (known.layer if inside else known.top)[stored.removeprefix("blk.3.")]
        assert (f"model.layers.3.{found}" if inside else found) == name


@pytest.mark.parametrize("arch", ARCHS)
def test_names__merged_experts__are_gate_up_and_down(arch: str) -> None:
    table = gguf.get_tensor_name_map(ARCH_OF[arch], 8)
    known = ARCHS[arch]
    parts = dict(zip(("w1", "w3", "w2"), MLP, strict=True))
    for short, part in parts.items():
        mixtral = arch in MIXTRALS
        merged = f"layers.3.feed_forward.experts.{short}" if mixtral else None
        stored = table.get_name(merged or f"model.layers.3.mlp.experts.{part}")
        assert stored is not None
        prefix = "block_sparse_moe" if mixtral else "mlp"
        want = f"{prefix}.experts.{{expert}}.{short if mixtral else part}"
        assert known.layer[stored.removeprefix("blk.3.")] == want


# -- whole files -------------------------------------------------------------------------------

TINY = {
    "context_length": 64, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": f32(1e-6), "expert_used_count": 2, "expert_count": 4,
    "attention.key_length": 16, "attention.value_length": 16,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "glm4moe": {
        "block_count": 3, "nextn_predict_layers": 1, "rope.dimension_count": 8,
        "expert_feed_forward_length": 32, "expert_shared_count": 1, "expert_gating_func": 2,
        "leading_dense_block_count": 1,
    },
    "qwen3moe": {"block_count": 2, "expert_feed_forward_length": 32},
    "olmoe": {"block_count": 2},
    "llama": {"block_count": 2, "rope.dimension_count": 16},
    "minimax-m2": {
        "block_count": 2, "rope.dimension_count": 8, "expert_feed_forward_length": 32,
        "expert_gating_func": 2,
    },
}  # fmt: skip
BIASES = tuple(f"self_attn.{part}.bias" for part in ("q_proj", "k_proj", "v_proj"))


def published(arch: str) -> dict[str, np.ndarray]:
    """Random tensors of a tiny model by the names of its safetensors files."""
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (256, 64), "lm_head": (256, 64)}
    shapes["model.norm"] = (64,)
    for layer in range(OWN[arch]["block_count"]):
        own = layer_shapes(arch, is_dense=arch == "glm4moe" and layer == 0, is_head=layer == 2)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def layer_shapes(arch: str, *, is_dense: bool, is_head: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (64,), "post_attention_layernorm": (64,),
        "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64),
    }  # fmt: skip
    if arch != "llama":
        shapes |= {"self_attn.q_norm": (16,), "self_attn.k_norm": (16,)}
    if arch == "glm4moe":
        shapes |= dict(zip(BIASES, ((64,), (32,), (32,)), strict=True))
    if is_head:
        shapes |= {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,)}
        shapes |= {"shared_head.norm": (64,)}
    moe = "block_sparse_moe" if arch in MIXTRALS else "mlp"
    wide, parts = ((32, 64), (32, 64), (64, 32)), ("w1", "w3", "w2") if arch in MIXTRALS else MLP
    if is_dense:
        return shapes | dict(zip((f"mlp.{p}" for p in MLP), wide, strict=True))
    shapes[f"{moe}.gate"] = (4, 64)
    for expert in range(4):
        names = (f"{moe}.experts.{expert}.{part}" for part in parts)
        shapes |= dict(zip(names, wide, strict=True))
    if arch == "minimax-m2":
        shapes[f"{moe}.e_score_correction_bias"] = (4,)
    if arch == "glm4moe":
        shapes["mlp.gate.e_score_correction_bias"] = (4,)
        shapes |= dict(zip((f"mlp.shared_experts.{p}" for p in MLP), wide, strict=True))
    return shapes


@pytest.mark.parametrize("arch", OWN)
def test_open__each_architecture__has_the_published_tensors_and_a_config(
    arch: str, tmp_path: Path
) -> None:
    tensors = published(arch)
    write_fields(tmp_path / "m.gguf", arch, TINY | OWN[arch], tensors)
    source = ModelSource.open(tmp_path / "m.gguf")
    assert set(source.index.names()) == set(tensors)
    for name, values in tensors.items():
        assert np.array_equal(decode(source.index, name).numpy(), values), name
    assert source.config["num_hidden_layers"] == 2
    assert source.config["head_dim"] == 16
    if arch == "glm4moe":
        assert (source.config["attention_bias"], source.config["use_qk_norm"]) == (True, True)


@pytest.mark.parametrize(
    ("up", "words"),
    [(None, "without its other half"), ((4, 16), "do not fit together")],
)
def test_open__biases_of_experts_that_are_no_pair__refused(
    up: tuple[int, int] | None, words: str, tmp_path: Path
) -> None:
    moe = "model.layers.0.mlp.experts."
    tensors = {
        "model.embed_tokens": np.zeros((256, 64), np.float32),
        f"{moe}gate_proj": np.zeros((4, 32, 64), np.float32),
        f"{moe}gate_proj.bias": np.zeros((4, 32), np.float32),
    }
    if up is not None:
        tensors[f"{moe}up_proj.bias"] = np.zeros(up, np.float32)
    write_fields(tmp_path / "m.gguf", "gpt-oss", TINY | {"block_count": 1}, tensors)
    with pytest.raises(MoetError) as caught:
        ModelSource.open(tmp_path / "m.gguf")
    assert caught.value.code == "MD-SRC-02"
    assert words in caught.value.cause


def delta_layer(**changes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """A DeltaNet layer of two heads of keys and six of values, as converted."""
    linear = "model.layers.0.linear_attn."
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj_qkv": (160, 64), "in_proj_z": (96, 64), "conv1d": (160, 4), "out_proj": (64, 96),
        "dt_proj.bias": (6,),
    }  # fmt: skip
    made = {
        linear + name: np.zeros(shape, np.float32) for name, shape in (shapes | changes).items()
    }
    stacks = {
        "model.embed_tokens": np.zeros((256, 64), np.float32),
        "model.layers.0.mlp.experts.gate_proj": np.zeros((4, 32, 64), np.float32),
    }
    return stacks | made


DELTA_FIELDS = TINY | {
    "block_count": 1, "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2,
    "ssm.time_step_rank": 6, "ssm.inner_size": 96, "rope.dimension_count": 8,
    "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        ("qwen3next", {"in_proj_z": (90, 64)}, "do not fit together"),
        ("qwen3next", {"in_proj_qkv": (160, 32)}, "do not fit together"),
        ("qwen35moe", {"in_proj_z": (95, 64)}, "not 6 heads of values"),
        ("qwen35moe", {"in_proj_qkv": (64, 64)}, "not 6 heads of values"),
        ("qwen35moe", {"out_proj": (64, 97)}, "not 6 heads of values"),
        ("qwen35moe", {"dt_proj.bias": (5,)}, "not 6 heads of values"),
        ("qwen35moe", {"conv1d": (160,)}, "not a kernel per channel"),
    ],
)
def test_open__deltanet_of_other_heads__refused(
    arch: str, changes: dict[str, tuple[int, ...]], words: str, tmp_path: Path
) -> None:
    write_fields(tmp_path / "right.gguf", arch, DELTA_FIELDS, delta_layer())
    assert ModelSource.open(tmp_path / "right.gguf").config["linear_num_value_heads"] == 6
    write_fields(tmp_path / "m.gguf", arch, DELTA_FIELDS, delta_layer(**changes))
    with pytest.raises(MoetError) as caught:
        ModelSource.open(tmp_path / "m.gguf")
    assert caught.value.code == "MD-SRC-02"
    assert words in caught.value.cause


def test_plan__head_of_qwen_behind_the_last_layer__is_packed() -> None:
    made = config("qwen35moe", QWEN36, set())
    assert plan_for(made, path="m.gguf", names=[]).moe_layers[-1] == 39
    plan = plan_for(made, path="m.gguf", names=["model.layers.40.eh_proj"])
    assert plan.moe_layers[-1] == 40
    assert plan.dense["model.layers.40.enorm"] == (2048,)
