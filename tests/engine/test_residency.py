"""Residency over a real pack: fills, evictions, errors in the middle, what the screens are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moet_desk.engine.residency import Residency
from moet_desk.engine.transfer import Transfer
from moet_desk.errors import MoetError, fail
from moet_desk.kernels.reference import expand_base, expand_fine
from moet_desk.store.arena import Arena
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from moet_desk.telemetry import Tier

LAYERS = tuple(range(1, 9))


@pytest.fixture
def reader(demo_pack: Path) -> Iterator[PackReader]:
    reader = PackReader.open(demo_pack)
    yield reader
    reader.close()


def residency_of(
    reader: PackReader, *, slots: int, arena_rows: int = 256
) -> tuple[Residency, Arena]:
    arena = Arena(reader, base_rows=arena_rows, fine_rows=arena_rows)
    transfer = Transfer(arena, reader.layout)
    residency = Residency(
        transfer, moe_layers=LAYERS, n_experts=32, base_slots=slots, fine_slots=slots, top_k=4
    )
    return residency, arena


def row_bytes(reader: PackReader, plane: Plane, row: int) -> torch.Tensor:
    meta = reader.meta
    buffer = bytearray(meta.base_stride if plane is Plane.BASE else meta.fine_stride)
    reader.read_row(plane, row, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=torch.uint8)


def expanded(reader: PackReader, plane: Plane, layer: int, expert: int) -> torch.Tensor:
    """An expert's weights, straight from the file."""
    out = torch.empty(reader.layout.slot_floats)
    base = row_bytes(reader, Plane.BASE, layer * 32 + expert)
    if plane is Plane.BASE:
        expand_base(base, reader.layout, out)
    else:
        fine = row_bytes(reader, Plane.FINE, layer * 32 + expert)
        expand_fine(base, fine, reader.layout, out)
    return out


@pytest.mark.parametrize("plane", list(Plane))
@pytest.mark.parametrize("arena_rows", [256, 3, 0])
def test_slots__any_order_of_use__hold_what_the_file_holds(
    reader: PackReader, plane: Plane, arena_rows: int
) -> None:
    residency, _ = residency_of(reader, slots=5, arena_rows=arena_rows)
    for step in range(6):
        for layer in (0, 3, 7):
            experts = [(step * 7 + layer + 5 * i) % 32 for i in range(4)]
            slots = residency.slots(plane, layer, experts)
            for expert, slot in zip(experts, slots, strict=True):
                assert torch.equal(slot, expanded(reader, plane, layer, expert))


def test_read__for_a_prompt__evicts_nothing(reader: PackReader) -> None:
    residency, arena = residency_of(reader, slots=6, arena_rows=8)
    residency.slots(Plane.BASE, 0, [1, 2, 3, 4])
    hot = [arena.holds(Plane.BASE, row) for row in (1, 2, 3, 4)]
    for layer in range(8):
        for expert in range(32):
            got = residency.read(Plane.BASE, layer, expert)
            if expert % 11 == 0:
                assert torch.equal(got, expanded(reader, Plane.BASE, layer, expert))
    counters = residency.counters(step_s=0.0)
    assert counters.evictions == 0
    assert [arena.holds(Plane.BASE, row) for row in (1, 2, 3, 4)] == hot
    before = counters.hits_base
    residency.slots(Plane.BASE, 0, [1, 2, 3, 4])
    assert residency.counters(step_s=0.0).hits_base == before + 4


