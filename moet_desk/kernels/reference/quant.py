"""Quantisers and decoders: FP4, 2-bit and dense int8 weights per block of 32, int8 activations.

Owns the numbers, not the bytes (`kernels.layouts`). Weight quantisers run in packing processes;
`quantize_activations` runs on the engine thread, twice per expert. Pure functions; the look-up
tables are made once, on first use, and never change. Rows are decoded by `reference.expand`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.layouts import GROUP, MatrixLayout

LEVELS = (-4.0, -1.0, 1.0, 4.0)
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX_FINITE_SCALE = 252
"""Largest E8M0 byte whose block decodes to finite float32 for every nibble (6 * 2**125)."""

DENSE_LEVEL = 127
"""Largest integer of a rounded dense weight."""

_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_SQRT_HALF = 0.5**0.5
_ONE_SIGNED_SHARE = 0.05  # below this share, one sign of the zeros counts as an exporter's artefact
# Blocks weaker than this count as zero: 127/amax would leave the range of float32.
_WEAKEST_BLOCK = 2.0**-100


def quantize_fp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights to FP4 e2m1 with one power-of-two scale per 32 inputs (design §5.1).

    e = round(log2(amax / 6)) clamped to -127..127; magnitudes of w / 2**e are rounded to the
    nearest of 0 .5 1 1.5 2 3 4 6, ties to the lower one, and saturate at 6; the sign bit is kept,
    of zeros too. A block of zeros gets e = -127. NaN and infinity are the caller's to refuse.

    Shapes:
        w [N, K] float32 or float64; returns nibbles [N, K] uint8 and scales [N, K/32] uint8 (E8M0)

    Raises:
        ValueError: K is not a multiple of 32.
    """
    layout = MatrixLayout(*w.shape)
    blocks = w.reshape(layout.n, layout.groups, GROUP)
    amax = blocks.abs().amax(-1).double()  # [N, G]
    # log2 is not the same on every libm; mantissa against sqrt(1/2) rounds the exponent exactly.
    mantissa, exponent = torch.frexp(amax / 6)
    exponent = (exponent - (mantissa < _SQRT_HALF).int()).clamp(-127, 127)
    exponent = torch.where(amax > 0, exponent, torch.full_like(exponent, -127))
    unit = torch.ldexp(torch.ones_like(amax, dtype=w.dtype), -exponent)
    magnitudes = (blocks * unit[..., None]).abs()
    # bucketize without `right` puts a value that equals a boundary below it: ties go down.
    index = torch.bucketize(magnitudes, torch.tensor(_MIDPOINTS, dtype=w.dtype), out_int32=True)
    nibbles = index.to(torch.uint8) | (torch.signbit(blocks).to(torch.uint8) << 3)
    return nibbles.reshape(layout.n, layout.k), (exponent + 127).to(torch.uint8)


def balance_zeros(nibbles: Tensor) -> Tensor:
    """Give zeros alternating signs if the source wrote them all with one sign.

    A zero becomes a level of +-1; zeros of one sign would add a bias that grows coherently through
    the layers. If fewer than 5 % of a matrix's exact zeros have the rarer sign, the sign of each
    zero becomes the parity of its k (odd: negative); otherwise the stored signs stand.

    Shapes:
        nibbles [N, K] uint8; returns [N, K] uint8, the same tensor when nothing changes
    """
    zero = (nibbles & 7) == 0
    n_zero = int(zero.sum())
    n_negative = int((nibbles == 8).sum())
    if min(n_negative, n_zero - n_negative) >= _ONE_SIGNED_SHARE * n_zero:
        return nibbles
    odd = (torch.arange(nibbles.shape[1]) % 2 * 8).to(torch.uint8)  # [K]
    return torch.where(zero, odd, nibbles)


