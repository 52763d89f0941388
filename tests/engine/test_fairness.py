"""Many requests at once: who gets a turn, and how many may wait."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from moet_desk.engine.handle import GenerateRequest, RequestStream, Sampling
from moet_desk.errors import MoetError
from moet_desk.telemetry import Finished, TextDelta
from tests.engine.test_promise import engine

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0)
STORY = GenerateRequest(
    messages=[{"role": "user", "content": "Tell me a story."}], sampling=GREEDY, ignore_eos=True,
    top_logprobs=0,  # so that each token is an event, whether it can be shown yet or not
)  # fmt: skip


def test_long_prompt__running_answers_get_a_token_between_two_chunks(demo_pack: Path) -> None:
    with engine(demo_pack, prefill_chunk=32) as handle:
        happened: list[str] = []  # in the engine's order: callbacks run in its thread
        chat = handle.submit(STORY)
        assert chat.wait(60)
        long = GenerateRequest(prompt_ids=[7] * 500, sampling=GREEDY, max_tokens=1)
        chat.on_event(lambda: happened.append("token"))
        reader = handle.submit(long)
        reader.on_event(lambda: happened.append("chunk"))
        list(reader)
        chat.cancel()
        list(chat)
    chunks = [len(list(run)) for kind, run in groupby(happened) if kind == "chunk"]
    assert sum(chunks) >= 500 // 32 - 2  # the first ones may come before this test listens
    assert set(chunks[1:-1]) == {1}
    assert chunks[-1] <= 3  # the last chunk, its token, the end


@pytest.mark.parametrize("ended", ["by its length", "by its reader"])
def test_ended_request__gets_no_token_more(demo_pack: Path, ended: str) -> None:
    with engine(demo_pack) as handle:
        beside = handle.submit(STORY)
        assert beside.wait(60)
        stream = handle.submit(replace(STORY, max_tokens=1 if ended == "by its length" else 500))
        if ended == "by its reader":
            assert stream.wait(60)
            stream.cancel()
        events = list(stream)
        n_beside = len(beside.take())
        while n_beside < 30:  # some more turns
            beside.wait(10)
            n_beside += len(beside.take())
        assert stream.take() == []
        beside.cancel()
        list(beside)
    assert [type(event) for event in events].count(Finished) == 1
    n_tokens = sum(event.n_tokens for event in events if isinstance(event, TextDelta))
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.usage.completion_tokens == n_tokens
    if ended == "by its length":
        assert n_tokens == 1


def test_queue__many_callers_at_once__never_more_than_its_places(demo_pack: Path) -> None:
    with engine(demo_pack, max_running=1, max_waiting=2) as handle:
        taken: list[RequestStream] = []
        refused: list[str] = []
        together = threading.Barrier(12)

        def call() -> None:
            together.wait()
            try:
                taken.append(handle.submit(STORY))
            except MoetError as error:
                refused.append(error.code)

        callers = [threading.Thread(target=call) for _ in range(12)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert len(taken) == 3
        assert refused == ["MD-ENG-06"] * 9
        for stream in taken:
            stream.cancel()
            list(stream)
        with pytest.raises(MoetError, match="MD-API-04"):
            handle.submit(GenerateRequest(prompt_ids=[10**6]))
        again = [handle.submit(STORY) for _ in range(3)]  # refused ones hold no place
        for stream in again:
            stream.cancel()
