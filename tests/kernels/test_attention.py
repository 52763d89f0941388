"""Attention against float64 sums written per query, and rows that do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.kernels.reference import gqa, mla_absorbed, mla_plain

HEADS, NOPE, ROPE, RANK, VALUE = 3, 24, 8, 40, 20


def mla_inputs(count: int, start: int) -> dict[str, Any]:
    entries = start + count
    return {
        "q_nope": torch.randn(count, HEADS, NOPE),
        "q_rope": torch.randn(count, HEADS, ROPE),
        "latent": torch.randn(entries, RANK),
        "k_rope": torch.randn(entries, ROPE),
        "w_uk": torch.randn(HEADS, NOPE, RANK) * 0.2,
        "w_uv": torch.randn(HEADS, VALUE, RANK) * 0.2,
        "scale": 0.17,
        "start": start,
    }


def slow_mla(a: dict[str, Any]) -> Tensor:
    wide = {k: v.double() for k, v in a.items() if isinstance(v, Tensor)}
    out = []
    for t in range(a["q_nope"].shape[0]):
        seen = a["start"] + t + 1
        for h in range(HEADS):
            keys = wide["latent"][:seen] @ wide["w_uk"][h].T
            scores = keys @ wide["q_nope"][t, h] + wide["k_rope"][:seen] @ wide["q_rope"][t, h]
            probs = torch.softmax(scores * a["scale"], 0)
            out.append(probs @ (wide["latent"][:seen] @ wide["w_uv"][h].T))
    return torch.stack(out).view(-1, HEADS * VALUE)


@pytest.mark.parametrize("op", [mla_absorbed, mla_plain])
@pytest.mark.parametrize(("count", "start"), [(1, 0), (1, 50), (5, 0), (8, 31), (20, 0), (9, 40)])
def test_mla__against_float64(op: Callable[..., Tensor], count: int, start: int) -> None:
    inputs = mla_inputs(count, start)
    got = op(**inputs)
    assert got.shape == (count, HEADS * VALUE)
    assert torch.allclose(got.double(), slow_mla(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", [mla_absorbed, mla_plain])
def test_mla__rows_of_a_step__bits_of_one_by_one(op: Callable[..., Tensor]) -> None:
    inputs = mla_inputs(8, 29)
    whole = op(**inputs)
    for t in range(8):
        one = dict(inputs, start=29 + t)
        for name in ("q_nope", "q_rope"):
            one[name] = inputs[name][t : t + 1]
        if op is mla_absorbed:
            for name in ("latent", "k_rope"):
                one[name] = inputs[name][: 30 + t]
        else:  # expanded keys round with the length of the cache; give it the same one
            one.update(latent=inputs["latent"], k_rope=inputs["k_rope"])
        assert torch.equal(op(**one)[0], whole[t])


def test_mla_absorbed__entries_behind_a_row__do_not_matter() -> None:
    inputs = mla_inputs(12, 0)
    before = mla_absorbed(**inputs)
    inputs["latent"][6:] = 1e4
    inputs["k_rope"][6:] = 1e4
    after = mla_absorbed(**inputs)
    assert torch.equal(before[:6], after[:6])
    assert not torch.equal(before[6:], after[6:])


def test_mla_absorbed__nan_entry__shows_in_every_row_that_sees_it() -> None:
    inputs = mla_inputs(4, 10)
    inputs["latent"][12, 0] = float("nan")
    got = mla_absorbed(**inputs)
    assert got[2:].isnan().all()
    assert got[:2].isfinite().all()


def slow_gqa(
    q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None, sink: Tensor | None
) -> Tensor:
    count, heads, _ = q.shape
    share = heads // k.shape[1]
    out = []
    for t in range(count):
        at = start + t
        first = 0 if window is None else max(0, at - window + 1)
        for h in range(heads):
            scores = k[first : at + 1, h // share].double() @ q[t, h].double() * 0.3
            if sink is not None:
                scores = torch.cat([scores, sink[h : h + 1].double()])
            probs = torch.softmax(scores, 0)[: at + 1 - first]
            out.append(probs @ v[first : at + 1, h // share].double())
    return torch.stack(out).view(count, -1)


@pytest.mark.parametrize(("count", "start"), [(1, 0), (1, 33), (6, 20), (25, 0), (12, 30)])
@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("with_sink", [False, True])
def test_gqa__against_float64(count: int, start: int, window: int | None, with_sink: bool) -> None:
    q = torch.randn(count, 6, 16)
    k, v = torch.randn(start + count, 2, 16), torch.randn(start + count, 2, 12)
    sink = torch.randn(6) if with_sink else None
    got = gqa(q, k, v, scale=0.3, start=start, window=window, sink=sink)
    want = slow_gqa(q, k, v, start, window, sink)
    assert got.shape == (count, 72)
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
def test_gqa__rows_of_a_step__bits_of_one_by_one(window: int | None) -> None:
    q, k, v = torch.randn(8, 4, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    whole = gqa(q, k, v, scale=0.25, start=32, window=window)
    for t in range(8):
        end = 33 + t
        one = gqa(q[t : t + 1], k[:end], v[:end], scale=0.25, start=32 + t, window=window)
        assert torch.equal(one[0], whole[t])


def test_gqa__inputs__are_left_alone() -> None:
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    copies = [x.clone() for x in (q, k, v)]
    gqa(q, k, v, scale=0.25, start=0)
    for x, copy in zip((q, k, v), copies, strict=True):
        assert torch.equal(x, copy)
