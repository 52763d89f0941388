"""The pools of slots of a model that is being loaded, and what keeps them at the right size.

Where the driver can map memory by itself the pools grow and shrink while the model serves
(docs/design/residency.md); elsewhere they have the plan's size for good, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from moet_desk.engine.cuda.pools import DevicePool
from moet_desk.engine.cuda.slot_memory import SlotMemory, fixed_slots, growable_slots
from moet_desk.engine.cuda.vmm import DriverError, MemoryDriver, cuda_driver
from moet_desk.engine.cuda.vram import CardMemory, VramKeeper
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.vram_arbiter import Pool, Terms
from moet_desk.kernels.triton import fetch
from moet_desk.plan import TierPlan, least_slots
from moet_desk.store.arena import Arena
from moet_desk.store.pack_format import Plane

log = logging.getLogger("moet_desk.engine")


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """What decides how many slots there are and how many there can be.

    Attributes:
        n_layers, n_experts, top_k: of the layers that run.
        plan: of the tiers.
        options: of the user; numbers of slots given there are never exceeded.
    """

    n_layers: int
    n_experts: int
    top_k: int
    plan: TierPlan
    options: EngineOptions

    def bounds(self, plane: Plane, slot_bytes: int) -> Pool:
        """The sizes of a pool."""
        n_rows = self.n_layers * self.n_experts
        planned, wish = self.plan.base_slots, self.options.pool_slots
        if plane is Plane.FINE:
            planned, wish = self.plan.fine_slots, self.options.fine_slots
        least = min(planned, least_slots(self.top_k, n_rows))
        most = planned if wish is not None else max(planned, n_rows)
        return Pool(planned, least, planned, most, slot_bytes)


def open_driver(device: torch.device) -> MemoryDriver | None:
    """What maps memory of a card; None where nothing can."""
    if device.type != "cuda":
        return None
    try:
        return cuda_driver(device)
    except DriverError as error:
        _say_fixed(error)
        return None


def make_pools(sizes: PoolSizes, arena: Arena, device: torch.device) -> dict[Plane, DevicePool]:
    """Empty pools of the plan's sizes, or as near to them as the card has room for.

    Raises:
        MoetError: MD-GPU-11 there is no room for the least.
    """
    driver = open_driver(device)
    pools: dict[Plane, DevicePool] = {}
    try:
        for plane in Plane:
            pools[plane] = _make(plane, sizes, arena, driver, device)
        for pool in pools.values():  # once both have their least
            _grow(pool, sizes.bounds(pool.plane, pool.arena.stride).planned)
    except BaseException:
        release_pools(pools)
        raise
    return pools


def release_pools(pools: Mapping[Plane, DevicePool]) -> None:
    """Give the memory of slots back."""
    for pool in pools.values():
        pool.memory.release()


def keeper_of(
    pools: Mapping[Plane, DevicePool],
    sizes: PoolSizes,
    *,
    keep: int,
    device: torch.device,
    refill: Callable[[int], object],
) -> VramKeeper | None:
    """What keeps the pools at the right size; None if theirs is fixed.

    Args:
        pools: of both planes.
        sizes: what they were made by.
        keep: bytes of the card that the plan left free.
        device: the card.
        refill: see `VramKeeper`.
    """
    if any(pool.memory.behind is None for pool in pools.values()):
        return None
    bounds = {plane: sizes.bounds(plane, pool.arena.stride) for plane, pool in pools.items()}
    plan = sizes.plan
    slots = sum(pool.planned * pool.slot_bytes for pool in bounds.values())
    arena = plan.arena_base_rows * pools[Plane.BASE].arena.stride
    arena += plan.arena_fine_rows * pools[Plane.FINE].arena.stride
    return VramKeeper(
        pools, bounds, fixed=plan.bytes_total - slots - arena,
        terms=Terms(keep, sizes.options.vram_bytes), card=CardMemory.of(device), refill=refill,
    )  # fmt: skip


def fill_slots(pool: DevicePool, arena: Arena, rows: list[int]) -> None:
    """Hot rows that are in RAM into free slots, the coldest first; as many as there are slots."""
    table = arena.table(Plane.BASE)
    here = [row for row in reversed(rows[: pool.n_slots]) if table[row] >= 0]
    pool.preload(here, [int(table[row]) for row in here], arena.memory(Plane.BASE))


def _make(
    plane: Plane,
    sizes: PoolSizes,
    arena: Arena,
    driver: MemoryDriver | None,
    device: torch.device,
) -> DevicePool:
    rows = arena.memory(plane)
    stride = rows.shape[1]
    table = torch.from_numpy(np.array(arena.table(plane))).to(device)
    bounds = sizes.bounds(plane, stride)
    memory = _memory(bounds, driver, device)
    return DevicePool.make(
        plane, fetch.Arena(rows.data_ptr(), table, stride),
        n_layers=sizes.n_layers, n_experts=sizes.n_experts, n_slots=memory.usable,
        top_k=sizes.top_k, device=device, memory=memory, least=bounds.least,
    )  # fmt: skip


def _memory(bounds: Pool, driver: MemoryDriver | None, device: torch.device) -> SlotMemory:
    if driver is not None:
        try:
            return growable_slots(driver, bounds.slot_bytes, least=bounds.least, most=bounds.most)
        except DriverError as error:
            _say_fixed(error)
    return fixed_slots(bounds.planned, bounds.slot_bytes, device)


def _grow(pool: DevicePool, planned: int) -> None:
    """To the planned size, or as near to it as the card has room for."""
    try:
        found = pool.resize(planned)
    except DriverError as error:
        _say_fixed(error)
        return
    if found < planned:
        log.warning("the card has room for %s of %s planned slots", f"{found:,}", f"{planned:,}")


def _say_fixed(error: DriverError) -> None:
    log.warning("slots keep their size until the model is loaded again: %s", error)
