"""What this computer has, as far as the planner needs it on a CPU: RAM that may be used, and cores.

Limits of a container count, swap does not. No torch here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Machine:
    """RAM in bytes, and processor cores this process may run on."""

    ram_total: int
    ram_available: int
    cores: int


def engine_threads(cores: int) -> int:
    """Threads for the engine's arithmetic when the user leaves it to us.

    One core stays with the screens and the endpoint: the arithmetic's threads wait for each other
    by spinning, and a core they share with anything else holds all of them up. (2026-11-29, 2
    cores, one busy with another program: a prompt of 200 tokens took 1.5 to 2.7 s with 2 threads,
    0.19 s with 1.) More than eight bring nothing at these sizes.
    """
    return max(1, min(cores - 1, 8))


def _cgroup_room() -> int | None:
    """Bytes this container may still take, None without a limit (cgroup v2)."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def probe() -> Machine:
    """Look at the computer; takes a few milliseconds."""
    memory = psutil.virtual_memory()
    room = _cgroup_room()
    available = memory.available if room is None else min(memory.available, room)
    return Machine(memory.total, available, len(os.sched_getaffinity(0)))
