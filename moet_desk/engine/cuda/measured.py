"""What a measurement of made-up weights is of, and what it found. Records; `measure` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from moet_desk.engine.cuda.bandwidth import Bandwidth
from moet_desk.engine.cuda.chunk_sizes import BLOCK_ROWS, ahead_bytes, chunk_bytes, stage_bytes
from moet_desk.engine.cuda.kernel_groups import KernelTime
from moet_desk.engine.cuda.shapes import Shape
from moet_desk.engine.cuda.synthetic import dense_bytes
from moet_desk.engine.model_shape import kv_token_bytes, slot_bytes, windows_of
from moet_desk.errors import fail
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.plan import ring_pages
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import ReadTimes
from moet_desk.units import GIB, show_memory

KV_FORM = KvFormat.NVFP4
RESERVE_BYTES = 3 * GIB // 2
"""VRAM for activations, graphs, the place where weights are made, and what the allocator cannot use
(`plan.ALLOCATOR_SHARE`).
"""

PAGE_TOKENS = 64

CHUNK_TOKENS = 8192
"""Prompt tokens that are read together, as the planner chooses for cards of 24 GiB and more."""


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
        ram_bytes: for rows; those beyond are read from a drive. None: all are in RAM.
        folder: on that drive.
        fine_slots: of the FP4 pool, for exact steps; at least those of a layer of a step, so that
            with none more than these every FP4 row comes from RAM.
        warm, steps, traced: steps before a measurement, in it, and under the profiler.
        steps_s: seconds after which the former two end with fewer.
        attempts: most measurements in search of the hit rate.
        looks_ahead: bring rows that the next layer will probably ask for, where all are in RAM.
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
    ram_bytes: int | None = None
    folder: Path | None = None
    warm: int = 200
    steps: int = 300
    traced: int = 20
    steps_s: float = 30.0
    attempts: int = 8
    looks_ahead: bool = False

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
        return max(self.most_rows, self.context)

    @property
    def chunk(self) -> int:
        """Tokens of a prompt chunk."""
        return min(self.prefill, CHUNK_TOKENS)

    @property
    def kv_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-max(self.entries, self.prefill) // PAGE_TOKENS) + 1

    @property
    def kv_token_bytes(self) -> int:
        """KV bytes per token of the layers that keep every token."""
        spec = self.shape.spec
        return kv_token_bytes(spec, KV_FORM, with_head=spec.mtp is not None, on_card=True)

    @property
    def ring_pages(self) -> int:
        """Pages of the sequence in layers with a window."""
        windows = replace(windows_of(self.shape.spec, KV_FORM), most_rows=BLOCK_ROWS)
        return ring_pages(windows, self.kv_pages * PAGE_TOKENS, self.chunk)

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Planes whose rows a step reads."""
        return (Plane.BASE,) if self.plane is Plane.BASE else (Plane.BASE, Plane.FINE)

    @property
    def least_slots(self) -> int:
        """Slots that a layer of a step can need at once."""
        return self.most_rows * self.shape.spec.moe_ffn.router.top_k

    def in_ram(self) -> Mapping[Plane, int]:
        """Rows of each plane that RAM holds: the least of both, base rows, then fine ones.

        Raises:
            MoetError: MD-RAM-05, not even a layer's rows fit.
        """
        if self.ram_bytes is None:
            return dict.fromkeys(self.planes, self.n_rows)
        strides = {Plane.BASE: self.layout.base_stride, Plane.FINE: self.layout.fine_stride}
        least = min(2 * self.least_slots, self.n_rows)  # as `plan` has it
        left = self.ram_bytes - least * sum(strides[plane] for plane in self.planes)
        if left < 0:
            need, have = show_memory(self.ram_bytes - left), show_memory(self.ram_bytes)
            raise fail("MD-RAM-05", shape=self.shape.name, need=need, have=have)
        found = {}
        for plane in self.planes:
            more = min(self.n_rows - least, left // strides[plane])
            found[plane] = least + more
            left -= more * strides[plane]
        return found

    @property
    def uses_drive(self) -> bool:
        """Whether some rows are not in RAM."""
        return min(self.in_ram().values()) < self.n_rows

    @property
    def ahead_bytes(self) -> int:
        """More staging memory, where all rows are in RAM."""
        n_experts = self.shape.spec.moe_ffn.router.n_experts
        return 0 if self.uses_drive else ahead_bytes(self.layout, n_experts, self.chunk)

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
        fixed += self.kv_pages * PAGE_TOKENS * self.kv_token_bytes + slot_bytes(
            spec, KV_FORM, with_head=spec.mtp is not None
        )
        fixed += self.ring_pages * PAGE_TOKENS * windows_of(spec, KV_FORM).token_bytes
        if self.prefill:
            fixed += stage_bytes(self.layout, spec.moe_ffn.router.n_experts) + self.ahead_bytes
            fixed += chunk_bytes(spec, self.chunk, context=self.kv_pages * PAGE_TOKENS)
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
        hit_rate: share of look-ups that found their expert in a slot, where it was not brought
            just before.
        misses, fine_misses, distinct: per step, rows fetched of each plane, those brought ahead
            too, and distinct experts read.
        drive_rows, drive_bytes: per step, of the misses those that came from the drive.
        ahead, needed: per step, rows brought ahead, and those of them that were asked for then.
    """

    times_ms: tuple[float, ...]
    hit_rate: float
    misses: float
    distinct: float
    fine_misses: float = 0.0
    drive_rows: float = 0.0
    drive_bytes: float = 0.0
    ahead: float = 0.0
    needed: float = 0.0

    @property
    def median_ms(self) -> float:
        return median(self.times_ms)


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Steps that check guesses, and milliseconds of one guess of the head."""

    checks: Steps
    guess_ms: float


@dataclass(frozen=True, slots=True)
class DriveFigures:
    """Bytes per second of whole rows side by side; milliseconds of the reads that steps waited for;
    whether they went past the page cache.
    """

    bytes_per_s: float
    read_ms: ReadTimes | None
    direct: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; None for what this device or request does not give.

    Attributes:
        drafts: of steps with guesses.
        vram_bytes, pcie_bytes: per step, read in VRAM and brought over PCIe.
        by_group: milliseconds of a step by kernel group.
        by_kernel: what each kernel takes of a step, the longest first.
        prefill_by_kernel: the same of the whole prompt.
        attempts: popularities tried; `popularity` is the one measured at.
        drive: what its reads reached; None if all rows are in RAM.
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
    popularity: float = 0.0
    drive: DriveFigures | None = None
    by_kernel: Mapping[str, KernelTime] | None = None
    prefill_by_kernel: Mapping[str, KernelTime] | None = None

    @property
    def roofline_ratio(self) -> float | None:
        """Share of a step that its bytes alone would take at the bandwidth of copies."""
        if self.bandwidth is None:
            return None
        least_s = max(self.vram_bytes / self.bandwidth.vram, self.pcie_bytes / self.bandwidth.pcie)
        if self.drive is not None:
            least_s = max(least_s, self.steps.drive_bytes / self.drive.bytes_per_s)
        return 1e3 * least_s / self.steps.median_ms
