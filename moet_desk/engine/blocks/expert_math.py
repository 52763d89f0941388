"""The arithmetic of one expert over a filled slot, in one of two ways.

`int8` is how the product computes: activations in int8 blocks, exact integer block products, one
fixed order of adding, so results do not depend on what is computed together. The float way is the
oracle that tests compare with the reference implementation of a family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.reference import (
    expert_mlp,
    expert_mlp_float,
    expert_rows,
    quantize_activations,
)


@dataclass(frozen=True, slots=True)
class ExpertMath:
    """How experts of one shape are computed."""

    layout: ExpertLayout
    int8: bool

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of `mlp` for tokens x [T, H]: done once, used by all their experts."""
        return quantize_activations(x) if self.int8 else (x, x)

    def rows(self, codes: Tensor, scales: Tensor, slots: Sequence[Tensor]) -> Tensor:
        """All experts of one prepared token, [K, H] float32: bit for bit what `mlp` gives each."""
        if self.int8:
            return expert_rows(codes, scales, slots, self.layout)
        return torch.cat([expert_mlp_float(codes, slot, self.layout) for slot in slots])

    def mlp(self, codes: Tensor, scales: Tensor, slot: Tensor) -> Tensor:
        """The expert in `slot` applied to prepared tokens: [T, H] float32."""
        if self.int8:
            return expert_mlp(codes, scales, slot, self.layout)
        return expert_mlp_float(codes, slot, self.layout)
