"""An indexer's scores and choice: against float64, at ties and edges, rows together and alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import index_key_bytes
from moet_desk.kernels.reference import choose, index_read, index_scores, index_write, layer_norm
from moet_desk.kernels.reference import indexer as module

INF = float("inf")


def inputs(rows: int, entries: int, heads: int = 5, d: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(rows + entries)
    return (
        torch.randn(rows, heads, d, generator=source),
        torch.randn(entries, d, generator=source),
        torch.randn(rows, heads, generator=source),
    )


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 40])
@pytest.mark.parametrize("block", [1, 1 << 24])
def test_scores__visible_entries__equal_float64_and_others_hidden(
    rows: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_FLOATS", block)
    q, keys, weights = inputs(rows, 50)
    seen = torch.arange(50 - rows, 50) + 1
    got = index_scores(q, keys, weights, seen)
    dots = torch.einsum("tnd,sd->tns", q.double(), keys.double()).relu()
    want = torch.einsum("tns,tn->ts", dots, weights.double())
    visible = torch.arange(50) < seen[:, None]
    assert torch.equal(got == -INF, ~visible)
    assert (got.double() - want)[visible].abs().max() < 1e-5 * want.std()


def test_scores__few_rows__bits_as_if_each_came_alone() -> None:
    q, keys, weights = inputs(8, 60)
    seen = torch.arange(53, 61)
    together = index_scores(q, keys, weights, seen)
    for row in range(8):
        here = slice(row, row + 1)
        alone = index_scores(q[here], keys[: 53 + row], weights[here], seen[here])
        assert torch.equal(together[row, : 53 + row], alone[0])


def brute(scores: Tensor, top_k: int) -> Tensor:
    """One row after the other, by sorting pairs."""
    chosen = torch.zeros(scores.shape, dtype=torch.bool)
    for row, values in enumerate(scores.tolist()):
        values = [INF if value != value else value for value in values]
        places = sorted(range(len(values)), key=lambda i: (-values[i], i))[:top_k]
        for place in places:
            chosen[row, place] = values[place] > -INF
    return chosen


@pytest.mark.parametrize("top_k", [1, 3, 7, 19, 20, 30])
def test_choose__many_ties__lowest_places_of_the_highest(top_k: int) -> None:
    source = torch.Generator().manual_seed(4)
    scores = torch.randint(-2, 3, (60, 20), generator=source).float()
    scores[torch.rand(60, 20, generator=source) < 0.2] = -INF
    scores[50:] = scores[50:] * 0.0  # -0.0 beside 0.0 is a tie too; infinities become NaN
    assert torch.equal(choose(scores, top_k), brute(scores, top_k))


def test_choose__distinct_scores__as_topk() -> None:
    scores = torch.randn(30, 100, generator=torch.Generator().manual_seed(1))
    want = torch.zeros(30, 100, dtype=torch.bool).scatter_(1, scores.topk(12).indices, value=True)
    assert torch.equal(choose(scores, 12), want)


@pytest.mark.parametrize(
    ("form", "n_bytes", "off"),
    [
        (KvFormat.F32, 512, 0.0),
        (KvFormat.BF16, 256, 2**-8),
        (KvFormat.FP8, 132, 2**-4),
        (KvFormat.NVFP4, 132, 2**-4),  # beside 4-bit entries, keys stay FP8
    ],
)
def test_index_keys__every_format__come_back(form: KvFormat, n_bytes: int, off: float) -> None:
    keys = torch.randn(7, 128, generator=torch.Generator().manual_seed(2))
    stored = index_write(keys, form)
    assert stored.shape == (7, index_key_bytes(form, 128)) == (7, n_bytes)
    back = index_read(stored, form, 128)
    assert ((back - keys).abs() <= off * keys.abs() + off * 2**-4).all()
    assert torch.equal(back, keys) is (form is KvFormat.F32)


def test_layer_norm__random_rows__as_torch() -> None:
    source = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(*shape, generator=source) for shape in ((9, 16), (16,), (16,)))
    want = torch.nn.functional.layer_norm(x, (16,), weight, bias, 1e-2)
    assert (layer_norm(x, weight, bias, 1e-2) - want).abs().max() < 1e-5
    assert (layer_norm(x, weight, bias, 1e-6) - want).abs().max() > 1e-3
