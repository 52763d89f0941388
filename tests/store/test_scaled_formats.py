"""NVFP4, whole numbers and FP8 per row or tensor, against their definitions; and hostile values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moet_desk.errors import MoetError
from moet_desk.kernels.reference.quant import balance_zeros, quantize_fp4
from moet_desk.store import quant_formats
from moet_desk.store.quant_formats import check_finite, decode, fp4_of
from moet_desk.store.quantization import read_quantization
from moet_desk.store.sources import Format, TensorIndex
from tests.store.tiny import SCALED_KINDS, quantization_config, scaled_values, store

FORMATS = {"fp8": Format.FP8_ROWS, "nvfp": Format.NVFP4, "int4": Format.INT4, "int8": Format.INT8}


def stored(kind: str, shape: tuple[int, int] = (6, 256)) -> dict[str, torch.Tensor]:
    return store("x", shape, kind, torch.Generator().manual_seed(7))


def index_of(folder: Path, tensors: dict[str, torch.Tensor], kind: str) -> TensorIndex:
    save_file(tensors, folder / "model.safetensors")
    config = {"quantization_config": quantization_config(kind)}
    return TensorIndex.open(folder, read_quantization(config, "config.json"))


@pytest.mark.parametrize("kind", SCALED_KINDS)
def test_decode__scaled_codes__are_their_definition(kind: str, tmp_path: Path) -> None:
    tensors = stored(kind)
    index = index_of(tmp_path, tensors, kind)
    assert index.names() == ["x"]
    info = index.info("x")
    assert info.shape == (6, 256)
    assert info.format is next(form for start, form in FORMATS.items() if kind.startswith(start))
    want = scaled_values(tensors, "x", kind)
    # two factors of NVFP4 are multiplied first, which rounds twice
    assert decode(index, "x").numpy() == pytest.approx(want, rel=2e-7 if "nv" in kind else 6e-8)


@pytest.mark.parametrize("kind", SCALED_KINDS)
@pytest.mark.parametrize("rows", [slice(0, 1), slice(2, 6), slice(1, 6, 2), slice(3, 3)])
def test_decode__some_rows__are_those_of_the_whole(kind: str, rows: slice, tmp_path: Path) -> None:
    index = index_of(tmp_path, stored(kind), kind)
    assert torch.equal(decode(index, "x", rows=rows), decode(index, "x")[rows])


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4-ct", "int4-32", "int8-rows", "fp8-tensor"])
def test_fp4_of__scaled_codes__quantised_in_any_tiling(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_of(tmp_path, stored(kind), kind)
    nibbles, scales = quantize_fp4(decode(index, "x"))
    for tile in (256, 5 * 256, 1 << 22):
        monkeypatch.setattr(quant_formats, "TILE_WEIGHTS", tile)
        got = fp4_of(index, "x")
        assert torch.equal(got[0], balance_zeros(nibbles))
        assert torch.equal(got[1], scales)


def test_decode__int4__lowest_bits_first_and_eight_is_zero(tmp_path: Path) -> None:
    word = sum(code << (4 * at) for at, code in enumerate((8, 9, 7, 0, 15, 1, 8, 8)))
    tensors = {
        "x.weight_packed": torch.tensor([[word] * 4]).to(torch.int32),
        "x.weight_scale": torch.tensor([[0.5]], dtype=torch.bfloat16),
        "x.weight_shape": torch.tensor([1, 32]),
    }
    got = decode(index_of(tmp_path, tensors, "int4-32"), "x")[0].tolist()
    assert got == [0.0, 0.5, -0.5, -4.0, 3.5, -3.5, 0.0, 0.0] * 4


def test_decode__nvfp4__global_scale_divides_and_scale_2_multiplies(tmp_path: Path) -> None:
    codes = torch.full((1, 8), 0x22, dtype=torch.uint8)  # e2m1 1.0
    scale = torch.tensor([[3.0]]).to(torch.float8_e4m3fn)
    ct = {"weight_packed": codes, "weight_global_scale": torch.tensor([4.0])}
    modelopt = {"weight": codes, "weight_scale_2": torch.tensor(4.0)}
    for kind, parts, want in (("nvfp4-ct", ct, 0.75), ("nvfp4", modelopt, 12.0)):
        tensors = {f"x.{name}": part for name, part in {**parts, "weight_scale": scale}.items()}
        assert decode(index_of(tmp_path, tensors, kind), "x").tolist() == [[want] * 16]


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("kind", "part", "value", "words"),
    [
        ("fp8-rows", "weight_scale", NAN, "scales"),
        ("fp8-tensor", "weight_scale", INF, "scales"),
        ("fp8-rows", "weight", NAN, "weights"),
        ("fp8-rows", "weight_scale", 3e38, "weights"),
        ("nvfp4", "weight_scale", NAN, "scales"),
        ("nvfp4", "weight_scale_2", NAN, "scales"),
        ("nvfp4", "weight_scale_2", INF, "scales"),
        ("nvfp4", "weight_scale_2", 3e38, "scales"),
        ("nvfp4-ct", "weight_scale", NAN, "scales"),
        ("nvfp4-ct", "weight_global_scale", 0.0, "scales"),
        ("nvfp4-ct", "weight_global_scale", NAN, "scales"),
        ("nvfp4-ct", "weight_global_scale", -INF, "scales"),
        ("int4-32", "weight_scale", NAN, "scales"),
        ("int8-rows", "weight_scale", -INF, "scales"),
        ("int8-plain", "weight_scale", 3e38, "weights"),
    ],
)
def test_decode__invalid_number__names_tensor_and_part(
    kind: str, part: str, value: float, words: str, tmp_path: Path
) -> None:
    tensors = stored(kind)
    tensors[f"x.{part}"].view(-1)[:1] = torch.tensor([value]).to(tensors[f"x.{part}"].dtype)
    tensors["x.weight" if "x.weight" in tensors else "x.weight_packed"][0, 1] = 100
    index = index_of(tmp_path, tensors, kind)
    for use in (decode, fp4_of, check_finite):
        with pytest.raises(MoetError) as caught:
            use(index, "x")
        assert caught.value.code == "MD-SRC-06"
        assert caught.value.facts["part"] == words
        assert caught.value.facts["tensor"] == "x"


@pytest.mark.parametrize("said", [[6, 255], [5, 256], [256, 6], [-1, 1 << 62]])
def test_decode__weight_shape_says_another_shape__is_a_damaged_file(
    said: list[int], tmp_path: Path
) -> None:
    tensors = stored("int4-32") | {"x.weight_shape": torch.tensor(said)}
    with pytest.raises(MoetError, match=r"weight_shape says") as caught:
        decode(index_of(tmp_path, tensors, "int4-32"), "x")
    assert caught.value.code == "MD-SRC-02"


def without(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if name != f"x.{part}"}


NV, CT, INT4 = stored("nvfp4"), stored("nvfp4-ct"), stored("int4-32")
ZERO = torch.zeros(1)


@pytest.mark.parametrize(
    ("kind", "tensors"),
    [
        ("nvfp4", without(NV, "weight_scale_2")),
        ("nvfp4", without(NV, "weight_scale_2") | {"x.weight_global_scale": ZERO}),
        ("nvfp4", NV | {"x.weight_global_scale": ZERO}),
        ("nvfp4", NV | {"x.weight_scale_2": torch.ones(6, 1)}),
        ("nvfp4", NV | {"x.weight_scale_2": torch.ones(1).bfloat16()}),
        ("nvfp4", NV | {"x.pre_quant_scale": torch.ones(256)}),
        ("nvfp4", NV | {"x.weight_scale": NV["x.weight_scale"][:, :-1].contiguous()}),
        ("nvfp4-ct", CT | {"x.weight_scale": CT["x.weight_scale"].float()}),
        ("nvfp4-ct", CT | {"x.weight_zero_point": torch.zeros(6, 16)}),
        ("nvfp4-ct", without(CT, "weight_global_scale")),
        ("int4-32", INT4 | {"x.weight_zero_point": torch.zeros(1, 8, dtype=torch.int32)}),
        ("int4-32", INT4 | {"x.weight_g_idx": torch.zeros(256, dtype=torch.int32)}),
        ("int4-32", without(INT4, "weight_shape")),
        ("int4-32", INT4 | {"x.weight_shape": torch.tensor([6, 256, 1])}),
        ("int4-32", without(INT4, "weight_scale")),
        ("int4-128", INT4),  # the config says other groups
        ("int8-32", INT4),
        ("fp8-rows", INT4),  # nobody says how many bits
        ("int4-rows", stored("int8-plain")),
        ("fp8-rows", stored("int8-plain")),
    ],
)
def test_grouping__not_what_is_known__is_unknown(
    kind: str, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    index = index_of(tmp_path, tensors, kind)
    assert index.info("x").format is Format.UNKNOWN
    with pytest.raises(MoetError, match="MD-SRC-05"):
        decode(index, "x")


def test_grouping__two_kinds_of_whole_numbers_of_one_shape__is_unknown(tmp_path: Path) -> None:
    """Sixteen numbers of 8 bits take the words of 32 of 4 bits, with as many scales."""
    save_file(INT4, tmp_path / "model.safetensors")
    groups = quantization_config("int4-32")["config_groups"]
    groups["group_1"] = {"targets": ["Linear"], "weights": dict(groups["group_0"]["weights"])}
    groups["group_1"]["weights"] |= {"num_bits": 8, "group_size": 16}
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    index = TensorIndex.open(tmp_path, read_quantization({"quantization_config": config}, ""))
    assert index.info("x").format is Format.UNKNOWN


def test_grouping__scales_of_activations_and_cache__left_out_with_a_quantisation_only(
    tmp_path: Path,
) -> None:
    tensors = {
        "a.k_proj.weight": torch.zeros(4, 4),
        "a.k_proj.k_scale": torch.ones(1),
        "a.k_proj.input_scale": torch.ones(1),
        "a.v_scale": torch.ones(()),
        "a.o_scale": torch.ones(()),
    }
    assert index_of(tmp_path, tensors, "nvfp4").names() == ["a.k_proj", "a.o_scale"]
    names = TensorIndex.open(tmp_path).names()
    assert {"a.k_proj.k_scale", "a.v_scale", "a.k_proj.input_scale"} <= set(names)


@pytest.mark.parametrize("kind", ["fp8-rows", "nvfp4"])
def test_grouping__every_part_counts_as_the_tensors_bytes(kind: str, tmp_path: Path) -> None:
    tensors = stored(kind)
    info = index_of(tmp_path, tensors, kind).info("x")
    kept = {name for name in tensors if "input" not in name}
    assert {raw.name for raw in info.raws} == kept
    assert info.bytes == sum(tensors[name].nbytes for name in kept)


def test_decode__no_rows_at_all__is_empty(tmp_path: Path) -> None:
    tensors = {
        "x.weight": torch.zeros(0, 32, dtype=torch.float8_e4m3fn),
        "x.weight_scale": torch.zeros(0, 1),
    }
    got = decode(index_of(tmp_path, tensors, "fp8-rows"), "x")
    assert np.array_equal(got.numpy(), np.zeros((0, 32)))
