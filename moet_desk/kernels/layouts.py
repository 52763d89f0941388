"""Where each bit of an expert's base row and fine row lies, and pack and unpack for both.

Owns byte layouts only: no arithmetic on weights (`kernels.reference`), no files (`store`). Called
from packing processes and, through its constants, from the engine thread; holds no state.

A matrix [N, K] has G = K/32 blocks per row. Planes, little-endian, one after another:

* base: words 0 [N, G] int32, words 1 [N, G] int32, scales [N, G] uint8 (E8M0). Word h of block g
  holds k = 32g+16h .. +15; element n < 8 of such a half sits at bits 4n, element n+8 at bits 4n+2
  (the same as 4*((o%2)*4+b) + 2*(o//2) for element 4o+b), so that an AND and a shift give a GPU
  four byte-permute selectors.
* fine: per block an 80-bit record of eight 10-bit words at bits 10j, stored as bits 0..31 [N, G]
  int32, bits 32..63 [N, G] int32, bits 64..79 [N, G] int16. Word j = d0 + 5 d1 + 25 d2 + 125 d3
  holds the base-5 digits of k = 32g+4j .. +3.

A row is the matrix [gate; up] [2I, H], then down [H, I], then zeros up to a multiple of 4096 bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.kernels.row_sizes import GROUP as GROUP
from moet_desk.kernels.row_sizes import ROW_ALIGN_BYTES as ROW_ALIGN_BYTES
from moet_desk.kernels.row_sizes import ExpertLayout as ExpertLayout
from moet_desk.kernels.row_sizes import MatrixLayout as MatrixLayout

_CODE_OF_NIBBLE = np.array([2, 2, 2, 2, 2, 3, 3, 3, 1, 1, 1, 1, 1, 0, 0, 0], np.uint8)
_DIGIT_OF_NIBBLE = np.array([0, 1, 2, 3, 4, 0, 1, 2] * 2, np.uint8)
# [code, digit] -> nibble; digits 3 and 4 of a big code never occur, 7 or 15 keeps them in range.
_NIBBLE_OF = np.array(
    [[13, 14, 15, 15, 15], [8, 9, 10, 11, 12], [0, 1, 2, 3, 4], [5, 6, 7, 7, 7]], np.uint8
)


def base_codes(nibbles: Tensor) -> Tensor:
    """Base codes 0..3 (levels -4, -1, 1, 4) of FP4 nibbles: |w| <= 2 is small, signs are kept.

    Shapes:
        nibbles any shape uint8, 0..15; returns the same shape uint8
    """
    return torch.from_numpy(_CODE_OF_NIBBLE[nibbles.numpy()])


def fine_digits(nibbles: Tensor) -> Tensor:
    """Position of each FP4 magnitude inside its class: 0..4 (0 .5 1 1.5 2) or 0..2 (3 4 6).

    Shapes:
        nibbles any shape uint8, 0..15; returns the same shape uint8
    """
    return torch.from_numpy(_DIGIT_OF_NIBBLE[nibbles.numpy()])


def pack_base(nibbles: Tensor, scales: Tensor) -> Tensor:
    """Write the base planes of a matrix.

    Shapes:
        nibbles [N, K] uint8 FP4; scales [N, K/32] uint8 E8M0; returns [base_bytes] uint8
    Raises:
        ValueError: K is not a multiple of 32 or the shapes do not match.
    """
    layout = MatrixLayout(*nibbles.shape)
    if tuple(scales.shape) != (layout.n, layout.groups):
        raise ValueError(f"scales {tuple(scales.shape)} do not fit nibbles {tuple(nibbles.shape)}")
    codes = _CODE_OF_NIBBLE[nibbles.numpy()].reshape(layout.n, layout.groups, 2, 2, 8)
    pairs = codes[..., 0, :] | (codes[..., 1, :] << 2)  # [N, G, 2, 8] four bits per position
    packed = pairs[..., 0::2] | (pairs[..., 1::2] << 4)  # [N, G, 2, 4] bytes of a word
    planes = packed.transpose(2, 0, 1, 3)  # [2, N, G, 4]
    return torch.from_numpy(np.concatenate([planes.ravel(), scales.numpy().ravel()]))


def unpack_base(buf: Tensor, layout: MatrixLayout) -> tuple[Tensor, Tensor]:
    """Read the base planes of a matrix back.

    Shapes:
        buf [>= base_bytes] uint8; returns codes [N, K] uint8 0..3 and scales [N, G] uint8
    """
    raw = buf.numpy()[: layout.base_bytes]
    blocks = layout.n * layout.groups
    words = raw[: 8 * blocks].reshape(2, layout.n, layout.groups, 4)
    positions = np.stack([words & 15, words >> 4], -1)  # [2, N, G, 4, 2]
    halves = np.stack([positions & 3, positions >> 2])  # [2 (n // 8), 2 (h), N, G, 4, 2]
    codes = halves.transpose(2, 3, 1, 0, 4, 5).reshape(layout.n, layout.k)
    scales = raw[8 * blocks :].reshape(layout.n, layout.groups)
    return torch.from_numpy(codes), torch.from_numpy(scales.copy())


def pack_fine(nibbles: Tensor) -> Tensor:
    """Write the fine planes of a matrix.

    Shapes:
        nibbles [N, K] uint8 FP4; returns [fine_bytes] uint8
    Raises:
        ValueError: K is not a multiple of 32.
    """
    layout = MatrixLayout(*nibbles.shape)
    digits = _DIGIT_OF_NIBBLE[nibbles.numpy()].reshape(layout.n, layout.groups, 8, 4)
    words = (digits.astype(np.uint64) * np.array([1, 5, 25, 125], np.uint64)).sum(-1)  # [N, G, 8]
    low = np.zeros((layout.n, layout.groups), np.uint64)
    for j in range(7):
        low |= words[..., j] << np.uint64(10 * j)  # the top six bits of word 6 fall out here
    high = (words[..., 6] >> np.uint64(4)) | (words[..., 7] << np.uint64(6))
    first = (low & np.uint64(0xFFFFFFFF)).astype("<u4")
    second = (low >> np.uint64(32)).astype("<u4")
    planes = [first, second, high.astype("<u2")]
    return torch.from_numpy(np.concatenate([p.ravel().view(np.uint8) for p in planes]))


def unpack_nibbles(
    base_buf: Tensor, fine_buf: Tensor, layout: MatrixLayout
) -> tuple[Tensor, Tensor]:
    """Join base and fine planes of a matrix to the FP4 weights they were made from, bit for bit.

    Shapes:
        base_buf [>= base_bytes] uint8, fine_buf [>= fine_bytes] uint8
        returns nibbles [N, K] uint8 and scales [N, G] uint8
    """
    codes, scales = unpack_base(base_buf, layout)
    words = _fine_words(fine_buf.numpy(), layout)  # [N, G, 8]
    digits = np.empty((*words.shape, 4), np.uint8)
    rest = words
    for place in range(4):
        quotient = fifth(rest)
        digits[..., place] = rest - 5 * quotient
        rest = quotient
    nibbles = _NIBBLE_OF[codes.numpy(), digits.reshape(layout.n, layout.k)]
    return torch.from_numpy(nibbles), scales


def _fine_words(raw: NDArray[np.uint8], layout: MatrixLayout) -> NDArray[np.int64]:
    """The eight 10-bit digit words of each block: [N, G, 8] int64."""
    blocks = layout.n * layout.groups
    first = raw[: 4 * blocks].view("<u4").astype(np.int64)
    second = raw[4 * blocks : 8 * blocks].view("<u4").astype(np.int64)
    third = raw[8 * blocks : 10 * blocks].view("<u2").astype(np.int64)
    words = np.empty((8, blocks), np.int64)
    np.bitwise_or(first, (second & 0xFF) << 32, out=words[3])
    for j, (source, shift) in enumerate(
        [(first, 0), (first, 10), (first, 20), (words[3], 30), (second, 8), (second, 18)]
    ):
        np.bitwise_and(source >> shift, 1023, out=words[j])
    np.bitwise_and((second >> 28) | (third << 4), 1023, out=words[6])
    np.right_shift(third, 6, out=words[7])
    return words.T.reshape(layout.n, layout.groups, 8)


def fifth(x: NDArray[np.int64]) -> NDArray[np.int64]:
    """Divide by 5 with one multiplication: x // 5, exact for 0 <= x < 1024."""
    return (x * 0x334) >> 12


