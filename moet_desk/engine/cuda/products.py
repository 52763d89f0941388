"""Products of some rows with dense weights: a few rows of a step, or many of a prompt.

What pooled attention launches is the same for both but for these. Called on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moet_desk.engine.cuda.dense_weights import as_float
from moet_desk.kernels.triton.dense import NormOf, gemv, head_gemv
from moet_desk.kernels.triton.dense_weight import DenseWeight, WeightKind
from moet_desk.kernels.triton.gemm import gemm, gemm_by_group, split
from moet_desk.kernels.triton.norms import rms_norm


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A matrix whose rows are cut into groups, each of which multiplies inputs of its own.

    Attributes:
        whole: [G * r, K].
        groups: how many.
    """

    whole: DenseWeight
    groups: int

    @classmethod
    def of(cls, whole: DenseWeight, groups: int) -> GroupedWeight:
        """Cut a weight; where groups share a block of scales, it is decoded to float32."""
        if whole.kind is WeightKind.FP8 and whole.n // groups % whole.scale_rows:
            whole = as_float(whole)
        return cls(whole, groups)


class Products(Protocol):
    """How rows are multiplied."""

    def __call__(self, x: Tensor, weight: DenseWeight, out: Tensor) -> None:
        """x [T, K] (rows may lie apart) by W^T: out [T, N] float32 (likewise)."""
        ...

    def normed(self, x: Tensor, weight: DenseWeight, out: Tensor, norm: NormOf) -> None:
        """The same, and the first columns of `out` normed."""
        ...

    def grouped(self, x: Tensor, weight: GroupedWeight, out: Tensor) -> None:
        """Each group of inputs by its own rows of the weight: out [T, G * r]. A step has x
        [G, T, K] float32, a prompt two parts of it, [2, G, T, K] bfloat16.
        """
        ...


class StepProducts:
    """Of up to 8 rows, whose bits do not depend on how many they are."""

    def __call__(self, x: Tensor, weight: DenseWeight, out: Tensor) -> None:
        gemv(x, weight, out)

    def normed(self, x: Tensor, weight: DenseWeight, out: Tensor, norm: NormOf) -> None:
        gemv(x, weight, out, norm=norm)

    def grouped(self, x: Tensor, weight: GroupedWeight, out: Tensor) -> None:
        count = weight.whole.n // weight.groups
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

    def normed(self, x: Tensor, weight: DenseWeight, out: Tensor, norm: NormOf) -> None:
        self(x, weight, out)
        rms_norm(out[:, : norm.weight.shape[0]], norm.weight, norm.eps, out=norm.out)

    def split(self, x: Tensor) -> Tensor:
        """Two bfloat16 parts of x, for `gemm`; valid until the next call."""
        parts = self._parts[: 2 * x.numel()].view(2, *x.shape)
        split(x, parts)
        return parts

    def grouped(self, x: Tensor, weight: GroupedWeight, out: Tensor) -> None:
        gemm_by_group(x, weight.whole, out)
