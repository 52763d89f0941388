"""Experts that tables name, brought before the first layer: what each layer reads, and the tables.

Products are left out: in their place the tests note which bytes lie in the slots that are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moet_desk.engine.cuda import pools
from moet_desk.engine.cuda.named import NamedExperts
from moet_desk.engine.cuda.pools import DevicePool, PoolExperts
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.mailbox import MAILBOX, Answer
from moet_desk.kernels.triton.cache import lookup
from moet_desk.kernels.triton.experts import ExpertPool
from moet_desk.kernels.triton.fetch import READ_FAILED, Arena, Mailbox, fetch
from moet_desk.store.pack_format import Plane
from tests.kernels.triton.test_fetch import Host, World

N_LAYERS, N_NAMED, N_EXPERTS, TOP_K, VOCAB = 5, 3, 8, 2, 12
N_ROWS, STRIDE = N_LAYERS * N_EXPERTS, 4096
CPU = torch.device("cpu")


def distinct(n: int, seed: int) -> Tensor:
    """Experts of n tokens, int32 [n, K]."""
    scores = torch.rand(n, N_EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(TOP_K).indices.int().contiguous()


TABLES = {layer: distinct(VOCAB, layer) for layer in range(N_NAMED)}


@dataclass
class Steps:
    """Five layers over pools of so many slots; `read`: layer, expert and byte of what was read."""

    n_slots: int
    ahead: bool = True
    on_disk: frozenset[int] = frozenset()
    planes: tuple[Plane, ...] = (Plane.BASE,)
    read: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = torch.arange(N_ROWS, dtype=torch.uint8)[:, None].repeat(1, STRIDE)
        here = [row for row in range(N_ROWS) if row not in self.on_disk]
        places = torch.zeros(len(here) + 4, STRIDE, dtype=torch.uint8)
        places[: len(here)] = rows[here]
        self.host_table = np.full(N_ROWS, -1, np.int32)
        self.host_table[here] = np.arange(len(here))
        words, error = np.zeros(MAILBOX.n_words, np.int32), torch.zeros(1, dtype=torch.int32)
        mailbox = Mailbox.at(words.ctypes.data, error=error)
        self.pools = [
            DevicePool.make(
                plane, Arena(places.data_ptr(), torch.from_numpy(self.host_table.copy()), STRIDE),
                n_layers=N_LAYERS, n_experts=N_EXPERTS, n_slots=self.n_slots, top_k=TOP_K,
                device=CPU,
            )
            for plane in self.planes
        ]  # fmt: skip
        base, *fine = self.pools
        host: Any = SimpleNamespace(table=lambda plane: self.host_table)
        self.experts = PoolExperts(
            base, fine[0] if fine else None, ExpertLayout(32, 32), n_layers=N_LAYERS,
            mailbox=mailbox if self.on_disk else None, host=host, n_named=N_NAMED,
        )  # fmt: skip
        self.named = NamedExperts(TABLES, CPU)
        self.world = World(rows, places, base.arena, words, mailbox, base.tables, base.slots)

    def step(self, tokens: list[int], patch: pytest.MonkeyPatch) -> None:
        ids, layer = torch.tensor(tokens, dtype=torch.int32), 0
        empty = dict.fromkeys(Activations, torch.empty(64, 1))
        b: Any = SimpleNamespace(
            ids=torch.zeros(8, TOP_K, dtype=torch.int32), codes=empty, hidden_codes=empty,
            scales=torch.empty(8), hidden=torch.empty(64), hidden_scales=torch.empty(64),
            part=torch.empty(64), arrived=torch.empty(64),
        )  # fmt: skip

        def note(pool: ExpertPool, *_: object, **__: object) -> None:
            planes = [(pool.base, pool.uniq_slot)]
            if pool.fine is not None and pool.fine_slot is not None:
                planes.append((pool.fine, pool.fine_slot))
            chosen = list(dict.fromkeys(b.ids[: len(tokens)].flatten().tolist()))
            for memory, slots in planes:
                for expert, slot in zip(chosen, slots.tolist(), strict=False):
                    (byte,) = set(memory[slot].tolist())
                    self.read.append((layer, expert, byte))

        patch.setattr(pools, "experts_hidden", note)
        patch.setattr(pools, "experts_down", lambda *_, **__: None)
        patch.setattr(pools, "fetch", partial(fetch, programs=2))
        brought = self.named.bring(ids, self.experts) if self.ahead else {}
        for layer in range(N_LAYERS):
            chosen = TABLES.get(layer)
            of_layer = distinct(VOCAB, 9 + layer) if chosen is None else chosen
            b.ids[: len(tokens)] = of_layer[ids.long()]
            brought.get(layer, self.experts)(layer, b, len(tokens))

    def check_read(self) -> None:
        assert self.read
        assert all(byte == at * N_EXPERTS + expert for at, expert, byte in self.read)


STEPS = [[3], [3], [3], [7], [3, 4], [5, 3], [11], [0, 1], [3], [2]]


@pytest.mark.parametrize(
    ("n_slots", "planes"),
    [(2 * TOP_K * N_NAMED, (Plane.BASE, Plane.FINE)), (N_ROWS, (Plane.BASE,))],
)
def test_bring__hot_rows_of_other_layers_in_all_slots__each_layer_reads_its_own(
    n_slots: int, planes: tuple[Plane, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, plain = Steps(n_slots, planes=planes), Steps(n_slots, ahead=False, planes=planes)
    for tokens in STEPS:
        for steps in (ahead, plain):
            steps.step(tokens, monkeypatch)
    ahead.check_read()
    assert ahead.read == plain.read
    for early, late in zip(ahead.pools, plain.pools, strict=True):
        assert torch.equal(early.tables.counters[:, 0], late.tables.counters[:, 0])
        assert torch.equal(early.tables.warmth, late.tables.warmth)
        assert int(early.tables.clock) == len(STEPS)
        if n_slots == N_ROWS:  # nobody had to go, so all is as without
            assert torch.equal(early.tables.counters, late.tables.counters)
            assert torch.equal(early.tables.slot_of, late.tables.slot_of)
            assert torch.equal(early.tables.last_used, late.tables.last_used)
        else:
            assert int(early.tables.counters[:, 3].sum()) > 10


def test_layers_ahead__what_fits_the_least_pool__and_the_others_look_up_in_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(4 * TOP_K)
    assert [steps.experts.layers_ahead(rows) for rows in (1, 2, 3, 4, 5)] == [3, 2, 1, 1, 0]
    calls: list[tuple[int, int]] = []

    def noted(*args: Any, **named: Any) -> None:
        calls.append((named["layer"], named["before"]))
        lookup(*args, **named)

    monkeypatch.setattr(pools, "lookup", noted)
    steps.step([3, 4], monkeypatch)
    steps.check_read()
    assert calls == [(0, 0), (1, 1), (2, 0), (3, 0), (4, 0)]
    steps.step([3, 4, 5, 6], monkeypatch)
    steps.check_read()
    assert steps.named.bring(torch.arange(5, dtype=torch.int32), steps.experts) == {}


def test_bring__rows_on_disk__asked_for_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {layer * N_EXPERTS + int(e) for layer in (0, 2) for e in TABLES[layer][3]}
    steps = Steps(3 * TOP_K, on_disk=frozenset(named))
    with Host(steps.world) as host:
        steps.step([3], monkeypatch)
        steps.check_read()
        steps.step([7], monkeypatch)
        steps.step([3], monkeypatch)
        steps.check_read()
    assert [request.layer for request in host.requests[:2]] == [0, 2]
    assert set(host.requests[0].rows + host.requests[1].rows) == named
    assert int(steps.world.mailbox.error) == 0


def test_bring__read_error__slots_are_free_again_and_the_next_step_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = 2 * N_EXPERTS + int(TABLES[2][3, 0])
    steps = Steps(N_ROWS, on_disk=frozenset([late]))
    with Host(steps.world, status=Answer.FAILED):
        steps.step([3], monkeypatch)
    tables, error = steps.pools[0].tables, steps.world.mailbox.error
    assert int(error) == READ_FAILED
    assert int(tables.slot_of[late]) == -1
    assert int(tables.n_free) == N_ROWS - (TOP_K * 3 - 1)  # layers behind it keep none
    error.zero_()
    steps.experts.recover()
    steps.read.clear()
    with Host(steps.world):
        steps.step([3], monkeypatch)
    steps.check_read()
    assert int(error) == 0


def test_tables__not_of_the_first_layers__refused() -> None:
    with pytest.raises(ValueError, match="other layers than the first ones"):
        NamedExperts({1: TABLES[1]}, CPU)
