"""Guesses on a GPU: answers are those of a run without, whoever guesses and whoever chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moet_desk.engine.handle import Quality, Sampling
from tests.engine.test_balanced import balanced
from tests.engine.test_promise import STORY, SUM, ask, engine
from tests.gpu.test_balanced import texts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=0.8, seed=11)
REQUESTS = [
    replace(request, top_logprobs=None)  # so that the device chooses
    for request in (
        ask(STORY, Quality.FAST, GREEDY),
        balanced(SUM, DRAWN, gate=0.8),
        balanced(STORY, GREEDY, gate=0.6),
        ask(SUM, Quality.EXACT, GREEDY),
    )
]
DRAFTS: list[dict[str, Any]] = [
    {"drafts": "mtp"},
    {"drafts": "mtp", "draft_depth": 3, "pool_slots": 32, "fine_slots": 32},
    {"drafts": "lookup", "draft_depth": 4},
    {"drafts": "auto", "draft_depth": 3},
]


def test_text__with_guesses__that_of_a_run_without(demo_pack: Path) -> None:
    with engine(demo_pack, device="cuda") as handle:
        wanted = [texts_of(handle, [request])[0] for request in REQUESTS]
    for options in DRAFTS:
        with engine(demo_pack, device="cuda", **options) as handle:
            assert [texts_of(handle, [request])[0] for request in REQUESTS] == wanted, options
            assert texts_of(handle, REQUESTS) == wanted, options
            by_host = [replace(REQUESTS[0], top_logprobs=0), *REQUESTS[1:]]
            assert texts_of(handle, by_host) == wanted, options
            drafts = handle.snapshot().drafts
            assert 0 < drafts.right[0] <= drafts.guessed[0]
