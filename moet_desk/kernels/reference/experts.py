"""Expert arithmetic on expanded slots: int8 activations, exact block dots, one summing order.

Owns the numerics that make promise 1 hold: a token's result has the same bits however many tokens
are in the call and whatever they are. Called on the engine thread. Pure functions.

Why that holds: a block's dot product is a sum of small integers times a power of two, exact in
float32 in any order; terms are then added element by element in the canonical order; and exp,
unlike torch's fused silu, gives a value the same bits wherever it lies in a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moet_desk.kernels.layouts import GROUP, ExpertLayout, MatrixLayout
from moet_desk.kernels.reference.quant import quantize_activations

LANES = 32
"""Partial sums of the canonical order: lane c adds blocks c, c + 32, c + 64, ..."""

_TERM_FLOATS = 1 << 21  # block terms held at once; 8 MiB stay in the cache of one core


def swiglu(g: Tensor, u: Tensor, limit: float | None = None) -> Tensor:
    """silu(g) * u; with a limit L, g is first cut to <= L and u to -L..L (models.md §1.2).

    Shapes:
        g, u same shape float32; returns the same shape
    """
    if limit is not None:
        g = g.clamp(max=limit)
        u = u.clamp(-limit, limit)
    return g / torch.exp(-g).add_(1.0) * u


def expert_mlp(
    q: Tensor, s: Tensor, slot: Tensor, layout: ExpertLayout, *, limit: float | None = None
) -> Tensor:
    """One expert on quantised activations; bits of a token do not depend on the other tokens.

    gate_up, SwiGLU, int8 again, down. NaN in `s` or `q` shows in that token's row and no other.

    Shapes:
        q [T, H] float32 integers -127..127, s [T, H/32] float32 (from `quantize_activations`)
        slot [slot_floats] float32; returns [T, H] float32
    """
    split = layout.gate_up.n * layout.gate_up.k
    mid = _block_matmul(q, s, slot[:split], layout.gate_up)  # [T, 2I]
    act = swiglu(mid[:, : layout.inter], mid[:, layout.inter :], limit)  # [T, I]
    act_q, act_s = quantize_activations(act)
    return _block_matmul(act_q, act_s, slot[split : layout.slot_floats], layout.down)


def expert_mlp_float(
    x: Tensor, slot: Tensor, layout: ExpertLayout, *, limit: float | None = None
) -> Tensor:
    """One expert on float activations: the oracle path, not batch-invariant.

    Shapes:
        x [T, H] float32; slot [slot_floats] float32; returns [T, H] float32
    """
    split = layout.gate_up.n * layout.gate_up.k
    gate_up = slot[:split].view(layout.gate_up.n, layout.gate_up.k)
    down = slot[split : layout.slot_floats].view(layout.down.n, layout.down.k)
    mid = x @ gate_up.T
    return swiglu(mid[:, : layout.inter], mid[:, layout.inter :], limit) @ down.T


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


def _block_matmul(q: Tensor, s: Tensor, matrix: Tensor, layout: MatrixLayout) -> Tensor:
    """[T, K] x [N, K] -> [T, N] in the canonical order, a few tokens at a time to bound memory."""
    blocks = q.view(q.shape[0], layout.groups, GROUP).transpose(0, 1)  # [G, T, 32]
    scales = s.T[..., None]  # [G, T, 1]
    weights = matrix.view(layout.n, layout.groups, GROUP).permute(1, 2, 0)  # [G, 32, N]
    tile = max(1, _TERM_FLOATS // (min(layout.groups, LANES) * layout.n))
    if q.shape[0] <= tile:
        return _block_tile(blocks, scales, weights)
    tiles = range(0, q.shape[0], tile)
    return torch.cat(
        [_block_tile(blocks[:, t : t + tile], scales[:, t : t + tile], weights) for t in tiles]
    )


def _block_tile(blocks: Tensor, scales: Tensor, weights: Tensor) -> Tensor:
    lanes = torch.bmm(blocks[:LANES], weights[:LANES]).mul_(scales[:LANES])  # [<= 32, T, N]
    for g in range(LANES, blocks.shape[0], LANES):
        terms = torch.bmm(blocks[g : g + LANES], weights[g : g + LANES])
        lanes[: terms.shape[0]] += terms.mul_(scales[g : g + LANES])
    return _halving_sum(lanes)


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
