"""The hot FP4 set over a device's pools, with the CPU as the device: tables, bytes, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moet_desk.engine.cuda.loader import CudaCore, load
from moet_desk.engine.cuda.mailbox_server import MailboxServer
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.hot_set import HotSet
from moet_desk.engine.promotion import Promotion
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import Tier


@contextmanager
def loaded(pack: Path, **sizes: Any) -> Iterator[CudaCore]:
    options = EngineOptions(
        save_heat=False, kv_format="f32", context=64, ram_bytes=10**9, vram_bytes=10**9, **sizes
    )
    core = load(pack, options, device=torch.device("cpu"))
    try:
        yield core
    finally:
        core.close()


def fine_rows(core: CudaCore) -> set[int]:
    """The rows in 4-bit slots, after a check of every table and byte."""
    pool = core.residency._pools[Plane.FINE]
    tables, buffer = pool.tables, bytearray(core.reader.meta.fine_stride)
    owner, slot_of = tables.owner.tolist(), tables.slot_of.tolist()
    free = tables.free[: int(tables.n_free)].tolist()
    held = {row: slot for slot, row in enumerate(owner) if row >= 0}
    assert held == {row: slot for row, slot in enumerate(slot_of) if slot >= 0}
    assert sorted([*free, *held.values()]) == list(range(len(owner)))
    for row, slot in held.items():
        core.reader.read_row(Plane.FINE, row, memoryview(buffer))
        assert bytes(pool.slots[slot].numpy()) == bytes(buffer)
    return set(held)


HOT = [
    (row, float(heat)) for row, heat in zip([200, 3, 90, 41, 5, 170], range(9, 3, -1), strict=True)
]


def test_turn__saved_heat__hottest_rows_lie_in_4_bit_slots(demo_pack: Path) -> None:
    with loaded(demo_pack, fine_slots=36) as core:
        core.residency.restore_heat(HOT)
        hot_set = HotSet(core.residency, 0.0)
        assert [hot_set.turn(t, idle=False) for t in (1.0, 2.0, 3.0)] == [4, 2, 0]
        assert fine_rows(core) == {row for row, _ in HOT}
        counters = core.residency.counters(step_s=0.0)
        assert counters.promotions == 6
        assert counters.bytes_promoted == 6 * core.reader.meta.fine_stride
        tiers = core.residency.view().tiers
        assert all(tiers[row // 32][row % 32] == Tier.FINE for row, _ in HOT)


def test_restore_heat__steps_were_made_already__heat_is_what_was_saved(demo_pack: Path) -> None:
    """Loading on a card makes some, of which clocks differ by pool."""
    with loaded(demo_pack, fine_slots=36) as core:
        for plane, clock in ((Plane.BASE, 10), (Plane.FINE, 5)):
            core.pools[plane].tables.clock.fill_(clock)
        core.residency.restore_heat(HOT)
        assert core.residency.hottest() == HOT
        fine = core.residency._warmth(Plane.FINE)
        assert np.exp2(fine)[HOT[0][0]] == pytest.approx(HOT[0][1])


def test_promote__taken_slots__the_replaced_rows_lose_theirs(demo_pack: Path) -> None:
    with loaded(demo_pack, fine_slots=36) as core:
        core.residency.promote([Promotion(row) for row in range(36)])
        core.residency.promote([Promotion(100, replaces=7), Promotion(255, replaces=0)])
        assert fine_rows(core) == {*range(36), 100, 255} - {0, 7}


def test_fill__rows_on_disk__never_promoted_not_even_while_idle(demo_pack: Path) -> None:
    with loaded(demo_pack, fine_slots=36, arena_rows=70) as core:
        may = core.residency.fine_fill(idle=True).may
        both = core.arena.present(Plane.FINE) & core.arena.present(Plane.BASE)
        assert np.array_equal(may, both[: len(may)])
        assert 0 < may.sum() < len(may)


def test_fill__a_read_is_still_under_way__nothing_may_be_copied(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place may be another row's that the table still shows."""
    with loaded(demo_pack, fine_slots=36, arena_rows=70) as core:
        assert core.residency.fine_fill(idle=False).may.any()
        monkeypatch.setattr(MailboxServer, "settle", lambda self, limit_s: False)
        assert not core.residency.fine_fill(idle=False).may.any()


def test_fill__heat__uses_of_either_pool_by_its_own_clock(demo_pack: Path) -> None:
    with loaded(demo_pack, fine_slots=36) as core:
        base, fine = (core.residency._pools[plane].tables for plane in (Plane.BASE, Plane.FINE))
        assert not core.residency.fine_fill(idle=False).heat.any()
        base.clock.fill_(160)
        fine.clock.fill_(16)
        base.warmth[9] = 160 / 16 + np.log2(8.0)  # eight uses just now
        base.warmth[10] = 160 / 16 - 1
        fine.warmth[10] = 16 / 16  # one now, half a use at 2 bits
        heat = core.residency.fine_fill(idle=False).heat
        one = 1 - 0.5 ** (1 / 16)
        assert heat[[9, 10]] == pytest.approx([8 * one, one])
        assert np.count_nonzero(heat) == 2
