"""A shape's step with and without launches that overlap their predecessors (PDL).

    python bench/gpu_pdl.py deepseek-v4-flash [VRAM GiB, default 120] [rows, default 1]

One model, captured anew for each measurement, so that weights, slots and clocks are the same. With
enough VRAM all experts are in slots and no step waits for PCIe. Prints one JSON line per
measurement, off and on in turn, and at the end what was gained. Needs a CUDA device of SM90 or
later; writes nothing.
"""

from __future__ import annotations

import json
import sys
from statistics import median
from typing import Any

import torch

from moet_desk.engine.cuda.measure import Setup, ShapeBench
from moet_desk.engine.cuda.pinned import PinnedMemory
from moet_desk.engine.cuda.shapes import SHAPES
from moet_desk.units import GIB

CONTEXT = 8192
ROUNDS = 2


def say(what: str, **figures: Any) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)


def main(name: str, gib: int = 120, rows: int = 1) -> None:
    shape = SHAPES[name](CONTEXT)
    setup = Setup(shape, torch.device("cuda"), gib * GIB, context=CONTEXT, rows=rows)
    pinned = PinnedMemory()
    try:
        bench = ShapeBench(setup, pinned.allocate, lambda _: None)
        bench.loader.set_popularity(0.25 * bench.pool.tables.n_layers / setup.n_slots())
        medians: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for pdl, found in medians.items():
                bench.capture(pdl=pdl)
                bench.steps(setup.warm)
                steps = bench.steps(setup.steps)
                found.append(steps.median_ms)
                say(
                    "step",
                    shape=name,
                    rows=rows,
                    pdl=pdl,
                    median_ms=round(steps.median_ms, 4),
                    least_ms=round(min(steps.times_ms), 4),
                    hit_rate=round(steps.hit_rate, 4),
                )
        gained = 1 - median(medians[True]) / median(medians[False])
        say("gain", shape=name, rows=rows, percent=round(100 * gained, 2))
    finally:
        pinned.release()


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:]))
