"""What is kept of prompts: found by all tokens up to its end, and given back as it was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moet_desk.engine.kv_cache import KvSequence
from moet_desk.engine.prefix_cache import Entries, Prefix, PrefixCache

CHUNK = 4


class Book:
    """Pages that hold the tokens themselves, so that a foreign chunk shows."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def take_out(self, sequence: KvSequence, start: int, count: int) -> Entries:
        ids = [self.rows[i] for i in range(start, start + count)]
        return np.array(ids, dtype="<u4").view(np.uint8)

    def put_in(self, sequence: KvSequence, start: int, entries: Entries) -> None:
        for i, token in enumerate(entries.view("<u4").tolist()):
            self.rows[start + i] = token


class Shelf:
    """A disk of a dictionary."""

    def __init__(self) -> None:
        self.files: dict[bytes, Entries] = {}

    def read(self, key: bytes) -> Entries | None:
        return self.files.get(key)

    def write(self, key: bytes, entries: Entries) -> None:
        self.files[key] = entries.copy()


def read_prompt(cache: PrefixCache, ids: Sequence[int], reading: str = "base") -> int:
    """Read a prompt as the engine does; returns how many tokens were not read."""
    prefix, pages = Prefix(ids, reading), Book()
    restored = at = cache.restore(prefix, KvSequence(), pages)
    assert [pages.rows[i] for i in range(at)] == list(ids[:at])
    while at < len(ids):
        end = min(at - at % CHUNK + CHUNK, len(ids))
        pages.rows |= {i: ids[i] for i in range(at, end)}
        at = end
        cache.keep(prefix, KvSequence(), pages, n_read=at)
    return restored


def cache_of(n_bytes: int = 10**6, saved: Shelf | None = None, identity: str = "m") -> PrefixCache:
    return PrefixCache(identity, chunk=CHUNK, n_bytes=n_bytes, saved=saved)


def test_restore__same_beginning__whole_chunks_without_the_last_token() -> None:
    cache = cache_of()
    assert read_prompt(cache, range(12)) == 0
    assert read_prompt(cache, range(12)) == 8  # not 12: the last token gives the first one
    assert read_prompt(cache, range(13)) == 8
    assert read_prompt(cache, range(13)) == 12
    assert read_prompt(cache, [*range(7), 99, *range(8, 13)]) == 4
    assert read_prompt(cache, [99, *range(1, 13)]) == 0
    assert read_prompt(cache, range(3)) == 0


def test_restore__other_reading_or_identity__nothing() -> None:
    cache, shelf = cache_of(), Shelf()
    read_prompt(cache, range(12), "base")
    assert read_prompt(cache, range(12), "fine") == 0
    read_prompt(cache_of(saved=shelf), range(12))
    assert read_prompt(cache_of(saved=shelf, identity="other"), range(12)) == 0
    assert read_prompt(cache_of(saved=shelf), range(12)) == 8


def test_restore__same_chunk_behind_another_beginning__not_found() -> None:
    cache = cache_of()
    read_prompt(cache, [1, 1, 1, 1, 7, 7, 7, 7, 0])
    assert read_prompt(cache, [2, 2, 2, 2, 7, 7, 7, 7, 0]) == 0


def test_keep__too_little_ram__the_longest_unused_go_and_the_sum_holds() -> None:
    size = CHUNK * 4
    cache = cache_of(n_bytes=3 * size)
    read_prompt(cache, range(13))
    read_prompt(cache, range(100, 105))
    assert cache.n_bytes == 3 * size
    assert read_prompt(cache, range(100, 105)) == 4
    assert cache_of(n_bytes=0).n_bytes == 0
    assert read_prompt(none := cache_of(n_bytes=0), range(13)) == read_prompt(none, range(13)) == 0


def test_restore__dropped_from_ram__comes_from_disk() -> None:
    shelf = Shelf()
    cache = cache_of(n_bytes=CHUNK * 4, saved=shelf)
    read_prompt(cache, range(13))
    assert read_prompt(cache, range(13)) == 12
    assert cache.counters.from_disk == 3
    assert (cache.counters.found, cache.counters.wanted) == (3, 4)


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=12),
    n_bytes=st.integers(0, 200),
    on_disk=st.booleans(),
)
def test_restore__any_prompts__only_what_was_read_with_that_beginning(
    prompts: list[list[int]], n_bytes: int, on_disk: bool
) -> None:
    cache = cache_of(n_bytes, Shelf() if on_disk else None)
    for ids in prompts:
        restored = read_prompt(cache, ids)  # compares the tokens
        assert restored % CHUNK == 0
        assert restored < len(ids)
        assert cache.n_bytes <= n_bytes
