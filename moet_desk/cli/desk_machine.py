"""This computer as the wizard and the doctor screen show it: facts in, records out. And what is
done on it beside the app: measuring, and showing a folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moet_desk import config
from moet_desk.cli.doctor import describe
from moet_desk.doctor import CHECKS, Examination
from moet_desk.doctor import Finding as Found
from moet_desk.errors import MoetError, Severity, fail
from moet_desk.machine import MachineFacts
from moet_desk.store.jobs import error_of
from moet_desk.ui.desk import DoctorView, Fact, Finding, MachineView, Mark

_MARKS = {Severity.STOPS: Mark.BAD, Severity.LOWER: Mark.WARN}
_LINE_OF_CHECK = {
    "card": "GPU", "several-cards": "GPU", "torch": "GPU", "torch-card": "GPU", "driver": "GPU",
    "compiler": "GPU", "display": "GPU", "vram": "GPU", "link": "GPU", "swap": "RAM",
    "container": "RAM", "wsl": "RAM", "memlock": "RAM", "drive": "Drive", "drive-rate": "Drive",
    "disk-space": "Drive",
}  # fmt: skip
"""Which line of the computer a finding is shown under; the others are the doctor's alone."""


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


def show_folder(path: Path) -> bool:
    """Have the desktop show a folder; whether there is a desktop that can."""
    opener = shutil.which("xdg-open")
    if opener is None or not config.has_desktop():
        return False
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    try:
        subprocess.Popen(
            [opener, str(path)], stderr=subprocess.DEVNULL, start_new_session=True, **quiet
        )
    except OSError:
        return False
    return True


def measure_in_child(data_dir: Path, say: Callable[[str], None]) -> None:
    """Measure this computer in a process of its own: the card is the engine's in this one.

    Raises:
        MoetError: what the process reported, MD-BUG-01 it ended without a word.
    """
    command = [sys.executable, "-m", "moet_desk", "--data-dir", str(data_dir)]
    command += ["doctor", "--bench", "--format", "ndjson"]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    error: MoetError | None = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **pipes) as child:
        for line in child.stdout or ():
            event = _event(line)
            error = error_of(event) or error
            if event.get("event") == "measure":
                say(str(event.get("what")))
    if child.returncode and error is None:
        reason = f"measuring ended with status {child.returncode}"
        error = fail("MD-BUG-01", reason=reason, log=str(data_dir / "logs"))
    if error is not None:
        raise error


def _event(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def doctor_view(found: Examination, document: Mapping[str, Any], *, rates: str = "") -> DoctorView:
    """Findings, worst first, then what is in order; `rates` are words about what was measured."""
    rows = tuple(_finding(row) for row in found.findings)
    passed = tuple(
        Finding(Mark.OK, CHECKS[name].passed, cause=rates if name == "measured" else "")
        for name in found.passed
    )
    return DoctorView((*rows, *passed), document)


def _finding(row: Found) -> Finding:
    mark = _MARKS.get(row.severity, Mark.UNKNOWN)
    if row.severity is Severity.INFO:
        mark = Mark.NOTE
    return Finding(mark, row.title, row.check, row.severity.value, row.cause, row.fix)
