"""Which expert is where: the slot pools, their tables, heat and counters. The only writer of all
these.

Owned by the engine thread. Decode asks for the slots of one layer's experts and gets them all,
fetched if they were missing; slots of other layers may be evicted for that, never one that the same
layer needs in this step. Prefill reads what is there and streams the rest through one staging slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from moet_desk.engine.ledger import Ledger
from moet_desk.engine.promotion import Budget, Fill, Promotion, share_of
from moet_desk.engine.transfer import Transfer
from moet_desk.kernels.reference import CacheTables, claim, lookup, release
from moet_desk.kernels.reference.cache import HALF_LIFE
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import CacheView, Stories, Tier, TierCounters, TierSizes
from moet_desk.units import MIB

HEAT_HALF_LIFE = 512
"""Layer uses after which an expert's heat counts half."""

PROMOTED_BYTES_PER_S = 16 * MIB
"""Most that promotions expand in a second: 4 % of that second with the demo model's rows, 2 ms for
0.8 MB on two cores that others use too (2026-11-29).
"""

RECENT_USES = 256
"""Window of the hit shares shown per layer, in uses of that layer."""


class Pool:
    """Slots of one precision and the tables that say who is in them."""

    def __init__(self, *, n_layers: int, n_experts: int, n_slots: int, slot_floats: int) -> None:
        self.slots = torch.empty((n_slots, slot_floats), dtype=torch.float32)
        self.tables = CacheTables(n_layers, n_experts, n_slots)

    @property
    def n_slots(self) -> int:
        return int(self.slots.shape[0])


class _Tally:
    """What happened to experts since the last view: layers with the experts that tokens used there,
    and rows. Lists, because to append costs a hundredth of what counting in an array does.
    """

    def __init__(self) -> None:
        self.uses: list[tuple[int, list[int]]] = []
        self.fetches: list[int] = []
        self.evictions: list[int] = []

    def used_rows(self, n_experts: int) -> list[int]:
        """Each row as often as it was used."""
        return [layer * n_experts + e for layer, experts in self.uses for e in experts]


