"""Routed experts of a prompt chunk: each row is brought to the device once and serves all tokens.

Rows that have a slot are read there and none is evicted. The others go through two staging buffers
in turn, on a stream of their own, while the rows before them compute; rows that are not in RAM are
read from the pack beside what decode keeps there. The twin is engine/prefill.PrefillExperts.
Called on the engine thread, between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers, shaped
from moet_desk.engine.cuda.pools import DevicePool
from moet_desk.errors import MoetError
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.layouts import GROUP, ExpertLayout
from moet_desk.kernels.triton.grouped import (
    Batch,
    PairGroups,
    RowAddresses,
    add_rows,
    expand,
    group_pairs,
    grouped_down,
    grouped_gate_up,
    make_batch,
)
from moet_desk.kernels.triton.quant import plain_shape, quantize_rows
from moet_desk.store.arena import ABSENT
from moet_desk.store.pack_format import Plane
from moet_desk.units import MIB

TURNS = 2
"""Staging buffers: one is read by kernels while the other is filled."""

STAGE_BYTES = 256 * MIB
"""All staging buffers together, at most: 8 experts of DeepSeek-V4-Flash in a batch."""

READ_S = 10.0
"""Seconds that a prompt waits for the rows of a batch. No kernel waits meanwhile, so this may be
long enough for a slow drive.
"""

MOST_BATCHED = 32
"""Experts of a batch at most: more would not fill the device better."""


class HostRows(Protocol):
    """Where rows lie in RAM, and how those that do not are read. `store.arena.Arena` is one."""

    def table(self, plane: Plane) -> NDArray[np.int32]: ...

    def memory(self, plane: Plane) -> Tensor: ...

    def read_into(self, plane: Plane, row: int, place: Tensor) -> None: ...

    def no_answer(self, row: int) -> MoetError: ...


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
    """

    counts: Sequence[int]
    slots: Mapping[Plane, Sequence[int]]


