"""Guessing ahead: what is guessed, what it counts, and that it never changes an answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moet_desk.engine.draft import (
    Acceptance,
    CpuHead,
    LookupDrafter,
    MtpDrafter,
    mtp_of,
    what_followed,
)
from moet_desk.engine.handle import (
    EngineOptions,
    GenerateRequest,
    Quality,
    RequestStream,
    Sampling,
)
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.engine.serving import Serving
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import DraftCounters, Finished
from tests.engine.oracle import loaded
from tests.engine.test_promise import STORY, SUM, Answer, answer, ask, engine

# -- the text so far -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "depth", "want"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 9, [9, 1, 2, 3]),
        ([5, 2, 3, 7, 1, 2, 3, 8, 5, 2, 3], 1, [7]),  # three tokens say more than the newest two
        ([2, 3, 7, 2, 3, 8, 2, 3], 1, [8]),  # the newest place of equal ones
        ([1, 2, 3], 2, []),
        ([3, 9, 3], 2, []),  # one token alone says nothing
        ([4, 4, 4, 4], 3, [4]),
        ([], 2, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_what_followed(tokens: list[int], depth: int, want: list[int]) -> None:
    assert what_followed(tokens, depth) == want


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_what_followed__any_text__comes_behind_an_equal_ending(
    tokens: list[int], depth: int
) -> None:
    found = what_followed(tokens, depth)
    assert len(found) <= depth
    places = [i for i in range(2, len(tokens)) if tokens[i - 2 : i] == tokens[-2:]]
    assert bool(found) == bool(places)
    assert not found or any(tokens[i : i + len(found)] == found for i in places)


def test_acceptance__behind_a_wrong_guess__counts_as_wrong() -> None:
    seen = Acceptance()
    for n_guessed, n_right in ((2, 2), (2, 0), (1, 1), (0, 0), (3, 1)):
        seen.note(n_guessed, n_right)
    assert seen.counters() == DraftCounters(guessed=(4, 3, 1), right=(3, 1, 0))


class Half:
    """A request whose answer may have one more token."""

    def __init__(self) -> None:
        self.prompt_ids, self.out_ids, self.limit = [1, 2, 3, 1, 2], [3], 2
        self.plane, self.kv, self.draft = Plane.BASE, KvSequence(), None


def test_lookup__end_of_the_answer__guesses_no_further() -> None:
    request = Half()
    assert LookupDrafter(3).propose(request) == []
    request.limit = 4
    assert LookupDrafter(3).propose(request) == [1, 2]


# -- answers ---------------------------------------------------------------------------------

REQUESTS = [
    ask(prompt, quality, sampling)
    for prompt, quality, sampling in (
        (STORY, Quality.FAST, Sampling(temperature=0)),
        (STORY, Quality.BALANCED, Sampling(temperature=0)),
        (SUM, Quality.EXACT, Sampling(temperature=0)),
        (SUM, Quality.FAST, Sampling(temperature=0.8, seed=11)),
        (STORY, Quality.BALANCED, Sampling(temperature=0.7, seed=4, frequency_penalty=0.5)),
    )
]
DRAFTS: list[dict[str, Any]] = [
    {"drafts": "mtp", "draft_depth": 3},
    {"drafts": "mtp", "draft_depth": 2, "pool_slots": 4, "fine_slots": 4},
    {"drafts": "lookup", "draft_depth": 4},
]


@pytest.fixture(scope="module")
def wanted(demo_pack: Path) -> list[Answer]:
    with engine(demo_pack) as handle:
        return [answer(handle, [request])[0] for request in REQUESTS]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(DRAFTS[0], id="mtp 3", marks=pytest.mark.slow),
        pytest.param(DRAFTS[1], id="mtp 2, few slots"),
        pytest.param(DRAFTS[2], id="lookup 4"),
    ],
)
def test_answers__with_drafts__equal_those_without(
    demo_pack: Path, wanted: list[Answer], options: dict[str, Any]
) -> None:
    with engine(demo_pack, **options) as handle:
        alone = [answer(handle, [request])[0] for request in REQUESTS]
        beside = answer(handle, REQUESTS)
        drafts = handle.snapshot().drafts
    assert alone == wanted
    assert beside == wanted
    assert drafts.guessed  # they were really made, and some were right and some wrong
    assert 0 < drafts.right[0] < drafts.guessed[0]


def last_event(stream: Any) -> Finished:
    *_, last = stream
    assert isinstance(last, Finished)
    return last


def test_usage__drafts__fewer_steps_than_tokens(demo_pack: Path) -> None:
    request = GenerateRequest(
        messages=[{"role": "user", "content": SUM}], quality=Quality.EXACT,
        sampling=Sampling(temperature=0), max_tokens=12,
    )  # fmt: skip
    with engine(demo_pack, drafts="mtp") as handle:
        usage = last_event(handle.submit(request)).usage
    assert usage.accepted_tokens > 0
    assert usage.steps == usage.completion_tokens - 1 - usage.accepted_tokens
    assert usage.draft_tokens >= usage.accepted_tokens


def test_drafts__first_guess__is_what_the_head_gives_for_the_whole_text(demo_pack: Path) -> None:
    """The head that read chunk by chunk and step by step knows what it would know at once."""
    serving = Serving(demo_pack, EngineOptions(drafts="mtp", prefill_chunk=8, save_heat=False))
    core = serving.core
    drafter = core.decoder.drafter
    assert isinstance(drafter, MtpDrafter)
    assert isinstance(drafter.head, CpuHead)
    seen: list[tuple[list[int], int]] = []
    intact = drafter.propose

    def propose(request: Any) -> list[int]:
        guesses = intact(request)
        seen.append(([*request.prompt_ids, *request.out_ids], guesses[0]))
        return guesses

    drafter.propose = propose  # type: ignore[method-assign]
    request = GenerateRequest(prompt="Once upon a time there was a goat that", max_tokens=12,
                              ignore_eos=True, sampling=Sampling(temperature=0))  # fmt: skip
    serving.add(serving.prepare(request, RequestStream("r", lambda _: None)))
    while serving.busy:
        serving.turn()
    assert len(seen) >= 5
    with torch.inference_mode():
        for ids, guess in seen[-3:]:
            kv, own = core.kv.reserve(len(ids)), core.kv.reserve(len(ids))
            assert kv is not None
            assert own is not None
            many = core.prefiller._experts[Plane.BASE]
            tokens = torch.tensor(ids)
            hidden = core.model.forward(tokens[:-1], core.kv, kv, many)
            states = drafter.head.head.forward(tokens[1:], hidden, core.kv, own, many)
            assert int(core.model.logits(states[-1:]).argmax()) == guess
            core.kv.release(kv)
            core.kv.release(own)
    serving.close()


def test_drafts__model_without_a_head__refused(demo_pack: Path) -> None:
    with loaded(demo_pack) as core:
        bare = replace(core.spec, mtp=None)
    with pytest.raises(MoetError) as refused:
        mtp_of(bare)
    assert refused.value.code == "MD-ENG-05"
