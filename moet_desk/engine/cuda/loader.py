"""From a pack to everything the engine thread works with on a CUDA device. The twin is
engine/loader.

Order: index, dense stack to VRAM, rows into the pinned arena, hot rows into slots, one run and one
capture of each step graph.
"""

from __future__ import annotations

import gc
import logging
import mmap
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from moet_desk import hardware
from moet_desk.engine import heat
from moet_desk.engine.blocks.expert_math import ExpertForm, load_form
from moet_desk.engine.card_faults import is_out_of_memory
from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers
from moet_desk.engine.cuda.decode import CudaDecoder
from moet_desk.engine.cuda.delta import DeviceStates
from moet_desk.engine.cuda.dense_weights import DenseLoader
from moet_desk.engine.cuda.draft import DeviceHead
from moet_desk.engine.cuda.expert_stream import ChunkExperts, Reading, bounce_memory
from moet_desk.engine.cuda.load_pools import (
    PoolSizes,
    fill_slots,
    keeper_of,
    make_pools,
    release_pools,
)
from moet_desk.engine.cuda.mailbox_server import READERS, MailboxServer
from moet_desk.engine.cuda.pinned import PinnedMemory
from moet_desk.engine.cuda.pool_states import PooledStates
from moet_desk.engine.cuda.pooled_sizes import pooled_mixers
from moet_desk.engine.cuda.pools import DevicePool, PoolExperts
from moet_desk.engine.cuda.prefill import ChunkModel, CudaPrefiller
from moet_desk.engine.cuda.residency import CudaResidency
from moet_desk.engine.cuda.step import StepModel
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.cuda.vram import VramKeeper
from moet_desk.engine.dense_format import DenseFormat, fit_device
from moet_desk.engine.draft import MtpDrafter
from moet_desk.engine.drafting import drafting_of
from moet_desk.engine.families import packed_head, spec_for
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.kv_cache import KvCache
from moet_desk.engine.load_report import LoadReport
from moet_desk.engine.model_shape import (
    RowSizes,
    check_head,
    check_kernels,
    device_kv_format,
    device_shape,
    index_layers,
    kv_token_bytes,
    loads_head,
    n_kv_layers,
    rings_of,
    running_layers,
    wishes_of,
)
from moet_desk.engine.planned_model import dense_saving, loaded_bytes
from moet_desk.engine.sampling import Draw
from moet_desk.engine.spec import Spec
from moet_desk.errors import fail
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.mailbox import MAILBOX
from moet_desk.kernels.triton import fetch
from moet_desk.plan import (
    KV_PAGE_TOKENS,
    DeviceBudget,
    TierPlan,
    contexts,
    pinned_budget,
    split_ram,
    vram_budget,
    vram_kept,
)
from moet_desk.store.arena import Allocate, Arena, plain_memory
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from moet_desk.telemetry import LoadStep

log = logging.getLogger("moet_desk.engine")

SECOND_SHARE = 0.8
"""Part of the VRAM budget that the second attempt to load plans with."""


@dataclass(frozen=True, slots=True)
class CudaCore:
    """A loaded model with its tiers on a device. Every field belongs to the engine thread."""

    reader: PackReader
    spec: Spec
    plan: TierPlan
    device: str
    kv: KvCache
    arena: Arena
    pools: Mapping[Plane, DevicePool]
    vram: VramKeeper | None  # None: the pools have a fixed size
    residency: CudaResidency
    decoder: CudaDecoder
    prefiller: CudaPrefiller
    model: StepModel
    pinned: PinnedMemory
    server: MailboxServer | None
    readers: ThreadPoolExecutor
    prefix_bytes: int  # of RAM
    dense_format: DenseFormat

    def close(self) -> None:
        """Release files, threads and memory."""
        if self.server is not None:
            self.server.close()
        self.readers.shutdown(wait=False)  # a read that does not end would hold up the exit
        release_pools(self.pools)
        self.arena.close()
        self.pinned.release()
        self.reader.close()


