"""What keeps this computer from being quick or from working: findings about recorded facts. Pure.

A check (`doctor_checks`) looks at `MachineFacts` and says nothing when all is well. It never
guesses: what is not known (None) gives no finding, because a warning about a healthy computer is
worse than none. A check that has nothing to look at, like one of the card on a computer without,
is neither a finding nor passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moet_desk import doctor_checks as checks
from moet_desk.doctor_checks import Rows
from moet_desk.errors import Severity
from moet_desk.machine import MachineFacts


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
    """All findings, the gravest first, and the checks that looked and found nothing."""

    findings: tuple[Finding, ...]
    passed: tuple[str, ...]

    @property
    def has_warnings(self) -> bool:
        """Whether `--strict` fails."""
        return any(found.severity is not Severity.INFO for found in self.findings)


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what it looks for, what it means when nothing is found, and when it applies."""

    look: Callable[[MachineFacts], Rows]
    passed: str
    applies: Callable[[MachineFacts], bool] = lambda machine: True


_ORDER = (Severity.STOPS, Severity.LOWER, Severity.INFO)


def examine(machine: MachineFacts) -> Examination:
    """Run every check that applies."""
    findings: list[Finding] = []
    passed = []
    for name, check in CHECKS.items():
        if not check.applies(machine):
            continue
        found = [Finding(name, *row) for row in check.look(machine)]
        findings += found
        if not found:
            passed.append(name)
    findings.sort(key=lambda found: _ORDER.index(found.severity))
    return Examination(tuple(findings), tuple(passed))


def _has_card(machine: MachineFacts) -> bool:
    return bool(machine.gpus)


def _uses_card(machine: MachineFacts) -> bool:
    return checks.used_card(machine) is not None


def _knows_display(machine: MachineFacts) -> bool:
    gpu = checks.used_card(machine)
    return gpu is not None and gpu.has_display is not None


def _knows_cuda(machine: MachineFacts) -> bool:
    return (
        _has_card(machine)
        and machine.driver_cuda is not None
        and machine.tools.torch_cuda is not None
    )


def _knows_models_drive(machine: MachineFacts) -> bool:
    return any(drive.use == "models" for drive in machine.drives)


def _knows_drive_rate(machine: MachineFacts) -> bool:
    return machine.rates is not None and machine.rates.drive_read is not None


def _is_contained(machine: MachineFacts) -> bool:
    return machine.container is not None or machine.memory.container_limit is not None


def _has_ready_pack(machine: MachineFacts) -> bool:
    return any(pack.has_gate is not None for pack in machine.packs)


def _has_pack_on_card(machine: MachineFacts) -> bool:
    return _uses_card(machine) and any(pack.dense_bytes is not None for pack in machine.packs)


CHECKS: Mapping[str, Check] = {
    "card": Check(checks.card, "The graphics card can be used"),
    "several-cards": Check(checks.several_cards, "There is one card to choose", _uses_card),
    "torch": Check(checks.torch, "torch is installed"),
    "torch-card": Check(checks.torch_card, "torch was built for the card", _has_card),
    "driver": Check(checks.driver, "The driver is new enough", _knows_cuda),
    "compiler": Check(checks.compiler, "Kernels can be compiled", _has_card),
    "display": Check(checks.display, "No screen shares the card's memory", _knows_display),
    "vram": Check(checks.vram, "No other program holds the card's memory", _uses_card),
    "link": Check(checks.link, "The card's slot is as quick as the card", _uses_card),
    "swap": Check(checks.swap, "Swap is not in use"),
    "container": Check(
        checks.container, "The container does not limit RAM", _is_contained
    ),
    "wsl": Check(checks.wsl, "Windows does not limit RAM", lambda m: m.is_wsl),
    "memlock": Check(checks.lock, "Memory may be locked", _uses_card),
    "drive": Check(checks.drives, "Models are on a local drive", _knows_models_drive),
    "drive-rate": Check(checks.drive_rate, "The drive is quick enough", _knows_drive_rate),
    "disk-space": Check(
        checks.disk_space, "There is room on the drive", lambda m: bool(m.drives)
    ),
    "packs": Check(checks.packs, "All packs are in order", lambda m: bool(m.packs)),
    "gates": Check(checks.gates, "Balanced answers are calibrated", _has_ready_pack),
    "dense": Check(checks.dense, "All models' dense weights fit the card", _has_pack_on_card),
    "measured": Check(checks.measured, "The computer was measured"),
    "clock": Check(checks.clock, "The clock is plausible", lambda m: m.clock is not None),
    "certificates": Check(
        checks.certificates, "Certificates to trust a hub by are there",
        lambda m: m.certificates is not None,
    ),
    "terminal": Check(
        checks.terminal, "The terminal shows everything", lambda m: m.terminal is not None
    ),
}  # fmt: skip
"""Name -> check, in the order of the report. Names are never used again."""
