"""quantization_config: published ones are read, what is not known is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from moet_desk.errors import MoetError
from moet_desk.store.model_source import quantization_of
from moet_desk.store.quantization import IntGroups, Quantization, read_hf_quant, read_quantization

FP8: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
MINIMAX = {**FP8, "fmt": "float8_e4m3fn", "scale_fmt": None}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
KIMI: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "quantization_status": "compressed", "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                "group_size": 32, "dynamic": False, "actorder": None, "block_structure": None,
                "observer": "minmax", "observer_kwargs": {},
            },
        }
    },
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"],
}  # fmt: skip
GLM_FP8: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "quantization_status": "compressed", "version": "0.12.3",
    "sparsity_config": {}, "transform_config": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "format": "float-quantized",
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
            "weights": {
                "num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel",
                "group_size": None, "dynamic": False,
            },
        }
    },
    "ignore": ["lm_head"],
}  # fmt: skip
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8},
    "producer": {"name": "modelopt", "version": "0.33"}, "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
        }
    },
}  # fmt: skip
MIXED = {
    "quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0.mlp": {"quant_algo": "FP8"},
        "model.layers.1.mlp": {"quant_algo": "NVFP4", "group_size": 16},
    },
}  # fmt: skip
ZEROS = copy.deepcopy(KIMI)
ZEROS["config_groups"]["group_0"]["weights"]["symmetric"] = False
NO_INTS: frozenset[IntGroups] = frozenset()


def read(table: Any) -> Quantization:
    return read_quantization({"quantization_config": table}, "config.json")


@pytest.mark.parametrize(
    ("table", "ints"),
    [
        (FP8, NO_INTS),
        (MINIMAX, NO_INTS),
        (MXFP4, NO_INTS),
        (GLM_FP8, NO_INTS),
        (MODELOPT, NO_INTS),
        (MIXED, NO_INTS),
        (KIMI, frozenset({IntGroups(4, 32)})),
        (ZEROS, frozenset({IntGroups(4, 32, zero_points=True)})),
    ],
)
def test_read__as_published__method_and_whole_numbers(
    table: dict[str, Any], ints: frozenset[IntGroups]
) -> None:
    assert read(table) == Quantization(table["quant_method"], ints)


def test_read__none_at_all__is_plain() -> None:
    assert read_quantization({}, "config.json") == Quantization()
    assert read(None) == Quantization()


def test_read__beside_the_text_models_config__found_too() -> None:
    nested = {"text_config": {"quantization_config": KIMI}}
    assert read_quantization(nested, "") == read(KIMI)
    assert read_quantization({"quantization_config": KIMI, **nested}, "") == read(KIMI)
    with pytest.raises(MoetError, match="two methods, fp8 and compressed-tensors"):
        read_quantization({"quantization_config": FP8, **nested}, "")


def changed(table: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with the value at a path such as "config_groups.group_0.weights.num_bits"."""
    copied = copy.deepcopy(table)
    *parents, last = path.split(".")
    at = copied
    for parent in parents:
        at = at[parent]
    at[last] = value
    return copied


