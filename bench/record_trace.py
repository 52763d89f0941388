"""Records what the Cache screen shows while a model of real shape with made-up weights decodes.

    python3 -m bench.record_trace FILE.mdtrace [--shape NAME] [--vram-limit 32GiB] [--seconds 40]

Finds the routing that gives the wanted hit rate first, as `moet-desk bench --shape` does, then
records. Half-way through, a part of the experts trade their popularity, as when the topic changes.
`moet-desk --demo-trace FILE.mdtrace` plays the file. Needs torch, triton and a card; no display.

How long a step waits for rows is not measured in the engine's graph. It is worked out: the fetch
kernels' time per row, as the profiler sees it, times the rows that were fetched.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moet_desk import __version__
from moet_desk.cli.bench_record import driver, machine
from moet_desk.engine.cuda.expert_stream import StreamCounters
from moet_desk.engine.cuda.kernel_groups import Group
from moet_desk.engine.cuda.measure import Figures, Setup, ShapeBench
from moet_desk.engine.cuda.pinned import PinnedMemory
from moet_desk.engine.cuda.residency import CudaResidency
from moet_desk.engine.cuda.shapes import SHAPES
from moet_desk.engine.handle import ModelInfo
from moet_desk.engine.meter import Meter
from moet_desk.engine.trace_file import Header, TraceWriter
from moet_desk.store.arena import Allocate, ArenaCounters
from moet_desk.telemetry import EngineSnapshot, EngineState, TierCounters
from moet_desk.units import parse_bytes

WINDOW = 8
"""Pictures behind the shown shares."""


@dataclass(frozen=True)
class Wishes:
    hit_rate: float = 0.96
    seconds: float = 40.0
    period_s: float = 0.5
    topic_share: float = 0.3
    most_bytes: int = 400_000


class AllInRam:
    """Stands for the host's arena: every row is in RAM."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self.counters = ArenaCounters()

    def present(self, plane: Any) -> Any:
        return np.ones(self._n_rows, np.bool_)

    def n_places(self, plane: Any) -> int:
        return self._n_rows

    n_used = n_places


@dataclass
class Recorder:
    """Takes pictures of a bench between its steps and writes them."""

    bench: ShapeBench
    setup: Setup
    writer: TraceWriter
    wishes: Wishes
    row_s: float  # of waiting for one row
    popularity: float
    residency: CudaResidency
    meter: Meter = field(default_factory=Meter)
    began: float = field(default_factory=time.monotonic)
    steps: list[float] = field(default_factory=list)
    recent: deque[TierCounters] = field(default_factory=lambda: deque(maxlen=WINDOW))
    wait_s: float = 0.0
    due_s: float = 0.0
    pictures: int = 0
    changed: bool = False

    def go_on(self, step_s: float) -> bool:
        now_s = time.monotonic() - self.began
        self.steps.append(step_s)
        if not self.changed and now_s > self.wishes.seconds / 2:
            self.changed = True
            self.bench.loader.change_topic(self.wishes.topic_share, self.popularity)
        if now_s >= self.due_s:
            self.due_s += self.wishes.period_s
            self.picture(now_s)
        return now_s < self.wishes.seconds and not self.writer.full

    def picture(self, now_s: float) -> None:
        counters = self.residency.counters(step_s=self.meter.step_s + sum(self.steps))
        old = self.recent[-1] if self.recent else TierCounters()
        waited_s = (counters.from_ram - old.from_ram) * self.row_s
        self.wait_s += waited_s
        for step_s in self.steps:
            self.meter.note_step(
                now_s, step_s=step_s, wait_s=waited_s / len(self.steps), n_tokens=self.setup.rows
            )
        self.steps.clear()
        self.pictures += 1
        first = self.recent[0] if self.recent else TierCounters()
        self.recent.append(counters)
        parts = (
            0,
            counters.from_ram - first.from_ram,
            counters.hits_base - first.hits_base,
            counters.hits_fine - first.hits_fine,
        )
        values = {name: getattr(counters, name) for name in TierCounters.__slots__}
        snapshot = EngineSnapshot(
            state=EngineState.WRITING,
            model=self.setup.shape.name,
            family=self.setup.shape.spec.model_type,
            device=device_name(self.setup.device),
            requests_running=1,
            decode_tok_per_s=self.meter.decode_rate(now_s),
            steps=self.meter.steps,
            tokens=self.meter.tokens,
            step_ms=self.meter.step_ms(),
            wait_share=self.meter.wait_share(),
            tier_share=tuple(part / max(1, sum(parts)) for part in parts),  # type: ignore[arg-type]
            counters=TierCounters(**{**values, "wait_s": self.wait_s}),
            tokens_per_step=self.meter.tokens_per_step(now_s),
            sizes=self.residency.sizes(),
            cache=self.residency.view(),
            generation=self.pictures,
        )
        self.writer.add(now_s, snapshot)


