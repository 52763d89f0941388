"""Host parts of the GPU engine that need no GPU: pinned memory, mailbox server, plan."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet_desk.engine.cuda import mailbox_server
from moet_desk.engine.cuda.loader import fast_reading, load
from moet_desk.engine.cuda.mailbox_server import MailboxServer
from moet_desk.engine.cuda.pinned import PIECE_BYTES, PinnedMemory
from moet_desk.engine.cuda.prefill import CudaPrefiller
from moet_desk.engine.handle import EngineOptions, PromptReading
from moet_desk.errors import MoetError
from moet_desk.kernels.mailbox import MAILBOX, Answer
from moet_desk.plan import (
    ChunkSize,
    DeviceBudget,
    ModelShape,
    TierPlan,
    Wishes,
    plan_device_tiers,
    tier_bytes,
)
from moet_desk.store import pack_reader
from moet_desk.store.arena import ABSENT, Arena
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from moet_desk.units import GIB, MIB


class Driver:
    """Registers up to `limit` pieces, as a driver with a limit does."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: dict[int, int] = {}

    def register(self, address: int, n_bytes: int) -> int:
        if len(self.held) >= self.limit:
            return 2
        self.held[address] = n_bytes
        return 0

    def unregister(self, address: int) -> int:
        return 0 if self.held.pop(address, None) is not None else 1


def untouched(address: int, n_bytes: int) -> None:
    """Pages are made when they are used: no test needs gigabytes."""


def test_pinned__memory__is_there_before_the_driver_sees_it() -> None:
    def present(address: int, n_bytes: int) -> int:
        pages = (ctypes.c_ubyte * (n_bytes // mmap.PAGESIZE))()
        assert not ctypes.CDLL(None).mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), pages
        )
        found.append(sum(page & 1 for page in pages) / len(pages))
        return 0

    found = list[float]()
    n_bytes = 5 * 4096 * 1001  # no multiple of large pages
    pinned = PinnedMemory(present, lambda address: 0)
    memory = pinned.allocate(n_bytes)
    assert found == [1.0]
    assert memory[:4096] == memory[-4096:] == bytes(4096)
    PinnedMemory(present, lambda address: 0, touch=untouched).allocate(n_bytes)
    assert found[1] < 0.1
    pinned.release()


def test_pinned__pieces_of_a_gib__all_registered_and_released() -> None:
    driver, seen = Driver(8), list[int]()
    pinned = PinnedMemory(driver.register, driver.unregister, seen.append, untouched)
    pinned.allocate(2 * PIECE_BYTES + 4096)
    assert sorted(driver.held.values()) == [4096, PIECE_BYTES, PIECE_BYTES]
    assert sum(seen) == 2 * PIECE_BYTES + 4096
    first = min(driver.held)
    assert sorted(address - first for address in driver.held) == [0, PIECE_BYTES, 2 * PIECE_BYTES]
    pinned.release()
    assert not driver.held


def test_pinned__pieces__end_where_a_row_does() -> None:
    driver, row = Driver(8), 6_750_208
    pinned = PinnedMemory(driver.register, driver.unregister, touch=untouched)
    pinned.allocate(400 * row, row)
    sizes = list(driver.held.values())
    assert sum(sizes) == 400 * row
    assert len(sizes) == 3
    assert all(size % row == 0 and size <= PIECE_BYTES for size in sizes)


def test_pinned__driver_refuses__nothing_stays_registered_and_numbers_are_told() -> None:
    driver = Driver(2)
    pinned = PinnedMemory(driver.register, driver.unregister, touch=untouched)
    pinned.allocate(4096)
    with pytest.raises(MoetError) as caught:
        pinned.allocate(3 * PIECE_BYTES)
    assert caught.value.code == "MD-RAM-02"
    assert "3.0 GiB" in caught.value.cause
    assert list(driver.held.values()) == [4096]


@pytest.fixture
def served(demo_pack: Path) -> Iterator[tuple[MailboxServer, np.ndarray, Arena]]:
    reader = PackReader.open(demo_pack)
    arena = Arena(reader, base_rows=6, fine_rows=4)
    page = mmap.mmap(-1, MAILBOX.n_bytes)
    server = MailboxServer(page, arena)
    yield server, np.frombuffer(page, dtype=np.int32), arena
    server.close()
    reader.close()


def ask(words: np.ndarray, rows: list[int], *, kept: list[int], plane: Plane = Plane.BASE) -> int:
    """What the device does: post a request and wait for its number. Returns the status."""
    words[MAILBOX.rows : MAILBOX.rows + len(rows)] = rows
    words[MAILBOX.kept : MAILBOX.kept + len(kept)] = kept
    words[MAILBOX.n_rows], words[MAILBOX.n_kept] = len(rows), len(kept)
    words[MAILBOX.plane] = int(plane is Plane.FINE)
    number = int(words[MAILBOX.posted]) + 1
    words[MAILBOX.posted] = number
    deadline = time.monotonic() + 10
    while int(words[MAILBOX.done]) != number:
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return int(words[MAILBOX.status])


