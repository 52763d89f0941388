"""What a config says about how its weights are quantised, read strictly.

Owns which methods and options are known. One that could change the maths and is not known is
refused by name, not passed over. Which tensors are quantised is not taken from here: a tensor with
scales is, one without is not, so lists of exceptions need no matching. Pure: no torch, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moet_desk.errors import MoetError, fail

_KEY = "quantization_config"
HF_QUANT_FILE = "hf_quant_config.json"
"""Where modelopt says it, for models whose config.json says nothing."""

_NVFP4_COLUMNS = 16
_MXFP4_COLUMNS = 32
_FP8_BLOCK = [128, 128]
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class IntGroups:
    """Whole numbers of `bits` bits, with a scale per `group` columns (None: per row or for all).

    Attributes:
        zero_points: whether each scale has a number that stands for zero.
    """

    bits: int
    group: int | None
    zero_points: bool = False


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the tensors do not say themselves.

    Attributes:
        method: quant_method of the config, "" if it has none.
        ints: the kinds of whole numbers that weights are stored as.
    """

    method: str = ""
    ints: frozenset[IntGroups] = frozenset()


PLAIN = Quantization()


def read_quantization(config: Mapping[str, Any], path: str) -> Quantization:
    """The quantisation of a model; models with parts beside the text model have it at either level.

    Raises:
        MoetError: MD-SRC-09 a method, key or value that is not known here.
    """
    found = PLAIN
    for level in (config, config.get("text_config")):
        table = level.get(_KEY) if isinstance(level, Mapping) else None
        if table is not None:
            own = _Reader(path).read(table)
            if found.method not in ("", own.method):
                raise _Reader(path).wrong(f"two methods, {found.method} and {own.method}")
            found = Quantization(own.method, found.ints | own.ints)
    return found


def says_quantization(config: Mapping[str, Any]) -> bool:
    """Whether a config has a table for `read_quantization`."""
    levels = (config, config.get("text_config"))
    return any(isinstance(level, Mapping) and level.get(_KEY) is not None for level in levels)


def read_hf_quant(document: Mapping[str, Any], path: str) -> Quantization:
    """The quantisation that modelopt's own file `HF_QUANT_FILE` states.

    Raises:
        MoetError: MD-SRC-09 a key or value that is not known here.
    """
    reader = _Reader(path)
    for key, value in document.items():
        if key not in ("producer", "quantization"):
            raise reader.wrong(f"the key {_shown(key)} = {_shown(value)}")
    table = document.get("quantization")
    if not isinstance(table, Mapping) or table.get("quant_method", "modelopt") != "modelopt":
        raise reader.wrong(f"quantization = {_shown(table)}")
    return reader.read({**table, "quant_method": "modelopt"})


Check = Callable[[Any], bool]


def _any(value: Any) -> bool:
    """For keys that say where, when or how well, and for activations: see `_ACTIVATIONS`."""
    return True


def _is_empty(value: Any) -> bool:
    return value is None or value in ({}, [], {"config_groups": {}}, {"format": "dense"})


def _one_of(*values: Any) -> Check:
    return lambda value: any(
        value == known and isinstance(value, bool) == isinstance(known, bool) for known in values
    )


_WHERE: Mapping[str, Check] = dict.fromkeys(
    "ignore exclude_modules modules_to_not_convert modules_to_convert ignored_layers"
    " targets".split(),
    _any,
)
"""Which tensors: their scales say that."""

_ACTIVATIONS: Mapping[str, Check] = dict.fromkeys(
    "activation_scheme input_activations output_activations kv_cache_scheme"
    " kv_cache_quant_algo".split(),
    _any,
)
"""Rounding of activations and of the KV cache, which saves time or memory and is not done here."""

_NOTES: Mapping[str, Check] = dict.fromkeys(
    "quant_method version producer global_compression_ratio observer observer_kwargs"
    " run_compressed".split(),
    _any,
)

