"""The arithmetic of one expert over a filled slot.

The product computes with integer activations: exact block products and one fixed order of adding,
so results do not depend on what is computed together. 2-bit experts take int8; exact experts take
15 bits, so that nothing is lost beside the weights' own precision (docs/adr/0009). The float way is
the oracle that tests compare with the reference implementation of a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moet_desk.engine.families.tensors import DOWN_BIAS, GATE_UP_BIAS
from moet_desk.engine.spec import MoeFfn, Spec
from moet_desk.kernels.kinds import SWIGLU, Activations, Glu
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.reference import (
    ExpertBias,
    expert_mlp,
    expert_mlp_float,
    expert_rows,
    quantize_activations,
)

Biases = Mapping[int, ExpertBias]
"""Of all experts of a MoE layer, by its number: gate_up [E, 2I], down [E, H]."""


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """What the experts of a model are beside their matrices."""

    glu: Glu = SWIGLU
    biases: Biases = field(default_factory=dict)


PLAIN = ExpertForm()


def load_form(spec: Spec, load: Callable[[str], Tensor]) -> ExpertForm:
    """The form of a model's experts; `load` reads a dense tensor by its full name."""
    biases: dict[int, ExpertBias] = {}
    for moe_layer, layer in enumerate(spec.moe_layers):
        if isinstance(layer.ffn, MoeFfn) and layer.ffn.expert_bias:
            name = f"model.layers.{layer.index}.{layer.ffn.name}"
            gate_up = _halves(load(name + GATE_UP_BIAS))
            biases[moe_layer] = ExpertBias(gate_up, load(name + DOWN_BIAS))
    return ExpertForm(spec.moe_ffn.glu, biases)


def _halves(in_turn: Tensor) -> Tensor:
    """Gates first, as slots have them: [E, 2I] of gates and ups in turn -> [E, 2I]."""
    return torch.cat([in_turn[:, 0::2], in_turn[:, 1::2]], 1)


@dataclass(frozen=True, slots=True)
class ExpertMath:
    """How experts of one shape are computed."""

    layout: ExpertLayout
    activations: Activations | None  # None: float, the oracle
    form: ExpertForm

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of `mlp` for tokens x [T, H]: done once, used by all their experts."""
        return (x, x) if self.activations is None else quantize_activations(x, self.activations)

    def rows(
        self, codes: Tensor, scales: Tensor, slots: Sequence[Tensor], *, moe_layer: int, ids: Tensor
    ) -> Tensor:
        """Experts `ids` [K] of one prepared token, [K, H] float32: bit for bit what `mlp` gives
        each.
        """
        if self.activations is None:
            parts = [
                self.mlp(codes, scales, slot, moe_layer=moe_layer, expert=expert)
                for slot, expert in zip(slots, ids.tolist(), strict=True)
            ]
            return torch.cat(parts)
        bias = self.form.biases.get(moe_layer)
        if bias is not None:
            bias = ExpertBias(bias.gate_up[ids], bias.down[ids])
        return expert_rows(
            codes, scales, slots, self.layout, glu=self.form.glu, bias=bias, kind=self.activations
        )

    def mlp(
        self, codes: Tensor, scales: Tensor, slot: Tensor, *, moe_layer: int, expert: int
    ) -> Tensor:
        """The expert in `slot` applied to prepared tokens: [T, H] float32."""
        glu, bias = self.form.glu, self.form.biases.get(moe_layer)
        if bias is not None:
            one = slice(expert, expert + 1)
            bias = ExpertBias(bias.gate_up[one], bias.down[one])
        if self.activations is None:
            return expert_mlp_float(codes, slot, self.layout, glu=glu, bias=bias)
        return expert_mlp(
            codes, scales, slot, self.layout, glu=glu, bias=bias, kind=self.activations
        )
