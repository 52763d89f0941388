"""Pooled entries of a step, interpreted, against the twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import shared_entry_bytes
from moet_desk.kernels.triton.pooling import finish, pool, pool_run

DIM, ROTARY = 80, 64
RATIO = 4


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _run(
    tokens: Tensor, places: Tensor, steps: list[list[tuple[int, int, int]]], *, overlap: bool
) -> dict[int, Tensor]:
    """Steps of rows (position, slot read, slot written); entries by the slot of their last row."""
    states, found = torch.full((16, (9 if overlap else 3) * DIM), torch.nan), {}
    for rows in steps:
        positions, sources, targets = torch.tensor(rows, dtype=torch.int32).T.contiguous()
        means = torch.full((len(rows), DIM), torch.nan)
        pool(
            tokens[positions.long()], places, positions, states, sources, targets, means,
            overlap=overlap,
        )  # fmt: skip
        for row, mean in zip(rows, means, strict=True):
            if not mean.isnan().all():
                assert row[0] % RATIO == RATIO - 1
                found[row[2]] = mean
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_pool__steps_with_drafts_undone__entries_of_the_twin(overlap: bool) -> None:
    width = 2 * DIM if overlap else DIM
    tokens, places = _random(13, 2 * width, seed=1), _random(RATIO, width, seed=2)
    logits = tokens[:, width:] + places.repeat(4, 1)[:13]
    _, want = ref.OpenWindow.start(RATIO, DIM, overlap=overlap).read(tokens[:, :width], logits)
    steps = [
        [(0, 0, 1), (1, 1, 2), (2, 2, 3)],
        [(3, 3, 4), (4, 4, 5), (5, 5, 6)],  # the last two are drafts that were wrong
        [(4, 4, 5)],
        [(5, 5, 6), (6, 6, 7), (7, 7, 8), (8, 8, 9)],
        [(8, 8, 9), (9, 9, 10), (10, 10, 11), (11, 11, 12)],  # read again
    ]
    found = _run(tokens, places, steps, overlap=overlap)
    assert sorted(found) == [4, 8, 12]
    for entry, slot in zip(want, (4, 8, 12), strict=True):
        torch.testing.assert_close(found[slot], entry, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("start", "count"), [(0, 3), (0, 22), (2, 1), (3, 21), (5, 2), (8, 19)])
def test_pool_run__rows_of_one_sequence__bits_of_one_by_one(
    start: int, count: int, overlap: bool
) -> None:
    width, n = 2 * DIM if overlap else DIM, start + count
    tokens, places = _random(n, 2 * width, seed=8), _random(RATIO, width, seed=9)
    sums = torch.full((16, (9 if overlap else 3) * DIM), torch.nan)
    want, at = torch.full((n, DIM), torch.nan), torch.arange(n).int()
    pool(tokens, places, at, sums, at % 16, (at + 1) % 16, want, overlap=overlap)
    before = torch.full_like(sums, torch.nan)
    if start:
        first = at[:start]
        nothing = torch.empty(start, DIM)
        pool(
            tokens[:start], places, first, before, first % 16, (first + 1) % 16, nothing,
            overlap=overlap,
        )  # fmt: skip
    means, own = torch.full((count, DIM), torch.nan), at[start:]
    pool_run(
        tokens[start:], places, start, before[start % 16].clone(), before, (own + 1) % 16, means,
        overlap=overlap,
    )  # fmt: skip
    assert torch.equal(means.nan_to_num(9e9), want[start:].nan_to_num(9e9))
    kept = [i % 16 for i in range(max(start + 1, n - 15), n + 1)]
    # what is not read is not kept: the part before the first window
    assert torch.equal(before[kept].nan_to_num(9e9), sums[kept].nan_to_num(9e9))


def test_pool__two_sequences_in_a_step__each_as_alone() -> None:
    tokens, places = _random(13, 4 * DIM, seed=3), _random(RATIO, 2 * DIM, seed=4)
    alone = _run(tokens, places, [[(i, i, i + 1)] for i in range(4)], overlap=True)
    both = _run(
        tokens, places, [[(i, i, i + 1), (i, 8 + i, 9 + i)] for i in range(4)], overlap=True
    )
    assert torch.equal(both[4], alone[4])
    assert torch.equal(both[12], alone[4])


@pytest.mark.parametrize("form", list(KvFormat))
def test_finish__windows_that_close__bytes_near_the_twin_and_no_others(form: KvFormat) -> None:
    dim = 192
    vectors, weight = 3 * _random(3, dim, seed=5), _random(dim, seed=6)
    positions = torch.tensor([7, 9, 3], dtype=torch.int32)  # the second closes nothing
    frequencies, magnitude = ref.rope_frequencies(ROTARY, 1e4)
    cos, sin = ref.rope_tables(torch.arange(16), frequencies, magnitude)
    n_bytes = shared_entry_bytes(form, dim, ROTARY)
    pages = torch.zeros(4, 2, n_bytes, dtype=torch.uint8)
    table = torch.tensor([[1, 2], [0, 0], [3, 0]], dtype=torch.int32)
    finish(vectors, weight, 1e-6, cos, sin, positions, pages, table, form, ratio=RATIO)
    assert not pages[0].any()
    for row, number, page, at in ((0, 1, 1, 1), (2, 0, 3, 0)):
        normed = ref.rms_norm(vectors[row : row + 1], weight, 1e-6)
        angle = slice(number * RATIO, number * RATIO + 1)
        turned = ref.rotate(normed[:, -ROTARY:], cos[angle], sin[angle], interleaved=True)
        entry = torch.cat([normed[:, :-ROTARY], turned], 1)
        got = ref.shared_read(pages[page, at : at + 1], form, dim, ROTARY)
        want = ref.shared_read(ref.shared_write(entry, form, ROTARY), form, dim, ROTARY)
        # a number near to the middle of two codes may be rounded either way
        assert (got - want).abs().median() < 1e-6
        assert (got - entry).norm() <= 1.02 * (want - entry).norm() + 1e-5
        pages[page, at] = 0
    assert not pages.any()


def test_finish__ring_and_entries_of_several_pages__where_they_belong() -> None:
    """Window entries go round; of windows of two pages, the entry lies on the first."""
    dim, form = 128, KvFormat.F32
    vectors, weight = _random(2, 2 * dim, seed=7)[:, :dim], torch.ones(dim)  # rows lie apart
    cos, sin = torch.ones(32, 32), torch.zeros(32, 32)
    n_bytes = shared_entry_bytes(form, dim, ROTARY)
    want = ref.rms_norm(vectors, weight, 1e-6)

    ring = torch.zeros(40, 1, n_bytes, dtype=torch.uint8)
    positions, first = torch.tensor([7, 21]).int(), torch.tensor([[0], [16]]).int()
    finish(vectors, weight, 1e-6, cos, sin, positions, ring, first, form, ratio=1, ring=16)
    got = ref.shared_read(ring[:, 0], form, dim, ROTARY)
    torch.testing.assert_close(got[[7, 16 + 5]], want)
    assert int(got.any(1).sum()) == 2

    pages = torch.zeros(5, 1, n_bytes, dtype=torch.uint8)
    table = torch.tensor([[3, 4, 1, 2], [0, 1, 2, 3]]).int()
    positions = torch.tensor([15, 14]).int()  # the second closes nothing
    finish(vectors, weight, 1e-6, cos, sin, positions, pages, table, form, ratio=8, spread=2)
    got = ref.shared_read(pages[:, 0], form, dim, ROTARY)
    torch.testing.assert_close(got[1], want[0])
    assert int(got.any(1).sum()) == 1
