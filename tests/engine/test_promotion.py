"""The policy of the hot FP4 set: budget, hysteresis, order; for any heat and any pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet_desk.engine.promotion import (
    FACTOR,
    LEAST_SHARE,
    Allowance,
    Budget,
    Fill,
    Promotion,
    choose,
)

exactly = settings(max_examples=200, deadline=None, derandomize=True)

shares = st.sampled_from([0.0, 0.004, LEAST_SHARE, 0.02, 0.029, 0.03, 0.031, 0.5, 1.0]) | st.floats(
    0, 1, width=32
)


@st.composite
def fills(draw: st.DrawFn) -> Fill:
    n_rows = draw(st.integers(1, 24))
    heat = np.array(draw(st.lists(shares, min_size=n_rows, max_size=n_rows)), dtype=np.float32)
    may = np.array(draw(st.lists(st.booleans(), min_size=n_rows, max_size=n_rows)))
    resident = draw(st.lists(st.integers(0, n_rows - 1), unique=True))
    return Fill(heat, np.array(resident, np.int64), draw(st.integers(0, 6)), may, 0)


def applied(fill: Fill, chosen: list[Promotion]) -> Fill:
    held, n_free = set(fill.resident.tolist()), fill.n_free
    for one in chosen:
        if one.replaces is None:
            n_free -= 1
        else:
            held.remove(one.replaces)
        assert one.row not in held
        held.add(one.row)
    assert n_free >= 0
    return replace(fill, resident=np.array(sorted(held), np.int64), n_free=n_free)


@exactly
@given(fills(), st.integers(0, 8))
def test_choose__any_pool__only_clearly_hotter_rows_that_may_be_copied(
    fill: Fill, most: int
) -> None:
    chosen = choose(fill, most=most)
    assert len(chosen) <= most
    for one in chosen:
        assert fill.may[one.row]
        assert fill.heat[one.row] >= LEAST_SHARE
        if one.replaces is not None:
            assert fill.heat[one.row] > FACTOR * fill.heat[one.replaces]
    applied(fill, chosen)  # every slot once, no row twice
    assert choose(fill, most=most) == chosen


@exactly
@given(fills(), st.integers(1, 5))
def test_choose__constant_heat__comes_to_rest_and_nothing_hot_is_left_out(
    fill: Fill, most: int
) -> None:
    for _ in range(2 * len(fill.heat) + 1):
        chosen = choose(fill, most=most)
        if not chosen:
            break
        fill = applied(fill, chosen)
    assert choose(fill, most=most) == []
    waiting = fill.may.copy()
    waiting[fill.resident] = False
    hottest = fill.heat[waiting].max(initial=0.0)
    if hottest >= LEAST_SHARE:
        assert fill.n_free == 0
        assert hottest <= FACTOR * fill.heat[fill.resident].min(initial=np.inf)


@exactly
@given(fills(), st.randoms(use_true_random=False))
def test_choose__order_of_the_resident_rows__means_nothing(fill: Fill, random: object) -> None:
    mixed = fill.resident.tolist()
    random.shuffle(mixed)  # type: ignore[attr-defined]
    other = replace(fill, resident=np.array(mixed, np.int64))
    assert choose(other, most=4) == choose(fill, most=4)


def test_choose__two_rows_that_take_turns_being_hotter__stay() -> None:
    may = np.ones(2, np.bool_)
    for heat in ([0.5, 0.6], [0.6, 0.5]):
        fill = Fill(np.array(heat), np.array([0]), 0, may, 0)
        assert choose(fill, most=4) == []
    assert choose(Fill(np.array([0.19, 0.6]), np.array([0]), 0, may, 0), most=4) == [
        Promotion(1, replaces=0)
    ]


turns = st.lists(
    st.tuples(st.floats(0, 3), st.integers(0, 3000), st.integers(0, 6)), min_size=1, max_size=30
)


@exactly
@given(turns, st.integers(1, 5000), st.integers(1, 3000))
def test_allowance__any_turns__never_more_than_the_rate_and_one_bucket(
    turns: list[tuple[float, int, int]], bytes_per_s: int, row_bytes: int
) -> None:
    budget, allowance = Budget(bytes_per_s, row_bytes), Allowance()
    passed_s, spent = 0.0, 0
    for elapsed_s, base_bytes, most in turns:
        allowance = allowance.later(budget, elapsed_s=elapsed_s, base_bytes=base_bytes)
        n_rows = min(most, allowance.rows(budget))
        allowance = allowance.less(budget, n_rows)
        passed_s += elapsed_s
        spent += n_rows * row_bytes
        assert 0 <= allowance.n_bytes <= budget.most_bytes
        assert spent <= passed_s * bytes_per_s * (1 + 1e-9) + 1e-6
    long = allowance.later(budget, elapsed_s=1e6, base_bytes=0)
    assert long.rows(budget) * row_bytes <= budget.most_bytes
    assert long.rows(budget) >= 1


@pytest.mark.parametrize(("base_bytes", "rows"), [(0, 5), (500, 2), (5000, 0)])
def test_allowance__answers_fetch_rows__promotions_yield(base_bytes: int, rows: int) -> None:
    budget = Budget(bytes_per_s=2000, row_bytes=100)
    full = Allowance().later(budget, elapsed_s=0.25, base_bytes=0)
    later = full.later(budget, elapsed_s=0.1, base_bytes=base_bytes)
    assert later.rows(budget) == rows