_FP8: Mapping[str, Check] = {
    "fmt": _one_of(None, "e4m3", "float8_e4m3fn"),
    "scale_fmt": _one_of(None, "ue8m0", "float"),
    "weight_block_size": _one_of(None, _FP8_BLOCK),
    "dequantize": _one_of(None, False),
    "expert_dtype": _one_of(None, "fp8", "fp4"),
}
_MXFP4: Mapping[str, Check] = {"dequantize": _one_of(None, False)}
_MODELOPT_ALGOS = _one_of(None, "FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
_MODELOPT: Mapping[str, Check] = {
    "quant_algo": _MODELOPT_ALGOS,
    "group_size": _one_of(None, _NVFP4_COLUMNS),
    "has_zero_point": _one_of(None, False),
    "pre_quant_scale": _one_of(None, False),
}
_FORMATS = _one_of(
    None,
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
_COMPRESSED: Mapping[str, Check] = {
    "format": _FORMATS,
    "quantization_status": _one_of(None, "compressed", "frozen"),
    "sparsity_config": _is_empty,
    "transform_config": _is_empty,
    "moe_sparsity_config": _is_empty,
}
_METHODS: Mapping[str, Mapping[str, Check]] = {
    "fp8": _FP8,
    "mxfp4": _MXFP4,
    "modelopt": _MODELOPT,
    "modelopt_fp4": _MODELOPT,
    "modelopt_fp8": _MODELOPT,
    "modelopt_mixed": _MODELOPT,
    "compressed-tensors": _COMPRESSED,
}
_WEIGHTS: Mapping[str, Check] = {
    "symmetric": _one_of(None, True, False),
    "dynamic": _one_of(None, False),
    "actorder": _one_of(None, False, "weight", "static"),
    "zp_dtype": _any,  # of zero points before they were packed
    "block_structure": _one_of(None, _FP8_BLOCK, "128x128"),
}


class _Reader:
    """Checks one table; raises MD-SRC-09 with the path and what is not known."""

    def __init__(self, path: str) -> None:
        self._path = path

    def wrong(self, what: str) -> MoetError:
        return fail("MD-SRC-09", path=self._path, what=what)

    def read(self, table: Any) -> Quantization:
        if not isinstance(table, Mapping):
            raise self.wrong(_shown(table))
        method = table.get("quant_method")
        known = _METHODS.get(method) if isinstance(method, str) else None
        if known is None or not isinstance(method, str):
            raise self.wrong(f"the method {_shown(method)}")
        nested = ("config_groups", "quantized_layers") if known is not _FP8 else ()
        self._check(table, {**_WHERE, **_ACTIVATIONS, **_NOTES, **known}, nested)
        self._check_layers(table.get("quantized_layers"))
        return Quantization(method, frozenset(self._ints(table.get("config_groups"))))

    def _check(
        self, table: Mapping[str, Any], known: Mapping[str, Check], nested: tuple[str, ...] = ()
    ) -> None:
        for key, value in table.items():
            if key not in known and key not in nested:
                raise self.wrong(f"the key {_shown(key)} = {_shown(value)}")
            if key in known and not known[key](value):
                raise self.wrong(f"{key} = {_shown(value)}")

    def _check_layers(self, layers: Any) -> None:
        """modelopt's table of layers that differ."""
        if layers is None:
            return
        for name, layer in self._items(layers, "quantized_layers"):
            self._check(self._table(layer, name), {**_MODELOPT, **_ACTIVATIONS})

    def _ints(self, groups: Any) -> Iterator[IntGroups]:
        """Check each group of layers; yields those that are whole numbers."""
        if groups is None:
            return
        known = {**_WHERE, **_ACTIVATIONS, **_NOTES, "format": _FORMATS}
        for name, value in self._items(groups, "config_groups"):
            one = self._table(value, name)
            self._check(one, known, ("weights",))
            if one.get("weights") is not None:
                found = self._weights(self._table(one["weights"], f"weights of {name}"))
                if found is not None:
                    yield found

    def _weights(self, weights: Mapping[str, Any]) -> IntGroups | None:
        """One description of weights; None if its tensors say all that is needed."""
        sizes = ("num_bits", "type", "strategy", "group_size", "scale_dtype")
        self._check(weights, {**_NOTES, **_WEIGHTS}, sizes)
        bits, kind = weights.get("num_bits"), weights.get("type")
        strategy, size = weights.get("strategy"), weights.get("group_size")
        shown = ", ".join(
            f"{key} = {_shown(weights.get(key))}" for key in sizes if weights.get(key) is not None
        )
        if not all(type(number) is int for number in (bits, size) if number is not None):
            raise self.wrong(f"weights with {shown}")
        has_zeros = weights.get("symmetric") is False
        if has_zeros and (kind != "int" or strategy not in ("group", "channel")):
            raise self.wrong(f"symmetric = False of weights with {shown}")
        if (kind, bits) == ("float", 8) and strategy in (None, "tensor", "channel", "block"):
            return None
        if (kind, bits, size) in (
            ("float", 4, _NVFP4_COLUMNS),
            ("float", 4, _MXFP4_COLUMNS),
        ) and strategy in (None, "group", "tensor_group"):
            return None
        if kind == "int" and bits in (4, 8):
            if strategy == "group" and isinstance(size, int) and size > 0:
                return IntGroups(bits, size, has_zeros)
            if strategy in ("tensor", "channel"):
                return IntGroups(bits, None, has_zeros)
        raise self.wrong(f"weights with {shown}")

    def _items(self, value: Any, name: str) -> list[tuple[str, Any]]:
        return list(self._table(value, name).items())

    def _table(self, value: Any, name: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.wrong(f"{name} = {_shown(value)}")
        return value


def _shown(value: Any) -> str:
    """A value of a file, short enough for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
