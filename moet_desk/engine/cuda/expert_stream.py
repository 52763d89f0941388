"""Routed experts of a prompt chunk: each row is brought to the device once and serves all tokens.

Rows that have a slot are read there and none is evicted. The others go through staging places, on a
stream of their own, while the rows before them compute, and while the next layer's attention does;
rows that are not in RAM are read from the pack beside what decode keeps there. The twin is
engine/prefill.PrefillExperts. Called on the engine thread, between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.engine.blocks.expert_math import PLAIN, ExpertForm
from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers, shaped
from moet_desk.engine.cuda.chunk_sizes import batch_size, most_places, staging_bytes
from moet_desk.engine.cuda.pools import DevicePool
from moet_desk.engine.cuda.staging import Staging
from moet_desk.errors import MoetError
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.layouts import GROUP, ExpertLayout
from moet_desk.kernels.triton.grouped import (
    Batch,
    PairGroups,
    RowAddresses,
    add_rows,
    cut_batches,
    expand,
    group_pairs,
    grouped_down,
    grouped_gate_up,
    make_batches,
)
from moet_desk.kernels.triton.quant import plain_shape, quantize_rows
from moet_desk.store.arena import ABSENT, Allocate
from moet_desk.store.pack_format import Plane

AHEAD_PAIRS = 8
"""Mean pairs per expert from which on the next layer's rows are brought before anyone chose them:
nearly every expert is then chosen by someone.
"""

READ_S = 10.0
"""Seconds that a prompt waits for the rows of a batch. No kernel waits meanwhile, so this may be
long enough for a slow drive.
"""


class HostRows(Protocol):
    """Where rows lie in RAM, and how those that do not are read. `store.arena.Arena` is one."""

    def table(self, plane: Plane) -> NDArray[np.int32]: ...

    def memory(self, plane: Plane) -> Tensor: ...

    def read_into(self, plane: Plane, row: int, place: Tensor) -> None: ...

    def no_answer(self, row: int) -> MoetError: ...


def bounce_memory(
    layout: ExpertLayout, n_experts: int, allocate: Allocate
) -> Mapping[Plane, Tensor]:
    """Host memory for rows on disk on their way to staging: uint8 [places, stride] by plane."""
    strides = {Plane.BASE: layout.base_stride, Plane.FINE: layout.fine_stride}
    return {
        plane: torch.frombuffer(
            allocate(n * strides[plane], strides[plane]), dtype=torch.uint8
        ).view(n, -1)
        for plane, n in most_places(layout, n_experts).items()
    }


@dataclass(slots=True)
class StreamCounters:
    """Rows that prompts brought to the device since the start, and reads that failed."""

    from_ram: int = 0
    from_nvme: int = 0
    read_errors: int = 0
    n_bytes: int = 0
    bytes_from_nvme: int = 0


class Reading(Enum):
    """How a prompt's experts are computed: rows of which plane, and activations."""

    FAST = (Plane.BASE, Activations.INT8)
    FAST_FP4 = (Plane.FINE, Activations.INT8)
    EXACT = (Plane.FINE, Activations.INT15)

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Planes whose rows are needed."""
        return (Plane.BASE,) if self.value[0] is Plane.BASE else (Plane.BASE, Plane.FINE)

    @property
    def activations(self) -> Activations:
        """Of the experts' inputs and hidden values."""
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A layer's experts as its chunk needs them.

    Attributes:
        counts: pairs of each expert.
        slots: for each plane in use, the slot of each expert or -1.
        next_missing: experts of the next layer that have no slot in one of these planes.
    """

    counts: Sequence[int]
    slots: Mapping[Plane, Sequence[int]]
    next_missing: Sequence[int]

    def missing(self, expert: int) -> list[Plane]:
        """Planes whose row of the expert has no slot."""
        return [plane for plane, slots in self.slots.items() if slots[expert] < 0]


Fill = tuple[int, Plane, int]
"""A staging place and the row that goes there."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a batch of experts needs: places that its kernels read, and rows that come there."""

    places: Sequence[int]
    fills: Sequence[Fill]


@dataclass(frozen=True, slots=True)
class Ahead:
    """Rows that were brought before their layer began: the place of each expert."""

    layer: int
    reading: Reading
    places: dict[int, int]


