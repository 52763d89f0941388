"""What every record of bench/records says about the computer, the program and its memory.

Absent figures are null, never 0. Imports nothing heavy.
"""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moet_desk.units import GIB


def machine() -> Mapping[str, Any]:
    import psutil

    return {
        "gpu": None,
        "driver": None,
        "cpu": _cpu_name(),
        "cores": len(psutil.Process().cpu_affinity()),
        "ram_gib": rounded(psutil.virtual_memory().total / GIB, 1),
        "os": platform.platform(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def driver() -> str | None:
    """Version of the NVIDIA driver, if it tells."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(found.stdout.split()), None)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit this program was started from, if it is a git checkout."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(git, check=False, capture_output=True, text=True)
    return found.stdout.strip() or None


def peak_rss() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def command_line() -> str:
    """What was typed, as a record keeps it."""
    return " ".join(["moet-desk", *sys.argv[1:]])


def rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)
