"""Decode steps of a model of real shape with made-up weights, measured as the engine runs them.

A step is: host inputs, one graph, the choice of each row's best token behind it, tokens back on the
host. Input tokens are random, so that routing follows the routers' biases; those are adjusted until
the pool answers the wanted share of look-ups. Owned by the thread that measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from moet_desk.engine.cuda.bandwidth import Bandwidth, copy_bandwidth
from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers
from moet_desk.engine.cuda.chunk_sizes import chunk_bytes, stage_bytes
from moet_desk.engine.cuda.expert_stream import ChunkExperts, Reading
from moet_desk.engine.cuda.kernel_groups import kernel_times, split
from moet_desk.engine.cuda.pinned import PinnedMemory
from moet_desk.engine.cuda.pools import DevicePool, PoolExperts
from moet_desk.engine.cuda.popularity import find_popularity
from moet_desk.engine.cuda.prefill import ChunkModel
from moet_desk.engine.cuda.shapes import Shape
from moet_desk.engine.cuda.step import StepModel, StepRow
from moet_desk.engine.cuda.synthetic import (
    SyntheticHost,
    SyntheticLoader,
    dense_bytes,
    dense_read_bytes,
    make_arena,
)
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.sampling import GREEDY, Draw
from moet_desk.engine.spec import Gdn, Gqa, Mixer
from moet_desk.errors import fail
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.store.arena import Allocate, plain_memory
from moet_desk.store.pack_format import Plane
from moet_desk.units import GIB, show_memory

KV_FORM = KvFormat.NVFP4
RESERVE_BYTES = 3 * GIB // 2
"""VRAM for activations, graphs, the place where weights are made, and what the allocator cannot use
(`plan.ALLOCATOR_SHARE`).
"""

_PAGE_TOKENS = 64

CHUNK_TOKENS = 8192
"""Prompt tokens that are read together, as the planner chooses for cards of 24 GiB and more."""

PROMPTS = 4
"""Prompts that are read, the first one to compile."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured.

    Attributes:
        vram_bytes: all that may be used of the card.
        context: tokens of the model that each step sees, its own included.
        rows: rows of a step, neighbours in one sequence.
        drafts: guesses of a further kind of step, which checks so many with a row for each; the
            shape must have a head then, which is timed too.
        prefill: tokens of the prompt that is read at the end, 0 for none.
        plane: FINE measures exact steps.
        fine_slots: of the FP4 pool, for exact steps; at least those of a layer of a step, so that
            with none more than these every FP4 row comes from RAM.
        warm, steps, traced: steps before a measurement, in it, and under the profiler.
        attempts: most measurements in search of the hit rate.
    """

    shape: Shape
    device: torch.device
    vram_bytes: int
    context: int
    rows: int = 1
    drafts: int = 0
    prefill: int = 0
    plane: Plane = Plane.BASE
    fine_slots: int = 0
    warm: int = 200
    steps: int = 300
    traced: int = 20
    attempts: int = 8

    @property
    def n_rows(self) -> int:
        """Rows of the base plane: one per expert and MoE layer."""
        spec = self.shape.spec
        return len(spec.moe_layers) * spec.moe_ffn.router.n_experts

    @property
    def most_rows(self) -> int:
        """Rows of the widest step."""
        return max(self.rows, 1 + self.drafts)

    @property
    def layout(self) -> ExpertLayout:
        """Sizes of an expert."""
        return ExpertLayout(self.shape.spec.hidden, self.shape.spec.moe_ffn.inter)

    @property
    def entries(self) -> int:
        """KV entries that each step sees."""
        return max(self.most_rows, self.shape.seen(self.context))

    @property
    def chunk(self) -> int:
        """Tokens of a prompt chunk."""
        return min(self.prefill, CHUNK_TOKENS)

    @property
    def kv_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-max(self.entries, self.prefill) // _PAGE_TOKENS) + 1

    @property
    def kv_token_bytes(self) -> int:
        """KV bytes per token of all layers."""
        spec = self.shape.spec
        n_layers = len(spec.layers) + (spec.mtp is not None)
        return n_layers * spec.attention.entry_bytes(KV_FORM)

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Planes whose rows a step reads."""
        return (Plane.BASE,) if self.plane is Plane.BASE else (Plane.BASE, Plane.FINE)

    @property
    def least_slots(self) -> int:
        """Slots that a layer of a step can need at once."""
        return self.most_rows * self.shape.spec.moe_ffn.router.top_k

    def n_fine_slots(self) -> int:
        """Slots of the FP4 pool; none for 2-bit steps."""
        if self.plane is Plane.BASE:
            return 0
        return min(self.n_rows, max(self.least_slots, self.fine_slots))

    def n_slots(self) -> int:
        """Slots of the pool: what the limit leaves beside dense weights, KV and activations.

        Raises:
            MoetError: MD-GPU-05, not even the experts of one layer fit.
        """
        spec = self.shape.spec
        least = self.least_slots
        fixed = (
            dense_bytes(self.shape) + RESERVE_BYTES + self.n_fine_slots() * self.layout.fine_stride
        )
        fixed += self.kv_pages * _PAGE_TOKENS * self.kv_token_bytes
        if self.prefill:
            fixed += stage_bytes(self.layout, spec.moe_ffn.router.n_experts)
            fixed += chunk_bytes(spec, self.chunk, context=self.kv_pages * _PAGE_TOKENS)
        slots = (self.vram_bytes - fixed) // self.layout.base_stride
        if slots < least:
            need = fixed + least * self.layout.base_stride
            have = show_memory(self.vram_bytes)
            raise fail("MD-GPU-05", need=show_memory(need), have=have)
        return min(self.n_rows, slots)


