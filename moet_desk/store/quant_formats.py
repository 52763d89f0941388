"""Decode stored tensors to float32, and turn an expert's matrix into FP4 nibbles and scales.

Owns the meaning of each `Format`; the quantiser itself is `kernels.reference.quant`. Works in tiles
of rows, so that a matrix costs its nibbles and one tile. Pure functions over mapped tensors; the
packer's threads call them.

Formats (models.md §3): FP8 is q * scale with one scale per 128 x 128 block, edge blocks partial, or
per row, or for the whole matrix. Whole numbers are the same with a scale per group of columns;
packed ones are stored plus 8 (int4) or 128 (int8), the first in the lowest bits of a word; zero
points, if they have them (one per scale, packed likewise down the rows), are taken off before.
NVFP4 is e2m1 times an e4m3 scale per 16 columns times one float32 for all, of which
compressed-tensors writes the inverse. MXFP4 is e2m1 with one E8M0 byte
u = 2**(u - 127) per 32 columns. A byte of either e2m1 holds element 2j in its low nibble and 2j + 1
in its high one, in all layouts of safetensors files. GGUF blocks are `gguf.blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moet_desk.errors import MoetError, fail
from moet_desk.kernels.reference.quant import (
    MAX_FINITE_SCALE,
    balance_zeros,
    fp4_values,
    nibble_values,
    quantize_fp4,
)
from moet_desk.store.gguf.blocks import dequantized, mxfp4_parts
from moet_desk.store.headers import damaged
from moet_desk.store.sources import TensorIndex
from moet_desk.store.stored_tensors import (
    FP8_BLOCK,
    MXFP4_BLOCK,
    Format,
    RawTensor,
    TensorInfo,
)

TILE_WEIGHTS = 1 << 22  # 16 MiB of float32 at a time

_FLOATS = (Format.F64, Format.F32, Format.F16, Format.BF16)


def decode(
    index: TensorIndex, name: str, *, rows: slice | None = None, expert: int | None = None
) -> Tensor:
    """The values of a logical tensor.

    Args:
        index: where the tensor is.
        name: its logical name.
        rows: which rows (of the first dimension left) to decode; a positive step is allowed.
        expert: choose one matrix of a tensor that stacks all experts, [E, N, K].

    Returns:
        A new float32 tensor: the logical shape, without the expert dimension when one was chosen.

    Raises:
        MoetError: MD-SRC-05 a format that cannot be decoded, MD-SRC-06 NaN or infinite values,
            MD-SRC-02 packed numbers of another shape than is written beside them.
    """
    return decode_info(index.info(name), rows=rows, expert=expert)


def decode_info(
    info: TensorInfo, *, rows: slice | None = None, expert: int | None = None
) -> Tensor:
    """`decode` for a tensor that is in no index."""
    values = _decode(info, rows, expert)
    if not _all_finite(values):
        raise _invalid(info.name, "weights", values)
    return values


def fp4_of(
    index: TensorIndex, name: str, *, rows: slice | None = None, expert: int | None = None
) -> tuple[Tensor, Tensor]:
    """A matrix as FP4 nibbles and scale bytes: MXFP4 kept bit for bit, all else quantised.

    Shapes:
        returns nibbles uint8 [N, K] (one per byte, 0..15) and E8M0 scales uint8 [N, K/32]

    Raises:
        MoetError: MD-SRC-05 or MD-SRC-06 as `decode`; MD-SRC-05 when K is no multiple of 32.
    """
    info = index.info(name)
    if info.format is Format.MXFP4:
        nibbles, scales = _mxfp4(info, rows, expert)
        return nibbles, scales.clone()
    n_rows, width = _matrix_shape(info, rows, expert)
    chosen = range(info.shape[-2])[rows or slice(None)]
    step = max(1, TILE_WEIGHTS // width)
    nibbles = torch.empty(n_rows, width, dtype=torch.uint8)
    scales = torch.empty(n_rows, width // MXFP4_BLOCK, dtype=torch.uint8)
    for first in range(0, n_rows, step):
        part = chosen[first : first + step]
        tile = decode(index, name, rows=slice(part.start, part.stop, part.step), expert=expert)
        nibbles[first : first + step], scales[first : first + step] = quantize_fp4(tile)
    return balance_zeros(nibbles), scales


def check_finite(index: TensorIndex, name: str) -> None:
    """Look through a whole tensor for NaN and infinite numbers, tile by tile.

    Raises:
        MoetError: MD-SRC-06 when there is one, MD-SRC-05 a format that cannot be decoded.
    """
    info = index.info(name)
    if info.format is Format.INTEGER:
        return
    if not info.shape:
        decode(index, name)
        return
    width = max(1, info.weight.n_bytes // max(1, info.shape[0]))
    step = max(1, TILE_WEIGHTS // width)
    for first in range(0, info.shape[0], step):
        decode(index, name, rows=slice(first, min(first + step, info.shape[0])))


# -- one format each ---------------------------------------------------------------------------


def _decode(info: TensorInfo, rows: slice | None, expert: int | None) -> Tensor:
    if info.format in _FLOATS:
        if rows is None and expert is None:
            return info.weight.floats()
        stored = info.weight.part(rows, expert)
        return stored.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if info.format is Format.MXFP4:
        return fp4_values(*_mxfp4(info, rows, expert))
    if info.format is Format.GGUF:
        return dequantized(_block_rows(info, rows, expert), info.weight.dtype)
    if info.format in _CODES and expert is None:
        return _scaled(info, rows)
    raise fail("MD-SRC-05", tensor=info.name, format=info.stored_as)


def _scaled(info: TensorInfo, rows: slice | None) -> Tensor:
    """Codes times the scale of their block, for every format with a grid of scales."""
    n_rows, width = info.shape
    values = _CODES[info.format](info, rows)  # [R, K] f32
    stored = _scale(info)
    if stored.shape[:1] == (n_rows,):
        columns = _finite_scales(info, stored.part(rows, None))
    else:
        scale = _finite_scales(info, stored.tensor())  # one row of it for many of the weight
        tall = FP8_BLOCK if info.format is Format.FP8 else max(1, n_rows)
        columns = scale[torch.arange(n_rows)[rows or slice(None)] // tall]
    if columns.shape[1] > 1:
        wide = FP8_BLOCK if info.format is Format.FP8 else width // columns.shape[1]
        columns = columns.repeat_interleave(wide, dim=1)[:, :width]  # [R, K]
    return values.mul_(columns)


def _finite_scales(info: TensorInfo, stored: Tensor) -> Tensor:
    """Stored scales as float32 [R', K'], each for the same number of rows and columns."""
    if _scale(info).dtype == "F8_E8M0":
        return e8m0(_checked_e8m0(info.name, stored))
    values = stored.to(torch.float32)
    if values.dim() < 2:
        values = values.reshape(-1, 1)
    if info.format is Format.NVFP4:
        values = _for_all(values, info.extras[0])
    if not _all_finite(values):
        raise _invalid(info.name, "scales", values)
    return values


def _for_all(scales: Tensor, raw: RawTensor) -> Tensor:
    """NVFP4's scales of blocks with the one for all of them; NaN if that one cannot be."""
    value = raw.tensor().reshape(())
    if not torch.isfinite(value):
        return torch.full_like(scales, torch.nan)
    return scales / value if raw.name.endswith("_global_scale") else scales * value


