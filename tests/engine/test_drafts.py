"""Guessing ahead: what is guessed, what it counts, and that it never changes an answer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench.same_text import CHATS, POOLS, answers, first_turns, running
from moet_desk.engine.draft import (
    MOST_PLACES,
    Acceptance,
    CpuHead,
    DraftState,
    LookupDrafter,
    MtpDrafter,
    TextIndex,
    state_of,
)
from moet_desk.engine.draft_control import FOLLOWED_TOKENS, MOST_SPARE, Choice, Fixed, Offer, Regime
from moet_desk.engine.draft_estimates import GUESSERS, Seen, Source
from moet_desk.engine.drafting import Drafting
from moet_desk.engine.handle import (
    EngineOptions,
    GenerateRequest,
    Quality,
    RequestStream,
    Sampling,
)
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.engine.model_shape import check_head, loads_head
from moet_desk.engine.serving import Serving
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import DraftChoice, DraftCounters, Finished, TextDelta
from tests.engine.oracle import loaded
from tests.engine.test_promise import STORY, SUM, Answer, answer, ask, engine

# -- the text so far -------------------------------------------------------------------------


def followed(tokens: list[int], depth: int, *, grown: Sequence[int] = ()) -> list[int]:
    """What a text index says; it took the text in at once, or at these lengths too."""
    index = TextIndex()
    for length in (*grown, len(tokens)):
        index.grow(tokens[:2], tokens[2:length])
    return index.what_followed(depth)


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
    assert followed(tokens, depth) == want


def looked_for(tokens: list[int], depth: int) -> list[int]:
    """The same by looking through the whole text."""
    n = len(tokens)
    for size in (4, 3, 2):
        places = [i for i in range(size, n) if tokens[i - size : i] == tokens[n - size :]]
        if places:
            return tokens[places[-1] : places[-1] + depth]
    return []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5), st.data())
def test_what_followed__any_text_in_any_pieces__longest_and_newest(
    tokens: list[int], depth: int, data: st.DataObject
) -> None:
    grown = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    assert followed(tokens, depth, grown=grown) == looked_for(tokens, depth)


def test_what_followed__same_pair_very_often__looks_at_the_newest_places() -> None:
    tokens = [9, 1, 2, 7] + [1, 2, 3] * MOST_PLACES + [9, 1, 2]
    assert looked_for(tokens, 1) == [7]
    assert followed(tokens, 1) == [3]


def test_acceptance__behind_a_wrong_guess__counts_as_wrong() -> None:
    seen = Acceptance()
    for n_guessed, n_right in ((2, 2), (2, 0), (1, 1), (0, 0), (3, 1)):
        seen.note(n_guessed, n_right)
    assert seen.counters() == DraftCounters(guessed=(4, 3, 1), right=(3, 1, 0))


class Half:
    """A request whose answer may have one more token."""

    def __init__(self) -> None:
        self.prompt_ids, self.out_ids, self.limit = [1, 2, 3, 1, 2], [3], 2
        self.plane, self.kv = Plane.BASE, KvSequence()
        self.draft: DraftState | None = None


def test_lookup__end_of_the_answer__guesses_no_further() -> None:
    request = Half()
    assert LookupDrafter().propose(request, 3) == []
    request.limit = 4
    assert LookupDrafter().propose(request, 3) == [1, 2]


class Reader:
    """A head that notes what it reads; its guess is the newest token and one."""

    most_rows = 4

    def __init__(self) -> None:
        self.reads: list[list[int]] = []

    def read(
        self, ids: Sequence[int], states: Tensor, sequence: KvSequence, plane: Plane
    ) -> tuple[int, Tensor]:
        assert states[:, 0].tolist() == list(range(sequence.length, sequence.length + len(ids)))
        sequence.length += len(ids)
        self.reads.append(list(ids))
        return ids[-1] + 1, torch.tensor([[float(sequence.length)]])


def states(first: int, count: int) -> Tensor:
    """States [T, 1] that say behind which place of the text they are."""
    return torch.arange(float(first), first + count)[:, None]


def test_head__left_alone_for_a_while__catches_up_in_reads_of_its_size() -> None:
    request, reader = Half(), Reader()
    request.limit, request.prompt_ids, request.out_ids = 100, [10, 11, 12], []
    mtp = MtpDrafter(reader)
    mtp.note(request, states(0, 3))
    assert reader.reads == [[11, 12]]  # the last one waits for the answer's first token
    request.out_ids = list(range(20, 30))
    mtp.note(request, states(3, 9))
    assert mtp.behind(request) == 2
    assert mtp.propose(request, 3) == [30, 31, 32]
    assert reader.reads[1:] == [[20, 21, 22, 23], [24, 25], [26, 27, 28, 29], [30], [31]]
    assert state_of(request).sequence.length == 12  # guesses are not part of the text
    assert mtp.behind(request) == 0


def test_head__sequence_with_states_on_a_card__its_own_count_in_the_same_slot() -> None:
    request = Half()
    request.kv = KvSequence([4, 5], length=9, slot=2, base=8)
    own = state_of(request).sequence
    assert (own.pages, own.length, own.slot, own.base) == ([4, 5], 0, 2, 0)
    assert (request.kv.slot, request.kv.base) == (2, 8)


def test_head__too_far_behind__reads_along_no_more() -> None:
    request, reader = Half(), Reader()
    request.limit, request.out_ids = 1000, list(range(500))
    drafting = Drafting(Fixed(Source.MTP, 1), mtp=MtpDrafter(reader))
    drafting.note(request, states(0, FOLLOWED_TOKENS))
    assert drafting.follows(request)
    drafting.note(request, states(FOLLOWED_TOKENS, 1))
    assert not drafting.follows(request)
    assert state_of(request).pending == []
    drafting.note(request, states(FOLLOWED_TOKENS + 1, 1))
    assert state_of(request).pending == []
    assert reader.reads == []


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
        pytest.param(DRAFTS[0], id="mtp 3", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(DRAFTS[1], id="mtp 2, few slots", marks=pytest.mark.slow),
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


class Changing:
    """Someone else, and another depth, in every step."""

    sources = GUESSERS

    def __init__(self) -> None:
        made = [(Source.MTP, 3), (Source.OFF, 0), (Source.LOOKUP, 4), (Source.MTP, 1)]
        self._next = itertools.cycle([*made, *made[:2], (Source.OFF, 0), (Source.MTP, 2)])
        self.seen: list[Seen] = []

    def follows(self, plane: Plane) -> bool:
        return True

    def saves(self) -> bool:
        return False

    def holds(self, regime: Regime) -> bool:
        return False

    def choose(self, regime: Regime, offer: Offer) -> Choice:
        return Choice(*next(self._next))

    def note(self, regime: Regime, choice: Choice, seen: Seen) -> None:
        assert seen.rows == 1 + seen.results[0][0]
        self.seen.append(seen)

    def passed(self, regime: Regime, n_tokens: int, aside_s: float) -> None:
        raise AssertionError("it never holds")

    def view(self) -> DraftChoice:
        return DraftChoice()


ENDING = [
    GenerateRequest(prompt=ask_text, stop=stop, max_tokens=limit, quality=quality,
                    sampling=Sampling(temperature=0.7, seed=5, **more), ignore_eos=limit > 30)
    for ask_text, stop, limit, quality, more in (
        ("One day a goat", (" the",), 40, Quality.FAST, {}),
        ("One day a goat", ("e", "zz"), 40, Quality.FAST, {}),
        ("One day a goat", (), 1, Quality.FAST, {}),
        ("One day a goat", (), 2, Quality.BALANCED, {}),
        ("One day a goat", (), 7, Quality.EXACT, {"repetition_penalty": 1.3}),
        ("A horse. A horse. A horse. A horse.", (), 25, Quality.FAST, {"logit_bias": {46: 1.5}}),
        ("1 2 3 1 2 3 1 2 3", (), 32, Quality.BALANCED, {"presence_penalty": 0.2}),
    )
]  # fmt: skip
"""Answers that end in all ways there are, in the middle of guesses too."""


def served(serving: Serving, request: GenerateRequest) -> tuple[str, Any, int, str | None]:
    stream = RequestStream("r", lambda _: None)
    serving.add(serving.prepare(request, stream))
    while serving.busy:
        serving.turn()
    *events, last = stream.take()
    assert isinstance(last, Finished), last
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    return text, last.reason, last.usage.completion_tokens, last.stop


def test_answers__guesser_changes_in_every_step__end_as_without(demo_pack: Path) -> None:
    plain = Serving(demo_pack, EngineOptions(save_heat=False))
    want = [served(plain, request) for request in ENDING]
    plain.close()
    serving = Serving(demo_pack, EngineOptions(drafts="mtp", save_heat=False, pool_slots=40))
    drafting = serving.core.decoder.drafting
    policy = drafting.policy = Changing()
    assert [served(serving, request) for request in ENDING] == want
    serving.close()
    assert len({reason for _, reason, _, _ in want}) == 2
    assert any(stop for *_, stop in want)
    counts = drafting.acceptance.counters()
    assert 0 < counts.right[0] < counts.guessed[0]
    assert sum(seen.n_tokens for seen in policy.seen) == sum(n - 1 for _, _, n, _ in want)


def test_answers__controller_on_a_clock__as_without_and_its_numbers_shown(
    demo_pack: Path, wanted: list[Answer]
) -> None:
    """A clock of which each look is a second: on a CPU a guess then costs as much as a step."""
    serving = Serving(
        demo_pack, EngineOptions(drafts="auto", draft_head=True, draft_depth=2, save_heat=False)
    )
    ticks = itertools.count()
    serving.core.decoder.drafting._clock = lambda: float(next(ticks))
    stream = RequestStream("r", lambda _: None)
    serving.add(serving.prepare(REQUESTS[0], stream))
    while serving.busy:
        serving.turn()
    *events, _ = stream.take()
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [(e.token_id, e.logprob) for d in deltas for e in d.logprobs] == wanted[0]
    shown = serving.snapshot(serving.state())
    serving.close()
    assert shown.draft_choice.asked == "auto"
    assert 600 < dict(shown.draft_choice.rows_ms)[1] <= 2000  # two looks where the head is told
    assert shown.draft_choice.guess_ms == 1000
    assert shown.draft_choice.source == "off"
    assert 2 <= shown.drafts.guessed[0] <= 8  # looked at, and left alone
    assert (shown.draft_choice.spare_steps or 0.0) < MOST_SPARE


@pytest.mark.slow
@pytest.mark.parametrize("quality", list(Quality))
def test_answers__heldout_prompts__no_token_differs(demo_pack: Path, quality: Quality) -> None:
    """A part of what `bench.same_text` does with 200 prompts: 12, four for each quality."""
    prompts = sorted(first_turns(CHATS, 60), key=len)[list(Quality).index(quality) : 12 : 3]
    with running(demo_pack) as handle:
        want, _ = answers(handle, prompts, quality, 6)
    for sizes in POOLS.values():
        with running(demo_pack, drafts="mtp", draft_depth=2, **sizes) as handle:
            found, speed = answers(handle, prompts, quality, 6)
        assert found == want
        assert speed.tokens > 1.2 * speed.steps


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
    drafter = core.decoder.drafting.mtp
    assert drafter is not None
    assert isinstance(drafter.head, CpuHead)
    seen: list[tuple[list[int], int]] = []
    intact = drafter.propose

    def propose(request: Any, depth: int) -> list[int]:
        guesses = intact(request, depth)
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


def test_head__model_without_one__refused_by_name_and_not_missed_else(demo_pack: Path) -> None:
    with loaded(demo_pack) as core:
        whole, bare = core.spec, replace(core.spec, mtp=None)
    with pytest.raises(MoetError) as refused:
        check_head(bare, EngineOptions(drafts="mtp"))
    assert refused.value.code == "MD-ENG-05"
    check_head(bare, EngineOptions(drafts="auto"))
    check_head(whole, EngineOptions(drafts="mtp"))
    assert not loads_head(bare, EngineOptions(drafts="auto"), on_card=True)


@pytest.mark.parametrize(
    ("options", "on_card", "on_cpu"),
    [
        (EngineOptions(), False, False),
        (EngineOptions(drafts="lookup"), False, False),
        (EngineOptions(drafts="mtp"), True, True),
        (EngineOptions(drafts="auto"), True, False),  # a CPU cannot gain by it
        (EngineOptions(drafts="auto", draft_head=True), True, True),
        (EngineOptions(drafts="auto", draft_head=False), False, False),
    ],
)
def test_head__loaded__where_it_may_gain(
    demo_pack: Path, options: EngineOptions, on_card: bool, on_cpu: bool
) -> None:
    with loaded(demo_pack) as core:
        spec = core.spec
    assert loads_head(spec, options, on_card=True) == on_card
    assert loads_head(spec, options, on_card=False) == on_cpu
