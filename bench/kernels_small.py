"""Times of small kernels of a step that share a launch, and alone.

    python -m bench.kernels_small

One JSON line per variant: `us` back to back in a graph, `cold_us` as the profiler sees the kernel
alone between others that take the caches. `same` says whether results equal the first way's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.timing import DEVICE, captured, per_call_us, replayed_us
from moet_desk.engine.cuda.kernel_groups import kernel_runs
from moet_desk.kernels.kinds import Score
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton.cache import GpuTables, LookupOutput, claim, lookup
from moet_desk.kernels.triton.dense import NormOf, gemv
from moet_desk.kernels.triton.dense_weight import DenseWeight
from moet_desk.kernels.triton.fetch import Arena, fetch
from moet_desk.kernels.triton.norms import rms_norm
from moet_desk.kernels.triton.route import route
from moet_desk.kernels.triton.routed_lookup import Routing, route_and_look_up

LAYERS, EXPERTS, TOP_K = 43, 256, 6
_REPEATS = 7


def line(kernel: str, **facts: Any) -> None:
    print(json.dumps({"kernel": kernel, **facts}), flush=True)


class Rows:
    """Rows in pinned memory, and slots for some."""

    def __init__(self, n_slots: int) -> None:
        layout, n_places = ExpertLayout(4096, 2048), 8
        self.memory = torch.empty(n_places * layout.base_stride, dtype=torch.uint8)
        self.memory.view(torch.int32).copy_(torch.arange(self.memory.numel() // 4).int())
        self.memory = self.memory.pin_memory()
        place = torch.arange(LAYERS * EXPERTS, dtype=torch.int32, device=DEVICE) % n_places
        self.arena = Arena(self.memory.data_ptr(), place, layout.base_stride)
        self.slots = torch.zeros(n_slots, layout.base_stride, dtype=torch.uint8, device=DEVICE)


class Lookups:
    """Look-ups of all layers of a step from the same beginning, so that two ways can be compared."""

    def __init__(self, n_tokens: int, n_slots: int, way: str, rows: Rows) -> None:
        drawn = torch.Generator().manual_seed(7)
        self.n_tokens, self.way, self.rows = n_tokens, way, rows
        self.logits = torch.randn(LAYERS, n_tokens, EXPERTS, generator=drawn).to(DEVICE)
        self.bias = (torch.randn(LAYERS, EXPERTS, generator=drawn) * 0.1).to(DEVICE)
        self.tables = GpuTables.empty(LAYERS, EXPERTS, n_slots, device=DEVICE)
        if n_slots >= LAYERS * EXPERTS:
            claim(self.tables, range(LAYERS * EXPERTS))
        self.out = [LookupOutput.empty(n_tokens, TOP_K, device=DEVICE) for _ in range(LAYERS)]
        self.ids = torch.zeros(LAYERS, n_tokens, TOP_K, dtype=torch.int32, device=DEVICE)
        self.weights = torch.zeros(LAYERS, n_tokens, TOP_K, device=DEVICE)

    def calls(self) -> list[Callable[[], None]]:
        return [lambda at=at: self.one(at) for at in range(LAYERS)]  # type: ignore[misc]

    def one(self, at: int) -> None:
        routing = Routing(
            self.logits[at], self.bias[at], self.weights[at], Score.SQRT_SOFTPLUS, 1, 1, True, 1.5
        )
        found, ends = self.out[at], at == LAYERS - 1
        args = (routing, self.ids[at], self.tables)
        if self.way == "one launch":
            route_and_look_up(
                *args, layer=at, out=found, ends_step=ends, slots=self.rows.slots,
                arena=self.rows.arena,
            )  # fmt: skip
            return
        if self.way == "three launches":
            route(
                routing.logits, routing.bias, ids=self.ids[at], weights=routing.weights,
                score=routing.score, renormalize=True, scale=routing.scale,
            )  # fmt: skip
            lookup(self.ids[at], self.tables, layer=at, out=found, ends_step=ends)
        else:
            route_and_look_up(*args, layer=at, out=found, ends_step=ends)
        fetch(
            self.rows.slots, self.rows.arena, found.miss_n, miss_row=found.miss_row,
            miss_slot=found.miss_slot,
        )  # fmt: skip

    def left(self) -> list[Tensor]:
        t = self.tables
        found = [t.slot_of, t.owner, t.last_used, t.warmth, t.n_free, t.hand, t.clock, t.counters]
        found += [self.ids, self.weights, self.rows.slots]
        for out in self.out:
            n = int(out.miss_n)
            found += [out.uniq_slot, out.uniq_pair, out.n_uniq, out.miss_row[:n], out.miss_slot[:n]]
            assert int(out.waiting) == 0
        return [one.clone() for one in found]


class Crowd:
    """Work of other kernels, which takes the caches: of memory and, with products, of code."""

    def __init__(self) -> None:
        self.one = torch.zeros(96 << 20, dtype=torch.uint8, device=DEVICE)
        self.other = torch.zeros_like(self.one)
        self.x = torch.randn(64, 4096, device=DEVICE, dtype=torch.bfloat16)
        self.w = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)

    def __call__(self) -> None:
        self.other.copy_(self.one)
        torch.softmax(self.x @ self.w, -1).cumsum(-1)


def cold(calls: list[Callable[[], None]], crowd: Crowd) -> dict[str, float]:
    """Between other kernels: what a call adds, and what the profiler says of its kernels."""
    crowd()
    alone = replayed_us(captured([crowd] * len(calls)), _REPEATS)
    graph = captured([one for call in calls for one in (crowd, call)])
    found = {"cold_us": round((replayed_us(graph, _REPEATS) - alone) / len(calls), 2)}
    runs = kernel_runs(lambda: [graph.replay() for _ in range(3)])
    for name in (
        "_route_kernel",
        "_lookup_kernel",
        "_routed_lookup_kernel",
        "_fetch_kernel",
        "_routed_fetch_kernel",
    ):
        own = [run.end_us - run.start_us for run in runs if run.name.startswith(name)]
        if own:
            found["cold" + name] = round(median(own), 2)
    return found


def lookups(crowd: Crowd) -> None:
    for n_tokens in (1, 2):
        for n_slots in (LAYERS * EXPERTS, 100):
            want: list[Tensor] = []
            for way in ("three launches", "two launches", "one launch"):
                hits = n_slots > 100
                look = Lookups(n_tokens, n_slots, way, Rows(1 if hits else n_slots))
                for _ in range(3):
                    for call in look.calls():
                        call()
                left = look.left()
                want = want or left
                same = all(torch.equal(a, b) for a, b in zip(left, want, strict=True))
                calls = look.calls() if hits else look.calls()[:5]
                us = per_call_us(calls, repeats=5)
                facts = cold(calls, crowd) if hits else {}
                line(
                    "routed_lookup and fetch", way=way, tokens=n_tokens, all_hit=hits, same=same,
                    us=round(us, 2), **facts,
                )  # fmt: skip


def normed() -> None:
    """A query latent: a product whose first columns are normed, in one launch and in two."""
    for n_tokens in (1, 2):
        values = torch.randn(24, 1536, 4096, device=DEVICE).to(torch.float8_e4m3fn)
        weights = [DenseWeight(v, torch.ones(12, 32, device=DEVICE)) for v in values]
        x, scale = torch.randn(n_tokens, 4096, device=DEVICE), torch.rand(1024, device=DEVICE)
        arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        out, room = torch.zeros(n_tokens, 1536, device=DEVICE), torch.zeros(n_tokens, 1024)
        room = room.to(DEVICE)

        def two(weight: DenseWeight, x=x, out=out, room=room, scale=scale) -> None:  # type: ignore[no-untyped-def]
            gemv(x, weight, out)
            rms_norm(out[:, :1024], scale, 1e-6, out=room)

        def one(weight: DenseWeight, x=x, out=out, room=room, scale=scale) -> None:  # type: ignore[no-untyped-def]
            gemv(x, weight, out, norm=NormOf(scale, 1e-6, room, arrived))

        for way, run in (("two", two), ("one", one), ("product alone", None)):
            same = None
            if run is not None:
                left = []
                for each in (two, run):
                    room.zero_()
                    each(weights[3])
                    left += [out.clone(), room.clone()]
                same = torch.equal(left[0], left[2]) and torch.equal(left[1], left[3])
            use = run or (lambda weight, x=x, out=out: gemv(x, weight, out))
            us = per_call_us([lambda w=w, use=use: use(w) for w in weights], repeats=7)
            line("product and norm", way=way, tokens=n_tokens, same=same, us=round(us, 2))


def main() -> None:
    torch.manual_seed(0)
    lookups(Crowd())
    normed()


if __name__ == "__main__":
    main()
