"""Asymmetric 2-bit levels: the least error four levels can have, and weights made with them."""

from __future__ import annotations

from itertools import combinations_with_replacement
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moet_desk.engine.ablation import VALUES, best_levels, expand_asymmetric
from moet_desk.engine.evaluate import measure, opened_core, windows_of
from moet_desk.engine.handle import Codebook, EngineOptions, Quality
from moet_desk.kernels.layouts import pack_expert
from moet_desk.kernels.reference import expand_base, expand_fine, quantize_fp4
from moet_desk.store.pack_format import Plane
from tests.kernels.makers import Expert, random_expert


def error(importance: Tensor, levels: Tensor) -> float:
    off = torch.tensor(VALUES, dtype=torch.float64) - levels.double()
    return float((importance * off.square()).sum())


def slot_of(expert: Expert) -> Tensor:
    slot = torch.full((expert.layout.slot_floats,), float("nan"))
    expand_asymmetric(expert.base_row, expert.fine_row, expert.layout, slot)
    return slot


def test_best_levels__four_values__no_error() -> None:
    importance = torch.zeros(15, dtype=torch.float64)
    importance[[0, 3, 7, 12]] = torch.tensor([1.0, 5.0, 2.0, 0.5], dtype=torch.float64)
    levels = best_levels(importance)
    assert error(importance, levels) == 0
    assert levels[[0, 3, 7, 12]].tolist() == [VALUES[i] for i in (0, 3, 7, 12)]


def test_best_levels__random__no_set_of_a_grid_is_better() -> None:
    importance = torch.rand(15, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    levels = best_levels(importance)
    assert len(levels.unique()) == 4
    best = error(importance, levels)
    values = torch.tensor(VALUES, dtype=torch.float64)
    grid = [half / 2 for half in range(-12, 13)]
    for chosen in combinations_with_replacement(grid, 4):
        steps = torch.tensor(chosen, dtype=torch.float64)
        nearest = steps[(values[:, None] - steps).abs().argmin(1)]
        assert error(importance, nearest) >= best - 1e-9


def test_expand_asymmetric__weights_with_many_zeros__less_error_and_lopsided() -> None:
    def part(n: int, k: int) -> tuple[Tensor, Tensor]:
        return quantize_fp4(torch.randn(n, k).pow(3))

    torch.manual_seed(4)
    gate, up, down = part(64, 96), part(64, 96), part(96, 64)
    plain = random_expert(96, 64)  # for its layout
    expert = Expert(plain.layout, gate, down, *pack_expert(gate, up, down))
    exact, base, asymmetric = expert.fine_slot(), expert.base_slot(), slot_of(expert)
    assert (asymmetric - exact).norm() < (base - exact).norm()
    # the levels, by the units of the first block of gate_up
    unit = 2.0 ** (int(gate[1][0, 0]) - 127)
    levels = {round(float(v) / unit, 4) for v in asymmetric[: 2 * 64 * 96].view(96, 128)[:32, 0]}
    assert len(levels) <= 4
    assert {-level for level in levels} != levels


@pytest.mark.parametrize(("hidden", "inter"), [(96, 160), (32, 32)])
def test_expand_asymmetric__each_matrix__four_levels_in_the_places_of_the_weights(
    hidden: int, inter: int
) -> None:
    torch.manual_seed(5)
    expert = random_expert(hidden, inter)
    got, exact = slot_of(expert), expert.fine_slot()
    assert got.isfinite().all()
    split = expert.layout.gate_up.n * expert.layout.gate_up.k
    for part, want, (_, scales), n in (
        (got[:split], exact[:split], expert.gate_up, 2 * inter),
        (got[split:], exact[split:], expert.down, hidden),
    ):
        unit = torch.exp2(scales.float() - 127).repeat_interleave(32, 1).T
        levels, values = part.view(-1, n) / unit, want.view(-1, n) / unit
        assert len(levels.unique()) == 4
        for level in levels.unique():  # a level stands for neighbouring values
            inside = values[levels == level]
            others = values[levels != level]
            assert not ((others >= inside.min()) & (others <= inside.max())).any()


def test_codebook__demo__changes_fast_and_leaves_exact(demo_pack: Path) -> None:
    text_of = "The tailor mended a coat, and the miller waited for the wind. " * 2
    found = {}
    for codebook in Codebook:
        options = EngineOptions(context=256, save_heat=False, codebook=codebook)
        with opened_core(demo_pack, options) as (core, text):
            windows = windows_of(text, [text_of], size=core.plan.context)
            found[codebook] = measure(core, windows, (Quality.FAST, Quality.EXACT)).nll
            row = core.arena.row(Plane.BASE, 5).clone()
            fine = core.arena.row(Plane.FINE, 5).clone()
            slots = [torch.empty(core.reader.layout.slot_floats) for _ in range(3)]
    one, other = found[Codebook.SYMMETRIC], found[Codebook.ASYMMETRIC]
    assert one[Quality.EXACT] == other[Quality.EXACT]
    assert one[Quality.FAST] != other[Quality.FAST]
    layout, (exact, base, asymmetric) = random_expert(512, 128).layout, slots
    expand_fine(row, fine, layout, exact)
    expand_base(row, layout, base)
    expand_asymmetric(row, fine, layout, asymmetric)
    assert (asymmetric - exact).norm() < (base - exact).norm()
