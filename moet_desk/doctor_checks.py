"""The doctor's checks: each looks at the facts of a computer and yields what is not as it could be.

A check never guesses: what is not known (None) gives no finding. When a check has nothing to look
at, it is left out by its row in `doctor.CHECKS`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from moet_desk.errors import Severity
from moet_desk.machine import LEAST_CAPABILITY, Drive, Gpu, MachineFacts, choose_gpu
from moet_desk.plan import vram_budget
from moet_desk.units import GB, GIB, show_disk, show_memory, show_rate

LOW_DISK = 20 * GB
"""Less free than this leaves no room for a model and the rest of the system."""

SLOW_DRIVE = 1.0 * GB
"""Bytes per second below which experts from the drive hold up every answer."""

SWAP_IN_USE = 1 * GIB
VRAM_IN_USE = 0.15
"""Part of a card's memory that a desktop may take before it is worth a word."""

EARLIEST_YEAR = 2026
"""This program did not exist before."""

CLOCK_BEHIND_S = 24 * 3600.0
COLUMNS, LINES = 80, 24
LEAST_COLOURS = 256
PCIE_PART = 0.5
"""Part of its link's rate that a card should reach."""

Rows = Iterator[tuple[Severity, str, str, str]]
"""Severity, title, cause, fix."""


def card(machine: MachineFacts) -> Rows:
    if not machine.gpus:
        why = machine.gpu_problem or "none was found"
        cause = f"{why[:1].upper()}{why[1:]}. The CPU computes: that is enough for the demo model."
        fix = "With an NVIDIA card of 2020 or later: install its driver; nvidia-smi must list it"
        yield Severity.LOWER, "No graphics card that can be used", cause, fix
        return
    if choose_gpu(machine.gpus) is None:
        names = ", ".join(gpu.name for gpu in machine.gpus)
        least = ".".join(map(str, LEAST_CAPABILITY))
        cause = f"{names}: compute capability {least} or more is needed. The CPU computes."
        yield Severity.LOWER, "The graphics card is too old", cause, "Use a card of 2020 or later"


def several_cards(machine: MachineFacts) -> Rows:
    choice = choose_gpu(machine.gpus)
    if len(machine.gpus) > 1 and choice is not None:
        cause = f"{choice.gpu.name} ({choice.gpu.uuid}) is used: {choice.why}."
        fix = "To use another one, set CUDA_VISIBLE_DEVICES to its UUID"
        yield Severity.INFO, f"{len(machine.gpus)} cards, one is used", cause, fix


def torch(machine: MachineFacts) -> Rows:
    if machine.tools.torch is None:
        cause = "Nothing can be computed without it."
        yield Severity.STOPS, "torch is not installed", cause, "Install moet-desk again"


def torch_card(machine: MachineFacts) -> Rows:
    tools = machine.tools
    if tools.torch is not None and tools.torch_cuda is None:
        cause = f"torch {tools.torch} was built for CPUs, so the card stays unused."
        fix = "Install the CUDA build of the same version of torch"
        yield Severity.LOWER, "torch cannot use the card", cause, fix


def driver(machine: MachineFacts) -> Rows:
    have, want = machine.driver_cuda, machine.tools.torch_cuda
    if have is None or want is None:
        return
    # A driver runs everything of its own CUDA generation; the number behind the dot may be newer.
    if int(have.partition(".")[0]) < int(want.partition(".")[0]):
        cause = (
            f"Driver {machine.driver} runs CUDA up to {have}, torch was built for {want}:"
            " the card stays unused."
        )
        fix = "Install a newer NVIDIA driver, or a torch that was built for an older CUDA"
        yield Severity.LOWER, "The driver is too old for torch", cause, fix


def compiler(machine: MachineFacts) -> Rows:
    tools = machine.tools
    if tools.triton is None:
        cause = "It makes the kernels of the card; without it the CPU computes."
        yield Severity.LOWER, "Triton is not installed", cause, "Install triton"
    missing = [] if tools.compiler else ["a C compiler"]
    missing += [] if tools.python_headers else ["Python's headers"]
    if missing:
        cause = f"Triton needs {' and '.join(missing)} to start kernels; the CPU computes instead."
        fix = "Install gcc and the headers of this Python (often python3-dev)"
        yield Severity.LOWER, "Kernels cannot be compiled", cause, fix


def display(machine: MachineFacts) -> Rows:
    gpu = used_card(machine)
    if gpu is not None and gpu.has_display:
        cause = f"The desktop shares {gpu.name} and its memory; {_in_use(gpu)} is in use."
        fix = "Nothing has to be done. A screen on the mainboard's output leaves more for experts"
        yield Severity.INFO, "A screen is attached to the card", cause, fix


