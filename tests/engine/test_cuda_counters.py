"""What a device's tiers count: reads of loading left out, recent shares, and counters that wrap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moet_desk.engine.cuda.loader import CudaCore
from moet_desk.store.pack_format import Plane
from tests.engine.test_cuda_hot_set import loaded

MOST = 2**31 - 1


def looked_up(core: CudaCore, *, hits: int, misses: int) -> None:
    """As look-ups of every layer do."""
    counters = core.pools[Plane.BASE].tables.counters
    counters.add_(torch.tensor([hits + misses, hits, misses, misses], dtype=torch.int32))


def test_counters__model_just_loaded__no_row_was_asked_for(demo_pack: Path) -> None:
    with loaded(demo_pack) as core:
        counters = core.residency.counters(step_s=0.0)
        assert core.arena.n_used(Plane.BASE) == core.residency.sizes().rows
        assert (counters.from_nvme, counters.bytes_nvme_to_ram, counters.from_ram) == (0, 0, 0)
        assert core.residency.tier_share() is None
        looked_up(core, hits=3, misses=1)
        assert core.residency.tier_share() == pytest.approx((0.0, 0.25, 0.75, 0.0))


def test_shares__much_later__are_those_of_recent_look_ups(demo_pack: Path) -> None:
    with loaded(demo_pack) as core:
        for _ in range(2):
            looked_up(core, hits=0, misses=100_000)
            assert core.residency.tier_share() == pytest.approx((0.0, 1.0, 0.0, 0.0))
            assert core.residency.view().hit_share[0] == 0.0
        for _ in range(100):
            looked_up(core, hits=100, misses=0)
            shares, view = core.residency.tier_share(), core.residency.view()
        assert shares is not None
        assert shares[2] > 0.99
        assert (view.hit_share[0] or 0) > 0.99
        assert sum(shares) == pytest.approx(1.0)


def test_counters__those_of_the_device_begin_anew__go_on(demo_pack: Path) -> None:
    with loaded(demo_pack) as core:
        n_layers = len(core.spec.main_moe_layers)
        tables, before = core.pools[Plane.BASE].tables, core.residency.counters(step_s=0.0)
        for _ in range(4):  # a layer's counter is 32 bits wide
            looked_up(core, hits=MOST - 20, misses=10)
            found = core.residency.counters(step_s=0.0)
        assert int(tables.counters[0, 0]) < MOST // 2
        assert found.lookups - before.lookups == 4 * n_layers * (MOST - 10)
        assert found.hits_base - before.hits_base == 4 * n_layers * (MOST - 20)
        assert found.from_ram - before.from_ram == found.evictions == 40 * n_layers
        tables.ahead.fill_(MOST)
        core.residency.fine_fill(idle=False)
        moved = core.residency.fine_fill(idle=False).base_bytes
        tables.ahead.add_(torch.tensor([5, 3], dtype=torch.int32))
        stride = core.reader.meta.base_stride
        assert core.residency.fine_fill(idle=False).base_bytes - moved == 5 * n_layers * stride
