"""Promise 1 for LongCat-Flash: a tiny one answers the same however it runs.

The weights are random, so the text means nothing; the tokenizer is the demo model's.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from moet_desk.engine.handle import Quality, Sampling
from tests.conftest import pack_source
from tests.engine.test_balanced import balanced
from tests.engine.test_longcat import save_longcat_head
from tests.engine.test_promise import STORY, SUM, Answer, answer, ask, engine
from tests.engine.tiny_models import CONFIGS, random_model, save_source

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=0.8, seed=11)
REQUESTS = [
    ask(STORY, Quality.FAST, GREEDY),
    ask(SUM, Quality.EXACT, DRAWN),
    balanced(STORY, GREEDY, gate=0.5),
]


@pytest.fixture(scope="module")
def pack(demo_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longcat")
    model = random_model({**CONFIGS["longcat"], "vocab_size": 8192}, 0.25)
    save_source(model, folder / "source")
    save_longcat_head(folder / "source")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_source / name, folder / "source")
    return pack_source(folder / "source", folder / "pack")


@pytest.fixture(scope="module")
def wanted(pack: Path) -> list[Answer]:
    """Each request alone, everything resident."""
    with engine(pack) as handle:
        return [answer(handle, [request])[0] for request in REQUESTS]


@pytest.mark.parametrize(
    "options",
    [
        {"pool_slots": 3, "fine_slots": 3, "arena_rows": 2},
        {"drafts": "lookup", "draft_depth": 2},
        {"drafts": "mtp", "draft_depth": 2},
    ],
    ids=["least pools and rows from disk", "guesses of the text", "guesses of the head"],
)
def test_tokens__however_it_runs__same_bits(
    pack: Path, wanted: list[Answer], options: dict[str, Any]
) -> None:
    with engine(pack, **options) as handle:
        assert [answer(handle, [request])[0] for request in REQUESTS] == wanted
        assert answer(handle, REQUESTS) == wanted
        counters, drafts = handle.snapshot().counters, handle.snapshot().drafts
    if options.get("drafts") == "mtp":
        assert drafts.guessed[0] > 0
    if "pool_slots" in options:
        assert counters.evictions > 50
        assert counters.from_nvme > 50
