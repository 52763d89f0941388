"""The router against a slow float64 one, ties, groups and broken logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moet_desk.kernels.kinds import Score
from moet_desk.kernels.reference import route


def slow_score(z: list[float], score: Score) -> list[float]:
    if score is Score.SOFTMAX:
        top = max(z)
        e = [math.exp(v - top) for v in z]
        return [v / sum(e) for v in e]
    if score is Score.SIGMOID:
        return [1 / (1 + math.exp(-v)) for v in z]
    if score is Score.SQRT_SOFTPLUS:
        return [math.sqrt(math.log1p(math.exp(v))) for v in z]
    return z


def slow_route(
    z: list[float],
    k: int,
    score: Score,
    *,
    bias: list[float],
    groups: tuple[int, int],
    renormalize: bool,
    scale: float,
) -> tuple[list[int], list[float]]:
    s = slow_score(z, score)
    choice = [a + b for a, b in zip(s, bias, strict=True)]
    width = len(z) // groups[0]
    best = [sum(sorted(choice[g * width : (g + 1) * width])[-2:]) for g in range(groups[0])]
    kept = sorted(range(groups[0]), key=lambda g: (-best[g], g))[: groups[1]]
    allowed = [i for i in range(len(z)) if i // width in kept]
    ids = sorted(allowed, key=lambda i: (-choice[i], i))[:k]
    w = [s[i] for i in ids]
    if score is Score.TOPK_SOFTMAX:
        w = slow_score(w, Score.SOFTMAX)
    if renormalize:
        w = [v / (sum(w) + 1e-20) for v in w]
    return ids, [v * scale for v in w]


@pytest.mark.parametrize("score", list(Score))
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_route__random_logits__equals_slow_router(
    score: Score, with_bias: bool, groups: tuple[int, int], renormalize: bool
) -> None:
    logits = torch.randn(9, 40) * 2
    bias = torch.randn(40) * 0.3
    ids, weights = route(
        logits,
        top_k=6,
        score=score,
        selection_bias=bias if with_bias else None,
        n_groups=groups[0],
        kept_groups=groups[1],
        renormalize=renormalize,
        scale=2.5,
    )
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    for t in range(9):
        want_ids, want_weights = slow_route(
            logits[t].tolist(),
            6,
            score,
            bias=bias.tolist() if with_bias else [0.0] * 40,
            groups=groups,
            renormalize=renormalize,
            scale=2.5,
        )
        assert ids[t].tolist() == want_ids
        assert weights[t].tolist() == pytest.approx(want_weights, rel=2e-6)


def plain(logits: Tensor, score: Score = Score.SIGMOID, top_k: int = 4) -> tuple[Tensor, Tensor]:
    return route(logits, top_k=top_k, score=score, renormalize=True, scale=1.0)


def test_route__equal_scores__lowest_ids_win() -> None:
    ids, weights = plain(torch.zeros(2, 32))
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2


def test_route__equal_groups__lowest_group_wins() -> None:
    ids, _ = route(
        torch.zeros(1, 32),
        top_k=4,
        score=Score.SIGMOID,
        n_groups=4,
        kept_groups=2,
        renormalize=True,
        scale=1.0,
    )
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_route__all_experts_chosen__each_once() -> None:
    ids, weights = plain(torch.randn(3, 8), top_k=8)
    assert ids.sort(-1).values.tolist() == [list(range(8))] * 3
    assert torch.allclose(weights.sum(-1), torch.ones(3))


def test_route__logits_far_out__no_overflow() -> None:
    logits = torch.tensor([[300.0, -300.0, 0.0, 1.0]])
    for score in Score:
        _, weights = plain(logits, score, 2)
        assert weights.isfinite().all()
    _, weights = route(logits, top_k=1, score=Score.SQRT_SOFTPLUS, renormalize=False, scale=1.0)
    assert weights[0, 0] == pytest.approx(math.sqrt(300))


@pytest.mark.parametrize("score", list(Score))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_route__bad_logit__ids_in_range_and_weights_nan(score: Score, bad: float) -> None:
    logits = torch.randn(3, 16)
    clean = plain(logits, score)
    logits[1, 7] = bad
    ids, weights = plain(logits, score)
    assert ((ids >= 0) & (ids < 16)).all()
    assert weights[1].isnan().all()
    assert torch.equal(weights[[0, 2]], clean[1][[0, 2]])
    assert torch.equal(ids[[0, 2]], clean[0][[0, 2]])


@pytest.mark.parametrize("score", list(Score))
@pytest.mark.parametrize("n_experts", [32, 40, 384])
def test_route__alone_or_together__same_bits(score: Score, n_experts: int) -> None:
    logits = torch.randn(100, n_experts) * 3
    ids, weights = plain(logits, score, n_experts)
    for t in range(100):
        one_ids, one_weights = plain(logits[t : t + 1], score, n_experts)
        assert torch.equal(one_ids[0], ids[t])
        assert torch.equal(one_weights[0], weights[t])