def batch_size(layout: ExpertLayout, n_experts: int) -> int:
    """Experts of a batch: what the staging buffers hold of both planes."""
    each = TURNS * (layout.base_stride + layout.fine_stride)
    return max(1, min(MOST_BATCHED, n_experts, STAGE_BYTES // each))


def stage_bytes(layout: ExpertLayout, n_experts: int) -> int:
    """Device memory of the staging buffers and of a batch's decoded weights."""
    staged = TURNS * (layout.base_stride + layout.fine_stride)
    return batch_size(layout, n_experts) * (staged + layout.slot_floats)


def cut_batches(counts: Sequence[int], *, experts: int, pairs: int) -> list[range]:
    """Neighbouring experts in batches of at most `experts` used ones and `pairs` pairs.

    A batch has one expert at least, so `pairs` must not be below the largest count.
    """
    batches: list[range] = []
    begin = n_used = n_pairs = 0
    for expert, count in enumerate(counts):
        if count and n_used and (n_used == experts or n_pairs + count > pairs):
            batches.append(range(begin, expert))
            begin, n_used, n_pairs = expert, 0, 0
        n_used += count > 0
        n_pairs += count
    if n_used:
        batches.append(range(begin, len(counts)))
    return batches


def _events() -> list[torch.cuda.Event]:
    return [torch.cuda.Event() for _ in range(TURNS)]  # type: ignore[no-untyped-call]


class _Turns:
    """Orders copies and kernels that share buffers in turn; on a CPU everything is in order."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._filled = _events()
            self._used = _events()

    @contextmanager
    def filling(self, turn: int) -> Iterator[None]:
        """Copies issued inside run beside the kernels, after the last use of the buffer."""
        if not self._cuda:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used[turn])
            yield
            self._filled[turn].record(self._stream)

    @contextmanager
    def using(self, turn: int) -> Iterator[None]:
        """Kernels launched inside read the buffer."""
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._filled[turn])
        yield
        if self._cuda:
            self._used[turn].record(torch.cuda.current_stream())

    def wait_filled(self, turn: int) -> None:
        """Until the host memory that the buffer was filled from may change."""
        if self._cuda:
            self._filled[turn].synchronize()


class ChunkExperts:
    """Computes the routed experts of whole chunks.

    Args:
        pools: slots and tables of both planes; only read.
        host: rows in RAM.
        layout: sizes of an expert.
        buffers: the chunk's.
        n_experts: of a layer.
        readers: threads for rows on disk.
        bounce: makes pinned host memory of a number of bytes, for rows on disk; None if all rows
            are in RAM.
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
    ) -> None:
        device = buffers.x.device
        self._pools, self._host, self._layout, self._b = dict(pools), host, layout, buffers
        self._n_experts, self._readers, self._bounce = n_experts, readers, bounce
        self._size = batch_size(layout, n_experts)
        places = TURNS * self._size
        self._stage = {
            plane: torch.zeros((places, pool.arena.stride), dtype=torch.uint8, device=device)
            for plane, pool in self._pools.items()
        }
        self._workspace = torch.zeros(
            (self._size, layout.slot_floats), dtype=torch.int8, device=device
        )
        self._turns = _Turns(device)
        self._device = device
        self._reads: list[Future[None]] = []
        self.counters = StreamCounters()

    def run(
        self, moe_layer: int, reading: Reading, ids: Tensor, weights: Tensor, out: Tensor
    ) -> None:
        """Add the weighted experts of each token to `out`; their input is in the buffers' codes.

        Shapes:
            ids int32 [M, K], ascending in each row; weights float32 [M, K]; out float32 [M, H]

        Raises:
            MoetError: a row could not be read (MD-NVME-04, MD-PACK-04); `out` is spoiled then.
        """
        groups = group_pairs(ids, self._n_experts)
        wanted = self._wanted(groups, moe_layer, reading.planes)
        pieces = cut_batches(wanted.counts, experts=self._size, pairs=ids.shape[0])
        batches = self._upload([make_batch(wanted.counts, p, device="cpu") for p in pieces])
        used = [[expert for expert in piece if wanted.counts[expert]] for piece in pieces]
        rows = self._addresses(wanted, used)
        first_row = moe_layer * self._n_experts
        for i, batch in enumerate(batches):
            if i == 0:
                self._fill(0, wanted, used[0], first_row)
            with self._turns.using(i % TURNS):
                self._compute(rows, batch, groups, weights, out, reading.activations)
            if i + 1 < len(batches):  # after the launches: reading from disk holds up the host only
                self._fill((i + 1) % TURNS, wanted, used[i + 1], first_row)

    def _wanted(self, groups: PairGroups, moe_layer: int, planes: Sequence[Plane]) -> Wanted:
        """The one wait of a layer: what was routed where, and who has a slot."""
        here = slice(moe_layer * self._n_experts, (moe_layer + 1) * self._n_experts)
        tables = [self._pools[plane].tables.slot_of[here].long() for plane in planes]
        counts, *slots = torch.stack([groups.counts, *tables]).tolist()
        return Wanted(counts, dict(zip(planes, slots, strict=True)))

    def _addresses(self, wanted: Wanted, used: Sequence[Sequence[int]]) -> RowAddresses:
        """Where each expert's rows will lie: in its slot, or in its batch's staging buffer."""
        tables: list[Tensor] = []
        for plane, slots in wanted.slots.items():
            pool, stage = self._pools[plane], self._stage[plane]
            where = [0] * self._n_experts
            for i, experts in enumerate(used):
                for place, expert in enumerate(experts, start=i % TURNS * self._size):
                    slot = slots[expert]
                    at = stage.data_ptr() + place * pool.arena.stride
                    if slot >= 0:
                        at = pool.slots.data_ptr() + slot * pool.arena.stride
                    where[expert] = at
            tables.append(torch.tensor(where))
        base, *fine = self._to_device(torch.stack(tables))
        return RowAddresses(self._layout, base, fine[0] if fine else None)

    def _fill(self, turn: int, wanted: Wanted, experts: Sequence[int], first_row: int) -> None:
        """Bring the rows of a batch that have no slot into a staging buffer."""
        for plane, slots in wanted.slots.items():
            at = [(i, first_row + e) for i, e in enumerate(experts) if slots[e] < 0]
            table, memory = self._host.table(plane), self._host.memory(plane)
            sources = {row: memory[table[row]] for _, row in at if table[row] != ABSENT}
            self.counters.from_ram += len(sources)
            late = [(i, row) for i, row in at if row not in sources]
            if late:
                sources |= self._read(turn, plane, late)
            self.counters.n_bytes += len(at) * self._stage[plane].shape[1]
            with self._turns.filling(turn):
                for i, row in at:
                    place = self._stage[plane][turn * self._size + i]
                    place.copy_(sources[row], non_blocking=True)

    def _read(self, turn: int, plane: Plane, late: Sequence[tuple[int, int]]) -> dict[int, Tensor]:
        """Rows on disk into the pinned places that belong to a staging buffer's.

        A read that does not end keeps its place, so no later one begins before it has ended. That
        bounds the readers' queue as well: it holds no more than the rows of one batch.
        """
        self._wait_for_reads(late[0][1])
        self._turns.wait_filled(turn)
        places = {row: self._bounce[plane][turn * self._size + i] for i, row in late}
        reads = [
            self._readers.submit(self._host.read_into, plane, row, place)
            for row, place in places.items()
        ]
        self._reads = reads
        self._wait_for_reads(late[0][1])
        failed = [error for read in reads if (error := read.exception()) is not None]
        self.counters.read_errors += len(failed)
        if failed:
            raise failed[0]
        self.counters.from_nvme += len(places)
        self.counters.bytes_from_nvme += sum(place.numel() for place in places.values())
        return places

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
    ) -> None:
        b, layout, n = self._b, self._layout, batch.n_rows
        m = weights.shape[0]
        mid = b.mid[: n * layout.inter].view(n, layout.inter)
        codes = shaped(b.mid_codes, n, *plain_shape(layout.inter, kind))
        scales = b.mid_scales[: n * (layout.inter // GROUP)].view(n, layout.inter // GROUP)
        part = b.part[: n * layout.hidden].view(n, layout.hidden)
        expand(rows, batch, self._workspace)
        grouped_gate_up(
            rows, batch, self._workspace, groups=groups,
            codes=shaped(b.codes, m, *plain_shape(layout.hidden, kind)), scales=b.scales[:m],
            out=mid,
        )  # fmt: skip
        quantize_rows(mid, codes, scales)
        grouped_down(rows, batch, self._workspace, codes=codes, scales=scales, out=part)
        add_rows(part, batch, groups, weights=weights, out=out)

    def _upload(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches' tables on the device, in one copy that nothing waits for."""
        flat = [torch.cat([batch.experts, batch.tiles.reshape(-1)]) for batch in batches]
        parts = torch.split(self._to_device(torch.cat(flat)), [len(part) for part in flat])
        uploaded = []
        for batch, part in zip(batches, parts, strict=True):
            n = len(batch.experts)
            uploaded.append(replace(batch, experts=part[:n], tiles=part[n:].view(-1, 4)))
        return uploaded

    def _to_device(self, table: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return table
        return table.pin_memory().to(self._device, non_blocking=True)
