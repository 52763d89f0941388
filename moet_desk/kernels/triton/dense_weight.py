"""A dense matrix as the kernels take it: as shipped, or rounded to integers.

Owns the kinds of storage, what scales fit which, and how a kernel reads a tile of it. Read by the
products of a step (`dense`), of a prompt (`gemm`) and of latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.row_sizes import GROUP
from moet_desk.kernels.triton.numbers import e4m3_value

SCALE_BLOCK = 128
"""Rows and columns of an e4m3 weight that share one scale."""


class WeightKind(Enum):
    """How the values of a dense weight are stored."""

    F32 = "f32"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"


RUN = {WeightKind.F32: 4, WeightKind.BF16: 8, WeightKind.FP8: 16, WeightKind.INT8: 16}
"""Weights of 16 bytes, which a lane loads at once."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A matrix as shipped, or rounded to integers.

    Attributes:
        values: [N, K] float32, bfloat16, float8_e4m3fn or int8, contiguous.
        scales: [ceil(N/128), ceil(K/128)] or [N, 1] float32 for e4m3, [N, K/32] bfloat16 for int8,
            else None.

    Raises:
        ValueError: dtype, layout or scales do not fit each other.
    """

    values: Tensor
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        if self.values.dim() != 2 or not self.values.is_contiguous():
            raise ValueError(
                f"a dense weight of shape {tuple(self.values.shape)} is no plain matrix"
            )
        found = None if self.scales is None else tuple(self.scales.shape)
        if found not in self._scale_shapes:
            raise ValueError(
                f"scales {found} do not fit a {self.kind.value} weight {self.n} x {self.k}"
            )
        if self.k % RUN[self.kind]:
            raise ValueError(f"{self.k} inputs are not whole runs of {RUN[self.kind]}")

    @property
    def kind(self) -> WeightKind:
        """Storage of the values."""
        kinds = {
            torch.float32: WeightKind.F32,
            torch.bfloat16: WeightKind.BF16,
            torch.float8_e4m3fn: WeightKind.FP8,
            torch.int8: WeightKind.INT8,
        }
        if self.values.dtype not in kinds:
            raise ValueError(f"a dense weight cannot be {self.values.dtype}")
        return kinds[self.values.dtype]

    @property
    def n(self) -> int:
        """Output rows."""
        return self.values.shape[0]

    @property
    def k(self) -> int:
        """Inputs."""
        return self.values.shape[1]

    @property
    def _blocks(self) -> tuple[int, int]:
        return -(-self.n // SCALE_BLOCK), -(-self.k // SCALE_BLOCK)

    @property
    def _scale_shapes(self) -> tuple[tuple[float, float] | None, ...]:
        if self.kind is WeightKind.FP8:
            return self._blocks, (self.n, 1)
        if self.kind is WeightKind.INT8:
            return ((self.n, self.k / GROUP),)  # no shape if groups are not whole
        return (None,)

    @property
    def scale_rows(self) -> int:
        """Rows that share a scale; with 1, all columns of e4m3 share it too."""
        of_rows = self.scales is not None and tuple(self.scales.shape) != self._blocks
        return 1 if of_rows or self.kind is WeightKind.INT8 else SCALE_BLOCK

    @property
    def raw(self) -> Tensor:
        """Values as kernels take them: e4m3 as bytes."""
        if self.kind is WeightKind.FP8:
            return self.values.view(torch.uint8)
        return self.values


@triton.jit
def weight_tile(pointers, mask, KIND: tl.constexpr, HARDWARE: tl.constexpr):
    """A tile of weights as float32; the weights are read once, so they leave the caches first."""
    raw = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    if KIND == "fp8":
        return e4m3_value(raw, HARDWARE)
    else:
        return raw.to(tl.float32)
