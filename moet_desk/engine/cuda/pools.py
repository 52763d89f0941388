"""Slot pools in VRAM and the launches that fill and use them in a step: look up, fetch, compute.

The twin is engine/residency with DecodeExperts. The device owns the tables during a step; between
steps the engine thread reads them for the screens and preloads hot rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.engine.blocks.expert_math import PLAIN, ExpertForm
from moet_desk.engine.cuda.buffers import MAX_ROWS, StepBuffers
from moet_desk.engine.cuda.slot_memory import SlotMemory, fixed_slots
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton.cache import (
    GpuTables,
    LookupOutput,
    claim,
    forget,
    grow,
    lookup,
    release,
    shrink,
    warm_as,
)
from moet_desk.kernels.triton.experts import ExpertPool, experts_down, experts_hidden
from moet_desk.kernels.triton.fetch import Arena, Mailbox, fetch, post, wait
from moet_desk.kernels.triton.routed_lookup import Routing, route_and_look_up
from moet_desk.store.pack_format import Plane


class HostArena(Protocol):
    """The arena as the host sees it (`store.arena.Arena`)."""

    def table(self, plane: Plane) -> NDArray[np.int32]:
        """Place of each row, or -1."""
        ...


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Slots of one plane, their tables, and the pinned arena their rows come from.

    Attributes:
        memory: of the slots, in which rows lie as on disk.
        tables: who is where, and how many slots may be used.
        arena: the plane's rows in pinned memory.
        found: for each number of rows in a step, where look-ups write what they found.
    """

    plane: Plane
    memory: SlotMemory
    tables: GpuTables
    arena: Arena
    found: tuple[LookupOutput, ...]

    @classmethod
    def make(
        cls,
        plane: Plane,
        arena: Arena,
        *,
        n_layers: int,
        n_experts: int,
        n_slots: int,
        top_k: int,
        device: torch.device,
        memory: SlotMemory | None = None,
    ) -> DevicePool:
        """An empty pool of `n_slots`, or of as many as `memory` has."""
        if memory is None:
            memory = fixed_slots(n_slots, arena.stride, device)
        return cls(
            plane=plane,
            memory=memory,
            tables=GpuTables.empty(
                n_layers,
                n_experts,
                memory.slots.shape[0],
                device=device,
                limit=min(n_slots, memory.usable),
            ),
            arena=arena,
            found=tuple(
                LookupOutput.empty(rows, top_k, device=device) for rows in range(1, MAX_ROWS + 1)
            ),
        )

    @property
    def slots(self) -> Tensor:
        """uint8 [S, stride], those that may not be used among them."""
        return self.memory.slots

    @property
    def n_slots(self) -> int:
        """Slots that may be used now."""
        return int(self.tables.limit)

    def resize(self, n_slots: int) -> int:
        """Use so many slots from the next step on, or as many as the card has room for.

        Between steps. Of the rows in slots the hottest stay. Returns `n_slots` of the pool.

        Raises:
            DriverError: memory could be neither had nor given back; the pool is whole.
        """
        now = self.n_slots
        if n_slots < now:
            for source, target in shrink(self.tables, n_slots):
                self.slots[target].copy_(self.slots[source])
            self.memory.resize(n_slots)
        elif n_slots > now:
            usable = min(n_slots, self.memory.resize(n_slots))
            if usable > now:
                grow(self.tables, usable)
        return self.n_slots

    @property
    def top_k(self) -> int:
        """Experts that a token uses per layer."""
        return self.found[0].miss_row.shape[0]

    def fill(
        self,
        ids: Tensor,
        layer: int,
        mailbox: Mailbox | None,
        *,
        ends_step: bool,
        routing: Routing | None = None,
    ) -> LookupOutput:
        """Launch the look-up of a layer and the fetch of what is missing. With a routing the ids
        are chosen before, in the same launch.

        Shapes:
            ids int32 [T, K]
        """
        found = self.found[ids.shape[0] - 1]
        if routing is None:
            lookup(ids, self.tables, layer=layer, out=found, ends_step=ends_step)
        else:
            route_and_look_up(
                routing, ids, self.tables, layer=layer, out=found, ends_step=ends_step
            )
        if mailbox is not None:
            post(mailbox, self.arena, found, layer=layer, fine=self.plane is Plane.FINE)
        fetch(
            self.slots, self.arena, found.miss_n,
            miss_row=found.miss_row, miss_slot=found.miss_slot,
        )  # fmt: skip
        if mailbox is not None:
            wait(mailbox, self.arena, self.tables)
            fetch(
                self.slots, self.arena, mailbox.late_n,
                miss_row=mailbox.late_row, miss_slot=mailbox.late_slot,
            )  # fmt: skip
        return found

    def preload(self, rows: Sequence[int], places: Sequence[int], memory: Tensor) -> int:
        """Copy rows that lie at `places` of the arena's memory into free slots, between steps.

        The coldest is given first, as in the twin. Returns how many fitted.
        """
        slots = claim(self.tables, rows)
        for slot, place in zip(slots, places, strict=False):
            self.slots[slot].copy_(memory[place], non_blocking=True)
        return len(slots)

    def promote(
        self,
        rows: Sequence[int],
        places: Sequence[int],
        memory: Tensor,
        *,
        replaced: Sequence[int],
        like: GpuTables,
    ) -> None:
        """Copy rows into slots, those of `replaced` among them, between steps.

        The copies are on the current stream, so the next step's kernels come behind them.

        Args:
            rows: none has a slot; there must be slots for all of them.
            places: where each lies in `memory`, the arena's.
            memory: uint8 [places, stride].
            replaced: rows that lose theirs.
            like: tables of the 2-bit pool. The rows become as warm as they are there, else the
                next look-up would take their slots first.
        """
        index = torch.tensor(list(replaced), dtype=torch.int64, device=self.slots.device)
        release(self.tables, self.tables.slot_of[index].tolist())
        if self.preload(rows, places, memory) < len(rows):
            raise ValueError("a promotion without a free slot")
        warm_as(self.tables, like, rows)


