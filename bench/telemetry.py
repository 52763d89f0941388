"""What telling of experts costs: a step's look-ups on the CPU, and one picture of all experts.

    python -m bench.telemetry PACK

CPU time of the measuring thread, the least of many repeats, so that other programs matter little.
`PACK` is the packed demo model. Pictures are made at most ten times a second, between steps.

    step_us      look-ups of one token in 8 layers x 4 experts, all of them hits
    picture_us   `Residency.view` of that model, after a step
    device_us    `CudaResidency.view` of 43 layers x 256 experts with its tables in RAM: without the
                 copies from the device. `story` with what happened to each expert, five times a
                 second; `plain` without
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from moet_desk.cli.bench_record import machine
from moet_desk.engine.cuda import residency as device
from moet_desk.engine.cuda.expert_stream import StreamCounters
from moet_desk.engine.residency import Residency
from moet_desk.engine.transfer import Transfer
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton.cache import GpuTables
from moet_desk.store.arena import Arena, ArenaCounters
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader

LAYERS, EXPERTS, TOP_K = 8, 32, 4


def least_us(work: Callable[[], Any], *, calls: int, repeats: int = 60) -> float:
    """Microseconds of one call in the best of the repeats."""
    best = float("inf")
    for _ in range(repeats):
        began = time.thread_time()
        for _ in range(calls):
            work()
        best = min(best, time.thread_time() - began)
    return round(1e6 * best / calls, 1)


def on_cpu(pack: Path) -> dict[str, float]:
    reader = PackReader.open(pack)
    arena = Arena(reader, base_rows=256, fine_rows=0)
    residency = Residency(
        Transfer(arena, reader.layout), moe_layers=tuple(range(1, LAYERS + 1)), n_experts=EXPERTS,
        base_slots=LAYERS * EXPERTS, fine_slots=TOP_K, top_k=TOP_K,
    )  # fmt: skip
    turn = [0]

    def step() -> None:
        turn[0] += 1
        for layer in range(LAYERS):
            experts = [(turn[0] * 7 + layer + 8 * i) % EXPERTS for i in range(TOP_K)]
            residency.slots(Plane.BASE, layer, experts)

    for _ in range(EXPERTS):
        step()
    found = {"step_us": least_us(step, calls=50)}

    def step_and_view() -> None:
        step()
        residency.view()

    both = least_us(step_and_view, calls=20)
    found["picture_us"] = round(both - found["step_us"], 1)
    reader.close()
    return found


def on_device(stories_every_s: float) -> float:
    device.STORIES_EVERY_S = stories_every_s
    n_layers, n_experts, n_slots = 43, 256, 2123
    tables = GpuTables.empty(n_layers, n_experts, n_slots, device="cpu")
    random = np.random.default_rng(0)
    n_rows = n_layers * n_experts
    tables.slot_of[random.permutation(n_rows)[:n_slots]] = 0
    pool = SimpleNamespace(tables=tables, arena=SimpleNamespace(stride=4096))
    arena = SimpleNamespace(
        present=lambda _: np.ones(n_rows, np.bool_), counters=ArenaCounters(),
        n_places=lambda _: n_rows, n_used=lambda _: n_rows,
    )  # fmt: skip
    residency = device.CudaResidency(
        {Plane.BASE: pool, Plane.FINE: pool},  # type: ignore[dict-item]
        arena,  # type: ignore[arg-type]
        ExpertLayout(32, 32), moe_layers=tuple(range(n_layers)), server=None,
        streamed=StreamCounters(),
    )  # fmt: skip

    def picture() -> None:
        rows = torch.from_numpy(random.integers(0, n_rows, 500))
        tables.clock.add_(2)
        tables.warmth[rows] = float(tables.clock) / 16 + 1
        tables.counters[:, 0] += 12
        residency.view()

    return least_us(picture, calls=10, repeats=20)


def main() -> None:
    torch.set_num_threads(1)
    facts = {k: v for k, v in machine().items() if k in ("cpu", "cores", "commit", "date")}
    found = {
        **on_cpu(Path(sys.argv[1])),
        "device_us": {"plain": on_device(99.0), "story": on_device(0.0)},
    }
    print(json.dumps({**facts, "command": "python -m bench.telemetry PACK", **found}))


if __name__ == "__main__":
    main()
