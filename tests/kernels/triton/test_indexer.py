"""An indexer's kernels against their twins, and attention to what they chose against the twin's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import index_form
from moet_desk.kernels.triton import choose as choosing
from moet_desk.kernels.triton.attention import mla_decode
from moet_desk.kernels.triton.attention_parts import DecodeScratch
from moet_desk.kernels.triton.choose import choose
from moet_desk.kernels.triton.indexer import chosen_pages, index_prepare, index_scores
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.prepare import Rotation
from tests.kernels.triton.makers import paged, relative_error

FORMS = [KvFormat.F32, KvFormat.BF16, KvFormat.FP8]  # what `index_form` gives
CPU = torch.device("cpu")
LENGTHS = [1, 64, 65, 200]
INF = float("inf")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("d", "heads"), [(128, 5), (48, 16)])
def test_prepare__key_and_queries__as_the_twins(
    form: KvFormat, interleaved: bool, d: int, heads: int
) -> None:
    rows, dr = 3, 16
    key, q, q_out = torch.randn(rows, d), torch.randn(rows, heads, d), torch.empty(rows, heads, d)
    weight, bias = torch.randn(d).bfloat16(), torch.randn(d).bfloat16()
    cos, sin = ref.rope_tables(torch.arange(40), ref.rope_frequencies(dr, 1e4)[0])
    at = torch.tensor([0, 17, 33], dtype=torch.int32)
    size = ref.index_write(key, form).shape[1]
    kv = paged([torch.zeros(40, size, dtype=torch.uint8) for _ in range(rows)], 16, form)
    rotation = Rotation(at, cos, sin, interleaved=interleaved)
    index_prepare(key, weight, bias, 1e-3, q, q_out, rotation=rotation, kv=kv)

    def turned(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        part = ref.rotate(x[..., :dr], c, s, interleaved=interleaved)
        return torch.cat([part, x[..., dr:]], -1)

    c, s = cos[at.long()], sin[at.long()]
    want = turned(ref.layer_norm(key, weight.float(), bias.float(), 1e-3), c, s)
    assert (q_out - turned(q, c[:, None], s[:, None])).abs().max() < 1e-6
    for t, place in enumerate(at.tolist()):
        stored = kv.pages[kv.table[t, place // 16], place % 16]
        got = ref.index_read(stored[None], form, d)[0]
        off = {KvFormat.F32: 1e-5, KvFormat.BF16: 0.02, KvFormat.FP8: 0.2}[form]
        assert (got - want[t]).abs().max() < off * want[t].abs().max()


def scored(
    form: KvFormat, lengths: list[int], d: int = 128, heads: int = 5
) -> tuple[Tensor, list[Tensor], Tensor, Tensor, KvPages]:
    """Scores of rows, and what they were made of: keys as stored, queries, weights, pages."""
    stored = [ref.index_write(torch.randn(n, d), form) for n in lengths]
    kv = paged(stored, 16, form)
    q, weights = torch.randn(len(lengths), heads, d), torch.randn(len(lengths), heads)
    scores = torch.full((len(lengths), max(lengths) + 3), torch.nan)
    seen = torch.tensor(lengths, dtype=torch.int32)
    index_scores(q, weights, kv, seen, scores, scale=0.25)
    return scores, [ref.index_read(x, form, d) for x in stored], q, weights, kv


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("d", "heads"), [(128, 5), (48, 32)])
def test_scores__rows_of_all_lengths__near_the_twin_and_each_row_alone(
    form: KvFormat, d: int, heads: int
) -> None:
    scores, keys, q, weights, kv = scored(form, LENGTHS, d, heads)
    for t, n in enumerate(LENGTHS):
        here = slice(t, t + 1)
        want = ref.index_scores(q[here], keys[t], 0.25 * weights[here], torch.tensor([n]))[0]
        assert relative_error(scores[t, :n], want) < 1e-5
        assert scores[t, n:].isnan().all()  # nothing behind what a row sees
        alone = torch.empty(1, n)
        one = KvPages(kv.pages, kv.table[here], kv.form)
        seen = torch.tensor([n], dtype=torch.int32)
        index_scores(q[here], weights[here], one, seen, alone, scale=0.25)
        assert torch.equal(alone[0], scores[t, :n])


def test_scores__nan_in_a_key__shows() -> None:
    keys = torch.randn(70, 32)
    keys[66, 3] = torch.nan
    kv = paged([ref.index_write(keys, KvFormat.BF16)], 16, KvFormat.BF16)
    scores = torch.zeros(1, 70)
    seen = torch.tensor([70], dtype=torch.int32)
    index_scores(torch.randn(1, 4, 32), torch.randn(1, 4), kv, seen, scores, scale=1.0)
    assert scores[0].isnan().nonzero().tolist() == [[66]]


def chosen_by(scores: Tensor, lengths: list[int], top_k: int) -> tuple[list[list[int]], KvPages]:
    """Numbers of entries, and the pages they are of: 16 bytes each, of which none is read. Places
    must be the same entries'.
    """
    entries = [torch.zeros(n, 16, dtype=torch.uint8) for n in lengths]
    kv = paged(entries, 16, KvFormat.BF16)
    found = torch.full((len(lengths), top_k), -1, dtype=torch.int32)
    counts = torch.zeros(len(lengths), dtype=torch.int32)
    seen = torch.tensor(lengths, dtype=torch.int32)
    choose(scores, seen, kv, found, counts)
    for line, count in zip(found.tolist(), counts.tolist(), strict=True):
        assert line[count:] == [-1] * (top_k - count)
    lists = [line[:n] for line, n in zip(found.tolist(), counts.tolist(), strict=True)]
    places, again = torch.full_like(found, -1), torch.zeros_like(counts)
    choose(scores, seen, None, places, again)
    assert torch.equal(again, counts)
    for t, (line, count) in enumerate(zip(places.tolist(), counts.tolist(), strict=True)):
        assert line[count:] == [-1] * (top_k - count)
        assert [int(kv.table[t, p // 16]) * 16 + p % 16 for p in line[:count]] == lists[t]
    return lists, kv


@pytest.mark.parametrize("short", [16, 64, 1024])  # held, or read again
@pytest.mark.parametrize("top_k", [1, 8, 50])
@pytest.mark.parametrize("kind", ["distinct", "many ties", "tiny steps", "far apart"])
def test_choose__any_scores__exactly_the_twins(
    kind: str, top_k: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "_SHORT", short)
    monkeypatch.setattr(choosing, "_LONG", 4 * short)
    lengths = [1, 7, 8, 9, 50, 51, 130]
    width = 133 if short == 16 else 136  # the latter is read in fours
    scores = torch.randn(len(lengths), width)
    if kind == "many ties":
        scores = scores.round()
        scores[:, ::5] *= -0.0  # beside 0.0
        scores[6, 3], scores[6, 99], scores[6, 50], scores[6, 51] = torch.nan, INF, -INF, -INF
    if kind == "tiny steps":
        scores = 1 + torch.randint(0, 9, scores.shape) * 2.0**-23  # the last bits decide
    if kind == "far apart":
        scores = scores.sign() * 10.0 ** torch.randint(-44, 39, scores.shape)
    lists, kv = chosen_by(scores, lengths, top_k)
    for t, n in enumerate(lengths):
        if n <= top_k:
            places = list(range(n))
        else:
            places = ref.choose(scores[t : t + 1, :n], top_k)[0].nonzero()[:, 0].tolist()
        assert lists[t] == [int(kv.table[t, p // 16]) * 16 + p % 16 for p in places]


@pytest.mark.parametrize("short", [64, 1024])
def test_choose__few_that_are_not_hidden__these(
    short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "_SHORT", short)
    monkeypatch.setattr(choosing, "_LONG", short)
    scores = torch.full((4, 200), -INF)
    scores[1, 7], scores[1, 190] = -3.4028234663852886e38, INF
    scores[2, 5:15] = torch.tensor([1.0, 2.0] * 5)
    scores[3] = 0.0
    lists, kv = chosen_by(scores, [200] * 4, 8)
    wanted = [[], [7, 190], [5, 6, 7, 8, 9, 10, 12, 14], list(range(8))]
    for t, places in enumerate(wanted):
        assert lists[t] == [int(kv.table[t, p // 16]) * 16 + p % 16 for p in places]


def test_choose__no_more_than_it_may__takes_all_whatever_the_scores() -> None:
    lists, _ = chosen_by(torch.full((1, 20), torch.nan), [12], 16)
    assert len(lists[0]) == 12
    hidden, _ = chosen_by(torch.full((1, 20), -INF), [12], 16)
    assert hidden[0] != []


@pytest.mark.parametrize("form", list(KvFormat))
def test_sparse_attention__scores_choice_and_decode__as_the_twins(form: KvFormat) -> None:
    """The three launches of a layer, over pages of entries and pages of keys with one table."""
    lengths, top_k, heads, rank, rope = [5, 70, 200], 24, 3, 128, 16
    entries = [ref.mla_write(torch.randn(n, rank), torch.randn(n, rope), form) for n in lengths]
    kv = paged(entries, 16, form)
    own = index_form(form)
    keys = torch.zeros(*kv.pages.shape[:2], ref.index_write(torch.zeros(1, 64), form).shape[1])
    key_pages = KvPages(keys.to(torch.uint8), kv.table, own)
    raw = [torch.randn(n, 64) for n in lengths]
    for t, n in enumerate(lengths):
        for place in range(n):
            at = kv.table[t, place // 16], place % 16
            key_pages.pages[at] = ref.index_write(raw[t][place : place + 1], form)[0]
    q, weights = torch.randn(3, 16, 64), torch.randn(3, 16)
    seen = torch.tensor(lengths, dtype=torch.int32)
    scores, counts = torch.empty(3, 256), torch.empty(3, dtype=torch.int32)
    chosen = torch.zeros(3, top_k, dtype=torch.int32)
    index_scores(q, weights, key_pages, seen, scores, scale=0.1)
    choose(scores, seen, kv, chosen, counts)
    assert counts.tolist() == [5, top_k, top_k]
    q_latent, q_rope = torch.randn(3, heads, rank), torch.randn(3, heads, rope)
    out, scratch = torch.empty(3, heads, rank), DecodeScratch.make(3, heads, rank, device=CPU)
    few = chosen_pages(kv, chosen)
    mla_decode(q_latent, q_rope, few, counts, out, scale=0.1, scratch=scratch)
    for t, n in enumerate(lengths):
        latent, k_rope = ref.mla_read(entries[t], form, rank, rope)
        back = ref.index_read(ref.index_write(raw[t], form), form, 64)
        one = slice(t, t + 1)
        mask = ref.choose(
            ref.index_scores(q[one], back, 0.1 * weights[one], torch.tensor([n])), top_k
        )
        unit = torch.eye(rank).expand(heads, rank, rank)
        want = ref.mla_absorbed(
            q_latent[one], q_rope[one], latent, k_rope, unit, unit, scale=0.1, start=n - 1,
            chosen=mask,
        )  # fmt: skip
        assert relative_error(out[t].flatten(), want[0]) < 1e-5
