"""Promise 1 for tiny models of two families with a head: grouped queries (GLM), shortcuts of two
attentions (LongCat-Flash). They answer the same however they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.random_promise import AddHead, add_known_head, alone, check, packed_with_text
from tests.engine.test_longcat import save_longcat_head
from tests.engine.test_promise import Answer
from tests.engine.tiny_models import CONFIGS, TINY_GLM


@dataclass(frozen=True)
class Family:
    """A tiny model, with how few slots rows are evicted all the time, and how many at least."""

    config: Mapping[str, Any]
    add_head: AddHead
    slots: int
    evictions: int


FAMILIES = {
    "glm": Family({**TINY_GLM, "num_mtp_layers": 1}, add_known_head, 4, 100),
    "longcat": Family(CONFIGS["longcat"], lambda _, folder: save_longcat_head(folder), 3, 50),
}


@dataclass(frozen=True)
class Packed:
    """Its pack, and what it answers with everything resident."""

    family: Family
    path: Path
    wanted: list[Answer]


@pytest.fixture(scope="module", params=FAMILIES)
def packed(
    request: pytest.FixtureRequest, demo_source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Packed:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    path = packed_with_text(dict(family.config), demo_source, folder, family.add_head)
    return Packed(family, path, alone(path))


def test_tokens__least_pools_and_rows_from_disk__same_bits(packed: Packed) -> None:
    slots = packed.family.slots
    counters = check(
        packed.path, packed.wanted, pool_slots=slots, fine_slots=slots, arena_rows=2
    ).counters
    assert counters.evictions > packed.family.evictions
    assert counters.from_nvme > packed.family.evictions


@pytest.mark.parametrize("drafts", ["lookup", "mtp"])
def test_tokens__guesses__same_bits(packed: Packed, drafts: str) -> None:
    counted = check(packed.path, packed.wanted, drafts=drafts, draft_depth=2).drafts
    if drafts == "mtp":  # a text without repeats gives no guesses
        assert counted.guessed[0] > 0
