"""This computer as the wizard and the doctor screen show it. Pure: facts in, records out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moet_desk.cli.doctor import describe
from moet_desk.doctor import Examination
from moet_desk.doctor import Finding as Found
from moet_desk.errors import Severity
from moet_desk.machine import MachineFacts
from moet_desk.ui.desk import DoctorView, Fact, Finding, MachineView, Mark

_MARKS = {Severity.STOPS: Mark.BAD, Severity.LOWER: Mark.WARN}
_LINE_OF_CHECK = {
    "card": "GPU", "several-cards": "GPU", "torch": "GPU", "driver": "GPU", "compiler": "GPU",
    "display": "GPU", "vram": "GPU", "link": "GPU", "swap": "RAM", "container": "RAM",
    "wsl": "RAM", "memlock": "RAM", "drive": "Drive", "drive-rate": "Drive",
    "disk-space": "Drive",
}  # fmt: skip
"""Which line of the computer a finding is shown under; the others are the doctor's alone."""

_PASSED = {
    "card": "A graphics card that can be used, or none is needed",
    "several-cards": "One card, or the best one is chosen",
    "torch": "torch fits this card",
    "driver": "The driver is new enough",
    "compiler": "Kernels can be compiled",
    "display": "The display leaves the card's memory free",
    "vram": "No other program holds the card's memory",
    "link": "The card's slot is as quick as the card",
    "swap": "Swap is not in use",
    "container": "No container limits memory",
    "wsl": "No limits of Windows around Linux",
    "memlock": "Memory may be locked",
    "drive": "Models are on a local drive",
    "drive-rate": "The drive is quick enough",
    "disk-space": "There is room on the drive",
    "packs": "All packs are in order",
    "gates": "Balanced answers are calibrated",
    "measured": "The computer was measured",
}
"""What it says of a check that found nothing; a test holds it to the doctor's list."""


def machine_view(
    facts: MachineFacts, found: Examination, *, models_dir: str, free_bytes: int
) -> MachineView:
    """The lines of the wizard's first step, each with the gravest mark of its findings."""
    lines = tuple(_fact(name, text, found.findings) for name, text in describe(facts))
    return MachineView(lines, models_dir, free_bytes)


def _fact(name: str, text: str, findings: Sequence[Found]) -> Fact:
    mine = [row for row in findings if _LINE_OF_CHECK.get(row.check) == name]
    grave = [row for row in mine if row.severity in _MARKS]
    if not grave:
        unknown = name == "Rates" and text == "not measured"
        return Fact(name, text, Mark.UNKNOWN if unknown else Mark.OK)
    return Fact(name, text, _MARKS[grave[0].severity], grave[0].title)


def doctor_view(found: Examination, document: Mapping[str, Any]) -> DoctorView:
    """Findings, worst first, then what is in order."""
    rows = tuple(_finding(row) for row in found.findings)
    passed = tuple(Finding(Mark.OK, _PASSED.get(name, name)) for name in found.passed)
    return DoctorView((*rows, *passed), document)


def _finding(row: Found) -> Finding:
    mark = _MARKS.get(row.severity, Mark.UNKNOWN)
    if row.severity is Severity.INFO:
        mark = Mark.NOTE
    return Finding(mark, row.title, row.check, row.severity.value, row.cause, row.fix)
