"""What keeps this computer from being quick or from working: findings about recorded facts. Pure.

A check looks at `MachineFacts` and says nothing when all is well. It never guesses: what is not
known (None) gives no finding, because a warning about a healthy computer is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from moet_desk.errors import Severity
from moet_desk.machine import LEAST_CAPABILITY, Drive, Gpu, MachineFacts, choose_gpu
from moet_desk.units import GB, GIB, show_disk, show_memory, show_rate

LOW_DISK = 20 * GB
"""Less free than this leaves no room for a model and the rest of the system."""

SLOW_DRIVE = 1.0 * GB
"""Bytes per second below which experts from the drive hold up every answer."""

SWAP_IN_USE = 1 * GIB
VRAM_IN_USE = 0.15
"""Part of a card's memory that a desktop may take before it is worth a word."""

PCIE_PART = 0.5
"""Part of its link's rate that a card should reach."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it could be.

    Attributes:
        check: name of the check, stable.
        severity: STOPS nothing works, LOWER slower or smaller than possible, INFO good to know.
        title, cause: what it is and why it matters.
        fix: what to do.
    """

    check: str
    severity: Severity
    title: str
    cause: str
    fix: str


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, the gravest first, and the checks that found nothing."""

    findings: tuple[Finding, ...]
    passed: tuple[str, ...]

    @property
    def has_warnings(self) -> bool:
        """Whether `--strict` fails."""
        return any(found.severity is not Severity.INFO for found in self.findings)


_ORDER = (Severity.STOPS, Severity.LOWER, Severity.INFO)


def examine(machine: MachineFacts) -> Examination:
    """Run every check."""
    findings: list[Finding] = []
    passed = []
    for name, check in CHECKS.items():
        found = [Finding(name, *row) for row in check(machine)]
        findings += found
        if not found:
            passed.append(name)
    findings.sort(key=lambda found: _ORDER.index(found.severity))
    return Examination(tuple(findings), tuple(passed))


_Rows = Iterator[tuple[Severity, str, str, str]]


def _card(machine: MachineFacts) -> _Rows:
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


def _several_cards(machine: MachineFacts) -> _Rows:
    choice = choose_gpu(machine.gpus)
    if len(machine.gpus) > 1 and choice is not None:
        cause = f"{choice.gpu.name} ({choice.gpu.uuid}) is used: {choice.why}."
        fix = "To use another one, set CUDA_VISIBLE_DEVICES to its UUID"
        yield Severity.INFO, f"{len(machine.gpus)} cards, one is used", cause, fix


def _torch(machine: MachineFacts) -> _Rows:
    tools = machine.tools
    if tools.torch is None:
        cause = "Nothing can be computed without it."
        yield Severity.STOPS, "torch is not installed", cause, "Install moet-desk again"
    elif machine.gpus and tools.torch_cuda is None:
        cause = f"torch {tools.torch} was built for CPUs, so the card stays unused."
        fix = "Install the CUDA build of the same version of torch"
        yield Severity.LOWER, "torch cannot use the card", cause, fix


def _driver(machine: MachineFacts) -> _Rows:
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


def _compiler(machine: MachineFacts) -> _Rows:
    tools = machine.tools
    if not machine.gpus:
        return
    if tools.triton is None:
        cause = "It makes the kernels of the card; without it the CPU computes."
        yield Severity.LOWER, "Triton is not installed", cause, "Install triton"
    missing = [] if tools.compiler else ["a C compiler"]
    missing += [] if tools.python_headers else ["Python's headers"]
    if missing:
        cause = f"Triton needs {' and '.join(missing)} to start kernels; the CPU computes instead."
        fix = "Install gcc and the headers of this Python (often python3-dev)"
        yield Severity.LOWER, "Kernels cannot be compiled", cause, fix


def _display(machine: MachineFacts) -> _Rows:
    gpu = _used(machine)
    if gpu is not None and gpu.has_display:
        cause = f"The desktop shares {gpu.name} and its memory; {_in_use(gpu)} is in use."
        fix = "Nothing has to be done. A screen on the mainboard's output leaves more for experts"
        yield Severity.INFO, "A screen is attached to the card", cause, fix


def _vram(machine: MachineFacts) -> _Rows:
    gpu = _used(machine)
    if gpu is not None and gpu.vram_free < (1 - VRAM_IN_USE) * gpu.vram_total:
        cause = f"{_in_use(gpu)} of {show_memory(gpu.vram_total)} is in use by other programs."
        fix = "Close them (nvidia-smi names them) before a model is loaded"
        yield Severity.LOWER, "The card's memory is in use", cause, fix


def _link(machine: MachineFacts) -> _Rows:
    gpu = _used(machine)
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


def _swap(machine: MachineFacts) -> _Rows:
    memory = machine.memory
    if memory.swap_used >= SWAP_IN_USE:
        cause = (
            f"{show_memory(memory.swap_used)} of programs are swapped out. Experts in RAM push out"
            " more of them, and everything may stall."
        )
        fix = "Close programs, or lower memory.ram"
        yield Severity.LOWER, "Swap is in use", cause, fix


def _container(machine: MachineFacts) -> _Rows:
    limit = machine.memory.container_limit
    if limit is not None:
        cause = (
            f"This container may take {show_memory(limit)} of the computer's"
            f" {show_memory(machine.memory.total)}. Plans are made for the limit."
        )
        fix = "Start it with more memory (docker run --memory)"
        yield Severity.INFO, "A container limits the RAM", cause, fix


def _wsl(machine: MachineFacts) -> _Rows:
    if machine.is_wsl:
        cause = (
            f"Windows gives Linux {show_memory(machine.memory.total)}, half of the RAM by default,"
            " and lets only part of it be locked for the card."
        )
        fix = "Set memory= under [wsl2] in .wslconfig of your Windows user, then: wsl --shutdown"
        yield Severity.LOWER, "WSL limits the RAM", cause, fix


def _lock(machine: MachineFacts) -> _Rows:
    lockable = machine.memory.lockable
    if machine.gpus and lockable is not None and lockable < machine.memory.available // 2:
        cause = (
            f"Programs may lock {show_memory(lockable)}. Most drivers lock experts' memory in spite"
            " of it; if yours does not, loading stops with MD-RAM-02."
        )
        fix = "Only if that happens: raise the limit (ulimit -l, or memlock in limits.conf)"
        yield Severity.INFO, "Locking memory is limited", cause, fix


def _drives(machine: MachineFacts) -> _Rows:
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


def _drive_rate(machine: MachineFacts) -> _Rows:
    rate = machine.rates.drive_read if machine.rates is not None else None
    if rate is not None and rate < SLOW_DRIVE:
        cause = f"It reads {show_rate(rate)} in blocks of an expert's size."
        fix = "Keep models on an NVMe drive: --data-dir DIR"
        yield Severity.LOWER, "The drive is slow", cause, fix


def _disk_space(machine: MachineFacts) -> _Rows:
    for drive in machine.drives:
        if drive.free < LOW_DISK:
            cause = f"{show_disk(drive.free)} are free in {drive.folder}."
            fix = "Free some, or keep models elsewhere: --data-dir DIR"
            yield Severity.LOWER, "Little free disk space", cause, fix


def _packs(machine: MachineFacts) -> _Rows:
    for pack in machine.packs:
        if pack.state != "ready":
            cause = f"{pack.name} is {pack.state}. {pack.problem}".strip()
            fix = f"See: moet-desk show {pack.name}"
            yield Severity.LOWER, "A model cannot be used", cause, fix


def _gates(machine: MachineFacts) -> _Rows:
    for pack in machine.packs:
        if pack.state == "ready" and pack.has_gate is False:
            cause = f"Balanced answers of {pack.name} use the general gate of 0.6."
            fix = f"Fit it to texts: moet-desk calibrate gate {pack.name}"
            yield Severity.INFO, "A model's gate is not calibrated", cause, fix


def _measured(machine: MachineFacts) -> _Rows:
    if machine.rates is None:
        cause = "Forecasts use data sheets and assumptions."
        fix = "Measure, which takes a few seconds: moet-desk doctor --bench"
        yield Severity.INFO, "Nothing has been measured yet", cause, fix


def _used(machine: MachineFacts) -> Gpu | None:
    choice = choose_gpu(machine.gpus)
    return choice.gpu if choice is not None else None


def _in_use(gpu: Gpu) -> str:
    return show_memory(gpu.vram_total - gpu.vram_free)


CHECKS: Mapping[str, Callable[[MachineFacts], _Rows]] = {
    "card": _card,
    "several-cards": _several_cards,
    "torch": _torch,
    "driver": _driver,
    "compiler": _compiler,
    "display": _display,
    "vram": _vram,
    "link": _link,
    "swap": _swap,
    "container": _container,
    "wsl": _wsl,
    "memlock": _lock,
    "drive": _drives,
    "drive-rate": _drive_rate,
    "disk-space": _disk_space,
    "packs": _packs,
    "gates": _gates,
    "measured": _measured,
}
"""Name -> check, in the order of the report."""