def test_fetch_error__in_the_middle__no_slot_claims_what_it_lacks(
    reader: PackReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    residency, arena = residency_of(reader, slots=4, arena_rows=4)
    residency.slots(Plane.BASE, 0, [0, 1, 2, 3])
    intact = type(reader).read_row

    def failing(self: PackReader, plane: Plane, row: int, out: memoryview, **more: object) -> None:
        if row == 32 + 9:
            raise fail("MD-NVME-04", layer=1, expert=9, path="x", model="demo", reason="test")
        intact(self, plane, row, out)

    with monkeypatch.context() as patch:
        patch.setattr(type(reader), "read_row", failing)
        with pytest.raises(MoetError):
            residency.slots(Plane.BASE, 1, [8, 9, 10, 11])
    for expert, slot in zip(
        [8, 9, 10, 11], residency.slots(Plane.BASE, 1, [8, 9, 10, 11]), strict=True
    ):
        assert torch.equal(slot, expanded(reader, Plane.BASE, 1, expert))
    assert arena.counters.read_errors == 1


def test_view__after_uses__tiers_heat_and_generations(reader: PackReader) -> None:
    residency, arena = residency_of(reader, slots=8, arena_rows=16)
    arena.preload(Plane.BASE, range(16), progress=lambda _: None)
    first = residency.view()
    assert first.layers == LAYERS
    assert list(first.tiers[0]) == [Tier.RAM] * 16 + [Tier.NVME] * 16
    assert set(first.tiers[5]) == {Tier.NVME}
    for _ in range(20):
        residency.slots(Plane.BASE, 0, [3, 4])
    residency.slots(Plane.FINE, 0, [4])
    second = residency.view()
    assert second.tiers[0][3] == Tier.BASE
    assert second.tiers[0][4] == Tier.FINE
    assert second.heat[0][3] > 2
    assert second.heat[0][9] == 0
    assert second.generations[0] == first.generations[0] + 1
    assert second.generations[1:] == first.generations[1:]
    assert residency.view().generations == second.generations
    assert second.hit_share[0] is not None
    assert second.hit_share[3] is None


def test_view__stories__count_every_use_fetch_and_eviction(reader: PackReader) -> None:
    residency, arena = residency_of(reader, slots=2, arena_rows=16)
    arena.preload(Plane.BASE, range(16), progress=lambda _: None)
    residency.view()
    for experts in ([3, 20], [3, 20], [4, 5], [3, 20]):  # the second is answered by slots
        residency.slots(Plane.BASE, 0, experts)
    stories = residency.view().stories
    assert stories is not None
    assert stories.exact
    three, twenty, four = (stories.of(expert) for expert in (3, 20, 4))
    assert (three.uses, three.fetches, three.evictions) == (3.0, 2, 1)
    assert (four.uses, four.fetches, four.evictions) == (1.0, 1, 1)
    assert (three.source, twenty.source) == (Tier.RAM, Tier.NVME)
    assert three.used_s == three.fetched_s == pytest.approx(stories.now_s)
    assert (stories.of(9).uses, stories.of(9).used_s) == (0.0, None)
    later = residency.view().stories
    assert later is not None
    assert (later.uses, later.fetches) == (stories.uses, stories.fetches)
    assert later.used_s == stories.used_s


def test_counters__every_lookup__answered_by_exactly_one_tier(reader: PackReader) -> None:
    residency, arena = residency_of(reader, slots=6, arena_rows=5)
    for step in range(30):
        residency.slots(Plane.BASE, step % 8, [step % 32, (step + 3) % 32])
    counters = residency.counters(step_s=1.0)
    assert counters.lookups == 60
    assert counters.hits_base + counters.from_ram + counters.from_nvme == 60
    assert counters.bytes_nvme_to_ram == counters.from_nvme * reader.meta.base_stride
    shares = residency.tier_share()
    assert shares is not None
    assert sum(shares) == pytest.approx(1.0)
    assert arena.n_used(Plane.BASE) == 5


def test_preload__hottest_first_given__the_coldest_is_evicted_first(reader: PackReader) -> None:
    residency, _ = residency_of(reader, slots=6)
    residency.preload([5, 6, 7, 8, 9, 10], progress=lambda _: None)
    residency.slots(Plane.BASE, 2, [0])
    tiers = residency.view().tiers[0]
    assert tiers[10] != Tier.BASE
    assert tiers[5] == Tier.BASE


def test_heat__saved_and_restored__same_order(reader: PackReader) -> None:
    residency, _ = residency_of(reader, slots=8)
    for _ in range(5):
        residency.slots(Plane.BASE, 3, [7])
    residency.slots(Plane.BASE, 4, [1, 2])
    saved = residency.hottest()
    assert [row for row, _ in saved] == [3 * 32 + 7, 4 * 32 + 1, 4 * 32 + 2]
    other, _ = residency_of(reader, slots=8)
    other.restore_heat([*saved, (10**6, 3.0), (-1, 3.0)])
    assert other.hottest() == saved
