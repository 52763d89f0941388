"""The hot FP4 set at work: promoted rows are the file's, faults cost nothing, answers are equal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moet_desk.engine.handle import EngineHandle, EngineOptions, Quality, Sampling
from moet_desk.engine.hot_set import LOOK_AGAIN_S, PAUSE_S, HotSet
from moet_desk.engine.promotion import MOST_PER_TURN, Budget, Fill, Promotion
from moet_desk.engine.residency import Residency
from moet_desk.engine.serving import Serving
from moet_desk.errors import fail
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from moet_desk.telemetry import Tier
from tests.engine.test_balanced import DRAWN, GREEDY, REQUESTS
from tests.engine.test_promise import STORY, Answer, answer, ask, engine
from tests.engine.test_residency import expanded, residency_of


@pytest.fixture
def reader(demo_pack: Path) -> Iterator[PackReader]:
    reader = PackReader.open(demo_pack)
    yield reader
    reader.close()


def used(residency: Residency, layer: int, experts: Sequence[int], times: int) -> None:
    for _ in range(times):
        residency.slots(Plane.BASE, layer, experts)


def fine_rows(residency: Residency) -> set[int]:
    return set(residency.fine_fill(idle=True).resident.tolist())


# -- the CPU's residency -----------------------------------------------------------------------


def test_promote__free_and_taken_slots__hold_what_the_file_holds(reader: PackReader) -> None:
    residency, _ = residency_of(reader, slots=6)
    residency.promote([Promotion(row) for row in (3, 40, 71, 100, 130, 255)])
    residency.promote([Promotion(9, replaces=40), Promotion(200, replaces=255)])
    assert fine_rows(residency) == {3, 9, 71, 100, 130, 200}
    for row in fine_rows(residency):
        layer, expert = divmod(row, 32)
        [slot] = residency.slots(Plane.FINE, layer, [expert])
        assert torch.equal(slot, expanded(reader, Plane.FINE, layer, expert))
    counters = residency.counters(step_s=0.0)
    assert (counters.promotions, counters.hits_fine, counters.bytes_ram_to_slot) == (8, 6, 0)
    assert counters.bytes_promoted == 8 * reader.layout.slot_floats * 4
    assert residency.view().tiers[200 // 32][200 % 32] == Tier.FINE


def test_promote__read_fails__no_slot_claims_the_row_and_the_others_stand(
    reader: PackReader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    residency, _ = residency_of(reader, slots=6, arena_rows=0)
    used(residency, 1, [1, 2, 3, 4], times=30)
    intact = type(reader).read_row

    def failing(self: PackReader, plane: Plane, row: int, out: memoryview, **more: object) -> None:
        if row == 34:
            raise fail("MD-NVME-04", layer=1, expert=2, path="x", model="demo", reason="test")
        intact(self, plane, row, out)

    hot_set = HotSet(residency, 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(type(reader), "read_row", failing)
        assert hot_set.turn(10.0, idle=True) == 0
    assert fine_rows(residency) == {33}
    assert "promoting experts pauses for 60 s: MD-NVME-04" in caplog.text
    assert hot_set.turn(9.9 + PAUSE_S, idle=True) == 0
    assert hot_set.turn(10.0 + PAUSE_S, idle=True) == 3
    for expert, slot in zip(
        [1, 2, 3, 4], residency.slots(Plane.FINE, 1, [1, 2, 3, 4]), strict=True
    ):
        assert torch.equal(slot, expanded(reader, Plane.FINE, 1, expert))


def test_fill__while_decoding__only_rows_of_which_both_planes_are_in_ram(
    reader: PackReader,
) -> None:
    residency, arena = residency_of(reader, slots=8)
    used(residency, 0, [1, 2, 3, 4], times=30)
    arena.row(Plane.FINE, 2)
    arena.row(Plane.FINE, 77)
    arena.row(Plane.BASE, 90)
    assert np.flatnonzero(residency.fine_fill(idle=False).may).tolist() == [2]
    assert residency.fine_fill(idle=True).may.all()
    reads = arena.counters.from_nvme
    hot_set = HotSet(residency, 0.0)
    assert hot_set.turn(10.0, idle=False) == 1
    assert fine_rows(residency) == {2}
    assert arena.counters.from_nvme == reads
    assert hot_set.turn(20.0, idle=True) == 3
    assert fine_rows(residency) == {1, 2, 3, 4}


def test_budget__pool_of_one_layers_experts__none(reader: PackReader) -> None:
    least, _ = residency_of(reader, slots=4)
    assert least.promotion_budget() is None
    used(least, 0, [1, 2, 3, 4], times=30)
    assert HotSet(least, 0.0).turn(10.0, idle=True) == 0


def test_promoted_rows__hot_at_2_bits__survive_a_cold_rerun(reader: PackReader) -> None:
    """A row that no 4-bit look-up has used yet would be the coldest of the fine pool."""
    residency, _ = residency_of(reader, slots=8)
    residency.slots(Plane.FINE, 5, [20, 21, 22, 23])
    used(residency, 0, [1, 2, 3, 4], times=30)
    residency.promote([Promotion(row) for row in (1, 2, 3, 4)])
    residency.slots(Plane.FINE, 6, [10, 11, 12, 13])
    assert fine_rows(residency) == {1, 2, 3, 4, *(6 * 32 + e for e in (10, 11, 12, 13))}


# -- when --------------------------------------------------------------------------------------


class Tier_:
    """A fine pool of two slots over four rows, always able to copy."""

    def __init__(self, budget: Budget | None) -> None:
        self.budget, self.base_bytes, self.looks = budget, 0, 0
        self.heat = np.array([0.5, 0.4, 0.3, 0.2])
        self.promoted: list[int] = []

    def promotion_budget(self) -> Budget | None:
        return self.budget

    def fine_fill(self, *, idle: bool) -> Fill:
        self.looks += 1
        held = np.array(self.promoted, np.int64)
        return Fill(self.heat, held, 2 - len(held), np.ones(4, np.bool_), self.base_bytes)

    def promote(self, promotions: Sequence[Promotion]) -> None:
        self.promoted += [one.row for one in promotions]


def test_turn__nothing_more_to_do__looks_four_times_a_second_only() -> None:
    tier = Tier_(Budget(bytes_per_s=100_000, row_bytes=10))
    hot_set = HotSet(tier, 0.0)
    assert [hot_set.turn(0.1 + step / 1000, idle=False) for step in range(1000)].count(2) == 1
    assert tier.promoted == [0, 1]
    assert tier.looks <= 2 + 1 / LOOK_AGAIN_S


def test_turn__rows_too_large_for_a_second__still_promoted_one_by_one() -> None:
    tier = Tier_(Budget(bytes_per_s=10, row_bytes=25))
    hot_set = HotSet(tier, 0.0)
    when = [t / 4 for t in range(1, 40) if hot_set.turn(t / 4, idle=False)]
    assert when == [2.5, 5.0]


def test_turn__steps_fetch_all_the_budget__waits_until_they_hit() -> None:
    tier = Tier_(Budget(bytes_per_s=1000, row_bytes=100))
    hot_set = HotSet(tier, 0.0)
    for step in range(1, 20):
        tier.base_bytes += 600
        assert hot_set.turn(step / 2, idle=False) == 0
    assert hot_set.turn(10.0, idle=False) == 2


def test_turn__first_look__at_most_a_few_rows() -> None:
    tier = Tier_(Budget(bytes_per_s=10**9, row_bytes=1))
    tier.heat = np.full(4, 0.5)
    assert HotSet(tier, 0.0).turn(1.0, idle=True) <= MOST_PER_TURN


# -- the engine --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wanted(demo_pack: Path) -> list[Answer]:
    """Each request alone, everything resident, nothing promoted."""
    with engine(demo_pack, hot_set=False) as handle:
        answers = [answer(handle, [request])[0] for request in REQUESTS]
        assert handle.snapshot().counters.promotions == 0
        return answers


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_answers__rows_promoted_while_decoding__those_without(
    demo_pack: Path, wanted: list[Answer]
) -> None:
    with engine(demo_pack, fine_slots=128) as handle:
        assert answer(handle, [REQUESTS[2]]) == [wanted[2]]  # exact: brings FP4 rows to RAM
        before = handle.snapshot().counters.promotions
        assert answer(handle, [REQUESTS[3]]) == [wanted[3]]
        assert handle.snapshot().counters.promotions == before  # a fast answer has no use for it
        assert answer(handle, [REQUESTS[1]]) == [wanted[1]]  # balanced: other rows become hot
        assert handle.snapshot().counters.promotions > before
        assert answer(handle, REQUESTS[::-1]) == wanted[::-1]


def test_answers__rows_promoted_from_disk_while_idle__those_without(
    demo_pack: Path, wanted: list[Answer]
) -> None:
    sizes = {"fine_slots": 40, "pool_slots": 60, "arena_rows": 0}
    with engine(demo_pack, quality=Quality.BALANCED, **sizes) as handle:
        assert answer(handle, [REQUESTS[3]]) == [wanted[3]]
        assert handle.snapshot().counters.promotions == 0  # no row is in RAM
        until(lambda: handle.snapshot().counters.promotions >= 4)
        assert answer(handle, REQUESTS[::-1]) == wanted[::-1]
        assert handle.snapshot().counters.hits_fine > 0


@pytest.mark.parametrize("hot_set", [True, False])
def test_answers__fine_pool_of_one_layers_experts__those_of_everything_resident(
    demo_pack: Path, wanted: list[Answer], *, hot_set: bool
) -> None:
    with engine(demo_pack, fine_slots=4, hot_set=hot_set) as handle:
        assert answer(handle, REQUESTS) == wanted
        assert handle.snapshot().counters.promotions == 0


def test_promotions__fast_answers_only__none(demo_pack: Path) -> None:
    with engine(demo_pack, fine_slots=60) as handle:
        answer(handle, [ask(STORY, Quality.FAST, Sampling(temperature=0))])
        assert handle.snapshot().counters.lookups > 0
        time.sleep(1.2)  # two idle turns
        assert handle.snapshot().counters.promotions == 0


def test_promotions__saved_heat__hottest_rows_while_idle_after_a_start(
    own_pack: Path,
) -> None:
    with engine(own_pack) as handle:
        answer(handle, [REQUESTS[0]])
        saved = hottest_of(handle)
    from moet_desk.engine import heat

    heat.write(own_pack, saved)
    with engine(own_pack, fine_slots=20, quality=Quality.BALANCED) as handle:
        until(lambda: handle.snapshot().counters.promotions >= 20)
        cache = handle.snapshot().cache
    assert cache is not None
    fine = {
        layer * 32 + expert
        for layer, tiers in enumerate(cache.tiers)
        for expert, tier in enumerate(tiers)
        if tier == Tier.FINE
    }
    assert fine == {row for row, _ in saved[:20]}


def hottest_of(handle: EngineHandle) -> list[tuple[int, float]]:
    return handle._serving.core.residency.hottest()  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def own_pack(demo_pack: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(demo_pack, tmp_path / "demo"))


def test_promotions__a_prompt_is_being_read__none(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading: list[bool] = []
    turn = HotSet.turn
    serving: list[Serving] = []

    def watched(self: HotSet, now_s: float, *, idle: bool) -> int:
        if serving:
            reading.append(serving[0]._scheduler.to_read() is not None)
        return turn(self, now_s, idle=idle)

    monkeypatch.setattr(HotSet, "turn", watched)
    long = replace(ask(" ".join([STORY] * 30), Quality.BALANCED, DRAWN), max_tokens=4)
    with engine(demo_pack, fine_slots=60, prefill_chunk=64) as handle:
        serving.append(handle._serving)  # type: ignore[attr-defined]
        streams = [handle.submit(one) for one in (ask(STORY, Quality.BALANCED, GREEDY), long)]
        for stream in streams:
            assert len(list(stream)) > 3
    assert reading
    assert not any(reading)


def test_option__off__nothing_is_promoted(demo_pack: Path) -> None:
    serving = Serving(demo_pack, EngineOptions(save_heat=False, hot_set=False))
    serving.idle(time.monotonic())
    assert serving.core.residency.counters(step_s=0.0).promotions == 0
    serving.close()
