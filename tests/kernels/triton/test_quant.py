"""int8 activations against the reference, in both orders, and behind the norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference
from moet_desk.kernels.triton.quant import quantize_rows, rms_norm_quantize
from tests.kernels.triton.moe_makers import plain_from_planar

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on zero blocks


def buffers(rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = width // 32
    planar = torch.empty(rows, 8, groups, dtype=torch.int32)
    return planar, torch.empty(rows, width, dtype=torch.int8), torch.empty(rows, groups)


@pytest.mark.parametrize("width", [32, 128, 2880, 4096])
def test_quantize_rows__random__bits_of_the_reference(width: int) -> None:
    x = torch.randn(5, width) * torch.logspace(-20, 20, 5)[:, None]
    planar, plain, scales = buffers(5, width)
    quantize_rows(x, plain, scales)
    want, want_scales = reference.quantize_activations(x)
    assert torch.equal(plain.float(), want)
    assert torch.equal(scales, want_scales)
    again = torch.empty_like(scales)
    quantize_rows(x, planar, again)
    assert torch.equal(plain_from_planar(planar), plain)
    assert torch.equal(again, scales)


def test_quantize_rows__zeros_weak_blocks_and_edges__bits_of_the_reference() -> None:
    x = torch.randn(4, 128)
    x[0, :32] = 0.0
    x[1, 32:64] *= 1e-33
    x[2] = torch.linspace(-1.0, 1.0, 128)  # halves: floor(v + 0.5) decides
    x[3] = torch.arange(128) / 127.0
    _, plain, scales = buffers(4, 128)
    quantize_rows(x, plain, scales)
    want, want_scales = reference.quantize_activations(x)
    assert torch.equal(plain.float(), want)
    assert torch.equal(scales, want_scales)


def test_quantize_rows__not_finite__shows_in_the_blocks_scale_alone() -> None:
    x = torch.randn(1, 96)
    x[0, 5], x[0, 40] = float("nan"), float("-inf")
    _, plain, scales = buffers(1, 96)
    quantize_rows(x, plain, scales)
    assert scales[0, 0].isnan()
    assert scales[0, 1] == float("inf")
    assert scales[0, 2].isfinite()
    assert plain[0, 32:64].abs().max() == 0  # 0 * inf is NaN in every product


@pytest.mark.parametrize("width", [96, 512, 2880])
@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm_quantize__rows__norm_close_and_codes_of_its_result(
    width: int, plus_one: bool
) -> None:
    x, weight, out = torch.randn(3, width) * 7, torch.randn(width), torch.empty(3, width)
    planar, plain, scales = buffers(3, width)
    rms_norm_quantize(x, weight, 1e-6, out=out, codes=planar, scales=scales, plus_one=plus_one)
    want = reference.rms_norm(x, weight, 1e-6, plus_one=plus_one)
    assert torch.allclose(out, want, rtol=1e-6, atol=1e-6)
    again = torch.empty_like(scales)
    quantize_rows(out, plain, again)
    assert torch.equal(plain_from_planar(planar), plain)
    assert torch.equal(scales, again)
