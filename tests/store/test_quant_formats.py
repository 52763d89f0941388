"""Decoders against formulas written out one weight at a time, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moet_desk.errors import MoetError
from moet_desk.kernels.reference.quant import balance_zeros, fp4_values, quantize_fp4
from moet_desk.store import quant_formats
from moet_desk.store.quant_formats import check_finite, decode, e8m0, fp4_of
from moet_desk.store.sources import TensorIndex
from tests.store.tiny import e4m3, mxfp4_values, store


def index_with(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorIndex:
    save_file(tensors, folder / "model.safetensors")
    return TensorIndex.open(folder)


def stored(kind: str, shape: tuple[int, int] = (160, 96)) -> dict[str, torch.Tensor]:
    return store("x", shape, kind, torch.Generator().manual_seed(7))


def fp8_values(weight: torch.Tensor, scale: np.ndarray) -> np.ndarray:
    raw = weight.view(torch.uint8).numpy()
    out = np.zeros(raw.shape)
    for o, k in np.ndindex(*raw.shape):
        out[o, k] = e4m3(int(raw[o, k])) * float(scale[o // 128, k // 128])
    return out


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32", "f64"])
def test_decode__plain__is_the_stored_value(kind: str, tmp_path: Path) -> None:
    tensors = stored(kind)
    got = decode(index_with(tmp_path, tensors), "x")
    assert got.dtype == torch.float32
    assert torch.equal(got, tensors["x.weight"].float())


@pytest.mark.parametrize("kind", ["fp8", "fp8-scale", "fp8-e8m0"])
@pytest.mark.parametrize("shape", [(160, 96), (128, 256), (1, 130)])
def test_decode__fp8__multiplies_by_the_scale_of_each_block(
    kind: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    tensors = stored(kind, shape)
    scale = next(value for name, value in tensors.items() if "scale" in name)
    factors = (
        scale.numpy()
        if scale.dtype == torch.float32
        else 2.0 ** (scale.view(torch.uint8).numpy().astype(float) - 127)
    )
    got = decode(index_with(tmp_path, tensors), "x")
    want = fp8_values(tensors["x.weight"], factors)
    assert np.array_equal(got.numpy(), want.astype(np.float32))


@pytest.mark.parametrize("kind", ["mxfp4", "mxfp4-v4"])
def test_decode__mxfp4__follows_the_e2m1_table(kind: str, tmp_path: Path) -> None:
    tensors = stored(kind, (6, 96))
    codes, scales = (part.view(torch.uint8) for part in tensors.values())
    got = decode(index_with(tmp_path, tensors), "x")
    assert np.array_equal(got.numpy(), mxfp4_values(codes, scales))


def test_decode__gpt_oss__chooses_expert_and_rows(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 8, 2), generator=generator, dtype=torch.uint8)
    index = index_with(tmp_path, {"up_blocks": blocks, "up_scales": scales})
    want = [mxfp4_values(blocks[e].reshape(8, 32), scales[e]) for e in range(3)]
    assert np.array_equal(decode(index, "up").numpy(), np.stack(want))
    assert np.array_equal(decode(index, "up", expert=1).numpy(), want[1])
    odd = decode(index, "up", expert=2, rows=slice(1, None, 2))
    assert np.array_equal(odd.numpy(), want[2][1::2])
    nibbles, kept = fp4_of(index, "up", expert=2, rows=slice(1, None, 2))
    assert nibbles.shape == (4, 64)
    assert torch.equal(kept, scales[2][1::2])


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8-e8m0", "mxfp4", "mxfp4-v4"])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(100, 160), slice(3, 151, 7), slice(5, 5)])
def test_decode__some_rows__are_those_of_the_whole(kind: str, rows: slice, tmp_path: Path) -> None:
    index = index_with(tmp_path, stored(kind))
    assert torch.equal(decode(index, "x", rows=rows), decode(index, "x")[rows])


def test_e8m0__every_byte__is_an_exact_power_of_two() -> None:
    got = e8m0(torch.arange(255, dtype=torch.uint8)).double()
    want = torch.tensor([2.0 ** (u - 127) for u in range(255)], dtype=torch.float64)
    assert torch.equal(got, want)


def test_fp4_of__mxfp4__keeps_every_nibble_and_scale(tmp_path: Path) -> None:
    tensors = stored("mxfp4", (4, 64))
    codes = tensors["x.weight_packed"]
    codes[0, :16] = torch.arange(16) * 17  # all sixteen nibbles, zeros of one sign included
    codes[1] = 0
    nibbles, scales = fp4_of(index_with(tmp_path, tensors), "x")
    assert torch.equal(nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), codes)
    assert torch.equal(scales, tensors["x.weight_scale"])


@pytest.mark.parametrize("kind", ["bf16", "f64", "fp8", "fp8-e8m0"])
def test_fp4_of__other_formats__is_quantise_then_balance_in_any_tiling(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = stored(kind)
    tensors["x.weight"][:100] = 0  # one-signed zeros, over several tiles
    index = index_with(tmp_path, tensors)
    nibbles, scales = quantize_fp4(decode(index, "x"))
    want = balance_zeros(nibbles)
    assert not torch.equal(want, nibbles)
    for tile in (96, 96 * 7, 1 << 22):
        monkeypatch.setattr(quant_formats, "TILE_WEIGHTS", tile)
        got = fp4_of(index, "x")
        assert torch.equal(got[0], want)
        assert torch.equal(got[1], scales)
    picked = fp4_of(index, "x", rows=slice(1, None, 2))[0]
    assert torch.equal(picked, balance_zeros(quantize_fp4(decode(index, "x")[1::2])[0]))


def spoil(kind: str, part: str, value: float) -> dict[str, torch.Tensor]:
    tensors = stored(kind)
    name = next(name for name in tensors if ("scale" in name) == (part == "scales"))
    tensor = tensors[name]
    if tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
        tensor.view(torch.uint8)[0, 0] = int(value)
    elif tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8)[5, 3] = 0xFF
    else:
        tensor[0, 0] = value
    return tensors


@pytest.mark.parametrize(
    ("kind", "part", "value"),
    [
        ("bf16", "weights", float("nan")),
        ("f16", "weights", float("-inf")),
        ("f32", "weights", float("inf")),
        ("f64", "weights", 1e300),
        ("fp8", "weights", 0),
        ("fp8", "scales", float("nan")),
        ("fp8-scale", "scales", float("inf")),
        ("fp8-e8m0", "scales", 255),
        ("mxfp4", "scales", 255),
        ("mxfp4-v4", "scales", 255),
        ("mxfp4", "scales", 254),
    ],
)
def test_decode__invalid_number__names_tensor_and_part(
    kind: str, part: str, value: float, tmp_path: Path
) -> None:
    index = index_with(tmp_path, spoil(kind, part, value))
    for use in (decode, fp4_of, check_finite):
        with pytest.raises(MoetError) as caught:
            use(index, "x")
        assert caught.value.code == "MD-SRC-06"
        assert caught.value.facts == {"tensor": "x", "n_bad": 1, "part": part}


def test_fp4_of__largest_float32__still_decodes_to_finite_values(tmp_path: Path) -> None:
    largest = torch.finfo(torch.float32).max
    nibbles, scales = fp4_of(index_with(tmp_path, {"x.weight": torch.full((1, 32), largest)}), "x")
    assert torch.isfinite(fp4_values(nibbles, scales)).all()


def test_decode__unknown_layout__says_how_it_is_stored(tmp_path: Path) -> None:
    tensors = {
        "x.weight": torch.zeros(4, 16, dtype=torch.float8_e4m3fn),
        "x.weight_scale": torch.ones(3, 1),
        "table": torch.zeros(4, dtype=torch.int64),
    }
    index = index_with(tmp_path, tensors)
    with pytest.raises(MoetError, match=r"F8_E4M3 \[4, 16\] with weight_scale F32 \[3, 1\]") as e:
        decode(index, "x")
    assert e.value.code == "MD-SRC-05"
    with pytest.raises(MoetError, match="MD-SRC-05"):
        decode(index, "table")
    check_finite(index, "table")


@pytest.mark.parametrize("shape", [(4, 48), (4,), (2, 4, 32)])
def test_fp4_of__not_a_matrix_of_whole_blocks__is_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    index = index_with(tmp_path, {"x.weight": torch.zeros(shape)})
    with pytest.raises(MoetError, match="MD-SRC-05"):
        fp4_of(index, "x")


def test_check_finite__any_shape_and_tile__finds_the_bad_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quant_formats, "TILE_WEIGHTS", 8)
    good = {"s": torch.ones(()), "v": torch.ones(40), "m": torch.ones(9, 3), "e": torch.ones(0, 3)}
    index = index_with(tmp_path, good)
    for name in good:
        check_finite(index, name)
    for name in ("s", "v", "m"):
        bad = {name: good[name].clone()}
        bad[name].view(-1)[-1] = float("nan")
        with pytest.raises(MoetError, match="MD-SRC-06"):
            check_finite(index_with(tmp_path, bad), name)
