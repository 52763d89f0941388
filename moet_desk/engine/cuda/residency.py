"""What the screens see of the device's tiers, read between steps; heat across restarts.

The device decides residency during a step (kernels/triton/cache). This copies its tables out now
and then and puts them into the same records as the CPU's residency.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moet_desk.engine.cuda.expert_stream import StreamCounters
from moet_desk.engine.cuda.mailbox_server import MailboxServer
from moet_desk.engine.cuda.pools import DevicePool
from moet_desk.engine.ledger import Ledger, moves, uses_between
from moet_desk.engine.promotion import Budget, Fill, Promotion, share_of
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.reference.cache import HALF_LIFE
from moet_desk.store.arena import Arena
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import CacheView, Stories, Tier, TierCounters, TierSizes
from moet_desk.units import GIB

PROMOTED_BYTES_PER_S = GIB
"""Most that promotions copy in a second: a fiftieth of what PCIe 5 carries (docs/design/gpu.md)."""

STORIES_EVERY_S = 0.2
"""Between two looks at what happened to each expert: 0.35 ms for 11,000 of them (2026-11-30)."""

RECENT_LOOKUPS = 2048
"""Window of the shares shown, in look-ups of a layer: 256 tokens that use 8 experts there."""

_LOOKUPS, _HITS, _MISSES, _EVICTIONS, _AHEAD = range(5)
"""Columns of `_counts`."""


class _Totals:
    """Counters of a device, 32 bits wide, as numbers that go on when those begin anew."""

    def __init__(self) -> None:
        self._seen: NDArray[np.int64] | None = None

    def of(self, seen: NDArray[np.int64]) -> NDArray[np.int64]:
        """The totals, now that the device has counted so far. Often enough: before any of them has
        counted 2^32 more.
        """
        if self._seen is None:
            self._seen = np.zeros_like(seen)
            self._sums = np.zeros_like(seen)
        self._sums += (seen - self._seen) % 2**32
        self._seen = seen
        return self._sums.copy()


class _Recent:
    """Parts of recent look-ups [..., P], from totals of each part. What is `window` look-ups ago
    counts for a third.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._seen: NDArray[np.int64] | None = None

    def of(self, totals: NDArray[np.int64]) -> NDArray[np.float64]:
        """The parts, now that the totals are these."""
        if self._seen is None:
            self._seen, self._parts = np.zeros_like(totals), np.zeros(totals.shape)
        more = np.maximum(totals - self._seen, 0)
        count = more.sum(-1, keepdims=True)
        keep = (1.0 - 1.0 / self._window) ** count
        # As if they had come one by one, each of them a little of every part.
        self._parts = self._parts * keep + more * (1.0 - keep) * self._window / np.maximum(count, 1)
        self._seen = totals
        return self._parts


@dataclass(frozen=True, slots=True)
class _Picture:
    """What the last view saw: tiers [L * E], heat [L * E], the clock and look-ups of each layer."""

    tiers: NDArray[np.uint8]
    heat: NDArray[np.float64]
    clock: int
    lookups: NDArray[np.int64]


