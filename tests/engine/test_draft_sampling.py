"""Guesses and chance: drawn tokens have the model's distribution, and each draw is that of a run
without guesses.

The decoders' own loops over a made-up model of five tokens, whose scores depend on the newest one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.engine.cuda.decode import CudaDecoder
from moet_desk.engine.decode import Decoder
from moet_desk.engine.draft_control import Choice, Fixed, Offer, Regime
from moet_desk.engine.draft_estimates import Source
from moet_desk.engine.drafting import Drafting
from moet_desk.engine.handle import Sampling
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.engine.sampling import Chosen, Draw, Sampler
from moet_desk.kernels.reference.sampling import sample, uniform
from moet_desk.store.pack_format import Plane

VOCAB, START = 5, 0
SCORES = torch.tensor(
    [
        [0.0, 2.0, 1.2, 0.3, -0.5],
        [1.0, 0.2, 1.1, 0.9, -1.0],
        [0.5, 2.5, 0.0, 0.1, 0.2],
        [0.0, 0.0, 0.0, 1.5, 0.4],
        [1.2, -0.3, 0.8, 0.0, 0.6],
    ]
)  # [newest token, next token]
LIKELIEST = SCORES.argmax(-1).tolist()
TEMPERATURE = 0.8
CHANCES = torch.softmax(SCORES.double() / TEMPERATURE, -1)
DEFAULTS = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
REJECTED = 51.2
"""Chi-squared of 24 degrees of freedom at p = 0.001."""


@dataclass
class Answer:
    """As much of an `ActiveRequest` as the decoders touch."""

    sampler: Any
    limit: int = 9
    out_ids: list[int] = field(default_factory=lambda: [START])
    prompt_ids: tuple[int, ...] = (START,)
    plane: Plane = Plane.BASE
    tau: float | None = None
    kv: KvSequence = field(default_factory=KvSequence)
    draft: Any = None
    ended: bool = False
    steps: int = 0
    timing: Any = field(default_factory=lambda: SimpleNamespace(wait_s=0.0))
    made: int = 0
    right: int = 0

    def accept(self, chosen: Chosen) -> None:
        self.out_ids.append(chosen.token_id)
        self.ended = len(self.out_ids) >= self.limit

    def note_drafts(self, n_guessed: int, n_right: int) -> None:
        self.made += n_guessed
        self.right += n_right

    def fail(self, error: Exception) -> None:
        raise error


class Likeliest:
    """Guesses the likeliest way on."""

    def propose(self, request: Any, depth: int) -> list[int]:
        guesses, newest = [], request.out_ids[-1]
        for _ in range(min(depth, request.limit - len(request.out_ids) - 1)):
            newest = LIKELIEST[newest]
            guesses.append(newest)
        return guesses


class Changing:
    """Another depth in every step, none among them."""

    sources = (Source.LOOKUP,)

    def __init__(self) -> None:
        self._depths = itertools.cycle([0, 3, 1, 2, 7, 0, 0, 2])

    def follows(self, plane: Plane) -> bool:
        return False

    def saves(self) -> bool:
        return False

    def holds(self, regime: Regime) -> bool:
        return False

    def choose(self, regime: Regime, offer: Offer) -> Choice:
        depth = next(self._depths)
        return Choice(Source.LOOKUP, depth) if depth else Choice()

    def note(self, *_: object) -> None:
        pass

    passed = note

    def view(self) -> Any:
        raise AssertionError("nobody looks")


class OnCpu(Decoder):
    """The CPU's loop over the made-up model."""

    def __init__(self, policy: Any) -> None:
        none: Any = SimpleNamespace(wait_s=0.0)
        super().__init__(none, none, none, {}, drafting=Drafting(policy, lookup=Likeliest()))

    def logits(self, request: Any) -> Tensor:
        return SCORES[request.out_ids[-1]]


class Rows:
    """A device's step of the made-up model: tokens of all rows at once."""

    most_rows = 8

    def choose(self, rows: Sequence[Any], plane: Plane, draws: Sequence[Draw]) -> list[int]:
        return [
            sample(
                SCORES[row.token], temperature=draw.temperature, top_k=draw.top_k,
                top_p=draw.top_p, min_p=draw.min_p, u=uniform(draw.seed, draw.position),
            )
            for row, draw in zip(rows, draws, strict=True)
        ]  # fmt: skip

    def run(self, rows: Sequence[Any], plane: Plane) -> Tensor:
        return SCORES[[row.token for row in rows]]


def sampler(seed: int, **more: Any) -> Sampler:
    wishes = Sampling(temperature=TEMPERATURE, seed=seed, **more)
    return Sampler(wishes, DEFAULTS, prompt_ids=[START], vocab=VOCAB)


class Quick:
    """What `Sampler` draws from the made-up model, in a twentieth of the time.

    Its "scores" are the newest token.
    """

    ORDER = tuple(tuple(row.argsort(descending=True, stable=True).tolist()) for row in SCORES)
    REACHED = tuple(
        tuple(chances[order].cumsum(0).tolist()[:-1])
        for chances, order in zip(CHANCES, map(list, ORDER), strict=True)
    )

    def __init__(self, seed: int) -> None:
        self._seed, self._n_chosen = seed, 0

    def choose(self, newest: int) -> Chosen:
        place = bisect_right(self.REACHED[newest], uniform(self._seed, self._n_chosen))
        self._n_chosen += 1
        return Chosen(self.ORDER[newest][place])