@dataclass(frozen=True, slots=True)
class Steps:
    """Some steps in a row.

    Attributes:
        times_ms: of each, from the tokens to the next ones.
        hit_rate: share of look-ups that found their expert in a slot.
        misses, fine_misses, distinct: per step, rows fetched of each plane and distinct experts
            read.
    """

    times_ms: tuple[float, ...]
    hit_rate: float
    misses: float
    distinct: float
    fine_misses: float = 0.0

    @property
    def median_ms(self) -> float:
        return median(self.times_ms)


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Steps that check guesses, and milliseconds of one guess of the head."""

    checks: Steps
    guess_ms: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; None for what this device or request does not give.

    Attributes:
        drafts: of steps with guesses.
        vram_bytes, pcie_bytes: per step, read in VRAM and brought over PCIe.
        by_group: milliseconds of a step by kernel group.
        attempts: popularities tried.
    """

    steps: Steps
    n_slots: int
    n_fine_slots: int
    attempts: int
    vram_bytes: int
    pcie_bytes: int
    by_group: Mapping[str, float] | None
    bandwidth: Bandwidth | None
    prefill_tok_per_s: float | None
    peak_vram_bytes: int | None
    drafts: DraftFigures | None = None

    @property
    def roofline_ratio(self) -> float | None:
        """Share of a step that its bytes alone would take at the bandwidth of copies."""
        if self.bandwidth is None:
            return None
        least_s = max(self.vram_bytes / self.bandwidth.vram, self.pcie_bytes / self.bandwidth.pcie)
        return 1e3 * least_s / self.steps.median_ms


def measure(
    setup: Setup, *, hit_rate: float, progress: Callable[[str], None] = lambda _: None
) -> Figures:
    """Measure decode steps at a hit rate.

    Args:
        setup: what to measure.
        hit_rate: the wanted one; with all experts in slots it is 1 whatever is wanted.
        progress: told what is being done.

    Raises:
        MoetError: MD-GPU-05, MD-RAM-02, MD-ENG-04.
    """
    pinned = PinnedMemory()
    on_card = setup.device.type == "cuda"
    if on_card:
        share = setup.vram_bytes / torch.cuda.mem_get_info(setup.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), setup.device)
    try:
        bench = ShapeBench(setup, pinned.allocate if on_card else plain_memory, progress)
        return bench.run(hit_rate)
    except torch.OutOfMemoryError as error:
        have = show_memory(setup.vram_bytes)
        raise fail("MD-GPU-05", need=f"more than {have}", have=have) from error
    finally:
        pinned.release()


