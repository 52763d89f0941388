"""Configs that must be refused, each by name, before anything is read or written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moet_desk.engine.families import plan_for, spec_for
from moet_desk.errors import MoetError


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
    mixer = spec.layers[0].mixer
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
    assert spec.layers[0].mixer.softmax_scale * 64**0.5 == pytest.approx(1.874, abs=1e-3)


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


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", ""])
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
