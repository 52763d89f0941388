"""What this computer has: RAM that may be used, cores, and whether a card can compute.

Limits of a container count, swap does not. Only `probe_accelerator` imports torch, when called.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

from moet_desk import config
from moet_desk.errors import fail
from moet_desk.machine import LEAST_CAPABILITY, GpuChoice, choose_gpu
from moet_desk.probing.gpus import look_for_gpus
from moet_desk.probing.memory import SystemFiles, read_memory
from moet_desk.probing.system import is_wsl


@dataclass(frozen=True, slots=True)
class Machine:
    """RAM in bytes, processor cores this process may run on, and whether this is WSL."""

    ram_total: int
    ram_available: int
    cores: int
    is_wsl: bool = False


def engine_threads(cores: int) -> int:
    """Threads for the engine's arithmetic when the user leaves it to us.

    One core stays with the screens and the endpoint: the arithmetic's threads wait for each other
    by spinning, and a core they share with anything else holds all of them up. (2026-11-29, 2
    cores, one busy with another program: a prompt of 200 tokens took 1.5 to 2.7 s with 2 threads,
    0.19 s with 1.) More than eight bring nothing at these sizes.
    """
    return max(1, min(cores - 1, 8))


def probe() -> Machine:
    """Look at the computer; takes a few milliseconds."""
    memory = read_memory()
    cores = len(os.sched_getaffinity(0))
    return Machine(memory.total, memory.available, cores, is_wsl(SystemFiles()))


# -- what computes ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A CUDA card as torch shows it, and what kernels for it need."""

    name: str = ""
    capability: tuple[int, int] = (0, 0)
    has_triton: bool = False
    can_compile: bool = False  # a C compiler and Python's headers: Triton builds its launchers
    missing: str = ""  # why there is no card; empty if there is one


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What is to compute, as torch names it, and why."""

    device: str
    why: str


def choose_device(wanted: str, found: Accelerator) -> DeviceChoice:
    """Decide between the card and the CPU.

    Args:
        wanted: "auto" takes the card if it can be used, "cpu" never, "cuda" insists on it.
        found: what there is.

    Raises:
        MoetError: with "cuda" only: MD-GPU-01 there is no card, MD-GPU-02 it cannot be used.
    """
    if wanted == "cpu":
        return DeviceChoice("cpu", "that is what was asked for")
    reason, fix = _obstacle(found)
    if not found.missing and not reason:
        return DeviceChoice("cuda", f"{found.name} can be used")
    if wanted == "auto":
        return DeviceChoice("cpu", found.missing or f"{found.name}: {reason}")
    if found.missing:
        raise fail("MD-GPU-01", reason=found.missing)
    raise fail("MD-GPU-02", name=found.name, reason=reason, fix=fix)


def _obstacle(found: Accelerator) -> tuple[str, str]:
    """What keeps a card from being used, and how to mend it."""
    if found.capability < LEAST_CAPABILITY:
        have, least = (".".join(map(str, pair)) for pair in (found.capability, LEAST_CAPABILITY))
        reason = f"it is too old: its compute capability is {have}, {least} is needed"
        return reason, "Use a card of the year 2020 or later"
    if not found.has_triton:
        return "Triton, which makes its kernels, cannot be imported", "Install triton"
    if not found.can_compile:
        reason = "Triton needs a C compiler and Python's headers, and one of them is missing"
        return reason, "Install gcc and the headers of this Python (often python3-dev)"
    return "", ""


def probe_accelerator() -> Accelerator:
    """Look for a card. Imports torch, and triton if there is one: seconds, so not at start-up."""
    import torch

    if torch.version.cuda is None:
        return Accelerator(missing="this build of torch has no CUDA")
    with warnings.catch_warnings(record=True) as said:  # torch warns instead of telling why
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    if not there:
        reason = str(said[-1].message) if said else "the driver shows none"
        return Accelerator(missing=reason.rstrip(".\n"))
    try:
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    except RuntimeError as error:
        return Accelerator(missing=f"the driver fails: {error}".rstrip(".\n"))
    return Accelerator(name, capability, _has_triton(), _can_compile())


def take_card() -> GpuChoice | None:
    """Where several cards can be seen, make the one that plans are made for this thread's own.

    Torch takes the fastest by itself, also if another program fills its memory. Call it after
    `probe_accelerator` found a card.

    Returns:
        The card and why; None if there is no choice.
    """
    import torch

    if torch.cuda.device_count() < 2:
        return None
    seen = {
        str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())
    }
    gpus = [gpu for gpu in look_for_gpus().gpus if gpu.uuid.removeprefix("GPU-") in seen]
    choice = choose_gpu(gpus)
    if choice is not None:
        torch.cuda.set_device(seen[choice.gpu.uuid.removeprefix("GPU-")])
    return choice


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _can_compile() -> bool:
    """Whether Triton will find what it looks for (triton/runtime/build.py)."""
    compiler = config.c_compiler() or shutil.which("gcc") or shutil.which("clang")
    return bool(compiler) and (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
