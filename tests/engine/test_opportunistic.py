"""Opportunistic answers: FP4 experts where a 4-bit slot holds them, asked for, and marked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moet_desk.engine.cuda.loader import load as load_cuda
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.loader import Core
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import Plane
from tests.engine.oracle import loaded, logits_of
from tests.engine.test_balanced import REQUESTS, usage_of
from tests.engine.test_promise import answer, engine

IDS = [300, 17, 4, 129, 55, 300, 8]
ROWS = [1] * len(IDS)  # decode rows


def fill_fine(core: Core, layers: range) -> None:
    """Put all FP4 experts of some layers into slots."""
    for layer in layers:
        for expert in range(32):
            core.residency.slots(Plane.FINE, layer, [expert])


def test_logits__nothing_or_everything_in_4_bit_slots__those_of_fast_and_exact(
    demo_pack: Path,
) -> None:
    with loaded(demo_pack, fine_slots=256) as core:
        fast = logits_of(core, IDS, plane=Plane.BASE, sizes=ROWS)
        exact = logits_of(core, IDS, plane=Plane.FINE, sizes=ROWS)
    with loaded(demo_pack, fine_slots=256, opportunistic=True) as core:
        assert torch.equal(logits_of(core, IDS, plane=Plane.BASE, sizes=ROWS), fast)
        fill_fine(core, range(4))
        mixed = logits_of(core, IDS, plane=Plane.BASE, sizes=ROWS)
        fill_fine(core, range(4, 8))
        assert torch.equal(logits_of(core, IDS, plane=Plane.BASE, sizes=ROWS), exact)
    assert not torch.equal(mixed, fast)
    assert not torch.equal(mixed, exact)


def test_experts__some_in_4_bit_slots__each_computed_by_its_own_weights(demo_pack: Path) -> None:
    ids, alone = torch.tensor([[9, 2, 5, 7]]), torch.eye(4)

    def outputs(core: Core, plane: Plane) -> list[torch.Tensor]:
        """What each of the four experts makes of the same input."""
        x = torch.randn(1, core.spec.hidden, generator=torch.Generator().manual_seed(1))
        return [core.decoder._experts[plane](3, x, ids, alone[i : i + 1]) for i in range(4)]

    with loaded(demo_pack, fine_slots=8) as core:
        fast, exact = outputs(core, Plane.BASE), outputs(core, Plane.FINE)
    with loaded(demo_pack, fine_slots=8, opportunistic=True) as core:
        core.residency.slots(Plane.FINE, 3, [5, 9])
        mixed = outputs(core, Plane.BASE)
        resident = core.residency.fine_fill(idle=True).resident
    wanted = [exact[0], fast[1], exact[2], fast[3]]
    assert all(torch.equal(a, b) for a, b in zip(mixed, wanted, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(fast, exact, strict=True))
    assert sorted(resident) == [3 * 32 + 5, 3 * 32 + 9]  # nothing was fetched for it


def test_answers__asked_for__differ_and_say_so_exact_ones_do_neither(demo_pack: Path) -> None:
    exact, fast = REQUESTS[2:]
    with engine(demo_pack) as handle:
        wanted = [answer(handle, [one])[0] for one in (exact, fast)]
        assert not usage_of(handle, fast).opportunistic
        assert not handle.snapshot().opportunistic
    with engine(demo_pack, opportunistic=True, hot_set=False, fine_slots=128) as handle:
        assert handle.snapshot().opportunistic
        info = handle.model()
        assert info is not None
        assert info.opportunistic
        assert answer(handle, [fast]) == [wanted[1]]  # no 4-bit slot is filled yet
        assert answer(handle, [exact]) == [wanted[0]]
        assert answer(handle, [fast]) != [wanted[1]]
        assert usage_of(handle, fast).opportunistic
        assert not usage_of(handle, exact).opportunistic


def test_load__on_a_card__refused_with_the_next_step(demo_pack: Path) -> None:
    options = EngineOptions(opportunistic=True, save_heat=False)
    with pytest.raises(MoetError) as caught:
        load_cuda(demo_pack, options, device=torch.device("cpu"))
    assert caught.value.code == "MD-GPU-09"
    assert "engine.opportunistic" in caught.value.do
