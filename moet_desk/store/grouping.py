"""From stored tensors to logical ones: a weight with its scales is one tensor.

Owns which tensors belong together and what each layout is recognised by: names, types and shapes,
and for packed whole numbers the config, as their shapes do not say how many bits they have. What is
not recognised is UNKNOWN, never guessed. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from moet_desk.store.headers import damaged
from moet_desk.store.quantization import IntGroups, Quantization
from moet_desk.store.stored_tensors import (
    FP8_BLOCK,
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    Format,
    RawTensor,
    TensorInfo,
)

_SCALES = (".weight_scale_inv", ".weight_scale", ".scale")
# a layout that needs more of these than it is known to have is UNKNOWN instead of wrong
_EXTRAS = (
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_shape",
    ".pre_quant_scale",
)
# Scales of activations and of the KV cache. What is computed here is not rounded to FP8 or FP4
# between two products, so nothing is to be scaled for it.
_ACTIVATION_SCALES = (".input_scale", ".input_global_scale", ".activation_scale")
_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".output_scale")

_BYTE_CODES = ("U8", "I8")
_SCALED = ("U8", "I8", "I32", "F8_E4M3")  # dtypes of weights that mean nothing without a scale
_FLOATS = ("F32", "BF16", "F16")

_PLAIN = {"F64": Format.F64, "F32": Format.F32, "F16": Format.F16, "BF16": Format.BF16}
_INTEGERS = ("BOOL", "U16", "I16", "U32", "I32", "U64", "I64", "U8", "I8")


def group(raws: Mapping[str, RawTensor], quantization: Quantization) -> dict[str, TensorInfo]:
    """The logical tensors behind all stored ones of a source.

    Raises:
        MoetError: MD-SRC-02 two tensors would have one name.
    """
    tensors: dict[str, TensorInfo] = {}
    claimed = {raw.name for raw in raws.values() if _is_cache_scale(raw, quantization)}
    for raw in raws.values():
        parts = _parts(raw, raws, quantization)
        if parts is None:
            continue
        claimed.update(part.name for part in parts.raws)
        claimed.update(part.name for part in _activation_scales(parts, raws, quantization))
        if parts.name in tensors:
            other = tensors[parts.name].weight.name
            reason = f"{raw.name} and {other} would both be {parts.name}"
            raise damaged(raw.file.name, reason)
        tensors[parts.name] = parts
    for raw in raws.values():
        if raw.name not in claimed:
            if raw.name in tensors:
                raise damaged(raw.file.name, f"two tensors would both be {raw.name}")
            tensors[raw.name] = _plain(raw.name, raw)
    return tensors


def _is_cache_scale(raw: RawTensor, quantization: Quantization) -> bool:
    is_float = raw.dtype in _FLOATS
    return bool(quantization.method) and is_float and raw.name.endswith(_CACHE_SCALES)


def _activation_scales(
    info: TensorInfo, raws: Mapping[str, RawTensor], quantization: Quantization
) -> Iterator[RawTensor]:
    """Scales beside a weight that are left out."""
    if quantization.method or info.weight.dtype in _SCALED:
        for suffix in _ACTIVATION_SCALES:
            raw = raws.get(info.name + suffix)
            if raw is not None and raw.dtype in _FLOATS:
                yield raw


def _parts(
    raw: RawTensor, raws: Mapping[str, RawTensor], quantization: Quantization
) -> TensorInfo | None:
    """The logical tensor whose weight `raw` is, or None when it stands alone or is a companion."""
    if raw.name.endswith("_blocks"):
        base = raw.name.removesuffix("_blocks")
        scale = raws.get(base + "_scales")
        return None if scale is None else _scaled(base, raw, scale, (), quantization)
    for suffix in (".weight_packed", ".weight"):
        if raw.name.endswith(suffix):
            base = raw.name.removesuffix(suffix)
            # ".scale" is a usual name for a parameter of its own; beside byte codes it is a scale
            usual = _SCALES if raw.dtype in _SCALED else _SCALES[:-1]
            scales = tuple(raws[base + end] for end in usual if base + end in raws)
            extras = tuple(raws[base + end] for end in _EXTRAS if base + end in raws)
            if not scales and not extras:
                return _plain(base, raw)
            if len(scales) != 1:
                return _unknown(base, raw, *scales, *extras)
            return _scaled(base, raw, scales[0], extras, quantization)
    return None


def _plain(name: str, weight: RawTensor) -> TensorInfo:
    kind = Format.INTEGER if weight.dtype in _INTEGERS else Format.UNKNOWN
    return TensorInfo(name, weight.shape, _PLAIN.get(weight.dtype, kind), weight)


def _unknown(name: str, weight: RawTensor, *others: RawTensor) -> TensorInfo:
    return TensorInfo(name, weight.shape, Format.UNKNOWN, weight, None, others)


def _scaled(
    name: str,
    weight: RawTensor,
    scale: RawTensor,
    extras: tuple[RawTensor, ...],
    quantization: Quantization,
) -> TensorInfo:
    """A weight with one tensor of scales and what else lies beside it."""
    found = (
        _mxfp4(weight, scale)
        or _nvfp4(weight, scale, extras)
        or _fp8(weight, scale)
        or _whole_numbers(weight, scale, extras, quantization.ints)
    )
    if found is None:
        return _unknown(name, weight, scale, *extras)
    form, shape, wanted = found
    if tuple(_suffix(raw) for raw in extras) != wanted:
        return _unknown(name, weight, scale, *extras)
    return TensorInfo(name, shape, form, weight, scale, extras)


# -- layouts: the format, the logical shape, and the suffixes of the extras it must have -------

_Found = tuple[Format, tuple[int, ...], tuple[str, ...]]


def _mxfp4(weight: RawTensor, scale: RawTensor) -> _Found | None:
    """Codes, two per byte: [o, i/2], or gpt-oss [E, o, i/32, 16]."""
    if weight.dtype not in _BYTE_CODES or scale.dtype not in ("U8", "F8_E8M0"):
        return None
    codes, scales, half = weight.shape, scale.shape, MXFP4_BLOCK // 2
    is_split = len(codes) == len(scales) + 1 and codes == (*scales, half)
    is_flat = len(scales) >= 2 and codes == (*scales[:-1], scales[-1] * half)
    if is_split or is_flat:
        return Format.MXFP4, (*scales[:-1], scales[-1] * MXFP4_BLOCK), ()
    return None


def _nvfp4(weight: RawTensor, scale: RawTensor, extras: tuple[RawTensor, ...]) -> _Found | None:
    if weight.dtype != "U8" or scale.dtype != "F8_E4M3" or len(scale.shape) != 2:
        return None
    rows, blocks = scale.shape
    if weight.shape != (rows, blocks * NVFP4_BLOCK // 2) or _suffix(scale) != "weight_scale":
        return None
    if any(raw.dtype != "F32" or raw.shape not in ((), (1,)) for raw in extras):
        return None
    is_packed = _suffix(weight) == "weight_packed"
    factor = "weight_global_scale" if is_packed else "weight_scale_2"
    return Format.NVFP4, (rows, blocks * NVFP4_BLOCK), (factor,)


def _fp8(weight: RawTensor, scale: RawTensor) -> _Found | None:
    if weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        return None
    blocks = tuple(-(-size // FP8_BLOCK) for size in weight.shape)
    if scale.shape == blocks and scale.dtype in (*_FLOATS, "F8_E8M0"):
        return Format.FP8, weight.shape, ()
    if scale.dtype in _FLOATS and _is_per_row(scale, weight.shape[0]):
        return Format.FP8_ROWS, weight.shape, ()
    return None


def _whole_numbers(
    weight: RawTensor,
    scale: RawTensor,
    extras: tuple[RawTensor, ...],
    ints: frozenset[IntGroups],
) -> _Found | None:
    if len(weight.shape) != 2 or scale.dtype not in _FLOATS or _suffix(scale) != "weight_scale":
        return None
    bits_of = {8: Format.INT8}
    is_packed = weight.dtype == "I32" and _suffix(weight) == "weight_packed"
    if is_packed:
        bits_of[4] = Format.INT4
    elif weight.dtype != "I8":
        return None
    rows, words = weight.shape
    found: set[_Found] = set()
    for form in ints:
        width = words * (weight.n_bytes // max(1, prod(weight.shape))) * 8 // form.bits
        if form.bits not in bits_of or not _fits(scale, rows, width, form.group):
            continue
        wanted = _packed_extras(form, rows, scale) if is_packed else {}
        if (form.zero_points and not is_packed) or [*map(_suffix, extras)] != [*wanted]:
            continue
        if all((raw.dtype, raw.shape) in wanted[_suffix(raw)] for raw in extras):
            found.add((bits_of[form.bits], (rows, width), tuple(wanted)))
    return found.pop() if len(found) == 1 else None


def _packed_extras(
    form: IntGroups, rows: int, scale: RawTensor
) -> dict[str, tuple[tuple[str, tuple[int, ...]], ...]]:
    """What lies beside packed whole numbers, in the order of `_EXTRAS`: its dtypes and shapes."""
    extras: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {}
    if form.zero_points:  # packed down the columns
        extras["weight_zero_point"] = (("I32", (-(-rows * form.bits // 32), *scale.shape[1:])),)
    extras["weight_shape"] = (("I64", (2,)), ("I32", (2,)))
    return extras


def _fits(scale: RawTensor, rows: int, width: int, group_size: int | None) -> bool:
    if group_size is None:
        return _is_per_row(scale, rows)
    return width % group_size == 0 and scale.shape == (rows, width // group_size)


def _is_per_row(scale: RawTensor, rows: int) -> bool:
    return scale.shape in ((), (1,), (rows,), (rows, 1))


def _suffix(raw: RawTensor) -> str:
    return raw.name.rpartition(".")[2]
