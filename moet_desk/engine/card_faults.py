"""What a failure on a card means, by the words of torch, the driver and Triton.

Pure; imports torch for the type of its exception alone.
"""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the card had no room. The work that met it did not happen; the card goes on."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


_FAULTS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")


def card_fault(error: BaseException) -> str:
    """What the card or its driver says, in a line; empty if it was neither of them.

    Whether the card can still be used must be asked of it: some faults end one launch, others the
    program's whole connection to it.
    """
    lines = str(error).splitlines()
    if isinstance(error, RuntimeError) and lines and any(word in lines[0] for word in _FAULTS):
        return lines[0]
    return ""
