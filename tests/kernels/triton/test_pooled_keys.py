"""An indexer over pooled entries, interpreted, against the twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import pooled_key_bytes
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.pooled_keys import (
    prepare_queries,
    rounds,
    score_windows,
    store_keys,
)
from moet_desk.kernels.triton.pooled_scores import prepare_run, score_run
from moet_desk.kernels.triton.prepare import Rotation

DIM, ROTARY, RATIO, HEADS = 64, 16, 4, 5
FORMS = list(KvFormat)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _rotation(positions: list[int]) -> Rotation:
    frequencies, magnitude = ref.rope_frequencies(ROTARY, 1e4)
    cos, sin = ref.rope_tables(torch.arange(64), frequencies, magnitude)
    return Rotation(torch.tensor(positions, dtype=torch.int32), cos, sin, interleaved=True)


def _turned(x: Tensor, rotation: Rotation, at: list[int]) -> Tensor:
    shape = (len(at), *[1] * (x.dim() - 2), ROTARY // 2)
    cos, sin = rotation.cos[at].view(shape), rotation.sin[at].view(shape)
    part = ref.rotate(x[..., -ROTARY:], cos, sin, interleaved=True)
    return torch.cat([x[..., :-ROTARY], part], -1)


@pytest.mark.parametrize("form", FORMS)
def test_store_keys__windows_that_close__near_the_twin_and_no_others(form: KvFormat) -> None:
    vectors, weight = 3 * _random(3, DIM, seed=1), _random(DIM, seed=2)
    rotation = _rotation([7, 9, 3])  # the second closes nothing
    pages = torch.zeros(4, 2, pooled_key_bytes(form, DIM), dtype=torch.uint8)
    table = torch.tensor([[1, 2], [0, 0], [3, 0]], dtype=torch.int32)
    store_keys(
        vectors, weight, 1e-6, ratio=RATIO, rotation=rotation, kv=KvPages(pages, table, form)
    )
    assert not pages[0].any()
    keys = _turned(ref.rms_norm(vectors[[0, 2]], weight, 1e-6), rotation, [4, 0])
    want = ref.pooled_key_read(ref.pooled_key_write(keys, form), form, DIM)
    got = ref.pooled_key_read(torch.stack([pages[1, 1], pages[3, 0]]), form, DIM)
    # a number near to the middle of two codes may be rounded either way
    assert ((got - want).abs() > 1e-5).sum() <= 2
    assert (got - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize("form", FORMS)
def test_prepare_queries__rows_and_heads__near_the_twin(form: KvFormat) -> None:
    q, rotation = _random(3, HEADS, DIM, seed=3), _rotation([0, 17, 33])
    out = torch.empty_like(q, dtype=torch.bfloat16 if rounds(form) else torch.float32)
    prepare_queries(q, out, form, rotation=rotation)
    want = _turned(q, rotation, [0, 17, 33])
    if form in (KvFormat.FP8, KvFormat.NVFP4):
        assert (want - ref.index_rounded(want)).abs().max() > 0.1
        want = ref.index_rounded(want)
    assert ((out - want).abs() > 1e-5).sum() <= 3


@pytest.mark.parametrize("form", FORMS)
def test_prepare_run__rows_and_heads__near_the_twin_in_bfloat16_if_rounded(form: KvFormat) -> None:
    q, rotation = _random(2, 70, DIM, seed=3), _rotation([17, 18])
    rounded = form in (KvFormat.FP8, KvFormat.NVFP4)
    out = torch.empty(q.shape, dtype=torch.bfloat16 if rounded else torch.float32)
    prepare_run(q, out, form, rotation=rotation)
    want = _turned(q, rotation, [17, 18])
    want = ref.index_rounded(want) if rounded else want
    assert ((out - want).abs() > 1e-5).sum() <= 6


@pytest.mark.parametrize("form", FORMS)
def test_score_windows__rows_of_all_lengths__near_the_twin(form: KvFormat) -> None:
    lengths = [1, 33, 70]
    q, weights = _random(3, HEADS, DIM, seed=4), _random(3, HEADS, seed=5)
    keys = ref.pooled_key_write(_random(80, DIM, seed=6), form)
    table = torch.tensor([[4, 0, 2, 1, 3]] * 3, dtype=torch.int32)
    kv = KvPages(keys.view(5, 16, -1).contiguous(), table, form)
    scores = torch.full((3, 75), torch.nan)
    seen = torch.tensor(lengths, dtype=torch.int32)
    score_windows(q, weights, kv, seen, scores, scale=0.25)
    own = ref.pooled_key_read(kv.pages[table[0].long()].flatten(0, 1), form, DIM)
    for t, n in enumerate(lengths):
        here = slice(t, t + 1)
        want = ref.index_scores(q[here], own[:n], 0.25 * weights[here], torch.tensor([n]))[0]
        torch.testing.assert_close(scores[t, :n], want, rtol=1e-5, atol=1e-5)
        assert scores[t, n:].isnan().all()
    with pytest.raises(ValueError, match="not"):
        score_windows(q[..., :32], weights, kv, seen, scores, scale=0.25)


@pytest.mark.parametrize("form", FORMS)
def test_score_run__rows_of_a_prompt__near_the_twin(form: KvFormat) -> None:
    lengths = [31, 31, *[32] * 15, 33]  # of more than one program
    n = len(lengths)
    q, weights = _random(n, HEADS, DIM, seed=4), _random(n, HEADS, seed=5)
    if form in (KvFormat.FP8, KvFormat.NVFP4):
        q = ref.index_rounded(q).bfloat16()
    keys = ref.pooled_key_write(_random(48, DIM, seed=6), form)
    kv = KvPages(keys.view(3, 16, -1).contiguous(), torch.tensor([[2, 0, 1]]).int(), form)
    scores = torch.full((n, 75), torch.nan)
    score_run(q, weights, kv, torch.tensor(lengths).int(), scores, scale=0.25)
    own = ref.pooled_key_read(kv.pages[kv.table[0].long()].flatten(0, 1), form, DIM)
    want = ref.index_scores(q.float(), own, 0.25 * weights, torch.tensor(lengths))
    for t, length in enumerate(lengths):
        near = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(scores[t, :length], want[t, :length], **near)
        assert scores[t, length:].isnan().all()
    with pytest.raises(ValueError, match="not"):
        score_run(q[..., :32], weights, kv, torch.tensor(lengths).int(), scores, scale=0.25)
