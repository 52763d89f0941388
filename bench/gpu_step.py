"""Times of the decode step and its kernels on a GPU. How near it is to the CPU: tests/gpu.

    python bench/gpu_step.py demo      a step of the demo model, for 1 and 4 rows and both planes
    python bench/gpu_step.py kernels   one JSON line per kernel at DeepSeek-V4-Flash's expert shape
    python bench/gpu_step.py gate      what a gate that never fires adds to a DeepSeek-V4-Flash step
    python bench/gpu_step.py mailbox   what asking the host for rows costs beside the drive's own time
    python bench/gpu_step.py resize    what it costs a step when a full pool shrinks or grows by 1 GiB

Prints JSON lines. Needs a CUDA device; writes nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from bench.timing import per_call_us
from moet_desk.engine.cuda.loader import load as load_cuda
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.sampling import GREEDY
from moet_desk.store.pack_format import Plane
from tests.conftest import DEMO, pack_source

DEVICE = torch.device("cuda")
HIDDEN_TILES = ((4, 1), (4, 2), (8, 2), (8, 4), (16, 8))
DOWN_TILES = ((16, 2), (16, 4), (16, 8), (32, 4), (32, 8))


def say(what: str, **figures: Any) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)


def demo() -> None:
    """A step of the demo model as the engine runs it, tokens chosen on the device."""
    pack = pack_source(DEMO, Path(tempfile.mkdtemp()) / "demo")
    began = time.perf_counter()
    core = load_cuda(pack, EngineOptions(save_heat=False), device=DEVICE)
    say("loaded", seconds=round(time.perf_counter() - began, 1), device=core.device)
    sequence = core.kv.reserve(600)
    assert sequence is not None
    sequence.length = 64
    for plane in Plane:
        for rows in (1, 4):
            times = []
            for _ in range(60):
                began = time.perf_counter()
                steps = [StepRow(7, sequence, i) for i in range(rows)]
                core.model.choose(steps, plane, [GREEDY] * rows)
                times.append(time.perf_counter() - began)
            say("demo step", plane=plane.value, rows=rows, ms=round(1e3 * median(times), 3))
    core.close()


def gate() -> None:
    """Steps in turn with and without the gate of balanced answers, tau 0."""
    from types import SimpleNamespace

    from moet_desk.engine.cuda.measure import ShapeBench
    from moet_desk.engine.cuda.measured import Setup
    from moet_desk.engine.cuda.pinned import PinnedMemory
    from moet_desk.engine.cuda.shapes import SHAPES
    from moet_desk.engine.gate import Gate
    from moet_desk.units import GIB

    pinned, judge, row = PinnedMemory(), Gate(), SimpleNamespace(tau=0.0, rerun_tokens=0)
    setup = Setup(SHAPES["deepseek-v4-flash"](8192), torch.device(DEVICE), 32 * GIB, context=8192)
    made = ShapeBench(setup, pinned.allocate, lambda _: None)
    made.loader.set_popularity(0.004)
    made.steps(200)
    sequence, plain_ms, gated_ms = made._sequence(1), [], []
    for _ in range(500):
        began = time.perf_counter()
        made._step(sequence, 1)
        middle = time.perf_counter()
        made._step(sequence, 1)
        assert not judge.is_unsure(row, made.model.confidence(1)[0])
        plain_ms.append(1e3 * (middle - began))
        gated_ms.append(1e3 * (time.perf_counter() - middle))
    both = sorted(b - a for a, b in zip(plain_ms, gated_ms, strict=True))
    say(
        "gate",
        shape="deepseek-v4-flash",
        steps=len(plain_ms),
        fast_ms=round(median(plain_ms), 4),
        gated_ms=round(median(gated_ms), 4),
        share=round(median(gated_ms) / median(plain_ms) - 1, 5),
        difference_us={p: round(1e3 * both[len(both) * p // 100], 1) for p in (25, 50, 75)},
    )
    pinned.release()


def kernels() -> None:
    from moet_desk.engine.cuda.pinned import PinnedMemory
    from moet_desk.kernels.kinds import Activations
    from moet_desk.kernels.layouts import ExpertLayout
    from moet_desk.kernels.triton.cache import GpuTables, LookupOutput, lookup
    from moet_desk.kernels.triton.dense import gemv
    from moet_desk.kernels.triton.dense_weight import DenseWeight
    from moet_desk.kernels.triton.experts import ExpertPool, Tile, experts_down, experts_hidden
    from moet_desk.kernels.triton.fetch import Arena, fetch
    from moet_desk.kernels.triton.quant import planar_shape

    hidden, inter, top_k, slots = 4096, 2048, 6, 512
    layout = ExpertLayout(hidden, inter)
    base = torch.randint(0, 256, (slots, layout.base_stride), dtype=torch.uint8, device=DEVICE)
    at = layout.gate_up.base_bytes
    base[:, 8 * layout.gate_up.n * layout.gate_up.groups : at] = 120
    base[:, at + 8 * layout.down.n * layout.down.groups :] = 120
    fine = torch.zeros((slots, layout.fine_stride), dtype=torch.uint8, device=DEVICE)
    for rows in (3, 1):
        pairs = rows * top_k
        found = [LookupOutput.empty(rows, top_k, device=DEVICE) for _ in range(24)]
        order = torch.randperm(slots, device=DEVICE).int()
        for i, out in enumerate(found):
            out.uniq_slot.copy_(
                order[torch.arange(pairs, device=DEVICE) + i * pairs % (slots - pairs)]
            )
            out.uniq_pair.fill_(-1)
            for p in range(pairs):
                out.uniq_pair[p, p // top_k] = p
        scales = torch.rand((rows, hidden // 32), device=DEVICE)
        scratch = torch.empty((pairs, inter), device=DEVICE)
        hscales = torch.empty((pairs, inter // 32), device=DEVICE)
        part = torch.empty((pairs, hidden), device=DEVICE)
        for plane, kind in (("base", Activations.INT8), ("fine", Activations.INT15)):
            shape = (rows, *planar_shape(hidden, kind))
            codes = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE)
            shape = (pairs, *planar_shape(inter, kind))
            hcodes = torch.empty(shape, dtype=torch.int32, device=DEVICE)
            n_bytes = pairs * (layout.base_bytes + (layout.fine_bytes if plane == "fine" else 0))

            def pool(out: LookupOutput) -> ExpertPool:
                if plane == "base":
                    return ExpertPool(layout, base, out.uniq_slot, out.uniq_pair)
                return ExpertPool(layout, base, out.uniq_slot, out.uniq_pair, fine, out.uniq_slot)

            best: tuple[float, Any] | None = None
            for tile in [Tile(r, w) for r, w in HIDDEN_TILES]:

                def hidden_all(tile: Tile = tile) -> None:
                    for out in found:
                        experts_hidden(
                            pool(out),
                            codes,
                            scales,
                            scratch=scratch,
                            out_codes=hcodes,
                            out_scales=hscales,
                            tile=tile,
                        )

                try:
                    us = per_call_us([hidden_all]) / len(found)
                except Exception as error:
                    say("hidden failed", tile=str(tile), error=str(error)[:80])
                    continue
                if best is None or us < best[0]:
                    best = (us, tile)
            best2: tuple[float, Any] | None = None
            for tile in [Tile(r, w) for r, w in DOWN_TILES]:

                def down_all(tile: Tile = tile) -> None:
                    for out in found:
                        experts_down(pool(out), hcodes, hscales, part=part, tile=tile)

                try:
                    us = per_call_us([down_all]) / len(found)
                except Exception as error:
                    say("down failed", tile=str(tile), error=str(error)[:80])
                    continue
                if best2 is None or us < best2[0]:
                    best2 = (us, tile)
            assert best is not None
            assert best2 is not None
            total = best[0] + best2[0]
            say(
                "experts",
                rows=rows,
                plane=plane,
                hidden_us=round(best[0], 2),
                hidden_tile=str(best[1]),
                down_us=round(best2[0], 2),
                down_tile=str(best2[1]),
                layer_us=round(total, 2),
                gb_per_s=round(n_bytes / total / 1e3),
            )
    tables = GpuTables.empty(43, 256, 2000, device=DEVICE)
    ids = torch.randperm(256, device=DEVICE)[:top_k].int().view(1, top_k)
    out = LookupOutput.empty(1, top_k, device=DEVICE)
    lookup(ids, tables, layer=0, out=out)
    say(
        "lookup, all hits",
        us=round(per_call_us([lambda: lookup(ids, tables, layer=0, out=out)]), 2),
    )
    pinned = PinnedMemory()
    memory = torch.frombuffer(pinned.allocate(64 * layout.base_stride), dtype=torch.uint8)
    place = torch.arange(64, dtype=torch.int32, device=DEVICE)
    arena = Arena(memory.data_ptr(), place, layout.base_stride)
    for n in (0, 1, 4):
        miss_n = torch.tensor([n], dtype=torch.int32, device=DEVICE)
        row = torch.arange(8, dtype=torch.int32, device=DEVICE)
        us = per_call_us([lambda m=miss_n: fetch(base, arena, m, miss_row=row, miss_slot=row)])
        say("fetch", rows=n, us=round(us, 2), gb_per_s=round(n * layout.base_stride / us / 1e3, 1))
    for n, k in ((4096, 4096), (16384, 4096), (2048, 4096)):
        values = torch.randn(n, k, device=DEVICE).to(torch.float8_e4m3fn)
        weights = [
            DenseWeight(values.clone(), torch.rand(-(-n // 128), -(-k // 128), device=DEVICE))
            for _ in range(8)
        ]
        for rows in (1, 4):
            x = torch.randn(rows, k, device=DEVICE)
            y = torch.empty(rows, n, device=DEVICE)

            def dense_all() -> None:
                for weight in weights:
                    gemv(x, weight, y)

            us = per_call_us([dense_all]) / len(weights)
            say("gemv fp8", n=n, k=k, rows=rows, us=round(us, 2), gb_per_s=round(n * k / us / 1e3))
    del memory
    pinned.release()


class AtHand:
    """Stands for the host's arena: every row is there as soon as it is asked for."""

    def bring(self, plane: Plane, rows: Sequence[int], **_: Any) -> list[tuple[int, int]]:
        return [(place, -1) for place in range(len(rows))]


