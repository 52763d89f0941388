"""Integer activations against the reference, of both kinds, in both orders, and behind the norm."""

from __future__ import annotations

import pytest
import torch

from moet_desk.kernels import reference
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.triton.quant import planar_shape, rms_norm_quantize
from tests.kernels.triton.moe_makers import code_values, plain_codes, planar_codes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on zero blocks

KINDS = pytest.mark.parametrize("kind", list(Activations), ids=lambda kind: kind.name)


@KINDS
@pytest.mark.parametrize("width", [32, 128, 2880, 4096])
def test_quantize_rows__random__bits_of_the_reference(width: int, kind: Activations) -> None:
    x = torch.randn(5, width) * torch.logspace(-20, 20, 5)[:, None]
    want, want_scales = reference.quantize_activations(x, kind)
    for codes, scales in (plain_codes(x, kind), planar_codes(x, kind)):
        assert torch.equal(code_values(codes), want)
        assert torch.equal(scales, want_scales)


@KINDS
def test_quantize_rows__zeros_weak_blocks_and_edges__bits_of_the_reference(
    kind: Activations,
) -> None:
    x = torch.randn(4, 128)
    x[0, :32] = 0.0
    x[1, 32:64] *= 1e-33
    x[2] = torch.linspace(-1.0, 1.0, 128)  # halves: floor(v + 0.5) decides
    x[3] = torch.arange(128) / 127.0
    codes, scales = plain_codes(x, kind)
    want, want_scales = reference.quantize_activations(x, kind)
    assert torch.equal(code_values(codes), want)
    assert torch.equal(scales, want_scales)


def test_quantize_rows__every_code_of_15_bits__kept() -> None:
    every = torch.arange(-32512, 32513).float()
    blocks = torch.cat([every, every.new_zeros(-len(every) % (31 * 32))]).view(-1, 31)
    x = torch.cat([torch.full((len(blocks), 1), 32512.0), blocks], dim=1)  # scale 1
    x = x.view(-1, 1024)  # few long rows: each is a program to interpret
    for codes, scales in (f(x, Activations.INT15) for f in (plain_codes, planar_codes)):
        assert torch.equal(scales, torch.ones_like(scales))
        assert torch.equal(code_values(codes), x)


@KINDS
def test_quantize_rows__not_finite__shows_in_the_blocks_scale_alone(kind: Activations) -> None:
    x = torch.randn(1, 96)
    x[0, 5], x[0, 40] = float("nan"), float("-inf")
    codes, scales = plain_codes(x, kind)
    assert scales[0, 0].isnan()
    assert scales[0, 1] == float("inf")
    assert scales[0, 2].isfinite()
    assert code_values(codes)[0, 32:64].abs().max() == 0  # 0 * inf is NaN in every product


@KINDS
@pytest.mark.parametrize("width", [96, 512, 2880])
@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm_quantize__rows__norm_close_and_codes_of_its_result(
    width: int, plus_one: bool, kind: Activations
) -> None:
    x, weight, out = torch.randn(3, width) * 7, torch.randn(width), torch.empty(3, width)
    codes = torch.empty(3, *planar_shape(width, kind), dtype=torch.int32)
    scales = torch.empty(3, width // 32)
    rms_norm_quantize(x, weight, 1e-6, out=out, codes=codes, scales=scales, plus_one=plus_one)
    want = reference.rms_norm(x, weight, 1e-6, plus_one=plus_one)
    assert torch.allclose(out, want, rtol=1e-6, atol=1e-6)
    again, again_scales = planar_codes(out, kind)
    assert torch.equal(codes, again)
    assert torch.equal(scales, again_scales)
