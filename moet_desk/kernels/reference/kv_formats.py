"""How attention state lies in a KV page: float32, bfloat16, FP8 and NVFP4 entries.

Owns bytes per entry and their writers and readers; pages, lengths and reuse belong to
`engine.kv_cache`. Called on the engine thread. Pure; an entry's bytes depend on its own values
alone.

FP8 is e4m3 with one float32 scale per 128 values (amax/448, the last block may be short); in MLA
entries the rotary part stays bfloat16. NVFP4 is e2m1 with an e4m3 scale per 16 values and a fixed
global factor of 2**-6; the rotary part is e4m3 saturated at 448. Part by part, without padding:
values, then scales, then the rotary part. Infinities saturate; a NaN comes back as NaN.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.kv_sizes import FP8_BLOCK, NVFP4_BLOCK, index_form, vector_bytes
from moet_desk.kernels.kv_sizes import gqa_entry_bytes as gqa_entry_bytes
from moet_desk.kernels.kv_sizes import mla_entry_bytes as mla_entry_bytes

E4M3_MAX = 448.0
NVFP4_GLOBAL = 2.0**-6

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mla_write(latent: Tensor, k_rope: Tensor, fmt: KvFormat) -> Tensor:
    """Encode MLA entries.

    Shapes:
        latent [T, r] float32, k_rope [T, dr] float32; returns [T, mla_entry_bytes] uint8
    Raises:
        ValueError: as `mla_entry_bytes`.
    """
    if fmt is KvFormat.FP8:
        rope = _bytes_of(k_rope.to(torch.bfloat16))
    elif fmt is KvFormat.NVFP4:
        rope = _bytes_of(_to_e4m3(k_rope))
    else:
        return _encode(torch.cat([latent, k_rope], -1), fmt)
    return torch.cat([_encode(latent, fmt), rope], -1)


def mla_read(buf: Tensor, fmt: KvFormat, r: int, dr: int) -> tuple[Tensor, Tensor]:
    """Decode MLA entries; for F32 the result shares memory with `buf`.

    Shapes:
        buf [S, mla_entry_bytes] uint8; returns latent [S, r] float32 and k_rope [S, dr] float32
    """
    if fmt is KvFormat.F32 or fmt is KvFormat.BF16:
        both = _decode(buf, fmt, r + dr)
        return both[:, :r], both[:, r:]
    body = vector_bytes(fmt, r)
    kind = torch.bfloat16 if fmt is KvFormat.FP8 else torch.float8_e4m3fn
    rope = buf[:, body:].contiguous().view(kind).float()
    return _decode(buf[:, :body], fmt, r), rope


def gqa_write(k: Tensor, v: Tensor, fmt: KvFormat) -> Tensor:
    """Encode keys and values, all key heads first.

    Shapes:
        k [T, M, D] float32, v [T, M, Dv] float32; returns [T, gqa_entry_bytes] uint8
    Raises:
        ValueError: as `gqa_entry_bytes`.
    """
    return torch.cat([_encode(part, fmt).flatten(1) for part in (k, v)], -1)


def gqa_read(buf: Tensor, fmt: KvFormat, n_keys: int, d: int, dv: int) -> tuple[Tensor, Tensor]:
    """Decode keys and values.

    Shapes:
        buf [S, gqa_entry_bytes] uint8; returns k [S, M, D] float32, v [S, M, Dv] float32
    """
    split = n_keys * vector_bytes(fmt, d)
    entries = buf.shape[0]
    keys = buf[:, :split].reshape(entries, n_keys, -1)
    values = buf[:, split:].reshape(entries, n_keys, -1)
    return _decode(keys, fmt, d), _decode(values, fmt, dv)


def index_write(keys: Tensor, fmt: KvFormat) -> Tensor:
    """Encode an indexer's keys, which lie beside entries of format `fmt`.

    Shapes:
        keys [T, D] float32; returns [T, index_key_bytes] uint8
    """
    return _encode(keys, index_form(fmt))


def index_read(buf: Tensor, fmt: KvFormat, d: int) -> Tensor:
    """Decode an indexer's keys; for F32 the result shares memory with `buf`.

    Shapes:
        buf [S, index_key_bytes] uint8; returns [S, D] float32
    """
    return _decode(buf, index_form(fmt), d)


def _encode(x: Tensor, fmt: KvFormat) -> Tensor:
    """Vectors [..., d] float32 -> [..., vector_bytes] uint8."""
    if fmt is KvFormat.F32:
        return _bytes_of(x)
    if fmt is KvFormat.BF16:
        return _bytes_of(x.to(torch.bfloat16))
    return _encode_fp8(x) if fmt is KvFormat.FP8 else _encode_nvfp4(x)


def _decode(buf: Tensor, fmt: KvFormat, d: int) -> Tensor:
    """The inverse of `_encode`: [..., vector_bytes] uint8 -> [..., d] float32."""
    if fmt is KvFormat.F32:
        return buf.view(torch.float32)
    if fmt is KvFormat.BF16:
        return buf.view(torch.bfloat16).float()
    return _decode_fp8(buf, d) if fmt is KvFormat.FP8 else _decode_nvfp4(buf, d)


def _encode_fp8(x: Tensor) -> Tensor:
    d = x.shape[-1]
    blocks = _blocks(_padded(x, FP8_BLOCK), FP8_BLOCK)
    scales = blocks.abs().amax(-1) / E4M3_MAX
    safe = torch.where(scales == 0, 1.0, scales)
    values = _to_e4m3(blocks / safe[..., None]).flatten(-2)[..., :d]
    return torch.cat([_bytes_of(values), _bytes_of(scales)], -1)


def _decode_fp8(buf: Tensor, d: int) -> Tensor:
    values = buf[..., :d].view(torch.float8_e4m3fn).float()
    scales = buf[..., d:].contiguous().view(torch.float32)
    return values * scales.repeat_interleave(FP8_BLOCK, -1)[..., :d]


def _encode_nvfp4(x: Tensor) -> Tensor:
    blocks = _blocks(x, NVFP4_BLOCK)
    amax = blocks.abs().amax(-1)
    # A NaN scale is what keeps a NaN visible: e2m1 has none.
    scales = _to_e4m3(amax / 6.0 / NVFP4_GLOBAL)
    real = scales.float() * NVFP4_GLOBAL
    unit = blocks / torch.where(real == 0, 1.0, real)[..., None]
    unit = torch.where(real[..., None] == 0, torch.zeros_like(unit), unit)
    codes = e2m1_nibbles(unit).flatten(-2)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)  # even dim in the low nibble
    return torch.cat([packed, _bytes_of(scales)], -1)


def _decode_nvfp4(buf: Tensor, d: int) -> Tensor:
    values = e2m1_pairs()[buf[..., : d // 2].int()].flatten(-2)  # [..., d]
    scales = buf[..., d // 2 :].contiguous().view(torch.float8_e4m3fn).float() * NVFP4_GLOBAL
    return (_blocks(values, NVFP4_BLOCK) * scales[..., None]).flatten(-2)


def _to_e4m3(x: Tensor) -> Tensor:
    """Nearest even, saturating; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e2m1_nibbles(x: Tensor) -> Tensor:
    """Nearest even, saturating at 6: nibbles with the sign in bit 3."""
    size = x.abs().clamp(max=6.0)
    # The step of e2m1 is 0.5 below 2, 1 below 4, then 2; round() goes to even, as the codes do.
    small = (size * 2.0).round()
    middle = size.round() + 2.0
    large = (size * 0.5).round() + 4.0
    index = torch.where(size < 2.0, small, torch.where(size < 4.0, middle, large))
    nibbles = index.nan_to_num_(0.0).to(torch.uint8)
    return nibbles | (torch.signbit(x).to(torch.uint8) << 3)


@cache
def e2m1_pairs() -> Tensor:
    """[256, 2] float32: the two values in a byte."""
    magnitudes = torch.tensor(_E2M1_VALUES)
    values = torch.cat([magnitudes, -magnitudes])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], -1)


def _padded(x: Tensor, block: int) -> Tensor:
    short = -x.shape[-1] % block
    return torch.nn.functional.pad(x, (0, short)) if short else x


def _blocks(x: Tensor, size: int) -> Tensor:
    """[..., d] -> [..., d / size, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


def _bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
