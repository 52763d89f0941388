"""How entries of shared attention lie in memory, and what the released forward rounds.

An entry is one vector whose last numbers rotate. FP8 is as released: the others are e4m3 with a
power of two per 64 of them, the rotating ones bfloat16, so storing an entry rounds it as the
released forward does (584 bytes of 512 numbers; one byte of scales is spare). An indexer's queries
and keys are rounded there too: turned by a Hadamard matrix, then e2m1 with a power of two per 32.
The other formats are those of latent attention. Pure; an entry's bytes depend on its own values
alone. Called on the engine thread.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import POOLED_KEY_BLOCK, SHARED_BLOCK, shared_scale_bytes
from moet_desk.kernels.reference.kv_formats import (
    E4M3_MAX,
    e2m1_nibbles,
    e2m1_pairs,
    index_read,
    index_write,
    mla_read,
    mla_write,
)
from moet_desk.kernels.reference.quant import nibble_values

_LEAST = 1e-4  # a block's largest number counts as this at least
_E2M1_MAX = 6.0
_LEAST_INDEX = _E2M1_MAX * 2.0**-126


def shared_write(entries: Tensor, fmt: KvFormat, rotary: int) -> Tensor:
    """Encode entries, of which the last `rotary` numbers rotate.

    Shapes:
        entries [T, D] float32; returns [T, shared_entry_bytes] uint8
    Raises:
        ValueError: as `shared_entry_bytes`.
    """
    plain = entries.shape[-1] - rotary
    still, turning = entries[:, :plain], entries[:, plain:]
    if fmt is not KvFormat.FP8:
        return mla_write(still, turning, fmt)
    blocks = _blocks(still, SHARED_BLOCK)
    scales = _scales(blocks, E4M3_MAX, _LEAST)
    codes = (blocks / _powers(scales)[..., None]).to(torch.float8_e4m3fn).flatten(1)[:, :plain]
    spare = scales.new_zeros((len(entries), shared_scale_bytes(plain) - scales.shape[1]))
    turned = _bytes_of(turning.to(torch.bfloat16))
    return torch.cat([_bytes_of(codes), turned, scales, spare], -1)


def shared_read(buf: Tensor, fmt: KvFormat, dim: int, rotary: int) -> Tensor:
    """Decode entries of `dim` numbers; for F32 the result may share memory with `buf`.

    Shapes:
        buf [S, shared_entry_bytes] uint8; returns [S, dim] float32
    """
    plain = dim - rotary
    if fmt is KvFormat.F32:
        return buf.view(torch.float32)
    if fmt is not KvFormat.FP8:
        return torch.cat(mla_read(buf, fmt, plain, rotary), -1)
    values = buf[:, :plain].contiguous().view(torch.float8_e4m3fn).float()
    turning = buf[:, plain : plain + 2 * rotary].contiguous().view(torch.bfloat16).float()
    scales = _powers(buf[:, plain + 2 * rotary :]).repeat_interleave(SHARED_BLOCK, -1)
    return torch.cat([values * scales[:, :plain], turning], -1)


def pooled_key_write(keys: Tensor, fmt: KvFormat) -> Tensor:
    """Encode an indexer's pooled keys, rounded as released where entries are.

    Shapes:
        keys [T, D] float32, D a power of two; returns [T, pooled_key_bytes] uint8
    """
    if fmt in (KvFormat.F32, KvFormat.BF16):
        return index_write(keys, fmt)
    nibbles, scales = _e2m1(keys)
    flat = nibbles.flatten(1)[:, : keys.shape[1]]
    return torch.cat([flat[:, 0::2] | (flat[:, 1::2] << 4), scales], -1)


def pooled_key_read(buf: Tensor, fmt: KvFormat, d: int) -> Tensor:
    """Decode them; for F32 the result shares memory with `buf`.

    Shapes:
        buf [S, pooled_key_bytes] uint8; returns [S, d] float32
    """
    if fmt in (KvFormat.F32, KvFormat.BF16):
        return index_read(buf, fmt, d)
    values = e2m1_pairs()[buf[:, : d // 2].int()].flatten(1)
    scales = _powers(buf[:, d // 2 :]).repeat_interleave(POOLED_KEY_BLOCK, -1)[:, :d]
    return values * scales


def index_rounded(x: Tensor) -> Tensor:
    """An indexer's queries as the released forward compares them with its keys.

    Shapes:
        x [..., D] float32, D a power of two; returns the same shape
    """
    nibbles, scales = _e2m1(x)
    values = torch.from_numpy(nibble_values()[nibbles.numpy()]) * _powers(scales)[..., None]
    return values.flatten(-2)[..., : x.shape[-1]]


def _e2m1(x: Tensor) -> tuple[Tensor, Tensor]:
    """Nibbles [..., n, 32] and scales [..., n] of vectors [..., D], turned by a Hadamard matrix."""
    dim = x.shape[-1]
    blocks = _blocks((x @ _hadamard(dim)) * dim**-0.5, POOLED_KEY_BLOCK)
    scales = _scales(blocks, _E2M1_MAX, _LEAST_INDEX)
    return e2m1_nibbles(blocks / _powers(scales)[..., None]), scales


def _scales(blocks: Tensor, most: float, least: float) -> Tensor:
    """E8M0 bytes of the smallest powers of two that bring blocks below `most`: [..., n] uint8."""
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1).clamp_(min=least) / most)
    return (exponent - (mantissa == 0.5).int() + 127).clamp_(1, 254).to(torch.uint8)


def _powers(scales: Tensor) -> Tensor:
    """2**(u - 127) of E8M0 bytes, exactly."""
    return (scales.int() << 23).view(torch.float32)


@cache
def _hadamard(dim: int) -> Tensor:
    """[D, D] of 1 and -1, symmetric."""
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _blocks(x: Tensor, size: int) -> Tensor:
    """[..., d] -> [..., n, size], filled up with zeros."""
    short = -x.shape[-1] % size
    padded = torch.nn.functional.pad(x, (0, short)) if short else x
    return padded.reshape(*x.shape[:-1], -1, size)


def _bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
