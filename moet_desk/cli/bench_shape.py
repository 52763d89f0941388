"""`moet-desk bench --shape`: decode steps of a model of real shape with made-up weights on a GPU.

Owns the options, the checks before anything is made, and the record; the measuring is
`engine.cuda.measure`. Runs in the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import TYPE_CHECKING, Any, TypeVar

import click

from moet_desk import hardware
from moet_desk.cli.bench_record import command_line, driver, machine, peak_rss, rounded
from moet_desk.cli.context import Invocation, Size
from moet_desk.cli.output import Format, print_result, print_text
from moet_desk.engine.cuda.shapes import SHAPES, Shape
from moet_desk.errors import fail
from moet_desk.store.pack_format import Plane
from moet_desk.units import GIB, show_disk, show_memory, show_rate

if TYPE_CHECKING:
    import torch

    from moet_desk.engine.cuda.kernel_groups import KernelTime
    from moet_desk.engine.cuda.measured import Figures, Setup

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

VRAM_SHARE = 0.9
"""Part of the card's free memory that is used when nobody says how much."""


_FEW_STEPS: Mapping[str, Any] = {"warm": 100, "steps": 150, "steps_s": 10.0}
"""Where some may wait for a drive."""


@dataclass(frozen=True, slots=True)
class ShapeWishes:
    """What was asked on the command line, sizes in bytes."""

    vram_limit: int | None
    ram_limit: int | None
    hit_rate: float
    context: int
    rows: int
    prefill: int
    exact: bool
    fine_slots: int
    draft_depth: int  # 0: no guesses
    acceptance: float | None
    lookahead: bool


