"""Prompts that were read before are not read again, and no answer changes by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moet_desk.engine.handle import EngineHandle, GenerateRequest, Quality, Sampling
from moet_desk.telemetry import Finished, TextDelta
from tests.engine.test_promise import STORY, SUM, engine

CHUNK = 32
GREEDY = Sampling(temperature=0)
BEGINNING = " ".join([STORY, SUM] * 3)
TAILS = ["Now tell it.", "Who is tall? Say it again, and say which animal it was."]


def ask(prompt: str, quality: Quality = Quality.FAST, **more: Any) -> GenerateRequest:
    return GenerateRequest(
        messages=[{"role": "user", "content": prompt}], quality=quality, sampling=GREEDY,
        max_tokens=12, top_logprobs=0, ignore_eos=True, **more,
    )  # fmt: skip


REQUESTS = [
    ask(BEGINNING + TAILS[0]),
    ask(BEGINNING + TAILS[1]),
    ask(BEGINNING + TAILS[0], Quality.EXACT),
    ask(BEGINNING + TAILS[0], Quality.BALANCED, gate=0.95),
]

Answer = tuple[list[tuple[int, float]], int]
"""Token ids with their log-probabilities, and prompt tokens that were not read."""


def answer(handle: EngineHandle, request: GenerateRequest) -> Answer:
    tokens: list[tuple[int, float]] = []
    for event in handle.submit(request):
        if isinstance(event, TextDelta):
            tokens += [(entry.token_id, entry.logprob) for entry in event.logprobs]
        if isinstance(event, Finished):
            return tokens, event.usage.cached_tokens
    raise AssertionError("no end")


def keeping(pack: Path, **options: Any) -> Any:
    return engine(pack, prefill_chunk=CHUNK, **{"prefix_bytes": 10**8, **options})


@pytest.fixture(scope="module")
def wanted(demo_pack: Path) -> list[list[tuple[int, float]]]:
    """Answers of an engine that keeps nothing."""
    with engine(demo_pack, prefill_chunk=CHUNK) as handle:
        found = [answer(handle, request) for request in REQUESTS]
    assert [cached for _, cached in found] == [0] * len(REQUESTS)
    return [tokens for tokens, _ in found]


def test_answers__prompts_kept__same_bits_without_reading(
    demo_pack: Path, wanted: list[list[tuple[int, float]]]
) -> None:
    with keeping(demo_pack) as handle:
        n_prompt = [handle.count_tokens(request) for request in REQUESTS]
        first = [answer(handle, request) for request in REQUESTS]
        again = [answer(handle, request) for request in REQUESTS]
    assert [tokens for tokens, _ in first] == wanted
    assert [tokens for tokens, _ in again] == wanted
    shared = first[1][1]
    assert shared >= 3 * CHUNK  # the other tail: whole chunks of the beginning
    assert first[0][1] == first[2][1] == 0  # 4-bit rows read other entries
    # balanced prompts are read as fast ones are
    assert first[3][1] == (n_prompt[3] - 1) // CHUNK * CHUNK
    assert [cached for _, cached in again] == [(n - 1) // CHUNK * CHUNK for n in n_prompt]


def test_answers__prompt_of_whole_chunks__its_last_one_is_read(demo_pack: Path) -> None:
    with keeping(demo_pack) as handle:
        ids = list(range(300, 300 + 3 * CHUNK))
        request = replace(ask("", Quality.BALANCED, gate=1.0), messages=None, prompt_ids=ids)
        first, cached = answer(handle, request)  # the last token's entry is written anew at 4 bits
        assert cached == 0
        longer = replace(request, prompt_ids=[*ids, 7], quality=Quality.FAST)
        found, cached = answer(handle, longer)
        assert cached == 2 * CHUNK
        assert answer(handle, request) == (first, 2 * CHUNK)
    with engine(demo_pack, prefill_chunk=CHUNK) as handle:
        assert answer(handle, longer) == (found, 0)


def test_answers__after_a_restart__same_bits_from_disk(
    demo_pack: Path, tmp_path: Path, wanted: list[list[tuple[int, float]]]
) -> None:
    folder = tmp_path / "prefixes"
    on_disk: dict[str, Any] = {"saved_prefixes": folder, "saved_bytes": 10**9}
    with keeping(demo_pack, **on_disk) as handle:
        n_prompt = [handle.count_tokens(request) for request in REQUESTS[:2]]
        assert [answer(handle, request)[0] for request in REQUESTS[:2]] == wanted[:2]
    whole = [(n - 1) // CHUNK * CHUNK for n in n_prompt]
    with keeping(demo_pack, prefix_bytes=5 * 10**5, **on_disk) as handle:  # RAM for a few chunks
        for _ in range(3):
            for i in (0, 1):
                assert answer(handle, REQUESTS[i]) == (wanted[i], whole[i])
    damaged = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with keeping(demo_pack, **on_disk) as handle:
        found = [answer(handle, request) for request in REQUESTS[:2]]
    assert [tokens for tokens, _ in found] == wanted[:2]
    assert sum(cached for _, cached in found) < sum(whole)
    for other in ({"kv_format": "bf16"}, {"dense_format": "int8"}):
        with keeping(demo_pack, **{**on_disk, **other}) as handle:
            assert answer(handle, REQUESTS[0])[1] == 0  # entries of another format are not taken


def test_answers__least_ram__nothing_kept(
    demo_pack: Path, wanted: list[list[tuple[int, float]]]
) -> None:
    with keeping(demo_pack, prefix_bytes=1) as handle:
        assert [answer(handle, REQUESTS[0]) for _ in range(2)] == [(wanted[0], 0)] * 2
