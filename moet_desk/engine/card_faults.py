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
