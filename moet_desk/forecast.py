"""How fast a plan will probably be: a range of tokens per second, and what limits it. Pure.

A token costs the bytes that it reads from VRAM (dense stack, chosen experts, KV), a fixed time per
layer, and for experts without a slot a copy over PCIe or a read from the drive. How often an expert
has no slot is the one thing that only the model knows: `HIT_CURVES` states what is assumed, and
because that is uncertain the forecast is a range. `moet-desk bench` measures instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moet_desk.machine import Drive, Gpu, MachineFacts, Rates
from moet_desk.plan import ModelShape, TierPlan
from moet_desk.units import GB

HISTORY_TOKENS = 2048
"""Tokens of a chat so far, for the KV that a token reads."""

SHARES = (0.0, 0.05, 0.10, 0.15, 0.20, 0.35, 0.50, 0.75, 1.0)
HIT_CURVES = {
    "low": (0.0, 0.40, 0.60, 0.72, 0.80, 0.87, 0.91, 0.96, 1.0),
    "high": (0.0, 0.70, 0.90, 0.965, 0.985, 0.99, 0.993, 0.997, 1.0),
}
"""Part of look-ups that find their expert, over the part of all experts that is there.

Published points: DeepSeek-V4-Flash 96.5 to 97.7 % at 15 % and 98.7 % at 19 % (the high curve), GLM
91 % at 51 % (the low one). Between the points straight lines; other models were not measured.
"""

LAYER_S = {"cuda": (0.1e-3, 0.05e-3), "cpu": (1.0e-3, 0.3e-3)}
"""Time of an attention's layer beside its bytes, slow and quick. Shapes of 19 models on a
data-centre card (bench/records): 0.05 to 0.11 ms, but for the 128 latent heads of DeepSeek-V3 at
8,192 tokens, 0.14 to 0.19. On two CPU cores about 0.5 ms.
"""

HIDDEN = (0.0, 0.5)
"""Part of the rows over PCIe that come while layers compute, slow and quick, where all are in RAM:
half on an H200, and with the demo model's routing too (bench/lookahead.py). Tables of tokens and
shortcuts help as well.
"""

EXPAND_BYTES_PER_S = (1.4 * GB, 4.0 * GB)
"""Expanding a row into a CPU slot: 1.4 GB/s on two cores (record of 2026-11-29), more on more."""

ASSUMED_RAM = (8 * GB, 20 * GB)
ASSUMED_VRAM = (250 * GB, 450 * GB)
ASSUMED_PCIE = (5 * GB, 12 * GB)

MEASURED = (0.85, 1.0)
"""Parts of a measured rate that rows of experts reach."""

COPY_TRAFFIC = 2.0
"""Bytes that move for each byte of a RAM copy, at least: it is read and written. The CPU's weights
are only read.
"""

SPECIFIED = (0.70, 0.90)
"""Parts of a data sheet's rate that copies reach: 84 % of VRAM's and 88 % of PCIe's on an H200."""

Span = tuple[float, float]
"""(pessimistic, optimistic)"""


@dataclass(frozen=True, slots=True)
class Rate:
    """A bandwidth as a span of bytes per second, and where it comes from."""

    span: Span
    basis: str  # "measured 2026-11-29", "data sheet" or "assumed"


@dataclass(frozen=True, slots=True)
class Speeds:
    """The bandwidths of a computer."""

    vram: Rate
    pcie: Rate
    ram: Rate
    drive: Rate


@dataclass(frozen=True, slots=True)
class Forecast:
    """A forecast, never a promise.

    Attributes:
        tok_per_s: slow and quick, one answer at a time, no speculation.
        limit: what takes the largest part of a token's time in the slow case, in words.
        hit_rate: look-ups that find their expert in a slot.
        ram_hit_rate: look-ups that find it in a slot or in RAM.
        wait_share: part of a token's time spent waiting for experts.
        basis: where each bandwidth that matters comes from.
    """

    tok_per_s: Span
    limit: str
    hit_rate: Span
    ram_hit_rate: Span
    wait_share: Span
    basis: tuple[tuple[str, str], ...]