# -- codes of rows as float32 [R, K] -----------------------------------------------------------


def _float_codes(info: TensorInfo, rows: slice | None) -> Tensor:
    return info.weight.part(rows, None).to(torch.float32)


def _e2m1_codes(info: TensorInfo, rows: slice | None) -> Tensor:
    return torch.from_numpy(nibble_values()[_nibbles(info.weight.part(rows, None)).numpy()])


def _whole_codes(info: TensorInfo, rows: slice | None) -> Tensor:
    if info.weight.dtype == "I8":
        return _float_codes(info, rows)
    *zero_points, written = info.extras
    shape = tuple(written.tensor().tolist())
    if shape != info.shape:
        reason = (
            f"{info.name} holds {list(info.shape)} numbers, its weight_shape says {list(shape)}"
        )
        raise damaged(info.weight.file.name, reason)
    codes = _unpacked(info.weight.part(rows, None), info.format)
    for packed in zero_points:
        down = _unpacked(packed.tensor().T, info.format)[:, : info.shape[0]]
        zeros = down.T if rows is None else down.T[rows]
        codes -= zeros.repeat_interleave(info.shape[1] // zeros.shape[1], dim=1)
    return codes


def _unpacked(words: Tensor, form: Format) -> Tensor:
    """Whole numbers with their sign, as float32 [R, K], of int32 [R, W] that hold them."""
    codes = words.contiguous().view(torch.uint8)  # little-endian
    if form is Format.INT4:
        return _nibbles(codes).to(torch.float32).sub_(8)
    return codes.to(torch.float32).sub_(128)


_CODES: Mapping[Format, Callable[[TensorInfo, slice | None], Tensor]] = {
    Format.FP8: _float_codes,
    Format.FP8_ROWS: _float_codes,
    Format.NVFP4: _e2m1_codes,
    Format.INT4: _whole_codes,
    Format.INT8: _whole_codes,
}


# -- MXFP4 and GGUF ----------------------------------------------------------------------------


def _mxfp4(info: TensorInfo, rows: slice | None, expert: int | None) -> tuple[Tensor, Tensor]:
    """Nibbles uint8 [..., K] and scale bytes uint8 [..., K/32]."""
    if info.scale is None:  # GGUF blocks hold their scales
        nibbles, scales = mxfp4_parts(_block_rows(info, rows, expert))
        return nibbles, _checked_e8m0(info.name, scales)
    half = (*info.shape[:-1], info.shape[-1] // 2)
    # the three layouts differ in shape and dtype only
    codes = info.weight.tensor().view(torch.uint8).reshape(half)
    stored = info.scale.tensor().reshape(*info.shape[:-1], info.shape[-1] // MXFP4_BLOCK)
    scales = _checked_e8m0(info.name, _select(stored, rows, expert))
    return _nibbles(_select(codes, rows, expert)), scales


def _block_rows(info: TensorInfo, rows: slice | None, expert: int | None) -> Tensor:
    """GGUF blocks of rows of a matrix, uint8 [N, bytes of a row], a view of the file."""
    if expert is not None or len(info.shape) != 2:
        raise fail("MD-SRC-05", tensor=info.name, format=info.stored_as)
    return _select(info.weight.bytes().view(info.shape[0], -1), rows, None)


def _nibbles(codes: Tensor) -> Tensor:
    """Unpack uint8 [..., K/2] to one nibble per byte, uint8 [..., K]."""
    pairs = torch.empty(*codes.shape, 2, dtype=torch.uint8)
    torch.bitwise_and(codes, 15, out=pairs[..., 0])
    torch.bitwise_right_shift(codes, 4, out=pairs[..., 1])
    return pairs.flatten(-2)


def e8m0(scales: Tensor) -> Tensor:
    """E8M0 bytes as float32, exactly: 2**(u - 127); u = 0 is the subnormal 2**-127."""
    bits = torch.where(scales == 0, 0x00400000, scales.int() << 23)
    return bits.int().view(torch.float32)


# -- parts -------------------------------------------------------------------------------------


def _select(tensor: Tensor, rows: slice | None, expert: int | None) -> Tensor:
    chosen = tensor if expert is None else tensor[expert]
    return chosen if rows is None else chosen[rows]


def _scale(info: TensorInfo) -> RawTensor:
    if info.scale is None:
        raise fail("MD-SRC-05", tensor=info.name, format=info.stored_as)
    return info.scale


def _matrix_shape(info: TensorInfo, rows: slice | None, expert: int | None) -> tuple[int, int]:
    shape = info.shape if expert is None else info.shape[1:]
    if len(shape) != 2 or shape[1] % MXFP4_BLOCK or shape[1] == 0:
        reason = f"{list(info.shape)}, not a matrix of whole blocks of {MXFP4_BLOCK} columns"
        raise fail("MD-SRC-05", tensor=info.name, format=reason)
    return len(range(shape[0])[rows or slice(None)]), shape[1]


def _all_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())


def _checked_e8m0(name: str, scales: Tensor) -> Tensor:
    if scales.numel() and int(scales.max()) > MAX_FINITE_SCALE:
        n_bad = int((scales > MAX_FINITE_SCALE).sum())
        raise fail("MD-SRC-06", tensor=name, n_bad=n_bad, part="scales")
    return scales


def _invalid(name: str, part: str, values: Tensor) -> MoetError:
    n_bad = int((~torch.isfinite(values)).sum())
    return fail("MD-SRC-06", tensor=name, n_bad=n_bad, part=part)