def load(
    pack: Path,
    options: EngineOptions,
    show: Callable[[tuple[LoadStep, ...]], None] = lambda steps: None,
    *,
    device: torch.device,
    widths: tuple[int, ...] = (1, 2, 3, 4, 8),
) -> CudaCore:
    """Load a pack onto `device`.

    Args:
        pack: the pack folder.
        options: how to run it.
        show: gets the loading steps.
        device: a CUDA device; the interpreter's tests pass the CPU.
        widths: numbers of rows whose step is captured; others run launch by launch.

    Raises:
        MoetError: as `engine.loader.load`, and MD-GPU-05, MD-GPU-09, MD-GPU-10, MD-RAM-02, and
            MD-GPU-11: the card ran out of memory, with a smaller plan too.
    """
    if options.opportunistic:  # the expert kernels take one plane for all experts of a launch
        raise fail("MD-GPU-09")

    def attempt(options: EngineOptions) -> CudaCore | str:
        with ExitStack() as undo:  # what was made before something fails
            try:
                core = _load(pack, options, LoadReport(show), device, widths, undo)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    return str(error)
                raise
            undo.pop_all()
        return core

    core = attempt(options)
    if isinstance(core, str):  # what is free, or what the model takes, was not as planned
        log.warning("the card's memory ran out while loading, so it is planned with less: %s", core)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        less = int(SECOND_SHARE * vram_budget(_free_memory(device), options.vram_bytes))
        core = attempt(replace(options, vram_bytes=less))
    if isinstance(core, str):
        raise fail("MD-GPU-11", what=f"the model ({core.splitlines()[0]})")
    return core


def _load(
    pack: Path,
    options: EngineOptions,
    report: LoadReport,
    device: torch.device,
    widths: tuple[int, ...],
    undo: ExitStack,
) -> CudaCore:
    report.begin("Read the pack index")
    opened = _open(pack, options, device, undo)
    reader, spec, plan = opened.reader, opened.spec, opened.plan
    report.end()
    pinned = PinnedMemory(progress=lambda _: None)
    undo.callback(pinned.release)
    allocate = pinned.allocate if device.type == "cuda" else plain_memory
    arena = _to_ram(opened, allocate, report)
    report.begin("Dense layers")
    sizes = _pool_sizes(opened, options)
    pools = make_pools(sizes, arena, device)
    undo.callback(release_pools, pools)
    states = states_of(
        spec, opened.form, options.max_running, plan.kv_pages, device, with_head=opened.with_head
    )
    kv = KvCache(
        spec.attention, n_layers=n_kv_layers(spec, with_head=opened.with_head),
        n_pages=plan.kv_pages, page_tokens=KV_PAGE_TOKENS, form=opened.form, device=device,
        index_layers=index_layers(spec, with_head=opened.with_head), slots=states,
        recurrent=spec.recurrent,
        rings=rings_of(spec, plan, options.max_running),
    )  # fmt: skip
    error = torch.zeros(1, dtype=torch.int32, device=device)
    mailbox, server = _mailbox(arena, opened, allocate, error)
    if server is not None:
        undo.callback(server.close)
    dense = DenseLoader(reader, device, opened.dense_format, norm_offset=spec.norm_offset)
    form = load_form(spec, dense.table)
    model = StepModel(
        spec, dense, kv, _step_experts(opened, pools, mailbox, arena, form),
        context=plan.context, device=device, error=error, server=server,
        with_head=opened.with_head, states=states, looks_ahead=options.lookahead,
    )  # fmt: skip
    report.end()
    widths = tuple(sorted({min(width, model.most_rows) for width in widths}))
    fill_slots(pools[Plane.BASE], arena, opened.order)
    if device.type == "cuda":
        _capture(model, kv, widths, report)
    readers = ThreadPoolExecutor(READERS, thread_name_prefix="io-prompt")
    buffers = ChunkBuffers.make(spec, plan.prefill_chunk, context=plan.context, device=device)
    streamed = ChunkExperts(
        pools, arena, reader.layout, buffers, n_experts=reader.meta.n_experts, readers=readers,
        bounce=_bounce(opened, allocate), form=form, ahead_bytes=plan.ahead_bytes,
    )  # fmt: skip
    residency = CudaResidency(
        pools, arena, reader.layout, moe_layers=opened.moe_layers, server=server,
        streamed=streamed.counters,
    )  # fmt: skip
    head = MtpDrafter(DeviceHead(model, widths)) if opened.with_head else None
    decoder = CudaDecoder(model, drafting_of(options, head, widths=widths))
    vram = keeper_of(pools, sizes, keep=opened.keep, device=device, refill=residency.fill_base)
    prefiller = CudaPrefiller(
        ChunkModel(model, buffers, streamed), decoder, chunk=plan.prefill_chunk,
        fast=fast_reading(plan, len(opened.order)),
        make_room=(lambda: None) if vram is None else vram.make_room,
    )  # fmt: skip
    residency.restore_heat(heat.read(pack))
    return CudaCore(
        reader, spec, plan, _name(device), kv, arena, pools, vram, residency, decoder, prefiller,
        model, pinned, server, readers, opened.prefix_bytes, opened.dense_format,
    )  # fmt: skip


