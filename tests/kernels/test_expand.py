"""A slot holds exactly the weights of its rows."""

from __future__ import annotations

import pytest
import torch

from moet_desk.kernels.layouts import base_codes
from moet_desk.kernels.reference import base_values, expand_base, expand_fine, fp4_values
from moet_desk.kernels.reference.quant import MAX_FINITE_SCALE
from tests.kernels.makers import Expert, quads_expert, random_expert

SHAPES = [(512, 128), (64, 32), (96, 160), (32, 32)]


@pytest.mark.parametrize(("hidden", "inter"), SHAPES)
def test_expand_base__random_expert__levels_transposed(hidden: int, inter: int) -> None:
    expert = random_expert(hidden, inter, low=0, high=253)
    parts = [base_values(base_codes(nib), scale) for nib, scale in (expert.gate_up, expert.down)]
    want = torch.cat([part.T.reshape(-1) for part in parts])
    assert torch.equal(expert.base_slot(), want)


@pytest.mark.parametrize(("hidden", "inter"), SHAPES)
def test_expand_fine__random_expert__fp4_transposed(hidden: int, inter: int) -> None:
    expert = random_expert(hidden, inter, low=0, high=253)
    want = torch.cat([fp4_values(*part).T.reshape(-1) for part in (expert.gate_up, expert.down)])
    assert torch.equal(expert.fine_slot(), want)


@pytest.mark.parametrize("turn", range(8))
def test_expand__every_quad_of_nibbles_and_every_finite_scale__bits_of_the_definition(
    turn: int,
) -> None:
    # gate_up holds all 65,536 quads once, down a half of them
    expert = quads_expert(4096, 32, scale=127, turns=[turn])
    fine, base = transposed(expert, fine=True), transposed(expert, fine=False)
    for scale in range(turn, MAX_FINITE_SCALE + 1, 8):
        set_scales(expert, scale)
        unit = 2.0 ** (scale - 127)
        assert same_bits(expert.fine_slot(), (fine * unit).float()), scale
        assert same_bits(expert.base_slot(), (base * unit).float()), scale


def set_scales(expert: Expert, scale: int) -> None:
    """Write one scale to all blocks of a row: each matrix has its scales behind its codes."""
    end = 0
    for matrix in (expert.layout.gate_up, expert.layout.down):
        end += matrix.base_bytes
        expert.base_row[end - matrix.n * matrix.groups : end] = scale


def transposed(expert: Expert, *, fine: bool) -> torch.Tensor:
    """The slot of scale 1, float64: level or FP4 value of each nibble. -0 is 0: a slot holds no
    sign of an exact zero, which no product could show; that of its level it holds.
    """
    parts = [
        fp4_values(nib, scale) + 0.0 if fine else base_values(base_codes(nib), scale)
        for nib, scale in (expert.gate_up, expert.down)
    ]
    return torch.cat([part.T.reshape(-1) for part in parts]).double()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_expand__row_inside_a_bigger_buffer__same_slot() -> None:
    expert = random_expert(64, 32)
    arena = torch.randint(0, 256, (3, expert.base_row.numel()), dtype=torch.uint8)
    arena[1] = expert.base_row
    pool = torch.zeros(3, expert.layout.slot_floats)
    expand_base(arena[1], expert.layout, pool[1])
    assert torch.equal(pool[1], expert.base_slot())
    assert not pool[0].any()
    assert not pool[2].any()


def test_expand_fine__digit_words_out_of_range__no_reading_past_the_table() -> None:
    expert = random_expert(64, 32)
    fine = torch.full_like(expert.fine_row, 255)  # words of 1023; the largest real one is 624
    slot = torch.empty(expert.layout.slot_floats)
    expand_fine(expert.base_row, fine, expert.layout, slot)
    assert slot.isfinite().all()


def test_expand_base__scale_255__shows_as_nan() -> None:
    expert = random_expert(64, 32)
    row = expert.base_row.clone()
    row[8 * 64 * 2] = 255  # the first scale of gate_up [64, 64]
    slot = torch.empty(expert.layout.slot_floats)
    expand_base(row, expert.layout, slot)
    assert slot.isnan().sum() == 32
