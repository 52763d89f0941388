"""Decode's expert kernels against the reference: the same bits, whoever shares an expert."""

from __future__ import annotations

import pytest
import torch

from moet_desk.kernels import reference
from moet_desk.kernels.kinds import Activations, Glu
from moet_desk.kernels.layouts import ExpertLayout, pack_expert
from moet_desk.kernels.triton.experts import Tile, combine, experts_gate_up, tiles_for
from tests.kernels.makers import Expert, quads_expert
from tests.kernels.triton.moe_makers import (
    down_columns,
    planar_codes,
    random_bias,
    random_step,
    run_step,
    wanted_columns,
)

SHAPES = [(96, 32, 2), (128, 64, 2), (1056, 32, 1)]  # 3, 4 and 33 blocks


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize(("hidden", "inter", "n_tokens"), SHAPES)
def test_step__random_experts__reference_bits_up_to_swiglu(
    hidden: int, inter: int, n_tokens: int, fine: bool
) -> None:
    step = random_step(hidden, inter, n_tokens, 2, fine=fine)
    got = run_step(step)
    products = step.products().view(-1, 2 * inter)
    want = reference.swiglu(products[:, :inter], products[:, inter:])
    assert torch.allclose(got.hidden, want, rtol=1e-6, atol=0.0)  # exp differs in the last bit
    codes, scales = planar_codes(got.hidden, step.kind)
    assert torch.equal(got.codes, codes)
    assert torch.equal(got.scales, scales)
    down = step.down_products(got.codes, got.scales)
    assert torch.equal(got.part, down.view(got.part.shape))
    assert float((down - step.parts()).norm() / down.norm()) < 1e-3
    assert torch.equal(got.out, reference.combine(got.part.view(n_tokens, 2, hidden), step.weights))


@pytest.mark.parametrize("scale", [0, 119, 251])
@pytest.mark.parametrize("fine", [False, True])
def test_down__quads_of_nibbles__weights_and_scales_of_the_definition(
    fine: bool, scale: int
) -> None:
    expert = quads_expert(256, 128, scale=scale, turns=[5])
    got = down_columns(expert, [0, 45, 127], device="cpu", fine=fine)
    assert torch.equal(got, wanted_columns(expert, [0, 45, 127], fine=fine))


