"""Products of some rows with dense weights: a few rows of a step, or many of a prompt.

What pooled attention launches is the same for both but for these. Called on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moet_desk.engine.cuda.dense_weights import as_float
from moet_desk.kernels.triton.dense import DenseWeight, WeightKind, gemv, head_gemv
from moet_desk.kernels.triton.gemm import gemm, split


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A matrix whose rows are cut into groups, each of which multiplies inputs of its own.

    Attributes:
        whole: [G * r, K].
        parts: the same memory, [r, K] each.
    """

    whole: DenseWeight
    parts: tuple[DenseWeight, ...]

    @classmethod
    def of(cls, whole: DenseWeight, groups: int) -> GroupedWeight:
        """Cut a weight; where groups share a block of scales, it is decoded to float32."""
        rows = whole.n // groups
        if whole.kind is WeightKind.FP8 and rows % whole.scale_rows:
            whole = as_float(whole)
        return cls(whole, tuple(_rows(whole, i * rows, rows) for i in range(groups)))


def _rows(weight: DenseWeight, first: int, count: int) -> DenseWeight:
    values, scales = weight.values[first : first + count], weight.scales
    if scales is not None:
        each = weight.scale_rows
        scales = scales[first // each : (first + count) // each]
    return DenseWeight(values, scales)


class Products(Protocol):
    """How rows are multiplied."""

    def __call__(self, x: Tensor, weight: DenseWeight, out: Tensor) -> None:
        """x [T, K] (rows may lie apart) by W^T: out [T, N] float32 (likewise)."""
        ...

    def by_group(self, flat: Tensor, rows: int, groups: int) -> Tensor:
        """Room for an input of `grouped`, [G, T, K], in a flat buffer of G * T * K numbers."""
        ...

    def grouped(self, x: Tensor, weight: GroupedWeight, out: Tensor) -> None:
        """Each group by its own rows: x as `by_group` gave it, out [T, G * r]."""
        ...


class StepProducts:
    """Of up to 8 rows, whose bits do not depend on how many they are."""

    def __call__(self, x: Tensor, weight: DenseWeight, out: Tensor) -> None:
        gemv(x, weight, out)

    def by_group(self, flat: Tensor, rows: int, groups: int) -> Tensor:
        return flat.view(rows, groups, -1).transpose(0, 1)

    def grouped(self, x: Tensor, weight: GroupedWeight, out: Tensor) -> None:
        count = weight.whole.n // len(weight.parts)
        head_gemv(x.transpose(0, 1), weight.whole, out, first=0, count=count, pitch=count)


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

    def grouped(self, x: Tensor, weight: GroupedWeight, out: Tensor) -> None:
        columns = torch.tensor_split(out, len(weight.parts), 1)
        for one, part, to in zip(x, weight.parts, columns, strict=True):
            self(one, part, to)
