"""Pools of slots that shrink and grow on a card while answers are made: the same text, memory that
really goes back to the driver, and graphs that stay valid.

Measures the card's free memory, so nothing else may use the card meanwhile.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moet_desk.engine.cuda import load_pools
from moet_desk.engine.cuda.loader import CudaCore
from moet_desk.engine.cuda.loader import load as load_cuda
from moet_desk.engine.cuda.pools import DevicePool
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.cuda.vmm import GrowableMemory, cuda_driver
from moet_desk.engine.cuda.vram import CardMemory, VramKeeper
from moet_desk.engine.engine import Engine
from moet_desk.engine.handle import (
    EngineOptions,
    GenerateRequest,
    Quality,
    Sampling,
    start_engine,
)
from moet_desk.engine.vram_arbiter import Why
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import Failed, Finished, TextDelta
from moet_desk.units import GIB, MIB
from tests.engine.test_faults import events_of, text_of
from tests.engine.test_parity_demo import some_texts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
LEAST = 32  # slots of each plane that the demo model needs for a step
WITHIN_S = 30


def free() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def open_core(pack: Path, widths: tuple[int, ...] = (1, 4), **sizes: int) -> CudaCore:
    options = EngineOptions(save_heat=False, kv_format="f32", context=512, **sizes)  # type: ignore[arg-type]
    return load_cuda(pack, options, device=torch.device("cuda"), widths=widths)


# -- the driver ------------------------------------------------------------------------------


def test_memory__mapped_and_unmapped__goes_back_to_the_driver_and_keeps_its_address() -> None:
    driver = cuda_driver(DEVICE)
    torch.zeros(1, dtype=torch.uint8, device=DEVICE)[:1] = 7  # what filling loads stays loaded
    before = free()
    memory = GrowableMemory(driver, 64 * GIB)  # more than most cards have: addresses alone
    assert before - free() < 64 * MIB
    assert memory.resize(GIB) == GIB
    assert abs(before - free() - GIB) < 64 * MIB
    view = memory.view(64 * GIB)
    view[:GIB] = 7
    view[GIB - 5] = 9
    address = view.data_ptr()
    memory.resize(256 * MIB)
    assert abs(before - free() - 256 * MIB) < 64 * MIB
    memory.resize(2 * GIB)
    assert view.data_ptr() == address
    assert bool((view[: 256 * MIB] == 7).all())
    view[2 * GIB - 1] = 3
    assert int(view[2 * GIB - 1]) == 3
    memory.close()
    assert abs(before - free()) < 64 * MIB


def test_memory__more_than_the_card_has__as_much_as_there_is_then_all_back() -> None:
    before = free()
    memory = GrowableMemory(cuda_driver(DEVICE), before + 64 * GIB)
    mapped = memory.resize(before + 64 * GIB)
    assert 0 < mapped <= before
    assert free() < GIB
    memory.close()
    assert abs(before - free()) < 64 * MIB


def test_memory__a_captured_graph__reads_what_was_mapped_anew() -> None:
    memory = GrowableMemory(cuda_driver(DEVICE), 8 * GIB)
    memory.resize(128 * MIB)
    view, out = memory.view(8 * GIB), torch.zeros(1, dtype=torch.uint8, device=DEVICE)
    place = 100 * MIB
    graph = torch.cuda.CUDAGraph()
    view[place] = 1
    out.copy_(view[place : place + 1])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out.copy_(view[place : place + 1])
    memory.resize(64 * MIB)
    memory.resize(128 * MIB)
    view[place] = 42
    graph.replay()
    assert int(out) == 42
    memory.close()


# -- steps -----------------------------------------------------------------------------------


def forced(
    core: CudaCore, ids: list[int], plane: Plane, *, rows: int, before: Callable[[int], None]
) -> Tensor:
    """Teacher-forced logits [T, V]; `before` is called between steps."""
    sequence = core.kv.reserve(len(ids))
    assert sequence is not None
    found = []
    for at in range(0, len(ids), rows):
        before(at)
        part = ids[at : at + rows]
        steps = [StepRow(token, sequence, i) for i, token in enumerate(part)]
        found.append(core.model.run(steps, plane).clone())
        sequence.length += len(part)
    core.kv.release(sequence)
    return torch.cat(found)


SIZES = (256, 40, LEAST, 100, 33, 256, 64)


@pytest.mark.parametrize("sizes", [{}, {"arena_rows": 100}], ids=["all in RAM", "rows on disk"])
def test_steps__pools_of_ever_other_sizes__same_bits(
    demo_pack: Path, sizes: dict[str, int]
) -> None:
    texts = some_texts(demo_pack, per_file=1, length=96)
    core = open_core(demo_pack, (1, 4), **sizes)
    try:
        assert core.vram is not None, "this card's driver must map memory by itself"
        for plane in Plane:
            for rows in (1, 4):
                for pool in core.pools.values():
                    pool.resize(256)
                want = forced(core, texts[0], plane, rows=rows, before=lambda at: None)

                def change(at: int) -> None:
                    for i, pool in enumerate(core.pools.values()):
                        pool.resize(SIZES[(at // 4 + i) % len(SIZES)])

                got = forced(core, texts[0], plane, rows=rows, before=change)
                assert torch.equal(got, want), f"{plane.value}, {rows} rows"
                assert all(is_whole(core, pool) for pool in core.pools.values())
    finally:
        core.close()


def is_whole(core: CudaCore, pool: DevicePool) -> bool:
    """Every slot holds the bytes of the row that it claims."""
    buffer = bytearray(pool.arena.stride)
    for slot, row in enumerate(pool.tables.owner.tolist()):
        if row < 0:
            continue
        assert slot < pool.n_slots
        core.reader.read_row(pool.plane, row, memoryview(buffer))
        if bytes(pool.slots[slot].cpu().numpy()) != bytes(buffer):
            return False
    return True


def test_load__and_close__all_memory_comes_back(demo_pack: Path) -> None:
    core = open_core(demo_pack)
    core.close()
    del core
    gc.collect()
    torch.cuda.empty_cache()
    before = free()
    core = open_core(demo_pack)
    mapped = sum(pool.memory.behind.mapped for pool in core.pools.values() if pool.memory.behind)
    assert mapped >= 256 * 57344
    during = free()
    core.close()
    assert free() - during >= mapped
    del core
    gc.collect()
    torch.cuda.empty_cache()
    assert abs(before - free()) < 256 * MIB


# -- the engine ------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "Tell me about a goat, a boat and a coat."}]


def request(quality: Quality = Quality.FAST, tokens: int = 200) -> GenerateRequest:
    return GenerateRequest(
        messages=QUESTION, max_tokens=tokens, quality=quality, ignore_eos=True,
        sampling=Sampling(temperature=0.8, seed=7),
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(demo_pack: Path) -> Iterator[Engine]:
    handle = start_engine(
        demo_pack, EngineOptions(device="cuda", save_heat=False, context=1024, max_running=2)
    )
    assert isinstance(handle, Engine)
    assert handle.wait_ready(300)
    yield handle
    handle.close()


def keeper(engine: Engine) -> VramKeeper:
    assert engine._serving is not None
    vram = engine._serving.core.vram
    assert isinstance(vram, VramKeeper)
    return vram


@contextmanager
def seeing(engine: Engine, free_bytes: Callable[[], int]) -> Iterator[None]:
    """The keeper sees another amount of free memory."""
    vram = keeper(engine)
    real = vram._card
    vram._card = CardMemory(free_bytes, real.trim)
    try:
        yield
    finally:
        vram._card = real


def soon(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("quality", list(Quality))
def test_answer__slots_go_and_come_while_it_is_written__same_text(
    engine: Engine, quality: Quality
) -> None:
    want = text_of(events_of(engine.submit(request(quality, 600))))
    amount = [0]
    changes = keeper(engine).view().changes
    with seeing(engine, lambda: amount[0]):
        stream = engine.submit(request(quality, 600))
        got = []
        for event in stream:
            got.append(event)
            if isinstance(event, TextDelta):
                # nobody waits here for the keeper's second: it looks before the next step
                keeper(engine)._next_s = 0.0
                amount[0] = 0 if len(got) % 40 < 20 else 200 * GIB
                if amount[0]:
                    engine.limit_vram(None)  # a wish: no calm is waited for
    assert isinstance(got[-1], Finished)
    assert text_of(got) == want
    assert keeper(engine).view().changes >= changes + 2
    engine.limit_vram(None)
    soon(lambda: engine.snapshot().sizes.base_slots == 256)


def test_limit__set_while_idle_and_lifted__memory_goes_back_and_comes_again(
    engine: Engine,
) -> None:
    engine.limit_vram(None)
    soon(lambda: engine.snapshot().sizes.fine_slots == 256)
    before = free()
    engine.limit_vram(1)
    soon(lambda: engine.snapshot().sizes.base_slots == LEAST)
    sizes, vram = engine.snapshot().sizes, engine.snapshot().vram
    assert (sizes.base_slots, sizes.fine_slots) == (LEAST, LEAST)
    assert vram is not None
    assert (vram.why, vram.limit) == (Why.LIMIT.value, 1)
    assert free() - before >= 20 * MIB
    assert isinstance(events_of(engine.submit(request(tokens=20)))[-1], Finished)
    engine.limit_vram(None)
    soon(lambda: engine.snapshot().sizes.base_slots == 256)
    assert abs(free() - before) < 64 * MIB


def test_another_program__takes_the_card__pools_shrink_by_themselves(engine: Engine) -> None:
    engine.limit_vram(None)
    soon(lambda: engine.snapshot().sizes.fine_slots == 256)
    want = text_of(events_of(engine.submit(request())))
    other = GrowableMemory(cuda_driver(DEVICE), free())
    try:
        other.resize(free() - 512 * MIB)
        soon(lambda: engine.snapshot().sizes.base_slots == LEAST)
        assert text_of(events_of(engine.submit(request()))) == want
    finally:
        other.close()
    soon(lambda: engine.snapshot().sizes.base_slots == 256)
    assert text_of(events_of(engine.submit(request()))) == want


def test_prompt__no_room_on_the_card__fails_with_the_catalogue_or_is_read_next_one_works(
    engine: Engine,
) -> None:
    """Everything that is free is taken, down to the last pieces."""
    want = text_of(events_of(engine.submit(request())))
    torch.cuda.empty_cache()
    other = GrowableMemory(cuda_driver(DEVICE), free() + GIB)
    try:
        other.resize(free() + GIB)
        last = events_of(engine.submit(request()))[-1]
        if isinstance(last, Failed):
            assert isinstance(last.error, MoetError)
            assert last.error.code == "MD-GPU-11"
    finally:
        other.close()
    assert text_of(events_of(engine.submit(request()))) == want


def test_load__card_nearly_full__fewer_slots_or_said_with_figures(demo_pack: Path) -> None:
    other = GrowableMemory(cuda_driver(DEVICE), free())
    try:
        other.resize(free() - GIB)
        n_slots, code = slots_or_code(demo_pack)
    finally:
        other.close()
    assert code in ("MD-GPU-05", "MD-GPU-11") or LEAST <= n_slots <= 256


def slots_or_code(pack: Path) -> tuple[int, str]:
    try:
        core = open_core(pack, vram_bytes=2 * GIB)
    except MoetError as error:
        return 0, error.code
    found = core.pools[Plane.BASE].n_slots
    core.close()
    return found, ""


def test_driver__cannot_map__slots_of_a_fixed_size_and_the_same_bits(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = some_texts(demo_pack, per_file=1, length=24)
    core = open_core(demo_pack)
    want = forced(core, texts[0], Plane.BASE, rows=1, before=lambda at: None)
    core.close()
    monkeypatch.setattr(load_pools, "open_driver", lambda device: None)
    core = open_core(demo_pack)
    try:
        assert core.vram is None
        got = forced(core, texts[0], Plane.BASE, rows=1, before=lambda at: None)
        assert torch.equal(got, want)
    finally:
        core.close()
