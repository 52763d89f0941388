"""The arbiter's decisions: when slots are given back, when they come again, and how far."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet_desk.engine.vram_arbiter import (
    AT_ONCE,
    CALM_S,
    LEAST_FREE,
    LEAST_GROWTH,
    MOST_GROWTH,
    Card,
    Decision,
    Pace,
    Pool,
    Terms,
    Why,
    decide,
    divide,
    give_back,
)
from moet_desk.units import GIB, MIB

BASE = Pool(3000, least=64, planned=3000, most=11_008, slot_bytes=7 * MIB)
FINE = Pool(64, least=64, planned=64, most=11_008, slot_bytes=8 * MIB)
TERMS = Terms(keep=3 * GIB)
CARD = Card(free=3 * GIB, fixed=8 * GIB)


def decided(
    *, base: Pool = BASE, fine: Pool = FINE, card: Card = CARD, terms: Terms = TERMS,
    pace: Pace = AT_ONCE,
) -> Decision:  # fmt: skip
    return decide(base, fine, card, terms, pace, 100.0)[0]


def test_decide__as_the_plan_left_it__nothing_changes() -> None:
    assert decided() == Decision(3000, 64, Why.FITS)


@pytest.mark.parametrize(("free", "shrinks"), [(1536 * MIB, False), (1535 * MIB, True)])
def test_decide__free_memory__shrinks_below_half_of_what_is_kept(free: int, shrinks: bool) -> None:
    found = decided(card=replace(CARD, free=free))
    assert (found.why is Why.PRESSURE) == shrinks
    # up to three quarters of what is kept: the next breath of the other program fits
    gained = (3000 - found.base) * 7 * MIB
    assert gained == 0 or 0 <= free + gained - 2304 * MIB < 7 * MIB


def test_decide__another_program_takes_it_all__least_pool_and_says_so() -> None:
    poor = replace(BASE, slots=200)
    found = decided(base=poor, card=replace(CARD, free=0))
    assert found == Decision(64, 64, Why.PRESSURE)
    at_least = decided(base=replace(BASE, slots=64), card=replace(CARD, free=0))
    assert at_least == Decision(64, 64, Why.LEAST)


def test_decide__a_small_card__keeps_enough_for_windows() -> None:
    terms = Terms(keep=100 * MIB)
    assert decided(terms=terms, card=replace(CARD, free=LEAST_FREE)).why is Why.FITS
    assert decided(terms=terms, card=replace(CARD, free=LEAST_FREE - 1)).why is Why.PRESSURE


def test_decide__lower_limit__shrinks_to_it_whatever_is_free() -> None:
    card = replace(CARD, free=100 * GIB)
    found = decided(card=card, terms=replace(TERMS, limit=16 * GIB))
    assert found.why is Why.LIMIT
    taken = card.fixed + found.base * BASE.slot_bytes + found.fine * FINE.slot_bytes
    assert 16 * GIB - BASE.slot_bytes < taken <= 16 * GIB
    below_all = decided(card=card, terms=replace(TERMS, limit=GIB))
    assert below_all == Decision(64, 64, Why.LIMIT)


def test_decide__limit_and_pressure__the_stronger_counts_and_is_named() -> None:
    card = Card(free=GIB, fixed=8 * GIB)  # short of 1.25 GiB
    n_bytes = BASE.n_bytes + FINE.n_bytes
    mild = replace(TERMS, limit=card.fixed + n_bytes - 100 * MIB)
    found = decided(card=card, terms=mild)
    assert found.why is Why.PRESSURE
    assert (3000 - found.base) * 7 * MIB >= 1280 * MIB
    strict = replace(TERMS, limit=card.fixed + n_bytes - 4 * GIB)
    found = decided(card=card, terms=strict)
    assert found.why is Why.LIMIT
    assert (3000 - found.base) * 7 * MIB >= 4 * GIB


def test_decide__room_again__waits_for_calm_then_grows_in_pieces() -> None:
    card = replace(CARD, free=9 * GIB)
    pace, grown_at = Pace(), list[float]()
    base = BASE
    for second in range(20):
        found, pace = decide(base, FINE, card, TERMS, pace, 50.0 + second)
        if found.why is Why.ROOM:
            grown_at.append(second)
            more = (found.base - base.slots) * BASE.slot_bytes
            assert 0 < more <= MOST_GROWTH
            base, card = replace(base, slots=found.base), replace(card, free=card.free - more)
    assert grown_at[0] == CALM_S
    assert grown_at == list(range(10, 10 + len(grown_at)))
    assert TERMS.high <= card.free < TERMS.high + LEAST_GROWTH


def test_decide__bursts_of_another_program__calm_begins_anew() -> None:
    roomy, tight = replace(CARD, free=9 * GIB), replace(CARD, free=3 * GIB)
    pace = Pace()
    for second in range(60):  # every eighth second there is no room
        card = tight if second % 8 == 7 else roomy
        found, pace = decide(BASE, FINE, card, TERMS, pace, float(second))
        assert found.why is Why.FITS


def test_decide__a_wish__grows_at_once() -> None:
    card = replace(CARD, free=9 * GIB)
    assert decided(card=card, pace=Pace()).why is Why.FITS
    assert decided(card=card, pace=AT_ONCE).why is Why.ROOM


def test_decide__limit_with_room_on_the_card__grows_up_to_it() -> None:
    small = replace(BASE, slots=500)
    card = Card(free=60 * GIB, fixed=8 * GIB)
    terms = replace(TERMS, limit=card.fixed + small.n_bytes + FINE.n_bytes + 500 * MIB)
    found = decided(base=small, card=card, terms=terms)
    assert found.why is Why.ROOM
    assert found.base == 500 + 500 // 7
    near = replace(terms, limit=card.fixed + small.n_bytes + FINE.n_bytes + LEAST_GROWTH - 1)
    assert decided(base=small, card=card, terms=near).why is Why.FITS
    just = replace(near, limit=(near.limit or 0) + 1)
    assert decided(base=small, card=card, terms=just).why is Why.ROOM


def test_decide__all_rows_have_slots__grows_no_further() -> None:
    full, fine = replace(BASE, slots=11_008), replace(FINE, slots=11_008)
    found = decided(base=full, fine=fine, card=Card(free=500 * GIB, fixed=0))
    assert found == Decision(11_008, 11_008, Why.FITS)


def test_divide__order__least_then_planned_then_of_use() -> None:
    base = replace(BASE, least=10, planned=100, most=200)
    fine = replace(FINE, least=10, planned=50, most=80)
    least = 10 * 15 * MIB
    assert divide(0, base, fine) == (10, 10)
    assert divide(least, base, fine) == (10, 10)
    assert divide(least + 89 * 7 * MIB, base, fine) == (99, 10)
    assert divide(least + 90 * 7 * MIB + 8 * MIB, base, fine) == (100, 11)
    planned = 100 * 7 * MIB + 50 * 8 * MIB
    assert divide(planned, base, fine) == (100, 50)
    assert divide(planned + 100 * 7 * MIB + 8 * MIB, base, fine) == (200, 51)
    assert divide(10**15, base, fine) == (200, 80)


def test_divide__a_larger_slot_comes_first__no_crumbs_for_what_comes_later() -> None:
    fine = replace(FINE, planned=100)
    planned = 3000 * 7 * MIB + 64 * 8 * MIB
    assert divide(planned + 7 * MIB, BASE, fine) == (3000, 64)  # a fine slot needs 8 MiB


def test_give_back__after_a_failed_allocation__at_least_so_much_or_the_least() -> None:
    found = give_back(BASE, FINE, 300 * MIB)
    assert (3000 - found.base) * 7 * MIB >= 300 * MIB
    assert found == Decision(3000 - 43, 64, Why.PRESSURE)
    assert give_back(replace(BASE, slots=64), FINE, MIB).why is Why.LEAST


def test_pool__sizes_out_of_order__a_mistake() -> None:
    with pytest.raises(ValueError, match="least to its most"):
        Pool(5, least=6, planned=5, most=9, slot_bytes=1)


@st.composite
def pools(draw: st.DrawFn, slot_mib: int) -> Pool:
    least = draw(st.integers(1, 100))
    planned = draw(st.integers(least, 4000))
    most = draw(st.integers(planned, 12_000))
    return Pool(draw(st.integers(least, most)), least, planned, most, slot_mib * MIB)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    pools(7), pools(8), st.integers(0, 200 * GIB), st.integers(0, 20 * GIB),
    st.none() | st.integers(1, 200 * GIB), st.floats(0, 30),
)  # fmt: skip
def test_decide__anything__within_the_bounds_and_one_direction(
    base: Pool, fine: Pool, free: int, keep: int, limit: int | None, calm_s: float
) -> None:
    card, terms = Card(free, 8 * GIB), Terms(keep, limit)
    found, pace = decide(base, fine, card, terms, Pace(0.0), calm_s)
    assert base.least <= found.base <= base.most
    assert fine.least <= found.fine <= fine.most
    more = (found.base - base.slots) * base.slot_bytes + (found.fine - fine.slots) * fine.slot_bytes
    match found.why:
        case Why.FITS | Why.LEAST:
            assert more == 0
        case Why.ROOM:
            assert found.base >= base.slots
            assert found.fine >= fine.slots
            assert 0 < more <= min(free - terms.high, MOST_GROWTH)
            assert calm_s >= CALM_S
        case Why.PRESSURE | Why.LIMIT:
            assert found.base <= base.slots
            assert found.fine <= fine.slots
            assert more < 0
            assert pace == Pace()
    if free < terms.low and found.why is not Why.LEAST:
        at_least = (found.base, found.fine) == (base.least, fine.least)
        assert at_least or free - more >= terms.aim


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pools(7), pools(8), st.integers(0, 150 * GIB), st.integers(0, 10 * GIB))
def test_divide__more_bytes__no_pool_is_smaller(base: Pool, fine: Pool, n: int, more: int) -> None:
    before, after = divide(n, base, fine), divide(n + more, base, fine)
    assert after[0] >= before[0]
    assert after[1] >= before[1]
    assert before[0] == base.least or before[0] * 7 * MIB + before[1] * 8 * MIB <= max(
        n, base.least * 7 * MIB + fine.least * 8 * MIB
    )
