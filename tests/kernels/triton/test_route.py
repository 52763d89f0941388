"""The router kernel against `reference.route`: the same ids, weights to the last bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference
from moet_desk.kernels.kinds import Score
from moet_desk.kernels.triton.route import route, route_named

CASES = [
    # experts, chosen, score, bias, groups, kept groups, renormalise, scale
    (256, 8, Score.SIGMOID, True, 8, 4, True, 2.5),  # DeepSeek-V3
    (256, 6, Score.SQRT_SOFTPLUS, True, 1, 1, True, 1.5),  # DeepSeek-V4
    (128, 8, Score.SOFTMAX, False, 1, 1, True, 1.0),  # Qwen3
    (128, 4, Score.TOPK_SOFTMAX, False, 1, 1, False, 1.0),  # gpt-oss
    (160, 6, Score.SOFTMAX, False, 8, 3, False, 16.0),
    (512, 16, Score.SIGMOID, False, 1, 1, True, 1.0),
    (6, 3, Score.SOFTMAX, True, 6, 4, False, 1.0),
]


def run(
    logits: Tensor, bias: Tensor | None, top_k: int, **options: object
) -> tuple[Tensor, Tensor]:
    ids = torch.full((logits.shape[0], top_k), -7, dtype=torch.int32)
    weights = torch.full((logits.shape[0], top_k), -7.0)
    route(logits, bias, ids=ids, weights=weights, **options)  # type: ignore[arg-type]
    return ids, weights


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2].value}")
def test_route__every_kind__ids_equal_and_weights_close(case: tuple[object, ...]) -> None:
    n_experts, top_k, score, biased, n_groups, kept_groups, renormalize, scale = case
    logits = torch.randn(4, n_experts) * 3  # type: ignore[call-overload]
    bias = torch.randn(n_experts) * 0.1 if biased else None  # type: ignore[call-overload]
    options = {
        "score": score,
        "n_groups": n_groups,
        "kept_groups": kept_groups,
        "renormalize": renormalize,
        "scale": scale,
    }
    want_ids, want = reference.route(
        logits,
        top_k=top_k,
        selection_bias=bias,
        **options,  # type: ignore[arg-type]
    )
    ids, weights = run(logits, bias, top_k, **options)  # type: ignore[arg-type]
    assert torch.equal(ids.long(), want_ids)
    assert torch.allclose(weights, want, rtol=2e-6, atol=1e-7)


def test_route__identity_experts__set_aside_and_their_weights_added_up() -> None:
    logits, bias = torch.randn(5, 768) * 3, torch.randn(768) * 1e-3  # LongCat-Flash
    logits[1, :512], logits[2, 512:] = -50.0, -50.0  # of row 1 all are identity, of row 2 none
    logits[3, 4] = torch.nan
    options = {"score": Score.SOFTMAX, "renormalize": False, "scale": 6.0}
    ids, weights = run(logits, bias, 12, **options)
    share = torch.full((5,), -7.0)
    aside, kept = run(logits, bias, 12, **options, n_real=512, share=share)
    real = ids < 512
    assert torch.equal(aside, ids.masked_fill(~real, -1))
    assert torch.equal(kept[:3], (weights * real)[:3])
    assert torch.allclose(share[:3], (weights * ~real).sum(-1)[:3], rtol=1e-6)
    assert (real[1].any(), real[2].all()) == (False, True)
    assert share[2] == 0
    assert kept[3][real[3]].isnan().all()
    assert share[3].isnan() or real[3].all()


@pytest.mark.parametrize("score", list(Score))
def test_route__equal_logits__lowest_ids(score: Score) -> None:
    logits = torch.zeros(1, 40)
    logits[0, [7, 30]] = 1.0
    ids, _ = run(logits, None, 5, score=score, renormalize=True, scale=1.0)
    assert ids.tolist() == [[7, 30, 0, 1, 2]]


def test_route__zeros_of_both_signs__are_equal_and_negative_ones_below() -> None:
    logits = torch.tensor([[-2.0, -0.0, 0.0, -1e-30, -0.0, -float("inf")]])
    ids, _ = run(logits, None, 6, score=Score.TOPK_SOFTMAX, renormalize=False, scale=1.0)
    assert ids.tolist() == [[1, 2, 4, 3, 0, 5]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("score", list(Score))
def test_route__logit_not_finite__nan_weights_and_distinct_ids_of_that_token(
    score: Score, bad: float
) -> None:
    logits = torch.randn(3, 16)
    clean_ids, clean = run(logits, None, 4, score=score, renormalize=True, scale=2.0)
    logits[1, 3] = bad
    ids, weights = run(logits, None, 4, score=score, renormalize=True, scale=2.0)
    assert weights[1].isnan().all()
    assert len(set(ids[1].tolist())) == 4
    assert int(ids[1].min()) >= 0
    assert int(ids[1].max()) < 16
    assert torch.equal(ids[[0, 2]], clean_ids[[0, 2]])
    assert torch.equal(weights[[0, 2]], clean[[0, 2]])


def test_route__all_nan__ids_in_range() -> None:
    logits = torch.full((1, 10), float("nan"))
    ids, weights = run(logits, None, 3, score=Score.SOFTMAX, renormalize=True, scale=1.0)
    assert ids.tolist() == [[0, 1, 2]]
    assert weights.isnan().all()


def test_route__very_negative_logits__softplus_keeps_them_apart() -> None:
    logits = torch.linspace(-40.0, -20.0, 8)[None].contiguous()
    options = {"score": Score.SQRT_SOFTPLUS, "renormalize": False, "scale": 1.0}
    want_ids, want = reference.route(logits, top_k=4, **options)  # type: ignore[arg-type]
    ids, weights = run(logits, None, 4, **options)
    assert torch.equal(ids.long(), want_ids)
    assert torch.allclose(weights, want, rtol=1e-5, atol=0.0)


def test_route__more_than_it_can__refused() -> None:
    with pytest.raises(ValueError, match="cannot choose 17 of 32"):
        run(torch.zeros(1, 32), None, 17, score=Score.SOFTMAX, renormalize=True, scale=1.0)


@pytest.mark.parametrize("score", list(Score))
def test_route_named__table_of_tokens__its_experts_and_the_twin_s_weights(score: Score) -> None:
    logits = torch.randn(4, 24) * 3
    logits[2, 5] = torch.nan
    table = torch.rand(9, 24).topk(6).indices.int()
    tokens = torch.tensor([8, 0, 3, 8], dtype=torch.int32)
    ids, weights = torch.full((4, 6), -7, dtype=torch.int32), torch.full((4, 6), -7.0)
    options = {"score": score, "renormalize": True, "scale": 1.5}
    route_named(logits, table, tokens, ids=ids, weights=weights, **options)  # type: ignore[arg-type]
    assert torch.equal(ids, table[tokens.long()])
    want = reference.weights_of(logits, ids.long(), **options)  # type: ignore[arg-type]
    torch.testing.assert_close(weights, want, rtol=2e-6, atol=1e-7, equal_nan=True)
    assert weights[2].isnan().all()
