"""RMS norm, rotary embedding and YaRN against float64 and the family facts."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from moet_desk.kernels.kinds import RopeScaling
from moet_desk.kernels.reference import (
    apply_rope,
    rms_norm,
    rope_frequencies,
    rope_tables,
    rotate,
    yarn_mscale,
)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("width", [128, 100, 7168])
def test_rms_norm__against_float64(width: int, plus_one: bool) -> None:
    x, w = torch.randn(3, width) * 5, torch.randn(width)
    wide = x.double()
    factor = 1 + w.double() if plus_one else w.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * factor
    got = rms_norm(x, w, 1e-5, plus_one=plus_one)
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-7)


def test_rms_norm__alone_or_together__same_bits() -> None:
    x, w = torch.randn(8, 512), torch.randn(512)
    whole = rms_norm(x, w, 1e-6)
    for t in range(8):
        assert torch.equal(rms_norm(x[t], w, 1e-6), whole[t])
        assert torch.equal(rms_norm(x[t : t + 1], w, 1e-6)[0], whole[t])


def test_rms_norm__nan__in_its_row_alone() -> None:
    x = torch.randn(2, 64)
    x[1, 3] = float("nan")
    got = rms_norm(x, torch.ones(64), 1e-6)
    assert got[1].isnan().all()
    assert got[0].isfinite().all()


def test_rope_frequencies__no_scaling__powers_of_the_base() -> None:
    inv_freq, magnitude = rope_frequencies(64, 10000.0)
    want = [10000.0 ** (-2 * i / 64) for i in range(32)]
    assert inv_freq.tolist() == pytest.approx(want, rel=1e-7)
    assert (inv_freq.dtype, magnitude) == (torch.float32, 1.0)


@pytest.mark.parametrize("truncate", [True, False])
def test_rope_frequencies__yarn__written_out(truncate: bool) -> None:
    dim, base, factor, context = 64, 10000.0, 40.0, 4096
    scaling = RopeScaling(factor=factor, original_context=context, truncate=truncate)
    inv_freq, magnitude = rope_frequencies(dim, base, scaling)

    def border(turns: float) -> float:
        return dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = border(32), border(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    for i in range(dim // 2):
        ramp = min(max((i - low) / (high - low), 0), 1)
        plain = base ** (-2 * i / dim)
        assert inv_freq[i] == pytest.approx(plain * (1 - ramp) + plain / factor * ramp, rel=1e-6)
    assert inv_freq[0] == 1.0  # fast waves stay
    assert inv_freq[-1] == pytest.approx(base ** (-62 / 64) / factor)  # slow ones stretch
    assert magnitude == pytest.approx(0.1 * math.log(40) + 1)


def test_rope_frequencies__equal_borders__no_division_by_zero() -> None:
    turns = 1 / (2 * math.pi)  # a context of 1 makes both borders exactly 0
    scaling = RopeScaling(factor=32.0, original_context=1, beta_fast=turns, beta_slow=turns)
    inv_freq, _ = rope_frequencies(64, 50000.0, scaling)
    assert inv_freq[0] == 1.0
    assert inv_freq[1] == pytest.approx(50000.0 ** (-2 / 64) / 32)


@pytest.mark.parametrize(
    ("scaling", "magnitude"),
    [
        (RopeScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0), 1.0),  # DeepSeek-V3
        (RopeScaling(32.0, 4096, truncate=False), 1.3466),  # gpt-oss
        (RopeScaling(16.0, 65536, attention_factor=1.0), 1.0),  # DeepSeek-V4
    ],
)
def test_rope_frequencies__magnitudes_of_families(scaling: RopeScaling, magnitude: float) -> None:
    assert rope_frequencies(64, 10000.0, scaling)[1] == pytest.approx(magnitude, abs=1e-4)


def test_yarn_mscale__squares_of_families() -> None:
    squares = [yarn_mscale(f) ** 2 for f in (40.0, 32.0, 64.0)]
    assert squares == pytest.approx([1.874, 1.813, 2.005], abs=1e-3)
    assert yarn_mscale(1.0) == 1.0
    assert yarn_mscale(40.0, 0.0) == 1.0


@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rope__complex_turn__in_either_pairing(interleaved: bool) -> None:
    inv_freq, _ = rope_frequencies(16, 10000.0)
    x = torch.randn(2, 3, 16)
    got = apply_rope(x, torch.tensor([0, 5, 900]), inv_freq, 1.5, interleaved=interleaved)
    for n in range(2):
        for t, position in enumerate((0, 5, 900)):
            for i in range(8):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 8)
                z = complex(x[n, t, a], x[n, t, b])
                z *= 1.5 * cmath.exp(1j * position * float(inv_freq[i]))
                assert got[n, t, a] == pytest.approx(z.real, abs=2e-4)
                assert got[n, t, b] == pytest.approx(z.imag, abs=2e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rope__two_positions__product_knows_the_distance_only(interleaved: bool) -> None:
    inv_freq, _ = rope_frequencies(32, 10000.0)
    q, k = torch.randn(1, 32), torch.randn(1, 32)

    def product(at: int, back: int) -> float:
        turned = [
            apply_rope(v, torch.tensor([p]), inv_freq, interleaved=interleaved)
            for v, p in ((q, at), (k, back))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(17, 10) == pytest.approx(product(1007, 1000), abs=1e-3)


def test_rope_tables__any_place_in_the_call__same_bits() -> None:
    inv_freq, _ = rope_frequencies(32, 10000.0)
    positions = torch.arange(2000)
    cos, sin = rope_tables(positions, inv_freq)
    for t in (0, 1, 7, 1023, 1999):
        one = rope_tables(positions[t : t + 1], inv_freq)
        assert torch.equal(one[0][0], cos[t])
        assert torch.equal(one[1][0], sin[t])


def test_rotate__same_as_apply_rope() -> None:
    inv_freq, _ = rope_frequencies(32, 10000.0)
    x, positions = torch.randn(4, 6, 32), torch.arange(6) + 3
    tables = rope_tables(positions, inv_freq)
    for interleaved in (False, True):
        want = apply_rope(x, positions, inv_freq, interleaved=interleaved)
        assert torch.equal(rotate(x, *tables, interleaved=interleaved), want)
