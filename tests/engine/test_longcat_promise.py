"""Promise 1 for LongCat-Flash: a tiny one answers the same however it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.random_promise import alone, check, packed_with_text
from tests.engine.test_longcat import save_longcat_head
from tests.engine.test_promise import Answer
from tests.engine.tiny_models import CONFIGS


@pytest.fixture(scope="module")
def pack(demo_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_with_text(
        CONFIGS["longcat"], demo_source, tmp_path_factory.mktemp("longcat"),
        lambda _, folder: save_longcat_head(folder),
    )  # fmt: skip


@pytest.fixture(scope="module")
def wanted(pack: Path) -> list[Answer]:
    return alone(pack)


def test_tokens__least_pools_and_rows_from_disk__same_bits(
    pack: Path, wanted: list[Answer]
) -> None:
    counters = check(pack, wanted, pool_slots=3, fine_slots=3, arena_rows=2).counters
    assert counters.evictions > 50
    assert counters.from_nvme > 50


def test_tokens__guesses_of_the_text__same_bits(pack: Path, wanted: list[Answer]) -> None:
    check(pack, wanted, drafts="lookup", draft_depth=2)


def test_tokens__guesses_of_the_head__same_bits(pack: Path, wanted: list[Answer]) -> None:
    drafts = check(pack, wanted, drafts="mtp", draft_depth=2).drafts
    assert drafts.guessed[0] > 0
