"""Expert arithmetic on expanded slots: integer activations, exact block dots, one summing order.

Owns the numerics that make promise 1 hold: a token's result has the same bits however many tokens
are in the call and whatever they are. Called on the engine thread. Pure functions.

Why that holds: a block's dot product is a sum of small integers times a power of two, exact in
float32 in any order; terms are then added element by element in the canonical order; and exp,
unlike torch's fused silu, gives a value the same bits wherever it lies in a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moet_desk.kernels.kinds import SWIGLU, Activations, Glu
from moet_desk.kernels.layouts import GROUP, ExpertLayout, MatrixLayout
from moet_desk.kernels.reference.quant import quantize_activations

LANES = 32
"""Partial sums of the canonical order: lane c adds blocks c, c + 32, c + 64, ..."""

_TERM_FLOATS = 1 << 21  # block terms held at once; 8 MiB stay in the cache of one core


@dataclass(frozen=True, slots=True)
class ExpertBias:
    """What is added to the products of experts: one row for `expert_mlp`, K for `expert_rows`.

    Shapes:
        gate_up [1 or K, 2I], gates first; down [1 or K, H]; float32
    """

    gate_up: Tensor
    down: Tensor


def swiglu(g: Tensor, u: Tensor, limit: float | None = None) -> Tensor:
    """silu(g) * u; with a limit L, g is first cut to <= L and u to -L..L (models.md §1.2).

    Shapes:
        g, u same shape float32; returns the same shape
    """
    return gated(g, u, Glu(limit))


def gated(g: Tensor, u: Tensor, glu: Glu) -> Tensor:
    """(u + shift) * g * sigmoid(alpha * g), of cut g and u.

    Shapes:
        g, u same shape float32; returns the same shape
    """
    if glu.limit is not None:
        g = g.clamp(max=glu.limit)
        u = u.clamp(-glu.limit, glu.limit)
    return g / torch.exp(-glu.alpha * g).add_(1.0) * (u if glu.shift == 0.0 else u + glu.shift)


def expert_mlp(
    q: Tensor,
    s: Tensor,
    slot: Tensor,
    layout: ExpertLayout,
    *,
    glu: Glu = SWIGLU,
    bias: ExpertBias | None = None,
    kind: Activations = Activations.INT8,
) -> Tensor:
    """One expert on quantised activations; bits of a token do not depend on the other tokens.

    gate_up, the GLU, integers again, down; biases are added in float32. NaN in `s` or `q` shows in
    that token's row and no other.

    Shapes:
        q [T, H] float32 integers, s [T, H/32] float32 (from `quantize_activations` of this kind)
        slot [slot_floats] float32; returns [T, H] float32
    """
    tile = max(1, _TERM_FLOATS // (min(layout.gate_up.groups, LANES) * layout.gate_up.n))
    if q.shape[0] <= tile:
        return _expert_tile(q, s, (slot,), layout, glu, bias, kind)
    tiles = range(0, q.shape[0], tile)
    return torch.cat(
        [
            _expert_tile(q[t : t + tile], s[t : t + tile], (slot,), layout, glu, bias, kind)
            for t in tiles
        ]
    )


def expert_rows(
    q: Tensor,
    s: Tensor,
    slots: Sequence[Tensor],
    layout: ExpertLayout,
    *,
    glu: Glu = SWIGLU,
    bias: ExpertBias | None = None,
    kind: Activations = Activations.INT8,
) -> Tensor:
    """All chosen experts of one token: `expert_mlp` for each slot, with the same bits.

    Only the products go slot by slot; the steps between are done for all at once, which takes a
    third off a decode step's expert time.

    Shapes:
        q [1, H] float32 integers, s [1, H/32] float32 (from `quantize_activations` of this kind)
        slots: K of [slot_floats] float32; returns [K, H] float32
    """
    return _expert_tile(q, s, slots, layout, glu, bias, kind)


def expert_mlp_float(
    x: Tensor,
    slot: Tensor,
    layout: ExpertLayout,
    *,
    glu: Glu = SWIGLU,
    bias: ExpertBias | None = None,
) -> Tensor:
    """One expert on float activations: the oracle path, not batch-invariant.

    Shapes:
        x [T, H] float32; slot [slot_floats] float32; returns [T, H] float32
    """
    split = layout.gate_up.n * layout.gate_up.k
    gate_up = slot[:split].view(layout.gate_up.k, layout.gate_up.n)
    down = slot[split : layout.slot_floats].view(layout.down.k, layout.down.n)
    mid = x @ gate_up
    if bias is not None:
        mid += bias.gate_up
    out = gated(mid[:, : layout.inter], mid[:, layout.inter :], glu) @ down
    return out if bias is None else out + bias.down


def combine(parts: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' results, in order of K.

    Shapes:
        parts [T, K, H] float32, weights [T, K] float32; returns [T, H] float32
    """
    weighted = parts * weights[..., None]
    total = weighted[:, 0]
    for k in range(1, weighted.shape[1]):
        total = total + weighted[:, k]
    return total


