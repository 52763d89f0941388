"""Quantisers and decoders: FP4 and 2-bit weights per block of 32, and int8 activations.

Owns the numbers, not the bytes (`kernels.layouts`). Weight quantisers run in packing processes;
`expand_*` and `quantize_activations` run on the engine thread, for every fetched row and each step.
Pure functions; the look-up tables are made once on first use and never change.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.kernels.layouts import (
    GROUP,
    ExpertLayout,
    MatrixLayout,
    fine_words,
    nibbles_to_codes,
    nibbles_to_digits,
)

LEVELS = (-4.0, -1.0, 1.0, 4.0)
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX_FINITE_SCALE = 252
"""Largest E8M0 byte whose block decodes to finite float32 for every nibble (6 * 2**125)."""

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
    unit = torch.ldexp(torch.ones((), dtype=w.dtype), -exponent)
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


def base_codes(nibbles: Tensor) -> Tensor:
    """Base codes 0..3 of {-4, -1, 1, 4} for FP4 nibbles. Same shape, uint8."""
    return nibbles_to_codes(nibbles)


def fine_digits(nibbles: Tensor) -> Tensor:
    """Base-5 digits that refine a base code back to its FP4 nibble. Same shape, uint8."""
    return nibbles_to_digits(nibbles)


def fp4_values(nibbles: Tensor, scales: Tensor) -> Tensor:
    """Decode FP4: sign * magnitude * 2**(scale - 127), exact in float32 up to `MAX_FINITE_SCALE`.

    Shapes:
        nibbles [N, K] uint8, scales [N, K/32] uint8; returns [N, K] float32 (NaN for scale 255)
    """
    return _scaled(_nibble_values()[nibbles.numpy()], scales)


def base_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode base codes: level * 2**(scale - 127), exact in float32 up to `MAX_FINITE_SCALE`.

    Shapes:
        codes [N, K] uint8 0..3, scales [N, K/32] uint8; returns [N, K] float32 (NaN for scale 255)
    """
    return _scaled(np.array(LEVELS, np.float32)[codes.numpy()], scales)


def expand_base(row: Tensor, layout: ExpertLayout, out: Tensor) -> None:
    """Decode a base row into a slot.

    Shapes:
        row [>= base_bytes] uint8; out [slot_floats] float32, contiguous, written in full
    """
    raw, slot = row.numpy(), out.numpy()
    byte, at = 0, 0
    for matrix in (layout.gate_up, layout.down):
        halves, scales = _sequential_codes(raw[byte : byte + matrix.base_bytes], matrix)
        place = slot[at : at + matrix.n * matrix.k]
        np.take(_levels_of_8(), halves.ravel(), axis=0, out=place.reshape(-1, 8), mode="clip")
        _apply_scales(out[at : at + matrix.n * matrix.k], scales)
        byte += matrix.base_bytes
        at += matrix.n * matrix.k


