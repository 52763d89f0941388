"""Slot pools in VRAM and the launches that fill and use them in a step: look up, fetch, compute.

The twin is engine/residency with DecodeExperts. The device owns the tables during a step; between
steps the engine thread reads them for the screens and preloads hot rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    let_go,
    lookup,
    rebase,
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
        least: slots that there are whatever happens; no smaller size is asked for.
        found: for each number of rows in a step, where look-ups write what they found.
    """

    plane: Plane
    memory: SlotMemory
    tables: GpuTables
    arena: Arena
    least: int
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
        least: int | None = None,
    ) -> DevicePool:
        """An empty pool of `n_slots`, or of as many as `memory` has; `least` stay, or all."""
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
            least=n_slots if least is None else least,
            found=_outputs(top_k, device),
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
        found: LookupOutput,
        ends_step: bool,
        before: int = 0,
        routing: Routing | None = None,
    ) -> LookupOutput:
        """Launch the look-up of a layer and the fetch of what is missing; returns `found`. With a
        routing the ids are chosen before, in the same launch; with all rows in the arena that
        launch fetches too.

        Shapes:
            ids int32 [T, K]
        """
        if routing is None:
            lookup(ids, self.tables, layer=layer, out=found, ends_step=ends_step, before=before)
        else:
            whole = mailbox is None
            route_and_look_up(
                routing, ids, self.tables, layer=layer, out=found, ends_step=ends_step,
                slots=self.slots if whole else None, arena=self.arena if whole else None,
            )  # fmt: skip
            if whole:
                return found
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


def _outputs(top_k: int, device: torch.device) -> tuple[LookupOutput, ...]:
    """Room for the answers of a look-up, by the rows of a step less one."""
    return tuple(LookupOutput.empty(n + 1, top_k, device=device) for n in range(MAX_ROWS))


@dataclass(frozen=True, slots=True)
class FoundExperts:
    """Where the rows of a layer's experts lie, or will once they are fetched; `fine` for exact
    answers only.
    """

    base: LookupOutput
    fine: LookupOutput | None


class PoolExperts:
    """Routed experts of a step over 2-bit slots, or over 2-bit and fine slots together (exact).

    Attributes:
        pools_in_ram: the pools of `in_ram`.

    Args:
        base: the 2-bit pool; fine: the fine pool for exact answers, else None.
        layout: sizes of an expert.
        n_layers: MoE layers of a step; the last one ends the tables' step.
        mailbox: how rows on disk are asked for; None if all rows are in the arena.
        host: the arena as the host sees it.
        form: of the experts; biases are on the device.
        n_named: MoE layers, from the first on, whose experts may be brought before any layer runs.
        in_ram: planes of which all rows are in RAM.
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
        n_named: int = 0,
        in_ram: Collection[Plane] = (),
    ) -> None:
        self._base, self._fine, self._layout, self._host = base, fine, layout, host
        self._form = form
        self._n_layers, self._mailbox = n_layers, mailbox
        self._pools = (base,) if fine is None else (base, fine)
        self.pools_in_ram = [pool for pool in self._pools if pool.plane in in_ram]
        # By layer and pool. What is found early is read late, so that each layer has its own.
        self._found_early = [
            [_outputs(pool.top_k, pool.slots.device) for pool in self._pools]
            for _ in range(n_named)
        ]

    @property
    def activations(self) -> Activations:
        """See `Experts`: 15 bits for exact answers (docs/adr/0009)."""
        return Activations.INT8 if self._fine is None else Activations.INT15

    def forget(self) -> None:
        """Empty all slots: the launches of a step stopped half way, so that some may claim rows
        which nobody fetched.
        """
        for pool in self._pools:
            forget(pool.tables)

    def recover(self) -> None:
        """After a failed step: make the device's view of the arena true again, and let the next
        one wait as long as any.
        """
        for pool in self._pools:
            table = torch.from_numpy(self._host.table(pool.plane).copy())
            pool.arena.place_of.copy_(table)
        if self._mailbox is not None:
            self._mailbox.waited.zero_()

    def let_go(self) -> None:
        """Launch what lets the next look-up take slots of all rows that were looked up before."""
        for pool in self._pools:
            let_go(pool.tables)

    def rebase(self) -> None:
        """Between steps, now and then: set the clocks of all tables back (`cache.rebase`)."""
        for pool in self._pools:
            rebase(pool.tables)

    def layers_ahead(self, rows: int) -> int:
        """Layers with tables whose experts may be asked for together in a step of so many rows: all
        their rows must have slots at once, in the smallest pools that there can be.
        """
        room = min(pool.least // (rows * pool.top_k) for pool in self._pools)
        return min(len(self._found_early), room)

    def bring(self, moe_layer: int, ids: Tensor, *, before: int) -> FoundExperts:
        """Launch the look-up and the fetch of a layer with a table before the layer begins.

        Args:
            moe_layer: below `layers_ahead`.
            ids: int32 [T, K].
            before: layers right before this one that were brought and may not have been computed.
        """
        return self._fill(ids, moe_layer, self._found_early[moe_layer], before)

    def begin(self, buffers: StepBuffers, rows: int) -> None:
        """See `Experts`."""

    def __call__(
        self, moe_layer: int, buffers: StepBuffers, rows: int, routing: Routing | None = None
    ) -> None:
        """See `Experts`."""
        self.compute(moe_layer, buffers, rows, self.find(moe_layer, buffers, rows, routing))

    def find(
        self, moe_layer: int, buffers: StepBuffers, rows: int, routing: Routing | None = None
    ) -> FoundExperts:
        """Launch the look-up of ids in `buffers`, or of what the routing chooses, and the fetch of
        what is missing.
        """
        every = [pool.found for pool in self._pools]
        return self._fill(buffers.ids[:rows], moe_layer, every, 0, routing)

    def _fill(
        self,
        ids: Tensor,
        moe_layer: int,
        found: Sequence[Sequence[LookupOutput]],
        before: int,
        routing: Routing | None = None,
    ) -> FoundExperts:
        ends, n = moe_layer == self._n_layers - 1, ids.shape[0] - 1
        base, *fine = (
            pool.fill(
                ids, moe_layer, self._mailbox, found=of_rows[n], ends_step=ends, before=before,
                routing=routing if pool is self._base else None,
            )
            for pool, of_rows in zip(self._pools, found, strict=True)
        )  # fmt: skip
        return FoundExperts(base, fine[0] if fine else None)

    def compute(self, moe_layer: int, buffers: StepBuffers, rows: int, found: FoundExperts) -> None:
        """From ids, weights, codes and scales in `buffers` to `part`, once the rows are there."""
        b, t = buffers, slice(0, rows)
        ids = b.ids[t]
        pool = ExpertPool(
            self._layout, self._base.slots, found.base.uniq_slot, found.base.uniq_pair,
            None if self._fine is None else self._fine.slots,
            None if found.fine is None else found.fine.uniq_slot,
            self._form.biases.get(moe_layer), ids,
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
