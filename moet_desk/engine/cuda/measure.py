"""Decode steps of a model of real shape with made-up weights, measured as the engine runs them.

A step is: host inputs, one graph, the choice of each row's best token behind it, tokens back on the
host. Input tokens are random, so that routing follows the routers' biases; those are adjusted until
the pool answers the wanted share of look-ups. Owned by the thread that measures.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.engine.cuda.bandwidth import copy_bandwidth
from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers
from moet_desk.engine.cuda.expert_stream import ChunkExperts, Reading, bounce_memory
from moet_desk.engine.cuda.kernel_groups import KernelRun, by_kernel, kernel_runs, split
from moet_desk.engine.cuda.loader import states_of
from moet_desk.engine.cuda.mailbox_server import READERS, MailboxServer
from moet_desk.engine.cuda.measured import (
    KV_FORM,
    PAGE_TOKENS,
    DraftFigures,
    DriveFigures,
    Figures,
    Setup,
    Steps,
)
from moet_desk.engine.cuda.pinned import PinnedMemory
from moet_desk.engine.cuda.pools import DevicePool, PoolExperts
from moet_desk.engine.cuda.popularity import find_popularity
from moet_desk.engine.cuda.prefill import ChunkModel
from moet_desk.engine.cuda.step import StepModel
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.cuda.synthetic import (
    SyntheticHost,
    SyntheticLoader,
    dense_read_bytes,
    make_arena,
)
from moet_desk.engine.cuda.synthetic_drive import SyntheticDrive
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.model_shape import index_layers, n_kv_layers, ring_layers
from moet_desk.engine.sampling import GREEDY, Draw
from moet_desk.engine.spec import Gdn, Gqa, Mixer, PooledAttention, Rings, Spec, indexer_of
from moet_desk.errors import fail
from moet_desk.kernels.kv_sizes import index_key_bytes, pooled_key_bytes
from moet_desk.kernels.mailbox import MAILBOX
from moet_desk.kernels.triton import fetch
from moet_desk.store.arena import Allocate, Arena, plain_memory
from moet_desk.store.pack_format import Plane
from moet_desk.units import show_memory

_READ_ROWS = 64  # given to the readers together

LEAST_STEPS = 20
"""Of a measurement, however long they take."""

PROMPTS = 4
"""Prompts that are read, the first one to compile; two if they take longer than this together:"""

PROMPTS_S = 30.0

TRACED_PROMPT_S = 8.0
"""A prompt that takes longer is not traced: what the profiler keeps of it would take minutes."""


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
        with ExitStack() as undo:
            allocate = pinned.allocate if on_card else plain_memory
            return ShapeBench(setup, allocate, progress, undo=undo).run(hit_rate)
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
        undo: gets what must be closed, if there is a drive.
    """

    def __init__(
        self,
        setup: Setup,
        allocate: Allocate,
        progress: Callable[[str], None],
        *,
        undo: ExitStack | None = None,
    ) -> None:
        spec, device, self._setup, self._progress = setup.shape.spec, setup.device, setup, progress
        n_layers, router = len(spec.moe_layers), spec.moe_ffn.router
        n_slots = setup.n_slots()
        progress("Pinning rows")
        self._allocate = allocate
        self._drive = _drive(setup, progress)
        if self._drive is not None and undo is not None:
            undo.callback(self._drive.close)
        self._host = _host(setup, self._drive, allocate)
        memory = self._host.memory(Plane.BASE)
        on_card = device.type == "cuda"
        self.bandwidth = copy_bandwidth(memory, device) if on_card else None
        progress("Making dense weights")
        with_head = spec.mtp is not None
        states = states_of(spec, KV_FORM, 1, setup.kv_pages, device, with_head=with_head)
        self.kv = KvCache(
            spec.attention, n_layers=n_kv_layers(spec, with_head=with_head), n_pages=setup.kv_pages,
            page_tokens=PAGE_TOKENS, form=KV_FORM, device=device,
            index_layers=index_layers(spec, with_head=with_head), recurrent=spec.recurrent,
            slots=states, rings=Rings(ring_layers(spec), spec.window, setup.ring_pages, 1),
        )  # fmt: skip
        self.pools = {
            plane: DevicePool.make(
                plane, self._arena(plane), n_layers=n_layers, n_experts=router.n_experts,
                n_slots=n, top_k=router.top_k, device=device,
            )
            for plane, n in zip(setup.planes, (n_slots, setup.n_fine_slots()), strict=False)
        }  # fmt: skip
        self.pool = self.pools[Plane.BASE]
        self.loader = SyntheticLoader(spec, device, setup.shape.is_fp8, setup.shape.is_rounded)
        self._form = self.loader.form()
        error = torch.zeros(1, dtype=torch.int32, device=device)
        mailbox, server = self._mailbox(error)
        if server is not None and undo is not None:
            undo.callback(server.close)
        experts = PoolExperts(
            self.pool, self.pools.get(Plane.FINE), setup.layout,
            n_layers=len(spec.main_moe_layers),  # the last of which ends a step, with a head too
            mailbox=mailbox, host=self._host, form=self._form, n_named=spec.n_named,
            in_ram=[plane for plane, n in setup.in_ram().items() if n == setup.n_rows],
        )  # fmt: skip
        self.model = StepModel(
            spec, self.loader, self.kv, {setup.plane: experts},
            context=self.kv.free_tokens, device=device,
            error=error, server=server, with_head=with_head, states=states,
            looks_ahead=setup.looks_ahead,
        )  # fmt: skip
        self.loader.forget_piece()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self._random = np.random.default_rng(0)
        popular = self.loader.rows_by_popularity()
        self._fill_ram(popular)
        experts.recover()  # the device's view of where rows lie
        popular = popular[: min(n_slots, setup.in_ram()[Plane.BASE])]
        places = self._host.table(Plane.BASE)[popular].tolist()
        self.pool.preload(popular[::-1], places[::-1], memory)
        for width in sorted({setup.rows, setup.most_rows}):
            self._capture(width)

    def _arena(self, plane: Plane) -> fetch.Arena:
        """The rows of a plane as kernels see them."""
        memory = self._host.memory(plane)
        table = torch.from_numpy(self._host.table(plane).copy()).to(self._setup.device)
        return fetch.Arena(memory.data_ptr(), table, memory.shape[1])

    def _mailbox(self, error: Tensor) -> tuple[fetch.Mailbox | None, MailboxServer | None]:
        """How a step asks for rows on the drive, if there are any."""
        if not isinstance(self._host, Arena):
            return None, None
        page = self._allocate(MAILBOX.n_bytes, mmap.PAGESIZE)
        address = torch.frombuffer(page, dtype=torch.uint8).data_ptr()
        return fetch.Mailbox.at(address, error=error), MailboxServer(page, self._host)

    def _fill_ram(self, popular: Sequence[int]) -> None:
        if self._drive is None or not isinstance(self._host, Arena):
            return
        with ThreadPoolExecutor(READERS) as readers, self._drive.from_cache():
            for plane, count in self._setup.in_ram().items():
                self._progress(f"Filling RAM with {count:,} of {len(popular):,} {plane.value} rows")
                for at in range(0, count, _READ_ROWS):
                    rows = popular[at : min(at + _READ_ROWS, count)]
                    self._host.bring(plane, rows, keep=(), run=readers)
                self._host.forget_times()  # of reads that no step waited for

    def _drive_figures(self) -> DriveFigures | None:
        if self._drive is None or not isinstance(self._host, Arena):
            return None
        read_ms = self._host.read_times()
        return DriveFigures(self._drive.bytes_per_s(), read_ms, self._drive.direct)

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
        runs, drafts, drive = self.traced_steps(), self._drafts(), self._drive_figures()
        traced = setup.traced
        prefill_tok_per_s, of_prompt = self._prefill()
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
            by_group=split(runs, n_steps=traced, step_ms=steps.median_ms) if runs else None,
            by_kernel=by_kernel(runs, n_steps=traced) if runs else None,
            prefill_by_kernel=by_kernel(of_prompt, n_steps=1) if of_prompt else None,
            bandwidth=self.bandwidth,
            drive=drive,
            prefill_tok_per_s=prefill_tok_per_s,
            peak_vram_bytes=self._peak_vram(),
            drafts=drafts,
            popularity=popularity,
        )

    def _warm_up(self, popularity: float) -> None:
        self.loader.set_popularity(popularity)
        if self._setup.warm:
            self.steps(self._setup.warm)

    def steps(self, count: int, rows: int | None = None) -> Steps:
        """Run at least one step, of so many rows as the set-up says or `rows`, and say what they
        took; fewer than `count` if these would take longer than the set-up allows.

        Raises:
            MoetError: MD-ENG-04, the model gave numbers that are not finite.
        """
        rows = self._setup.rows if rows is None else rows
        sequence, before, times = self._sequence(rows), self._counts(), []
        read = self._read()
        found = self.pool.found[rows - 1].n_uniq
        distinct = torch.zeros_like(found)
        for _ in range(count):
            began = time.perf_counter()
            self._step(sequence, rows)
            times.append(1e3 * (time.perf_counter() - began))
            distinct += found  # of the last MoE layer, for all of them
            if len(times) >= LEAST_STEPS and sum(times) > 1e3 * self._setup.steps_s:
                count = len(times)
                break
        self.kv.release(sequence)
        done = {plane: self._counts()[plane] - before[plane] for plane in before}
        asked, hits, misses, _, ahead, needed = done[Plane.BASE].tolist()
        fine = done[Plane.FINE][[2, 4]].sum() if Plane.FINE in done else 0
        n_layers = len(self._setup.shape.spec.main_moe_layers)
        per_step = int(distinct) * n_layers / count
        rows_read, bytes_read = (
            (now - then) / count for now, then in zip(self._read(), read, strict=True)
        )
        return Steps(
            tuple(times), (hits - needed) / asked, (misses + ahead) / count, per_step,
            int(fine) / count, rows_read, bytes_read, ahead / count, needed / count,
        )  # fmt: skip

    def _read(self) -> tuple[int, int]:
        """Rows and bytes that came from the drive so far."""
        if not isinstance(self._host, Arena):
            return 0, 0
        counters = self._host.counters
        return counters.from_nvme, counters.bytes_read

    def play(self, go_on: Callable[[float], bool]) -> None:
        """Run steps one after another for as long as `go_on`, told the seconds of each, says so.

        Raises:
            MoetError: MD-ENG-04, as `steps`.
        """
        rows = self._setup.rows
        sequence, going = self._sequence(rows), True
        while going:
            began = time.perf_counter()
            self._step(sequence, rows)
            going = go_on(time.perf_counter() - began)
        self.kv.release(sequence)

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
        state = torch.ones_like(self.model.states(0, 1))
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
        if sequence.slot is not None:  # as if all rows of the step before were right
            sequence.base = sequence.length - rows
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
        """By plane, what the tables count, and behind that what was brought ahead."""
        return {
            plane: torch.cat([pool.tables.counters, pool.tables.ahead], 1).sum(0).cpu().numpy()
            for plane, pool in self.pools.items()
        }

    def _vram_bytes(self, steps: Steps) -> int:
        """Bytes that a step must read: dense weights once, each distinct expert once, KV once."""
        setup = self._setup
        experts = steps.distinct * setup.layout.base_bytes
        if setup.plane is Plane.FINE:
            experts += steps.distinct * setup.layout.fine_bytes
        kv = sum(
            layer.n_mixers * _read_bytes(layer.mixer, setup.shape.spec, setup.entries)
            for layer in setup.shape.spec.layers
        )
        return dense_read_bytes(setup.shape, setup.rows) + round(experts) + kv

    def traced_steps(self) -> list[KernelRun]:
        """Kernels of `Setup.traced` steps; none where nothing can be traced."""
        count = self._setup.traced
        if self._setup.device.type != "cuda":
            return []
        rows = self._setup.rows
        sequence = self._sequence(rows)

        def some_steps() -> None:
            for _ in range(count):
                self._step(sequence, rows)

        runs = kernel_runs(some_steps)
        self.kv.release(sequence)
        return runs

    def _bounce(self) -> Mapping[Plane, Tensor]:
        """Pinned places for a prompt's rows that are not in RAM; none if all rows are."""
        setup = self._setup
        if not isinstance(self._host, Arena):
            return {}
        return bounce_memory(
            setup.layout, setup.shape.spec.moe_ffn.router.n_experts, self._allocate
        )

    def _peak_vram(self) -> int | None:
        on_card = self._setup.device.type == "cuda"
        return torch.cuda.max_memory_reserved(self._setup.device) if on_card else None

    def _prefill(self) -> tuple[float | None, Sequence[KernelRun]]:
        """Prompt tokens per second, with routing so even that every expert is needed, and the
        kernels of one prompt more.
        """
        setup, spec = self._setup, self._setup.shape.spec
        if not setup.prefill:
            return None, ()
        self._progress(f"Reading a prompt of {setup.prefill} tokens")
        self.loader.set_popularity(0.0)
        buffers = ChunkBuffers.make(
            spec, setup.chunk, context=self.kv.free_tokens, device=setup.device
        )
        with ThreadPoolExecutor(READERS) as readers:
            experts = ChunkExperts(
                self.pools, self._host, setup.layout, buffers,
                n_experts=spec.moe_ffn.router.n_experts, readers=readers, bounce=self._bounce(),
                form=self._form, ahead_bytes=setup.ahead_bytes,
            )  # fmt: skip
            model = ChunkModel(self.model, buffers, experts)
            prompt = self._random.integers(spec.vocab, size=setup.prefill).tolist()
            reading = Reading.FAST if setup.plane is Plane.BASE else Reading.EXACT
            read = partial(read_prompt, model, self.kv, prompt, reading)
            times = list[float]()
            while len(times) < PROMPTS and (len(times) < 2 or sum(times) < PROMPTS_S):
                times.append(read())
                self._progress(f"Read it in {times[-1]:.2f} s")
            can_trace = setup.device.type == "cuda" and times[-1] < TRACED_PROMPT_S
            traced = kernel_runs(read) if can_trace else ()
        return setup.prefill / median(times[1:]), traced  # the first one compiles


