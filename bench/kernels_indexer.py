"""Times of an indexer's kernels in a decode step on a GPU, one JSON line each.

    python -m bench.kernels_indexer [query|score|choose|all ...]

Sizes are DeepSeek-V4-Flash's (2,048 closed windows, 64 heads of 128, top 512) and GLM-5.2's (top 2,048
of 8,192). Every figure is the median of CUDA-graph replays, of pages of several layers. Results are
compared with the twins, or bit for bit. Needs a CUDA device; writes nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bench import old_choose, old_pooled_keys
from bench.timing import DEVICE, report
from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import pooled_key_bytes
from moet_desk.kernels.triton import choose, pooled_keys
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.prepare import Rotation
from moet_desk.kernels.triton.seen import Places, Pooled, find_places

HEADS, D, LAYERS, WINDOWS, TOP_K, WINDOW, RING = 64, 128, 8, 2048, 512, 128, 640
FORM = KvFormat.FP8


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotation_of(rows: int) -> Rotation:
    angles = random(4 * WINDOWS + rows, 32, seed=1)
    at = torch.arange(4 * WINDOWS - 1, 4 * WINDOWS - 1 + rows, dtype=torch.int32)
    return Rotation(at.to(DEVICE), angles.cos().to(DEVICE), angles.sin().to(DEVICE), True)


def key_pages(rows: int) -> list[KvPages]:
    """Of some layers."""
    made = []
    for layer in range(LAYERS):
        keys = ref.pooled_key_write(random(WINDOWS, D, seed=layer), FORM)
        table = torch.arange(WINDOWS // 16, dtype=torch.int32).repeat(rows, 1)
        pages = keys.view(WINDOWS // 16, 16, pooled_key_bytes(FORM, D))
        made.append(KvPages(pages.contiguous().to(DEVICE), table.to(DEVICE), FORM))
    return made


def queries(rows: int) -> None:
    q, rotation = random(rows, HEADS, D, seed=3).to(DEVICE), rotation_of(rows)
    old, new = torch.empty_like(q), torch.empty_like(q, dtype=torch.bfloat16)
    old_pooled_keys.prepare_queries(q, old, FORM, rotation=rotation)
    run = partial(pooled_keys.prepare_queries, q, new, FORM, rotation=rotation)
    report(
        "query", [partial(old_pooled_keys.prepare_queries, q, old, FORM, rotation=rotation)],
        rows=rows, way="old",
    )  # fmt: skip
    kept = pooled_keys.QUERY_WARPS
    for warps in (1, 2, 4):
        pooled_keys.QUERY_WARPS = warps
        run()
        off = int((old != new.float()).sum())
        report("query", [run], rows=rows, way=f"new warps={warps}", off=off)
    pooled_keys.QUERY_WARPS = kept


def scores(rows: int) -> None:
    q = ref.index_rounded(random(rows, HEADS, D, seed=3)).to(DEVICE)
    weights, layers = random(rows, HEADS, seed=4).to(DEVICE), key_pages(rows)
    lengths = torch.full((rows,), WINDOWS, dtype=torch.int32, device=DEVICE)
    own = ref.pooled_key_read(layers[0].pages.cpu().flatten(0, 1), FORM, D)
    want = ref.index_scores(q.cpu(), own, 0.01 * weights.cpu(), torch.full((rows,), WINDOWS))

    def measure(way: str, score: Callable[..., None], x: Tensor) -> None:
        out = torch.zeros(rows, WINDOWS, device=DEVICE)
        calls = [partial(score, x, weights, kv, lengths, out, scale=0.01) for kv in layers]
        calls[0]()
        error = float(((out.cpu() - want).norm() / want.norm()).item())
        alone = torch.zeros(1, WINDOWS, device=DEVICE)
        one = KvPages(layers[0].pages, layers[0].table[-1:], FORM)
        score(x[-1:], weights[-1:], one, lengths[-1:], alone, scale=0.01)
        same = bool(torch.equal(alone[0], out[-1]))
        report("score", calls, rows=rows, way=way, error=error, alone=same)

    measure("old", old_pooled_keys.score_windows, q)
    kept = pooled_keys.HOPPER_SHAPE
    for shape in [kept, (32, 64, 4), (32, 16, 4)]:
        pooled_keys.HOPPER_SHAPE = shape
        measure(f"new {shape}", pooled_keys.score_windows, q.bfloat16())
    pooled_keys.HOPPER_SHAPE = kept


def choosing(ways: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Ways to choose, in force while they are the newest."""
    for pairs, run in ways:
        choose._PAIRS, choose._RUN = pairs, run
        yield f"new pairs={pairs} run={run}"
    choose._PAIRS, choose._RUN = 2, 16


def some_scores(kind: str, rows: int, n: int) -> Tensor:
    x = random(rows, n, seed=5)
    if kind == "ties":
        x = x.mul(2).round()
        x[:, ::7], x[:, 11::13], x[:, ::5] = -torch.inf, torch.nan, -0.0
    if kind == "positive":
        x = x.abs() * 3e-3
    return x.to(DEVICE)


