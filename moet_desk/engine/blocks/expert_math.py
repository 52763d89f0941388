"""The arithmetic of one expert over a filled slot.

The product computes with integer activations: exact block products and one fixed order of adding,
so results do not depend on what is computed together. 2-bit experts take int8; exact experts take
15 bits, so that nothing is lost beside the weights' own precision (docs/adr/0009). The float way is
the oracle that tests compare with the reference implementation of a family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moet_desk.kernels.kinds import Activations
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
    activations: Activations | None  # None: float, the oracle

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of `mlp` for tokens x [T, H]: done once, used by all their experts."""
        return (x, x) if self.activations is None else quantize_activations(x, self.activations)

    def rows(self, codes: Tensor, scales: Tensor, slots: Sequence[Tensor]) -> Tensor:
        """All experts of one prepared token, [K, H] float32: bit for bit what `mlp` gives each."""
        if self.activations is None:
            return torch.cat([expert_mlp_float(codes, slot, self.layout) for slot in slots])
        return expert_rows(codes, scales, slots, self.layout, kind=self.activations)

    def mlp(self, codes: Tensor, scales: Tensor, slot: Tensor) -> Tensor:
        """The expert in `slot` applied to prepared tokens: [T, H] float32."""
        if self.activations is None:
            return expert_mlp_float(codes, slot, self.layout)
        return expert_mlp(codes, scales, slot, self.layout, kind=self.activations)
