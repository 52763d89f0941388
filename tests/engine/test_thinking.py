"""The limit of reasoning tokens: by itself, in the sampler, and in the real engine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from moet_desk.engine.handle import (
    EngineHandle,
    GenerateRequest,
    Grammar,
    GrammarKind,
    Quality,
    Sampling,
)
from moet_desk.engine.parsers.answers import THINK, AnswerFormat, CallFormat, PromptEnd, Think
from moet_desk.engine.sampling import Sampler
from moet_desk.engine.scripted import ScriptedEngine
from moet_desk.engine.text import Text
from moet_desk.engine.thinking import ThinkingBudget, budget_of
from moet_desk.errors import MoetError
from moet_desk.telemetry import Failed, TextDelta
from tests.conftest import DEMO
from tests.engine.test_parsers import TOOLS
from tests.engine.test_promise import engine

OPEN, CLOSE = 8, 9
ASKED = GenerateRequest(prompt="x", thinking_budget=3)
PLAIN = Think("[reason]", "[/reason]")


@cache
def text_with(think: Think | None, calls: CallFormat = CallFormat.HERMES) -> Text:
    text = Text.load(DEMO)
    text.answers = AnswerFormat(calls, think)
    return text


def budget(
    end: PromptEnd, request: GenerateRequest = ASKED, text: Text | None = None
) -> ThinkingBudget:
    made = budget_of(request, text or text_with(THINK), end)
    assert made is not None
    return made


def walk(made: ThinkingBudget, wanted: Sequence[int]) -> list[int]:
    """What is written if the model wants these tokens, one after the other."""
    written = []
    for token in wanted:
        forced = made.forced()
        written.append(token if forced is None else forced)
        made.take(written[-1])
    return written


def test_budget__prompt_opened_reasoning__ends_it_once() -> None:
    made = budget(PromptEnd.REASONING)
    assert walk(made, [20, 21, 22, 23, 24, 25, 26, 27]) == [20, 21, 22, CLOSE, 24, 25, 26, 27]
    assert not made.active


def test_budget__answer_may_reason__counts_behind_its_tag() -> None:
    text = text_with(THINK)
    space = text.encode(" ")
    made = budget(PromptEnd.UNSAID)
    assert walk(made, [*space, OPEN, 20, 21, 22, 23, 24])[-2:] == [CLOSE, 24]
    made = budget(PromptEnd.UNSAID)
    assert walk(made, [20, OPEN, 21, 22, 23, 24, 25]) == [20, OPEN, 21, 22, 23, 24, 25]
    assert not made.active


@pytest.mark.parametrize("end", [PromptEnd.REASONING, PromptEnd.UNSAID])
def test_budget__none_at_all__closes_at_once(end: PromptEnd) -> None:
    made = budget(end, replace(ASKED, thinking_budget=0))
    opened = [] if end is PromptEnd.REASONING else [OPEN]
    assert walk(made, [*opened, 20, 21]) == [*opened, CLOSE, 21]


def test_budget__reasoning_ended_by_itself__has_no_say() -> None:
    made = budget(PromptEnd.REASONING)
    wanted = [20, 21, CLOSE, 22, 23, OPEN, 24, 25, 26, 27]
    assert walk(made, wanted) == wanted
    assert not budget(PromptEnd.ANSWER).active


def test_budget__tags_that_are_no_tokens__are_seen_in_the_text_and_written_whole() -> None:
    text = text_with(PLAIN)
    close = text.encode(PLAIN.close)
    assert len(close) > 1
    opened = text.encode(PLAIN.open)
    made = budget(PromptEnd.UNSAID, text=text)
    written = walk(made, [*opened, 20, 21, 22, *[30] * len(close), 31])
    assert written == [*opened, 20, 21, 22, *close, 31]
    long = replace(ASKED, thinking_budget=len(close))
    made = budget(PromptEnd.REASONING, long, text)
    assert walk(made, [*close, 20, 21]) == [*close, 20, 21]


def test_budget__a_call_inside_of_reasoning__is_not_cut() -> None:
    text = text_with(THINK, CallFormat.KIMI_K2)
    call = text.encode("<|tool_calls_section_begin|>")
    asked = replace(ASKED, tools=TOOLS, thinking_budget=len(call))
    assert walk(budget(PromptEnd.REASONING, asked, text), [*call, 20, 21]) == [*call, 20, 21]
    without = replace(asked, tools=())
    assert walk(budget(PromptEnd.REASONING, without, text), [*call, 20])[-1] == CLOSE


def test_budget__not_asked_for__is_none() -> None:
    assert budget_of(GenerateRequest(prompt="x"), text_with(None), PromptEnd.UNSAID) is None


@pytest.mark.parametrize(("limit", "think", "words"), [
    (-1, THINK, "below 0"), (5, None, "no tags"), (0, None, "no tags"),
])  # fmt: skip
def test_budget__that_cannot_be_kept__is_refused(
    limit: int, think: Think | None, words: str
) -> None:
    asked = GenerateRequest(prompt="x", thinking_budget=limit)
    with pytest.raises(MoetError, match="MD-API-04") as caught:
        budget_of(asked, text_with(think), PromptEnd.UNSAID)
    assert caught.value.facts["parameter"] == "thinking_budget"
    assert words in caught.value.facts["reason"]


def test_scripted_engine__refuses_it_too() -> None:
    with pytest.raises(MoetError, match="MD-API-04"):
        ScriptedEngine().submit(ASKED)


# -- in the sampler --------------------------------------------------------------------------


def sampler(made: ThinkingBudget) -> Sampler:
    sampling = Sampling(temperature=1.0, seed=3)
    return Sampler(sampling, sampling, prompt_ids=[], vocab=64, top_logprobs=1, budget=made)


def test_sampler__forced_token__keeps_its_place_in_the_draws_and_the_raw_scores() -> None:
    made = Sampler(
        s := Sampling(temperature=1.0, seed=3), s, prompt_ids=[], vocab=64, top_logprobs=1
    )
    bounded, scores = sampler(budget(PromptEnd.REASONING)), torch.linspace(0, 1, 64)
    free = [made.choose(scores) for _ in range(12)]
    bound = [bounded.choose(scores) for _ in range(12)]
    assert bound[:3] == free[:3]
    assert bound[4:] == free[4:]
    assert bound[3].token_id == CLOSE != free[3].token_id
    assert bound[3].logprob == pytest.approx(float(scores.log_softmax(0)[CLOSE]))


def test_sampler__device_may_choose__only_behind_the_reasoning() -> None:
    sampling = Sampling(temperature=0.5, seed=3)
    made = Sampler(sampling, sampling, prompt_ids=[], vocab=64, budget=budget(PromptEnd.REASONING))
    for _ in range(4):
        assert made.draw() is None
        made.choose(torch.zeros(64))
    draw = made.draw()
    assert draw is not None
    assert draw.position == 4


def test_sampler__invalid_numbers__fail_a_forced_token_as_well() -> None:
    made = sampler(budget(PromptEnd.REASONING, replace(ASKED, thinking_budget=0)))
    with pytest.raises(MoetError, match="MD-ENG-04"):
        made.choose(torch.full((64,), torch.nan))


# -- in the engine ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker(demo_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with a template that begins to reason."""
    folder = tmp_path_factory.mktemp("thinker") / "demo"
    shutil.copytree(demo_pack, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().rstrip() + "{{- '<think>' -}}")
    return folder


