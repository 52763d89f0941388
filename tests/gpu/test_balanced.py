"""Balanced answers on a GPU: the same text for any pools, alone and beside, whoever chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moet_desk.engine.handle import EngineHandle, GenerateRequest, Quality, Sampling
from moet_desk.telemetry import Failed, TextDelta
from tests.engine.test_balanced import balanced
from tests.engine.test_promise import STORY, SUM, ask, engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=0.8, seed=11)
REQUESTS = [
    replace(request, top_logprobs=None)  # so that the device chooses
    for request in (
        balanced(STORY, GREEDY),
        balanced(SUM, DRAWN, gate=0.8),
        balanced(SUM, GREEDY, gate=0.9),
        ask(STORY, Quality.EXACT, GREEDY),
    )
]


def texts_of(handle: EngineHandle, requests: list[GenerateRequest]) -> list[str]:
    """Texts of answers that are written at the same time."""
    texts = []
    for stream in [handle.submit(request) for request in requests]:
        text = ""
        for event in stream:
            assert not isinstance(event, Failed), event
            if isinstance(event, TextDelta):
                text += event.text
        texts.append(text)
    return texts


def test_text__any_pools_alone_and_beside__the_same(demo_pack: Path) -> None:
    with engine(demo_pack, device="cuda") as handle:
        wanted = [texts_of(handle, [request])[0] for request in REQUESTS]
        gate = handle.snapshot().gate
        assert 0 < gate.rerun < gate.judged
        assert texts_of(handle, REQUESTS) == wanted
        # one answer with log-probabilities makes the host choose for all beside it
        by_host = [*REQUESTS[:2], replace(REQUESTS[2], top_logprobs=0), REQUESTS[3]]
        assert texts_of(handle, by_host) == wanted
    with engine(demo_pack, device="cuda", pool_slots=32, fine_slots=32) as handle:
        assert texts_of(handle, REQUESTS[::-1]) == wanted[::-1]
        assert handle.snapshot().counters.evictions > 0


def test_text__gate_0__that_of_fast(demo_pack: Path) -> None:
    fast = replace(ask(SUM, Quality.FAST, DRAWN), top_logprobs=None)
    with engine(demo_pack, device="cuda") as handle:
        want = texts_of(handle, [fast])
        assert texts_of(handle, [replace(fast, quality=Quality.BALANCED, gate=0.0)]) == want
