"""Which shards are on disk for which work, and the most of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moet_desk.store.shard_book import ShardBook, may_start, peak_bytes, spans


def test_book__unit_over_two_shards__ready_with_the_second_and_frees_the_first() -> None:
    book = ShardBook({0: ["a"], 1: ["a", "b"], 2: ["b", "b"]})
    assert book.wanted == ["a", "b"]
    assert book.land("a") == [0]
    assert book.finish([0]) == []
    assert book.land("b") == [1, 2]
    assert book.land("b") == []
    assert book.held == {"a", "b"}
    assert book.finish([1]) == ["a"]
    assert book.finish([2]) == ["b"]
    assert (book.wanted, book.held) == ([], set())


def test_peak__cut_layer_by_layer__window() -> None:
    sizes = {f"{i:02d}": 10 for i in range(20)}
    names = sorted(sizes)
    needs = {i: names[i : i + 2] for i in range(19)}
    assert [peak_bytes(needs, sizes, window) for window in (2, 3, 4)] == [20, 30, 40]
    assert spans(needs) == 2


def test_peak__every_unit_needs_all__all_of_them() -> None:
    sizes = dict.fromkeys("abcdef", 10)
    assert peak_bytes({0: list("abcdef")}, sizes, 2) == 60


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=12),
    st.integers(1, 4),
    st.randoms(),
)
def test_peak__whatever_lands_first__never_more_than_was_said(needs, window, rng) -> None:
    units = {i: [f"{shard}" for shard in sorted(shards)] for i, shards in enumerate(needs)}
    sizes = {f"{i}": i + 1 for i in range(10)}
    said = peak_bytes(units, sizes, window)
    book = ShardBook(units)
    waiting, arriving, here = book.wanted, [], set()
    while waiting or arriving:
        while waiting and may_start(len(here), window, idle=not arriving):
            arriving.append(waiting.pop(0))
            here.add(arriving[-1])
        assert sum(sizes[name] for name in here) <= said
        name = arriving.pop(rng.randrange(len(arriving)))
        here -= set(book.finish(book.land(name)))
    assert book.wanted == []
    assert here == set()
