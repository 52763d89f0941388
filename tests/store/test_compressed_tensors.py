"""Weights that the compressed-tensors library wrote, against what it reads back itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from safetensors.torch import save_file

from moet_desk.errors import MoetError
from moet_desk.store.quant_formats import decode
from moet_desk.store.quantization import read_quantization
from moet_desk.store.sources import Format, TensorIndex

ROWS, COLUMNS = 100, 384  # 100: the last words of zero points are not full, nor is a block of FP8

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {**INT4, "num_bits": 8, "group_size": 128}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
NVFP4 = {
    "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
    "group_size": 16, "scale_dtype": torch.float8_e4m3fn,
}  # fmt: skip

PACKED, FLOATS = "pack-quantized", "float-quantized"
KINDS: dict[str, tuple[str, dict[str, Any], Format]] = {
    "nvfp4": ("nvfp4-pack-quantized", NVFP4, Format.NVFP4),
    "int4-groups": (PACKED, INT4, Format.INT4),
    "int4-groups-zeros": (PACKED, {**INT4, "symmetric": False}, Format.INT4),
    "int4-rows-zeros": (
        PACKED,
        {**INT4, "symmetric": False, "strategy": "channel", "group_size": None},
        Format.INT4,
    ),
    "int8-groups": (PACKED, INT8, Format.INT8),
    "int8-groups-zeros": (PACKED, {**INT8, "symmetric": False}, Format.INT8),
    "int8-plain": (
        "int-quantized",
        {**INT8, "strategy": "channel", "group_size": None},
        Format.INT8,
    ),
    "fp8-tensor": (FLOATS, {**FP8, "strategy": "tensor"}, Format.FP8_ROWS),
    "fp8-rows": (FLOATS, {**FP8, "strategy": "channel"}, Format.FP8_ROWS),
    "fp8-blocks": (
        FLOATS,
        {**FP8, "strategy": "block", "block_structure": [128, 128]},
        Format.FP8,
    ),
}
EVERY_DTYPE = [torch.float32, torch.bfloat16, torch.float16]


def matrix(seed: int) -> torch.Tensor:
    """Random weights whose mean is not zero and whose rows differ in size."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(ROWS, COLUMNS, generator=generator) * 0.05 + 0.02
    return values * torch.logspace(-2, 1, ROWS)[:, None]


def extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest weight under each scale."""
    match str(args.strategy):
        case "tensor":
            low, high = torch.aminmax(weight)
            return low.reshape(1), high.reshape(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            padded = torch.nn.functional.pad(weight, (0, -COLUMNS % 128, 0, -ROWS % 128))
            tiles = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            return tiles.amin((1, 3)), tiles.amax((1, 3))
        case _:
            groups = weight.unflatten(1, (-1, args.group_size or COLUMNS))
            return groups.amin(-1), groups.amax(-1)


def compressed(
    kind: str, weight: torch.Tensor, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], QuantizationScheme]:
    """What the library writes for a matrix, and what it calls that."""
    form, fields, _ = KINDS[kind]
    args = QuantizationArgs(**fields)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    low, high = extremes(weight, args)
    state = {"weight": weight}
    shared = None
    if kind == "nvfp4":
        shared = generate_gparam(weight.amin(), weight.amax())
        state["weight_global_scale"] = shared
    scales, zeros = calculate_qparams(low, high, args, global_scale=shared)
    state["weight_scale"] = scales if kind == "nvfp4" else scales.to(dtype)
    state["weight_zero_point"] = zeros
    written = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    return {name: part.contiguous() for name, part in written.items()}, scheme


def config_of(scheme: QuantizationScheme) -> dict[str, Any]:
    """config.json as the library writes it."""
    said = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=scheme.format,
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    return {"quantization_config": said.model_dump(mode="json")}


def index_of(
    folder: Path, parts: dict[str, torch.Tensor], scheme: QuantizationScheme
) -> TensorIndex:
    save_file({f"x.{name}": part for name, part in parts.items()}, folder / "model.safetensors")
    return TensorIndex.open(folder, read_quantization(config_of(scheme), "config.json"))


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("kind", KINDS)
def test_decode__what_the_library_wrote__is_what_it_reads(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    form, _, stored = KINDS[kind]
    weight = matrix(len(kind))
    parts, scheme = compressed(kind, weight, dtype)
    index = index_of(tmp_path, parts, scheme)
    assert index.info("x").format is stored
    got = decode(index, "x")
    theirs = BaseCompressor.get_value_from_registry(form).decompress(parts, scheme)["weight"]
    # it rounds to the scales' own type, and NVFP4 to bfloat16, what we keep as float32
    assert torch.equal(got.to(theirs.dtype), theirs)
    assert got.sub(weight).abs().mean() < weight.abs().mean() * 0.2
    odd = decode(index, "x", rows=slice(3, 97, 5))
    assert torch.equal(odd, got[3:97:5])


def test_decode__nvfp4__equals_the_library_in_float32(tmp_path: Path) -> None:
    parts, scheme = compressed("nvfp4", matrix(1), torch.float32)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.stack((parts["weight_packed"] & 15, parts["weight_packed"] >> 4), -1).flatten(-2)
    values = table[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())
    theirs = dequantize(
        values,
        parts["weight_scale"].float(),
        args=scheme.weights,
        dtype=torch.float32,
        global_scale=parts["weight_global_scale"],
    )
    assert torch.equal(decode(index_of(tmp_path, parts, scheme), "x"), theirs)


@pytest.mark.parametrize("kind", ["int4-groups", "int4-groups-zeros"])
def test_decode__columns_in_another_order__is_refused(kind: str, tmp_path: Path) -> None:
    parts, scheme = compressed(kind, matrix(2), torch.bfloat16)
    parts["weight_g_idx"] = torch.arange(COLUMNS, dtype=torch.int32) // 32
    with pytest.raises(MoetError, match="weight_g_idx") as caught:
        decode(index_of(tmp_path, parts, scheme), "x")
    assert caught.value.code == "MD-SRC-05"


@pytest.mark.parametrize("change", ["none", "unpacked", "rows", "i64"])
def test_decode__zero_points_that_are_not_as_the_library_packs_them__are_refused(
    change: str, tmp_path: Path
) -> None:
    parts, scheme = compressed("int4-groups-zeros", matrix(3), torch.bfloat16)
    zeros = parts.pop("weight_zero_point")
    assert zeros.shape == (13, COLUMNS // 32)
    if change != "none":
        parts["weight_zero_point"] = {
            "unpacked": torch.zeros(ROWS, COLUMNS // 32, dtype=torch.int32),
            "rows": zeros[:-1].clone(),
            "i64": zeros.long(),
        }[change]
    index = index_of(tmp_path, parts, scheme)
    assert index.info("x").format is Format.UNKNOWN
    with pytest.raises(MoetError, match="MD-SRC-05"):
        decode(index, "x")


def test_decode__zero_points_without_a_word_in_the_config__are_refused(tmp_path: Path) -> None:
    parts, _ = compressed("int4-groups-zeros", matrix(4), torch.bfloat16)
    _, symmetric = compressed("int4-groups", matrix(4), torch.bfloat16)
    with pytest.raises(MoetError, match="MD-SRC-05"):
        decode(index_of(tmp_path, parts, symmetric), "x")
