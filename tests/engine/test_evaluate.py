"""Likelihood and distance of a quality: sums on made-up scores, and the CPU engine's figures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from moet_desk.engine.evaluate import (
    PLANES,
    Tally,
    TextFigures,
    answer_exactly,
    count_answer_flips,
    measure,
    opened_core,
    windows_of,
)
from moet_desk.engine.gate_curve import Counts
from moet_desk.engine.handle import (
    EngineHandle,
    EngineOptions,
    GenerateRequest,
    Quality,
    Sampling,
    start_engine,
)
from moet_desk.engine.loader import Core
from moet_desk.engine.text import Text
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import TextDelta
from tests.engine.oracle import logits_of

FAST, EXACT = Quality.FAST, Quality.EXACT
BOTH = (FAST, EXACT)

TEXTS = [
    "<|user|>Where does the ferry go?<|end|><|assistant|>It goes to the island.<|end|>",
    "The tailor mended a coat, and the miller waited for the wind. " * 8,
    "x",
]


def scores(*rows: list[float]) -> torch.Tensor:
    """Logits that are already the logarithms of these probabilities."""
    return torch.tensor(rows).log()


def tally(fast: torch.Tensor, exact: torch.Tensor, targets: list[int]) -> TextFigures:
    made = Tally(BOTH, model="m")
    made.add({FAST: fast, EXACT: exact}, torch.tensor(targets))
    return made.figures()


def test_tally__made_up_scores__figures_by_hand() -> None:
    exact = scores([0.5, 0.25, 0.25], [0.6, 0.3, 0.1])
    fast = scores([0.25, 0.5, 0.25], [0.6, 0.3, 0.1])
    got = tally(fast, exact, [0, 2])
    assert got.tokens == 2
    assert got.nll[EXACT] == pytest.approx(-(math.log(0.5) + math.log(0.1)) / 2)
    assert got.nll[FAST] == pytest.approx(-(math.log(0.25) + math.log(0.1)) / 2)
    assert set(got.distance) == {FAST}
    kl = 0.5 * math.log(2) - 0.25 * math.log(2)  # of the first token; the second is the same
    assert got.distance[FAST].kl_mean == pytest.approx(kl / 2)
    assert got.distance[FAST].top1_agreement == 0.5
    assert got.distance[FAST].largest_margin == pytest.approx(math.log(2))


def test_tally__equal_scores__no_distance_and_no_margin() -> None:
    same = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    far = tally(same, same.clone(), [0, 1, 2, 3, 4]).distance[FAST]
    assert (far.kl_mean, far.top1_agreement, far.largest_margin) == (0, 1, None)


def test_tally__in_parts__as_all_at_once() -> None:
    random = torch.Generator().manual_seed(2)
    fast, exact = torch.randn(2, 40, 11, generator=random)
    targets = torch.randint(0, 11, (40,), generator=random)
    whole, parts = Tally(BOTH, model="m"), Tally(BOTH, model="m")
    whole.add({FAST: fast, EXACT: exact}, targets)
    for at in (slice(0, 1), slice(1, 24), slice(24, 40)):
        parts.add({FAST: fast[at], EXACT: exact[at]}, targets[at])
    one, other = whole.figures(), parts.figures()
    assert one.nll == pytest.approx(other.nll)
    assert one.distance[FAST].kl_mean == pytest.approx(other.distance[FAST].kl_mean)
    assert one.distance[FAST].largest_margin == other.distance[FAST].largest_margin
    reference = torch.nn.functional.kl_div(
        fast.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert one.distance[FAST].kl_mean == pytest.approx(float(reference), rel=1e-5)


@pytest.mark.parametrize("quality", BOTH)
def test_tally__one_quality__nothing_to_compare(quality: Quality) -> None:
    made = Tally([quality], model="m")
    made.add({quality: torch.zeros(3, 4)}, torch.tensor([0, 1, 2]))
    figures = made.figures()
    assert figures.nll == {quality: pytest.approx(math.log(4))}
    assert figures.distance == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tally__scores_that_are_no_numbers__an_error(bad: float) -> None:
    with pytest.raises(MoetError) as caught:
        tally(torch.zeros(1, 3), torch.tensor([[0, bad, 0]]), [0])
    assert caught.value.code == "MD-ENG-04"
    assert "verify m" in caught.value.do


def test_windows__long_text__cut_with_bos_and_all_tokens_once(demo_pack: Path) -> None:
    text = Text.load(demo_pack)
    whole = text.encode_prompt(TEXTS[1])
    windows = windows_of(text, [TEXTS[1]], size=32)
    assert all(len(window) <= 32 and window[0] == text.bos_id for window in windows)
    assert [int(i) for window in windows for i in window[1:]] == whole[1:]
    some = windows_of(text, [TEXTS[1], TEXTS[1]], size=32, most_tokens=40)
    assert [len(window) for window in some] == [32, 10]
    assert windows_of(text, [""], size=32) == []


def test_measure__demo__as_the_whole_text_at_once(demo_pack: Path) -> None:
    options = EngineOptions(context=256, prefill_chunk=96, save_heat=False)
    with opened_core(demo_pack, options) as (core, text):
        windows = windows_of(text, TEXTS, size=core.plan.context)
        told: list[tuple[int, int]] = []
        got = measure(core, windows, BOTH, lambda done, total: told.append((done, total)))
        free = core.kv.free_tokens
        wanted = Tally(BOTH, model="demo")
        for window in windows:
            ids = window.tolist()
            sizes = [min(96, len(ids) - at) for at in range(0, len(ids), 96)]
            logits = {
                quality: logits_of(core, ids, plane=PLANES[quality], sizes=sizes)[:-1]
                for quality in BOTH
            }
            wanted.add(logits, window[1:].long())
        assert core.kv.free_tokens == free  # every page came back
    assert any(len(window) > 96 for window in windows)
    assert told[-1] == (got.tokens, got.tokens)
    # the head multiplies other numbers of rows at once, which rounds differently
    assert got.nll == pytest.approx(wanted.figures().nll, abs=1e-4)
    assert got.distance[FAST].kl_mean == pytest.approx(
        wanted.figures().distance[FAST].kl_mean, abs=1e-4
    )
    assert got.nll[EXACT] < got.nll[FAST]


def test_count_answer_flips__demo__the_steps_of_exact_answers_alone(demo_pack: Path) -> None:
    question = "<|user|>The goat has number 792. The tower has number 251. What is the number of"
    asked = [f"{question} the tower?<|end|><|assistant|>", "<|user|>Hi!<|end|><|assistant|>"]
    options = EngineOptions(context=256, prefill_chunk=24, save_heat=False)
    handle = start_engine(demo_pack, options)
    try:
        assert handle.wait_ready(120)
        said = [answer_of(handle, prompt) for prompt in asked]
    finally:
        handle.close()
    counts, wanted = Counts(), Counts()
    with opened_core(demo_pack, options) as (core, text):
        free = core.kv.free_tokens
        prompts = [text.encode_prompt(prompt) for prompt in asked]
        answers = [answer_exactly(core, text, ids, 20) for ids in prompts]
        told: list[tuple[int, int]] = []
        count_answer_flips(core, answers, counts, lambda done, total: told.append((done, total)))
        assert core.kv.free_tokens == free
        for one in answers:
            ids = one.ids.tolist()
            sizes = [min(24, len(ids) - at) for at in range(0, len(ids), 24)]
            steps = slice(one.n_prompt - 1, len(ids) - 1)
            fast, exact = (
                logits_of(core, ids, plane=PLANES[quality], sizes=sizes)[steps] for quality in BOTH
            )
            assert exact.argmax(-1).tolist() == ids[one.n_prompt :]  # they are its own words
            for at, (row, other) in enumerate(zip(fast, exact, strict=True)):
                flip = int(row.argmax()) != int(other.argmax())
                again = rerun_logits(core, ids[: one.n_prompt + at])
                wanted.add(
                    float(row.double().softmax(-1).max()),
                    flip=flip,
                    stays=int(again.argmax()) != int(other.argmax()),
                )
    assert len(prompts[0]) > 24  # the answer begins in another chunk than the prompt
    assert [one.ids.tolist()[: one.n_prompt] for one in answers] == prompts
    written = [text.decode(one.ids.tolist()[one.n_prompt :]) for one in answers]
    assert [whole.removesuffix("<|end|>") for whole in written] == said
    assert all(len(one.ids) - one.n_prompt <= 20 for one in answers)
    assert told == [(1, 2), (2, 2)]
    assert counts.tokens == sum(len(one.ids) - one.n_prompt for one in answers)
    assert (counts.tokens, counts.flips) == (wanted.tokens, wanted.flips)
    for got, want in zip(counts.curve(), wanted.curve(), strict=True):
        # the head multiplies other numbers of rows at once, which rounds differently
        assert got.rerun == pytest.approx(want.rerun, abs=1.5 / counts.tokens)
        assert got.caught == pytest.approx(want.caught, abs=1.5 / max(1, counts.flips))


@torch.inference_mode()
def rerun_logits(core: Core, ids: list[int]) -> torch.Tensor:
    """Scores [V] behind ids whose last one is read with FP4 experts, those before with 2 bits."""
    sequence = core.kv.reserve(len(ids))
    assert sequence is not None
    for start in range(0, len(ids) - 1, 24):
        part = torch.tensor(ids[start : min(start + 24, len(ids) - 1)])
        core.prefiller.hidden(part, sequence, Plane.BASE)
    hidden = core.prefiller.hidden(torch.tensor(ids[-1:]), sequence, Plane.FINE)
    core.kv.release(sequence)
    return core.model.logits(hidden)[0]


def answer_of(handle: EngineHandle, prompt: str) -> str:
    request = GenerateRequest(
        prompt=prompt, quality=EXACT, max_tokens=20, sampling=Sampling(temperature=0)
    )
    return "".join(one.text for one in handle.submit(request) if isinstance(one, TextDelta))
