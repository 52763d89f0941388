"""Slots given ahead of a layer: the kernel against its twin, and what each layer reads then."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.engine.cuda import lookahead, pools
from moet_desk.engine.cuda.lookahead import Lookahead, StepAhead
from moet_desk.engine.cuda.pools import DevicePool, PoolExperts
from moet_desk.engine.spec import Router
from moet_desk.kernels.kinds import Activations, Score
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton.cache import GpuTables, LookupOutput, lookup
from moet_desk.kernels.triton.experts import ExpertPool
from moet_desk.kernels.triton.fetch import Arena, fetch
from moet_desk.kernels.triton.lookahead import AheadOutput, look_ahead
from moet_desk.store.pack_format import Plane
from tests.kernels.triton import twin_cache
from tests.kernels.triton.test_cache import assert_same, copy_of, skewed_ids

N_LAYERS = 4


@pytest.mark.parametrize(
    ("n_tokens", "top_k", "n_experts", "n_slots"),
    [(1, 4, 8, 12), (1, 6, 16, 40), (3, 4, 12, 36), (8, 8, 32, 192), (2, 3, 200, 300)],
)
def test_look_ahead__beside_look_ups_of_many_steps__every_table_as_the_twin(
    n_tokens: int, top_k: int, n_experts: int, n_slots: int
) -> None:
    tables = GpuTables.empty(N_LAYERS, n_experts, n_slots, device="cpu")
    outputs = [AheadOutput.empty(n_tokens * top_k, device="cpu") for _ in range(2)]
    nothing = AheadOutput.empty(n_tokens * top_k, device="cpu")
    found, shape = LookupOutput.empty(n_tokens, top_k, device="cpu"), (n_tokens, top_k, n_experts)
    for step in range(10):
        before, brought = nothing, list[int]()
        most = torch.tensor([(top_k, 2, 1, 0)[step % 4]], dtype=torch.int32)
        for layer in range(N_LAYERS):
            chosen, likely = skewed_ids(*shape), skewed_ids(*shape)
            likely[0] = chosen[0]  # some are right
            lookup(chosen, tables, layer=layer, out=found, ends_step=layer == N_LAYERS - 1)
            in_use = found.uniq_slot[: int(found.n_uniq)].tolist()
            if layer + 1 == N_LAYERS:
                continue
            ahead = torch.roll(likely, 1, 0)
            want_tables = copy_of(tables)
            want = twin_cache.look_ahead(
                ahead, int(most), want_tables, layer + 1, chosen=chosen, brought=brought
            )
            out = outputs[layer % 2]
            look_ahead(ahead, most, tables, layer=layer + 1, chosen=chosen, before=before, out=out)
            assert_same(tables, want_tables)
            count = int(out.n)
            got = list(zip(out.row[:count].tolist(), out.slot[:count].tolist(), strict=True))
            assert got == want
            assert not {slot for _, slot in got} & set(in_use)  # these are being read
            before, brought = out, [row for row, _ in got]
    assert int(tables.ahead[:, 0].sum()) > 0
    assert int(tables.ahead[N_LAYERS - 1].sum()) == 0


def test_look_ahead__rows_that_were_brought__next_look_up_hits_and_counts_them_needed() -> None:
    tables = GpuTables.empty(3, 8, 24, device="cpu")
    most, first = torch.tensor([2], dtype=torch.int32), AheadOutput.empty(2, device="cpu")
    second, found = AheadOutput.empty(2, device="cpu"), LookupOutput.empty(1, 2, device="cpu")

    def ids(*experts: int) -> torch.Tensor:
        return torch.tensor([experts], dtype=torch.int32)

    lookup(ids(0, 1), tables, layer=0, out=found)
    look_ahead(ids(4, 5), most, tables, layer=1, chosen=ids(0, 1), before=second, out=first)
    assert first.row[: int(first.n)].tolist() == [8 + 4, 8 + 5]
    warmth = tables.warmth.clone()
    assert torch.isinf(warmth[12:14]).all()  # being brought is no use
    lookup(ids(5, 6), tables, layer=1, out=found)
    assert tables.counters[1].tolist() == [2, 1, 1, 0]
    look_ahead(ids(7, 2), most, tables, layer=2, chosen=ids(5, 6), before=first, out=second)
    assert tables.ahead.tolist() == [[0, 0], [2, 1], [0, 0]]


def test_look_ahead__too_few_slots_or_places__refused() -> None:
    tables = GpuTables.empty(2, 8, 11, device="cpu")
    ids, most = torch.zeros((1, 4), dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    out = AheadOutput.empty(4, device="cpu")
    with pytest.raises(ValueError, match="4 pairs ahead do not fit 11 slots"):
        look_ahead(ids, most, tables, layer=1, chosen=ids, before=out, out=out)
    small = AheadOutput.empty(3, device="cpu")
    with pytest.raises(ValueError, match="4 pairs ahead"):
        look_ahead(
            ids, most, GpuTables.empty(2, 8, 99, device="cpu"), layer=1, chosen=ids, before=out,
            out=small,
        )  # fmt: skip


# -- a step's launches without products: the bytes in slots that are read are noted ----------

E, K, STRIDE = 8, 2, 4096
ROUTER = Router(E, K, Score.SIGMOID, False, 1, 1, True, 1.0)


@dataclass
class Steps:
    """Some layers over pools of so many slots; `read`: layer, expert and byte of what was read."""

    n_slots: int
    planes: tuple[Plane, ...]
    ahead: bool
    read: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        n_rows, cpu = N_LAYERS * E, torch.device("cpu")
        self.rows = torch.arange(n_rows, dtype=torch.uint8)[:, None].repeat(1, STRIDE)
        table = torch.arange(n_rows, dtype=torch.int32)
        self.pools = [
            DevicePool.make(
                plane, Arena(self.rows.data_ptr(), table, STRIDE), n_layers=N_LAYERS, n_experts=E,
                n_slots=self.n_slots, top_k=K, device=cpu,
            )
            for plane in self.planes
        ]  # fmt: skip
        base, *fine = self.pools
        self.experts = PoolExperts(
            base, fine[0] if fine else None, ExpertLayout(32, 32), n_layers=N_LAYERS, mailbox=None,
            host=SimpleNamespace(table=lambda plane: table.numpy()), in_ram=self.planes,
        )  # fmt: skip
        self.lookahead = Lookahead(ROUTER, self.experts.pools_in_ram, cpu)

    def step(self, chosen: Tensor, likely: Tensor, patch: pytest.MonkeyPatch) -> None:
        """chosen, likely: int32 [L, T, K]."""
        n, layer = chosen.shape[1], 0
        empty = dict.fromkeys(Activations, torch.empty(64, 1))
        b: Any = SimpleNamespace(
            ids=torch.zeros(8, K, dtype=torch.int32), codes=empty, hidden_codes=empty,
            scales=torch.empty(8), hidden=torch.empty(64), hidden_scales=torch.empty(64),
            part=torch.empty(64), arrived=torch.empty(64), normed=torch.empty(8, 1),
        )  # fmt: skip

        def note(pool: ExpertPool, *_: object, **__: object) -> None:
            memories = [(pool.base, pool.uniq_slot)]
            if pool.fine is not None and pool.fine_slot is not None:
                memories.append((pool.fine, pool.fine_slot))
            asked = list(dict.fromkeys(b.ids[:n].flatten().tolist()))
            for memory, slots in memories:
                for expert, slot in zip(asked, slots.tolist(), strict=False):
                    (byte,) = set(memory[slot].tolist())
                    self.read.append((layer, expert, byte))

        def following(layer: int) -> Any:
            def route(*_: object, ids: Tensor, **__: object) -> None:
                ids.copy_(likely[layer])

            return SimpleNamespace(moe_layer=layer, w_router=None, logit_bias=None, route=route)

        patch.setattr(pools, "experts_hidden", note)
        patch.setattr(pools, "experts_down", lambda *_, **__: None)
        patch.setattr(lookahead, "gemv", lambda *_, **__: None)
        patch.setattr(pools, "fetch", partial(fetch, programs=2))
        patch.setattr(lookahead, "PROGRAMS", 2)
        behind = {layer - 1: following(layer) for layer in range(1, N_LAYERS)}
        step = StepAhead(self.lookahead, behind)
        for layer in range(N_LAYERS):
            experts = step.around(self.experts, layer) if self.ahead else self.experts
            experts.begin(b, n)
            b.ids[:n] = chosen[layer]
            experts(layer, b, n)
        assert step.asked is None

    def check_read(self) -> None:
        assert self.read
        assert all(byte == at * E + expert for at, expert, byte in self.read)


@pytest.mark.parametrize("planes", [(Plane.BASE,), (Plane.BASE, Plane.FINE)])
@pytest.mark.parametrize(("n_slots", "widths"), [(6, (1,)), (12, (1, 2)), (N_LAYERS * E, (1, 3))])
def test_step__right_and_wrong_guesses_in_few_slots__each_layer_reads_its_own(
    n_slots: int, widths: tuple[int, ...], planes: tuple[Plane, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ahead, plain = Steps(n_slots, planes, ahead=True), Steps(n_slots, planes, ahead=False)
    for number in range(12):
        n = widths[number % len(widths)]
        assert ahead.lookahead.takes(n)
        chosen = torch.stack([skewed_ids(n, K, E) for _ in range(N_LAYERS)])
        likely = torch.stack([skewed_ids(n, K, E) for _ in range(N_LAYERS)])
        likely[::2] = chosen[::2].flip(2)
        for steps in (ahead, plain):
            steps.step(chosen, likely, monkeypatch)
    ahead.check_read()
    assert ahead.read == plain.read
    for early, late in zip(ahead.pools, plain.pools, strict=True):
        assert torch.equal(early.tables.counters[:, 0], late.tables.counters[:, 0])
        assert torch.equal(early.tables.warmth, late.tables.warmth)
        brought, needed = early.tables.ahead.sum(0).tolist()
        assert brought > needed > 0
        if n_slots < N_LAYERS * E:
            assert int(early.tables.counters[:, 2].sum()) < int(late.tables.counters[:, 2].sum())


def test_takes__rows_for_which_the_least_pool_has_no_room__not() -> None:
    steps = Steps(12, (Plane.BASE,), ahead=True)
    assert [steps.lookahead.takes(n) for n in (1, 2, 3)] == [True, True, False]
    assert not Lookahead(ROUTER, [], torch.device("cpu")).takes(1)


def test_review__hardly_anything_was_needed__nothing_more_is_brought() -> None:
    steps = Steps(12, (Plane.BASE,), ahead=True)
    assert int(steps.lookahead.most) == K
    steps.pools[0].tables.ahead[1] = torch.tensor([500, 20], dtype=torch.int32)
    for _ in range(64):
        assert int(steps.lookahead.most) == K
        steps.lookahead.review()
    assert int(steps.lookahead.most) == 0


def test_review__counters_of_the_device_began_anew__decides_as_ever() -> None:
    steps = Steps(12, (Plane.BASE,), ahead=True)
    ahead = steps.pools[0].tables.ahead
    ahead[1] = 2**31 - 100
    for more in (0, 500):
        ahead[1] += torch.tensor([more, 0], dtype=torch.int32)
        for _ in range(64):
            steps.lookahead.review()
    assert int(ahead[1, 0]) < 0
    assert int(steps.lookahead.most) == 0
