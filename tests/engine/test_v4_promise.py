"""Promise 1 for DeepSeek-V4: a tiny one answers the same however it runs.

The weights are random, so the text means nothing; the tokenizer is the demo model's. KV is as
released (FP8), and the prompts are longer than a window and a heavy pool.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from moet_desk.engine.handle import Quality, Sampling
from tests.conftest import pack_source
from tests.engine.test_balanced import balanced
from tests.engine.test_kept_prompts import BEGINNING, TAILS
from tests.engine.test_kept_prompts import answer as answer_with_cached
from tests.engine.test_kept_prompts import ask as ask_long
from tests.engine.test_promise import STORY, SUM, Answer, answer, ask, engine
from tests.store.v4 import write_v4

CHUNK = 30  # ends inside of windows that are open
GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=0.8, seed=11)
REQUESTS = [
    ask(STORY, Quality.FAST, GREEDY),
    ask(SUM, Quality.EXACT, DRAWN),
    balanced(STORY, GREEDY, gate=0.5),
]


@pytest.fixture(scope="module")
def pack(demo_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4")
    write_v4(folder / "source", shards=1)
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
        {"pool_slots": 2, "fine_slots": 2, "arena_rows": 2},
        pytest.param({"drafts": "mtp", "draft_depth": 3}, marks=pytest.mark.slow),
        pytest.param({"drafts": "lookup", "draft_depth": 2}, marks=pytest.mark.slow),
    ],
    ids=["least pools and rows from disk", "guesses of the head", "guesses of the text"],
)
def test_tokens__however_it_runs__same_bits(
    pack: Path, wanted: list[Answer], options: dict[str, Any]
) -> None:
    assert wanted[0] != wanted[2]  # some token of the balanced answer was read again
    with engine(pack, **options) as handle:
        assert answer(handle, REQUESTS) == wanted
        counters, drafts = handle.snapshot().counters, handle.snapshot().drafts
    if options.get("drafts") == "mtp":
        assert drafts.guessed[2] > 0
    if "pool_slots" in options:
        assert counters.evictions > 50
        assert counters.from_nvme > 50


@pytest.mark.slow
def test_answers__prompts_kept_with_pools_and_states__same_bits_without_reading(
    pack: Path, tmp_path: Path
) -> None:
    requests = [
        ask_long(BEGINNING + TAILS[0]),
        ask_long(BEGINNING + TAILS[1]),
        ask_long(BEGINNING + TAILS[0], Quality.BALANCED, gate=0.95),
    ]
    with engine(pack, prefill_chunk=CHUNK) as handle:
        wanted = [answer_with_cached(handle, request)[0] for request in requests]
    on_disk: dict[str, Any] = {"saved_prefixes": tmp_path, "saved_bytes": 10**9}
    for first_time in (True, False):  # the second engine finds them on disk
        with engine(pack, prefill_chunk=CHUNK, prefix_bytes=10**8, **on_disk) as handle:
            whole = [(handle.count_tokens(r) - 1) // CHUNK * CHUNK for r in requests]
            found = [answer_with_cached(handle, request) for request in requests]
        assert [tokens for tokens, _ in found] == wanted
        cached = [n for _, n in found]
        assert cached[1] >= 4 * CHUNK
        assert cached == whole or first_time
