"""The device's choice of tokens against `reference.sampling`, token by token."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moet_desk.kernels.reference import sampling as twin
from moet_desk.kernels.triton.sampling import SampleScratch, greedy, sample, wish

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Wish:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Result:
    tokens: list[int]
    confidence: Tensor
    error: int


def run(logits: Tensor, wishes: list[Wish], draws: list[tuple[int, int]]) -> Result:
    rows, vocab = logits.shape
    tokens = torch.full((rows,), -1, dtype=torch.int32)
    confidence, error = torch.empty(rows), torch.zeros(1, dtype=torch.int32)
    table = [
        wish(temperature=w.temperature, top_k=w.top_k, top_p=w.top_p, min_p=w.min_p) for w in wishes
    ]
    scratch = SampleScratch.make(rows, vocab, device=CPU)
    sample(
        logits, torch.tensor(table, dtype=torch.float64), torch.tensor(draws),
        tokens, confidence, error, scratch=scratch,
    )  # fmt: skip
    return Result(tokens.tolist(), confidence, int(error))


def wanted(logits: Tensor, w: Wish, seed: int, position: int) -> int:
    return twin.sample(
        logits,
        temperature=w.temperature,
        top_k=w.top_k,
        top_p=w.top_p,
        min_p=w.min_p,
        u=twin.uniform(seed, position),
    )


def random_rows(choose: random.Random, rows: int, vocab: int) -> Tensor:
    logits = torch.randn(rows, vocab) * choose.choice([0.1, 1.0, 4.0])
    if choose.random() < 0.5:
        logits = (logits * 2).round() / 2  # many ties
    logits[0, :: choose.randrange(2, 9)] = float("-inf")
    return logits


@pytest.mark.parametrize("vocab", [50, 1024, 2500])
@pytest.mark.parametrize("round_", range(3))
def test_sample__random_rows_and_wishes__the_twins_tokens(vocab: int, round_: int) -> None:
    choose = random.Random(1000 * round_ + vocab)
    logits = random_rows(choose, 6, vocab)
    wishes = [
        Wish(
            choose.choice([0.0, 0.5, 1.0, 1.7]),
            choose.choice([0, 1, 5, 40, vocab]),
            choose.choice([1.0, 0.3, 0.9, 0.999]),
            choose.choice([0.0, 0.05, 0.5]),
        )
        for _ in range(6)
    ]
    draws = [(choose.getrandbits(64) - 2**63, choose.randrange(1000)) for _ in range(6)]
    got = run(logits, wishes, draws)
    assert got.tokens == [wanted(logits[t], wishes[t], *draws[t]) for t in range(6)]
    assert got.error == 0
    assert torch.allclose(got.confidence, logits.softmax(-1).amax(-1), rtol=1e-5)


def test_sample__equal_logits__every_id_by_its_share_of_the_draw() -> None:
    logits = torch.zeros(8, 1100)
    logits[:, ::2] = -0.0
    draws = [(11, position) for position in range(8)]
    got = run(logits, [Wish()] * 8, draws)
    assert got.tokens == [int(twin.uniform(11, p) * 1100) for p in range(8)]
    assert got.tokens == [wanted(logits[0], Wish(), 11, p) for p in range(8)]


def test_sample__equal_logits_blocks_apart__the_first_of_a_later_block_too() -> None:
    logits = torch.full((8, 9000), float("-inf"))
    equal = [5, 70, 4100, 4200, 8999]  # blocks of 4096 hold two, two and one of them
    logits[:, equal] = 1.0
    draws = [(3, position) for position in range(8)]
    got = run(logits, [Wish(top_k=3)] * 8, draws)
    assert got.tokens == [wanted(logits[0], Wish(top_k=3), 3, p) for p in range(8)]
    assert {4100, 8999} <= set(got.tokens)


def test_sample__row_beside_others__same_token() -> None:
    logits = torch.randn(4, 300)
    wishes = [Wish(top_p=0.8), Wish(temperature=0.0), Wish(top_k=7), Wish(min_p=0.2)]
    draws = [(5, 1), (5, 2), (5, 3), (5, 4)]
    whole = run(logits, wishes, draws).tokens
    assert [run(logits[t : t + 1], [wishes[t]], [draws[t]]).tokens[0] for t in range(4)] == whole


def test_sample__scratch_of_an_earlier_call__no_trace() -> None:
    logits = torch.randn(2, 90)
    tokens, confidence = torch.empty(2, dtype=torch.int32), torch.empty(2)
    error, scratch = torch.zeros(1, dtype=torch.int32), SampleScratch.make(2, 90, device=CPU)
    row = wish(temperature=1.0, top_k=20, top_p=0.7, min_p=0.0)
    wishes = torch.tensor([row, row], dtype=torch.float64)
    for position in range(3):
        draws = torch.tensor([[9, position], [8, position]])
        sample(logits, wishes, draws, tokens, confidence, error, scratch=scratch)
        want = [
            wanted(logits[t], Wish(1.0, 20, 0.7), seed, position) for t, seed in enumerate((9, 8))
        ]
        assert tokens.tolist() == want


def test_greedy__ties__lowest_id_even_across_chunks() -> None:
    logits = torch.full((2, 3000), -1.0)
    logits[0, [2900, 1500, 1023]] = 2.0
    logits[1, [2999]] = 0.0
    tokens, confidence = torch.empty(2, dtype=torch.int32), torch.empty(2)
    error = torch.zeros(1, dtype=torch.int32)
    scratch = SampleScratch.make(2, 3000, device=CPU)
    greedy(logits, tokens, confidence, error, scratch=scratch)
    assert tokens.tolist() == [1023, 2999]
    assert torch.allclose(confidence, logits.softmax(-1).amax(-1), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_sample__number_that_is_none__error_bit_and_a_token_in_range(bad: float) -> None:
    logits = torch.randn(2, 40)
    logits[1, 9] = bad
    got = run(logits, [Wish(), Wish(top_p=0.5)], [(1, 1), (1, 2)])
    assert got.error == 4
    assert got.tokens[0] == wanted(logits[0], Wish(), 1, 1)
    assert 0 <= got.tokens[1] < 40


def test_scratch__too_large_a_vocabulary__refused() -> None:
    with pytest.raises(ValueError, match="262145"):
        SampleScratch.make(1, 262_145, device=CPU)