def fp4_values(nibbles: Tensor, scales: Tensor) -> Tensor:
    """Decode FP4: sign * magnitude * 2**(scale - 127), exact in float32 up to `MAX_FINITE_SCALE`.

    Shapes:
        nibbles [N, K] uint8, scales [N, K/32] uint8; returns [N, K] float32 (NaN for scale 255)
    """
    return _scaled(nibble_values()[nibbles.numpy()], scales)


def base_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode base codes: level * 2**(scale - 127), exact in float32 up to `MAX_FINITE_SCALE`.

    Shapes:
        codes [N, K] uint8 0..3, scales [N, K/32] uint8; returns [N, K] float32 (NaN for scale 255)
    """
    return _scaled(np.array(LEVELS, np.float32)[codes.numpy()], scales)


def quantize_activations(x: Tensor, kind: Activations = Activations.INT8) -> tuple[Tensor, Tensor]:
    """Round activations to integers per block of 32: scale = amax/L, q = floor(x * L/amax + 0.5).

    L is the largest integer of `kind`, 127 or 32512.

    Blocks with amax below 2**-100 become zeros. A NaN or infinity in a block makes that block's
    scale NaN or infinite and its own q NaN, so it shows in every output of that token and in no
    other token's.

    Shapes:
        x [T, K] float32; returns q [T, K] float32 holding integers -L..L, s [T, K/32] float32
    """
    blocks = x.reshape(x.shape[0], -1, GROUP)
    amax = blocks.abs().amax(-1, keepdim=True)  # [T, G, 1]
    inverse = (kind.value / amax).masked_fill_(amax < _WEAKEST_BLOCK, 0.0)
    q = (blocks * inverse).add_(0.5).floor_()
    return q.view(x.shape), (amax / kind.value).squeeze(-1)


def quantize_dense(w: Tensor) -> tuple[Tensor, Tensor]:
    """Round a dense matrix to integers -127..127 with one scale per 32 inputs.

    The scale is amax/127 rounded up to bfloat16, so that no integer leaves its range; q is w/scale
    rounded to the nearest, halves to even. The same bits on every device. NaN and infinity are the
    caller's to refuse.

    Shapes:
        w [N, K] bfloat16 or float32; returns q [N, K] int8, scales [N, K/32] bfloat16

    Raises:
        ValueError: K is not a multiple of 32.
    """
    layout = MatrixLayout(*w.shape)
    blocks = w.float().view(layout.n, layout.groups, GROUP)
    exact = blocks.abs().amax(-1) / DENSE_LEVEL
    upward = (exact.view(torch.int32) + 0xFFFF) & ~0xFFFF  # bits of positive float32 are ordered
    scales = upward.view(torch.float32)
    q = (blocks / scales[..., None]).masked_fill_((scales == 0)[..., None], 0.0)
    return q.round_().to(torch.int8).view(w.shape), scales.bfloat16()


def dense_values(q: Tensor, scales: Tensor) -> Tensor:
    """Decode what `quantize_dense` gave; exact in float32.

    Shapes:
        q [N, K] int8, scales [N, K/32] bfloat16; returns [N, K] float32
    """
    blocks = q.float().view(*scales.shape, GROUP)
    return blocks.mul_(scales.float()[..., None]).view(q.shape)


def _scaled(values: NDArray[np.float32], scales: Tensor) -> Tensor:
    out = torch.from_numpy(values)
    _apply_scales(out, scales.numpy())
    return out


def _apply_scales(out: Tensor, scales: NDArray[np.uint8]) -> None:
    factors = torch.from_numpy(scale_values()[scales.ravel()])
    out.view(-1, GROUP).mul_(factors[:, None])


@cache
def scale_values() -> NDArray[np.float32]:
    """2**(byte - 127) for every E8M0 byte; NaN for 255."""
    values = np.ldexp(np.ones(256), np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)


@cache
def nibble_values() -> NDArray[np.float32]:
    """The FP4 value of each nibble, -0 of 8 included."""
    magnitudes = np.array(MAGNITUDES, np.float32)
    return np.concatenate([magnitudes, -magnitudes])
