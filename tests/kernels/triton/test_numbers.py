"""Codes of small number formats: the twin's bytes, and the values torch gives them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.reference import kv_formats
from moet_desk.kernels.triton import numbers

SIZE = 4096


@triton.jit
def _encode_kernel(x, out, FORM: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    if FORM == "e4m3":
        tl.store(out + at, numbers.e4m3_code(value))
    elif FORM == "e2m1":
        tl.store(out + at, numbers.e2m1_code(value))
    else:
        tl.store(out + at, numbers.bf16_code(value))


@triton.jit
def _decode_kernel(codes, out, FORM: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    code = tl.load(codes + at)
    if FORM == "e4m3":
        tl.store(out + at, numbers.e4m3_value(code, False))
    else:
        tl.store(out + at, numbers.e2m1_value(code.to(tl.int32)))


def samples() -> Tensor:
    """Every size of exponent, halves between codes, the edges, zeros and what is no number."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    edges = torch.tensor([0.0, -0.0, 448, 449, 464, 1e9, torch.inf, -torch.inf, torch.nan])
    small = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.5, 6.0, 7.0])
    fixed = torch.cat([codes, middles, -middles, edges, small, -small])
    wide = torch.randn(SIZE - len(fixed)) * 10 ** (torch.rand(SIZE - len(fixed)) * 8 - 5)
    return torch.cat([fixed, wide])


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("form", ["e4m3", "e2m1", "bf16"])
def test_encode__all_kinds_of_numbers__the_twins_codes(form: str) -> None:
    x = samples()
    want = {
        "e4m3": lambda: kv_formats._to_e4m3(x).view(torch.uint8),
        "e2m1": lambda: kv_formats.e2m1_nibbles(x),
        "bf16": lambda: x.bfloat16().view(torch.int16),
    }[form]()
    got = torch.empty_like(want)
    _encode_kernel[(1,)](x, got, form, SIZE)
    if form == "bf16":  # which NaN it is does not matter
        nan = x.isnan()
        assert got.view(torch.bfloat16)[nan].isnan().all()
        got[nan] = want[nan]
    assert torch.equal(got, want)


def test_decode__every_code__exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    got = torch.empty(256)
    _decode_kernel[(1,)](codes, got, "e4m3", 256)
    want = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(got.nan_to_num(nan=1e9), want.nan_to_num(nan=1e9))
    assert got.isnan().sum() == 2
    _decode_kernel[(1,)](codes, got, "e2m1", 16)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert torch.equal(got[:16], torch.cat([sizes, -sizes]))
