"""Where blocks get their weights: a small view of a pack's dense tensors under a name prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """Dense tensors as float32, addressed below `prefix`.

    `load` decodes one tensor by its full logical name (FP8, BF16, ... as shipped).
    """

    load: Callable[[str], Tensor]
    prefix: str = ""

    def __call__(self, name: str) -> Tensor:
        """The tensor `prefix + name`, float32, contiguous."""
        return self.load(self.prefix + name).contiguous()

    def below(self, prefix: str) -> Weights:
        return Weights(self.load, self.prefix + prefix)
