"""Parts of DeepSeek-V4's maths, each against its formula written out in plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moet_desk.kernels.kinds import Score
from moet_desk.kernels.reference.pooling import OpenWindow
from moet_desk.kernels.reference.routing import weights_of
from moet_desk.kernels.reference.shared_attention import grouped_output, shared_attention
from moet_desk.kernels.reference.streams import StreamWeights, collapse, connections


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- pooled entries ----------------------------------------------------------------------------


def _pooled(values: Tensor, logits: Tensor) -> Tensor:
    return (values * logits.softmax(0)).sum(0)


def _entries(window: OpenWindow, values: Tensor, logits: Tensor) -> tuple[OpenWindow, list[Tensor]]:
    found = []
    for value, logit in zip(values, logits, strict=True):
        window, entry = window.add(value, logit)
        found += [] if entry is None else [entry]
    return window, found


def test_open_window__no_overlap__softmax_over_each_window() -> None:
    values, logits = _random(19, 3, seed=4), 30 * _random(19, 3, seed=5)
    _, entries = _entries(OpenWindow.start(8, 3, overlap=False), values, logits)
    wanted = [_pooled(values[i : i + 8], logits[i : i + 8]) for i in (0, 8)]
    torch.testing.assert_close(torch.stack(entries), torch.stack(wanted))


def test_open_window__overlap__first_half_of_the_window_before() -> None:
    values, logits = _random(14, 6, seed=6), 3 * _random(14, 6, seed=7)
    _, entries = _entries(OpenWindow.start(4, 3, overlap=True), values, logits)
    wanted = [_pooled(values[:4, 3:], logits[:4, 3:])]
    for i in (4, 8):
        before, here = slice(i - 4, i), slice(i, i + 4)
        both = [torch.cat([x[before, :3], x[here, 3:]]) for x in (values, logits)]
        wanted.append(_pooled(*both))
    torch.testing.assert_close(torch.stack(entries), torch.stack(wanted))


@pytest.mark.parametrize("marked", [0, 3, 4, 7, 9])
def test_open_window__rewound_over_a_closed_window__same_bits(marked: int) -> None:
    values, logits = _random(16, 6, seed=8), _random(16, 6, seed=9)
    start = OpenWindow.start(4, 3, overlap=True)
    _, straight = _entries(start, values, logits)
    mark, before = _entries(start, values[:marked], logits[:marked])
    _entries(mark, _random(7, 6, seed=10), _random(7, 6, seed=11))  # drafts that are thrown away
    _, behind = _entries(mark, values[marked:], logits[marked:])
    assert torch.equal(torch.stack(before + behind), torch.stack(straight))


# -- streams -----------------------------------------------------------------------------------


def _weights(n: int, hidden: int) -> StreamWeights:
    rows = 2 * n + n * n
    return StreamWeights(
        _random(rows, n * hidden, seed=12) / 4, _random(rows, seed=13), _random(3, seed=14)
    )


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_connections__one_token__formula(steps: int) -> None:
    n, hidden, eps = 3, 5, 1e-3
    streams, weights = _random(2, n, hidden, seed=15), _weights(n, hidden)
    made = connections(streams, weights, steps=steps, eps=eps, norm_eps=1e-6)
    flat = streams[1].flatten()
    f = weights.project @ (flat / (flat.square().mean() + 1e-6).sqrt())
    b, s = weights.base, weights.scale
    torch.testing.assert_close(made.read[1], (f[:3] * s[0] + b[:3]).sigmoid() + eps)
    torch.testing.assert_close(made.write[1], 2 * (f[3:6] * s[1] + b[3:6]).sigmoid())
    mix = [
        [math.exp(float(f[i] * s[2] + b[i])) for i in range(6 + 3 * r, 9 + 3 * r)] for r in range(3)
    ]
    mix = [[x / sum(row) + eps for x in row] for row in mix]
    for step in range(2 * steps - 1):
        if step % 2:
            mix = [[x / (sum(row) + eps) for x in row] for row in mix]
        else:
            sums = [sum(row[c] for row in mix) + eps for c in range(3)]
            mix = [[x / sums[c] for c, x in enumerate(row)] for row in mix]
    torch.testing.assert_close(made.mix[1], torch.tensor(mix))


def test_connections__around_a_block__mix_goes_from_first_index_to_second() -> None:
    streams, weights = _random(2, 3, 5, seed=16), _weights(3, 5)
    made = connections(streams, weights, steps=2, eps=1e-6, norm_eps=1e-6)
    output = _random(2, 5, seed=17)
    after = made.after(streams, output)
    for k in range(3):
        wanted = made.write[1, k] * output[1] + sum(
            (made.mix[1, j, k] * streams[1, j] for j in range(3)), torch.zeros(5)
        )
        torch.testing.assert_close(after[1, k], wanted)
    read = sum((made.read[0, j] * streams[0, j] for j in range(3)), torch.zeros(5))
    torch.testing.assert_close(made.block_input(streams)[0], read)


def test_collapse__one_token__formula() -> None:
    streams, project = _random(2, 3, 5, seed=18), _random(3, 15, seed=19) / 4
    base, scale = _random(3, seed=20), _random(1, seed=21)
    flat = streams[1].flatten()
    f = project @ (flat / (flat.square().mean() + 1e-6).sqrt())
    read = (f * scale + base).sigmoid() + 1e-3
    got = collapse(streams, project, base, scale, eps=1e-3, norm_eps=1e-6)
    torch.testing.assert_close(got[1], read @ streams[1])


# -- attention ---------------------------------------------------------------------------------


def test_shared_attention__sinks_and_unseen_entries__formula() -> None:
    queries, entries, sinks = _random(3, 2, 4, seed=22), _random(5, 4, seed=23), _random(2, seed=24)
    seen = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()
    got = shared_attention(queries, entries, seen, sinks, scale=0.7)
    for t in range(3):
        for h in range(2):
            shares = [
                math.exp(0.7 * float(queries[t, h] @ entries[s])) if seen[t, s] else 0.0
                for s in range(5)
            ]
            whole = sum(shares) + math.exp(float(sinks[h]))
            wanted = torch.tensor(shares) @ entries / whole
            torch.testing.assert_close(got[t, h], wanted)


def test_grouped_output__two_groups__each_by_its_own_rows() -> None:
    mixed, outer = _random(3, 4, 5, seed=25), _random(7, 6, seed=26)
    inner = _random(6, 10, seed=27)
    got = grouped_output(mixed, inner, outer, groups=2)
    first = inner[:3] @ mixed[2, :2].flatten()
    second = inner[3:] @ mixed[2, 2:].flatten()
    torch.testing.assert_close(got[2], outer @ torch.cat([first, second]))


# -- routing by token id -----------------------------------------------------------------------


def test_weights_of__ids_from_a_table__their_scores_to_the_scale() -> None:
    logits, ids = _random(2, 5, seed=28), torch.tensor([[4, 0], [1, 3]])
    got = weights_of(logits, ids, score=Score.SQRT_SOFTPLUS, renormalize=True, scale=1.5)
    for t in range(2):
        scores = [math.sqrt(math.log1p(math.exp(float(logits[t, e])))) for e in ids[t].tolist()]
        wanted = [1.5 * score / sum(scores) for score in scores]
        assert got[t].tolist() == pytest.approx(wanted, abs=1e-6)
