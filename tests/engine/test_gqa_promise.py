"""Promise 1 for grouped-query attention: a tiny GLM with its head, however it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.random_promise import add_known_head, alone, check, packed_with_text
from tests.engine.test_promise import Answer
from tests.engine.tiny_models import TINY_GLM


@pytest.fixture(scope="module")
def pack(demo_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**TINY_GLM, "num_mtp_layers": 1}
    return packed_with_text(config, demo_source, tmp_path_factory.mktemp("glm"), add_known_head)


@pytest.fixture(scope="module")
def wanted(pack: Path) -> list[Answer]:
    return alone(pack)


def test_tokens__least_pools_and_rows_from_disk__same_bits(
    pack: Path, wanted: list[Answer]
) -> None:
    counters = check(pack, wanted, pool_slots=4, fine_slots=4, arena_rows=2).counters
    assert counters.evictions > 100
    assert counters.from_nvme > 100


def test_tokens__guesses_of_the_head__same_bits(pack: Path, wanted: list[Answer]) -> None:
    assert check(pack, wanted, drafts="mtp", draft_depth=2).drafts.guessed[0] > 0
