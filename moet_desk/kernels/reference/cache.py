"""Which expert lies in which slot: the tables of the read-through cache and their one operation.

Owns hits, misses and victims (design §7, step 2). Knows no bytes: whoever calls `lookup` copies the
missing rows into the slots it names. The tables belong to one thread, the engine thread; others see
copies in snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 256
"""Slots looked at for one victim; the window moves on by its own width."""

HALF_LIFE = 16
"""Uses of its layer after which a row's past counts half. On the demo model's routing of 3,446
tokens of held-out text (simulated, pools of 60 / 77 / 128 / 192 of 256 rows) the hit rate is 44.1 /
51.8 / 71.3 / 90.0 %; least recently used gives 40.6 / 47.0 / 66.6 / 88.9 %. 8 to 32 differ by a
point.
"""

FREE = -1


class CacheTables:
    """Slot tables of one pool. Owner: the engine thread.

    Invariants: `owner[slot_of[l][e]] == l * n_experts + e` for every entry that is not `FREE`; a
    slot whose owner is `FREE` is in `free` and nowhere in `slot_of`, and its `last_used` is `FREE`.

    Attributes:
        slot_of: [L][E] slot of an expert, or FREE.
        owner: [S] row index layer * E + expert in a slot, or FREE.
        last_used: [S] int64, the `now` of a slot's last look-up.
        warmth: [L * E] float64, log2 of each row's decayed count of uses, the unit of time being
            `HALF_LIFE` uses of a layer. Written this way nothing has to be decayed: all rows fade
            alike, so their order only changes where one is used (LRFU: Lee et al. 2001).
        life: that unit in `now`s.
        hand: where the next window begins.
        free: unused slots, lowest on top.
    """

    __slots__ = ("free", "hand", "last_used", "life", "n_experts", "owner", "slot_of", "warmth")

    def __init__(self, n_layers: int, n_experts: int, n_slots: int) -> None:
        if n_slots < 1:
            raise ValueError("a pool needs at least one slot")
        self.n_experts = n_experts
        self.slot_of = [[FREE] * n_experts for _ in range(n_layers)]
        self.owner = np.full(n_slots, FREE, np.int64)
        self.last_used = np.full(n_slots, FREE, np.int64)
        self.warmth = np.full(n_layers * n_experts, -np.inf)
        self.life = HALF_LIFE * n_layers
        self.hand = 0
        self.free = list(range(n_slots - 1, -1, -1))

    @property
    def n_slots(self) -> int:
        """Slots in the pool."""
        return len(self.owner)

    @property
    def n_used(self) -> int:
        """Slots that hold a row."""
        return len(self.owner) - len(self.free)

    def resident(self) -> NDArray[np.int64]:
        """Rows (layer * E + expert) that lie in a slot, in no order."""
        held: NDArray[np.int64] = self.owner[self.owner != FREE]
        return held

    def note_use(self, row: int, now: int) -> None:
        """Count one use of a row."""
        at, old = now / self.life, float(self.warmth[row])
        high, low = (old, at) if old > at else (at, old)
        self.warmth[row] = high + math.log2(1.0 + 2.0 ** (low - high))  # log2(2**old + 2**at)


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What a look-up found: `slots[i]` holds (or, after the fetch, will hold) `experts[i]`.

    `misses` are the (expert, slot) pairs to fetch before use; `evicted` are the rows
    (layer * E + expert) that lost their slots to them.
    """

    slots: list[int]
    misses: list[tuple[int, int]]
    evicted: list[int]


def lookup(tables: CacheTables, layer: int, experts: Sequence[int], *, now: int) -> LookupResult:
    """Find the slots of a layer's experts, giving the missing ones a slot each.

    Free slots go first, then the slot of the coldest row of a rotating window; never a slot used at
    the same `now`. So `now` must grow from one (step, layer) to the next; calls that must not
    evict each other's experts share one. An expert may be named more than once.

    Raises:
        ValueError: more distinct experts at this `now` than slots. Nothing was changed but the
            times of the hits.
    """
    row = tables.slot_of[layer]
    last_used = tables.last_used
    missing: list[int] = []
    slots: list[int] = []
    base = layer * tables.n_experts
    for expert in experts:
        tables.note_use(base + expert, now)
        slot = row[expert]
        slots.append(slot)
        if slot >= 0:
            last_used[slot] = now
        elif expert not in missing:
            missing.append(expert)
    if not missing:
        return LookupResult(slots, [], [])
    _check_room(tables, len(missing), now)
    misses: list[tuple[int, int]] = []
    evicted: list[int] = []
    for expert in missing:
        slot = tables.free.pop() if tables.free else _victim(tables, now)
        old = int(tables.owner[slot])
        if old != FREE:
            tables.slot_of[old // tables.n_experts][old % tables.n_experts] = FREE
            evicted.append(old)
        tables.owner[slot] = base + expert
        row[expert] = slot
        last_used[slot] = now
        misses.append((expert, slot))
    return LookupResult([row[expert] for expert in experts], misses, evicted)


def claim(tables: CacheTables, layer: int, expert: int) -> int | None:
    """Give a row a free slot outside of a look-up (preload, prefill); None if there is none.

    The row must not be in a slot already. It counts as the coldest until a look-up hits it.
    """
    if not tables.free:
        return None
    slot = tables.free.pop()
    tables.owner[slot] = layer * tables.n_experts + expert
    tables.slot_of[layer][expert] = slot
    tables.last_used[slot] = 0
    return slot


def release(tables: CacheTables, slot: int) -> None:
    """Empty a slot whose row did not arrive, so that no later look-up takes it for a hit."""
    old = int(tables.owner[slot])
    if old == FREE:
        return
    tables.slot_of[old // tables.n_experts][old % tables.n_experts] = FREE
    tables.owner[slot] = FREE
    tables.last_used[slot] = FREE
    tables.free.append(slot)


def _check_room(tables: CacheTables, n_missing: int, now: int) -> None:
    if n_missing <= len(tables.free):
        return
    busy = int(np.count_nonzero(tables.last_used == now))
    if n_missing > tables.n_slots - busy:
        raise ValueError(f"{busy + n_missing} experts at once do not fit {tables.n_slots} slots")


def _victim(tables: CacheTables, now: int) -> int:
    """The slot of the coldest row in the next window that has one not used at `now`."""
    n_slots = tables.n_slots
    while True:
        begin = tables.hand if n_slots > WINDOW else 0
        end = min(begin + WINDOW, n_slots)  # a window stops at the last slot instead of wrapping
        tables.hand = end % n_slots
        warmth = tables.warmth[tables.owner[begin:end]]  # [<= WINDOW]
        in_use = tables.last_used[begin:end] == now
        warmth[in_use] = np.inf
        slot = int(warmth.argmin())
        if not in_use[slot]:
            return begin + slot