def moe_layers(setup: Setup) -> tuple[int, ...]:
    return tuple(layer.index for layer in setup.shape.spec.moe_layers)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def row_seconds(setup: Setup, figures: Figures) -> tuple[float, str]:
    """Seconds that a step waits for one row, and how they were found."""
    misses = figures.steps.misses + figures.steps.fine_misses
    if figures.by_group and misses:
        fetch_s = 1e-3 * figures.by_group[Group.FETCH.value]
        return fetch_s / misses, "time of the fetch kernels under the profiler, per row"
    if figures.bandwidth is not None:
        return (
            setup.layout.base_stride / figures.bandwidth.pcie,
            "bytes over the measured PCIe rate",
        )
    return 0.0, "not known"


def header_of(setup: Setup, how: str) -> Header:
    spec, shape = setup.shape.spec, setup.shape
    router, facts = spec.moe_ffn.router, machine()
    notes = [
        "Made-up weights: routing is drawn at random around popular experts, which change half-way.",
        f"Waiting: {how}.",
        shape.note or "",
    ]
    return Header(
        program=__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine={
            "gpu": device_name(setup.device) if setup.device.type == "cuda" else None,
            "driver": driver() if setup.device.type == "cuda" else None,
            "os": platform.system(),
            **{name: facts[name] for name in ("cpu", "cores", "ram_gib")},
        },
        model=ModelInfo(
            name=shape.name, family=spec.model_type, context=setup.context,
            model_context=spec.context, vocab=spec.vocab, n_layers=len(spec.layers),
            n_moe_layers=len(spec.moe_layers), n_experts=router.n_experts, top_k=router.top_k,
            identity="made up",
        ),
        layers=moe_layers(setup),
        n_experts=router.n_experts,
        made_up=True,
        exact=False,
        note=" ".join(note for note in notes if note),
    )  # fmt: skip


def record(setup: Setup, path: Path, wishes: Wishes, allocate: Allocate, say: Any = print) -> int:
    """Measure, then record. Returns how many pictures were taken."""
    bench = ShapeBench(setup, allocate, say)
    figures = bench.run(wishes.hit_rate)
    row_s, how = row_seconds(setup, figures)
    say(
        f"{figures.steps.median_ms:.2f} ms per step, {figures.steps.hit_rate:.2%} hits,"
        f" {1e6 * row_s:.0f} us for a row ({how})"
    )
    for pool in bench.pools.values():
        pool.tables.counters.zero_()
    residency = CudaResidency(
        bench.pools, AllInRam(setup.n_rows), setup.layout,  # type: ignore[arg-type]
        moe_layers=moe_layers(setup), server=None, streamed=StreamCounters(),
    )  # fmt: skip
    writer = TraceWriter(path, header_of(setup, how), most_bytes=wishes.most_bytes)
    try:
        recorder = Recorder(bench, setup, writer, wishes, row_s, figures.popularity, residency)
        bench.play(recorder.go_on)
        writer.close()
    except BaseException:
        writer.discard()
        raise
    say(f"{recorder.pictures} pictures, {path.stat().st_size:,} bytes: {path}")
    return recorder.pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="deepseek-v4-flash")
    parser.add_argument("--vram-limit", type=parse_bytes, default=parse_bytes("32GiB"))
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--hit-rate", type=float, default=Wishes.hit_rate)
    parser.add_argument("--seconds", type=float, default=Wishes.seconds)
    parser.add_argument(
        "--period", type=float, default=Wishes.period_s, help="seconds between pictures"
    )
    parser.add_argument("--most-bytes", type=int, default=Wishes.most_bytes)
    parser.add_argument("--attempts", type=int, default=6)
    given = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    setup = Setup(
        SHAPES[given.shape](given.context), device, given.vram_limit, context=given.context,
        warm=150, steps=200, attempts=given.attempts,
    )  # fmt: skip
    wishes = Wishes(
        hit_rate=given.hit_rate, seconds=given.seconds, period_s=given.period,
        most_bytes=given.most_bytes,
    )  # fmt: skip
    share = given.vram_limit / torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    pinned = PinnedMemory()
    try:
        record(setup, given.file, wishes, pinned.allocate, lambda words: print(words, flush=True))
    finally:
        torch.cuda.synchronize()
        pinned.release()


if __name__ == "__main__":
    main()
