"""The look-up kernel against its twin, table by table, and the twin against `reference.cache`."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor

from moet_desk.kernels.reference import CacheTables
from moet_desk.kernels.reference.cache import HALF_LIFE
from moet_desk.kernels.triton.cache import (
    GpuTables,
    LookupOutput,
    claim,
    forget,
    grow,
    let_go,
    lookup,
    rebase,
    release,
    shrink,
    warm_as,
)
from tests.kernels.triton import twin_cache


def copy_of(tables: GpuTables) -> GpuTables:
    values = {f.name: getattr(tables, f.name) for f in fields(GpuTables)}
    return GpuTables(**{k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()})


def assert_same(got: GpuTables, want: GpuTables) -> None:
    for field in fields(GpuTables):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if isinstance(a, Tensor):
            if field.name == "free":  # what lies above the top means nothing
                a, b = a[: int(got.n_free)], b[: int(want.n_free)]
            assert torch.equal(a, b), field.name


def skewed_ids(n_tokens: int, top_k: int, n_experts: int) -> Tensor:
    """Distinct experts per token; low ids are frequent, so tokens share some."""
    scores = torch.rand(n_tokens, n_experts) - torch.arange(n_experts) * (1.5 / n_experts)
    return scores.topk(top_k, dim=1).indices.int().contiguous()


def check_lookup(
    ids: Tensor, tables: GpuTables, layer: int, *, ends_step: bool, before: int = 0
) -> None:
    want_tables = copy_of(tables)
    want = twin_cache.lookup(ids, want_tables, layer, ends_step=ends_step, before=before)
    out = LookupOutput.empty(*ids.shape, device="cpu")
    lookup(ids, tables, layer=layer, out=out, ends_step=ends_step, before=before)
    assert_same(tables, want_tables)
    assert torch.equal(out.uniq_slot, want.uniq_slot)
    assert torch.equal(out.uniq_pair, want.uniq_pair)
    assert int(out.n_uniq) == int((want.uniq_slot >= 0).sum())
    n_missed = int(out.miss_n)
    got = list(
        zip(out.miss_row[:n_missed].tolist(), out.miss_slot[:n_missed].tolist(), strict=True)
    )
    assert got == want.misses


@pytest.mark.parametrize(
    ("n_tokens", "top_k", "n_experts", "n_slots"),
    [(1, 4, 8, 4), (1, 6, 16, 9), (3, 4, 12, 14), (8, 8, 32, 64), (2, 3, 200, 300)],
)
def test_lookup__many_steps__every_table_as_the_twin(
    n_tokens: int, top_k: int, n_experts: int, n_slots: int
) -> None:
    tables = GpuTables.empty(3, n_experts, n_slots, device="cpu")
    for _ in range(12):
        for layer in range(3):
            ids = skewed_ids(n_tokens, top_k, n_experts)
            check_lookup(ids, tables, layer, ends_step=layer == 2)
    assert int(tables.clock) == 12
    assert tables.counters[:, 2].sum() > 0


def test_lookup__more_slots_than_a_window__hand_moves_and_stops_at_the_end() -> None:
    tables = GpuTables.empty(4, 256, 600, device="cpu")
    claim(tables, range(600))
    hands = set()
    for step in range(6):
        ids = torch.arange(step * 8, step * 8 + 8, dtype=torch.int32)[None] + 100
        check_lookup(ids, tables, 3, ends_step=True)
        hands.add(int(tables.hand))
    assert hands >= {0, 256, 512}


def test_lookup__a_whole_window_in_use__looks_further() -> None:
    tables = GpuTables.empty(2, 512, 260, device="cpu")
    claim(tables, range(260))
    tables.clock.fill_(5)
    tables.last_used[:256] = 5 * 2 + 1 + 1  # the `now` of layer 1
    check_lookup(torch.tensor([[3, 4]], dtype=torch.int32), tables, 1, ends_step=False)
    assert int(tables.slot_of[512 + 3]) >= 256


def test_lookup__rows_that_layers_before_still_need__stay_although_others_are_warmer() -> None:
    tables = GpuTables.empty(4, 16, 8, device="cpu")
    for _ in range(5):
        warm = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
        check_lookup(warm, tables, 3, ends_step=True)
    check_lookup(torch.tensor([[4, 5]], dtype=torch.int32), tables, 0, ends_step=False)
    for layer in (1, 2):
        ids = torch.tensor([[6, 7]], dtype=torch.int32)
        check_lookup(ids, tables, layer, ends_step=False, before=layer)
    assert resident(tables) >= {4, 5, 16 + 6, 16 + 7, 32 + 6, 32 + 7}
    check_lookup(torch.tensor([[8, 9]], dtype=torch.int32), tables, 3, ends_step=True)
    assert not resident(tables) >= {4, 5}  # whose use is over


def test_lookup__rows_of_a_later_time_than_now__may_go() -> None:
    """The MTP head looks up behind a step that the clock counts already."""
    tables = GpuTables.empty(3, 8, 2, device="cpu")
    check_lookup(torch.tensor([[0, 1]], dtype=torch.int32), tables, 2, ends_step=False)
    check_lookup(torch.tensor([[5, 6]], dtype=torch.int32), tables, 0, ends_step=False)
    assert resident(tables) == {5, 6}


def test_let_go__look_ups_of_one_now__do_not_need_the_slots_of_all() -> None:
    """The MTP head looks up for one guess after another until the clock moves on."""
    tables = GpuTables.empty(3, 32, 12, device="cpu")
    claim(tables, range(70, 74))
    for first in (0, 8, 16, 24, 0):
        let_go(tables)
        ids = torch.arange(first, first + 8, dtype=torch.int32).view(2, 4)
        check_lookup(ids, tables, 2, ends_step=False)
        assert int((tables.last_used > 0).sum()) == 8
    let_go(tables)
    release(tables, [3])
    let_go(tables)
    assert tables.last_used.tolist() == [0] * 3 + [-1] + [0] * 8


def test_lookup__pairs_that_do_not_count__left_out() -> None:
    tables = GpuTables.empty(1, 8, 8, device="cpu")
    ids = torch.tensor([[1, 2], [-1, -1], [2, 3]], dtype=torch.int32)
    check_lookup(ids, tables, 0, ends_step=True)
    assert tables.counters.tolist() == [[4, 1, 3, 0]]


def test_lookup__too_many_pairs__refused() -> None:
    tables = GpuTables.empty(1, 8, 3, device="cpu")
    out = LookupOutput.empty(2, 2, device="cpu")
    with pytest.raises(ValueError, match="4 pairs at once do not fit 3 slots"):
        lookup(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), tables, layer=0, out=out)
    one = torch.tensor([[1, 2]], dtype=torch.int32)
    with pytest.raises(ValueError, match="4 pairs at once do not fit 3 slots"):
        lookup(one, tables, layer=0, out=LookupOutput.empty(1, 2, device="cpu"), before=1)


def test_twin__many_steps__evicts_what_the_reference_calls_coldest() -> None:
    """float32 and its polynomials against float64, in 600 look-ups: near ties may differ."""
    tables, exact = GpuTables.empty(3, 24, 20, device="cpu"), CacheTables(3, 24, 20)
    n_evicted = 0
    for step in range(200):
        for layer in range(3):
            ids = skewed_ids(1, 4, 24)
            rows = [layer * 24 + int(expert) for expert in ids[0]]
            for row in rows:
                exact.note_use(row, step * 3 + layer + 1)
            held = set(tables.owner.tolist()) - {-1, *rows}
            for row in twin_cache.lookup(ids, tables, layer, ends_step=layer == 2).evicted:
                assert exact.warmth[row] <= min(exact.warmth[other] for other in held) + 2e-3
                held.remove(row)
                n_evicted += 1
    assert n_evicted > 300


def test_added_use__against_float64__within_a_thousandth() -> None:
    for old, at in [(-np.inf, 0.5), (3.0, 3.0), (1.0, 9.5), (70.25, 60.0), (5.0, 5.7)]:
        want = np.logaddexp2(old, at)
        assert abs(float(twin_cache.added_use(np.float32(old), np.float32(at))) - want) < 1e-3


def test_claim_and_release__between_steps__tables_agree() -> None:
    tables = GpuTables.empty(2, 8, 4, device="cpu")
    assert claim(tables, [3, 9]) == [0, 1]
    check_lookup(torch.tensor([[3, 4]], dtype=torch.int32), tables, 0, ends_step=False)
    assert int(tables.slot_of[3]) == 0
    release(tables, [0, 3])  # 3 holds nothing
    assert int(tables.n_free) == 2
    assert int(tables.slot_of[3]) == -1
    assert claim(tables, [1, 2, 5]) == [0, 3]


def test_rebase__later_choices__unchanged() -> None:
    tables = GpuTables.empty(2, 16, 6, device="cpu")
    for _ in range(20):
        for layer in range(2):
            twin_cache.lookup(skewed_ids(1, 3, 16), tables, layer, ends_step=layer == 1)
    moved = copy_of(tables)
    rebase(moved)
    assert int(moved.clock) == 0
    for layer in (0, 1):
        ids = skewed_ids(1, 3, 16)
        a, b = (twin_cache.lookup(ids, t, layer) for t in (tables, moved))
        assert a.evicted == b.evicted


def test_promotion__hot_rows_for_cold_ones__look_ups_go_on_as_the_twin_says() -> None:
    """Released and claimed between steps, and as warm as in a pool whose clock is ahead."""
    base = GpuTables.empty(2, 16, 32, device="cpu")
    fine = GpuTables.empty(2, 16, 6, device="cpu")
    for step in range(12):
        for layer in range(2):
            ids = torch.tensor([[1, 2, 3 + step % 4]], dtype=torch.int32)
            twin_cache.lookup(ids, base, layer, ends_step=layer == 1)
    for layer in range(2):
        check_lookup(
            torch.tensor([[7, 8, 9]], dtype=torch.int32), fine, layer, ends_step=layer == 1
        )
    release(fine, fine.slot_of[torch.tensor([7, 16 + 9])].tolist())
    claim(fine, [1, 16 + 2])
    warm_as(fine, base, [1, 16 + 2, 16 + 7])
    hot = fine.warmth[torch.tensor([1, 16 + 2])] - fine.clock / HALF_LIFE
    want = base.warmth[torch.tensor([1, 16 + 2])] - base.clock / HALF_LIFE
    torch.testing.assert_close(hot, want)
    assert fine.warmth[16 + 7] > base.warmth[16 + 7] + (fine.clock - base.clock) / HALF_LIFE
    for layer in range(2):
        ids = torch.tensor([[10, 11, 12 + layer]], dtype=torch.int32)
        check_lookup(ids, fine, layer, ends_step=layer == 1)
        held = [r for r in range(32) if fine.slot_of[r] >= 0]
        assert {1, 16 + 2} <= set(held)
        assert [int(fine.owner[fine.slot_of[r]]) for r in held] == held


def assert_whole(tables: GpuTables) -> None:
    """Every usable slot is free or holds a row that says so; the others hold nothing."""
    limit = int(tables.limit)
    held = {row: slot for slot, row in enumerate(tables.owner.tolist()) if row >= 0}
    assert held == {row: slot for row, slot in enumerate(tables.slot_of.tolist()) if slot >= 0}
    free = tables.free[: int(tables.n_free)].tolist()
    assert sorted([*free, *held.values()]) == list(range(limit))
    assert bool((tables.last_used[tables.owner < 0] == -1).all())


def resident(tables: GpuTables) -> set[int]:
    return set(tables.owner[tables.owner >= 0].tolist())


@pytest.mark.parametrize(("n_slots", "limit"), [(40, 9), (600, 300)])
def test_limit__shrunk_and_grown_between_steps__look_ups_stay_within_it(
    n_slots: int, limit: int
) -> None:
    tables = GpuTables.empty(2, 512, n_slots, device="cpu", limit=n_slots // 2)
    assert_whole(tables)
    claim(tables, range(n_slots // 4))
    for change in (None, n_slots, limit, limit - 1, limit + 5):
        if change is not None and change > int(tables.limit):
            grow(tables, change)
        elif change is not None:
            shrink(tables, change)
        assert_whole(tables)
        for step in range(2):
            for layer in range(2):
                ids = torch.arange(4, dtype=torch.int32)[None] * 7 + step * 41 + layer
                check_lookup(ids % 512, tables, layer, ends_step=layer == 1)
        assert_whole(tables)
    assert int(tables.limit) == limit + 5


def test_shrink__hot_rows_behind_the_new_end__move_to_free_and_colder_slots() -> None:
    tables = GpuTables.empty(1, 16, 8, device="cpu")
    claim(tables, [10, 11, 12, 13, 14, 15])  # slots 0 to 5
    release(tables, [1])
    tables.warmth[[10, 12, 13, 14, 15]] = torch.tensor([5.0, 1.0, 9.0, 7.0, 0.5])
    tables.last_used[4] = 3
    tables.hand.fill_(6)
    moves = shrink(tables, 4)
    assert moves == [(4, 1)]  # 14, the hottest that lies behind; 15 is the coldest of all
    assert tables.owner.tolist() == [10, 14, 12, 13, -1, -1, -1, -1]
    assert int(tables.last_used[1]) == 3
    assert int(tables.hand) == 0
    assert_whole(tables)
    assert shrink(tables, 2) == [(3, 0)]  # 13 and 14 are the hottest
    assert resident(tables) == {13, 14}
    assert_whole(tables)


def test_shrink__rows_of_equal_heat__none_is_moved_in_vain() -> None:
    tables = GpuTables.empty(1, 16, 8, device="cpu")
    claim(tables, range(8))
    assert shrink(tables, 5) == []
    assert resident(tables) == {0, 1, 2, 3, 4}


def test_grow__new_slots__are_free_and_old_rows_stay() -> None:
    tables = GpuTables.empty(1, 16, 8, device="cpu", limit=3)
    claim(tables, [4, 5, 6])
    grow(tables, 6)
    assert resident(tables) == {4, 5, 6}
    assert_whole(tables)
    assert claim(tables, [7, 8, 9, 10]) == [3, 4, 5]


def test_forget__all_slots_are_free_and_heat_is_kept() -> None:
    tables = GpuTables.empty(2, 16, 8, device="cpu", limit=5)
    check_lookup(torch.tensor([[3, 4]], dtype=torch.int32), tables, 1, ends_step=True)
    warmth = tables.warmth.clone()
    forget(tables)
    assert not resident(tables)
    assert int(tables.n_free) == 5
    assert_whole(tables)
    assert torch.equal(tables.warmth, warmth)