def hit_rate(share: float, curve: str) -> float:
    """Look-ups that find their expert when `share` of all experts (0 to 1) is there."""
    hits = HIT_CURVES[curve]
    points: Sequence[tuple[float, float]] = list(zip(SHARES, hits, strict=True))
    for (x0, y0), (x1, y1) in pairwise(points):
        if share <= x1:
            return y0 + (y1 - y0) * (max(share, x0) - x0) / (x1 - x0)
    return 1.0


# -- bandwidths ------------------------------------------------------------------------------


def speeds_of(machine: MachineFacts, gpu: Gpu | None, drive: Drive | None) -> Speeds:
    """Measured where somebody measured, else by data sheet, else assumed by kind."""
    rates = machine.rates
    when = f"measured {rates.measured[:10]}" if rates is not None else ""

    def rate(measured: float | None, sheet: float | None, assumed: Span) -> Rate:
        if measured is not None:
            return Rate(_times(measured, MEASURED), when)
        if sheet is not None:
            return Rate(_times(sheet, SPECIFIED), "data sheet")
        return Rate(assumed, "assumed")

    known = rates or Rates(measured="")
    ram_read = None if known.ram_copy is None else COPY_TRAFFIC * known.ram_copy
    vram_sheet = gpu.vram_bytes_per_s if gpu is not None else None
    pcie_sheet = gpu.link.bytes_per_s if gpu is not None else None
    return Speeds(
        vram=rate(known.vram, vram_sheet, ASSUMED_VRAM),
        pcie=rate(known.pcie, pcie_sheet, ASSUMED_PCIE),
        ram=rate(ram_read, None, ASSUMED_RAM),
        drive=rate(known.drive_read, None, assumed_drive(drive)),
    )


def assumed_drive(drive: Drive | None) -> Span:
    """Bytes per second of reads of whole rows, by the kind of drive."""
    if drive is None:
        return (0.1 * GB, 2.0 * GB)
    if drive.is_network:
        return (0.05 * GB, 0.5 * GB)
    if drive.is_rotational and not drive.is_nvme:
        return (0.05 * GB, 0.15 * GB)
    if drive.is_nvme:
        return (1.5 * GB, 5.0 * GB)
    if drive.is_nvme is False:
        return (0.35 * GB, 0.55 * GB)
    return (0.3 * GB, 2.5 * GB)


def _times(value: float, parts: Span) -> Span:
    return (value * parts[0], value * parts[1])


# -- a token ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of rows of an expert: bytes of a row, slots that hold it, rows of it in RAM."""

    row_bytes: int
    slots: int
    in_ram: int


@dataclass(frozen=True, slots=True)
class TokenWork:
    """What one token needs.

    Attributes:
        layers: of the model.
        pairs: experts that a token asks for on average, all layers together.
        n_rows: experts of the model.
        read_bytes: read where it computes: dense weights, experts, KV.
        slot_bytes: of an expert where it computes; on a CPU larger than its rows.
        planes: the rows that each expert needs.
    """

    layers: int
    pairs: float
    n_rows: int
    read_bytes: int
    slot_bytes: int
    planes: tuple[Plane, ...]


def token_work(
    shape: ModelShape,
    plan: TierPlan,
    *,
    layers: int,
    moe_layers: int,
    exact: bool,
    on_device: bool,
) -> TokenWork:
    """The work of a token from 2-bit experts, or from FP4 ones if `exact`."""
    base = Plane(shape.base_stride, plan.base_slots, plan.arena_base_rows)
    fine = Plane(shape.fine_stride, plan.fine_slots, plan.arena_fine_rows)
    planes = (base, fine) if exact else (base,)
    if exact and not on_device:  # a slot holds the weights of both, expanded
        planes = (Plane(shape.base_stride, plan.fine_slots, plan.arena_base_rows), fine)
    rows = sum(plane.row_bytes for plane in planes)
    slot = rows if on_device else shape.slot_bytes
    pairs = (shape.top_k if shape.mean_used is None else shape.mean_used) * moe_layers
    history, windows = min(HISTORY_TOKENS, shape.model_context), shape.windows
    kv = shape.kv_token_bytes * history + shape.state_bytes
    kv += windows.token_bytes * min(history, windows.tokens)
    read = round(shape.dense_bytes + pairs * slot + kv)
    return TokenWork(layers, pairs, shape.n_rows, read, slot, planes)


