"""Sampling on a GPU against the twin, token by token, at the vocabularies of the models we name."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moet_desk.kernels.reference import sampling as twin
from moet_desk.kernels.triton.sampling import SampleScratch, sample, wish

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda")
Wish = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def rows_of(choose: random.Random, rows: int, vocab: int) -> Tensor:
    logits = torch.randn(rows, vocab) * choose.choice([0.3, 1.0, 3.0])
    if choose.random() < 0.4:
        logits = (logits * 4).round() / 4  # many ties
    logits[0, ::3] = float("-inf")
    logits[1, choose.randrange(vocab)] = 25.0
    return logits


def wishes_of(choose: random.Random, rows: int) -> list[Wish]:
    return [
        (
            choose.choice([0.0, 0.6, 1.0, 1.5]),
            choose.choice([0, 1, 20, 500]),
            choose.choice([1.0, 0.5, 0.95]),
            choose.choice([0.0, 0.05, 0.3]),
        )
        for _ in range(rows)
    ]


def tensors(wishes: list[Wish], draws: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    table = [wish(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in wishes]
    return torch.tensor(table, dtype=torch.float64, device=GPU), torch.tensor(draws, device=GPU)


def wanted(logits: Tensor, w: Wish, draw: tuple[int, int]) -> int:
    t, k, p, m = w
    return twin.sample(logits, temperature=t, top_k=k, top_p=p, min_p=m, u=twin.uniform(*draw))


@pytest.mark.parametrize("vocab", [4096, 129280, 151936, 262144])
def test_sample__random_rows_and_wishes__the_twins_tokens(vocab: int) -> None:
    choose = random.Random(vocab)
    torch.manual_seed(vocab)
    scratch = SampleScratch.make(8, vocab, device=GPU)
    tokens, confidence = (torch.empty(8, dtype=d, device=GPU) for d in (torch.int32, torch.float32))
    error = torch.zeros(1, dtype=torch.int32, device=GPU)
    for _ in range(6 if vocab < 10000 else 3):
        logits, wishes = rows_of(choose, 8, vocab), wishes_of(choose, 8)
        draws = [(choose.getrandbits(64) - 2**63, choose.randrange(5000)) for _ in range(8)]
        sample(logits.to(GPU), *tensors(wishes, draws), tokens, confidence, error, scratch=scratch)
        want = [wanted(logits[t], wishes[t], draws[t]) for t in range(8)]
        assert tokens.tolist() == want, wishes
        top = logits.double().softmax(-1).amax(-1).float()
        assert torch.allclose(confidence.cpu(), top, rtol=2e-5, atol=1e-9)
    assert int(error) == 0


def test_sample__every_number_of_rows__same_tokens() -> None:
    vocab, choose = 151936, random.Random(3)
    logits, wishes = rows_of(choose, 8, vocab).to(GPU), wishes_of(choose, 8)
    table, draws = tensors(wishes, [(t, 40 + t) for t in range(8)])
    found = []
    for rows in (8, 1, 3):
        scratch = SampleScratch.make(rows, vocab, device=GPU)
        tokens = torch.empty(rows, dtype=torch.int32, device=GPU)
        confidence = torch.empty(rows, device=GPU)
        error = torch.zeros(1, dtype=torch.int32, device=GPU)
        for _ in range(2):
            sample(
                logits[:rows], table[:rows], draws[:rows], tokens, confidence, error,
                scratch=scratch,
            )  # fmt: skip
            found.append((tokens.tolist(), confidence.tolist()))
    assert all(ids == found[0][0][: len(ids)] for ids, _ in found)
    assert all(sure == found[0][1][: len(sure)] for _, sure in found)


def test_sample__nan__error_bit_and_tokens_in_range() -> None:
    logits = torch.randn(2, 5000, device=GPU)
    logits[1, 77] = torch.nan
    table, draws = tensors([(1.0, 0, 0.9, 0.0)] * 2, [(1, 1), (1, 2)])
    tokens, confidence = torch.empty(2, dtype=torch.int32, device=GPU), torch.empty(2, device=GPU)
    error = torch.zeros(1, dtype=torch.int32, device=GPU)
    scratch = SampleScratch.make(2, 5000, device=GPU)
    sample(logits, table, draws, tokens, confidence, error, scratch=scratch)
    assert int(error) == 4
    assert all(0 <= token < 5000 for token in tokens.tolist())
