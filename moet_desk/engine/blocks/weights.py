"""Where blocks get their weights: a small view of a pack's dense tensors under a name prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

RowsOf = Callable[[Sequence[int]], Tensor]
"""Rows of a matrix by number, float32."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Dense tensors as float32, addressed below `prefix`.

    `load` decodes one tensor by its full logical name (FP8, BF16, ... as shipped). `norm_offset` is
    what the model adds to weights of norms (`Spec.norm_offset`). `table` gives what reads rows of a
    matrix that is not loaded; without, it is loaded.
    """

    load: Callable[[str], Tensor]
    prefix: str = ""
    norm_offset: float = 0.0
    table: Callable[[str], RowsOf] | None = None

    def __call__(self, name: str) -> Tensor:
        """The tensor `prefix + name`, float32, contiguous."""
        return self.load(self.prefix + name).contiguous()

    def rows(self, name: str) -> RowsOf:
        """What reads rows of the matrix `prefix + name`."""
        if self.table is not None:
            return self.table(self.prefix + name)
        whole = self(name)
        return lambda rows: whole[list(rows)]

    def norm(self, name: str) -> Tensor:
        """The factor of a norm, float32: its weight, and the offset if the model has one."""
        weight = self(name)
        return weight + self.norm_offset if self.norm_offset else weight

    def below(self, prefix: str) -> Weights:
        return replace(self, prefix=self.prefix + prefix)
