"""Times of an indexer's kernels in a decode step on a GPU, one JSON line each.

    python -m bench.kernels_indexer [query|score|choose ...] [--sweep]

Without names all parts run; --sweep tries other tiles of scores and other runs of a thread. Sizes are
DeepSeek-V4-Flash's (2,048 closed windows, 64 heads of 128, top 512) and GLM-5.2's (top 2,048 of 8,192).
Every figure is the median of CUDA-graph replays; pages rotate through several layers' worth. The
lines say how far from the twins results are. Needs a CUDA device; writes nothing.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor

from bench.timing import DEVICE, report
from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import pooled_key_bytes
from moet_desk.kernels.triton import choose, pooled_keys
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.prepare import Rotation

HEADS, D, LAYERS, WINDOWS = 64, 128, 8, 2048
FORM = KvFormat.FP8
SHAPES = [(32, 64, 4), (16, 64, 4), (32, 16, 4)]
RUNS = [8, 4, 16]


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def queries(rows: int, sweep: bool) -> None:
    del sweep
    q, angles = _random(rows, HEADS, D, seed=3).to(DEVICE), _random(4 * WINDOWS, 32, seed=1)
    at = torch.arange(rows, dtype=torch.int32, device=DEVICE) + 4 * WINDOWS - rows
    rotation = Rotation(at, angles.cos().to(DEVICE), angles.sin().to(DEVICE), interleaved=True)
    out = torch.empty_like(q, dtype=torch.bfloat16)
    run = partial(pooled_keys.prepare_queries, q, out, FORM, rotation=rotation)
    report("prepare_queries", [run], rows=rows)


def scores(rows: int, sweep: bool) -> None:
    q = ref.index_rounded(_random(rows, HEADS, D, seed=3)).bfloat16().to(DEVICE)
    weights = _random(rows, HEADS, seed=4).to(DEVICE)
    table = torch.arange(WINDOWS // 16, dtype=torch.int32, device=DEVICE).repeat(rows, 1)
    layers = []
    for layer in range(LAYERS):
        keys = ref.pooled_key_write(_random(WINDOWS, D, seed=layer), FORM)
        pages = keys.view(WINDOWS // 16, 16, pooled_key_bytes(FORM, D)).contiguous()
        layers.append(KvPages(pages.to(DEVICE), table, FORM))
    lengths = torch.full((rows,), WINDOWS, dtype=torch.int32, device=DEVICE)
    own = ref.pooled_key_read(layers[0].pages.cpu().flatten(0, 1), FORM, D)
    want = ref.index_scores(q.cpu().float(), own, 0.01 * weights.cpu(), lengths.cpu().long())
    kept = pooled_keys.HOPPER_SHAPE
    for shape in SHAPES if sweep else [kept]:
        pooled_keys.HOPPER_SHAPE = shape
        out = torch.zeros(rows, WINDOWS, device=DEVICE)
        calls = [
            partial(pooled_keys.score_windows, q, weights, kv, lengths, out, scale=0.01)
            for kv in layers
        ]
        calls[0]()
        error = ((out.cpu() - want).norm() / want.norm()).item()
        report("score_windows", calls, rows=rows, tile=str(shape), error=error)
    pooled_keys.HOPPER_SHAPE = kept


def choosing(rows: int, sweep: bool) -> None:
    kept = choose._RUN
    for top_k, n, page in ((512, WINDOWS, 16), (2048, 8192, 64)):
        table = torch.arange(n // page, dtype=torch.int32, device=DEVICE).repeat(rows, 1)
        pages = torch.zeros(n // page, page, 16, dtype=torch.uint8, device=DEVICE)
        lengths = torch.full((rows,), n, dtype=torch.int32, device=DEVICE)
        counts = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        normal = _random(rows, n, seed=5)
        ties = normal.mul(2).round()
        for kind, x in (("normal", normal), ("positive", normal.abs() / 300), ("ties", ties)):
            want = ref.choose(x, top_k).nonzero()[:, 1].view(rows, top_k).int()
            for run in RUNS if sweep else [kept]:
                choose._RUN = run
                found = torch.zeros(rows, top_k, dtype=torch.int32, device=DEVICE)
                call = partial(
                    choose.choose, x.to(DEVICE), lengths, KvPages(pages, table, FORM), found, counts
                )
                call()
                off = int((found.cpu() != want).sum())
                report("choose", [call], rows=rows, of=n, scores=kind, run=run, off=off)
    choose._RUN = kept


def main() -> None:
    parts = {"query": queries, "score": scores, "choose": choosing}
    parser = argparse.ArgumentParser(description="Times of an indexer, one JSON line each.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default all")
    parser.add_argument("--sweep", action="store_true", help="try other tiles too")
    args = parser.parse_args()
    for name in args.parts or parts:
        for rows in (1, 2):
            parts[name](rows, args.sweep)


if __name__ == "__main__":
    main()