def written(handle: EngineHandle, request: GenerateRequest) -> list[int]:
    stream, tokens = handle.submit(request), list[int]()
    assert stream.prompt_end is PromptEnd.REASONING
    for event in stream:
        assert not isinstance(event, Failed), event
        if isinstance(event, TextDelta):
            tokens += [entry.token_id for entry in event.logprobs]
    return tokens


REQUEST = GenerateRequest(
    messages=[{"role": "user", "content": "Tell of a door, a door, a door."}],
    sampling=Sampling(temperature=0), max_tokens=14, top_logprobs=0, ignore_eos=True,
)  # fmt: skip


@pytest.mark.slow
def test_engine__every_quality_and_with_drafts__same_beginning_then_the_tag(thinker: Path) -> None:
    budgeted = replace(REQUEST, thinking_budget=6)
    with engine(thinker, drafts="off") as handle:
        info = handle.model()
        assert info is not None
        assert info.thinks
        without = {quality: written(handle, replace(budgeted, quality=quality))
                   for quality in Quality}  # fmt: skip
        for quality, tokens in without.items():
            free = written(handle, replace(REQUEST, quality=quality))
            assert CLOSE not in free[:7]
            assert tokens[:7] == [*free[:6], CLOSE]
            assert len(tokens) == 14
    with engine(thinker, drafts="lookup") as handle:
        for quality, tokens in without.items():
            assert written(handle, replace(budgeted, quality=quality)) == tokens


def test_engine__a_form__comes_behind_the_forced_end(thinker: Path) -> None:
    schema = '{"enum": ["yes", "no"]}'
    asked = replace(
        REQUEST, thinking_budget=4, ignore_eos=False,
        grammar=Grammar(GrammarKind.JSON_SCHEMA, schema), sampling=Sampling(temperature=1, seed=1),
    )  # fmt: skip
    with engine(thinker) as handle:
        tokens = written(handle, asked)
        assert tokens.index(CLOSE) == 4
        assert handle.decode(tokens[5:]).removesuffix("<|end|>") in ('"yes"', '"no"')
