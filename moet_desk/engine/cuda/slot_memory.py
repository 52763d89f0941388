"""Where the slots of a pool lie: memory of a fixed size, or a range that grows and shrinks.

The engine thread's. `vmm` knows the driver, this knows slots.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from moet_desk.engine.cuda.vmm import DriverError, GrowableMemory, MemoryDriver
from moet_desk.errors import fail
from moet_desk.units import show_memory

log = logging.getLogger("moet_desk.engine")


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """Slots, of which the first ones can be used.

    Attributes:
        slots: uint8 [S, stride]; what lies behind `usable` may not be touched.
        behind: what maps more; None: all of it is there for good.
    """

    slots: Tensor
    behind: GrowableMemory | None = None

    @property
    def usable(self) -> int:
        """Slots that have memory."""
        n_slots, stride = self.slots.shape
        return n_slots if self.behind is None else min(n_slots, self.behind.mapped // stride)

    def resize(self, n_slots: int) -> int:
        """Have memory for so many slots, or for as many as the card has room for; returns `usable`.

        Raises:
            DriverError: the driver refuses; `usable` tells what is there.
        """
        if self.behind is not None:
            self.behind.resize(n_slots * self.slots.shape[1])
        return self.usable

    def release(self) -> None:
        """Give the memory back; the slots must not be used any more."""
        if self.behind is None:
            return
        try:
            self.behind.close()
        except DriverError as error:  # the context is lost, and its memory with it
            log.warning("the card's memory for experts was not given back: %s", error)


def fixed_slots(n_slots: int, stride: int, device: torch.device) -> SlotMemory:
    """Memory that stays as it is."""
    return SlotMemory(torch.zeros((n_slots, stride), dtype=torch.uint8, device=device))


def growable_slots(driver: MemoryDriver, stride: int, *, least: int, most: int) -> SlotMemory:
    """Addresses for `most` slots, with memory for the `least` of them.

    Raises:
        DriverError: this driver or torch cannot do it; nothing stays taken.
        MoetError: MD-GPU-11 the card has no room for them.
    """
    memory = GrowableMemory(driver, most * stride)
    try:
        if memory.resize(least * stride) < least * stride:
            want, have = show_memory(least * stride), show_memory(memory.mapped)
            raise fail("MD-GPU-11", what=f"{want} of experts, of which {have} found some")
        try:
            slots = memory.view(most * stride).view(most, stride)
        except RuntimeError as error:
            raise DriverError("torch.as_tensor", 0, str(error)) from error
    except BaseException:
        SlotMemory(torch.empty((0, stride)), memory).release()
        raise
    return SlotMemory(slots, memory)
