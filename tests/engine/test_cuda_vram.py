"""Pools on a card that shrink and grow: tables, bytes, and what is said; the card is a fake one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moet_desk.engine import serving
from moet_desk.engine.cuda import load_pools, loader
from moet_desk.engine.cuda.dense_weights import DenseLoader
from moet_desk.engine.cuda.expert_stream import Reading
from moet_desk.engine.cuda.load_pools import fill_slots
from moet_desk.engine.cuda.loader import CudaCore, load
from moet_desk.engine.cuda.mailbox_server import MailboxServer
from moet_desk.engine.cuda.pools import DevicePool
from moet_desk.engine.cuda.prefill import CudaPrefiller
from moet_desk.engine.cuda.slot_memory import growable_slots
from moet_desk.engine.cuda.vmm import DriverError
from moet_desk.engine.cuda.vram import CardMemory, VramKeeper
from moet_desk.engine.decode import Decoder
from moet_desk.engine.handle import (
    EngineHandle,
    EngineOptions,
    GenerateRequest,
    Sampling,
    start_engine,
)
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.engine.promotion import Promotion
from moet_desk.engine.serving import Serving
from moet_desk.engine.vram_arbiter import CALM_S, LEAST_FREE, Terms, Why
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import Event, Failed, Finished, TextDelta
from moet_desk.units import GIB, MIB
from tests.engine.fake_card import RUBBISH, FakeCard

LEAST = 32  # slots of each plane that the demo model needs for a step


def options(**sizes: Any) -> EngineOptions:
    given = {"vram_bytes": 10**9, **sizes}
    return EngineOptions(save_heat=False, kv_format="f32", context=64, ram_bytes=10**9, **given)


@contextmanager
def on_card(pack: Path, card: FakeCard | None, **sizes: Any) -> Iterator[CudaCore]:
    """The model on a made-up card; without one its slots have a fixed size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_pools, "open_driver", lambda device: card)
        core = load(pack, options(**sizes), device=torch.device("cpu"))
    try:
        yield core
    finally:
        core.close()


def rows_in(core: CudaCore, plane: Plane) -> set[int]:
    """The rows in slots, after a check of every table and byte."""
    pool = core.pools[plane]
    tables, buffer = pool.tables, bytearray(pool.arena.stride)
    held = {row: slot for slot, row in enumerate(tables.owner.tolist()) if row >= 0}
    assert held == {row: slot for row, slot in enumerate(tables.slot_of.tolist()) if slot >= 0}
    free = tables.free[: int(tables.n_free)].tolist()
    assert sorted([*free, *held.values()]) == list(range(pool.n_slots))
    for row, slot in held.items():
        core.reader.read_row(plane, row, memoryview(buffer))
        assert bytes(pool.slots[slot].numpy()) == bytes(buffer)
    return set(held)


def keeper(core: CudaCore, card: FakeCard, *, trims: list[int] | None = None) -> VramKeeper:
    """The core's, looking at what the made-up card has left."""
    vram = core.vram
    assert vram is not None
    vram._card = CardMemory(lambda: card.free, lambda: None if trims is None else trims.append(1))
    return vram


def test_load__as_planned__pools_grow_to_all_rows_and_fall_back_to_less(demo_pack: Path) -> None:
    card = FakeCard(free=3 * GIB)
    with on_card(demo_pack, card) as core:
        assert {plane: pool.n_slots for plane, pool in core.pools.items()} == {
            Plane.BASE: 256, Plane.FINE: 256,
        }  # fmt: skip
        assert rows_in(core, Plane.BASE) == set(range(256))
        assert card.free < 3 * GIB - 28 * MIB
    assert (card.free, card.ranges) == (3 * GIB, {})


def test_load__a_plan_of_few_slots__addresses_for_all_but_memory_for_few(demo_pack: Path) -> None:
    card = FakeCard()
    with on_card(demo_pack, card, pool_slots=40) as core:
        assert core.pools[Plane.BASE].slots.shape[0] == 40  # as the person said, at most
        assert core.pools[Plane.BASE].n_slots == 40
    with pytest.MonkeyPatch.context() as patch:
        few = lambda *given: (LEAST, LEAST)  # noqa: E731
        patch.setattr("moet_desk.plan._slots", few)
        with on_card(demo_pack, card) as core:
            pool = core.pools[Plane.BASE]
            assert (pool.slots.shape[0], pool.n_slots) == (256, LEAST)
            assert pool.memory.usable == 2 * MIB // pool.arena.stride
            assert pool.resize(256) == 256
            assert pool.resize(100) == 100
            assert len(rows_in(core, Plane.BASE)) == LEAST