def v4_choice(rows: int) -> None:
    positions = torch.full((rows,), 4 * WINDOWS - 1, dtype=torch.int32, device=DEVICE)
    places = Places.make(rows, DEVICE)
    runs = torch.zeros(rows, 4, dtype=torch.int32, device=DEVICE)
    find_places(runs, positions, places, ring=RING, ratio=4)
    table = torch.arange(WINDOWS // 16, dtype=torch.int32, device=DEVICE).repeat(rows, 1)
    pages = torch.zeros(WINDOWS // 16, 16, 584, dtype=torch.uint8, device=DEVICE)
    pooled = Pooled(KvPages(pages, table, FORM), 4, 1, RING)

    def listed(module: object, x: Tensor) -> tuple[Callable[[], None], Tensor, Tensor]:
        found = torch.zeros(rows, WINDOW + TOP_K, dtype=torch.int32, device=DEVICE)
        n = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        run = partial(
            module.list_chosen,
            x,
            places,
            pooled,
            found,
            n,
            top_k=TOP_K,
            window=WINDOW,
            ring=RING,  # type: ignore[attr-defined]
        )
        run()
        return run, found, n

    kinds = {kind: some_scores(kind, rows, WINDOWS) for kind in ("normal", "positive", "ties")}
    wanted = {kind: listed(old_choose, x) for kind, x in kinds.items()}
    for kind, (run, _, _) in wanted.items():
        report("choose", [run], rows=rows, scores=kind, way="old")
    for way in choosing(((2, 16), (1, 16), (4, 16), (2, 8))):
        for kind, x in kinds.items():
            run, found, n = listed(choose, x)
            _, want, count = wanted[kind]
            same = bool(torch.equal(found, want) and torch.equal(n, count))
            if kind != "ties" or not same:
                report("choose", [run], rows=rows, scores=kind, way=way, same=same)


def glm_choice(rows: int) -> None:
    n, top_k = 8192, 2048
    table = torch.arange(n // 64, dtype=torch.int32, device=DEVICE).repeat(rows, 1)
    pages = torch.zeros(n // 64, 64, 16, dtype=torch.uint8, device=DEVICE)
    kv, lengths = KvPages(pages, table, FORM), torch.full((rows,), n, device=DEVICE).int()
    x = some_scores("normal", rows, n)

    def chosen(module: object) -> tuple[Callable[[], None], Tensor]:
        found = torch.zeros(rows, top_k, dtype=torch.int32, device=DEVICE)
        counts = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        run = partial(module.choose, x, lengths, kv, found, counts)  # type: ignore[attr-defined]
        run()
        return run, found

    run, want = chosen(old_choose)
    report("choose", [run], rows=rows, scores="2048 of 8192", way="old")
    for way in choosing(((2, 16), (2, 32), (1, 32))):
        run, found = chosen(choose)
        same = bool(torch.equal(found, want))
        report("choose", [run], rows=rows, scores="2048 of 8192", way=way, same=same)


def together(rows: int) -> None:
    """The three launches of a layer in turn."""
    q, rotation = random(rows, HEADS, D, seed=3).to(DEVICE), rotation_of(rows)
    weights, layers = random(rows, HEADS, seed=4).to(DEVICE), key_pages(rows)
    places = Places.make(rows, DEVICE)
    runs = torch.zeros(rows, 4, dtype=torch.int32, device=DEVICE)
    find_places(runs, rotation.positions, places, ring=RING, ratio=4)
    places.closed.clamp_(max=WINDOWS)
    entries = torch.zeros(WINDOWS // 16, 16, 584, dtype=torch.uint8, device=DEVICE)
    out = torch.zeros(rows, WINDOWS, device=DEVICE)
    found = torch.zeros(rows, WINDOW + TOP_K, dtype=torch.int32, device=DEVICE)
    n = torch.zeros(rows, dtype=torch.int32, device=DEVICE)

    def layer(keys: object, chooser: object, room: Tensor, kv: KvPages) -> None:
        keys.prepare_queries(q, room, FORM, rotation=rotation)  # type: ignore[attr-defined]
        keys.score_windows(room, weights, kv, places.closed, out, scale=0.01)  # type: ignore[attr-defined]
        pooled = Pooled(KvPages(entries, kv.table, FORM), 4, 1, RING)
        chooser.list_chosen(  # type: ignore[attr-defined]
            out, places, pooled, found, n, top_k=TOP_K, window=WINDOW, ring=RING
        )

    old = partial(layer, old_pooled_keys, old_choose, torch.empty_like(q))
    new = partial(layer, pooled_keys, choose, torch.empty_like(q, dtype=torch.bfloat16))
    for way, run in (("old", old), ("new", new)):
        report("all three", [partial(run, kv) for kv in layers], rows=rows, way=way)


def main() -> None:
    parts: dict[str, Callable[[int], None]] = {
        "all": together, "score": scores, "choose": v4_choice, "query": queries, "glm": glm_choice,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description="Times of an indexer, one JSON line each.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default all parts")
    args = parser.parse_args()
    for name in args.parts or parts:
        for rows in (1, 2) if name in ("all", "score", "choose") else (1,):
            parts[name](rows)


if __name__ == "__main__":
    main()