def mailbox() -> None:
    """Post and wait in a graph, with the engine's own server at the other end.

    `round_trip_us` is the graph's time over that of a graph without a request; `waiting_us` what the
    waiting kernel itself counts.
    """
    from moet_desk.engine.cuda.mailbox_server import MailboxServer
    from moet_desk.engine.cuda.pinned import PinnedMemory
    from moet_desk.kernels.mailbox import MAILBOX
    from moet_desk.kernels.triton.cache import GpuTables, LookupOutput
    from moet_desk.kernels.triton.fetch import Arena, Mailbox, post, wait

    pinned = PinnedMemory()
    page = pinned.allocate(MAILBOX.n_bytes)
    error = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    box = Mailbox.at(torch.frombuffer(page, dtype=torch.uint8).data_ptr(), error=error)
    tables = GpuTables.empty(1, 64, 64, device=DEVICE)
    found = LookupOutput.empty(1, 6, device=DEVICE)
    found.miss_row.copy_(torch.arange(6))
    found.miss_slot.copy_(torch.arange(6))
    arena = Arena(0, torch.full((64,), -1, dtype=torch.int32, device=DEVICE), 4096)
    server = MailboxServer(page, AtHand())  # type: ignore[arg-type]

    def once() -> None:
        post(box, arena, found, layer=0)
        wait(box, arena, tables)

    def measured(rows: int, *, announced: bool, pause_s: float) -> tuple[list[float], list[float]]:
        whole, waiting = [], []
        found.miss_n.fill_(rows)
        for _ in range(300):
            time.sleep(pause_s)
            arena.place_of.fill_(-1)
            box.waited.zero_()
            torch.cuda.synchronize()
            if announced:
                server.begin()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            server.end()
            whole.append(1e3 * start.elapsed_time(end))
            waiting.append(1e-3 * int(box.waited))
        return whole[20:], waiting[20:]

    found.miss_n.zero_()
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    for announced in (True, False):
        for pause_s in (0.0, 0.005):
            idle = median(measured(0, announced=announced, pause_s=pause_s)[0])
            for rows in (1, 6):
                whole, waiting = measured(rows, announced=announced, pause_s=pause_s)
                late = quantiles(whole, n=20)[-1]
                say(
                    "mailbox",
                    rows=rows,
                    announced=announced,
                    pause_ms=1e3 * pause_s,
                    round_trip_us=round(median(whole) - idle, 1),
                    p95_us=round(late - idle, 1),
                    waiting_us=round(median(waiting), 1),
                    no_request_us=round(idle, 1),
                    error=int(error),
                )
    server.close()
    pinned.release()


