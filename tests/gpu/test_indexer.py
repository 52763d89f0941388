"""An indexer's kernels on a card, at GLM-5.2's shapes: against the twins, and in a graph."""

from __future__ import annotations

import pytest
import torch

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.choose import choose
from moet_desk.kernels.triton.indexer import index_scores
from moet_desk.kernels.triton.kv_entries import KvPages
from tests.gpu.test_attention import on_gpu
from tests.kernels.triton.makers import paged, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS, D, TOP_K = 32, 128, 2048


@pytest.mark.parametrize("form", [KvFormat.FP8, KvFormat.BF16, KvFormat.F32])
def test_scores_and_choice__long_rows__as_the_twins_also_in_a_graph(form: KvFormat) -> None:
    lengths = [1, 2048, 2049, 9000]
    stored = [ref.index_write(torch.randn(n, D), form) for n in lengths]
    kv = on_gpu(paged(stored, 64, form))
    q, weights = torch.randn(4, HEADS, D).cuda(), torch.randn(4, HEADS).cuda()
    seen = torch.tensor(lengths, dtype=torch.int32).cuda()
    scores = torch.full((4, 16384), torch.nan).cuda()
    chosen = torch.zeros((4, TOP_K), dtype=torch.int32).cuda()
    counts = torch.zeros(4, dtype=torch.int32).cuda()

    def launch() -> None:
        index_scores(q, weights, kv, seen, scores, scale=0.015625)
        choose(scores, seen, kv, chosen, counts)

    launch()
    eager = scores.clone(), chosen.clone(), counts.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    chosen.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(chosen, eager[1])
    assert counts.tolist() == eager[2].tolist() == [1, 2048, 2048, 2048]
    named, again = torch.zeros_like(chosen), torch.zeros_like(counts)
    choose(scores, seen, None, named, again)  # as a prompt does
    assert torch.equal(again, counts)
    for t, n in enumerate(lengths):
        here = slice(t, t + 1)
        keys = ref.index_read(stored[t], form, D)
        want = ref.index_scores(
            q[here].cpu(), keys, 0.015625 * weights[here].cpu(), torch.tensor([n])
        )
        assert relative_error(scores[t, :n].cpu(), want[0]) < 1e-5
        # of the very same scores the choice is the same to the last tie
        mask = ref.choose(scores[here, :n].cpu(), TOP_K)[0]
        places, table = mask.nonzero()[:, 0], kv.table[t].cpu()
        assert torch.equal(
            chosen[t, : int(counts[t])].cpu(), (table[places // 64] * 64 + places % 64).int()
        )
        assert torch.equal(named[t, : int(counts[t])].cpu(), places.int())
        one = KvPages(kv.pages, kv.table[here], form)
        alone = torch.empty(1, n).cuda()
        index_scores(q[here], weights[here], one, seen[here], alone, scale=0.015625)
        assert torch.equal(alone[0], scores[t, :n])
