"""What copies of this card reach: the yardstick for a step's bytes. The measuring thread's."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from moet_desk.units import MIB

_COPY_BYTES = 512 * MIB  # more than any cache
_REPEATS = 8


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second that copies of this card reach."""

    vram: float  # on the device, read and written bytes together
    pcie: float  # from pinned memory to the device


def copy_bandwidth(memory: Tensor, device: torch.device) -> Bandwidth:
    """What plain copies reach: inside VRAM, and from the pinned arena into it."""
    source = memory.view(-1)[:_COPY_BYTES]
    here = torch.zeros(source.numel(), dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    size = source.numel()
    found = Bandwidth(vram=2 * size / _copy_s(there, here), pcie=size / _copy_s(there, source))
    del here, there
    torch.cuda.empty_cache()
    return found


def measure_card() -> Bandwidth | None:
    """What the current card's copies reach; None without a card. Takes 1.5 GiB for a moment."""
    if not torch.cuda.is_available():
        return None
    pinned = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    return copy_bandwidth(pinned, torch.device("cuda"))


def _copy_s(target: Tensor, source: Tensor) -> float:
    times: list[float] = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(1e-3 * start.elapsed_time(end))
    return median(times)