def forecast_device(work: TokenWork, speeds: Speeds) -> Forecast:
    """For a card: slots in VRAM, rows in pinned RAM and on the drive."""
    parts = []
    for end, curve in enumerate(HIT_CURVES):
        missed = read = 0.0
        for plane in work.planes:
            hit, near = _hits(plane, work.n_rows, curve)
            shown = 1 - HIDDEN[end] if plane.in_ram >= work.n_rows else 1
            missed += work.pairs * (1 - hit) * plane.row_bytes * shown
            read += work.pairs * (1 - near) * plane.row_bytes
        parts.append(
            {
                "weights from VRAM": work.read_bytes / speeds.vram.span[end],
                "the fixed time of each layer": work.layers * LAYER_S["cuda"][end],
                "experts over PCIe": missed / speeds.pcie.span[end],
                "experts from the drive": read / speeds.drive.span[end],
            }
        )
    return _forecast(parts, work, speeds)


def forecast_cpu(work: TokenWork, speeds: Speeds) -> Forecast:
    """For a CPU: slots hold expanded rows, RAM holds packed ones, the drive the rest."""
    parts = []
    for end, curve in enumerate(HIT_CURVES):
        read = 0.0
        for plane in work.planes:
            read += work.pairs * (1 - _hits(plane, work.n_rows, curve)[1]) * plane.row_bytes
        hit = min(_hits(plane, work.n_rows, curve)[0] for plane in work.planes)
        expanded = work.pairs * (1 - hit) * work.slot_bytes
        parts.append(
            {
                "weights from RAM": work.read_bytes / speeds.ram.span[end],
                "the fixed time of each layer": work.layers * LAYER_S["cpu"][end],
                "expanding experts": expanded / EXPAND_BYTES_PER_S[end],
                "experts from the drive": read / speeds.drive.span[end],
            }
        )
    return _forecast(parts, work, speeds)


def _hits(plane: Plane, n_rows: int, curve: str) -> Span:
    """Look-ups answered by a slot, and by a slot or RAM. RAM holds copies of what slots hold."""
    hit = hit_rate(min(1.0, plane.slots / n_rows), curve)
    near = hit_rate(min(1.0, max(plane.slots, plane.in_ram) / n_rows), curve)
    return hit, near


_WAITING = ("experts over PCIe", "expanding experts", "experts from the drive")


def _forecast(parts: list[dict[str, float]], work: TokenWork, speeds: Speeds) -> Forecast:
    found = [[_hits(plane, work.n_rows, curve) for plane in work.planes] for curve in HIT_CURVES]
    hits = [min(hit for hit, _ in planes) for planes in found]
    nears = [min(near for _, near in planes) for planes in found]
    times = [sum(part.values()) for part in parts]
    shares = [
        sum(part.get(name, 0.0) for name in _WAITING) / time
        for part, time in zip(parts, times, strict=True)
    ]
    used = {name for part in parts for name, seconds in part.items() if seconds > 0}
    where = {
        "weights from VRAM": ("VRAM", speeds.vram),
        "weights from RAM": ("RAM", speeds.ram),
        "experts over PCIe": ("PCIe", speeds.pcie),
        "experts from the drive": ("drive", speeds.drive),
    }
    basis = tuple((name, rate.basis) for part, (name, rate) in where.items() if part in used)
    return Forecast(
        tok_per_s=(1 / times[0], 1 / times[1]),
        limit=max(parts[0], key=lambda name: parts[0][name]),
        hit_rate=(hits[0], hits[1]),
        ram_hit_rate=(nears[0], nears[1]),
        wait_share=(min(shares), max(shares)),
        basis=basis,
    )


RERUNS = (0.30, 0.05)
"""Part of the tokens of balanced answers that are made again from FP4 experts, slow and quick. It
depends on the text and on the gate; `calibrate gate` finds the latter for a model.
"""


def balanced(fast: Forecast, exact: Forecast) -> Forecast:
    """The forecast of answers whose unsure tokens are made again exactly."""
    ends = zip(fast.tok_per_s, exact.tok_per_s, RERUNS, strict=True)
    low, high = (1 / (1 / quick + part / slow) for quick, slow, part in ends)
    return replace(fast, tok_per_s=(low, high))
