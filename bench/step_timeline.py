"""When each kernel of a decode step begins and ends, on a GPU with made-up weights.

    python3 -m bench.step_timeline FILE.csv [--shape NAME] [--vram-limit 32GiB] [--rows 1]
        [--popularity 0.00132] [--lookahead PROGRAMS]

One line per kernel of one step: microseconds from the step's beginning to the kernel's beginning and
end, and its name. On the screen: what each kernel has of the step when instants are shared, and how
long nothing ran before it. The popularity is the one at which `moet-desk bench --shape` found its
hit rate. PROGRAMS copy what is brought ahead. Needs torch, triton and a card.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

import torch

from moet_desk.engine.cuda import lookahead
from moet_desk.engine.cuda.kernel_groups import KernelRun, by_kernel
from moet_desk.engine.cuda.measure import Setup, ShapeBench
from moet_desk.engine.cuda.pinned import PinnedMemory
from moet_desk.engine.cuda.shapes import SHAPES
from moet_desk.units import parse_bytes


def last_step(runs: list[KernelRun], n_steps: int) -> list[KernelRun]:
    """The kernels of the newest of some equal steps."""
    return runs[len(runs) * (n_steps - 1) // n_steps :]


def main() -> None:
    parser = argparse.ArgumentParser(description="When the kernels of a step begin and end.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="deepseek-v4-flash", choices=list(SHAPES))
    parser.add_argument("--vram-limit", default="32GiB", type=parse_bytes)
    parser.add_argument("--rows", default=1, type=int)
    parser.add_argument("--popularity", default=0.00132, type=float)
    parser.add_argument("--lookahead", default=0, type=int, metavar="PROGRAMS")
    given = parser.parse_args()
    setup = Setup(
        SHAPES[given.shape](8192), torch.device("cuda"), given.vram_limit, 8192, rows=given.rows,
        looks_ahead=given.lookahead > 0,
    )  # fmt: skip
    lookahead.PROGRAMS = given.lookahead
    pinned = PinnedMemory()
    try:
        with ExitStack() as undo:
            bench = ShapeBench(setup, pinned.allocate, print, undo=undo)
            bench.loader.set_popularity(given.popularity)
            bench.steps(setup.warm)
            steps = bench.steps(setup.steps)
            runs = bench.traced_steps()
    finally:
        pinned.release()
    ahead = f"{steps.ahead:.1f} rows ahead, {steps.needed:.1f} needed"
    print(f"{steps.median_ms:.3f} ms per step, {steps.hit_rate:.2%} hits, {ahead}")
    for name, time in by_kernel(runs, n_steps=setup.traced).items():
        print(
            f"{time.launches:6.0f} {time.ms:7.3f} {time.share_ms:7.3f} {time.before_ms:7.3f} {name}"
        )
    newest = last_step(runs, setup.traced)
    began = newest[0].start_us
    lines = (f"{run.start_us - began:.2f},{run.end_us - began:.2f},{run.name}" for run in newest)
    given.out.write_text("\n".join(["start_us,end_us,kernel", *lines]) + "\n")


if __name__ == "__main__":
    main()