def _drive(setup: Setup, progress: Callable[[str], None]) -> SyntheticDrive | None:
    if not setup.uses_drive:
        return None
    if setup.folder is None:
        raise ValueError("rows beyond the RAM limit need a folder")
    progress("Writing a file of made-up rows")
    return SyntheticDrive(setup.folder, setup.layout, setup.n_rows, setup.planes)


def _host(setup: Setup, drive: SyntheticDrive | None, allocate: Allocate) -> SyntheticHost | Arena:
    """The rows in RAM: a few that stand for all, or an arena over the drive."""
    if drive is not None:
        rows = setup.in_ram()
        return Arena(
            drive, base_rows=rows[Plane.BASE], fine_rows=rows.get(Plane.FINE, 0), allocate=allocate
        )
    return SyntheticHost(
        {
            plane: make_arena(setup.layout, setup.n_rows, allocate=allocate, plane=plane)
            for plane in setup.planes
        }
    )


def _read_bytes(mixer: Mixer, spec: Spec, entries: int) -> int:
    """KV bytes that a token reads of one attention: what it sees, and all keys of an indexer; or
    its state.
    """
    if isinstance(mixer, Gdn):
        return 4 * mixer.n_values * mixer.key_dim * mixer.value_dim
    if isinstance(mixer, PooledAttention):
        return _pooled_bytes(mixer, entries)
    seen, keys = entries, 0
    if isinstance(mixer, Gqa):
        seen = min(entries, mixer.window or entries)
    elif (indexer := indexer_of(spec)) is not None:
        seen = min(entries, indexer.top_k)
        if mixer.indexer is not None and entries > indexer.top_k:
            keys = entries * index_key_bytes(KV_FORM, indexer.head_dim)
    return mixer.entry_bytes(KV_FORM) * seen + keys


def _pooled_bytes(mixer: PooledAttention, entries: int) -> int:
    """The same of a window and pooled entries behind it."""
    seen, keys, pool = min(entries, mixer.window), 0, mixer.pool
    if pool is not None:
        closed = entries // pool.ratio
        seen += closed if pool.indexer is None else min(closed, pool.indexer.top_k)
        if pool.indexer is not None:
            keys = closed * pooled_key_bytes(KV_FORM, pool.indexer.head_dim)
    return mixer.entry_bytes(KV_FORM) * seen + keys


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