def test_mailbox__rows_asked_for__lie_at_the_places_told(
    served: tuple[MailboxServer, np.ndarray, Arena], demo_pack: Path
) -> None:
    server, words, arena = served
    reader = PackReader.open(demo_pack)
    buffer = bytearray(reader.meta.base_stride)
    for rows in ([3, 70, 9], [100, 101, 102], [3, 200]):
        assert ask(words, rows, kept=[]) == Answer.READ
        for i, row in enumerate(rows):
            place = int(words[MAILBOX.places + i])
            assert int(arena.table(Plane.BASE)[row]) == place
            reader.read_row(Plane.BASE, row, memoryview(buffer))
            assert bytes(arena.memory(Plane.BASE)[place].numpy()) == bytes(buffer)
    assert server.served == 3
    reader.close()


def test_mailbox__kept_rows__keep_their_places(
    served: tuple[MailboxServer, np.ndarray, Arena],
) -> None:
    _, words, arena = served
    ask(words, [1, 2, 3, 4, 5, 6], kept=[])
    before = [int(arena.table(Plane.BASE)[row]) for row in (1, 2)]
    assert ask(words, [50, 51, 52], kept=[1, 2]) == Answer.READ
    assert [int(arena.table(Plane.BASE)[row]) for row in (1, 2)] == before
    dropped = words[MAILBOX.dropped : MAILBOX.dropped + 3].tolist()
    assert sorted(dropped) == [3, 4, 5]
    assert [int(arena.table(Plane.BASE)[row]) for row in dropped] == [ABSENT] * 3