def test_load__card_has_less_than_planned__as_many_slots_as_fit(
    demo_pack: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with on_card(demo_pack, FakeCard(free=10 * MIB)) as core:  # the fine pool's least takes 2 MiB
        assert core.pools[Plane.BASE].n_slots == 8 * MIB // core.pools[Plane.BASE].arena.stride
        assert core.pools[Plane.FINE].n_slots == 2 * MIB // core.pools[Plane.FINE].arena.stride
        assert len(rows_in(core, Plane.BASE)) == core.pools[Plane.BASE].n_slots
    assert "room for 146 of 256 planned slots" in caplog.text


def test_load__not_even_the_least_fits__said_with_figures_and_nothing_stays(
    demo_pack: Path,
) -> None:
    card = FakeCard(free=3 * MIB)
    with pytest.raises(MoetError) as caught, on_card(demo_pack, card):
        pass
    assert caught.value.code == "MD-GPU-11"
    assert "of experts, of which 0 B found some" in caught.value.cause
    assert (card.free, card.pieces, card.ranges) == (3 * MIB, {}, {})


@pytest.mark.parametrize("fails", ["reserve", "map"])
def test_load__driver_refuses__slots_of_a_fixed_size_and_a_line_in_the_log(
    demo_pack: Path, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    card = FakeCard()
    card.fails[fails] = 801
    with on_card(demo_pack, card) as core:
        assert core.vram is None
        assert core.pools[Plane.BASE].resize(100) == 100
        assert core.pools[Plane.BASE].memory.usable == 256
    assert f"slots keep their size until the model is loaded again: {fails}" in caplog.text


def test_view__torch_makes_no_tensor_of_it__nothing_stays_taken() -> None:
    card = FakeCard()

    def refuses(address: int, n_bytes: int) -> torch.Tensor:
        raise RuntimeError("not a pointer of this card")

    card.view = refuses  # type: ignore[method-assign]
    with pytest.raises(DriverError, match="not a pointer"):
        growable_slots(card, 4096, least=4, most=16)
    assert (card.pieces, card.ranges) == ({}, {})


def test_resize__hot_rows__stay_and_bytes_go_with_them(demo_pack: Path) -> None:
    card = FakeCard()
    hot = [250, 3, 251, 252, 7, 130]
    with on_card(demo_pack, card) as core:
        core.residency.restore_heat([(row, 5.0) for row in hot])
        pool, before = core.pools[Plane.BASE], card.free
        assert pool.resize(LEAST) == LEAST
        assert set(hot) <= rows_in(core, Plane.BASE)
        assert len(rows_in(core, Plane.BASE)) == LEAST
        assert card.free - before == 6 * 2 * MIB  # of seven pieces, one holds 32 slots
        assert core.residency.sizes().base_slots == LEAST
        assert core.residency.sizes().base_slots_used == LEAST
        assert bool((pool.slots.view(-1)[2 * MIB : 14 * MIB] == RUBBISH).all())
        assert pool.resize(200) == 200
        assert len(rows_in(core, Plane.BASE)) == LEAST
        fill_slots(pool, core.arena, [row for row in range(256) if pool.tables.slot_of[row] < 0])
        assert len(rows_in(core, Plane.BASE)) == 200


def test_resize__card_is_full__grows_as_far_as_it_goes(demo_pack: Path) -> None:
    card = FakeCard()
    with on_card(demo_pack, card) as core:
        pool = core.pools[Plane.FINE]
        pool.resize(LEAST)
        card.free = 4 * MIB
        assert pool.resize(256) == 6 * MIB // pool.arena.stride
        assert rows_in(core, Plane.FINE) == set()
        core.residency.promote([Promotion(row) for row in range(60)])
        assert rows_in(core, Plane.FINE) == set(range(60))


def kept(core: CudaCore) -> tuple[int, int]:
    return core.pools[Plane.BASE].n_slots, core.pools[Plane.FINE].n_slots


def test_keeper__another_program_comes_and_goes__slots_follow(
    demo_pack: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moet_desk.engine")
    card, trims = FakeCard(free=2 * GIB), list[int]()
    with on_card(demo_pack, card) as core:
        vram = keeper(core, card, trims=trims)
        vram._terms = Terms(keep=0)
        vram.turn(10.0)
        assert kept(core) == (256, 256)
        view = vram.view()
        assert (view.free, view.changes, view.why) == (card.free, 0, Why.FITS.value)
        assert view.slots == view.planned > 28 * MIB
        assert not trims
        card.free = LEAST_FREE - 1
        vram.turn(10.5)
        assert kept(core) == (256, 256)  # not so soon
        vram.turn(11.0)
        assert trims
        assert kept(core) == (LEAST, LEAST)  # what was short is more than the pools can give
        view = vram.view()
        assert (view.changes, view.why) == (1, Why.PRESSURE.value)
        assert view.slots < view.planned
        assert "of the card, before 29.0 MiB: 32 2-bit and 32 4-bit" in caplog.text
        assert Why.PRESSURE.value in caplog.text
        card.free = 0
        for second in range(12, 16):
            vram.turn(float(second))
        core.residency.restore_heat([(250, 5.0), (130, 2.0)])
        assert caplog.text.count("has its least size already") == 1
        assert vram.view().why == Why.LEAST.value
        card.free = 2 * GIB
        for second in range(20, 20 + int(CALM_S) + 2):
            assert kept(core) == ((LEAST, LEAST) if second <= 20 + CALM_S else (256, 256))
            vram.turn(float(second))
        assert vram.view().why == Why.ROOM.value
        assert rows_in(core, Plane.BASE) == {130, *range(224, 256)}  # those with any heat


def test_fill_base__hottest_rows_first__those_in_ram_and_as_many_as_asked(demo_pack: Path) -> None:
    with on_card(demo_pack, FakeCard(), arena_rows=100) as core:
        pool, warm = core.pools[Plane.BASE], [(row, 1.0 + row) for row in range(256)]
        pool.resize(LEAST)
        pool.resize(256)
        core.residency.restore_heat(warm)
        held = rows_in(core, Plane.BASE)
        in_ram = {row for row in range(256) if core.arena.holds(Plane.BASE, row)} - held
        assert core.residency.fill_base(3) == 3
        assert rows_in(core, Plane.BASE) - held == set(sorted(in_ram)[-3:])
        assert core.residency.fill_base(1000) == len(in_ram) - 3
        assert rows_in(core, Plane.BASE) == held | in_ram
        assert core.residency.fill_base(1000) == 0


def test_fill_base__a_read_is_still_under_way__nothing_is_copied(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_card(demo_pack, FakeCard(), arena_rows=100) as core:
        core.pools[Plane.BASE].resize(LEAST)
        core.pools[Plane.BASE].resize(256)
        core.residency.restore_heat([(row, 1.0) for row in range(256)])
        monkeypatch.setattr(MailboxServer, "settle", lambda self, limit_s: False)
        assert core.residency.fill_base(9) == 0
        monkeypatch.undo()
        assert core.residency.fill_base(9) == 9


def test_keeper__a_limit_of_the_person__counts_at_once_down_and_up(demo_pack: Path) -> None:
    card = FakeCard(free=4 * GIB)
    with on_card(demo_pack, card) as core:
        vram = keeper(core, card)
        vram.turn(1.0)
        fixed = vram._fixed
        vram.limit(fixed + 20 * MIB)
        vram.turn(1.1)
        base, fine = kept(core)
        assert (
            base * core.pools[Plane.BASE].arena.stride + fine * core.pools[Plane.FINE].arena.stride
            <= 20 * MIB
        )
        assert (base, vram.view().why) == (256, Why.LIMIT.value)  # fine slots go first
        assert LEAST < fine < 256
        vram.limit(1)
        vram.turn(1.2)
        assert kept(core) == (LEAST, LEAST)
        vram.limit(None)
        vram.turn(1.3)
        assert kept(core) == (256, 256)
        assert vram.view().limit is None


def test_keeper__limit_below_the_least__told_with_what_it_takes(
    demo_pack: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card = FakeCard(free=4 * GIB)
    with on_card(demo_pack, card) as core:
        vram = keeper(core, card)
        vram.limit(1)
        vram.turn(1.0)
        vram.turn(2.5)
        assert "memory.vram_limit is lower than" in caplog.text


def test_keeper__driver_fails__pools_stay_usable_and_it_is_said(
    demo_pack: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card = FakeCard(free=4 * GIB)
    with on_card(demo_pack, card) as core:
        vram = keeper(core, card)
        card.fails["unmap"] = 700
        vram.limit(1)
        vram.turn(1.0)
        assert kept(core)[1] == LEAST  # that slots are emptied needs no driver
        assert len(rows_in(core, Plane.BASE)) == 256
        assert "the driver refuses: unmap" in vram.view().why
        assert "until the model is loaded again" in caplog.text
        card.fails.clear()
        vram.limit(None)
        vram.turn(9.0)
        vram.make_room()
        assert kept(core) == (256, LEAST)  # not tried again


def test_keeper__something_did_not_fit__room_at_once(demo_pack: Path) -> None:
    card, trims = FakeCard(free=4 * GIB), list[int]()
    with on_card(demo_pack, card) as core:
        vram = keeper(core, card, trims=trims)
        before = card.free
        vram.make_room()
        assert kept(core) == (LEAST, LEAST)
        assert card.free > before
        assert vram.view().free == card.free
        assert trims


def test_fixed_bytes__what_the_plan_takes_beside_slots(demo_pack: Path) -> None:
    with on_card(demo_pack, FakeCard()) as core:
        assert core.vram is not None
        plan, strides = core.plan, [core.pools[plane].arena.stride for plane in Plane]
        rows = [plan.base_slots + plan.arena_base_rows, plan.fine_slots + plan.arena_fine_rows]
        moved = sum(n * stride for n, stride in zip(rows, strides, strict=True))
        assert core.vram._fixed == plan.bytes_total - moved > 256 * MIB


Fault = Callable[[], None]


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words")


def failing_dense(patch: pytest.MonkeyPatch, faults: list[Fault]) -> Mapping[str, list[int]]:
    """Dense weights whose n-th matrix meets the n-th fault; notes the budgets of plans."""
    budgets: dict[str, list[int]] = {"vram": []}
    intact_plan, intact = loader.vram_budget, DenseLoader.matrix

    def noted(free: int, limit: int | None = None) -> int:
        budgets["vram"].append(intact_plan(free, limit))
        return budgets["vram"][-1]

    def faulty(self: DenseLoader, *names: str) -> Any:
        if faults:
            faults.pop(0)()
        return intact(self, *names)

    patch.setattr(loader, "vram_budget", noted)
    patch.setattr(DenseLoader, "matrix", faulty)
    return budgets


def test_load__runs_out_of_memory__planned_with_less_and_loaded(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    budgets, card = failing_dense(monkeypatch, [out_of_memory]), FakeCard()
    with on_card(demo_pack, card) as core:
        assert core.pools[Plane.BASE].n_slots == 256
        assert len(card.ranges) == 2  # those of the first attempt were given back
    assert budgets["vram"][0] == 10**9
    assert budgets["vram"][-1] == 8 * 10**8
    assert "planned with less: CUDA out of memory" in caplog.text


def test_load__runs_out_of_memory_again__the_catalogue_says_so(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_dense(monkeypatch, [out_of_memory, out_of_memory])
    card = FakeCard()
    with pytest.raises(MoetError) as caught, on_card(demo_pack, card):
        pass
    assert caught.value.code == "MD-GPU-11"
    assert "the model (CUDA out of memory. Tried to allocate 2.00 GiB.)" in caught.value.cause
    assert not card.ranges


def test_load__another_fault__not_taken_for_a_full_card(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    budgets = failing_dense(monkeypatch, [broken])
    with pytest.raises(RuntimeError, match="illegal"), on_card(demo_pack, FakeCard()):
        pass
    assert len(budgets["vram"]) == 1


# -- prompts ---------------------------------------------------------------------------------


class Layers:
    """Three layers of which some find no memory: `faults` counts down the calls until then."""

    n_layers = 3

    def __init__(self, faults: list[int]) -> None:
        self.faults, self.begun = faults, 0
        self.read: list[int] = []

    def begin(self, tokens: list[int], sequence: KvSequence, reading: Reading) -> SimpleNamespace:
        self.begun += 1
        rows = SimpleNamespace(start=sequence.length, n=len(tokens))
        return SimpleNamespace(next_layer=0, rows=rows, reading=reading)

    def layer(self, chunk: SimpleNamespace) -> None:
        self.faults = [n - 1 for n in self.faults]
        if -1 in self.faults:
            self.faults.remove(-1)
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        self.read.append(chunk.next_layer)
        chunk.next_layer += 1


def prompt_read(
    layers: Layers, room: list[bool], sequence: KvSequence | None = None
) -> SimpleNamespace:
    """A request whose first chunk, of two, was read."""
    request = SimpleNamespace(
        kv=sequence or KvSequence(), prompt_ids=list(range(9)), plane=Plane.BASE, note_read=list,
        request=GenerateRequest(),
    )  # fmt: skip
    decoder = SimpleNamespace(drafting=SimpleNamespace(follows=lambda request: False))
    prefiller = CudaPrefiller(
        layers, decoder, chunk=8, fast=Reading.FAST, make_room=lambda: room.append(True),  # type: ignore[arg-type]
        clock=lambda: 0.0,
    )  # fmt: skip
    assert prefiller.step(request) == 8  # type: ignore[arg-type]
    return request


def test_prompt__a_chunk_finds_no_memory__read_anew_from_its_first_layer_with_more_room() -> None:
    layers, room = Layers([2]), list[bool]()
    request = prompt_read(layers, room)
    assert (layers.begun, room) == (2, [True])
    assert layers.read == [0, 1, 0, 1, 2]
    assert request.kv.length == 8


def test_prompt__a_chunk_finds_no_memory_twice__the_request_gets_the_fault() -> None:
    layers, room = Layers([1, 3]), list[bool]()
    with pytest.raises(RuntimeError, match="out of memory"):
        prompt_read(layers, room)
    assert layers.read == [0, 0]
    assert len(room) == 1


@pytest.mark.parametrize("sequence", [KvSequence(slot=0), KvSequence(ring=[3])])
def test_prompt__half_a_chunk_changed_what_it_began_from__not_read_anew(
    sequence: KvSequence,
) -> None:
    layers, room = Layers([1]), list[bool]()
    with pytest.raises(RuntimeError, match="out of memory"):
        prompt_read(layers, room, sequence)
    assert (layers.begun, room) == (1, [])


# -- the engine ------------------------------------------------------------------------------


def soon(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_engine__limit_set_while_idle__slots_go_and_the_snapshot_says_so(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = FakeCard(free=4 * GIB)
    monkeypatch.setattr(load_pools, "open_driver", lambda device: card)
    monkeypatch.setattr(CardMemory, "of", lambda device: CardMemory(lambda: card.free, list))
    cpu = torch.device("cpu")
    monkeypatch.setattr(serving, "_load", lambda *given: load(*given, device=cpu))
    engine = start_engine(demo_pack, options())
    try:
        assert engine.wait_ready(60)
        vram = engine.snapshot().vram
        assert vram is not None
        assert (vram.limit, vram.free) == (10**9, card.free)  # before anything was decided
        engine.limit_vram(1)
        soon(lambda: engine.snapshot().sizes.base_slots == LEAST)
        vram = engine.snapshot().vram
        assert vram is not None
        assert (vram.limit, vram.changes, vram.why) == (1, 1, Why.LIMIT.value)
    finally:
        engine.close()
    assert (card.free, card.ranges) == (4 * GIB, {})


def ask(engine: EngineHandle) -> list[Event]:
    sampling = Sampling(temperature=0)
    return list(engine.submit(GenerateRequest(prompt="A goat", max_tokens=3, sampling=sampling)))


def test_engine__a_step_finds_no_memory__request_fails_with_the_catalogue_next_one_works(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[Fault] = []
    intact, tended = Decoder.step, Serving._tend_card

    def step(self: Decoder, *given: Any) -> None:
        if faults:
            faults.pop()()
        intact(self, *given)

    def tend(self: Serving) -> None:
        if faults:
            faults.pop()()
        tended(self)

    room: list[bool] = []
    monkeypatch.setattr(Decoder, "step", step)
    monkeypatch.setattr(Serving, "_make_room", lambda self: room.append(True))
    engine = start_engine(demo_pack, EngineOptions(save_heat=False, context=64))
    try:
        assert engine.wait_ready(60)
        want = ask(engine)
        assert isinstance(want[-1], Finished)
        faults.append(out_of_memory)
        last = ask(engine)[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, MoetError)
        assert last.error.code == "MD-GPU-11"
        assert room == [True]
        monkeypatch.setattr(Decoder, "step", intact)
        monkeypatch.setattr(Serving, "_tend_card", tend)
        faults.append(out_of_memory)
        assert text_of(ask(engine)) == text_of(want)
        soon(lambda: room == [True, True])
    finally:
        engine.close()


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def test_pool__of_a_fixed_size__as_before(demo_pack: Path) -> None:
    with on_card(demo_pack, None) as core:
        assert core.vram is None
        assert isinstance(core.pools[Plane.BASE], DevicePool)
        assert core.pools[Plane.BASE].n_slots == 256
