"""Parts of DeepSeek-V4's maths, each against its formula written out in plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moet_desk.kernels.kinds import KvFormat, Score
from moet_desk.kernels.kv_sizes import pooled_key_bytes, shared_entry_bytes
from moet_desk.kernels.reference.pooled_entries import (
    index_rounded,
    pooled_key_read,
    pooled_key_write,
    shared_read,
    shared_write,
)
from moet_desk.kernels.reference.pooling import OpenWindow
from moet_desk.kernels.reference.routing import weights_of
from moet_desk.kernels.reference.shared_attention import grouped_output, shared_attention
from moet_desk.kernels.reference.streams import StreamWeights, collapse, connections


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- pooled entries ----------------------------------------------------------------------------


def _pooled(values: Tensor, logits: Tensor) -> Tensor:
    return (values * logits.softmax(0)).sum(0)


def _entries(
    window: OpenWindow, values: Tensor, logits: Tensor, sizes: list[int]
) -> tuple[OpenWindow, Tensor]:
    found, at = [], 0
    for size in sizes:
        window, entries = window.read(values[at : at + size], logits[at : at + size])
        found.append(entries)
        at += size
    assert at == len(values)
    return window, torch.cat(found)


SIZES = {"whole": [19], "one by one": [1] * 19, "odd": [3, 8, 2, 1, 5], "to the edge": [8, 8, 3]}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_open_window__no_overlap__softmax_over_each_window(sizes: list[int]) -> None:
    values, logits = _random(19, 3, seed=4), 30 * _random(19, 3, seed=5)
    window, entries = _entries(OpenWindow.start(8, 3, overlap=False), values, logits, sizes)
    wanted = [_pooled(values[i : i + 8], logits[i : i + 8]) for i in (0, 8)]
    torch.testing.assert_close(entries, torch.stack(wanted))
    assert window.n_tokens == 3


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_open_window__overlap__first_half_of_the_window_before(sizes: list[int]) -> None:
    values, logits = _random(19, 6, seed=6), 3 * _random(19, 6, seed=7)
    _, entries = _entries(OpenWindow.start(4, 3, overlap=True), values, logits, sizes)
    wanted = [_pooled(values[:4, 3:], logits[:4, 3:])]
    for i in (4, 8, 12):
        before, here = slice(i - 4, i), slice(i, i + 4)
        both = [torch.cat([x[before, :3], x[here, 3:]]) for x in (values, logits)]
        wanted.append(_pooled(*both))
    torch.testing.assert_close(entries, torch.stack(wanted))


@pytest.mark.parametrize("marked", [1, 3, 4, 7, 9])
def test_open_window__rewound_over_a_closed_window__same_bits(marked: int) -> None:
    values, logits = _random(16, 6, seed=8), _random(16, 6, seed=9)
    start = OpenWindow.start(4, 3, overlap=True)
    sizes = [marked, 16 - marked]
    _, straight = _entries(start, values, logits, sizes)
    mark, before = _entries(start, values[:marked], logits[:marked], sizes[:1])
    mark.read(_random(7, 6, seed=10), _random(7, 6, seed=11))  # drafts that are thrown away
    _, behind = _entries(mark, values[marked:], logits[marked:], sizes[1:])
    assert torch.equal(torch.cat([before, behind]), straight)


# -- entries -----------------------------------------------------------------------------------


def _power(amax: float, most: float) -> float:
    return 2.0 ** math.ceil(math.log2(max(amax, 1e-4) / most))


def test_shared_write__fp8__as_released() -> None:
    entries = _random(3, 512, seed=30) * torch.tensor([[1.0], [1e-6], [300.0]])
    entries[0, 64:128] *= 448.0 / entries[0, 64:128].abs().max()  # exactly at a power of two
    buf = shared_write(entries, KvFormat.FP8, 64)
    assert buf.shape == (3, 584)
    got = shared_read(buf, KvFormat.FP8, 512, 64)
    assert torch.equal(got[:, 448:], entries[:, 448:].bfloat16().float())
    for t in range(3):
        for i in range(0, 448, 64):
            block = entries[t, i : i + 64]
            scale = _power(float(block.abs().max()), 448.0)
            wanted = (block / scale).to(torch.float8_e4m3fn).float() * scale
            assert torch.equal(got[t, i : i + 64], wanted)


@pytest.mark.parametrize(
    ("form", "n_bytes", "off"),
    [(KvFormat.F32, 2048, 0.0), (KvFormat.BF16, 1024, 0.004), (KvFormat.NVFP4, 316, 0.2)],
)
def test_shared_write__other_formats__sizes_and_errors(
    form: KvFormat, n_bytes: int, off: float
) -> None:
    entries = _random(4, 512, seed=31)
    buf = shared_write(entries, form, 64)
    assert buf.shape == (4, n_bytes)
    assert shared_entry_bytes(form, 512, 64) == n_bytes
    found = shared_read(buf, form, 512, 64)
    assert off / 2 <= float((found - entries).norm() / entries.norm()) * 2 <= 2 * off


def test_shared_write__short_last_block__size() -> None:
    entries = _random(2, 32, seed=32)
    buf = shared_write(entries, KvFormat.FP8, 8)
    assert buf.shape[1] == shared_entry_bytes(KvFormat.FP8, 32, 8) == 24 + 16 + 8
    assert (shared_read(buf, KvFormat.FP8, 32, 8) - entries).abs().max() < 0.15


def test_index_rounded__two_blocks__formula() -> None:
    x = _random(2, 3, 64, seed=33)
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(64)] for i in range(64)])
    turned = x @ matrix / 8
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    got = index_rounded(x)
    for t in range(2):
        for n in range(3):
            for i in (0, 32):
                block = turned[t, n, i : i + 32]
                scale = 2.0 ** math.ceil(math.log2(float(block.abs().max()) / 6.0))
                nearest = (block[:, None].abs() / scale - values).abs().argmin(-1)
                wanted = values[nearest] * block.sign() * scale
                torch.testing.assert_close(got[t, n, i : i + 32], wanted)
    for form in (KvFormat.FP8, KvFormat.NVFP4):
        buf = pooled_key_write(x[:, 0], form)
        assert buf.shape == (2, pooled_key_bytes(form, 64)) == (2, 34)
        assert torch.equal(pooled_key_read(buf, form, 64), got[:, 0])


@pytest.mark.parametrize(("form", "n_bytes"), [(KvFormat.F32, 512), (KvFormat.BF16, 256)])
def test_pooled_keys__wider_formats__neither_turned_nor_rounded(
    form: KvFormat, n_bytes: int
) -> None:
    keys = _random(3, 128, seed=34).bfloat16().float()
    buf = pooled_key_write(keys, form)
    assert buf.shape == (3, n_bytes)
    assert torch.equal(pooled_key_read(buf, form, 128), keys)


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
