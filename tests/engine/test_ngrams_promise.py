"""Promise 1 for LongCat-Flash-Lite: what it looks back at is the same however it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.random_promise import alone, check, check_kept, packed_with_text
from tests.engine.test_promise import Answer
from tests.engine.tiny_ngrams import LITE, add_tables


@pytest.fixture(scope="module")
def pack(demo_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_with_text(
        LITE, demo_source, tmp_path_factory.mktemp("lite"), lambda _, folder: _add(folder)
    )


def _add(folder: Path) -> None:
    add_tables(folder)


@pytest.fixture(scope="module")
def wanted(pack: Path) -> list[Answer]:
    return alone(pack)


def test_tokens__least_pools_and_rows_from_disk__same_bits(
    pack: Path, wanted: list[Answer]
) -> None:
    assert check(pack, wanted, pool_slots=3, fine_slots=3, arena_rows=2).counters.evictions > 50


@pytest.mark.slow
def test_tokens__beginnings_that_were_read_before__same_bits(pack: Path, tmp_path: Path) -> None:
    check_kept(pack, tmp_path)