WEIGHTS = "config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("table", "path", "value", "words"),
    [
        (FP8, "quant_method", "awq", "the method 'awq'"),
        (FP8, "quant_method", "gptq", "the method 'gptq'"),
        (FP8, "quant_method", "bitsandbytes", "the method 'bitsandbytes'"),
        (FP8, "quant_method", None, "the method None"),
        (FP8, "quant_method", ["fp8"], r"the method \['fp8'\]"),
        (FP8, "fmt", "e5m2", "fmt = 'e5m2'"),
        (FP8, "scale_fmt", "log", "scale_fmt = 'log'"),
        (FP8, "weight_block_size", [64, 64], r"weight_block_size = \[64, 64\]"),
        (FP8, "rotation", "hadamard", "the key 'rotation' = 'hadamard'"),
        (FP8, "config_groups", {}, "the key 'config_groups'"),
        (KIMI, "format", "marlin-24", "format = 'marlin-24'"),
        (KIMI, "quantization_status", "calibration", "quantization_status = 'calibration'"),
        (KIMI, "sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config"),
        (KIMI, "transform_config", {"config_groups": {"u": {}}}, "transform_config"),
        (KIMI, "bits", 4, "the key 'bits' = 4"),
        (KIMI, "config_groups", ["W4A16"], "config_groups"),
        (KIMI, "config_groups.group_0", ["Linear"], "group_0"),
        (KIMI, "config_groups.group_0.rotate", True, "the key 'rotate' = True"),
        (KIMI, WEIGHTS, "int4", "weights of group_0 = 'int4'"),
        (GLM_FP8, f"{WEIGHTS}.symmetric", False, "symmetric = False"),
        (MODELOPT, f"{WEIGHTS}.symmetric", False, "symmetric = False"),
        (KIMI, f"{WEIGHTS}.symmetric", 1, "symmetric = 1"),
        (KIMI, f"{WEIGHTS}.dynamic", True, "dynamic = True"),
        (KIMI, f"{WEIGHTS}.actorder", "group", "actorder = 'group'"),
        (KIMI, f"{WEIGHTS}.block_structure", [64, 64], "block_structure"),
        (KIMI, f"{WEIGHTS}.num_bits", 3, "num_bits = 3"),
        (KIMI, f"{WEIGHTS}.num_bits", 4.0, "num_bits = 4.0"),
        (KIMI, f"{WEIGHTS}.group_size", None, "strategy = 'group'"),
        (KIMI, f"{WEIGHTS}.group_size", 0, "group_size = 0"),
        (KIMI, f"{WEIGHTS}.group_size", True, "group_size = True"),
        (KIMI, f"{WEIGHTS}.strategy", "block", "strategy = 'block'"),
        (KIMI, f"{WEIGHTS}.type", "nf4", "type = 'nf4'"),
        (KIMI, f"{WEIGHTS}.codebook", [1], "the key 'codebook'"),
        (GLM_FP8, f"{WEIGHTS}.num_bits", 6, "num_bits = 6"),
        (GLM_FP8, f"{WEIGHTS}.strategy", "group", "strategy = 'group'"),
        (MODELOPT, f"{WEIGHTS}.group_size", 64, "group_size = 64"),
        (MODELOPT, "quant_algo", "NVFP4_AWQ", "quant_algo = 'NVFP4_AWQ'"),
        (MODELOPT, "group_size", 32, "group_size = 32"),
        (MODELOPT, "pre_quant_scale", True, "pre_quant_scale = True"),
        (MIXED, "quantized_layers", [], r"quantized_layers = \[\]"),
        (MIXED, "quantized_layers.x", {"quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'"),
        (MIXED, "quantized_layers.x", 5, "x = 5"),
    ],
)
def test_read__unknown_option__refused_by_name(
    table: dict[str, Any], path: str, value: Any, words: str
) -> None:
    with pytest.raises(MoetError, match=words) as caught:
        read(changed(table, path, value))
    assert caught.value.code == "MD-SRC-09"


@pytest.mark.parametrize("table", ["fp8", 5, [], [FP8], True])
def test_read__no_table__refused(table: Any) -> None:
    with pytest.raises(MoetError, match="MD-SRC-09"):
        read(table)


def test_read__long_value__is_cut_in_the_message() -> None:
    with pytest.raises(MoetError) as caught:
        read({**FP8, "fmt": "x" * 10_000})
    assert len(caught.value.cause) < 400


HF_QUANT = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"],
    },
}  # fmt: skip
HF_MIXED = {"quantization": {key: MIXED[key] for key in ("quant_algo", "quantized_layers")}}


@pytest.mark.parametrize("document", [HF_QUANT, HF_MIXED])
def test_read_hf_quant__as_published__is_modelopt(document: dict[str, Any]) -> None:
    assert read_hf_quant(document, "") == Quantization("modelopt", NO_INTS)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("quantization.quant_algo", "NVFP4_AWQ", "quant_algo = 'NVFP4_AWQ'"),
        ("quantization.group_size", 32, "group_size = 32"),
        ("quantization.has_zero_point", True, "has_zero_point = True"),
        ("quantization.svd_rank", 32, "the key 'svd_rank' = 32"),
        ("quantization.quant_method", "awq", "quantization = "),
        ("quantization", None, "quantization = None"),
        ("extra", 1, "the key 'extra' = 1"),
    ],
)
def test_read_hf_quant__unknown__refused_by_name(path: str, value: Any, words: str) -> None:
    with pytest.raises(MoetError, match=words) as caught:
        read_hf_quant(changed(HF_QUANT, path, value), "folder/hf_quant_config.json")
    assert caught.value.code == "MD-SRC-09"
    assert "folder/hf_quant_config.json" in caught.value.cause


def test_quantization_of__folder__modelopts_file_counts_if_the_config_says_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(HF_QUANT))
    assert quantization_of(tmp_path, {}).method == "modelopt"
    assert quantization_of(tmp_path, {"quantization_config": FP8}).method == "fp8"
    nested = {"text_config": {"quantization_config": KIMI}}
    assert quantization_of(tmp_path, nested) == read(KIMI)
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(MoetError, match="MD-SRC-07"):
        quantization_of(tmp_path, {})
