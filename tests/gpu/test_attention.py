"""Attention on a GPU against float64, at the shapes of the models we name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.attention import gqa_decode, mla_decode
from moet_desk.kernels.triton.attention_parts import DecodeScratch
from moet_desk.kernels.triton.dense_weight import WeightKind
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.prefill_attention import PrefillScratch, gqa_prefill, mla_prefill
from tests.kernels.triton.makers import latent_halves, latent_weight, paged, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda")
LENGTHS = [1, 63, 64, 65, 1000, 4097, 129, 2]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


def on_gpu(kv: KvPages) -> KvPages:
    return KvPages(kv.pages.to(GPU), kv.table.to(GPU), kv.form)


def invariant(run: Callable[[slice], Tensor], rows: int) -> Tensor:
    """Results of all rows; each alone and every pair must have the same bits."""
    whole = run(slice(0, rows))
    for first in range(rows):
        assert torch.equal(run(slice(first, first + 1))[0], whole[first]), f"row {first}"
    for first in range(rows - 1):
        assert torch.equal(run(slice(first, first + 2)), whole[first : first + 2])
    return whole


@pytest.mark.parametrize(
    ("form", "heads", "r", "dr"),
    [
        (KvFormat.NVFP4, 64, 512, 64),
        (KvFormat.NVFP4, 128, 512, 64),
        (KvFormat.FP8, 64, 512, 64),
        (KvFormat.BF16, 64, 512, 64),
        (KvFormat.F32, 8, 128, 32),
        (KvFormat.NVFP4, 8, 128, 32),
    ],
)
def test_mla_decode__rows_of_all_lengths__near_float64_and_each_row_alone(
    form: KvFormat, heads: int, r: int, dr: int
) -> None:
    entries = [ref.mla_write(torch.randn(n, r), torch.randn(n, dr), form) for n in LENGTHS]
    kv = on_gpu(paged(entries, 64, form))
    rows = len(LENGTHS)
    q, q_rope = torch.randn(rows, heads, r, device=GPU), torch.randn(rows, heads, dr, device=GPU)
    seen = torch.tensor(LENGTHS, dtype=torch.int32, device=GPU)
    scratch = DecodeScratch.make(rows, heads, r, device=GPU)
    scale = (r + dr) ** -0.5

    def run(part: slice) -> Tensor:
        scratch.sums.fill_(torch.nan)
        scratch.stats.fill_(torch.nan)
        out = torch.empty_like(q[part])
        # Copies, so that every call has aligned tensors and runs the same variant.
        pages, length = KvPages(kv.pages, kv.table[part].clone(), form), seen[part].clone()
        mla_decode(q[part], q_rope[part], pages, length, out, scale=scale, scratch=scratch)
        return out

    out = invariant(run, rows)
    for t in range(rows):
        latent, k = (x.to(GPU).double() for x in ref.mla_read(entries[t], form, r, dr))
        scores = (q[t].double() @ latent.T + q_rope[t].double() @ k.T) * scale
        assert relative_error(out[t], scores.softmax(-1) @ latent) < 1e-5, LENGTHS[t]


@pytest.mark.parametrize("form", list(KvFormat))
@pytest.mark.parametrize(
    ("heads", "keys", "d", "window", "with_sink"),
    [(32, 4, 128, None, False), (64, 8, 64, 128, True), (4, 2, 16, None, False)],
)
def test_gqa_decode__large_and_smallest_heads__as_the_twin(
    form: KvFormat, heads: int, keys: int, d: int, window: int | None, with_sink: bool
) -> None:
    lengths = LENGTHS[:6]
    entries = [
        ref.gqa_write(torch.randn(n, keys, d), torch.randn(n, keys, d), form) for n in lengths
    ]
    kv = on_gpu(paged(entries, 64, form))
    rows = len(lengths)
    q = torch.randn(rows, heads, d, device=GPU)
    sink = torch.randn(heads, device=GPU) if with_sink else None
    seen = torch.tensor(lengths, dtype=torch.int32, device=GPU)
    scratch = DecodeScratch.make(rows, heads, d, device=GPU)

    def run(part: slice) -> Tensor:
        out = torch.empty_like(q[part])
        pages = KvPages(kv.pages, kv.table[part].clone(), form)
        gqa_decode(
            q[part], pages, seen[part].clone(), out,
            n_keys=keys, scale=d**-0.5, scratch=scratch, window=window, sink=sink,
        )  # fmt: skip
        return out

    out = invariant(run, rows)
    for t, length in enumerate(lengths):
        k, v = (x.to(GPU).double() for x in ref.gqa_read(entries[t], form, keys, d, d))
        want = ref.gqa(
            q[t : t + 1].double(), k, v, scale=d**-0.5, start=length - 1, window=window,
            sink=None if sink is None else sink.double(),
        )  # fmt: skip
        assert relative_error(out[t].flatten(), want[0]) < 1e-5, length


def test_decode__captured_in_a_graph__follows_lengths_and_pages() -> None:
    heads, r, dr, form = 16, 128, 32, KvFormat.NVFP4
    entries = [ref.mla_write(torch.randn(n, r), torch.randn(n, dr), form) for n in (500, 70)]
    kv = on_gpu(paged(entries, 64, form))
    q, q_rope = torch.randn(1, heads, r, device=GPU), torch.randn(1, heads, dr, device=GPU)
    scratch = DecodeScratch.make(1, heads, r, device=GPU)
    table, seen = kv.table[:1].clone(), torch.tensor([500], dtype=torch.int32, device=GPU)
    pages, out = KvPages(kv.pages, table, form), torch.empty(1, heads, r, device=GPU)

    def step() -> None:
        mla_decode(q, q_rope, pages, seen, out, scale=0.1, scratch=scratch)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for row, length in ((0, 500), (1, 70), (0, 499)):
        table.copy_(kv.table[row : row + 1])
        seen.fill_(length)
        graph.replay()
        replayed = out.clone()
        step()
        assert torch.equal(out, replayed)
        latent, k = (x.to(GPU).double() for x in ref.mla_read(entries[row], form, r, dr))
        scores = q[0].double() @ latent[:length].T + q_rope[0].double() @ k[:length].T
        assert relative_error(out[0], (scores * 0.1).softmax(-1) @ latent[:length]) < 1e-5


@pytest.mark.parametrize(
    ("form", "kind", "heads", "dn", "dv", "r", "dr"),
    [
        (KvFormat.NVFP4, WeightKind.FP8, 16, 128, 128, 512, 64),
        (KvFormat.FP8, WeightKind.BF16, 16, 192, 256, 512, 64),
        (KvFormat.F32, WeightKind.BF16, 8, 32, 64, 128, 32),
    ],
)
@pytest.mark.parametrize(("count", "start"), [(300, 0), (129, 700)])
def test_mla_prefill__chunks__as_the_twin(
    form: KvFormat,
    kind: WeightKind,
    heads: int,
    dn: int,
    dv: int,
    r: int,
    dr: int,
    count: int,
    start: int,
) -> None:
    up = latent_weight(kind, heads, dn, dv, r, device="cuda")
    seen = start + count
    entries = ref.mla_write(torch.randn(seen, r), torch.randn(seen, dr), form)
    kv = on_gpu(paged([entries], 64, form))
    q = torch.randn(count, heads, dn + dr, device=GPU)
    q_rope, out = q[..., dn:].contiguous(), torch.empty(count, heads * dv, device=GPU)
    scale = (dn + dr) ** -0.5
    latent, k = (x.to(GPU).double() for x in ref.mla_read(entries, form, r, dr))
    want = ref.mla_plain(
        q[..., :dn].double(), q_rope.double(), latent, k, *latent_halves(up),
        scale=scale, start=start,
    )  # fmt: skip
    for per_entry in (heads, heads // 4):
        room = per_entry * (dn + dv)
        scratch = PrefillScratch.make(seen, r, dr, per_entry=room, device=GPU)
        mla_prefill(q[..., :dn], q_rope, kv, up, out, start=start, scale=scale, scratch=scratch)
        assert relative_error(out, want) < 3e-5


@pytest.mark.parametrize("form", list(KvFormat))
@pytest.mark.parametrize(
    ("heads", "keys", "d", "window", "with_sink"),
    [(32, 4, 128, None, False), (64, 8, 64, 128, True), (4, 2, 16, None, False)],
)
def test_gqa_prefill__chunks__as_the_twin(
    form: KvFormat, heads: int, keys: int, d: int, window: int | None, with_sink: bool
) -> None:
    count, start = 200, 333
    entries = ref.gqa_write(
        torch.randn(start + count, keys, d), torch.randn(start + count, keys, d), form
    )
    q, out = torch.randn(count, heads, d, device=GPU), torch.empty(count, heads, d, device=GPU)
    sink = torch.randn(heads, device=GPU) if with_sink else None
    kv = on_gpu(paged([entries], 64, form))
    gqa_prefill(q, kv, out, n_keys=keys, start=start, scale=d**-0.5, window=window, sink=sink)
    k, v = (x.to(GPU).double() for x in ref.gqa_read(entries, form, keys, d, d))
    want = ref.gqa(
        q.double(), k, v, scale=d**-0.5, start=start, window=window,
        sink=None if sink is None else sink.double(),
    )  # fmt: skip
    assert relative_error(out.flatten(1), want) < 3e-5