def _expert_tile(
    q: Tensor,
    s: Tensor,
    slots: Sequence[Tensor],
    layout: ExpertLayout,
    glu: Glu,
    bias: ExpertBias | None,
    kind: Activations,
) -> Tensor:
    """T tokens through one slot, or one token through each of K slots: [T or K, H]."""
    split = layout.gate_up.n * layout.gate_up.k
    gate_up = [slot[:split] for slot in slots]
    mid = _block_matmul([q] * len(slots), s, gate_up, layout.gate_up)  # [T, 2I]
    if bias is not None:
        mid += bias.gate_up
    act = gated(mid[:, : layout.inter], mid[:, layout.inter :], glu)  # [T, I]
    act_q, act_s = quantize_activations(act, kind)
    down = [slot[split : layout.slot_floats] for slot in slots]
    rows = [act_q[k : k + 1] for k in range(len(slots))] if len(slots) > 1 else [act_q]
    out = _block_matmul(rows, act_s, down, layout.down)
    return out if bias is None else out + bias.down


def _block_matmul(
    tokens: Sequence[Tensor], s: Tensor, matrices: Sequence[Tensor], layout: MatrixLayout
) -> Tensor:
    """[t, K] x [K, N] for each pair, one under the other, in the canonical order: [T, N].

    Scales are [T, G], or [1, G] if all rows share them.
    """
    blocks = [x.view(x.shape[0], layout.groups, GROUP).transpose(0, 1) for x in tokens]
    weights = [matrix.view(layout.groups, GROUP, layout.n) for matrix in matrices]
    scales = s.T[..., None]  # [G, T, 1]
    lanes = _products(blocks, weights, 0).mul_(scales[:LANES])  # [<= 32, T, N]
    for g in range(LANES, layout.groups, LANES):
        terms = _products(blocks, weights, g)
        lanes[: terms.shape[0]] += terms.mul_(scales[g : g + LANES])
    return _halving_sum(lanes)


def _products(blocks: Sequence[Tensor], weights: Sequence[Tensor], g: int) -> Tensor:
    """Exact dot products of up to 32 blocks from g on: [<= 32, T, N]."""
    products = [
        torch.bmm(x[g : g + LANES], w[g : g + LANES]) for x, w in zip(blocks, weights, strict=True)
    ]
    return products[0] if len(products) == 1 else torch.cat(products, 1)


def _halving_sum(lanes: Tensor) -> Tensor:
    """Add lanes by halves (16, 8, 4, 2, 1), missing lanes counting as zero."""
    width = 1 << (lanes.shape[0] - 1).bit_length()
    while width > 1:
        width //= 2
        upper = lanes[width:]
        if upper.shape[0] == width:
            lanes = lanes[:width] + upper
        else:
            lanes[: upper.shape[0]] += upper
            lanes = lanes[:width]
    return lanes[0]