class CudaResidency:
    """Owned by the engine thread; reads device tables between steps only.

    `bench/record_trace.py` has no pool of FP4 rows; the engine has both.
    """

    def __init__(
        self,
        pools: Mapping[Plane, DevicePool],
        arena: Arena,
        layout: ExpertLayout,
        *,
        moe_layers: tuple[int, ...],
        server: MailboxServer | None,
        streamed: StreamCounters,
    ) -> None:
        self._pools, self._arena, self._layout = dict(pools), arena, layout
        self._moe_layers = moe_layers
        self._n_experts = pools[Plane.BASE].tables.n_experts
        self._server, self._streamed = server, streamed
        self._view: CacheView | None = None
        self._promotions = 0
        self._began = time.monotonic()
        self._ledger = Ledger(len(moe_layers) * self._n_experts, exact=False)
        self._told: _Picture | None = None
        self._totals = {plane: (_Totals(), _Totals()) for plane in self._pools}
        self._by_layer = _Recent(RECENT_LOOKUPS)
        self._by_tier = _Recent(RECENT_LOOKUPS * len(moe_layers))

    @property
    def wait_s(self) -> float:
        """Seconds that steps spent waiting for rows from disk."""
        return 0.0 if self._server is None else self._server.seconds

    def hottest(self) -> list[tuple[int, float]]:
        """(row, heat), hottest first, as the CPU's residency gives them."""
        heat = self._heat()
        order = np.argsort(-heat, kind="stable")
        return [(int(row), round(float(heat[row]), 3)) for row in order if heat[row] > 0.01]

    def restore_heat(self, heat: Iterable[tuple[int, float]]) -> None:
        """Take over saved heat as the pools' warmth."""
        for pool in self._pools.values():
            warmth, now = pool.tables.warmth.cpu(), float(pool.tables.clock) / HALF_LIFE
            for row, value in heat:
                if 0 <= row < warmth.numel() and value > 0:
                    warmth[row] = float(np.log2(value)) + now
            pool.tables.warmth.copy_(warmth)

    # -- hot FP4 set (engine/hot_set.py) -----------------------------------------------------

    def promotion_budget(self) -> Budget | None:
        """See `FineTier`."""
        fine = self._pools[Plane.FINE]
        if fine.n_slots <= fine.top_k:
            return None
        return Budget(PROMOTED_BYTES_PER_S, fine.arena.stride)

    def fine_fill(self, *, idle: bool) -> Fill:
        """See `FineTier`. Rows on disk stay there even while idle: the device's table of the arena
        changes in steps alone.
        """
        fine = self._pools[Plane.FINE].tables
        owner, n_rows = fine.owner.cpu().numpy(), fine.slot_of.shape[0]
        may = np.zeros(n_rows, np.bool_)
        # A read that a step gave up on may still be changing who lies where.
        if self._server is None or self._server.settle(0.0):
            may = (
                self._arena.present(Plane.FINE)[:n_rows] & self._arena.present(Plane.BASE)[:n_rows]
            )
        base = self._pools[Plane.BASE]
        missed = int(self._counts(Plane.BASE)[:, (_MISSES, _AHEAD)].sum())
        held = owner[owner >= 0].astype(np.int64)
        warmth = np.maximum(self._warmth(Plane.BASE), self._warmth(Plane.FINE))
        return Fill(
            heat=share_of(warmth),
            resident=held,
            n_free=int(fine.n_free),
            may=may,
            base_bytes=missed * base.arena.stride + self._streamed.n_bytes,
        )

    def promote(self, promotions: Sequence[Promotion]) -> None:
        """See `FineTier`."""
        rows, table = [one.row for one in promotions], self._arena.table(Plane.FINE)
        self._pools[Plane.FINE].promote(
            rows, [int(table[row]) for row in rows], self._arena.memory(Plane.FINE),
            replaced=[one.replaces for one in promotions if one.replaces is not None],
            like=self._pools[Plane.BASE].tables,
        )  # fmt: skip
        self._promotions += len(rows)

    def fill_base(self, most: int) -> int:
        """Copy the hottest rows that are in RAM into free 2-bit slots, between steps.

        Rows that were never used are left out. Returns how many were copied, at most `most`.
        """
        if self._server is not None and not self._server.settle(0.0):
            return 0  # as in `fine_fill`
        pool = self._pools[Plane.BASE]
        n_rows, warmth = pool.tables.slot_of.shape[0], self._warmth(Plane.BASE)
        may = self._arena.present(Plane.BASE)[:n_rows] & np.isfinite(warmth)
        may &= pool.tables.slot_of.cpu().numpy() < 0
        n = min(most, int(pool.tables.n_free), int(may.sum()))
        hottest = np.argsort(-np.where(may, warmth, -np.inf), kind="stable")[:n]
        table, rows = self._arena.table(Plane.BASE), hottest[::-1].tolist()
        return pool.preload(rows, [int(table[row]) for row in rows], self._arena.memory(Plane.BASE))

    # -- what the screens see ----------------------------------------------------------------

    def view(self) -> CacheView:
        """See `Residency.view`."""
        n_layers, old = len(self._moe_layers), self._view
        shape = (n_layers, self._n_experts)
        present = self._arena.present(Plane.BASE)[: shape[0] * shape[1]]
        tiers = np.where(present, np.uint8(Tier.RAM), np.uint8(Tier.NVME))
        for plane, tier in ((Plane.BASE, Tier.BASE), (Plane.FINE, Tier.FINE)):
            if plane in self._pools:
                tiers[self._pools[plane].tables.slot_of.cpu().numpy() >= 0] = tier
        heat, counts = self._heat(), self._counts(Plane.BASE)
        with np.errstate(divide="ignore"):
            steps = np.floor(np.log2(heat * HALF_LIFE)) + 1
        ramp = np.where(np.isfinite(steps), np.clip(steps, 1, 7), 0).astype(np.uint8)
        tier_rows = tuple(row.tobytes() for row in tiers.reshape(shape))
        heat_rows = tuple(row.tobytes() for row in ramp.reshape(shape))
        if old is None:
            generations = (0,) * n_layers
        else:
            generations = tuple(
                old.generations[i] + (tier_rows[i] != old.tiers[i] or heat_rows[i] != old.heat[i])
                for i in range(n_layers)
            )
        recent = self._by_layer.of(counts[:, (_HITS, _MISSES)])
        shares = tuple(float(hits / (hits + m)) if hits + m else None for hits, m in recent)
        self._view = CacheView(
            self._moe_layers, self._n_experts, tier_rows, heat_rows, generations, shares,
            stories=self._stories(tiers, heat, counts[:, _LOOKUPS]),
        )  # fmt: skip
        return self._view

    def _stories(
        self, tiers: NDArray[np.uint8], heat: NDArray[np.float64], lookups: NDArray[np.int64]
    ) -> Stories:
        """The device counts look-ups of a layer, not of an expert, so these come from what changed
        since the last picture.
        """
        old, now_s = self._told, time.monotonic() - self._began
        last = None if self._view is None else self._view.stories
        if last is not None and now_s - last.now_s < STORIES_EVERY_S:
            return last
        new = _Picture(tiers, heat, int(self._pools[Plane.BASE].tables.clock), lookups)
        self._told = new
        if old is None:
            return self._ledger.stories(now_s)
        shape = (len(self._moe_layers), self._n_experts)
        faded = old.heat * 2.0 ** (min(0, old.clock - new.clock) / HALF_LIFE)  # `rebase` turns it
        uses = uses_between(faded.reshape(shape), heat.reshape(shape), lookups - old.lookups)
        fetches, evictions = moves(old.tiers, tiers)
        self._ledger.note(now_s, uses=uses, fetches=fetches, evictions=evictions, before=old.tiers)
        return self._ledger.stories(now_s)

    def counters(self, *, step_s: float) -> TierCounters:
        """See `Residency.counters`."""
        base, fine = self._counts(Plane.BASE).sum(0), self._counts(Plane.FINE).sum(0)
        fine_stride = self._pools[Plane.FINE].arena.stride if Plane.FINE in self._pools else 0
        arena, prompts = self._arena.counters, self._streamed
        moved = (base[_MISSES] + base[_AHEAD]) * self._pools[Plane.BASE].arena.stride
        moved += (fine[_MISSES] + fine[_AHEAD]) * fine_stride
        return TierCounters(
            lookups=int(base[_LOOKUPS]),
            hits_base=int(base[_HITS]),
            hits_fine=int(fine[_HITS]),
            from_ram=int(base[_MISSES] + fine[_MISSES]) - arena.from_nvme + prompts.from_ram,
            from_nvme=arena.from_nvme + prompts.from_nvme,
            evictions=int(base[_EVICTIONS] + fine[_EVICTIONS]),
            bytes_ram_to_slot=int(moved) + prompts.n_bytes,
            bytes_nvme_to_ram=arena.bytes_read + prompts.bytes_from_nvme,
            wait_s=self.wait_s,
            step_s=step_s,
            read_errors=arena.read_errors + prompts.read_errors,
            promotions=self._promotions,
            bytes_promoted=self._promotions * fine_stride,
        )

    def sizes(self) -> TierSizes:
        """See `Residency.sizes`."""
        slots, used = dict.fromkeys(Plane, 0), dict.fromkeys(Plane, 0)
        for plane, pool in self._pools.items():
            slots[plane] = pool.n_slots
            used[plane] = slots[plane] - int(pool.tables.n_free)
        return TierSizes(
            base_slots=slots[Plane.BASE],
            base_slots_used=used[Plane.BASE],
            fine_slots=slots[Plane.FINE],
            fine_slots_used=used[Plane.FINE],
            arena_rows=self._arena.n_places(Plane.BASE),
            arena_rows_used=self._arena.n_used(Plane.BASE),
            rows=len(self._moe_layers) * self._n_experts,
            slot_bytes=self._layout.base_stride,
            row_bytes=self._layout.base_stride,
        )

    def tier_share(self) -> tuple[float, float, float, float] | None:
        """Share of recent look-ups of steps that each tier answered, in the order of `Tier`."""
        base, fine = (self._counts(plane).sum(0) for plane in (Plane.BASE, Plane.FINE))
        nvme, missed = self._arena.counters.from_nvme, base[_MISSES] + fine[_MISSES]
        totals = np.array([nvme, missed - nvme, base[_HITS], fine[_HITS]])
        parts = self._by_tier.of(totals)
        if not parts.sum():
            return None
        return tuple((parts / parts.sum()).tolist())

    def _counts(self, plane: Plane) -> NDArray[np.int64]:
        """By layer: look-ups, hits, misses, evictions, and rows that were brought ahead. One that a
        layer asked for counts as a miss: it came from RAM for this token.
        """
        if plane not in self._pools:
            return np.zeros((len(self._moe_layers), 5), np.int64)
        tables, totals = self._pools[plane].tables, self._totals[plane]
        counts, ahead = (
            total.of(of_device.cpu().numpy().astype(np.int64))
            for total, of_device in zip(totals, (tables.counters, tables.ahead), strict=True)
        )
        brought, needed = ahead[:, :1], ahead[:, 1:]
        moved = np.concatenate([0 * needed, -needed, needed, 0 * needed], 1)
        return np.concatenate([counts + moved, brought - needed], 1)

    def _heat(self) -> NDArray[np.float64]:
        """Decayed uses of every row, the present counted as 1."""
        heat: NDArray[np.float64] = np.exp2(self._warmth(Plane.BASE))
        return heat

    def _warmth(self, plane: Plane) -> NDArray[np.float64]:
        """Log2 of a pool's decayed uses of every row, the present counted as 1."""
        tables = self._pools[plane].tables
        now = float(tables.clock) / HALF_LIFE
        warmth: NDArray[np.float64] = tables.warmth.cpu().numpy().astype(np.float64) - now
        return warmth