def states_of(
    spec: Spec,
    form: KvFormat,
    n_slots: int,
    n_pages: int,
    device: torch.device,
    *,
    with_head: bool,
) -> DeviceStates | PooledStates | None:
    """States of the layers that have one, for so many sequences; None if there are no such."""
    if spec.delta:
        return DeviceStates(spec.delta, n_slots, device)
    mixers = pooled_mixers(spec, with_head=with_head)
    if not mixers:
        return None
    pages = {"n_pages": n_pages, "page_tokens": KV_PAGE_TOKENS}
    return PooledStates(mixers, n_slots, form, **pages, device=device)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A pack that is about to be loaded.

    Attributes:
        form: storage format of KV.
        order: all rows of the layers that run, those that were hot last time first.
        moe_layers: model layer numbers of those layers.
        prefix_bytes: RAM for prompts that were read.
        with_head: whether the MTP head is one of them.
        dense_format: of weights that are no routed experts.
        keep: bytes of the card that stay free.
    """

    reader: PackReader
    spec: Spec
    form: KvFormat
    plan: TierPlan
    order: list[int]
    moe_layers: tuple[int, ...]
    prefix_bytes: int
    with_head: bool
    dense_format: DenseFormat
    keep: int

    @property
    def all_in_ram(self) -> bool:
        return _all_in_ram(self.plan, len(self.order))


def _open(pack: Path, options: EngineOptions, device: torch.device, undo: ExitStack) -> _Opened:
    """Read the index and plan the tiers; says how prompts and rows on disk will be read."""
    reader = PackReader.open(pack)
    undo.callback(reader.close)
    config, path = reader.config(), str(pack / "config.json")
    has_mtp = packed_head(config, reader.meta.moe_layers, reader.dense.names(), path=path)
    spec = spec_for(config, path=path, has_mtp=has_mtp)
    check_kernels(spec)
    check_head(spec, options)
    form = device_kv_format(options.kv_format, spec)
    with_head = loads_head(spec, options, on_card=True)
    dense_format, plan, prefix_bytes, keep = _plan(
        reader, spec, form, options, device, with_head=with_head
    )
    layers = running_layers(spec, with_head=with_head)
    n_rows = len(layers) * reader.meta.n_experts
    _say_reading(plan, n_rows, fast_reading(plan, n_rows))
    if not _all_in_ram(plan, n_rows):
        _pass_page_cache(reader)
    hot = _hot_first(pack, n_rows)
    if dense_format is DenseFormat.INT8:
        log.info("weights that are no routed experts are rounded to 8 bits")
    return _Opened(
        reader, spec, form, plan, hot, layers, prefix_bytes, with_head, dense_format, keep
    )


def _to_ram(opened: _Opened, allocate: Allocate, report: LoadReport) -> Arena:
    """An arena of the plan's size, filled with the hottest rows."""
    plan, order = opened.plan, opened.order
    arena = Arena(
        opened.reader, base_rows=plan.arena_base_rows, fine_rows=plan.arena_fine_rows,
        allocate=allocate,
    )  # fmt: skip
    for plane, count in ((Plane.BASE, plan.arena_base_rows), (Plane.FINE, plan.arena_fine_rows)):
        rows = order[: min(count, len(order))]
        stride = arena.memory(plane).shape[1]
        report.begin(f"{plane.value.title()} rows to RAM", total=len(rows) * stride)
        arena.preload(plane, rows, progress=report.advance)
        report.end()
    return arena


def _step_experts(
    opened: _Opened,
    pools: Mapping[Plane, DevicePool],
    mailbox: fetch.Mailbox | None,
    arena: Arena,
    form: ExpertForm,
) -> Mapping[Plane, PoolExperts]:
    """What computes the routed experts of a step, for fast and for exact answers."""
    base, fine = pools[Plane.BASE], pools[Plane.FINE]
    return {
        plane: PoolExperts(
            base, second, opened.reader.layout, n_layers=len(opened.spec.main_moe_layers),
            mailbox=mailbox, host=arena, form=form, n_named=opened.spec.n_named,
            in_ram=_planes_in_ram(opened.plan, len(opened.order)),
        )
        for plane, second in ((Plane.BASE, None), (Plane.FINE, fine))
    }  # fmt: skip


def fast_reading(plan: TierPlan, n_rows: int) -> Reading:
    """How prompts of fast requests are read.

    Prompts read at 2 bits made answers 8 to 11 % longer where that was measured (design §8), so FP4
    rows are worth their time as long as they come from RAM; from disk they take many times as long.
    """
    return Reading.FAST_FP4 if _all_in_ram(plan, n_rows) else Reading.FAST


def _all_in_ram(plan: TierPlan, n_rows: int) -> bool:
    """Whether no row is on disk alone; an FP4 weight needs its rows of both planes."""
    return len(_planes_in_ram(plan, n_rows)) == len(Plane)