def vram(machine: MachineFacts) -> Rows:
    gpu = used_card(machine)
    if gpu is not None and gpu.vram_free < (1 - VRAM_IN_USE) * gpu.vram_total:
        cause = f"{_in_use(gpu)} of {show_memory(gpu.vram_total)} is in use by other programs."
        fix = "Close them (nvidia-smi names them) before a model is loaded"
        yield Severity.LOWER, "The card's memory is in use", cause, fix


def link(machine: MachineFacts) -> Rows:
    gpu = used_card(machine)
    if gpu is None:
        return
    link, rates = gpu.link, machine.rates
    if link.width is not None and link.max_width is not None and link.width < link.max_width:
        cause = (
            f"{link.width} of {link.max_width} PCIe lanes are in use: experts come to the card"
            f" {link.max_width / link.width:.0f} times more slowly."
        )
        fix = "Seat the card again, use the slot next to the processor, free lanes that it shares"
        yield Severity.LOWER, "The card's link is narrower than possible", cause, fix
    if link.card_gen is not None and link.max_gen is not None and link.max_gen < link.card_gen:
        cause = f"The slot gives PCIe {link.max_gen}, the card can do {link.card_gen}."
        fix = "Look in the firmware's settings; the mainboard or a riser may not do more"
        yield Severity.INFO, "The card's link is slower than the card", cause, fix
    best = link.bytes_per_s
    if rates is not None and rates.pcie is not None and best and rates.pcie < PCIE_PART * best:
        cause = f"Copies to the card reach {show_rate(rates.pcie)}, the link {show_rate(best)}."
        fix = "Look for power saving of the card's link, and measure again: doctor --bench"
        yield Severity.LOWER, "Copies to the card are slow", cause, fix


def swap(machine: MachineFacts) -> Rows:
    memory = machine.memory
    if memory.swap_used >= SWAP_IN_USE:
        cause = (
            f"{show_memory(memory.swap_used)} of programs are swapped out. Experts in RAM push out"
            " more of them, and everything may stall."
        )
        fix = "Close programs, or lower memory.ram"
        yield Severity.LOWER, "Swap is in use", cause, fix


def container(machine: MachineFacts) -> Rows:
    limit = machine.memory.container_limit
    if limit is not None:
        cause = (
            f"This container may take {show_memory(limit)} of the computer's"
            f" {show_memory(machine.memory.total)}. Plans are made for the limit."
        )
        fix = "Start it with more memory (docker run --memory)"
        yield Severity.INFO, "A container limits the RAM", cause, fix


def wsl(machine: MachineFacts) -> Rows:
    if machine.is_wsl:
        cause = (
            f"Windows gives Linux {show_memory(machine.memory.total)}, half of the RAM by default,"
            " and lets only part of it be locked for the card."
        )
        fix = "Set memory= under [wsl2] in .wslconfig of your Windows user, then: wsl --shutdown"
        yield Severity.LOWER, "WSL limits the RAM", cause, fix


def lock(machine: MachineFacts) -> Rows:
    lockable = machine.memory.lockable
    if lockable is not None and lockable < machine.memory.available // 2:
        cause = (
            f"Programs may lock {show_memory(lockable)}. Most drivers lock experts' memory in spite"
            " of it; if yours does not, loading stops with MD-RAM-02."
        )
        fix = "Only if that happens: raise the limit (ulimit -l, or memlock in limits.conf)"
        yield Severity.INFO, "Locking memory is limited", cause, fix


def drives(machine: MachineFacts) -> Rows:
    for drive in (drive for drive in machine.drives if drive.use == "models"):
        kind = _kind(drive)
        if kind:
            cause = (
                f"{drive.folder} is on {kind} ({drive.device}). Experts that do not fit into RAM"
                " are read from there for every word."
            )
            fix = "Keep models on an NVMe drive: --data-dir DIR"
            yield Severity.LOWER, f"Models are on {kind}", cause, fix
        if drive.direct is False:
            cause = (
                f"{drive.filesystem} at {drive.folder} refuses direct reads; the page cache takes"
                " RAM that experts could use."
            )
            fix = "Keep models on ext4, XFS or Btrfs"
            yield Severity.INFO, "Reads go through the page cache", cause, fix


def _kind(drive: Drive) -> str:
    if drive.is_network:
        return "a network drive"
    if drive.is_nvme or drive.is_nvme is None:
        return ""
    return "a drive with spinning disks" if drive.is_rotational else "a drive that is not NVMe"


def drive_rate(machine: MachineFacts) -> Rows:
    rate = machine.rates.drive_read if machine.rates is not None else None
    if rate is not None and rate < SLOW_DRIVE:
        cause = f"It reads {show_rate(rate)} in blocks of an expert's size."
        fix = "Keep models on an NVMe drive: --data-dir DIR"
        yield Severity.LOWER, "The drive is slow", cause, fix


