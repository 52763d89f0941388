"""Promise 1: a tier changes speed, never text. The same request gives the same tokens with `==`.

Pools of all sizes, the arena limited so that rows come from the file, alone and beside other
requests, greedy and sampled, fast and exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moet_desk.engine import prefill
from moet_desk.engine.handle import (
    EngineHandle,
    EngineOptions,
    GenerateRequest,
    Quality,
    Sampling,
    start_engine,
)
from moet_desk.telemetry import Failed, Finished, TextDelta

STORY = "Write a very short story for young children about a tall horse and a door."
SUM = "The goat has number 792. The tower has number 251. What is the number of the tower?"
TOKENS = 40  # the answer to SUM goes on into a second page of KV
FEW = 24  # the others show the same in fewer


def ask(
    prompt: str, quality: Quality, sampling: Sampling, *, tokens: int = TOKENS
) -> GenerateRequest:
    message = {"role": "user", "content": prompt}
    return GenerateRequest(
        messages=[message], quality=quality, sampling=sampling, max_tokens=tokens,
        top_logprobs=0, ignore_eos=True,
    )  # fmt: skip


REQUESTS = [
    ask(STORY, Quality.FAST, Sampling(temperature=0), tokens=FEW),
    ask(STORY, Quality.EXACT, Sampling(temperature=0), tokens=FEW),
    ask(SUM, Quality.FAST, Sampling(temperature=0.8, seed=11)),
]


@contextmanager
def engine(pack: Path, **options: Any) -> Iterator[EngineHandle]:
    handle = start_engine(pack, EngineOptions(save_heat=False, **options))
    try:
        assert handle.wait_ready(120)
        yield handle
    finally:
        handle.close()


Answer = list[tuple[int, float]]
"""Token ids with their log-probabilities: equal means equal to the last bit."""


def answer(handle: EngineHandle, requests: list[GenerateRequest]) -> list[Answer]:
    """Answers of requests that run at the same time."""
    streams = [handle.submit(request) for request in requests]
    answers = []
    for request, stream in zip(requests, streams, strict=True):
        tokens: Answer = []
        for event in stream:
            assert not isinstance(event, Failed), event
            if isinstance(event, TextDelta):
                tokens += [(entry.token_id, entry.logprob) for entry in event.logprobs]
            if isinstance(event, Finished):
                assert event.usage.completion_tokens == len(tokens) == request.max_tokens
        answers.append(tokens)
    return answers


@pytest.fixture(scope="module")
def wanted(demo_pack: Path) -> list[Answer]:
    """Each request alone, everything resident."""
    with engine(demo_pack) as handle:
        return [answer(handle, [request])[0] for request in REQUESTS]


SIZES = {
    "pool 30 %": {"pool_slots": 77, "fine_slots": 77},
    "pool of one token's experts": {"pool_slots": 4, "fine_slots": 4},
    "no rows in RAM": {"arena_rows": 0, "pool_slots": 77, "fine_slots": 40},
    "few rows in RAM, least pool": {"arena_rows": 20, "pool_slots": 4, "fine_slots": 4},
}


@pytest.mark.parametrize("sizes", list(SIZES))
def test_tokens__any_tier_sizes__same_bits(
    demo_pack: Path, wanted: list[Answer], sizes: str
) -> None:
    with engine(demo_pack, **SIZES[sizes]) as handle:
        for request, want in zip(REQUESTS, wanted, strict=True):
            assert answer(handle, [request]) == [want]
        counters = handle.snapshot().counters
    if SIZES[sizes]["pool_slots"] == 4:
        assert counters.evictions > 1000  # the small pool was really small
    if "arena_rows" in SIZES[sizes]:
        assert counters.from_nvme > 300  # rows really came from the file


@pytest.mark.parametrize("slots", [256, 4], ids=["pool full", "pool least"])
def test_tokens__beside_two_others__same_bits(
    demo_pack: Path, wanted: list[Answer], slots: int
) -> None:
    with engine(demo_pack, pool_slots=slots, fine_slots=slots) as handle:
        assert answer(handle, REQUESTS) == wanted
        assert answer(handle, REQUESTS[::-1]) == wanted[::-1]


def test_tokens__long_prompt_beside_a_running_answer__same_bits(
    demo_pack: Path, wanted: list[Answer]
) -> None:
    long = ask(" ".join([STORY, SUM] * 18), Quality.FAST, Sampling(temperature=0))
    with engine(demo_pack, pool_slots=30, prefill_chunk=64) as handle:
        alone = answer(handle, [long])
        mixed = answer(handle, [REQUESTS[0], long, REQUESTS[1]])
    assert mixed[1] == alone[0]
    with engine(demo_pack, prefill_chunk=64) as handle:
        assert answer(handle, [long]) == alone
        # these prompts are shorter than a chunk, so their grid is the same as with the default
        assert answer(handle, REQUESTS[:2]) == [wanted[0], wanted[1]]
    assert mixed[0] == wanted[0]
    assert mixed[2] == wanted[1]


def test_tokens__same_seed_again__same_text_other_seed_other_text(
    demo_pack: Path, wanted: list[Answer]
) -> None:
    other = ask(SUM, Quality.FAST, Sampling(temperature=0.8, seed=12))
    with engine(demo_pack, pool_slots=50) as handle:
        assert answer(handle, [REQUESTS[2], other, REQUESTS[2]])[::2] == [wanted[2], wanted[2]]
        assert answer(handle, [other])[0] != wanted[2]


def test_tokens__prompt_read_a_layer_per_turn__same_bits_and_others_go_on_between(
    demo_pack: Path, wanted: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "TURN_S", 0.0)
    with engine(demo_pack) as handle:
        assert answer(handle, REQUESTS) == wanted
        happened: list[str] = []  # in the engine's order: callbacks run in its thread
        chat = handle.submit(ask(STORY, Quality.FAST, Sampling(temperature=0)))
        assert chat.wait(60)
        chat.take()
        chat.on_event(lambda: happened.append("token"))
        reader = handle.submit(ask(SUM, Quality.FAST, Sampling(temperature=0)))
        reader.on_event(lambda: happened.append("read"))
        for stream in (reader, chat):
            list(stream)
    before = happened[: happened.index("read")]
    assert before.count("token") >= 6  # the demo has 8 layers, and a prompt of one chunk
