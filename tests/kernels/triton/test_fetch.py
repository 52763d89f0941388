"""Copies from the arena, and the mailbox with a host thread at its other end."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moet_desk.kernels.mailbox import MAILBOX, Answer, Request, answer, read_request
from moet_desk.kernels.triton import fetch as fetch_module
from moet_desk.kernels.triton.cache import GpuTables, LookupOutput, lookup
from moet_desk.kernels.triton.fetch import (
    READ_FAILED,
    TIMED_OUT,
    Arena,
    Mailbox,
    fetch,
    post,
    wait,
)

STRIDE = 8192
N_ROWS = 16


@dataclass
class World:
    """One layer of 16 experts: rows filled with their index, some in the arena, a mailbox."""

    rows: torch.Tensor
    places: torch.Tensor
    arena: Arena
    words: NDArray[np.int32]
    mailbox: Mailbox
    tables: GpuTables
    pool: torch.Tensor

    def look_up(self, experts: list[int]) -> LookupOutput:
        out = LookupOutput.empty(1, len(experts), device="cpu")
        ids = torch.tensor([experts], dtype=torch.int32)
        lookup(ids, self.tables, layer=0, out=out, ends_step=True)
        return out

    def step(self, experts: list[int]) -> LookupOutput:
        """A layer's chain of kernels, with the disk."""
        out = self.look_up(experts)
        post(self.mailbox, self.arena, out, layer=0)
        rows = {"miss_row": out.miss_row, "miss_slot": out.miss_slot}
        fetch(self.pool, self.arena, out.miss_n, **rows, programs=3)
        wait(self.mailbox, self.arena, self.tables)
        late = {"miss_row": self.mailbox.late_row, "miss_slot": self.mailbox.late_slot}
        fetch(self.pool, self.arena, self.mailbox.late_n, **late, programs=3)
        return out

    def check_pool(self) -> None:
        for slot, row in enumerate(self.tables.owner.tolist()):
            if row >= 0:
                assert torch.equal(self.pool[slot], self.rows[row]), (slot, row)


@pytest.fixture
def world() -> World:
    rows = torch.randint(0, 256, (N_ROWS, STRIDE), dtype=torch.uint8)
    places = torch.zeros(6, STRIDE, dtype=torch.uint8)
    place_of = torch.full((N_ROWS,), -1, dtype=torch.int32)
    for place, row in enumerate([2, 3, 5, 7]):
        places[place] = rows[row]
        place_of[row] = place
    words = np.zeros(MAILBOX.n_words, np.int32)
    mailbox = Mailbox.at(words.ctypes.data, error=torch.zeros(1, dtype=torch.int32))
    tables = GpuTables.empty(1, N_ROWS, 5, device="cpu")
    arena = Arena(places.data_ptr(), place_of, STRIDE)
    pool = torch.zeros(5, STRIDE, dtype=torch.uint8)
    return World(rows, places, arena, words, mailbox, tables, pool)


class Host:
    """Answers requests in a thread, as the io threads do."""

    def __init__(self, world: World, *, status: Answer = Answer.READ) -> None:
        self.requests: list[Request] = []
        self._world, self._status = world, status
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Host:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        last = 0
        while not self._stop.wait(0.0005):
            request = read_request(self._world.words, last)
            if request is None:
                continue
            last = request.number
            self.requests.append(request)
            places, dropped = self._read(request)
            answer(self._world.words, request, status=self._status, places=places, dropped=dropped)

    def _read(self, request: Request) -> tuple[list[int], list[int]]:
        """Put rows into places that hold no row the device copies meanwhile."""
        world = self._world
        holder = {int(p): row for row, p in enumerate(world.arena.place_of) if p >= 0}
        open_places = [p for p in (5, 4, 3, 2, 1, 0) if holder.get(p) not in request.kept]
        places = open_places[: len(request.rows)]
        for row, place in zip(request.rows, places, strict=True):
            world.places[place] = world.rows[row]
        return places, [holder.get(place, -1) for place in places]


def test_fetch__rows_in_the_arena__copied_whole(world: World) -> None:
    out = world.look_up([5, 2, 7])
    fetch(world.pool, world.arena, out.miss_n, miss_row=out.miss_row, miss_slot=out.miss_slot)
    world.check_pool()
    assert int(out.miss_n) == 3