class PoolExperts:
    """Routed experts of a step over 2-bit slots, or over 2-bit and fine slots together (exact).

    Args:
        base: the 2-bit pool; fine: the fine pool for exact answers, else None.
        layout: sizes of an expert.
        n_layers: MoE layers of a step; the last one ends the tables' step.
        mailbox: how rows on disk are asked for; None if all rows are in the arena.
        host: the arena as the host sees it.
        form: of the experts; biases are on the device.
    """

    def __init__(
        self,
        base: DevicePool,
        fine: DevicePool | None,
        layout: ExpertLayout,
        *,
        n_layers: int,
        mailbox: Mailbox | None,
        host: HostArena,
        form: ExpertForm = PLAIN,
    ) -> None:
        self._base, self._fine, self._layout, self._host = base, fine, layout, host
        self._form = form
        self._n_layers, self._mailbox = n_layers, mailbox

    @property
    def activations(self) -> Activations:
        """See `Experts`: 15 bits for exact answers (docs/adr/0009)."""
        return Activations.INT8 if self._fine is None else Activations.INT15

    def forget(self) -> None:
        """See `Experts`."""
        for pool in (self._base, self._fine):
            if pool is not None:
                forget(pool.tables)

    def recover(self) -> None:
        """See `Experts`."""
        for pool in (self._base, self._fine):
            if pool is not None:
                table = torch.from_numpy(self._host.table(pool.plane).copy())
                pool.arena.place_of.copy_(table)

    def __call__(
        self, moe_layer: int, buffers: StepBuffers, rows: int, routing: Routing | None = None
    ) -> None:
        """See `Experts`."""
        b, t = buffers, slice(0, rows)
        ids = b.ids[t]
        ends = moe_layer == self._n_layers - 1
        found = self._base.fill(ids, moe_layer, self._mailbox, ends_step=ends, routing=routing)
        fine_slots, fine_slot = None, None
        if self._fine is not None:
            fine_found = self._fine.fill(ids, moe_layer, self._mailbox, ends_step=ends)
            fine_slots, fine_slot = self._fine.slots, fine_found.uniq_slot
        pool = ExpertPool(
            self._layout, self._base.slots, found.uniq_slot, found.uniq_pair,
            fine_slots, fine_slot, self._form.biases.get(moe_layer), ids,
        )  # fmt: skip
        pairs = slice(0, ids.numel())
        codes = b.codes[self.activations][t]
        hidden_codes = b.hidden_codes[self.activations][pairs]
        hidden_scales = b.hidden_scales[pairs]
        experts_hidden(
            pool, codes, b.scales[t], scratch=b.hidden[pairs],
            out_codes=hidden_codes, out_scales=hidden_scales, glu=self._form.glu,
        )  # fmt: skip
        experts_down(pool, hidden_codes, hidden_scales, part=b.part[pairs])