def expand_fine(base_row: Tensor, fine_row: Tensor, layout: ExpertLayout, out: Tensor) -> None:
    """Decode a base row and its fine row into a slot: the exact FP4 weights.

    Shapes:
        base_row [>= base_bytes] uint8, fine_row [>= fine_bytes] uint8
        out [slot_floats] float32, contiguous, written in full
    """
    raw, fine, slot = base_row.numpy(), fine_row.numpy(), out.numpy()
    byte, fine_byte, at = 0, 0, 0
    for matrix in (layout.gate_up, layout.down):
        halves, scales = _sequential_codes(raw[byte : byte + matrix.base_bytes], matrix)
        words = fine_words(fine[fine_byte : fine_byte + matrix.fine_bytes], matrix)
        quads = halves.view(np.uint8).reshape(words.shape)  # four codes each, in order of k
        index = (words << 8) + quads
        place = slot[at : at + matrix.n * matrix.k]
        np.take(_values_of_4(), index.ravel(), axis=0, out=place.reshape(-1, 4), mode="clip")
        _apply_scales(out[at : at + matrix.n * matrix.k], scales)
        byte += matrix.base_bytes
        fine_byte += matrix.fine_bytes
        at += matrix.n * matrix.k


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round activations to int8 per block of 32: scale = amax/127, q = floor(x * 127/amax + 0.5).

    Blocks with amax below 2**-100 become zeros. A NaN or infinity in a block makes that block's
    scale NaN or infinite and its own q NaN, so it shows in every output of that token and in no
    other token's.

    Shapes:
        x [T, K] float32; returns q [T, K] float32 holding integers -127..127, s [T, K/32] float32
    """
    blocks = x.reshape(x.shape[0], -1, GROUP)
    amax = blocks.abs().amax(-1, keepdim=True)  # [T, G, 1]
    inverse = torch.where(amax < _WEAKEST_BLOCK, 0.0, 127.0 / amax)
    q = (blocks * inverse).add_(0.5).floor_()
    return q.view(x.shape), (amax / 127.0).squeeze(-1)


def _scaled(values: NDArray[np.float32], scales: Tensor) -> Tensor:
    out = torch.from_numpy(values)
    _apply_scales(out, scales.numpy())
    return out


def _apply_scales(out: Tensor, scales: NDArray[np.uint8]) -> None:
    factors = torch.from_numpy(_scale_values()[scales.ravel()])
    out.view(-1, GROUP).mul_(factors[:, None])


def _sequential_codes(
    raw: NDArray[np.uint8], layout: MatrixLayout
) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """Base planes to codes in order of k, [N*G, 4] uint16 of eight codes each, and the scales."""
    blocks = layout.n * layout.groups
    words = raw[: 8 * blocks].view("<u2").reshape(2, blocks, 2)
    low, high = _spread_tables()
    ordered = np.empty((blocks, 2), np.uint32)
    for half in (0, 1):
        np.bitwise_or(low[words[half, :, 0]], high[words[half, :, 1]], out=ordered[:, half])
    return ordered.view("<u2"), raw[8 * blocks :]


@cache
def _scale_values() -> NDArray[np.float32]:
    """2**(byte - 127) for every E8M0 byte; NaN for 255."""
    values = np.ldexp(np.ones(256), np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)


@cache
def _nibble_values() -> NDArray[np.float32]:
    magnitudes = np.array(MAGNITUDES, np.float32)
    return np.concatenate([magnitudes, -magnitudes])


@cache
def _spread_tables() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """What a word's low and high 16 bits add to its codes in order of k (2 bits each, 32 in all).

    Nibble n of the word holds element n in its low two bits and element n + 8 in its high two.
    """
    value = np.arange(65536, dtype=np.uint32)
    low = np.zeros(65536, np.uint32)
    for n in range(4):
        low |= ((value >> (4 * n)) & 3) << (2 * n)
        low |= ((value >> (4 * n + 2)) & 3) << (2 * n + 16)
    return low, np.left_shift(low, 8, dtype=np.uint32)


@cache
def _levels_of_8() -> NDArray[np.float32]:
    """[65536, 8]: levels of eight 2-bit codes."""
    codes = (np.arange(65536)[:, None] >> (2 * np.arange(8))) & 3
    levels: NDArray[np.float32] = np.array(LEVELS, np.float32)[codes]
    return levels


@cache
def _values_of_4() -> NDArray[np.float32]:
    """[625 * 256, 4]: FP4 values of a digit word and the four base codes it refines."""
    words = np.arange(625)[:, None, None] // (5 ** np.arange(4)) % 5  # [625, 1, 4]
    codes = (np.arange(256)[None, :, None] >> (2 * np.arange(4))) & 3  # [1, 256, 4]
    big = (codes == 0) | (codes == 3)
    magnitude = np.array(MAGNITUDES, np.float32)[np.minimum(words + 5 * big, 7)]
    values: NDArray[np.float32] = np.where(codes < 2, -magnitude, magnitude).reshape(-1, 4)
    return values
