"""Products of some rows with dense weights: a few rows of a step, or many of a prompt.

What pooled attention launches is the same for both but for these. Called on the engine thread.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moet_desk.kernels.triton.dense import DenseWeight, gemv, head_gemv
from moet_desk.kernels.triton.gemm import gemm, split


class Products(Protocol):
    """How rows are multiplied."""

    def __call__(self, x: Tensor, weight: DenseWeight, out: Tensor) -> None:
        """x [T, K] (rows may lie apart) by W^T: out [T, N] float32 (likewise)."""
        ...

    def by_group(self, flat: Tensor, rows: int, groups: int) -> Tensor:
        """Room for an input of `grouped`, [G, T, K], in a flat buffer of G * T * K numbers."""
        ...

    def grouped(self, x: Tensor, weight: DenseWeight, out: Tensor) -> None:
        """Each group by its own rows of W [G * r, K]: x as `by_group` gave it, out [T, G * r]."""
        ...


class StepProducts:
    """Of up to 8 rows, whose bits do not depend on how many they are."""

    def __call__(self, x: Tensor, weight: DenseWeight, out: Tensor) -> None:
        gemv(x, weight, out)

    def by_group(self, flat: Tensor, rows: int, groups: int) -> Tensor:
        return flat.view(rows, groups, -1).transpose(0, 1)

    def grouped(self, x: Tensor, weight: DenseWeight, out: Tensor) -> None:
        count = weight.n // x.shape[0]
        head_gemv(x.transpose(0, 1), weight, out, first=0, count=count, pitch=count)


class ChunkProducts:
    """Of many rows.

    Args:
        parts: flat bfloat16, room for an input in two parts.
    """

    def __init__(self, parts: Tensor) -> None:
        self._parts = parts

    def __call__(self, x: Tensor, weight: DenseWeight, out: Tensor) -> None:
        gemm(self.split(x), weight, out)

    def split(self, x: Tensor) -> Tensor:
        """Two bfloat16 parts of x, for `gemm`; valid until the next call."""
        parts = self._parts[: 2 * x.numel()].view(2, *x.shape)
        split(x, parts)
        return parts

    def by_group(self, flat: Tensor, rows: int, groups: int) -> Tensor:
        return flat.view(groups, rows, -1)

    def grouped(self, x: Tensor, weight: DenseWeight, out: Tensor) -> None:
        flat = self.split(x.flatten(0, 1))  # one launch for all groups: a prompt has thousands
        gemm(flat.view(2, *x.shape), weight, out)