def disk_space(machine: MachineFacts) -> Rows:
    for drive in machine.drives:
        if drive.free < LOW_DISK:
            cause = f"{show_disk(drive.free)} are free in {drive.folder}."
            fix = "Free some, or keep models elsewhere: --data-dir DIR"
            yield Severity.LOWER, "Little free disk space", cause, fix


def packs(machine: MachineFacts) -> Rows:
    for pack in machine.packs:
        if pack.state != "ready":
            cause = f"{pack.name} is {pack.state}. {pack.problem}".strip()
            fix = f"See: moet-desk show {pack.name}"
            yield Severity.LOWER, "A model cannot be used", cause, fix


def gates(machine: MachineFacts) -> Rows:
    for pack in machine.packs:
        if pack.state == "ready" and pack.has_gate is False:
            cause = f"Balanced answers of {pack.name} use the general gate of 0.6."
            fix = f"Fit it to texts: moet-desk calibrate gate {pack.name}"
            yield Severity.INFO, "A model's gate is not calibrated", cause, fix


def dense(machine: MachineFacts) -> Rows:
    gpu = used_card(machine)
    if gpu is None:
        return
    budget = vram_budget(gpu.vram_free)
    for pack in machine.packs:
        stored, rounded = pack.dense_bytes, pack.dense_rounded_bytes
        if stored is None or rounded is None or stored <= budget:
            continue
        sizes = f"{show_memory(stored)} of weights of {pack.name} besides the experts"
        if rounded < stored and rounded <= budget:
            cause = f"{sizes} do not fit {gpu.name}; rounded they take {show_memory(rounded)}."
            fix = f"Nothing has to be done. See: moet-desk plan {pack.name}"
            yield Severity.INFO, "A model's dense weights are rounded to 8 bits", cause, fix
        else:
            cause = f"{sizes} do not fit {gpu.name}, which may use {show_memory(budget)}."
            fix = "Answer on the CPU (--device cpu), or use a card with more memory"
            yield Severity.LOWER, "A model does not fit the card", cause, fix


def measured(machine: MachineFacts) -> Rows:
    if machine.rates is None:
        cause = "Forecasts use data sheets and assumptions."
        fix = "Measure, which takes a few seconds: moet-desk doctor --bench"
        yield Severity.INFO, "Nothing has been measured yet", cause, fix


def clock(machine: MachineFacts) -> Rows:
    found = machine.clock
    if found is None:
        return
    now = datetime.fromtimestamp(found.now_s, UTC)
    behind_s = (found.newest_file_s or 0) - found.now_s
    fix = "Set it, or let the system do so: timedatectl set-ntp true"
    if now.year < EARLIEST_YEAR:
        cause = f"It says {now:%Y-%m-%d}. No hub is trusted with a wrong date."
        yield Severity.LOWER, "The clock is wrong", cause, fix
    elif behind_s > CLOCK_BEHIND_S:
        newest = datetime.fromtimestamp(found.newest_file_s or 0, UTC)
        cause = f"It says {now:%Y-%m-%d}, and files here were written on {newest:%Y-%m-%d}."
        yield Severity.LOWER, "The clock is behind", cause, fix


def certificates(machine: MachineFacts) -> Rows:
    found = machine.certificates
    if found is not None and not found.usable:
        cause = f"There are none at {found.place}, so no hub can be trusted and nothing fetched."
        fix = "Install ca-certificates, or set SSL_CERT_FILE to a file that has them"
        yield Severity.LOWER, "No certificates to trust a hub by", cause, fix


def terminal(machine: MachineFacts) -> Rows:
    found = machine.terminal
    if found is None:
        return
    if found.columns < COLUMNS or found.rows < LINES:
        cause = f"It is {found.columns} x {found.rows}; the app needs {COLUMNS} x {LINES}."
        yield Severity.LOWER, "The window is small", cause, "Make it larger"
    if not found.utf8:
        cause = "The locale is not UTF-8, so the app draws with ASCII characters."
        fix = "Set LANG to a UTF-8 locale, like C.UTF-8"
        yield Severity.INFO, "The terminal has no UTF-8", cause, fix
    if found.colours < LEAST_COLOURS:
        cause = f"TERM is {found.name or 'not set'}: shades of the cache screen look alike."
        fix = "Use a terminal with 256 colours and its own TERM, like xterm-256color"
        yield Severity.INFO, "The terminal has few colours", cause, fix


def used_card(machine: MachineFacts) -> Gpu | None:
    """The card that computes."""
    choice = choose_gpu(machine.gpus)
    return choice.gpu if choice is not None else None


def _in_use(gpu: Gpu) -> str:
    return show_memory(gpu.vram_total - gpu.vram_free)
