"""Feed-forward parts: the plain SwiGLU, and routed experts with a shared one.

Routed experts are not computed here: the block routes and hands ids over to an `Experts` object,
which is residency with fetching in decode and a grouped stream in prefill.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.families.tensors import TABLE
from moet_desk.engine.spec import PROJECTIONS, MoeFfn, Router
from moet_desk.errors import fail
from moet_desk.kernels.kinds import SWIGLU, Glu
from moet_desk.kernels.reference import gated, linear, route, weights_of

NO_EXPERT = -1
"""Stands among the ids of many tokens where a token has fewer experts than others."""


class Experts(Protocol):
    """Computes routed experts of one MoE layer for some tokens."""

    def __call__(self, moe_layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts.

        Shapes:
            x [T, H] float32, ids [T, K] int64, weights [T, K] float32; returns [T, H] float32

        With more than one token, an id of `NO_EXPERT` with weight 0 is a place without an expert.
        """
        ...


@runtime_checkable
class Expecting(Protocol):
    """Experts that can be told in advance who will be asked for."""

    def expect(self, moe_layer: int, ids: Tensor) -> None:
        """Experts ids [1, K] of a token will be asked for in that layer of this step."""
        ...


class SwigluFfn:
    """W_down(act(W_gate x, W_up x)): a dense layer or a shared expert; `names` of the three."""

    def __init__(
        self, weights: Weights, *, glu: Glu = SWIGLU, names: tuple[str, str, str] = PROJECTIONS
    ) -> None:
        gate, up, down = names
        self._glu = glu
        self._w_in = torch.cat([weights(gate), weights(up)])
        self._w_down = weights(down)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self._w_in).chunk(2, -1)
        return linear(gated(gate, up, self._glu), self._w_down)


class MoeBlock:
    """Router, routed experts and shared expert of one layer; `moe_layer` counts from 0."""

    def __init__(self, ffn: MoeFfn, weights: Weights, *, moe_layer: int) -> None:
        self.moe_layer = moe_layer
        self._router: Router = ffn.router
        self._table = _table(ffn, weights) if ffn.hashed else None  # [V, K] int64
        self._w_router = weights(ffn.router_name)
        self._logit_bias = weights(ffn.router_name + ".bias") if ffn.router.logit_bias else None
        bias = ffn.router.selection_bias
        self._bias = weights(ffn.bias_name) if bias else None
        self._shared: SwigluFfn | None = None
        if ffn.shared_inter:
            below = weights.below(ffn.shared_name)
            self._shared = SwigluFfn(below, glu=ffn.glu, names=ffn.projections)
        self._w_shared_gate = weights("shared_expert_gate") if ffn.shared_gate else None  # [1, H]

    def __call__(self, x: Tensor, experts: Experts, tokens: Tensor | None = None) -> Tensor:
        """Shapes: x [T, H] float32, tokens [T] int64, only where a table gives the experts."""
        router, logits = self._router, linear(x, self._w_router)
        if self._logit_bias is not None:
            logits += self._logit_bias
        if self._table is not None and tokens is not None:
            ids = self._table[tokens]
            weights = weights_of(
                logits, ids, score=router.score, renormalize=router.renormalize, scale=router.scale
            )
        else:
            ids, weights = route(
                logits,
                top_k=router.top_k,
                score=router.score,
                selection_bias=self._bias,
                n_groups=router.n_groups,
                kept_groups=router.kept_groups,
                renormalize=router.renormalize,
                scale=router.scale,
            )
        ask = self._beside_identity if router.n_identity else self._routed
        routed = ask(x, ids, weights, experts)
        if self._shared is None:
            return routed
        shared = self._shared(x)
        if self._w_shared_gate is not None:
            shared = torch.sigmoid(linear(x, self._w_shared_gate)) * shared
        return routed + shared

    def known(self, tokens: Tensor) -> Tensor | None:
        """The experts of tokens [T] that are known before the layer runs, [T, K]; None: none."""
        return None if self._table is None else self._table[tokens]

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        return experts(self.moe_layer, x, ids, weights)

    def _beside_identity(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """Identity experts give their input; only the others are asked for."""
        real = ids < self._router.n_experts
        kept = (weights * ~real).sum(-1, keepdim=True) * x
        if not real.any():
            return kept
        if x.shape[0] == 1:
            return kept + experts(self.moe_layer, x, ids[real][None], weights[real][None])
        ids, weights = ids.masked_fill(~real, NO_EXPERT), weights.masked_fill(~real, 0.0)
        return kept + experts(self.moe_layer, x, ids, weights)


def checked_table(table: Tensor, name: str, n_experts: int) -> Tensor:
    """The table of each token id's experts. Raises MD-SRC-07: it names some that are not there."""
    if int(table.min()) < 0 or int(table.max()) >= n_experts:
        reason = f"{name} names experts that are not 0 to {n_experts - 1}"
        raise fail("MD-SRC-07", path="config.json", reason=reason)
    return table


def _table(ffn: MoeFfn, weights: Weights) -> Tensor:
    name = f"{ffn.router_name}.{TABLE}"
    return checked_table(weights(name).long(), weights.prefix + name, ffn.router.n_experts)