def shape_options(command: _Decorated) -> _Decorated:
    """The options that describe a measurement with made-up weights."""
    options = (
        click.option(
            "--shape", type=click.Choice(list(SHAPES)),
            help="Measure made-up weights of this model's shape on the GPU instead of a model.",
        ),
        click.option("--vram-limit", type=Size(), help="With --shape: VRAM to use, as 32GiB."),
        click.option("--ram-limit", type=Size(), help="With --shape: RAM for rows, as 96GiB."),
        click.option(
            "--hit-rate", default=0.96, show_default=True, type=click.FloatRange(0, 1),
            help="With --shape: share of look-ups that find their expert in a slot.",
        ),
        click.option(
            "--context", default=8192, show_default=True, type=click.IntRange(64, 1 << 20),
            help="With --shape: tokens that each step sees.",
        ),
        click.option(
            "--rows", default=1, show_default=True, type=click.IntRange(1, 8),
            help="With --shape: rows of a step, as of drafts; each counts as a token.",
        ),
        click.option(
            "--prefill", default=0, type=click.IntRange(0, 1 << 20),
            help="With --shape: also read a prompt of so many tokens.",
        ),
        click.option(
            "--fine-slots", default=0, type=click.IntRange(0),
            help="With --shape and --exact: slots for FP4 rows; by default all come from RAM.",
        ),
        click.option(
            "--acceptance", type=click.FloatRange(0, 1),
            help="With --shape and --draft-depth: share of guesses that are right where those"
            " before them were; tokens/s are computed for it from measured times.",
        ),
        click.option(
            "--lookahead/--no-lookahead", default=True,
            help="With --shape: bring experts ahead for the next layer, as the engine does.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def bench_shape(invocation: Invocation, name: str, wishes: ShapeWishes) -> None:
    """Measure a shape and print its record.

    Raises:
        MoetError: MD-GPU-01, MD-GPU-02 no CUDA device that can be used, MD-GPU-05 or MD-RAM-05 it
            does not fit the limits, MD-RAM-02 memory cannot be pinned, MD-DISK-01 the drive has no
            room for made-up rows.
    """
    shape = SHAPES[name](max(wishes.context, wishes.prefill))
    if wishes.rows > shape.most_rows:
        raise click.BadParameter(
            f"a step of {name} has {shape.most_rows} rows at most", param_hint="--rows"
        )
    shape = _with_drafts(shape, wishes)
    device = _device()
    from moet_desk.engine.cuda.measure import measure
    from moet_desk.engine.cuda.measured import Setup

    setup = Setup(
        shape, device, _vram_bytes(device, wishes.vram_limit), context=wishes.context,
        rows=wishes.rows, drafts=wishes.draft_depth, prefill=wishes.prefill,
        plane=Plane.FINE if wishes.exact else Plane.BASE, fine_slots=wishes.fine_slots,
        ram_bytes=wishes.ram_limit, folder=invocation.locations.models_dir,
        looks_ahead=wishes.lookahead, **({} if wishes.ram_limit is None else _FEW_STEPS),
    )  # fmt: skip
    setup.in_ram()  # refuses what is too little before anything is made
    invocation.say(f"Measuring made-up weights of {name}, {setup.n_slots()} slots")
    figures = measure(setup, hit_rate=wishes.hit_rate, progress=invocation.say)
    record = {**machine(), **_gpu(device), **make_record(shape, wishes, figures, setup)}
    if invocation.format is Format.HUMAN:
        print_text(for_people(record))
    else:
        print_result(invocation.format, "bench", record)


def _with_drafts(shape: Shape, wishes: ShapeWishes) -> Shape:
    """The shape with a head, if guesses are asked for; refuses what makes no sense."""
    if (wishes.draft_depth > 0) != (wishes.acceptance is not None):
        raise click.UsageError("--shape takes --draft-depth and --acceptance together or neither")
    if not wishes.draft_depth:
        return shape
    if wishes.rows != 1:
        raise click.UsageError("--rows cannot be used with --draft-depth")
    if 1 + wishes.draft_depth > shape.most_rows:
        most = shape.most_rows - 1
        raise click.BadParameter(
            f"a step of {shape.name} checks {most} guesses at most", param_hint="--draft-depth"
        )
    return shape.with_head()


def _device() -> torch.device:
    import torch

    hardware.choose_device("cuda", hardware.probe_accelerator())
    return torch.device("cuda", torch.cuda.current_device())


def _vram_bytes(device: torch.device, limit: int | None) -> int:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    if limit is not None and limit > total:
        raise fail("MD-GPU-05", need=show_memory(limit), have=show_memory(total))
    return int(VRAM_SHARE * free) if limit is None else limit


def _gpu(device: torch.device) -> Mapping[str, Any]:
    import torch

    return {"gpu": torch.cuda.get_device_name(device), "driver": driver()}


def _by_kernel(kernels: Mapping[str, KernelTime] | None) -> dict[str, Any] | None:
    if kernels is None:
        return None
    return {
        name: {
            "launches": rounded(found.launches, 1), "ms": rounded(found.ms, 3),
            "share_ms": rounded(found.share_ms, 3), "before_ms": rounded(found.before_ms, 3),
        }
        for name, found in kernels.items()
    }  # fmt: skip


def make_record(
    shape: Shape, wishes: ShapeWishes, figures: Figures, setup: Setup
) -> dict[str, Any]:
    """The figures in the schema of bench/records (design §13), without the machine."""
    in_ram = setup.in_ram()
    steps, bandwidth = figures.steps, figures.bandwidth
    marks = quantiles(steps.times_ms, n=20)
    groups = figures.by_group
    return {
        "command": command_line(),
        "shape": shape.name,
        "note": shape.note,
        "weights": "synthetic",
        "vram_limit_gib": _gib(wishes.vram_limit),
        "ram_limit_gib": _gib(wishes.ram_limit),
        "quality": "exact" if wishes.exact else "fast",
        "base_slots": figures.n_slots,
        "fine_slots": figures.n_fine_slots,
        "rows": setup.n_rows,
        "hit_rate_wanted": wishes.hit_rate,
        "hit_rate": rounded(steps.hit_rate, 4),
        "misses_per_step": rounded(steps.misses),
        "fine_misses_per_step": rounded(steps.fine_misses),
        "ahead": {
            "rows_per_step": rounded(steps.ahead), "needed_per_step": rounded(steps.needed),
        } if wishes.lookahead else None,
        "tokens_per_step": wishes.rows,
        "acceptance": None,
        "context": wishes.context,
        "kv_format": "nvfp4",
        "decode_tok_per_s": rounded(1e3 * wishes.rows / steps.median_ms, 1),
        "prefill_tokens": wishes.prefill or None,
        "prefill_tok_per_s": rounded(figures.prefill_tok_per_s, 1),
        "step_ms": {
            "median": rounded(steps.median_ms, 3), "p05": rounded(marks[0], 3),
            "p95": rounded(marks[-1], 3),
            "by_group": groups and {name: rounded(ms, 3) for name, ms in groups.items()},
            "by_kernel": _by_kernel(figures.by_kernel),
        },
        "prefill_ms": {"by_kernel": _by_kernel(figures.prefill_by_kernel)},
        "bytes_per_step": {
            "vram": figures.vram_bytes, "pcie": figures.pcie_bytes,
            "nvme": None if figures.drive is None else round(steps.drive_bytes),
        },
        "drive": figures.drive
        and {
            "rows_per_step": rounded(steps.drive_rows),
            "rows_in_ram": {plane.value: n for plane, n in in_ram.items()},
            "bytes_per_s": round(figures.drive.bytes_per_s),
            "read_ms": figures.drive.read_ms and asdict(figures.drive.read_ms),
            "direct": figures.drive.direct,
        },
        "achieved_bw": {
            "vram_bytes_per_s": round(1e3 * figures.vram_bytes / steps.median_ms),
            "pcie_bytes_per_s": round(1e3 * figures.pcie_bytes / steps.median_ms),
        },
        "measured_bw": bandwidth
        and {
            "vram_bytes_per_s": round(bandwidth.vram),
            "pcie_bytes_per_s": round(bandwidth.pcie),
        },
        "drafts": _drafts(wishes, figures),
        "roofline_ratio": rounded(figures.roofline_ratio, 3),
        "peak_vram_gib": _gib(figures.peak_vram_bytes),
        "peak_rss_gib": _gib(peak_rss()),
        "repeats": len(steps.times_ms),
    }  # fmt: skip


def expected_tokens(depth: int, acceptance: float) -> float:
    """Tokens of a step that checks `depth` guesses, each right with the same chance where those
    before it were.
    """
    return sum(acceptance**place for place in range(depth + 1))


def _drafts(wishes: ShapeWishes, figures: Figures) -> Mapping[str, Any] | None:
    """What guesses would bring: times are measured, the acceptance is stated, the rest computed."""
    found = figures.drafts
    if found is None or wishes.acceptance is None:
        return None
    step_ms = found.checks.median_ms + wishes.draft_depth * found.guess_ms
    tokens = expected_tokens(wishes.draft_depth, wishes.acceptance)
    return {
        "depth": wishes.draft_depth,
        "acceptance_stated": wishes.acceptance,
        "check_ms_measured": rounded(found.checks.median_ms, 3),
        "check_misses_measured": rounded(found.checks.misses),
        "guess_ms_measured": rounded(found.guess_ms, 3),
        "tokens_per_step_computed": rounded(tokens, 3),
        "decode_tok_per_s_computed": rounded(1e3 * tokens / step_ms, 1),
        "gain_computed": rounded(tokens * figures.steps.median_ms / step_ms, 3),
    }


def _gib(n_bytes: int | None) -> float | None:
    return None if n_bytes is None else rounded(n_bytes / GIB)


_WORDS = {
    "attention": "attention",
    "dense": "dense products",
    "router_lookup": "router, look-up",
    "fetch": "fetch",
    "experts": "experts",
    "sampling": "sampling",
    "norms_other": "norms, other",
    "gaps_host": "gaps, host",
}


def for_people(record: Mapping[str, Any]) -> str:
    """A record as lines of text."""
    step, moved = record["step_ms"], record["bytes_per_step"]
    limit = record["vram_limit_gib"]
    within = "" if limit is None else f" in {show_memory(limit * GIB)} of VRAM"
    head = f"{record['shape']}, {record['quality']}, made-up weights"
    lines = [f"{head}, on {record['gpu']}{within}"]
    if record["note"]:
        lines.append(f"  note           {record['note']}")
    lines += [
        f"  decode         {record['decode_tok_per_s']} tokens/s,"
        f" {record['tokens_per_step']} per step, context of {record['context']}",
        f"  step           {step['median']:.2f} ms  (p05 {step['p05']:.2f}, p95 {step['p95']:.2f})",
        *_group_lines(step),
        f"  hits           {record['hit_rate']:.1%}, {record['hit_rate_wanted']:.1%} wanted;"
        f" {record['base_slots']} slots of {record['rows']} experts",
        *_ahead_lines(record["ahead"]),
        *_fine_lines(record),
        *_draft_lines(record["drafts"]),
        f"  VRAM           {show_disk(moved['vram'])} per step{_rates(record, 'vram')}",
        f"  PCIe           {show_disk(moved['pcie'])} per step{_rates(record, 'pcie')}",
        *_drive_lines(record),
        f"  roofline       {_or_unknown(record['roofline_ratio'])} of the step is what its bytes"
        " take at the speed of copies",
    ]
    if record["prefill_tok_per_s"] is not None:
        lines.append(
            f"  prefill        {record['prefill_tok_per_s']} tokens/s,"
            f" prompt of {record['prefill_tokens']}"
        )
    vram = record["peak_vram_gib"]
    on_card = "" if vram is None else f"{show_memory(vram * GIB)} of VRAM, "
    rss = show_memory(record["peak_rss_gib"] * GIB)
    return "\n".join([*lines, f"  memory         {on_card}{rss} of RAM at most"])


def _group_lines(step: Mapping[str, Any]) -> list[str]:
    groups = step["by_group"]
    if groups is None:
        return ["    by kernel    not measured: the driver lets nothing be traced"]
    return [
        f"    {_WORDS[name]:<16} {ms:7.3f} ms  {ms / step['median']:4.0%}"
        for name, ms in groups.items()
    ]


def _drive_lines(record: Mapping[str, Any]) -> list[str]:
    drive = record["drive"]
    if drive is None:
        return []
    how = "" if drive["direct"] else ", through the page cache"
    moved, rate = record["bytes_per_step"]["nvme"], show_rate(drive["bytes_per_s"])
    return [
        f"  drive          {show_disk(moved)} per step ({drive['rows_per_step']:.1f} rows), reads"
        f" reach {rate}{how}"
    ]


def _ahead_lines(ahead: Mapping[str, Any] | None) -> list[str]:
    if ahead is None:
        return []
    rows, needed = ahead["rows_per_step"], ahead["needed_per_step"]
    return [f"  ahead          {rows:.1f} rows per step, {needed:.1f} of them needed"]


def _fine_lines(record: Mapping[str, Any]) -> list[str]:
    if record["quality"] == "fast":
        return []
    fetched, slots = record["fine_misses_per_step"], record["fine_slots"]
    return [f"  FP4 rows       {fetched:.1f} per step from RAM; {slots} slots"]


def _draft_lines(drafts: Mapping[str, Any] | None) -> list[str]:
    if drafts is None:
        return []
    checks = f"{drafts['check_ms_measured']:.2f} ms to check {drafts['depth']}"
    return [
        f"  guesses        {checks}, {drafts['guess_ms_measured']:.2f} ms to make one (measured)",
        f"                 computed: {drafts['decode_tok_per_s_computed']} tokens/s"
        f" (x{drafts['gain_computed']:.2f}, {drafts['tokens_per_step_computed']} per step) if"
        f" {drafts['acceptance_stated']:.0%} are right",
    ]


def _rates(record: Mapping[str, Any], tier: str) -> str:
    """What was reached, and what copies reach."""
    name = f"{tier}_bytes_per_s"
    reached, known = show_rate(record["achieved_bw"][name]), record["measured_bw"]
    return f", {reached}" if known is None else f", {reached} of {show_rate(known[name])}"


def _or_unknown(value: float | None) -> str:
    return "–" if value is None else str(value)
