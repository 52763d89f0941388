"""Looking at the computer: the only place that asks the driver, the kernel and the drives.

Each module asks one thing and returns records of `moet_desk.machine`; nothing is decided here.
`look` takes a fraction of a second. Any thread; no torch.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

from moet_desk.machine import MachineFacts, PackFact, Rates
from moet_desk.probing.drives import look_at_drive
from moet_desk.probing.gpus import look_for_gpus
from moet_desk.probing.memory import SystemFiles, read_memory
from moet_desk.probing.surroundings import find_certificates, look_at_clock, look_at_terminal
from moet_desk.probing.system import find_container, find_tools, is_wsl, look_at_cpu


def look(
    folders: Mapping[str, Path],
    *,
    rates: Rates | None = None,
    packs: tuple[PackFact, ...] = (),
    files: SystemFiles | None = None,
) -> MachineFacts:
    """Everything that can be known without measuring.

    Args:
        folders: by use ("models", "data"); they need not exist yet.
        rates: measured earlier.
        packs: what is installed.
        files: where the kernel's files are; tests have their own.
    """
    files = files or SystemFiles()
    found = look_for_gpus()
    return MachineFacts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        is_wsl=is_wsl(files),
        container=find_container(files),
        gpus=found.gpus,
        gpu_problem=found.problem,
        driver=found.driver,
        driver_cuda=found.driver_cuda,
        memory=read_memory(files),
        cpu=look_at_cpu(files),
        drives=tuple(look_at_drive(folder, use, files) for use, folder in folders.items()),
        tools=find_tools(),
        rates=rates,
        packs=packs,
        clock=look_at_clock(folders.values()),
        certificates=find_certificates(),
        terminal=look_at_terminal(),
    )