def resize() -> None:
    """A pool of DeepSeek-V4-Flash's rows, full of rows of uneven heat, between steps."""
    from moet_desk.engine.cuda.pools import DevicePool
    from moet_desk.engine.cuda.slot_memory import growable_slots
    from moet_desk.engine.cuda.vmm import cuda_driver
    from moet_desk.kernels.triton.cache import claim
    from moet_desk.kernels.triton.fetch import Arena

    n_layers, n_experts, stride, n_slots = 43, 256, 7_077_888, 2000
    table = torch.full((n_layers * n_experts,), -1, dtype=torch.int32, device=DEVICE)
    times: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.setdefault(what, []).append(1e3 * (time.perf_counter() - began))

    memory = growable_slots(cuda_driver(DEVICE), stride, least=48, most=n_layers * n_experts)
    pool = DevicePool.make(
        Plane.BASE, Arena(0, table, stride), n_layers=n_layers, n_experts=n_experts, n_slots=48,
        top_k=6, device=DEVICE, memory=memory,
    )  # fmt: skip
    timed("map 13 GiB", lambda: pool.resize(n_slots))
    step = 2**30 // stride
    for _ in range(10):
        without = torch.nonzero(pool.tables.slot_of.cpu() < 0).flatten().tolist()
        claim(pool.tables, without)  # as many as there are free slots
        pool.tables.warmth.copy_(torch.rand(len(table)))
        timed("look", lambda: torch.cuda.mem_get_info(DEVICE))
        timed("shrink by 1 GiB", lambda: pool.resize(n_slots - step))
        timed("grow by 1 GiB", lambda: pool.resize(n_slots))
    for what, ms in times.items():
        say("resize", part=what, median_ms=round(median(ms), 3), most_ms=round(max(ms), 3))
    memory.release()


if __name__ == "__main__":
    {"demo": demo, "kernels": kernels, "gate": gate, "mailbox": mailbox, "resize": resize}[
        sys.argv[1]
    ]()