@pytest.mark.parametrize("fine", [False, True])
def test_step__limit__cut_like_the_reference(fine: bool) -> None:
    step = random_step(64, 32, 1, 2, fine=fine)
    step.x *= 40
    got = run_step(step, glu=Glu(0.5))
    products = step.products().view(-1, 64)
    want = reference.swiglu(products[:, :32], products[:, 32:], 0.5)
    assert torch.allclose(got.hidden, want, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(got.hidden, run_step(step).hidden)


OSS = Glu(limit=0.5, alpha=1.702, shift=1.0)


@pytest.mark.parametrize("fine", [False, True])
def test_step__biases_and_another_glu__as_the_reference(fine: bool) -> None:
    step = random_step(64, 32, 2, 2, fine=fine)
    step.bias = random_bias(step.layout, len(step.experts))
    got = run_step(step, glu=OSS)
    products = step.products() + step.bias.gate_up[step.ids].float()
    gates, ups = products.view(-1, 64).chunk(2, 1)
    assert torch.allclose(got.hidden, reference.gated(gates, ups, OSS), rtol=1e-6, atol=1e-9)
    down = step.down_products(got.codes, got.scales) + step.bias.down[step.ids].float()
    assert torch.equal(got.part, down.view(got.part.shape))
    want = step.parts(OSS)
    assert float((down - want).norm() / want.norm()) < 1e-3


@pytest.mark.parametrize("fine", [False, True])
def test_step__tokens_together__each_as_alone(fine: bool) -> None:
    step = random_step(64, 32, 3, 2, fine=fine, n_experts=3)
    together = run_step(step)
    assert len(step.ids.unique()) < step.ids.numel()
    for t in range(3):
        alone = random_step(64, 32, 1, 2, fine=fine, n_experts=3)
        alone.experts, alone.ids, alone.x = step.experts, step.ids[t : t + 1], step.x[t : t + 1]
        alone.weights = step.weights[t : t + 1]
        got = run_step(alone)
        assert torch.equal(got.part, together.part[2 * t : 2 * t + 2])
        assert torch.equal(got.out[0], together.out[t])


@pytest.mark.parametrize("fine", [False, True])
def test_step__any_tile__same_bits(fine: bool) -> None:
    step = random_step(64, 64, 2, 2, fine=fine)
    want = run_step(step)
    tiles = Tile(8, 1), Tile(16, 2)
    for gate_up, down, last in ((*tiles, False), (*tiles, True), (Tile(64, 4), Tile(64, 1), False)):
        got = run_step(step, gate_up=gate_up, down=down, last=last)
        assert torch.equal(got.codes, want.codes)
        assert torch.equal(got.scales, want.scales)
        assert torch.equal(got.out, want.out)


@pytest.mark.parametrize("fine", [False, True])
def test_step__codes_of_the_other_kind__refused(fine: bool) -> None:
    step = random_step(64, 32, 1, 1, fine=fine)
    other = Activations.INT8 if fine else Activations.INT15
    codes, scales = planar_codes(step.x, other)
    with pytest.raises(ValueError, match="wrong kind"):
        experts_gate_up(step.pool("cpu"), codes, scales, out=torch.empty(1, 32))


def test_step__largest_weights_and_activations__exact() -> None:
    step = random_step(96, 32, 1, 1, fine=True)
    nibbles = torch.full((32, 96), 7, dtype=torch.uint8)
    nibbles[1::2] = 15
    gate = (nibbles, torch.full((32, 3), 120, dtype=torch.uint8))
    down = (nibbles.T.contiguous(), torch.full((96, 1), 120, dtype=torch.uint8))
    row, fine_row = pack_expert(gate, gate, down)
    step.experts = [Expert(step.layout, gate, down, row, fine_row)] * 4
    step.x = torch.full((1, 96), 3.0)
    step.x[0, 32:] *= -1
    got = run_step(step)
    products = step.products().view(1, 64)
    want = reference.swiglu(products[:, :32], products[:, 32:])
    assert torch.allclose(got.hidden, want, rtol=1e-6, atol=0.0)
    assert torch.equal(got.part, step.down_products(got.codes, got.scales).view(1, 96))


def test_step__nan_in_one_token__that_token_only() -> None:
    step = random_step(96, 32, 2, 2, fine=False)
    clean = run_step(step).out
    step.x[1, 70] = float("nan")
    got = run_step(step).out
    assert got[1].isnan().all()
    assert torch.equal(got[0], clean[0])


def test_step__extreme_scales__still_the_reference() -> None:
    step = random_step(96, 32, 1, 2, fine=False)
    for expert in step.experts:
        layout = expert.layout
        begin = 8 * layout.gate_up.n * layout.gate_up.groups
        expert.base_row[begin : begin + 6] = torch.tensor([0, 1, 252, 0, 2, 128], dtype=torch.uint8)
    step.x[0, :32] *= 1e-30
    products = step.products().view(-1, 64)
    want = reference.swiglu(products[:, :32], products[:, 32:])
    assert torch.allclose(run_step(step).hidden, want, rtol=1e-6, atol=0.0, equal_nan=True)


def test_combine__pairs_without_an_expert__nothing_of_theirs_is_read() -> None:
    part, weights, residual = torch.randn(6, 70), torch.rand(2, 3), torch.randn(2, 70)
    ids, out = torch.tensor([[4, -1, 0], [-1, -1, -1]], dtype=torch.int32), torch.empty(2, 70)
    part[[1, 3, 4, 5]], weights[ids < 0] = torch.nan, 0.0
    combine(part, weights, base=None, residual=residual, out=out, ids=ids)
    assert torch.equal(out[1], residual[1])
    some = part[:3].nan_to_num(nan=0.0).view(1, 3, 70)
    assert torch.equal(out[:1], residual[:1] + reference.combine(some, weights[:1]))


def test_combine__shared_expert_and_residual__added_last() -> None:
    part, weights = torch.randn(6, 700), torch.rand(2, 3)
    base, residual, out = torch.randn(2, 700), torch.randn(2, 700), torch.empty(2, 700)
    combine(part, weights, base=base, residual=residual, out=out)
    want = residual + (reference.combine(part.view(2, 3, 700), weights) + base)
    assert torch.equal(out, want)


@pytest.mark.parametrize(
    ("hidden", "inter"), [(4096, 2048), (6144, 2048), (2048, 768), (2880, 2880), (512, 128)]
)
@pytest.mark.parametrize("fine", [False, True])
def test_tiles_for__known_shapes__divide_them(hidden: int, inter: int, fine: bool) -> None:
    tiles = tiles_for(ExpertLayout(hidden, inter), fine=fine)
    assert inter % tiles.gate_up.rows == 0
    assert hidden % tiles.down.rows == 0
    assert {tiles.gate_up.warps, tiles.down.warps} <= {1, 2, 4, 8}