class Residency:
    """Slots for every expert a token asks for.

    Args:
        transfer: moves rows into slots.
        moe_layers: model layer number of each MoE layer that runs.
        n_experts: experts per layer.
        base_slots, fine_slots: pool sizes; each at least the experts one token uses per layer.
        top_k: experts a token uses per layer; a fine pool of no more has none to promote into.
    """

    def __init__(
        self,
        transfer: Transfer,
        *,
        moe_layers: tuple[int, ...],
        n_experts: int,
        base_slots: int,
        fine_slots: int,
        top_k: int,
    ) -> None:
        self._transfer = transfer
        self._top_k = top_k
        self._moe_layers = moe_layers
        self._n_experts = n_experts
        size = transfer.layout.slot_floats
        shape = {"n_layers": len(moe_layers), "n_experts": n_experts, "slot_floats": size}
        self._pools = {
            Plane.BASE: Pool(n_slots=base_slots, **shape),
            Plane.FINE: Pool(n_slots=fine_slots, **shape),
        }
        self._staging = torch.empty(size, dtype=torch.float32)
        self._uses = 0  # one per (step, layer): the clock of recency
        grid = (len(moe_layers), n_experts)
        self._heat = np.zeros(grid, dtype=np.float32)
        self._decay = np.float32(0.5 ** (1 / HEAT_HALF_LIFE))
        self._recent = np.zeros((len(moe_layers), 2), dtype=np.float64)  # hits, look-ups
        self._tier_recent = np.zeros(4, dtype=np.float64)
        self._count = dict.fromkeys(("lookups", "hits_base", "hits_fine", "evictions"), 0)
        self._bytes_to_slot = dict.fromkeys(Plane, 0)
        self._promotions = 0
        self.wait_s = 0.0
        self._view: CacheView | None = None
        self._began = time.monotonic()
        self._ledger = Ledger(grid[0] * grid[1], exact=True)
        self._told: np.ndarray | None = None  # tiers at the last view
        self._new = _Tally()

    # -- decode ------------------------------------------------------------------------------

    def slots(self, plane: Plane, layer: int, experts: Sequence[int]) -> list[Tensor]:
        """The slots of a token's experts in one layer, all filled.

        Args:
            plane: BASE for 2-bit weights, FINE for FP4.
            layer: MoE layer, from 0.
            experts: ids of the chosen experts.

        Returns:
            float32 [slot_floats] each, in the order of `experts`; valid until the next call.

        Raises:
            MoetError: a row could not be read (MD-NVME-04, MD-PACK-04). No slot is left claiming
                a row it does not hold.
        """
        self._note_heat(layer, experts)
        return self._slots(plane, layer, experts)

    def expect(self, plane: Plane, layer: int, experts: Sequence[int]) -> None:
        """A layer's experts will be asked for soon: begin to read those from disk that are neither
        in a slot nor in RAM. Nothing here changes by it.
        """
        slot_of = self._pools[plane].tables.slot_of[layer]
        for expert in experts:
            if slot_of[expert] < 0:
                self._transfer.expect(plane, layer * self._n_experts + expert)

    def mixed_slots(self, layer: int, experts: Sequence[int]) -> list[tuple[Plane, Tensor]]:
        """For each of a token's experts its 4-bit slot if it has one now, else its 2-bit slot.

        No FP4 row is fetched for this; what comes out depends on what lies where. Otherwise as
        `slots`.
        """
        self._note_heat(layer, experts)
        fine = self._pools[Plane.FINE].tables.slot_of[layer]
        planes = [Plane.FINE if fine[expert] >= 0 else Plane.BASE for expert in experts]
        found: dict[int, tuple[Plane, Tensor]] = {}
        for plane in Plane:
            held = [e for e, its in zip(experts, planes, strict=True) if its is plane]
            if held:
                slots = self._slots(plane, layer, held)
                found |= {e: (plane, slot) for e, slot in zip(held, slots, strict=True)}
        return [found[expert] for expert in experts]

    def _slots(self, plane: Plane, layer: int, experts: Sequence[int]) -> list[Tensor]:
        pool = self._pools[plane]
        self._uses += 1
        found = lookup(pool.tables, layer, experts, now=self._uses)
        self._note_use(plane, layer, experts, n_missed=len(found.misses))
        self._count["evictions"] += len(found.evicted)
        self._new.evictions += found.evicted
        if found.misses:
            self._fetch_missing(pool, plane, layer, found.misses)
        return [pool.slots[slot] for slot in found.slots]

    def _fetch_missing(
        self, pool: Pool, plane: Plane, layer: int, misses: Sequence[tuple[int, int]]
    ) -> None:
        began = time.perf_counter()
        waiting = list(misses)
        try:
            while waiting:
                expert, slot = waiting[-1]
                in_ram = self._transfer.arena.holds(plane, self._row(layer, expert))
                self._transfer.fetch(plane, self._row(layer, expert), pool.slots[slot])
                self._tier_recent[Tier.RAM if in_ram else Tier.NVME] += 1
                self._bytes_to_slot[plane] += pool.slots.shape[1] * 4
                self._new.fetches.append(self._row(layer, expert))
                waiting.pop()
        finally:
            for _, slot in waiting:  # after an error: these slots hold nothing that can be used
                release(pool.tables, slot)
            self.wait_s += time.perf_counter() - began

    def _note_use(self, plane: Plane, layer: int, experts: Sequence[int], *, n_missed: int) -> None:
        n_hits = len(experts) - n_missed
        self._count["lookups"] += len(experts)
        self._count["hits_base" if plane is Plane.BASE else "hits_fine"] += n_hits
        keep = 1.0 - 1.0 / RECENT_USES
        self._recent[layer] = self._recent[layer] * keep + (n_hits, len(experts))
        self._tier_recent *= 1.0 - 1.0 / (RECENT_USES * len(self._moe_layers))
        self._tier_recent[Tier.BASE if plane is Plane.BASE else Tier.FINE] += n_hits

    def _note_heat(self, layer: int, experts: Sequence[int]) -> None:
        heat = self._heat[layer]
        heat *= self._decay
        chosen = list(experts)
        heat[chosen] += 1.0
        self._new.uses.append((layer, chosen))

    # -- prefill -----------------------------------------------------------------------------

    def read(self, plane: Plane, layer: int, expert: int) -> Tensor:
        """One expert's weights for a prompt chunk, without evicting anything.

        Uses the slot if the expert has one, fills a free slot if there is one, else the staging
        slot, so the result is valid until the next call. Raises as `slots`.
        """
        pool = self._pools[plane]
        slot = pool.tables.slot_of[layer][expert]
        if slot >= 0:
            return pool.slots[slot]
        row = self._row(layer, expert)
        free = claim(pool.tables, layer, expert)
        target = self._staging if free is None else pool.slots[free]
        try:
            self._transfer.fetch(plane, row, target, scan=True)
        except Exception:
            if free is not None:
                release(pool.tables, free)
            raise
        self._bytes_to_slot[plane] += target.numel() * 4
        if free is not None:
            self._new.fetches.append(row)
        return target

    # -- hot FP4 set (engine/hot_set.py) -----------------------------------------------------

    def promotion_budget(self) -> Budget | None:
        """See `FineTier`. The least pool has no slot to spare: each look-up takes them all."""
        if self._pools[Plane.FINE].n_slots <= self._top_k:
            return None
        return Budget(PROMOTED_BYTES_PER_S, self._transfer.layout.slot_floats * 4)

    def fine_fill(self, *, idle: bool) -> Fill:
        """See `FineTier`. A 4-bit slot is made from the rows of both planes."""
        arena = self._transfer.arena
        base, fine = self._pools[Plane.BASE].tables, self._pools[Plane.FINE].tables
        warmth = np.maximum(base.warmth, fine.warmth) - self._uses / base.life
        may = np.ones(warmth.size, np.bool_)
        if not idle:
            may = arena.present(Plane.FINE) & arena.present(Plane.BASE)
        return Fill(
            heat=share_of(warmth),
            resident=fine.resident(),
            n_free=len(fine.free),
            may=may[: warmth.size],
            base_bytes=self._bytes_to_slot[Plane.BASE],
        )

    def promote(self, promotions: Sequence[Promotion]) -> None:
        """See `FineTier`."""
        pool, base = self._pools[Plane.FINE], self._pools[Plane.BASE]
        tables = pool.tables
        for one in promotions:
            if one.replaces is not None:
                release(
                    tables,
                    tables.slot_of[one.replaces // self._n_experts][one.replaces % self._n_experts],
                )
            slot = claim(tables, *divmod(one.row, self._n_experts))
            if slot is None:
                raise ValueError("a promotion without a free slot")
            try:
                self._transfer.fetch(Plane.FINE, one.row, pool.slots[slot], scan=True)
            except Exception:
                release(tables, slot)
                raise
            # As warm as its 2-bit uses made it, else the next rerun would take its slot first.
            tables.warmth[one.row] = max(tables.warmth[one.row], base.tables.warmth[one.row])
            self._promotions += 1

    # -- heat --------------------------------------------------------------------------------

    def preload(self, rows: Sequence[int], *, progress: Callable[[int], None]) -> None:
        """Fill free 2-bit slots with `rows`, given hottest first and no more than there are slots.

        The coldest goes in first: among slots that no token has used yet, the first is evicted.
        """
        pool = self._pools[Plane.BASE]
        for row in reversed(rows):
            layer, expert = divmod(row, self._n_experts)
            slot = claim(pool.tables, layer, expert)
            if slot is None:
                return
            self._transfer.fetch(Plane.BASE, row, pool.slots[slot], scan=True)
            progress(1)

    def hottest(self) -> list[tuple[int, float]]:
        """(row, heat) of every expert used lately, hottest first; what heat.json keeps."""
        flat = self._heat.ravel()
        order = np.argsort(-flat, kind="stable")
        return [(int(row), round(float(flat[row]), 3)) for row in order if flat[row] > 0.01]

    def restore_heat(self, heat: Iterable[tuple[int, float]]) -> None:
        """Take over a saved heat table; rows that do not exist here are skipped.

        The pools' own count of uses fades faster than heat does; a row used steadily has both in
        the ratio of the half-lives, so that is how its saved heat is handed on.
        """
        flat = self._heat.ravel()
        for row, value in heat:
            if 0 <= row < flat.size and value > 0:
                flat[row] = value
                for pool in self._pools.values():
                    pool.tables.warmth[row] = np.log2(value * HALF_LIFE / HEAT_HALF_LIFE)

    # -- what the screens see ----------------------------------------------------------------

    def view(self) -> CacheView:
        """Tiers and heat of all experts; generations grow where something changed."""
        n_layers, old = len(self._moe_layers), self._view
        tiers = self._tiers()
        ramp = self._heat_ramp()
        tier_rows = tuple(tiers[i].tobytes() for i in range(n_layers))
        heat_rows = tuple(ramp[i].tobytes() for i in range(n_layers))
        if old is None:
            generations = (0,) * n_layers
        else:
            generations = tuple(
                old.generations[i] + (tier_rows[i] != old.tiers[i] or heat_rows[i] != old.heat[i])
                for i in range(n_layers)
            )
        shares = tuple(float(hits / asked) if asked else None for hits, asked in self._recent)
        self._view = CacheView(
            self._moe_layers, self._n_experts, tier_rows, heat_rows, generations, shares,
            stories=self._stories(tiers.reshape(-1)),
        )  # fmt: skip
        return self._view

    def _stories(self, tiers: np.ndarray) -> Stories:
        now_s, new, n_rows = time.monotonic() - self._began, self._new, tiers.size
        self._ledger.note(
            now_s,
            uses=np.bincount(new.used_rows(self._n_experts), minlength=n_rows).astype(np.float32),
            fetches=np.bincount(new.fetches, minlength=n_rows).astype(np.uint32),
            evictions=np.bincount(new.evictions, minlength=n_rows).astype(np.uint32),
            before=self._told,
        )
        self._told, self._new = tiers, _Tally()
        return self._ledger.stories(now_s)

    def counters(self, *, step_s: float) -> TierCounters:
        arena = self._transfer.arena.counters
        return TierCounters(
            **self._count,
            from_ram=arena.from_ram,
            from_nvme=arena.from_nvme,
            bytes_ram_to_slot=sum(self._bytes_to_slot.values()),
            bytes_nvme_to_ram=arena.bytes_read,
            wait_s=self.wait_s,
            step_s=step_s,
            read_errors=arena.read_errors,
            promotions=self._promotions,
            bytes_promoted=self._promotions * self._transfer.layout.slot_floats * 4,
        )

    def sizes(self) -> TierSizes:
        arena, layout = self._transfer.arena, self._transfer.layout
        base, fine = self._pools[Plane.BASE], self._pools[Plane.FINE]
        return TierSizes(
            base_slots=base.n_slots,
            base_slots_used=base.tables.n_used,
            fine_slots=fine.n_slots,
            fine_slots_used=fine.tables.n_used,
            arena_rows=arena.n_places(Plane.BASE),
            arena_rows_used=arena.n_used(Plane.BASE),
            rows=len(self._moe_layers) * self._n_experts,
            slot_bytes=layout.slot_floats * 4,
            row_bytes=layout.base_stride,
        )

    def tier_share(self) -> tuple[float, float, float, float] | None:
        """Share of recent look-ups that each tier answered, in the order of `Tier`."""
        total = float(self._tier_recent.sum())
        if total < 1e-9:
            return None
        nvme, ram, base, fine = (float(x) / total for x in self._tier_recent)
        return (nvme, ram, base, fine)

    def _tiers(self) -> np.ndarray:
        shape = (len(self._moe_layers), self._n_experts)
        in_ram = self._transfer.arena.present(Plane.BASE)[: shape[0] * shape[1]].reshape(shape)
        tiers = np.where(in_ram, np.uint8(Tier.RAM), np.uint8(Tier.NVME))
        flat = tiers.reshape(-1)
        flat[self._pools[Plane.BASE].tables.resident()] = Tier.BASE
        flat[self._pools[Plane.FINE].tables.resident()] = Tier.FINE
        return tiers

    def _heat_ramp(self) -> np.ndarray:
        """0 never used, then one step per doubling: 7 is an expert that nearly every token uses."""
        with np.errstate(divide="ignore"):
            steps = np.floor(np.log2(self._heat)) - 1
        return np.where(self._heat > 0.01, np.clip(steps, 1, 7), 0).astype(np.uint8)

    def _row(self, layer: int, expert: int) -> int:
        return layer * self._n_experts + expert
