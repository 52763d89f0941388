"""The block formats of GGUF tensors: sizes, and their values as float32.

Owns nothing but the MXFP4 nibble order; values come from the package gguf. The formats have no
quicker ways of their own here: numpy gives 36 to 200 million weights a second and core (IQ2_XS to
Q6_K, 512 x 7168), the quantiser behind it takes 20 million (2026-11-30). Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

PLAIN = ("F32", "F16", "BF16", "F64")
INTEGERS = ("I8", "I16", "I32", "I64")
MXFP4 = "MXFP4"
_MXFP4_BYTES = 17

BLOCK_SIZES: Mapping[str, tuple[int, int]] = {
    "F64": (1, 8), "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "I8": (1, 1), "I16": (1, 2), "I32": (1, 4), "I64": (1, 8),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82), "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17), "NVFP4": (64, 36),
}  # fmt: skip
"""Type -> weights in a block, bytes of a block. Types that are not here cannot be read."""

_NAMES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip


def type_name(kind: int) -> str:
    """The name of a type's number; the number itself if nobody knows it."""
    return _NAMES.get(kind, str(kind))


def row_bytes(dtype: str, width: int) -> int:
    """Bytes of a row of `width` weights."""
    per_block, block_bytes = BLOCK_SIZES[dtype]
    return width // per_block * block_bytes


def dequantized(rows: Tensor, dtype: str) -> Tensor:
    """The values of whole rows.

    Args:
        rows: uint8 [N, bytes of a row].
        dtype: a block type.

    Returns:
        float32 [N, K]; NaN and infinite values of damaged scales are in it as they are.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    per_block, block_bytes = BLOCK_SIZES[dtype]
    if not rows.numel():
        return torch.empty(len(rows), rows.shape[-1] // block_bytes * per_block)
    with np.errstate(all="ignore"):  # about such scales; who takes the values checks them
        values = dequantize(np.ascontiguousarray(rows.numpy()), GGMLQuantizationType[dtype])
    return torch.from_numpy(values.astype(np.float32, copy=False))


def mxfp4_parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Nibbles and scales of MXFP4 rows, bit for bit.

    A block is its scale byte u (2**(u - 127), as elsewhere), then 16 bytes of which byte j holds
    element j in its low nibble and j + 16 in its high one.

    Shapes:
        rows: uint8 [N, K/32 * 17]
        returns nibbles uint8 [N, K] and scales uint8 [N, K/32]
    """
    blocks = rows.reshape(len(rows), -1, _MXFP4_BYTES)
    codes = blocks[..., 1:]
    nibbles = torch.cat((codes & 15, codes >> 4), dim=-1)
    return nibbles.flatten(1), blocks[..., 0].contiguous()
