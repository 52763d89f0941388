"""Times of the MoE kernels on a GPU, one JSON line each.

    python -m bench.kernels_moe experts [SHAPE ...]   tiles of gate_up and down, then a whole layer
    python -m bench.kernels_moe cache                 look-up, fetch, quantisers, router, combine
    python -m bench.kernels_moe grouped               an 8k prompt through one layer's experts

Weights are random bytes; shapes are real. Each takes less than a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from bench.timing import DEVICE, per_call_us, report
from moet_desk.kernels.kinds import Activations, Score
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton.cache import GpuTables, LookupOutput, claim, lookup
from moet_desk.kernels.triton.experts import (
    ExpertPool,
    Tile,
    combine,
    experts_down,
    experts_gate_up,
    experts_hidden,
    tiles_for,
)
from moet_desk.kernels.triton.fetch import Arena, fetch
from moet_desk.kernels.triton.grouped import (
    RowAddresses,
    add_rows,
    expand,
    group_pairs,
    grouped_down,
    grouped_gate_up,
    make_batch,
)
from moet_desk.kernels.triton.quant import (
    plain_shape,
    planar_shape,
    quantize_rows,
    rms_norm_quantize,
)
from moet_desk.kernels.triton.route import route

SHAPES = {  # hidden, inner width, experts per token
    "ds4": (4096, 2048, 6),
    "glm": (6144, 2048, 8),
    "qwen3": (2048, 768, 8),
    "gpt-oss": (2880, 2880, 4),
}
GATE_UP = [Tile(*t) for t in ((4, 1), (8, 2), (8, 4), (8, 8), (16, 4), (16, 8), (32, 8), (32, 16))]
DOWN = [Tile(*t) for t in ((8, 1), (8, 2), (16, 2), (16, 4), (16, 8), (32, 4), (32, 8), (8, 8))]
POOL_BYTES = 3 << 30
"""Beyond any L2, so that weights come from memory."""


class Layers:
    """Layers of a step with distinct experts each, in one pool, and the buffers between kernels."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        n_tokens: int,
        *,
        fine: bool,
        pool_bytes: int = POOL_BYTES,
    ) -> None:
        hidden, inter, top_k = shape
        self.layout = ExpertLayout(hidden, inter)
        self.n_pairs = n_tokens * top_k
        row = self.layout.base_stride + (self.layout.fine_stride if fine else 0)
        n_slots = max(2 * self.n_pairs, pool_bytes // row)
        base = random_rows(self.layout, n_slots)
        digits = random_digits(self.layout, n_slots) if fine else None
        self.pools = list(self._steps(base, digits, n_slots, n_tokens))
        x = torch.randn(n_tokens, hidden, device=DEVICE)
        kind = Activations.INT15 if fine else Activations.INT8
        self.codes = empty_planar(n_tokens, hidden, kind)
        self.scales = torch.empty(n_tokens, hidden // 32, device=DEVICE)
        quantize_rows(x, self.codes, self.scales)
        self.x, self.weights = x, torch.rand(n_tokens, top_k, device=DEVICE)
        self.hidden = torch.empty(self.n_pairs, inter, device=DEVICE)
        self.out_codes = empty_planar(self.n_pairs, inter, kind).zero_()
        self.out_scales = torch.ones(self.n_pairs, inter // 32, device=DEVICE)
        self.part = torch.empty(self.n_pairs, hidden, device=DEVICE)

    def _steps(
        self, base: Tensor, digits: Tensor | None, n_slots: int, n_tokens: int
    ) -> Iterator[ExpertPool]:
        order = torch.randperm(n_slots, device=DEVICE).int()
        top_k = self.n_pairs // n_tokens
        pair = torch.full((self.n_pairs, n_tokens), -1, dtype=torch.int32, device=DEVICE)
        index = torch.arange(self.n_pairs, device=DEVICE)
        pair[index, index // top_k] = index.int()
        for at in range(0, min(n_slots, 12 * self.n_pairs) - self.n_pairs + 1, self.n_pairs):
            slots = order[at : at + self.n_pairs].clone()
            yield ExpertPool(
                self.layout, base, slots, pair, digits, slots if digits is not None else None
            )

    def gate_up(self, tile: Tile) -> list[Callable[[], None]]:
        return [
            lambda pool=pool: experts_gate_up(  # type: ignore[misc]
                pool, self.codes, self.scales, out=self.hidden, tile=tile
            )
            for pool in self.pools
        ]

    def hidden_codes(self, tile: Tile) -> list[Callable[[], None]]:
        return [
            lambda pool=pool: experts_hidden(  # type: ignore[misc]
                pool, self.codes, self.scales, scratch=self.hidden,
                out_codes=self.out_codes, out_scales=self.out_scales, tile=tile,
            )
            for pool in self.pools
        ]  # fmt: skip

    def down(self, tile: Tile) -> list[Callable[[], None]]:
        return [
            lambda pool=pool: experts_down(  # type: ignore[misc]
                pool, self.out_codes, self.out_scales, part=self.part, tile=tile
            )
            for pool in self.pools
        ]

    def whole(self, gate_up: Tile, down: Tile) -> list[Callable[[], None]]:
        def layer(first: Callable[[], None], second: Callable[[], None]) -> None:
            quantize_rows(self.x, self.codes, self.scales)
            first()
            second()
            combine(self.part, self.weights, base=None, residual=self.x, out=self.x)

        pairs = zip(self.hidden_codes(gate_up), self.down(down), strict=True)
        return [lambda a=a, b=b: layer(a, b) for a, b in pairs]  # type: ignore[misc]


def empty_planar(n_rows: int, width: int, kind: Activations) -> Tensor:
    return torch.empty(n_rows, *planar_shape(width, kind), dtype=torch.int32, device=DEVICE)


def plain_codes(x: Tensor, kind: Activations) -> tuple[Tensor, Tensor]:
    n_rows, width = x.shape
    codes = torch.empty(n_rows, *plain_shape(width, kind), dtype=torch.int8, device=DEVICE)
    scales = torch.empty(n_rows, width // 32, device=DEVICE)
    quantize_rows(x, codes, scales)
    return codes, scales


def random_rows(layout: ExpertLayout, n_rows: int) -> Tensor:
    """Base rows of random codes with scales around 2**-6."""
    rows = torch.randint(
        -(2**31), 2**31, (n_rows, layout.base_stride // 4), dtype=torch.int32, device=DEVICE
    ).view(torch.uint8)
    at = 0
    for matrix in (layout.gate_up, layout.down):
        begin, end = at + 8 * matrix.n * matrix.groups, at + matrix.base_bytes
        rows[:, begin:end] = rows[:, begin:end] % 6 + 118
        at = end
    return rows


def random_digits(layout: ExpertLayout, n_rows: int) -> Tensor:
    """Fine rows whose digits are all 0, 1 or 2, which any base code allows."""
    word = 1 + 5 * 2 + 25 * 0 + 125 * 1
    record = sum(word << (10 * j) for j in range(8))
    rows = torch.empty(n_rows, layout.fine_stride, dtype=torch.uint8, device=DEVICE)
    at = 0
    for matrix in (layout.gate_up, layout.down):
        blocks = matrix.n * matrix.groups
        for i, width in enumerate((4, 4, 2)):
            part = (record >> (32 * i)) & ((1 << (8 * width)) - 1)
            pattern = torch.tensor(list(part.to_bytes(width, "little")), dtype=torch.uint8)
            rows[:, at : at + width * blocks] = pattern.to(DEVICE).repeat(blocks)
            at += width * blocks
    return rows


def experts(names: list[str]) -> None:
    for name in names or ["ds4"]:
        for fine in (False, True):
            for n_tokens in (1, 3):
                experts_of(name, n_tokens, fine=fine)


def experts_of(name: str, n_tokens: int, *, fine: bool) -> None:
    layers = Layers(SHAPES[name], n_tokens, fine=fine)
    layout, facts = layers.layout, {"shape": name, "tokens": n_tokens, "fine": fine}
    sizes = [
        matrix.base_bytes + (matrix.fine_bytes if fine else 0)
        for matrix in (layout.gate_up, layout.down)
    ]
    best: list[tuple[float, Tile]] = []
    for kernel, make, tiles, size in (
        ("experts_hidden", layers.hidden_codes, GATE_UP, sizes[0]),
        ("experts_down", layers.down, DOWN, sizes[1]),
    ):
        found = []
        for tile in tiles:
            us = per_call_us(make(tile), repeats=5)
            found.append((us, tile))
            if kernel == "experts_hidden" and tile == tiles_for(layout, fine=fine).gate_up:
                report(
                    "experts_gate_up", layers.gate_up(tile), moved=layers.n_pairs * size, **facts
                )
        found.sort(key=lambda entry: entry[0])
        best.append(found[0])
        report(
            kernel, make(found[0][1]), moved=layers.n_pairs * size, tile=str(found[0][1]),
            others=[(round(us, 1), f"{t.rows}x{t.warps}") for us, t in found[1:]], **facts,
        )  # fmt: skip
    report(
        "experts of a layer", layers.whole(best[0][1], best[1][1]),
        moved=layers.n_pairs * sum(sizes), **facts,
    )  # fmt: skip


def cache() -> None:
    layout = ExpertLayout(4096, 2048)
    for n_tokens, top_k in ((1, 6), (1, 8), (3, 6), (8, 8)):
        tables = GpuTables.empty(43, 256, 2000, device=DEVICE)
        claim(tables, range(43 * 256))
        ids = torch.randperm(40, device=DEVICE)[:top_k].int().repeat(n_tokens, 1)
        out = LookupOutput.empty(n_tokens, top_k, device=DEVICE)
        hits = [lambda i=i: lookup(ids, tables, layer=i, out=out) for i in range(7)]
        report("lookup, all hit", hits, tokens=n_tokens, top_k=top_k)
    small = GpuTables.empty(43, 256, 8, device=DEVICE)
    turn = [torch.randperm(256, device=DEVICE)[:6].int().view(1, 6) for _ in range(43)]
    out = LookupOutput.empty(1, 6, device=DEVICE)
    missing = [
        lambda i=i: lookup(turn[i], small, layer=i, out=out, ends_step=i == 42) for i in range(43)
    ]
    report("lookup, mostly missing", missing, tokens=1, top_k=6)

    n_places = 64
    memory = torch.zeros(n_places * layout.base_stride, dtype=torch.uint8).pin_memory()
    places = torch.arange(n_places, dtype=torch.int32, device=DEVICE)
    arena = Arena(memory.data_ptr(), places, layout.base_stride)
    pool = torch.empty(n_places, layout.base_stride, dtype=torch.uint8, device=DEVICE)
    for n_rows in (0, 1, 4):
        miss_n = torch.tensor([n_rows], dtype=torch.int32, device=DEVICE)
        for programs in (66, 132, 264):
            copies = [
                lambda at=at: fetch(
                    pool, arena, miss_n, miss_row=places[at : at + 8],
                    miss_slot=places[at : at + 8], programs=programs,
                )
                for at in range(0, 56, 8)
            ]  # fmt: skip
            report(
                "fetch", copies, moved=n_rows * layout.base_stride, rows=n_rows, programs=programs
            )

    for n_tokens, kind in product((1, 3), Activations):
        x, weight = torch.randn(n_tokens, 4096, device=DEVICE), torch.ones(4096, device=DEVICE)
        facts = {"tokens": n_tokens, "activations": kind.name}
        codes = empty_planar(n_tokens, 4096, kind)
        scales, normed = torch.empty(n_tokens, 128, device=DEVICE), torch.empty_like(x)
        report("quantize_rows", [lambda: quantize_rows(x, codes, scales)], **facts)
        report(
            "rms_norm_quantize",
            [lambda: rms_norm_quantize(x, weight, 1e-6, out=normed, codes=codes, scales=scales)],
            **facts,
        )

    for n_tokens in (1, 3):
        logits, bias = torch.randn(n_tokens, 256, device=DEVICE), torch.zeros(256, device=DEVICE)
        ids = torch.empty(n_tokens, 6, dtype=torch.int32, device=DEVICE)
        chosen = torch.empty(n_tokens, 6, device=DEVICE)
        for score, groups in ((Score.SQRT_SOFTPLUS, 1), (Score.SIGMOID, 8), (Score.SOFTMAX, 1)):
            run = lambda: route(  # noqa: E731
                logits, bias, ids=ids, weights=chosen, score=score, n_groups=groups,
                kept_groups=max(1, groups // 2), renormalize=True, scale=1.5,
            )  # fmt: skip
            report("route", [run], tokens=n_tokens, score=score.value, groups=groups)


def grouped() -> None:
    layout, n_experts, n_tokens, top_k = ExpertLayout(4096, 2048), 256, 8192, 6
    for fine in (False, True):
        base = random_rows(layout, n_experts)
        digits = random_digits(layout, n_experts) if fine else None

        def addresses(rows: Tensor) -> Tensor:
            first, stride = rows.data_ptr(), rows.stride(0)
            return torch.tensor([first + i * stride for i in range(n_experts)], device=DEVICE)

        rows = RowAddresses(layout, addresses(base), None if digits is None else addresses(digits))
        ids = torch.rand(n_tokens, n_experts, device=DEVICE).topk(top_k).indices.sort(-1).values
        groups = group_pairs(ids, n_experts)
        counts = groups.counts.tolist()
        x = torch.randn(n_tokens, 4096, device=DEVICE)
        weights = torch.rand(n_tokens, top_k, device=DEVICE)
        kinds = (Activations.INT8, Activations.INT15) if fine else (Activations.INT8,)
        for size, kind in product((8, 32), kinds):
            grouped_batch(
                rows, make_batch(counts, range(size), device=DEVICE), groups,
                weights, x, share=size / n_experts, fine=fine, kind=kind,
            )  # fmt: skip


def grouped_batch(rows, batch, groups, weights, x, *, share, fine, kind) -> None:  # type: ignore[no-untyped-def]
    layout = rows.layout
    workspace = torch.empty(len(batch.experts), layout.slot_floats, dtype=torch.int8, device=DEVICE)
    mid = torch.empty(batch.n_rows, layout.inter, device=DEVICE)
    codes, scales = plain_codes(x, kind)
    mid_codes, mid_scales = plain_codes(mid.zero_(), kind)
    part = torch.empty(batch.n_rows, layout.hidden, device=DEVICE)
    out = torch.zeros_like(x)
    facts = {
        "experts": len(batch.experts),
        "rows": batch.n_rows,
        "fine": fine,
        "activations": kind.name,
        "pairs": batch.pairs,
    }
    work = 2 * batch.n_rows * layout.hidden * layout.inter
    steps: list[tuple[str, Callable[[], None], int | None]] = [
        ("expand", lambda: expand(rows, batch, workspace), None),
        (
            "grouped_gate_up",
            lambda: grouped_gate_up(
                rows, batch, workspace, groups=groups, codes=codes, scales=scales, out=mid
            ),
            2 * work,
        ),
        ("quantize_rows", lambda: quantize_rows(mid, mid_codes, mid_scales), None),
        (
            "grouped_down",
            lambda: grouped_down(
                rows, batch, workspace, codes=mid_codes, scales=mid_scales, out=part
            ),
            work,
        ),
        ("add_rows", lambda: add_rows(part, batch, groups, weights=weights, out=out), None),
    ]
    total = sum(report(name, [run], flops=flops, **facts) for name, run, flops in steps)
    print(
        f'{{"kernel": "experts of an 8k prompt, 43 layers", "fine": {str(fine).lower()}, '
        f'"activations": "{kind.name}", "batch": {len(batch.experts)}, "seconds": {total / share * 43 / 1e6:.3f}}}',
        flush=True,
    )


def main(arguments: list[str]) -> None:
    torch.manual_seed(0)
    what, names = arguments[0], arguments[1:]
    if what == "experts":
        experts(names)
    else:
        {"cache": cache, "grouped": grouped}[what]()


if __name__ == "__main__":
    main(sys.argv[1:])
