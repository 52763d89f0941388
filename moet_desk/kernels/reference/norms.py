"""RMS norm and rotary embedding, with YaRN scaling.

Called on the engine thread. Pure functions; a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moet_desk.kernels.kinds import RopeScaling


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    """Scale rows to RMS 1: w * x / sqrt(mean(x^2) + eps); `plus_one` makes the factor 1 + w.

    Shapes:
        x [..., H] float32, weight [H] float32; returns [..., H] float32
    """
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return normed * (weight + 1.0 if plus_one else weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Scale rows to mean 0 and variance 1, then w * x + b.

    Shapes:
        x [..., D], weight and bias [D]; returns [..., D], all float32
    """
    centred = x - x.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True).add_(eps))
    return normed * weight + bias


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention correction, 0.1 * mscale * ln(factor) + 1, or 1 without stretching.

    MLA multiplies its softmax scale by the square of this with `mscale_all_dim`.
    """
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def rope_frequencies(
    dim: int, base: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, float]:
    """Angular frequencies base**(-2i/dim) and the factor on cos and sin, YaRN applied if asked.

    Shapes:
        returns inv_freq [dim/2] float32, and the magnitude (1.0 without YaRN)
    """
    inverse = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling is None:
        return inverse.float(), 1.0
    low = _correction(dim, base, scaling.original_context, scaling.beta_fast)
    high = _correction(dim, base, scaling.original_context, scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, dim - 1.0)
    if low == high:
        high += 0.001
    # 0 keeps a frequency, 1 divides it by the factor.
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0.0, 1.0)
    stretched = inverse * (1.0 - ramp) + inverse / scaling.factor * ramp
    return stretched.float(), _magnitude(scaling)


def rope_tables(
    positions: Tensor, inv_freq: Tensor, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, times the magnitude: made once per step for all layers.

    Shapes:
        positions [T] any integer type, inv_freq [D/2] float32; returns two [T, D/2] float32
    """
    angles = positions.to(torch.float32)[:, None] * inv_freq
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn each pair of dims by its angle: pairs (2i, 2i+1) if `interleaved`, else (i, i + D/2).

    Shapes:
        x [..., T, D], cos and sin [T, D/2]; returns [..., T, D] in the layout of x
    """
    if interleaved:
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = (even * cos - odd * sin, odd * cos + even * sin)
        return torch.stack(turned, -1).flatten(-2)
    even, odd = x.chunk(2, -1)
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def apply_rope(
    x: Tensor, positions: Tensor, inv_freq: Tensor, magnitude: float = 1.0, *, interleaved: bool
) -> Tensor:
    """`rotate` by the angles of `positions`; all D = 2 * len(inv_freq) dims turn.

    Shapes:
        x [..., T, D] float32, positions [T], inv_freq [D/2] float32; returns [..., T, D]
    """
    cos, sin = rope_tables(positions, inv_freq, magnitude)
    return rotate(x, cos, sin, interleaved=interleaved)


def _correction(dim: int, base: float, context: int, turns: float) -> float:
    """The dim whose wave makes `turns` turns within the original context."""
    return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))


def _magnitude(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        ours = yarn_mscale(scaling.factor, scaling.mscale)
        return ours / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)