def _planes_in_ram(plan: TierPlan, n_rows: int) -> list[Plane]:
    """Planes of which no row is on disk alone."""
    rows = {Plane.BASE: plan.arena_base_rows, Plane.FINE: plan.arena_fine_rows}
    return [plane for plane, n in rows.items() if n >= n_rows]


def _say_reading(plan: TierPlan, n_rows: int, reading: Reading) -> None:
    if reading is Reading.FAST_FP4:
        log.info("prompts of fast requests are read with FP4 rows: all of them are in RAM")
        return
    bits, have = "prompts of fast requests are read with 2-bit rows", plan.arena_fine_rows
    log.info("%s: RAM holds %s of %s FP4 rows", bits, f"{have:,}", f"{n_rows:,}")


def _pass_page_cache(reader: PackReader) -> None:
    """Read rows directly: the page cache would take RAM that the arena makes better use of."""
    if not reader.go_direct():
        why = "the file system refuses direct reads"
        log.warning("rows on disk are read through the page cache: %s (%s)", why, reader.path)


def _bounce(opened: _Opened, allocate: Allocate) -> Mapping[Plane, torch.Tensor]:
    """Pinned places for a prompt's rows that are not in RAM; none if all rows are."""
    if opened.all_in_ram:
        return {}
    return bounce_memory(opened.reader.layout, opened.reader.meta.n_experts, allocate)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _plan(
    reader: PackReader,
    spec: Spec,
    form: KvFormat,
    options: EngineOptions,
    device: torch.device,
    *,
    with_head: bool,
) -> tuple[DenseFormat, TierPlan, int, int]:
    """How dense weights lie, the tiers, bytes of RAM for prompts that were read, and bytes of the
    card that stay free.
    """
    machine, free = hardware.probe(), _free_memory(device)
    ram = options.ram_bytes or pinned_budget(
        machine.ram_available, machine.ram_total, is_wsl=machine.is_wsl
    )
    ram, prefix_bytes = split_ram(ram, options.prefix_bytes)
    budget = DeviceBudget(vram_budget(free, options.vram_bytes), ram)
    token_bytes = kv_token_bytes(spec, form, with_head=with_head, on_card=True)
    sizes = RowSizes(reader.layout, reader.meta.base_stride, reader.meta.fine_stride)
    dense_bytes = loaded_bytes(reader.path)
    fit = fit_device(
        options.dense_format,
        partial(device_shape, spec, sizes, form, dense_bytes=dense_bytes, with_head=with_head),
        dense_saving(reader.path),
        budget,
        contexts(wishes_of(options), spec.context, token_bytes, budget.vram),
    )
    return fit.dense, fit.tiers, prefix_bytes, vram_kept(free, budget.vram)


def _free_memory(device: torch.device) -> int:
    """Bytes of the device that nobody has."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return hardware.probe().ram_available


def _hot_first(pack: Path, n_rows: int) -> list[int]:
    hot = [row for row, _ in heat.read(pack) if 0 <= row < n_rows]
    return hot + sorted(set(range(n_rows)) - set(hot))


def _pool_sizes(opened: _Opened, options: EngineOptions) -> PoolSizes:
    return PoolSizes(
        len(opened.moe_layers), opened.reader.meta.n_experts, opened.spec.moe_ffn.router.top_k,
        opened.plan, options,
    )  # fmt: skip


def _mailbox(
    arena: Arena, opened: _Opened, allocate: Allocate, error: torch.Tensor
) -> tuple[fetch.Mailbox | None, MailboxServer | None]:
    """A mailbox and its server, if some rows are not in RAM."""
    if opened.all_in_ram:
        return None, None
    page = allocate(MAILBOX.n_bytes, mmap.PAGESIZE)
    address = torch.frombuffer(page, dtype=torch.uint8).data_ptr()
    return fetch.Mailbox.at(address, error=error), MailboxServer(page, arena)


def _capture(model: StepModel, kv: KvCache, widths: tuple[int, ...], report: LoadReport) -> None:
    """Run each step once, so that its kernels are compiled, then record it."""
    report.begin("Capture decode graphs", total=2 * len(widths), unit="graphs")
    sequence = kv.reserve(max(widths))
    if sequence is None:
        raise ValueError("no KV pages for a first step")
    for plane in Plane:
        for rows in widths:
            steps = [StepRow(0, sequence, i) for i in range(rows)]
            model.choose(steps, plane, [Draw(temperature=1.0)] * rows)
            if model.head is not None:
                model.guess(steps, plane, model.states(0, rows))
            model.capture(rows, plane)
            report.advance(1)
    kv.release(sequence)
    report.end()
