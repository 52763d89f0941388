"""Where blocks get their weights: a small view of a pack's dense tensors under a name prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """Dense tensors as float32, addressed below `prefix`.

    `load` decodes one tensor by its full logical name (FP8, BF16, ... as shipped). `norm_offset` is
    what the model adds to weights of norms (`Spec.norm_offset`).
    """

    load: Callable[[str], Tensor]
    prefix: str = ""
    norm_offset: float = 0.0

    def __call__(self, name: str) -> Tensor:
        """The tensor `prefix + name`, float32, contiguous."""
        return self.load(self.prefix + name).contiguous()

    def norm(self, name: str) -> Tensor:
        """The factor of a norm, float32: its weight, and the offset if the model has one."""
        weight = self(name)
        return weight + self.norm_offset if self.norm_offset else weight

    def below(self, prefix: str) -> Weights:
        return replace(self, prefix=self.prefix + prefix)