class ShapeBench:
    """A model of made-up weights that is ready to step.

    Args:
        setup: what to measure; a device that is not a card runs launch by launch, interpreted.
        allocate: gives the memory of the arena.
        progress: told what is being done.
    """

    def __init__(
        self,
        setup: Setup,
        allocate: Allocate,
        progress: Callable[[str], None],
    ) -> None:
        spec, device, self._setup, self._progress = setup.shape.spec, setup.device, setup, progress
        n_layers, router = len(spec.moe_layers), spec.moe_ffn.router
        n_slots = setup.n_slots()
        progress("Pinning rows")
        arenas = {
            plane: make_arena(setup.layout, setup.n_rows, allocate=allocate, plane=plane)
            for plane in setup.planes
        }
        rows = arenas[Plane.BASE]
        self._host = SyntheticHost(arenas)
        on_card = device.type == "cuda"
        self.bandwidth = copy_bandwidth(rows.memory, device) if on_card else None
        progress("Making dense weights")
        self.kv = KvCache(
            spec.attention, n_layers=len(spec.layers) + (spec.mtp is not None),
            n_pages=setup.kv_pages,
            page_tokens=_PAGE_TOKENS, form=KV_FORM, device=device,
        )  # fmt: skip
        self.pools = {
            plane: DevicePool.make(
                plane, arenas[plane].on(device), n_layers=n_layers, n_experts=router.n_experts,
                n_slots=n, top_k=router.top_k, device=device,
            )
            for plane, n in zip(setup.planes, (n_slots, setup.n_fine_slots()), strict=False)
        }  # fmt: skip
        self.pool = self.pools[Plane.BASE]
        self.loader = SyntheticLoader(spec, device, setup.shape.is_fp8)
        self._form = self.loader.form()
        experts = PoolExperts(
            self.pool, self.pools.get(Plane.FINE), setup.layout, n_layers=n_layers, mailbox=None,
            host=self._host, form=self._form,
        )  # fmt: skip
        self.model = StepModel(
            spec, self.loader, self.kv, {setup.plane: experts},
            context=self.kv.free_tokens, device=device,
            error=torch.zeros(1, dtype=torch.int32, device=device),
            with_head=spec.mtp is not None,
        )  # fmt: skip
        self.loader.forget_piece()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self._random = np.random.default_rng(0)
        popular = self.loader.rows_by_popularity()[:n_slots]
        places = rows.table[popular].tolist()
        self.pool.preload(popular[::-1], places[::-1], rows.memory)
        for width in sorted({setup.rows, setup.most_rows}):
            self._capture(width)

    def run(self, hit_rate: float) -> Figures:
        """Find the popularity that gives the hit rate, then measure everything there."""
        setup, tried = self._setup, dict[float, Steps]()

        def rate_at(popularity: float) -> float:
            self._warm_up(popularity)
            found = tried[popularity] = self.steps(setup.steps)
            self._progress(
                f"Popularity {popularity:.5f}: {found.hit_rate:.2%} hits,"
                f" {found.median_ms:.2f} ms per step"
            )
            return found.hit_rate

        n_slots = self.pool.tables.n_slots
        guess = (
            0.25 * self.pool.tables.n_layers / n_slots
        )  # spans more experts than a layer's share
        if n_slots == setup.n_rows:
            rate_at(guess)
            popularity = guess
        else:
            popularity = find_popularity(rate_at, hit_rate, guess=guess, attempts=setup.attempts)
        steps = tried[popularity]
        if popularity != next(reversed(tried)):
            self._warm_up(popularity)
        by_group, drafts = self._by_group(steps), self._drafts()
        prefill_tok_per_s = self._prefill()
        return Figures(
            steps=steps,
            n_slots=n_slots,
            n_fine_slots=setup.n_fine_slots(),
            attempts=len(tried),
            vram_bytes=self._vram_bytes(steps),
            pcie_bytes=round(
                steps.misses * setup.layout.base_stride
                + steps.fine_misses * setup.layout.fine_stride
            ),
            by_group=by_group,
            bandwidth=self.bandwidth,
            prefill_tok_per_s=prefill_tok_per_s,
            peak_vram_bytes=self._peak_vram(),
            drafts=drafts,
        )

    def _warm_up(self, popularity: float) -> None:
        self.loader.set_popularity(popularity)
        if self._setup.warm:
            self.steps(self._setup.warm)

    def steps(self, count: int, rows: int | None = None) -> Steps:
        """Run at least one step, of so many rows as the set-up says or `rows`, and say what they
        took.

        Raises:
            MoetError: MD-ENG-04, the model gave numbers that are not finite.
        """
        rows = self._setup.rows if rows is None else rows
        sequence, before, times = self._sequence(rows), self._counts(), []
        found = self.pool.found[rows - 1].n_uniq
        distinct = torch.zeros_like(found)
        for _ in range(count):
            began = time.perf_counter()
            self._step(sequence, rows)
            times.append(1e3 * (time.perf_counter() - began))
            distinct += found  # of the last MoE layer, for all of them
        self.kv.release(sequence)
        done = {plane: (self._counts()[plane] - before[plane]).tolist() for plane in before}
        asked, hits, misses, _ = done[Plane.BASE]
        fine = done[Plane.FINE][2] if Plane.FINE in done else 0
        n_layers = len(self._setup.shape.spec.main_moe_layers)
        per_step = int(distinct) * n_layers / count
        return Steps(tuple(times), hits / asked, misses / count, per_step, fine / count)

    def _drafts(self) -> DraftFigures | None:
        """Steps that check guesses, and the head by itself: a row behind the sequence's end."""
        setup = self._setup
        if not setup.drafts:
            return None
        self._progress(f"Steps that check {setup.drafts} guesses")
        if setup.warm:
            self.steps(setup.warm, setup.most_rows)
        checks = self.steps(setup.steps, setup.most_rows)
        sequence, times = self._sequence(1), []
        state = torch.ones((1, setup.shape.spec.hidden), device=setup.device)
        for _ in range(setup.warm + setup.steps):
            token = int(self._random.integers(setup.shape.spec.vocab))
            began = time.perf_counter()
            guess = self.model.guess([StepRow(token, sequence)], setup.plane, state)
            times.append(1e3 * (time.perf_counter() - began))
            if guess[0] is None:
                raise fail("MD-ENG-04", reason="a made-up head gave invalid numbers", model="MODEL")
        self.kv.release(sequence)
        return DraftFigures(checks, median(times[setup.warm :]))

    def _step(self, sequence: KvSequence, rows: int) -> None:
        tokens = self._random.integers(self._setup.shape.spec.vocab, size=rows).tolist()
        steps = [StepRow(token, sequence, i) for i, token in enumerate(tokens)]
        if None in self.model.choose(steps, self._setup.plane, [GREEDY] * rows):
            raise fail("MD-ENG-04", reason="made-up weights gave invalid numbers", model="MODEL")

    def _sequence(self, rows: int) -> KvSequence:
        """A sequence whose next step of so many rows sees the whole context."""
        sequence = self.kv.reserve(self._setup.entries)
        if sequence is None:
            raise ValueError("no KV pages are free")
        sequence.length = self._setup.entries - rows
        return sequence

    def _capture(self, rows: int) -> None:
        """Run a step once, so that its kernels are compiled, then record it."""
        self._progress(f"Compiling the step of {rows} rows" if rows > 1 else "Compiling the step")
        sequence = self._sequence(rows)
        sequence.length = 0
        steps = [StepRow(0, sequence, i) for i in range(rows)]
        self.model.choose(steps, self._setup.plane, [Draw(temperature=1.0)] * rows)
        if self.model.head is not None:
            self.model.guess(steps, self._setup.plane, self.model.states(0, rows))
        if self._setup.device.type == "cuda":
            self.model.capture(rows, self._setup.plane)
        self.kv.release(sequence)

    def _counts(self) -> dict[Plane, NDArray[np.int64]]:
        return {
            plane: pool.tables.counters.cpu().numpy().astype(np.int64).sum(0)
            for plane, pool in self.pools.items()
        }

    def _vram_bytes(self, steps: Steps) -> int:
        """Bytes that a step must read: dense weights once, each distinct expert once, KV once."""
        setup = self._setup
        experts = steps.distinct * setup.layout.base_bytes
        if setup.plane is Plane.FINE:
            experts += steps.distinct * setup.layout.fine_bytes
        kv = sum(
            layer.mixer.entry_bytes(KV_FORM) * _seen(layer.mixer, setup.entries)
            for layer in setup.shape.spec.layers
            if not isinstance(layer.mixer, Gdn)
        )
        return dense_read_bytes(setup.shape, setup.rows) + round(experts) + kv

    def _by_group(self, steps: Steps) -> Mapping[str, float] | None:
        count = self._setup.traced
        if self._setup.device.type != "cuda":
            return None
        rows = self._setup.rows
        sequence = self._sequence(rows)

        def some_steps() -> None:
            for _ in range(count):
                self._step(sequence, rows)

        times = kernel_times(some_steps)
        self.kv.release(sequence)
        return split(times, n_steps=count, step_ms=steps.median_ms) if times else None

    def _peak_vram(self) -> int | None:
        on_card = self._setup.device.type == "cuda"
        return torch.cuda.max_memory_reserved(self._setup.device) if on_card else None

    def _prefill(self) -> float | None:
        """Prompt tokens per second, with routing so even that every expert is needed."""
        setup, spec = self._setup, self._setup.shape.spec
        if not setup.prefill:
            return None
        self._progress(f"Reading a prompt of {setup.prefill} tokens")
        self.loader.set_popularity(0.0)
        buffers = ChunkBuffers.make(
            spec, setup.chunk, context=self.kv.free_tokens, device=setup.device
        )
        with ThreadPoolExecutor(1) as readers:
            experts = ChunkExperts(
                self.pools, self._host, setup.layout, buffers,
                n_experts=spec.moe_ffn.router.n_experts, readers=readers, bounce={},
                form=self._form,
            )  # fmt: skip
            model = ChunkModel(self.model, buffers, experts)
            prompt = self._random.integers(spec.vocab, size=setup.prefill).tolist()
            reading = Reading.FAST if setup.plane is Plane.BASE else Reading.EXACT
            times = [read_prompt(model, self.kv, prompt, reading) for _ in range(PROMPTS)]
        return setup.prefill / median(times[1:])  # the first one compiles


def _seen(mixer: Mixer, entries: int) -> int:
    """Entries that a token reads."""
    window = mixer.window if isinstance(mixer, Gqa) else None
    return min(entries, window or entries)


def read_prompt(model: ChunkModel, kv: KvCache, prompt: Sequence[int], reading: Reading) -> float:
    """Seconds from a prompt's tokens to the scores behind its last one."""
    sequence = kv.reserve(len(prompt))
    if sequence is None:
        raise ValueError(f"no KV pages for a prompt of {len(prompt)} tokens")
    began = time.perf_counter()
    for at in range(0, len(prompt), model.most_rows):
        chunk = model.begin(prompt[at : at + model.most_rows], sequence, reading)
        while chunk.next_layer < model.n_layers:
            model.layer(chunk)
        model.logits(chunk)
        sequence.length += chunk.rows.n
    took_s = time.perf_counter() - began
    kv.release(sequence)
    return took_s
