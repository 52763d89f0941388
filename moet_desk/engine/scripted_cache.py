"""The expert cache of an engine without a model: what screens show of tiers, under skewed use.

Owned by the thread that calls `ScriptedEngine.advance`. The same seed and steps give the same
pictures.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import OrderedDict, deque
from dataclasses import replace

from moet_desk.telemetry import CacheView, Tier, TierCounters, TierSizes

_WINDOW = 64  # steps behind the shown shares, as in the real engine
_ROW_BYTES = 110_592


class ScriptedCache:
    """Experts of a model of so many layers moving between tiers of so many rows.

    Attributes:
        counters: of all steps so far.
    """

    def __init__(
        self, n_layers: int, n_experts: int, top_k: int, *, seed: int, n_slots: int, n_fine: int,
        n_arena: int,
    ) -> None:  # fmt: skip
        self._random, self._top_k = random.Random(seed), top_k
        self._order = [self._random.sample(range(n_experts), n_experts) for _ in range(n_layers)]
        self._weights = list(
            itertools.accumulate(1.0 / (rank + 1) ** 1.1 for rank in range(n_experts))
        )
        self._n_slots, self._n_fine, self._n_arena = n_slots, n_fine, n_arena
        rows = [(layer, expert) for layer in range(n_layers) for expert in range(n_experts)]
        self._random.shuffle(rows)
        self._arena = OrderedDict.fromkeys(rows[: self._n_arena])
        self._slots: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._fine: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._uses = [[0.0] * n_experts for _ in range(n_layers)]
        self._hits: list[float | None] = [None] * n_layers
        self._recent: deque[tuple[int, int, int, int]] = deque(maxlen=_WINDOW)
        empty = bytes(n_experts)
        self._view = CacheView(
            layers=tuple(range(1, n_layers + 1)),
            n_experts=n_experts,
            tiers=tuple(self._tier_bytes(layer) for layer in range(n_layers)),
            heat=(empty,) * n_layers,
            generations=(1,) * n_layers,
            hit_share=(None,) * n_layers,
        )
        self.counters = TierCounters()
        self._seen_lookups = 0

    def _tier_of(self, row: tuple[int, int]) -> Tier:
        if row in self._fine:
            return Tier.FINE
        if row in self._slots:
            return Tier.BASE
        return Tier.RAM if row in self._arena else Tier.NVME

    def _tier_bytes(self, layer: int) -> bytes:
        return bytes(self._tier_of((layer, e)) for e in range(len(self._order[0])))

    def step(self, seconds: float) -> None:
        """Look up the experts of one token in every layer."""
        by_tier = [0, 0, 0, 0]
        for layer, order in enumerate(self._order):
            chosen: set[int] = set()
            while len(chosen) < self._top_k:
                chosen.add(self._random.choices(order, cum_weights=self._weights)[0])
            hits = 0
            for expert in sorted(chosen):
                tier = self._use(layer, expert)
                by_tier[tier] += 1
                hits += tier >= Tier.BASE
            share, before = hits / self._top_k, self._hits[layer]
            self._hits[layer] = share if before is None else before * 0.95 + share * 0.05
        self._count(by_tier, seconds)

    def _use(self, layer: int, expert: int) -> Tier:
        row = (layer, expert)
        tier = self._tier_of(row)
        self._uses[layer][expert] += 1.0
        if tier is Tier.NVME:
            self._arena[row] = None
            if len(self._arena) > self._n_arena:
                self._arena.popitem(last=False)
        if row in self._slots and self._n_fine and self._random.random() < 0.02:
            self._fine[row] = None
            if len(self._fine) > self._n_fine:
                self._fine.popitem(last=False)
        self._slots[row] = None
        self._slots.move_to_end(row)
        if len(self._slots) > self._n_slots:
            victim, _ = self._slots.popitem(last=False)
            self._fine.pop(victim, None)
        return tier

    def _count(self, by_tier: list[int], seconds: float) -> None:
        nvme, ram, base, fine = by_tier
        old = self.counters
        moved = (nvme + ram) * _ROW_BYTES
        self._recent.append((nvme, ram, base, fine))
        self.counters = replace(
            old,
            lookups=old.lookups + sum(by_tier),
            hits_base=old.hits_base + base,
            hits_fine=old.hits_fine + fine,
            from_ram=old.from_ram + ram,
            from_nvme=old.from_nvme + nvme,
            evictions=old.evictions + nvme + ram,
            bytes_ram_to_slot=old.bytes_ram_to_slot + moved,
            bytes_nvme_to_ram=old.bytes_nvme_to_ram + nvme * _ROW_BYTES,
            wait_s=old.wait_s + seconds * min(0.6, 0.01 * ram + 0.03 * nvme),
            step_s=old.step_s + seconds,
        )

    def view(self) -> CacheView:
        """The newest picture; rows that did not change keep their generation."""
        before = self._view
        if self.counters.lookups == self._seen_lookups:
            return before
        self._seen_lookups = self.counters.lookups
        tiers = tuple(self._tier_bytes(layer) for layer in range(len(self._order)))
        heat = tuple(
            bytes(0 if uses == 0 else 1 + min(6, int(math.log2(uses))) for uses in row)
            for row in self._uses
        )
        generations = tuple(
            generation + (tiers[i] != before.tiers[i] or heat[i] != before.heat[i])
            for i, generation in enumerate(before.generations)
        )
        hit_share = tuple(self._hits)
        self._view = replace(
            before, tiers=tiers, heat=heat, generations=generations, hit_share=hit_share
        )
        return self._view

    def shares(self) -> tuple[float, float, float, float] | None:
        """Recent look-ups by tier (N, R, G, Q)."""
        if not self._recent:
            return None
        sums = [sum(column) for column in zip(*self._recent, strict=True)]
        total = sum(sums)
        return (sums[0] / total, sums[1] / total, sums[2] / total, sums[3] / total)

    def sizes(self) -> TierSizes:
        """How full each tier is."""
        return TierSizes(
            base_slots=self._n_slots,
            base_slots_used=len(self._slots),
            fine_slots=self._n_fine,
            fine_slots_used=len(self._fine),
            arena_rows=self._n_arena,
            arena_rows_used=len(self._arena),
            rows=len(self._order) * len(self._order[0]),
            slot_bytes=_ROW_BYTES,
            row_bytes=_ROW_BYTES,
        )