def pack_expert(
    gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Make the base row and the fine row of one expert.

    Shapes:
        gate, up (nibbles [I, H] uint8, scales [I, H/32] uint8); down ([H, I], [H, I/32])
        returns base row [base_stride] uint8 and fine row [fine_stride] uint8, zero-padded
    Raises:
        ValueError: the three do not belong together, or a width is not a multiple of 32.
    """
    inter, hidden = gate[0].shape
    if tuple(up[0].shape) != (inter, hidden) or tuple(down[0].shape) != (hidden, inter):
        shapes = [tuple(part[0].shape) for part in (gate, up, down)]
        raise ValueError(f"gate, up and down {shapes} are not one expert")
    layout = ExpertLayout(hidden, inter)
    gate_up = torch.cat([gate[0], up[0]])
    gate_up_scales = torch.cat([gate[1], up[1]])
    base = [pack_base(gate_up, gate_up_scales), pack_base(*down)]
    fine = [pack_fine(gate_up), pack_fine(down[0])]
    return _joined(base, layout.base_stride), _joined(fine, layout.fine_stride)


def _joined(parts: list[Tensor], size: int) -> Tensor:
    row = torch.zeros(size, dtype=torch.uint8)
    used = sum(part.numel() for part in parts)
    torch.cat(parts, out=row[:used])
    return row