def test_mailbox__read_fails__answered_as_failed_and_the_next_one_works(
    served: tuple[MailboxServer, np.ndarray, Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, words, arena = served
    intact = PackReader.read_row

    def failing(self: PackReader, plane: Plane, row: int, out: memoryview, **more: object) -> None:
        if row == 33:
            raise OSError("the drive is gone")
        intact(self, plane, row, out)

    with monkeypatch.context() as patch:
        patch.setattr(PackReader, "read_row", failing)
        assert ask(words, [7, 33], kept=[]) == Answer.FAILED
    assert not arena.holds(Plane.BASE, 33)
    assert arena.counters.read_errors == 1
    assert ask(words, [33], kept=[]) == Answer.READ
    assert server.take_error() is None


def test_close__a_read_that_does_not_end__is_not_waited_for(
    demo_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive that answers no more must not keep the program from ending."""
    began, ends = threading.Event(), threading.Event()

    def hanging(self: PackReader, plane: Plane, row: int, out: memoryview) -> None:
        began.set()
        ends.wait()

    monkeypatch.setattr(PackReader, "read_row", hanging)
    monkeypatch.setattr(mailbox_server, "CLOSE_S", 0.05)
    reader, page = PackReader.open(demo_pack), mmap.mmap(-1, MAILBOX.n_bytes)
    server = MailboxServer(page, Arena(reader, base_rows=6, fine_rows=4))
    words = np.frombuffer(page, dtype=np.int32)
    words[MAILBOX.rows : MAILBOX.rows + 2] = 3, 70
    words[MAILBOX.n_rows], words[MAILBOX.posted] = 2, 1
    assert began.wait(10)
    closing = threading.Thread(target=server.close)
    closing.start()
    closing.join(10)
    in_time = not closing.is_alive()
    ends.set()
    closing.join()
    server._thread.join()
    reader.close()
    assert in_time


SHAPES = st.builds(
    ModelShape,
    n_rows=st.integers(64, 20_000),
    top_k=st.integers(1, 8),
    base_stride=st.sampled_from([57344, 7_077_888]),
    fine_stride=st.sampled_from([61440, 7_864_320]),
    slot_bytes=st.just(0),
    dense_bytes=st.integers(0, 20 * GIB),
    kv_token_bytes=st.integers(100, 100_000),
    model_context=st.integers(64, 131_072),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SHAPES, st.integers(GIB, 128 * GIB), st.integers(GIB, 256 * GIB))
def test_device_plan__any_machine__fits_or_is_refused(
    shape: ModelShape, vram: int, ram: int
) -> None:
    try:
        plan = plan_device_tiers(shape, DeviceBudget(vram, ram), Wishes())
    except MoetError as error:
        refused = error.code
    else:
        refused = ""
        slots = plan.base_slots * shape.base_stride + plan.fine_slots * shape.fine_stride
        kv = plan.kv_pages * 64 * shape.kv_token_bytes
        assert shape.dense_bytes + kv + slots <= vram
        rows = plan.arena_base_rows * shape.base_stride + plan.arena_fine_rows * shape.fine_stride
        assert rows <= ram
        assert plan.base_slots >= min(8 * shape.top_k, shape.n_rows)
    assert refused in ("", "MD-GPU-05", "MD-RAM-01")


@pytest.mark.parametrize(
    ("base", "fine", "plane"),
    [(256, 256, Plane.FINE), (256, 255, Plane.BASE), (255, 256, Plane.BASE), (64, 0, Plane.BASE)],
)
def test_fast_reading__fp4_only_if_no_row_must_come_from_disk(
    base: int, fine: int, plane: Plane
) -> None:
    plan = TierPlan(2048, 32, 64, 64, base, fine, 256, bytes_total=0)
    reading = fast_reading(plan, 256)
    assert reading.planes[-1] is plane
    prefiller = CudaPrefiller(None, None, chunk=256, fast=reading)  # type: ignore[arg-type]
    said = PromptReading.FP4 if plane is Plane.FINE else PromptReading.NO_ROOM
    assert prefiller.prompts is said


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("sizes", "plane", "said"),
    [
        ({}, Plane.FINE, "read with FP4 rows: all of them are in RAM"),
        ({"arena_rows": 100}, Plane.BASE, "2-bit rows: RAM holds 100 of 256 FP4 rows"),
    ],
)
def test_load__rows_in_ram_or_not__plane_of_prompts_and_direct_reads(
    demo_pack: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    sizes: dict[str, int],
    plane: Plane,
    said: str,
    direct: bool,
) -> None:
    """Loaded for the CPU: nothing is computed, so nothing here depends on a device."""
    if not direct:
        monkeypatch.setattr(pack_reader, "_open_direct", lambda path: {})
    caplog.set_level("INFO", "moet_desk.engine")
    options = EngineOptions(
        save_heat=False, kv_format="f32", context=64, ram_bytes=10**9, vram_bytes=10**9, **sizes
    )  # type: ignore[arg-type]
    core = load(demo_pack, options, device=torch.device("cpu"))
    try:
        assert core.prefiller._fast.planes[-1] is plane
        wants_direct = plane is Plane.BASE
        refused = wants_direct and not core.reader.direct  # also by the tests' own file system
        assert ("through the page cache" in caplog.text) == refused
        assert wants_direct or not core.reader.direct
    finally:
        core.close()
    assert said in caplog.text


def test_device_plan__room_for_experts_on_their_way__only_where_it_is_of_use() -> None:
    shape = ModelShape(
        n_rows=4096, top_k=6, base_stride=6 * MIB, fine_stride=7 * MIB, slot_bytes=0,
        dense_bytes=4 * GIB, kv_token_bytes=100, model_context=8192,
        chunks=(ChunkSize(8192, GIB, 256 * MIB), ChunkSize(4096, GIB // 2)),
    )  # fmt: skip

    def plan(vram: int, ram: int, wishes: Wishes | None = None) -> tuple[int, int]:
        found = plan_device_tiers(
            shape, DeviceBudget(vram * GIB, ram * GIB), wishes or Wishes(max_running=1)
        )
        parts = tier_bytes(shape, found, Wishes(max_running=1), on_device=True)
        assert parts.total == found.bytes_total
        assert parts.chunk == found.ahead_bytes + {8192: GIB, 4096: GIB // 2}[found.prefill_chunk]
        return found.prefill_chunk, found.ahead_bytes

    assert plan(16, 60) == (8192, 256 * MIB)
    assert plan(14, 60) == (8192, 0)  # more than a chunk's share
    assert plan(11, 60) == (4096, 0)
    assert plan(16, 50) == (8192, 0)  # some rows on disk
    assert plan(40, 60) == (8192, 0)  # all rows in slots
    assert plan(16, 60, Wishes(max_running=1, base_slots=100)) == (8192, 0)


def test_device_plan__deepseek_v4_flash_on_a_32_gib_card__two_thousand_slots() -> None:
    shape = ModelShape(
        n_rows=43 * 256, top_k=6, base_stride=7_077_888, fine_stride=7_864_320, slot_bytes=0,
        dense_bytes=8 * GIB, kv_token_bytes=3440, model_context=131_072,
    )  # fmt: skip
    wishes = Wishes(context=32_768, max_running=1)
    plan = plan_device_tiers(shape, DeviceBudget(30 * GIB, 96 * GIB), wishes)
    assert plan.arena_base_rows == shape.n_rows
    assert plan.base_slots > 2000
    assert plan.bytes_total < 126 * GIB
    with pytest.raises(MoetError) as caught:
        plan_device_tiers(shape, DeviceBudget(8 * GIB, 96 * GIB), wishes)
    assert caught.value.code == "MD-GPU-05"
