"""Slot tables against a dictionary, under every order of look-ups and releases."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moet_desk.kernels.reference import CacheTables, claim, lookup, release
from moet_desk.kernels.reference.cache import FREE, HALF_LIFE, WINDOW

LAYERS, EXPERTS = 3, 6
EXPERT_LISTS = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=5)


class CacheMachine(RuleBasedStateMachine):
    """`last` is the model: row -> time of its last look-up."""

    @initialize(n_slots=st.integers(1, 10))
    def start(self, n_slots: int) -> None:
        self.tables = CacheTables(LAYERS, EXPERTS, n_slots)
        self.last: dict[int, int] = {}
        self.now = 0

    @rule(layer=st.integers(0, LAYERS - 1), experts=EXPERT_LISTS, same=st.booleans())
    def look_up(self, layer: int, experts: list[int], same: bool) -> None:
        self.now += not same
        rows = {layer * EXPERTS + e for e in experts}
        busy = {row for row, at in self.last.items() if at == self.now} | rows
        if len(busy) > self.tables.n_slots:
            with pytest.raises(ValueError, match="do not fit"):
                lookup(self.tables, layer, experts, now=self.now)
            self.last.update({row: self.now for row in rows if row in self.last})
            return
        missing = rows - self.last.keys()
        self.last.update({row: self.now for row in rows if row in self.last})
        found = lookup(self.tables, layer, experts, now=self.now)
        assert {layer * EXPERTS + e for e, _ in found.misses} == missing
        assert len(found.misses) == len(missing)
        for row in found.evicted:
            assert self.last.pop(row) != self.now
            kept = [self.tables.warmth[other] for other in self.last if other not in busy]
            assert self.tables.warmth[row] <= min([self.tables.warmth[row], *kept])
        self.last.update(dict.fromkeys(rows, self.now))
        assert [self.tables.owner[s] - layer * EXPERTS for s in found.slots] == experts
        assert dict(found.misses).items() <= dict(zip(experts, found.slots, strict=True)).items()

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, self.tables.n_slots - 1))
        self.last.pop(self.tables.owner[slot], None)
        release(self.tables, slot)

    @rule(layer=st.integers(0, LAYERS - 1), expert=st.integers(0, EXPERTS - 1))
    def preload(self, layer: int, expert: int) -> None:
        row = layer * EXPERTS + expert
        if row in self.last or self.now == 0:
            return
        slot = claim(self.tables, layer, expert)
        assert (slot is None) == (len(self.last) == self.tables.n_slots)
        if slot is not None:
            self.last[row] = 0

    @invariant()
    def tables_agree(self) -> None:
        tables = self.tables
        held = [int(row) for row in tables.owner if row != FREE]
        assert sorted(held) == sorted(self.last)
        assert sorted(tables.resident().tolist()) == sorted(self.last)
        assert tables.n_used == len(held)
        for slot, row in enumerate(tables.owner):
            if row == FREE:
                assert slot in tables.free
                assert tables.last_used[slot] == FREE
            else:
                assert tables.slot_of[row // EXPERTS][row % EXPERTS] == slot
                assert tables.last_used[slot] == self.last[row]
        known = [slot for layer in tables.slot_of for slot in layer if slot != FREE]
        assert len(known) == len(set(known)) == len(held)
        assert len(tables.free) == len(set(tables.free)) == tables.n_slots - len(held)


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestCacheMachine = CacheMachine.TestCase


def test_lookup__duplicates__one_slot_and_one_miss() -> None:
    tables = CacheTables(1, 8, 4)
    found = lookup(tables, 0, [5, 2, 5, 5], now=1)
    assert found.slots == [0, 1, 0, 0]
    assert found.misses == [(5, 0), (2, 1)]
    assert found.evicted == []
    assert lookup(tables, 0, [2, 5], now=2).misses == []


def test_lookup__pool_of_one_layers_set__every_step_evicts_and_works() -> None:
    tables = CacheTables(4, 8, 4)
    now = 0
    for step in range(5):
        for layer in range(4):
            now += 1
            experts = [(step + i) % 8 for i in range(4)]
            found = lookup(tables, layer, experts, now=now)
            assert len(set(found.slots)) == 4
            assert [tables.owner[s] for s in found.slots] == [layer * 8 + e for e in experts]


def test_lookup__full_pool__takes_the_coldest() -> None:
    tables = CacheTables(1, 8, 3)
    for now, expert in enumerate([0, 0, 0, 1, 2]):
        lookup(tables, 0, [expert], now=now)
    assert lookup(tables, 0, [7], now=5).evicted == [1]  # 0 is older, but was used three times


def test_lookup__a_past_favourite__fades() -> None:
    tables = CacheTables(1, 8, 2)
    for now in range(4):
        lookup(tables, 0, [0], now=now)
    for now in range(4, 4 + 6 * HALF_LIFE):
        lookup(tables, 0, [1 + now % 2], now=now)
    assert 0 not in tables.resident()


def test_warmth__many_uses__equals_the_decayed_count() -> None:
    tables = CacheTables(2, 4, 4)
    uses = [1, 2, 9, 30, 31, 64]
    for now in uses:
        lookup(tables, 1, [3], now=now)
    life = HALF_LIFE * 2
    count = sum(2.0 ** ((now - 64) / life) for now in uses)
    assert 2.0 ** (tables.warmth[7] - 64 / life) == pytest.approx(count)


def test_lookup__pool_wider_than_the_window__never_a_slot_in_use() -> None:
    n_slots = 2 * WINDOW + 40
    tables = CacheTables(4, 256, n_slots)
    now = 0
    for layer in range(4):
        for first in range(0, 256, 8):
            now += 1
            lookup(tables, layer, range(first, first + 8), now=now)
    assert tables.n_used == n_slots
    for step in range(200):
        now += 1
        experts = [(step * 37 + 11 * i) % 256 for i in range(8)]
        found = lookup(tables, step % 4, experts, now=now)
        assert len(set(found.slots)) == len(set(experts))
        assert [tables.owner[s] for s in found.slots] == [step % 4 * 256 + e for e in experts]


def test_lookup__a_whole_window_in_use__looks_further() -> None:
    tables = CacheTables(2, 2 * WINDOW, WINDOW + 1)
    lookup(tables, 0, [0], now=1)  # slot 0
    lookup(tables, 0, range(1, WINDOW + 1), now=2)  # all others
    tables.hand = 1  # the next window holds only slots that are in use
    assert lookup(tables, 1, [3], now=2).evicted == [0]


def test_lookup__more_experts_than_slots__refused_and_tables_kept() -> None:
    tables = CacheTables(1, 8, 2)
    lookup(tables, 0, [0, 1], now=1)
    with pytest.raises(ValueError, match="3 experts at once do not fit 2 slots"):
        lookup(tables, 0, [0, 4, 5], now=2)
    assert tables.owner.tolist() == [0, 1]


def test_tables__no_slots__refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        CacheTables(1, 1, 0)