class ChunkExperts:
    """Computes the routed experts of whole chunks.

    Args:
        pools: slots and tables of both planes; only read.
        host: rows in RAM.
        layout: sizes of an expert.
        buffers: the chunk's.
        n_experts: of a layer.
        readers: threads for rows on disk.
        bounce: of each plane pinned host memory [places, stride] for rows on disk, as many places
            as `most_places` says; empty if all rows are in RAM.
        form: of the experts; biases are on the device.
        ahead_bytes: more staging memory, for rows that come before their layer.
    """

    def __init__(
        self,
        pools: Mapping[Plane, DevicePool],
        host: HostRows,
        layout: ExpertLayout,
        buffers: ChunkBuffers,
        *,
        n_experts: int,
        readers: ThreadPoolExecutor,
        bounce: Mapping[Plane, Tensor],
        form: ExpertForm = PLAIN,
        ahead_bytes: int = 0,
    ) -> None:
        device = buffers.x.device
        self._pools, self._host, self._layout, self._b = dict(pools), host, layout, buffers
        self._n_experts, self._readers, self._bounce = n_experts, readers, bounce
        self._form = form
        self._n_layers = pools[Plane.BASE].tables.n_layers
        self._size = batch_size(layout, n_experts)
        self._staging = Staging(staging_bytes(layout, n_experts) + ahead_bytes, device)
        self._workspace = torch.zeros(
            (self._size, layout.slot_floats), dtype=torch.int8, device=device
        )
        self._on_host = torch.zeros(
            (1 + 2 * len(Plane), n_experts), dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._ahead: Ahead | None = None
        self._device = device
        self._reads: list[Future[None]] = []
        self.counters = StreamCounters()

    def run(
        self, moe_layer: int, reading: Reading, ids: Tensor, weights: Tensor, out: Tensor,
        meanwhile: Callable[[], None],
    ) -> None:  # fmt: skip
        """Add the weighted experts of each token to `out`; their input is in the buffers' codes.
        `meanwhile` launches what needs no experts, but must come before them: the device does it
        while the host learns what was routed where.

        Shapes:
            ids int32 [M, K], ascending in each row, one behind all experts for a pair without;
        weights float32 [M, K]; out float32 [M, H]

        Raises:
            MoetError: a row could not be read (MD-NVME-04, MD-PACK-04); `out` is spoiled then.
        """
        groups = group_pairs(ids, self._n_experts)
        wanted = self._wanted(groups, moe_layer, reading.planes, meanwhile)
        held = self._brought_ahead(moe_layer, reading)
        try:
            if any(wanted.counts):  # a few tokens may have chosen identity experts alone
                self._run(moe_layer, reading, wanted, held, groups, weights, out)
            else:
                self._staging.give_back(held.values())
            if ids.numel() >= AHEAD_PAIRS * self._n_experts:
                self._bring_ahead(moe_layer + 1, reading, wanted.next_missing)
        except BaseException:
            self._staging.give_all_back()
            raise

    def _run(
        self,
        moe_layer: int,
        reading: Reading,
        wanted: Wanted,
        held: dict[int, int],
        groups: PairGroups,
        weights: Tensor,
        out: Tensor,
    ) -> None:
        """Batch after batch; `held` has the places of rows that are on the device or on the way."""
        pieces = cut_batches(wanted.counts, experts=self._size, pairs=weights.shape[0])
        turns = self._plan(pieces, wanted, held, moe_layer * self._n_experts)
        # All tables before all rows: the copy engine takes what it gets in order, so that a table
        # which came later would wait for rows that no kernel needs yet.
        rows = self._addresses(wanted, held)
        batches = make_batches(wanted.counts, pieces, self._to_device)
        self._fill(turns[0].fills)
        for turn, batch, behind in zip_longest(turns, batches, turns[1:]):
            with self._staging.reading(turn.places):
                self._compute(rows, batch, groups, weights, out, reading.activations, moe_layer)
            if behind is not None:  # after the launches: reading from disk holds up the host only
                self._fill(behind.fills)

    def _plan(
        self, pieces: Sequence[range], wanted: Wanted, held: dict[int, int], first_row: int
    ) -> list[Turn]:
        """Places for the experts that lack a slot, added to `held`; nothing stays taken."""
        turns, given_back = [], set[int]()
        for piece in pieces:
            fills: list[Fill] = []
            for expert in piece:
                if wanted.counts[expert] and (missing := wanted.missing(expert)):
                    if expert not in held:
                        held[expert] = self._staging.take()
                        fills += [(held[expert], plane, first_row + expert) for plane in missing]
                    given_back.add(expert)
            places = [held[expert] for expert in piece if expert in given_back]
            self._staging.give_back(places)
            turns.append(Turn(places, fills))
        unused = [place for expert, place in held.items() if expert not in given_back]
        self._staging.give_back(unused)
        return turns

    def _wanted(
        self, groups: PairGroups, moe_layer: int, planes: Sequence[Plane],
        meanwhile: Callable[[], None],
    ) -> Wanted:  # fmt: skip
        """The one wait of a layer: what was routed where, and who has a slot."""
        n = self._n_experts
        tables = [self._pools[plane].tables.slot_of for plane in planes]
        here = [table[moe_layer * n : (moe_layer + 1) * n].long() for table in tables]
        behind = (moe_layer + 1) % self._n_layers * n
        after = [table[behind : behind + n].long() for table in tables]
        found = self._on_host[: 1 + 2 * len(planes)]
        found.copy_(torch.stack([groups.counts, *here, *after]), non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if found.is_pinned() else None
        meanwhile()
        if copied is not None:
            copied.synchronize()
        counts, *slots = found.tolist()
        lowest = [min(of) for of in zip(*slots[len(planes) :], strict=True)]
        return Wanted(
            counts,
            dict(zip(planes, slots[: len(planes)], strict=True)),
            [expert for expert, slot in enumerate(lowest) if slot < 0],
        )

    def _addresses(self, wanted: Wanted, held: Mapping[int, int]) -> RowAddresses:
        """Where the rows of a layer's experts lie: in their slots or in staging."""
        tables: list[Tensor] = []
        for plane, slots in wanted.slots.items():
            pool = self._pools[plane]
            where = [pool.slots.data_ptr() + slot * pool.arena.stride for slot in slots]
            for expert, place in held.items():
                if slots[expert] < 0:
                    where[expert] = self._staging.address(place, plane)
            tables.append(torch.tensor(where))
        base, *fine = self._to_device(torch.stack(tables))
        return RowAddresses(self._layout, base, fine[0] if fine else None)

    def _bring_ahead(self, moe_layer: int, reading: Reading, missing: Sequence[int]) -> None:
        """Begin with the next layer's rows; a batch's worth of places stays free.

        Only while all rows are in RAM: else a step in between could give their places to others.
        """
        if moe_layer == self._n_layers or self._bounce:
            return
        experts = missing[: max(0, self._staging.n_free - self._size)]
        places = {expert: self._staging.take() for expert in experts}
        first_row = moe_layer * self._n_experts
        self._fill([
            (place, plane, first_row + expert)
            for expert, place in places.items()
            for plane in reading.planes
        ])  # fmt: skip
        self._ahead = Ahead(moe_layer, reading, places)

    def _brought_ahead(self, moe_layer: int, reading: Reading) -> dict[int, int]:
        """What was brought for this layer; what was brought for another one is given up."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (ahead.layer, ahead.reading) == (moe_layer, reading):
            return ahead.places
        if ahead is not None:
            self._staging.give_back(ahead.places.values())
        self._staging.divide({plane: self._pools[plane].arena.stride for plane in reading.planes})
        return {}

    def _fill(self, rows: Sequence[Fill]) -> None:
        """Copy rows (place, plane, row) into staging, from RAM or from disk."""
        copies, late = list[tuple[int, Plane, Tensor]](), list[Fill]()
        for place, plane, row in rows:
            at = int(self._host.table(plane)[row])
            if at == ABSENT:
                late.append((place, plane, row))
            else:
                copies.append((place, plane, self._host.memory(plane)[at]))
        self.counters.from_ram += len(copies)
        if late:
            copies += self._read(late)
        self.counters.n_bytes += sum(row.numel() for _, _, row in copies)
        self._staging.fill(copies)

    def _read(self, late: Sequence[Fill]) -> list[tuple[int, Plane, Tensor]]:
        """Rows on disk into the pinned places that belong to staging's.

        A read that does not end keeps its place, so no later one begins before it has ended. That
        bounds the readers' queue as well: it holds no more than the rows of one batch.
        """
        first_row = late[0][2]
        self._wait_for_reads(first_row)
        bounced = []
        for place, plane, row in late:
            self._staging.wait_filled(place)
            bounced.append((row, (place, plane, self._bounce[plane][place])))
        reads = [
            self._readers.submit(self._host.read_into, plane, row, memory)
            for row, (_, plane, memory) in bounced
        ]
        self._reads = reads
        self._wait_for_reads(first_row)
        failed = [error for read in reads if (error := read.exception()) is not None]
        self.counters.read_errors += len(failed)
        if failed:
            raise failed[0]
        self.counters.from_nvme += len(bounced)
        self.counters.bytes_from_nvme += sum(copy[2].numel() for _, copy in bounced)
        return [copy for _, copy in bounced]

    def _wait_for_reads(self, row: int) -> None:
        """Until the reads that were begun have ended; `row` names them in the error."""
        _, pending = wait(self._reads, timeout=READ_S)
        self._reads = list(pending)
        if pending:
            self.counters.read_errors += len(pending)
            raise self._host.no_answer(row)

    def _compute(
        self,
        rows: RowAddresses,
        batch: Batch,
        groups: PairGroups,
        weights: Tensor,
        out: Tensor,
        kind: Activations,
        moe_layer: int,
    ) -> None:
        b, layout, n = self._b, self._layout, batch.n_rows
        m, bias = weights.shape[0], self._form.biases.get(moe_layer)
        mid = b.mid[: n * layout.inter].view(n, layout.inter)
        codes = shaped(b.mid_codes, n, *plain_shape(layout.inter, kind))
        scales = b.mid_scales[: n * (layout.inter // GROUP)].view(n, layout.inter // GROUP)
        part = b.part[: n * layout.hidden].view(n, layout.hidden)
        expand(rows, batch, self._workspace)
        grouped_gate_up(
            rows, batch, self._workspace, groups=groups,
            codes=shaped(b.codes, m, *plain_shape(layout.hidden, kind)), scales=b.scales[:m],
            out=mid, glu=self._form.glu, bias=None if bias is None else bias.gate_up,
        )  # fmt: skip
        quantize_rows(mid, codes, scales)
        grouped_down(
            rows, batch, self._workspace, codes=codes, scales=scales, out=part,
            bias=None if bias is None else bias.down,
        )  # fmt: skip
        add_rows(part, batch, groups, weights=weights, out=out)

    def _to_device(self, table: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return table
        return table.pin_memory().to(self._device, non_blocking=True)
