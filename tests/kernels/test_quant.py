"""Quantisers against the definition in exact arithmetic, and their corners."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from moet_desk.kernels.reference import (
    balance_zeros,
    base_codes,
    base_values,
    fp4_values,
    quantize_activations,
    quantize_fp4,
)
from tests.kernels.makers import random_matrix, real_values
from tests.kernels.test_layouts import NIBBLE_VALUES

MAGNITUDES = NIBBLE_VALUES[:8]


def slow_fp4(block: list[float]) -> tuple[list[int], int]:
    """The definition in rational numbers: nearest magnitude, ties to the lower one."""
    amax = max(abs(v) for v in block)
    e = -127
    if amax:
        while Fraction(amax) / 6 >= Fraction(2) ** e * Fraction(math.sqrt(2)) and e < 127:
            e += 1
    nibbles = []
    for v in block:
        u = abs(Fraction(v)) / Fraction(2) ** e
        best = min(range(8), key=lambda i: (abs(Fraction(MAGNITUDES[i]) - u), i))
        nibbles.append(best + 8 * (math.copysign(1, v) < 0))
    return nibbles, e + 127


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e-3, 3e30, 1e-36, 1e-42])
def test_quantize_fp4__random_blocks__equals_definition(dtype: torch.dtype, size: float) -> None:
    w = (torch.randn(4, 64, dtype=torch.float64) * size).to(dtype)
    nibbles, scales = quantize_fp4(w)
    for n in range(4):
        for g in range(2):
            want, scale = slow_fp4(w[n, 32 * g : 32 * g + 32].tolist())
            assert nibbles[n, 32 * g : 32 * g + 32].tolist() == want
            assert scales[n, g] == scale


def test_quantize_fp4__midpoints__go_to_the_lower_magnitude() -> None:
    w = torch.zeros(1, 32)
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    w[0, :7] = torch.tensor(midpoints)
    w[0, 7:14] = -torch.tensor(midpoints)
    w[0, 14] = 6.0
    nibbles, scales = quantize_fp4(w)
    assert scales[0, 0] == 127
    assert nibbles[0, :15].tolist() == [*range(7), *range(8, 15), 7]


def test_quantize_fp4__largest_weight_at_six_root_two__decides_the_scale() -> None:
    edge = torch.tensor(6 * math.sqrt(2), dtype=torch.float64)
    below, above = edge * (1 - 1e-12), edge * (1 + 1e-12)
    for power in (-60, 0, 60):
        w = torch.zeros(2, 32, dtype=torch.float64)
        w[:, 3] = torch.stack([below, above]) * 2.0**power
        nibbles, scales = quantize_fp4(w)
        assert scales[:, 0].tolist() == [127 + power, 128 + power]
        assert nibbles[:, 3].tolist() == [7, 6]  # 8.49 saturates at 6, 4.24 rounds to 4


def test_quantize_fp4__zeros__keep_their_sign_and_get_the_lowest_scale() -> None:
    w = torch.zeros(1, 64)
    w[0, 1::2] = -0.0
    nibbles, scales = quantize_fp4(w)
    assert nibbles[0].tolist() == [0, 8] * 32
    assert scales[0].tolist() == [0, 0]


def test_quantize_fp4__values_of_fp4__come_back_exactly() -> None:
    matrix = random_matrix(16, 128)
    matrix[0][:, ::32] = 7  # a block's amax of 6 keeps the scale
    again = quantize_fp4(fp4_values(*matrix))
    assert torch.equal(again[0], matrix[0])
    assert torch.equal(again[1], matrix[1])


def test_quantize_fp4__normal_weights__known_errors() -> None:
    w = torch.randn(256, 1024)
    nibbles, scales = quantize_fp4(w)
    fine = (fp4_values(nibbles, scales) - w).square().mean().sqrt()
    base = (base_values(base_codes(nibbles), scales) - w).square().mean().sqrt()
    assert fine == pytest.approx(0.1215, abs=0.003)
    assert base == pytest.approx(0.3686, abs=0.01)


def test_quantize_fp4__width_not_in_blocks__refused() -> None:
    with pytest.raises(ValueError, match="33"):
        quantize_fp4(torch.zeros(2, 33))


def test_balance_zeros__one_signed__alternate_by_parity() -> None:
    nibbles = random_matrix(8, 64)[0]
    nibbles[nibbles == 8] = 3
    nibbles[:, :4] = 0
    balanced = balance_zeros(nibbles)
    zero = (nibbles & 7) == 0
    k = torch.arange(64).expand(8, -1)
    assert torch.equal(balanced[zero], (k[zero] % 2 * 8).to(torch.uint8))
    assert torch.equal(balanced[~zero], nibbles[~zero])


@pytest.mark.parametrize(("negative", "changed"), [(4, True), (5, False), (96, True), (95, False)])
def test_balance_zeros__share_of_the_rarer_sign__five_per_cent_decides(
    negative: int, changed: bool
) -> None:
    nibbles = torch.full((1, 128), 3, dtype=torch.uint8)
    nibbles[0, :100] = 0
    nibbles[0, :negative] = 8
    assert torch.equal(balance_zeros(nibbles), nibbles) is not changed


def test_balance_zeros__no_zeros__unchanged() -> None:
    nibbles = torch.full((2, 32), 5, dtype=torch.uint8)
    assert torch.equal(balance_zeros(nibbles), nibbles)


def test_fp4_values__all_nibbles_and_finite_scales__exact() -> None:
    nibbles = torch.arange(16, dtype=torch.uint8).repeat(253, 2)  # [253, 32]
    scales = torch.arange(253, dtype=torch.uint8)[:, None]
    values = fp4_values(nibbles, scales)
    assert torch.equal(values.double(), real_values((nibbles, scales), NIBBLE_VALUES))
    assert values.isfinite().all()
    assert values[0, 1] == 2.0**-128  # the weakest scale is not flushed to zero


def test_base_values__all_codes_and_finite_scales__exact() -> None:
    codes = torch.arange(4, dtype=torch.uint8).repeat(253, 8)
    scales = torch.arange(253, dtype=torch.uint8)[:, None]
    values = base_values(codes, scales)
    assert torch.equal(values.double(), real_values((codes, scales), [-4, -1, 1, 4]))


def test_values__scale_255__nan() -> None:
    nibbles = torch.zeros(1, 32, dtype=torch.uint8)
    assert fp4_values(nibbles, torch.tensor([[255]], dtype=torch.uint8)).isnan().all()


def test_quantize_activations__random_tokens__equals_definition() -> None:
    x = torch.randn(3, 96) * torch.tensor([[1.0], [1e-20], [1e20]])
    q, s = quantize_activations(x)
    blocks = x.view(3, 3, 32)
    amax = blocks.abs().amax(-1)
    assert torch.equal(s, amax / 127)
    inverse = torch.tensor(127.0) / amax
    want = torch.floor(blocks * inverse[..., None] + 0.5).view(3, 96)
    assert torch.equal(q, want)
    assert q.abs().max() == 127
    error = (q.double().view(3, 3, 32) * s.double()[..., None] - blocks.double()).abs()
    assert (error <= 0.5001 * s[..., None].double()).all()


def test_quantize_activations__zero_and_vanishing_blocks__zeros() -> None:
    x = torch.zeros(1, 64)
    x[0, 32:] = 1e-39
    q, s = quantize_activations(x)
    assert not q.any()
    assert s.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_quantize_activations__not_finite__shows_in_its_block_alone(bad: float) -> None:
    x = torch.randn(2, 64)
    clean_q, clean_s = quantize_activations(x)
    x[1, 40] = bad
    q, s = quantize_activations(x)
    assert not s[1, 1].isfinite()
    assert q[1, 40].isnan()
    assert torch.equal(q[0], clean_q[0])
    assert torch.equal(q[1, :32], clean_q[1, :32])
    assert torch.equal(s[0], clean_s[0])


def test_quantize_activations__alone_or_together__same_bits() -> None:
    x = torch.randn(8, 512)
    q, s = quantize_activations(x)
    for t in range(8):
        one = quantize_activations(x[t : t + 1])
        assert torch.equal(one[0][0], q[t])
        assert torch.equal(one[1][0], s[t])
