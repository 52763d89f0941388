"""Kernels of DeepSeek-V4 on a card, at DeepSeek-V4-Flash's shapes, against the twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat, Score
from moet_desk.kernels.triton.attention_parts import DecodeScratch
from moet_desk.kernels.triton.choose import list_chosen
from moet_desk.kernels.triton.head_parts import head_parts
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.pooled_keys import rounds, score_windows
from moet_desk.kernels.triton.pooled_scores import prepare_run, score_run
from moet_desk.kernels.triton.pooling import finish, pool, pool_run
from moet_desk.kernels.triton.prepare import Rotation
from moet_desk.kernels.triton.route import route_named
from moet_desk.kernels.triton.seen import Places, Pooled, find_places, list_seen
from moet_desk.kernels.triton.shared_attention import shared_decode
from moet_desk.kernels.triton.shared_prefill import Run, decode_seen, run_attention
from moet_desk.kernels.triton.streams import (
    Given,
    StreamGates,
    StreamScratch,
    advance,
    enter,
    multiply_many,
    write_back,
)
from tests.kernels.triton.makers import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS, N, HIDDEN, HEADS, DIM, ROTARY, KEY = 4, 4, 4096, 64, 512, 64, 128
STEPS, EPS = 20, 1e-6


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_streams__around_a_block__near_the_twin_also_alone() -> None:
    n_made, top_k = 2 * N + N * N, 6
    weights = ref.StreamWeights(
        _random(n_made, N * HIDDEN, seed=1) / 64, _random(n_made, seed=2), _random(3, seed=3)
    )
    streams, y, norm = (_random(*shape, HIDDEN, seed=4) for shape in ((ROWS, N), (ROWS,), ()))
    part, counts = _random(ROWS, top_k, HIDDEN, seed=5), _random(ROWS, top_k, seed=6)
    made = ref.connections(streams, weights, steps=STEPS, eps=EPS, norm_eps=EPS)
    read = ref.rms_norm(made.block_input(streams), norm, EPS)
    after = made.after(streams, y + (counts[..., None] * part).sum(1))
    project = weights.project.cuda()
    gates = StreamGates(weights.base.cuda(), weights.scale.cuda(), STEPS, EPS, EPS)
    results = []
    for rows in (slice(0, ROWS), slice(1, 2)):
        x, n_rows = streams[rows].cuda(), len(range(ROWS)[rows])
        scratch = StreamScratch.make(n_rows, N, HIDDEN, torch.device("cuda"))
        out = torch.empty(n_rows, HIDDEN).cuda()
        advance(x, None, project, scratch=scratch)
        enter(x, gates, norm.cuda(), scratch=scratch, out=out)
        given = Given(y[rows].cuda(), part[rows].flatten(0, 1).cuda(), counts[rows].cuda())
        advance(x, given, project, scratch=scratch)
        results.append((out.cpu(), x.cpu(), scratch.parts[..., :n_made].cpu()))
    assert relative_error(results[0][0], read) < 1e-5
    assert relative_error(results[0][1], after) < 1e-5
    products = results[0][2].double().sum(1)
    assert relative_error(products, after.flatten(1) @ weights.project.T) < 1e-5
    for together, alone in zip(*results, strict=True):
        assert torch.equal(together[1], alone[0])


def test_streams__of_a_prompt__near_the_twin() -> None:
    many, n_made = 45, 2 * N + N * N
    weights = ref.StreamWeights(
        _random(n_made, N * HIDDEN, seed=1) / 64, _random(n_made, seed=2), _random(3, seed=3)
    )
    streams, y, norm = (_random(*shape, HIDDEN, seed=4) for shape in ((many, N), (many,), ()))
    made = ref.connections(streams, weights, steps=STEPS, eps=EPS, norm_eps=EPS)
    x, out = streams.cuda(), torch.empty(many, HIDDEN).cuda()
    scratch = StreamScratch.make(many, N, HIDDEN, torch.device("cuda"), parts=8)
    gates = StreamGates(weights.base.cuda(), weights.scale.cuda(), STEPS, EPS, EPS)
    multiply_many(x, weights.project.cuda(), scratch=scratch)
    enter(x, gates, norm.cuda(), scratch=scratch, out=out)
    write_back(x, y.cuda(), scratch=scratch)
    read = ref.rms_norm(made.block_input(streams), norm, EPS)
    assert relative_error(out.cpu(), read) < 1e-5
    assert relative_error(x.cpu(), made.after(streams, y)) < 1e-5


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (128, False)])
def test_pool__token_by_token__entries_of_the_twin(ratio: int, overlap: bool) -> None:
    width, n_tokens = (2 * DIM if overlap else DIM), 2 * ratio
    tokens, places = _random(n_tokens, 2 * width, seed=6), _random(ratio, width, seed=7)
    logits = tokens[:, width:] + places.repeat(2, 1)
    _, want = ref.OpenWindow.start(ratio, DIM, overlap=overlap).read(tokens[:, :width], logits)
    states = torch.full((n_tokens + 1, (9 if overlap else 3) * DIM), torch.nan).cuda()
    means = torch.full((n_tokens, DIM), torch.nan).cuda()
    at = torch.arange(n_tokens, dtype=torch.int32).cuda()
    for first in range(0, n_tokens, 8):
        rows = slice(first, first + 8)
        pool(
            tokens[rows].cuda(), places.cuda(), at[rows], states, at[rows], at[rows] + 1,
            means[rows], overlap=overlap,
        )  # fmt: skip
    closed = means.cpu()[ratio - 1 :: ratio]
    assert relative_error(closed, want) < 1e-5
    assert int(means.isnan().all(1).sum()) == n_tokens - 2


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (128, False)])
@pytest.mark.parametrize(("start", "count"), [(0, 512), (1005, 500), (2, 1)])
def test_pool_run__a_prompt_s_rows__bits_of_one_by_one(
    ratio: int, overlap: bool, start: int, count: int
) -> None:
    width, before = (2 * DIM if overlap else DIM), min(start, 2 * ratio)
    tokens = _random(before + count, 2 * width, seed=16).cuda()
    places = _random(ratio, width, seed=17).cuda()
    at = torch.arange(start - before, start + count, dtype=torch.int32).cuda()
    sums = torch.zeros(16, (9 if overlap else 3) * DIM).cuda()
    want = torch.zeros(before + count, DIM).cuda()
    rows = slice(0, before)
    if before:
        pool(
            tokens[rows], places, at[rows], sums, at[rows] % 16, (at[rows] + 1) % 16, want[rows],
            overlap=overlap,
        )  # fmt: skip
    own, held = sums.clone(), sums[start % 16].clone()
    rows, means = slice(before, None), torch.zeros(count, DIM).cuda()
    pool(
        tokens[rows], places, at[rows], sums, at[rows] % 16, (at[rows] + 1) % 16, want[rows],
        overlap=overlap,
    )  # fmt: skip
    targets = (at[rows] + 1) % 16
    pool_run(tokens[rows], places, start, held, own, targets, means, overlap=overlap)
    assert torch.equal(means, want[rows])
    assert torch.equal(own[(start + count) % 16], sums[(start + count) % 16])


def test_lists__released_sizes__as_the_twin() -> None:
    positions, slots = [5, 40_000, 40_001], [1, 0, 0]
    window, ring, first = 128, 640, 2 * 640
    at = torch.tensor(positions, dtype=torch.int32).cuda()
    runs = torch.tensor([[slot, 0, 0, 1] for slot in slots], dtype=torch.int32).cuda()
    places = Places.make(3, torch.device("cuda"))
    find_places(runs, at, places, ring=ring, ratio=4)
    assert places.closed.tolist() == [1, 10_000, 10_000]
    table = torch.randperm(3 * 640).view(3, 640).int()
    pages = torch.zeros(3 * 640, 1, 584, dtype=torch.uint8).cuda()
    kv = KvPages(pages, table.cuda(), KvFormat.FP8)
    listed, lengths = torch.zeros(3, 500).int().cuda(), torch.zeros(3).int().cuda()
    list_seen(places, Pooled(kv, 128, 2, first), listed, lengths, window=window, ring=ring)
    for t, position in enumerate(positions):
        far = first + table[t, ::2][: (position + 1) // 128]
        want = ref.seen_entries(
            position, far.tolist(), first=slots[t] * ring, window=window, ring=ring
        )
        assert listed[t, : int(lengths[t])].tolist() == want.tolist()


@pytest.mark.parametrize("kind", ["distinct", "many ties"])
def test_list_chosen__rows_of_all_lengths__exactly_the_twin(kind: str) -> None:
    positions, window, ring, first, top_k = [1, 2100, 9001, 30_000, 90_000], 128, 640, 640, 512
    rows = len(positions)
    at = torch.tensor(positions, dtype=torch.int32).cuda()
    places = Places.make(rows, torch.device("cuda"))
    runs = torch.zeros(rows, 4, dtype=torch.int32).cuda()
    find_places(runs, at, places, ring=ring, ratio=4)
    table = torch.stack([torch.randperm(1600) for _ in positions]).int()
    pages = torch.zeros(1600, 16, 584, dtype=torch.uint8).cuda()
    pooled = Pooled(KvPages(pages, table.cuda(), KvFormat.FP8), 4, 1, first)
    scores = _random(rows, 25_600, seed=27)
    if kind == "many ties":
        scores = scores.mul(2).round().clamp(min=0)
        scores[:, ::7] = -torch.inf
        scores[:, 11::13] = torch.nan
    listed = torch.zeros(rows, window + top_k, dtype=torch.int32).cuda()
    lengths = torch.zeros(rows, dtype=torch.int32).cuda()
    list_chosen(
        scores.cuda(), places, pooled, listed, lengths, top_k=top_k, window=window, ring=ring
    )
    for t, position in enumerate(positions):
        closed = (position + 1) // 4
        best = torch.arange(closed)
        if closed > top_k:
            best = ref.choose(scores[t : t + 1, :closed], top_k)[0].nonzero()[:, 0]
        far = first + table[t, best // 16] * 16 + best % 16
        want = ref.seen_entries(position, far.tolist(), first=0, window=window, ring=ring)
        assert listed[t, : int(lengths[t])].tolist() == want.tolist()


def test_route_named__released_sizes__as_the_twin() -> None:
    logits, table = _random(ROWS, 256, seed=19), torch.rand(99, 256).topk(6).indices.int()
    tokens = torch.tensor([98, 0, 5, 5], dtype=torch.int32)
    ids, weights = torch.zeros(ROWS, 6).int().cuda(), torch.zeros(ROWS, 6).cuda()
    options: dict[str, Any] = {"score": Score.SQRT_SOFTPLUS, "renormalize": True, "scale": 1.5}
    route_named(logits.cuda(), table.cuda(), tokens.cuda(), ids=ids, weights=weights, **options)
    assert torch.equal(ids.cpu(), table[tokens.long()])
    want = ref.weights_of(logits, table[tokens.long()].long(), **options)
    assert relative_error(weights.cpu(), want) < 1e-5


def test_finish__fp8__as_the_twin_rounds() -> None:
    vectors, weight = _random(3, DIM, seed=8), _random(DIM, seed=9)
    frequencies, magnitude = ref.rope_frequencies(ROTARY, 1e4)
    cos, sin = ref.rope_tables(torch.arange(16), frequencies, magnitude)
    pages, table = torch.zeros(1, 4, 584, dtype=torch.uint8).cuda(), torch.zeros(3, 1).int().cuda()
    positions = torch.tensor([3, 7, 11], dtype=torch.int32)
    finish(
        vectors.cuda(), weight.cuda(), EPS, cos.cuda(), sin.cuda(), positions.cuda(), pages, table,
        KvFormat.FP8, ratio=4,
    )  # fmt: skip
    normed = ref.rms_norm(vectors, weight, EPS)
    at = positions.long() - 3
    turned = ref.rotate(normed[:, -ROTARY:], cos[at], sin[at], interleaved=True)
    entries = torch.cat([normed[:, :-ROTARY], turned], 1)
    want = ref.shared_read(ref.shared_write(entries, KvFormat.FP8, ROTARY), KvFormat.FP8, 512, 64)
    got = ref.shared_read(pages[0, :3].cpu(), KvFormat.FP8, DIM, ROTARY)
    assert ((got - want).abs() > 1e-5).float().mean() < 0.01  # near the middle of two codes


@pytest.mark.parametrize("form", [KvFormat.FP8, KvFormat.NVFP4, KvFormat.BF16, KvFormat.F32])
def test_shared_decode__window_and_chosen_entries__as_the_twins_also_alone(form: KvFormat) -> None:
    lengths, n_held, groups = [1, 128, 640, 4000], 5000, 8
    entries = ref.shared_write(_random(n_held, DIM, seed=10), form, ROTARY)
    q, sink = 3 * _random(ROWS, HEADS, DIM, seed=11), _random(HEADS, seed=12)
    table = torch.stack([torch.randperm(n_held)[:4000] for _ in lengths]).int()
    kv = KvPages(entries[:, None].contiguous().cuda(), table.cuda(), form)
    seen = torch.tensor(lengths, dtype=torch.int32).cuda()
    frequencies, magnitude = ref.rope_frequencies(ROTARY, 1.6e5)
    cos, sin = ref.rope_tables(torch.arange(1000), frequencies, magnitude)
    at = torch.tensor([0, 7, 900, 901])
    rotation = Rotation(at.int().cuda(), cos.cuda(), sin.cuda(), interleaved=True)
    scratch = DecodeScratch.make(ROWS, HEADS, DIM, device=torch.device("cuda"))
    options: dict[str, Any] = {"eps": EPS, "scale": DIM**-0.5, "scratch": scratch}
    out, few = (torch.empty(groups, ROWS, HEADS // groups * DIM).cuda() for _ in range(2))
    alone = torch.empty(groups, 1, HEADS // groups * DIM).cuda()
    shared_decode(q.cuda(), kv, seen, sink.cuda(), out, rotation=rotation, **options)
    shared_decode(q.cuda(), kv, seen, sink.cuda(), few, rotation=rotation, splits=8, **options)
    assert relative_error(few.cpu(), out.cpu()) < 1e-5
    for t, n in enumerate(lengths):
        own = ref.shared_read(entries[table[t, :n].long()], form, DIM, ROTARY)
        mask = torch.ones(1, n, dtype=torch.bool)
        heads = _turned(ref.unit(q[t : t + 1], EPS), cos[at[t]], sin[at[t]])
        want = ref.shared_attention(heads, own, mask, sink, scale=DIM**-0.5)
        want = _turned(want.view(1, HEADS, DIM), cos[at[t]], -sin[at[t]])
        assert relative_error(out[:, t].cpu(), want.view(groups, -1)) < 1e-5
    one = KvPages(kv.pages, kv.table[1:2], form)
    here = Rotation(rotation.positions[1:2], rotation.cos, rotation.sin, interleaved=True)
    shared_decode(q[1:2].cuda(), one, seen[1:2], sink.cuda(), alone, rotation=here, **options)
    assert torch.equal(alone[:, 0], out[:, 1])


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    part = ref.rotate(x[..., -ROTARY:], cos, sin, interleaved=True)
    return torch.cat([x[..., :-ROTARY], part], -1)


@pytest.mark.parametrize("form", [KvFormat.FP8, KvFormat.BF16])
def test_score_windows__long_rows__as_the_twin(form: KvFormat) -> None:
    lengths, n_held = [1, 513, 5000], 5008
    keys = ref.pooled_key_write(_random(n_held, KEY, seed=13), form)
    pages, table = keys.view(-1, 16, keys.shape[1]), torch.arange(n_held // 16).int()
    kv = KvPages(pages.contiguous().cuda(), table.repeat(3, 1).cuda(), form)
    q = ref.index_rounded(_random(3, HEADS, KEY, seed=14))
    weights, seen = _random(3, HEADS, seed=15), torch.tensor(lengths, dtype=torch.int32)
    scores = torch.full((3, n_held), torch.nan).cuda()
    score_windows(q.cuda(), weights.cuda(), kv, seen.cuda(), scores, scale=0.01)
    own = ref.pooled_key_read(keys, form, KEY)
    want = ref.index_scores(q, own, 0.01 * weights, seen.long())
    for t, n in enumerate(lengths):
        assert relative_error(scores[t, :n].cpu(), want[t, :n]) < 1e-5


@pytest.mark.parametrize("form", [KvFormat.FP8, KvFormat.NVFP4, KvFormat.BF16, KvFormat.F32])
@pytest.mark.parametrize("sees", ["window", "all", "chosen"])
def test_run_attention__rows_of_a_prompt__as_the_twin_also_alone(form: KvFormat, sees: str) -> None:
    start, ring, window, ratio, page = 2397, 640, 128, 4, 16
    n_pooled, rows = (start + ROWS) // ratio, torch.arange(ROWS)
    entries = ref.shared_write(_random(2 * ring + 40 * page, DIM, seed=20), form, ROTARY)
    table, first = torch.randperm(40).int(), 2 * ring
    kv = KvPages(entries[:, None].contiguous().cuda(), table[None].cuda(), form)
    own = KvPages(entries[first:].view(40, page, -1).contiguous().cuda(), kv.table, form)
    pooled = None if sees == "window" else Pooled(own, ratio, 1, first)
    far = torch.arange(n_pooled).expand(ROWS, -1)
    closed, chosen = (start + rows + 1) // ratio, None
    if sees == "chosen":
        far = torch.stack([torch.randperm(n_pooled - 1)[:512].sort().values for _ in rows])
        closed = torch.full((ROWS,), 512)
        chosen = far.int().cuda(), closed.int().cuda()
    run = Run(start, ring, ring, window, pooled, 0 if pooled is None else n_pooled, chosen)
    kept = torch.float32 if form is KvFormat.F32 else torch.bfloat16
    decoded = torch.full((ring + run.n_pooled, DIM), torch.nan, dtype=kept).cuda()
    decode_seen(kv, run, decoded)
    q, sink = 2 * _random(ROWS, HEADS, DIM, seed=21), _random(HEADS, seed=22)
    high = q.bfloat16()
    parts = torch.stack([high, (q - high.float()).bfloat16()]).cuda()
    frequencies, magnitude = ref.rope_frequencies(ROTARY, 1.6e5)
    cos, sin = ref.rope_tables(torch.arange(2500), frequencies, magnitude)
    rotation = Rotation(torch.zeros(1).int().cuda(), cos.cuda(), sin.cuda(), interleaved=True)
    options: dict[str, Any] = {"rotation": rotation, "scale": DIM**-0.5, "form": form}
    out = torch.empty(2, 8, ROWS, HEADS // 8 * DIM, dtype=torch.bfloat16).cuda()
    run_attention(parts, decoded, run, sink.cuda(), out, **options)
    for t, position in enumerate(range(start, start + ROWS)):
        seen = far[t, : int(closed[t])] if pooled is not None else far[t, :0]
        lie = first + table[seen // page].long() * page + seen % page
        at = ref.seen_entries(position, lie.tolist(), first=ring, window=window, ring=ring)
        values = ref.shared_read(entries[at], form, DIM, ROTARY)
        mask = torch.ones(1, len(at), dtype=torch.bool)
        want = ref.shared_attention(q[t : t + 1], values, mask, sink, scale=DIM**-0.5)
        turned = ref.rotate(want[..., -ROTARY:], cos[position], -sin[position], interleaved=True)
        want = torch.cat([want[..., :-ROTARY], turned], -1).view(8, -1)
        assert relative_error(out[:, :, t].float().sum(0).cpu(), want) < 3e-5
    if sees != "chosen":
        later, alone = Run(start + 1, ring, ring, window, pooled, run.n_pooled), out.clone()
        alone.zero_()
        run_attention(parts[:, 1:2], decoded, later, sink.cuda(), alone, first=1, **options)
        assert torch.equal(alone[:, :, 1], out[:, :, 1])


def test_head_parts__released_sizes__near_the_twins() -> None:
    x, start = 3 * _random(ROWS, HEADS, DIM, seed=23), 900
    frequencies, magnitude = ref.rope_frequencies(ROTARY, 1.6e5)
    cos, sin = ref.rope_tables(torch.arange(1000), frequencies, magnitude)
    at = torch.arange(start, start + ROWS)
    rotation = Rotation(at.int().cuda(), cos.cuda(), sin.cuda(), interleaved=True)
    parts = torch.empty(2, ROWS, HEADS, DIM, dtype=torch.bfloat16).cuda()
    head_parts(x.cuda(), parts, rotation=rotation, eps=EPS)
    heads = ref.unit(x, EPS)
    own = cos[at][:, None], sin[at][:, None]
    turned = ref.rotate(heads[..., -ROTARY:], *own, interleaved=True)
    want = torch.cat([heads[..., :-ROTARY], turned], -1)
    assert relative_error(parts.float().sum(0).cpu(), want) < 1e-5


@pytest.mark.parametrize("form", [KvFormat.FP8, KvFormat.BF16, KvFormat.F32])
def test_score_run__rows_of_a_prompt__as_the_twin(form: KvFormat) -> None:
    lengths, n_held = torch.arange(1005, 1035).repeat_interleave(4)[:100], 1040
    keys = ref.pooled_key_write(_random(n_held, KEY, seed=24), form)
    pages, table = keys.view(-1, 16, keys.shape[1]), torch.arange(n_held // 16).int()
    kv = KvPages(pages.contiguous().cuda(), table[None].cuda(), form)
    raw, weights = _random(100, HEADS, KEY, seed=25), _random(100, HEADS, seed=26)
    q = torch.empty(raw.shape, dtype=torch.bfloat16 if rounds(form) else torch.float32).cuda()
    turns = torch.ones(1, ROTARY // 2).cuda(), torch.zeros(1, ROTARY // 2).cuda()
    rotation = Rotation(torch.zeros(100).int().cuda(), *turns, interleaved=True)
    prepare_run(raw.cuda(), q, form, rotation=rotation)
    want = ref.index_rounded(raw) if rounds(form) else raw
    assert ((q.cpu().float() - want).abs() > 1e-5).float().mean() < 1e-4  # near two codes' middle
    scores = torch.full((100, n_held), torch.nan).cuda()
    score_run(q, weights.cuda(), kv, lengths.int().cuda(), scores, scale=0.01)
    own = q.cpu().float()
    want = ref.index_scores(own, ref.pooled_key_read(keys, form, KEY), 0.01 * weights, lengths)
    for t, n in enumerate(lengths.tolist()):
        assert relative_error(scores[t, :n].cpu(), want[t, :n]) < 1e-5