def test_fetch__nothing_missing__pool_untouched(world: World) -> None:
    world.look_up([5, 2])
    out = world.look_up([2, 5])
    before = world.pool.clone()
    fetch(world.pool, world.arena, out.miss_n, miss_row=out.miss_row, miss_slot=out.miss_slot)
    assert torch.equal(world.pool, before)


def test_step__rows_on_disk__asked_for_once_and_copied(world: World) -> None:
    with Host(world) as host:
        world.step([2, 9, 5, 11])
        world.check_pool()
        world.step([2, 9, 11])
        world.check_pool()
        world.step([12, 13, 14, 15])
        world.check_pool()
    assert [r.rows for r in host.requests] == [(9, 11), (12, 13, 14, 15)]
    assert host.requests[0].kept == (2, 5)
    assert host.requests[0].layer == 0
    assert int(world.mailbox.error) == 0
    known = [int(p) for p in world.arena.place_of if p >= 0]
    assert len(known) == len(set(known)) == 6


def test_step__all_in_ram__nothing_posted(world: World) -> None:
    world.step([2, 3])
    assert int(world.words[MAILBOX.posted]) == 0
    assert int(world.mailbox.late_n) == 0
    world.check_pool()


def test_step__read_error__slots_emptied_and_error_word_set(world: World) -> None:
    with Host(world, status=Answer.FAILED):
        world.step([2, 9, 11])
    assert int(world.mailbox.error) == READ_FAILED
    assert sorted(world.tables.owner.tolist()) == [-1, -1, -1, -1, 2]
    assert world.tables.slot_of[[9, 11]].tolist() == [-1, -1]
    assert int(world.tables.n_free) == 4
    assert int(world.arena.place_of[9]) == -1


def test_step__no_answer__times_out_once_and_spins_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "_POLLS", 20)
    world.step([2, 9])
    assert int(world.mailbox.error) == TIMED_OUT
    assert int(world.tables.n_free) == 4
    number = int(world.words[MAILBOX.posted])
    monkeypatch.setattr(fetch_module, "_POLLS", 1 << 40)  # a second spin would never end
    world.step([10])
    assert int(world.words[MAILBOX.posted]) == number
    assert world.tables.slot_of[[9, 10]].tolist() == [-1, -1]
    assert int(world.mailbox.late_n) == 0


def test_step__after_a_late_answer__next_request_is_not_confused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "_POLLS", 20)
    world.step([9])
    world.mailbox.error.zero_()
    monkeypatch.setattr(fetch_module, "_POLLS", 1 << 40)
    with Host(world) as host:  # answers request 1 now, then request 2
        world.step([2, 10])
    assert host.requests[-1].rows == (10,)
    world.check_pool()


def test_step__earlier_one_waited_long__its_own_time_to_wait(world: World) -> None:
    world.mailbox.waited.fill_(fetch_module.WAIT_LIMIT_NS)
    with Host(world):
        world.step([2, 9])
    assert int(world.mailbox.error) == 0
    out = world.look_up([10])
    world.mailbox.waited.fill_(fetch_module.WAIT_LIMIT_NS)
    post(world.mailbox, world.arena, out, layer=1)
    wait(world.mailbox, world.arena, world.tables)
    assert int(world.mailbox.error) == TIMED_OUT  # a later layer has what is left


def test_mailbox_layout__words__apart_and_within_a_page() -> None:
    ends = [MAILBOX.rows, MAILBOX.kept, MAILBOX.places, MAILBOX.dropped, MAILBOX.n_words]
    assert all(b - a >= MAILBOX.most_rows for a, b in pairwise(ends))
    assert MAILBOX.done * 4 % 64 == 0
    assert MAILBOX.n_bytes == 4096


def test_step__gave_up__later_layers_take_no_place_that_it_may_have_lost(world: World) -> None:
    """The host gives row 3's place to another one, whose read then fails or comes too late: the
    device still believes that row 3 lies there.
    """

    class Overwriting(Host):
        def _read(self, request: Request) -> tuple[list[int], list[int]]:
            world.places[int(world.arena.place_of[3])] = world.rows[request.rows[0]]
            return [], []

    with Overwriting(world, status=Answer.FAILED):
        world.step([2, 9])
    world.step([3, 5])  # of the same step
    assert int(world.mailbox.error) == READ_FAILED
    world.check_pool()
    assert world.tables.slot_of[[3, 5]].tolist() == [-1, -1]
