"""Where blocks get their weights: a small view of a pack's dense tensors under a name prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moet_desk.engine.ngram_rows import Rows


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """Rows of a matrix [N, K] that is in memory."""

    matrix: Tensor

    def expect(self, rows: Sequence[int]) -> None:
        """See `Rows`."""

    def read(self, rows: Sequence[int]) -> Tensor:
        """See `Rows`."""
        return self.matrix[list(rows)]


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
    table: Callable[[str], Rows] | None = None

    def __call__(self, name: str) -> Tensor:
        """The tensor `prefix + name`, float32, contiguous."""
        return self.load(self.prefix + name).contiguous()

    def rows(self, name: str) -> Rows:
        """What reads rows of the matrix `prefix + name`."""
        return LoadedRows(self(name)) if self.table is None else self.table(self.prefix + name)

    def norm(self, name: str) -> Tensor:
        """The factor of a norm, float32: its weight, and the offset if the model has one."""
        weight = self(name)
        return weight + self.norm_offset if self.norm_offset else weight

    def below(self, prefix: str) -> Weights:
        return replace(self, prefix=self.prefix + prefix)
