"""Dense weights for a device: joined as shipped where scales allow it, never with other values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moet_desk.engine.cuda.dense_weights import DenseLoader, reordered
from moet_desk.kernels.triton.dense_weight import DenseWeight, WeightKind
from moet_desk.store.quant_formats import decode
from moet_desk.store.sources import TensorIndex
from tests.kernels.triton.makers import dense_weight, real_values


class Reader:
    """As much of a pack as the loader reads."""

    def __init__(self, folder: Path) -> None:
        self.dense = TensorIndex.open(folder)

    def dense_tensor(self, name: str) -> Tensor:
        return decode(self.dense, name)


def joined(folder: Path, rows: int, scales: torch.dtype) -> tuple[DenseWeight, Tensor]:
    """Two FP8 matrices, the first of `rows` rows, as one weight; and their values."""
    source = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, count in (("a", rows), ("b", 256)):
        tensors[f"{name}.weight"] = torch.randn(count, 160, generator=source).to(
            torch.float8_e4m3fn
        )
        grid = torch.rand(-(-count // 128), 2, generator=source) + 0.5
        tensors[f"{name}.weight_scale_inv"] = grid.to(scales)
    save_file(tensors, folder / "model.safetensors")
    reader: Any = Reader(folder)
    weight = DenseLoader(reader, torch.device("cpu")).matrix("a", "b")
    return weight, torch.cat([reader.dense_tensor(name) for name in ("a", "b")])


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_matrix__fp8_whose_blocks_meet__stays_fp8(tmp_path: Path, scales: torch.dtype) -> None:
    weight, want = joined(tmp_path, 128, scales)
    assert weight.kind is WeightKind.FP8
    assert weight.scales is not None
    assert weight.scales.dtype == torch.float32
    grid = weight.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:384, :160]
    assert torch.equal(weight.values.float() * grid, want)


def test_matrix__fp8_whose_blocks_do_not_meet__decoded(tmp_path: Path) -> None:
    weight, want = joined(tmp_path, 160, torch.float32)
    assert weight.kind is WeightKind.F32
    assert torch.equal(weight.values, want)


@pytest.mark.parametrize("shapes", [((48, 1), (256, 1)), ((48, 1), (1,)), ((), ())])
def test_matrix__fp8_with_a_scale_per_row_or_for_all__stays_fp8(
    tmp_path: Path, shapes: tuple[tuple[int, ...], ...]
) -> None:
    source = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, rows, shape in zip("ab", (48, 256), shapes, strict=True):
        values = torch.randn(rows, 160, generator=source)
        tensors[f"{name}.weight"] = values.to(torch.float8_e4m3fn)
        scales = torch.rand(shape, generator=source) + 0.5
        tensors[f"{name}.weight_scale"] = scales.bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    reader: Any = Reader(tmp_path)
    weight = DenseLoader(reader, torch.device("cpu")).matrix("a", "b")
    assert (weight.kind, weight.scale_rows) == (WeightKind.FP8, 1)
    assert weight.scales is not None
    want = torch.cat([reader.dense_tensor(name) for name in "ab"])
    assert torch.equal(weight.values.float() * weight.scales, want)


def test_matrix__fp8_of_two_kinds__decoded(tmp_path: Path) -> None:
    values = torch.ones(128, 128).to(torch.float8_e4m3fn)
    tensors = {
        "a.weight": values, "a.weight_scale": torch.full((1, 1), 2.0),
        "b.weight": values.clone(), "b.weight_scale": torch.full((128, 1), 3.0),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    reader: Any = Reader(tmp_path)
    weight = DenseLoader(reader, torch.device("cpu")).matrix("a", "b")
    assert weight.kind is WeightKind.F32
    assert weight.values[:, 0].tolist() == [2.0] * 128 + [3.0] * 128


@pytest.mark.parametrize(
    ("kind", "by_row", "whole_blocks"),
    [
        (WeightKind.F32, False, False),
        (WeightKind.BF16, False, False),
        (WeightKind.FP8, True, False),
        (WeightKind.FP8, False, True),
        (WeightKind.FP8, False, False),
    ],
)
def test_reordered__any_format__the_same_rows(
    kind: WeightKind, by_row: bool, whole_blocks: bool
) -> None:
    torch.manual_seed(0)
    weight = dense_weight(3 * 128 + 20, 160, kind, by_row=by_row)
    order = torch.randperm(weight.n)
    if whole_blocks:  # the last block is a short one
        order = torch.cat([torch.arange(128) + 128 * i for i in (2, 0, 1)])
        order = torch.cat([order, torch.arange(384, weight.n)])
    found = reordered(weight, order)
    torn = kind is WeightKind.FP8 and not by_row and not whole_blocks
    want = real_values(weight)[order]
    assert torch.equal(real_values(found), want.float().double() if torn else want)
    assert found.kind is (WeightKind.F32 if torn else kind)
