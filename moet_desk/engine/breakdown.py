"""What an exception in the engine thread means: which error people see, and whether the engine can
go on.

A card that lost its context (an invalid access, a launch that hung, a driver that was reset, a card
that fell off the bus, often after a suspend) answers every later call with the same error. So after
an error of the card it is asked once more: if that fails too, no request can go well any more in
this process. Memory that ran out fails one request, and the next one may fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moet_desk.engine.card_faults import is_out_of_memory
from moet_desk.errors import MoetError, fail
from moet_desk.errors.disk import refused


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The error of the catalogue, whether it ends the engine, and whether the card was full."""

    error: MoetError
    ends_engine: bool = False
    no_room: bool = False


def card_answers() -> bool:
    """Whether the card still does what it is told; waits for what it is doing."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def breakdown_of(
    error: Exception, *, card: str, answers: Callable[[], bool] | None = None
) -> Breakdown | None:
    """What an exception means; None: it is a bug, not the computer's doing.

    Args:
        error: what was raised.
        card: the card's name.
        answers: as `card_answers`, which it is if left out.
    """
    if isinstance(error, MoetError):
        return Breakdown(error)
    if is_out_of_memory(error):
        what = f"what this answer needs beside the model ({_wanted_memory(error)})"
        return Breakdown(fail("MD-GPU-11", what=what), no_room=True)
    if _is_ram(error):
        return Breakdown(fail("MD-RAM-04"))
    if isinstance(error, OSError):
        return Breakdown(refused(error))
    if _is_of_card(error) and not (answers or card_answers)():
        return Breakdown(fail("MD-GPU-07", name=card, reason=_first_line(error)), ends_engine=True)
    return None


def _is_ram(error: Exception) -> bool:
    # torch's allocator and Python's threads raise a bare RuntimeError
    words = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory", "new thread")
    return isinstance(error, MemoryError) or (
        type(error) is RuntimeError and any(part in str(error) for part in words)
    )


def _is_of_card(error: Exception) -> bool:
    if isinstance(error, torch.AcceleratorError):
        return True
    # Triton's launcher and libraries of CUDA raise bare RuntimeErrors
    words = str(error)
    return isinstance(error, RuntimeError) and any(
        part in words for part in ("CUDA error", "[CUDA]", "CUBLAS_STATUS", "cuLaunch")
    )


def _first_line(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.removeprefix("CUDA error: ").strip().rstrip(".")


def _wanted_memory(error: Exception) -> str:
    """How much was wanted and is free, of torch's long message."""
    parts = _first_line(error).split(". ")
    return ". ".join(parts[1:3] or parts).rstrip(".")
