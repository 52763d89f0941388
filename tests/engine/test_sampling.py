"""Choosing tokens: filters against their definition, draws, penalties, checks, speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moet_desk.engine.checks import check_sampling
from moet_desk.engine.handle import Sampling
from moet_desk.engine.sampling import Draw, Sampler
from moet_desk.errors import MoetError
from moet_desk.kernels.reference.sampling import greedy, philox_4x32, sample, uniform

PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)


# -- random numbers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox__known_answers_of_random123__equal(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox_4x32(counter, key) == expected


def test_uniform__many_positions__spread_evenly_and_depend_on_the_seed() -> None:
    numbers = torch.tensor([uniform(7, i) for i in range(20_000)])
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    counts = torch.histc(numbers, 20, 0, 1)
    chi_squared = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_squared < 44  # 19 degrees of freedom, p = 0.001
    assert uniform(7, 3) != uniform(8, 3)
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


# -- the draw --------------------------------------------------------------------------------


def _kept_by_definition(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """Ids and probabilities that the filters leave, best first; every filter as it is defined."""
    scores = logits.double() / temperature
    order = torch.sort(scores, descending=True, stable=True).indices
    if 0 < top_k < len(scores):
        scores = scores.masked_fill(scores < scores[order[top_k - 1]], -math.inf)
    probabilities = scores.softmax(0)
    if top_p < 1:
        ordered = probabilities[order]
        gone = order[(ordered.cumsum(0) - ordered) >= top_p]
        gone = gone[gone != order[0]]
        scores = scores.index_fill(0, gone, -math.inf)
        probabilities = scores.softmax(0)
    if min_p > 0:
        scores = scores.masked_fill(probabilities < min_p * probabilities.max(), -math.inf)
        probabilities = scores.softmax(0)
    kept = order[probabilities[order] > 0]
    return kept, probabilities[kept]


@given(
    st.integers(0, 2**32),
    st.sampled_from([2, 30, 300, 3000]),
    st.sampled_from([0.2, 1.0, 1.7]),
    st.sampled_from([0, 1, 7, 200]),
    st.sampled_from([1.0, 0.95, 0.4, 0.01]),
    st.sampled_from([0.0, 0.08, 0.6]),
    st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=150, deadline=None)
def test_sample__any_filters__inverse_of_the_cumulative_distribution(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3
    filters: dict[str, Any] = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
    }  # fmt: skip
    kept, probabilities = _kept_by_definition(logits, **filters)
    chosen = sample(logits, u=u, **filters)
    at = kept.tolist().index(chosen)
    before, reached = float(probabilities[:at].sum()), float(probabilities[: at + 1].sum())
    assert before - 1e-9 <= u <= reached + 1e-9


def test_sample__top_p_as_in_transformers__same_tokens_stay() -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(500, generator=torch.Generator().manual_seed(3)) * 2
    for top_k, top_p, min_p in [(40, 0.9, 0.05), (0, 0.7, 0.0), (9, 1.0, 0.3)]:
        scores = processors.TemperatureLogitsWarper(0.8)(None, logits.double()[None])
        if top_k:
            scores = processors.TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1:
            scores = processors.TopPLogitsWarper(top_p)(None, scores)
        if min_p:
            scores = processors.MinPLogitsWarper(min_p)(None, scores)
        stays = set(scores[0].isfinite().nonzero().flatten().tolist())
        filters: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        drawn = {sample(logits, temperature=0.8, u=i / 4000, **filters) for i in range(4000)}
        assert drawn <= stays
        best = sorted(stays, key=lambda i: -float(logits[i]))
        assert sample(logits, temperature=0.8, u=1 - 2**-53, **filters) == best[-1]


def test_sample__ties__ordered_by_id() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 2.0, -math.inf])
    draws = [sample(logits, temperature=1, top_k=1, top_p=1, min_p=0, u=u) for u in (0, 0.4, 0.9)]
    assert draws == [1, 2, 3]
    assert greedy(logits) == 1
    assert sample(logits, temperature=0, top_k=0, top_p=1, min_p=0, u=0.9) == 1


def test_sample__largest_u__never_a_token_of_probability_zero() -> None:
    logits = torch.tensor([1.0, -math.inf, 0.0, -2000.0])
    for min_p in (0.0, 1e-9):
        assert sample(logits, temperature=1, top_k=0, top_p=1, min_p=min_p, u=1 - 2**-53) == 2


# -- the sampler of a request ----------------------------------------------------------------


def _sampler(sampling: Sampling, prompt: Sequence[int] = (), **more: Any) -> Sampler:
    return Sampler(sampling, PLAIN, prompt_ids=prompt, vocab=6, **more)


def _choose(sampler: Sampler, *logits: float) -> int:
    return sampler.choose(torch.tensor(logits)).token_id


def test_choose__same_seed__same_tokens_whatever_runs_beside() -> None:
    logits = [torch.randn(64, generator=torch.Generator().manual_seed(i)) for i in range(40)]

    def run(seed: int, *, noise: bool) -> list[int]:
        sampler = Sampler(Sampling(seed=seed), PLAIN, prompt_ids=(), vocab=64)
        other = Sampler(Sampling(seed=99), PLAIN, prompt_ids=(), vocab=64)
        chosen = []
        for row in logits:
            if noise:
                other.choose(row)
                torch.rand(3)
            chosen.append(sampler.choose(row).token_id)
        return chosen

    assert run(5, noise=False) == run(5, noise=True)
    assert run(5, noise=False) != run(6, noise=False)


def test_choose__none_values__the_models_recommendation_is_used() -> None:
    greedy_model = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    sampler = Sampler(Sampling(seed=1), greedy_model, prompt_ids=(), vocab=6)
    assert {_choose(sampler, 0, 0.1, 0, 0, 0, 0) for _ in range(30)} == {1}


def test_choose__repetition_penalty__counts_prompt_and_answer() -> None:
    sampler = _sampler(Sampling(temperature=0, repetition_penalty=2.0), prompt=[0])
    assert _choose(sampler, 3.0, 1.6, 1.0, -9, -9, -9) == 1  # 0 is worth 1.5
    assert _choose(sampler, 3.0, 1.6, 1.0, -9, -9, -9) == 0  # 1 is worth 0.8
    assert _choose(sampler, -1.0, -1.1, -1.5, -9, -9, -9) == 2  # negative ones are multiplied


def test_choose__presence_and_frequency__only_the_answer_counts() -> None:
    sampler = _sampler(Sampling(temperature=0, frequency_penalty=1.0), prompt=[0, 0, 0])
    row = (2.5, 1.0, -9, -9, -9, -9)
    assert [_choose(sampler, *row) for _ in range(4)] == [0, 0, 1, 0]
    sampler = _sampler(Sampling(temperature=0, presence_penalty=2.0))
    assert [_choose(sampler, *row) for _ in range(3)] == [0, 1, 0]


def test_choose__logit_bias__added() -> None:
    sampler = _sampler(Sampling(temperature=0, logit_bias={4: 100.0}))
    assert _choose(sampler, 50, 0, 0, 0, 0, 0) == 4


def test_choose__logits_left_unchanged_and_logprobs_are_raw() -> None:
    row = torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0, 0.0])
    before = row.clone()
    wish = Sampling(temperature=0, logit_bias={0: 100.0}, repetition_penalty=1.5)
    chosen = _sampler(wish, prompt=[1], top_logprobs=2).choose(row)
    assert torch.equal(row, before)
    logprobs = row.log_softmax(0).tolist()
    assert chosen.token_id == 0
    assert chosen.logprob == pytest.approx(logprobs[0])
    assert chosen.top == ((2, pytest.approx(logprobs[2])), (1, pytest.approx(logprobs[1])))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choose__invalid_logits__fails_closed(bad: float, temperature: float) -> None:
    sampler = _sampler(Sampling(temperature=temperature, repetition_penalty=1.2), prompt=[2])
    with pytest.raises(MoetError) as caught:
        _choose(sampler, 1, 2, bad, 0, 0, 0)
    assert caught.value.code == "MD-ENG-04"
    with pytest.raises(MoetError):
        _choose(sampler, *[-math.inf] * 6)


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draw__logits_to_be_changed__none(fields: dict[str, Any], temperature: float) -> None:
    assert _sampler(Sampling(temperature=temperature, **fields), prompt=[2]).draw() is None


def test_draw__logprobs_wanted__none() -> None:
    assert _sampler(Sampling(temperature=0), top_logprobs=0).draw() is None


def test_take__tokens_chosen_by_the_draw__counted_as_if_chosen_here() -> None:
    wish = Sampling(temperature=0.8, top_p=0.9, top_k=5, min_p=0.01, seed=-7)
    here, elsewhere = _sampler(wish), _sampler(wish)
    rows = torch.randn(20, 6)
    for i, row in enumerate(rows):
        draw = elsewhere.draw()
        assert draw == Draw(0.8, 5, 0.9, 0.01, seed=-7, position=i)
        token_id = sample(
            row, temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p,
            min_p=draw.min_p, u=uniform(draw.seed, draw.position),
        )  # fmt: skip
        assert elsewhere.take(token_id) == here.choose(row)
    with pytest.raises(MoetError) as caught:
        elsewhere.take(None)
    assert caught.value.code == "MD-ENG-04"
    assert elsewhere.draw() == here.draw()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan),
        ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("min_p", 1.0), ("min_p", -0.1),
        ("presence_penalty", 2.5), ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0), ("repetition_penalty", math.inf),
        ("logit_bias", {6: 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: math.nan}),
    ],
)  # fmt: skip
def test_check_sampling__out_of_range__parameter_is_named(name: str, value: object) -> None:
    with pytest.raises(MoetError) as caught:
        check_sampling(Sampling(**{name: value}), vocab=6)  # type: ignore[arg-type]
    assert caught.value.code == "MD-API-04"
    assert caught.value.facts["parameter"] == name


def test_check_sampling__edges_of_the_ranges__accepted() -> None:
    check_sampling(Sampling(temperature=0, top_p=1, top_k=0, min_p=0))
    check_sampling(Sampling(temperature=2, top_p=0.001, top_k=10**6, min_p=0.99))