class QuickOnCpu(OnCpu):
    """The CPU's loop for `Quick`."""

    def logits(self, request: Any) -> Any:
        return request.out_ids[-1]


def chi_squared(pairs: Counter[tuple[int, ...]]) -> float:
    """Of the first two tokens against what the model says; 25 cells."""
    total = sum(pairs.values())
    return sum(
        (pairs[a, b] - want) ** 2 / want
        for a in range(VOCAB)
        for b in range(VOCAB)
        if (want := total * float(CHANCES[START, a] * CHANCES[a, b]))
    )


def first_two(
    write: Callable[[Any], None], n_answers: int, make: Callable[[int], Any]
) -> tuple[Counter[tuple[int, ...]], int, int]:
    """How often each pair of first tokens came, and guesses made and right."""
    pairs: Counter[tuple[int, ...]] = Counter()
    made = right = 0
    for seed in range(n_answers):
        answer = Answer(make(seed))
        while len(answer.out_ids) < 3:
            write(answer)
        pairs[tuple(answer.out_ids[1:3])] += 1
        made, right = made + answer.made, right + answer.right
    return pairs, made, right


def test_quick__draws__those_of_the_sampler() -> None:
    for seed in range(60):
        real, quick = sampler(seed), Quick(seed)
        for newest in range(VOCAB):
            assert real.choose(SCORES[newest]) == quick.choose(newest)


@pytest.mark.slow
def test_drawn__100_000_with_guesses__not_told_from_the_models_distribution() -> None:
    decoder = QuickOnCpu(Fixed(Source.LOOKUP, 2))
    pairs, made, right = first_two(lambda answer: decoder.step([answer]), 50_000, Quick)
    assert 2 * sum(pairs.values()) == 100_000
    assert chi_squared(pairs) < REJECTED
    assert 0.2 * made < right < 0.8 * made


def lenient(request: Any) -> None:
    """A wrong rule: a guess that is among the likely tokens is taken, whatever was drawn."""
    for guess in (*Likeliest().propose(request, 2), None):
        scores = SCORES[request.out_ids[-1]]
        chosen = request.sampler.choose(scores)
        likely = CHANCES[request.out_ids[-1]]
        if guess is not None and likely[guess] > 0.3:
            chosen = Chosen(guess)
        request.accept(chosen)
        if request.ended or chosen.token_id != guess:
            break


def second_try(request: Any) -> None:
    """A wrong rule: behind a wrong guess another token is drawn, which may not be the guess."""
    for guess in (*Likeliest().propose(request, 2), None):
        scores = SCORES[request.out_ids[-1]]
        chosen = request.sampler.choose(scores)
        if guess is not None and chosen.token_id != guess:
            barred = scores.clone()
            barred[guess] = -torch.inf
            chosen = request.sampler.choose(barred)
        request.accept(chosen)
        if request.ended or chosen.token_id != guess:
            break


def eager(request: Any) -> None:
    """A wrong rule: of two draws, one that agrees with the guess is taken."""
    for guess in (*Likeliest().propose(request, 2), None):
        scores = SCORES[request.out_ids[-1]]
        draws = [request.sampler.choose(scores) for _ in range(2)]
        chosen = next((one for one in draws if one.token_id == guess), draws[0])
        request.accept(chosen)
        if request.ended or chosen.token_id != guess:
            break


@pytest.mark.parametrize("rule", [lenient, eager])
def test_drawn__wrong_rules__told_from_the_models_distribution(rule: Any) -> None:
    pairs, _, _ = first_two(rule, 1_000, sampler)
    assert chi_squared(pairs) > REJECTED


def test_drawn__second_try__is_no_wrong_rule_for_the_distribution_but_for_the_text() -> None:
    """Drawing again without the guess keeps the distribution; it loses the run without guesses."""
    pairs, _, _ = first_two(second_try, 1_000, sampler)
    assert chi_squared(pairs) < REJECTED
    assert any(whole(second_try, seed) != whole(OnCpu(Fixed())._write, seed) for seed in range(20))


def whole(write: Callable[[Any], None], seed: int, **more: Any) -> list[int]:
    answer = Answer(sampler(seed, **more))
    while not answer.ended:
        write(answer)
    return answer.out_ids


@pytest.mark.parametrize("policy", [lambda: Fixed(Source.LOOKUP, 3), Changing])
@pytest.mark.parametrize(
    "more",
    [{}, {"top_p": 0.7}, {"frequency_penalty": 0.7, "presence_penalty": 0.3},
     {"repetition_penalty": 1.5}, {"logit_bias": {4: 3.0, 1: -2.0}}],
    ids=["plain", "top_p", "penalties", "repetition", "bias"],
)  # fmt: skip
def test_drawn__same_seed__every_token_of_a_run_without(policy: Any, more: dict[str, Any]) -> None:
    """On the CPU, and on a device, where rows are computed before it is known which count."""
    plain, cpu = OnCpu(Fixed()), OnCpu(policy())
    rows: Any = Rows()
    device = CudaDecoder(rows, Drafting(policy(), lookup=Likeliest()))
    texts = set()
    for seed in range(30):
        want = whole(lambda answer: plain.step([answer]), seed, **more)
        assert whole(lambda answer: cpu.step([answer]), seed, **more) == want
        assert whole(lambda answer: device.step([answer]), seed, **more) == want
        texts.add(tuple(want))
    assert len(texts) > 15
    assert cpu.drafting.acceptance.right[0] > 0
    assert device.drafting.acceptance.right == cpu.drafting.acceptance.right
