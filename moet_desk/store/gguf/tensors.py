"""From the tensors of a GGUF file to the logical tensors that a family names.

Owns renaming, slicing of merged experts, and undoing what converters change. An expert is a slice
of the file in its own block format; a tensor that is no routed expert is its bytes in the file if
they are plain numbers, else it is made from them, tile by tile, whenever it is asked for. Not bound
to a thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from moet_desk.errors import MoetError
from moet_desk.store.gguf.archs import Arch, Change
from moet_desk.store.gguf.blocks import BLOCK_SIZES, INTEGERS, MXFP4, dequantized
from moet_desk.store.gguf.delta import DeltaHeads
from moet_desk.store.headers import damaged
from moet_desk.store.stored_tensors import (
    DTYPES,
    Format,
    MadeTensor,
    RawTensor,
    RowsOf,
    TensorInfo,
    WeightFile,
)

_TILE_WEIGHTS = 1 << 22
_BLOCK_TENSOR = re.compile(r"blk\.(\d{1,6})\.(.+)")
_PLAIN_FORMATS = {"F64": Format.F64, "F32": Format.F32, "F16": Format.F16, "BF16": Format.BF16}
_MADE_DTYPE = "BF16"  # of dense tensors that were quantised: what models are published in


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the fields say and tensors are compared with.

    Attributes:
        queries, keys: heads that the rows of these projections are.
        experts: matrices in a stack.
        delta: heads of DeltaNet layers.
    """

    queries: int
    keys: int
    experts: int
    delta: DeltaHeads = field(default_factory=DeltaHeads)


def logical_tensors(raws: Sequence[RawTensor], arch: Arch, sizes: Sizes) -> dict[str, TensorInfo]:
    """The model's tensors by the names of its family.

    Args:
        raws: the stored tensors of all files.
        arch: which name means what.
        sizes: of stacks and heads.

    Raises:
        MoetError: MD-SRC-02 two tensors would have one name, or one has an impossible shape.
    """
    tensors: dict[str, TensorInfo] = {}
    for info in _named(raws, arch, sizes):
        if info.name in tensors:
            reason = f"two of its tensors would both be {info.name}"
            raise damaged(info.weight.file.name, reason)
        tensors[info.name] = info
    return tensors


def raw_tensor(
    home: WeightFile, name: str, dtype: str, shape: tuple[int, ...], at: int
) -> RawTensor:
    """A tensor at byte `at` of a mapped file."""
    per_block, block_bytes = BLOCK_SIZES[dtype]
    n_bytes = prod(shape) // per_block * block_bytes
    return RawTensor(name, dtype, shape, home.path, at, n_bytes, home)


# -- names -------------------------------------------------------------------------------------


def _named(raws: Sequence[RawTensor], arch: Arch, sizes: Sizes) -> Iterator[TensorInfo]:
    split: dict[str, dict[Change, RawTensor]] = {}
    whole = set()
    for raw in raws:
        found = _target(raw.name, arch)
        if found is None:
            yield _stored(raw.name, raw)  # the plan check refuses it by this name
            continue
        target, change = found
        if "{expert}" in target:
            yield from _experts(raw, target, sizes.experts)
        elif change in _HALVES:
            split.setdefault(target, {})[change] = raw
        else:
            whole.add(target)
            yield _dense(target, raw, change, sizes)
    for target, parts in split.items():
        if target not in whole:  # some forks' files hold both forms
            yield _joined(target, parts, sizes)


def _target(name: str, arch: Arch) -> tuple[str, Change] | None:
    """The logical name of a stored one, `{expert}` in it for merged experts."""
    match = _BLOCK_TENSOR.fullmatch(name)
    table, rest = (arch.layer, match.group(2)) if match else (arch.top, name)
    base, _, suffix = rest.rpartition(".")
    key, ending = (
        (rest, "") if rest in table else (base, "" if suffix == "weight" else f".{suffix}")
    )
    if key not in table or (key == base and suffix not in ("weight", "bias")):
        return None
    prefix = f"model.layers.{match.group(1)}." if match else ""
    target = "|".join(f"{prefix}{name}{ending}" for name in table[key].split("|"))
    return target, arch.changes.get(key, Change.NONE)


def _stored(name: str, raw: RawTensor) -> TensorInfo:
    if raw.dtype in INTEGERS:
        return TensorInfo(name, raw.shape, Format.INTEGER, raw)
    if raw.dtype == MXFP4:
        return TensorInfo(name, raw.shape, Format.MXFP4, raw)
    return TensorInfo(name, raw.shape, _PLAIN_FORMATS.get(raw.dtype, Format.GGUF), raw)


def _experts(raw: RawTensor, targets: str, n_experts: int) -> Iterator[TensorInfo]:
    """The matrices of merged experts; a target "a|b" cuts each into halves of rows."""
    names = targets.split("|")
    if len(raw.shape) != 3 or raw.shape[0] != n_experts or raw.shape[1] % len(names):
        words = f"{raw.name} is {list(raw.shape)}, not the matrices of {n_experts} experts"
        raise damaged(raw.file.name, words)
    _, n_rows, width = raw.shape
    shape = (n_rows // len(names), width)
    at = raw.start
    for expert in range(n_experts):
        for name in names:
            logical = name.format(expert=expert)
            part = raw_tensor(raw.home, f"{logical}.weight", raw.dtype, shape, at)
            at += part.n_bytes
            yield _stored(logical, part)


# -- dense tensors -----------------------------------------------------------------------------


def _dense(target: str, raw: RawTensor, change: Change, sizes: Sizes) -> TensorInfo:
    name = target if target.endswith("bias") else f"{target}.weight"
    if raw.dtype in INTEGERS or not raw.shape:
        return _stored(target, raw)
    if change in (Change.QUERY_ROWS, Change.KEY_ROWS):
        n_heads = sizes.queries if change is Change.QUERY_ROWS else sizes.keys
        order = _halves_order(raw, n_heads)
        return _made(target, name, raw.shape, (raw,), lambda rows: float_rows(raw, order[rows]))
    if change in _DELTA_CHANGES:
        return _delta(target, name, raw, change, sizes.delta)
    if change is Change.ROW and len(raw.shape) == 1:
        shape = (1, *raw.shape)
        return _made(target, name, shape, (raw,), lambda _: float_rows(raw, slice(None))[None])
    if raw.dtype in _PLAIN_FORMATS:
        kept = RawTensor(name, raw.dtype, raw.shape, raw.file, raw.start, raw.n_bytes, raw.home)
        return _stored(target, kept)
    return _made(target, name, raw.shape, (raw,), lambda rows: float_rows(raw, _slice(rows)))


def _halves_order(raw: RawTensor, n_heads: int) -> Tensor:
    """Which stored row each row is: converters put rows i and i + d/2 of a head side by side."""
    n_rows = raw.shape[0]
    if n_heads < 1 or n_rows % (2 * n_heads):
        raise damaged(raw.file.name, f"{raw.name} is {list(raw.shape)}, not {n_heads} heads")
    return torch.arange(n_rows).view(n_heads, -1, 2).transpose(1, 2).reshape(-1)


# -- gated DeltaNet ----------------------------------------------------------------------------


def _delta(target: str, name: str, raw: RawTensor, change: Change, heads: DeltaHeads) -> TensorInfo:
    """A tensor of a model with such layers, with what its converter did to it undone."""
    columns = change is Change.VALUES_COLUMNS
    order = None if change in _IN_PLACE else _value_order(raw, change, heads)

    def rows_of(rows: range) -> Tensor:
        values = float_rows(raw, _slice(rows) if order is None or columns else order[rows])
        if change is Change.NORM:
            return values - 1.0
        if change in (Change.DECAY, Change.VALUES_DECAY):
            return torch.log(-values)
        if change in (Change.CONV, Change.VALUES_CONV):
            return values[:, None]
        return values[:, order] if columns else values

    shape = raw.shape
    if change in (Change.CONV, Change.VALUES_CONV):
        if len(shape) != 2:
            raise damaged(raw.file.name, f"{raw.name} is {list(shape)}, not a kernel per channel")
        shape = (shape[0], 1, shape[1])
    # of sums and logarithms a narrower type would lose what was stored
    dtype = "F32" if change in (Change.NORM, Change.DECAY, Change.VALUES_DECAY) else None
    return _made(target, name, shape, (raw,), rows_of, dtype=dtype)


def _value_order(raw: RawTensor, change: Change, heads: DeltaHeads) -> Tensor:
    columns = change is Change.VALUES_COLUMNS
    behind = 0
    if change in (Change.VALUES_BEHIND, Change.VALUES_CONV):
        behind = 2 * heads.keys * heads.key_dim
    order = heads.value_rows(raw.shape[-1 if columns else 0], behind=behind)
    if order is None or (columns and len(raw.shape) != 2):
        words = f"{raw.name} is {list(raw.shape)}, not {heads.values} heads of values"
        raise damaged(raw.file.name, words)
    return order


def _fused(target: str, product: RawTensor, gates: RawTensor, sizes: Sizes) -> TensorInfo:
    """in_proj_qkvz from queries, keys and values, and gates, of all heads each."""
    heads = sizes.delta
    n_first, n_gates = heads.channels, heads.values * heads.value_dim
    fits = product.shape[1:] == gates.shape[1:] and len(product.shape) == 2
    if not heads.keys or not fits or (product.shape[0], gates.shape[0]) != (n_first, n_gates):
        raise _no_pair(product, gates)
    order = heads.fused_rows()

    def rows_of(rows: range) -> Tensor:
        asked = order[_slice(rows)]
        is_gate = asked >= n_first
        made = torch.empty(len(asked), product.shape[1])
        made[~is_gate] = float_rows(product, asked[~is_gate])
        made[is_gate] = float_rows(gates, asked[is_gate] - n_first)
        return made

    shape = (n_first + n_gates, product.shape[1])
    return _made(target, f"{target}.weight", shape, (product, gates), rows_of)


_IN_PLACE = (Change.NORM, Change.DECAY, Change.CONV)
_DELTA_CHANGES = frozenset(
    (
        *_IN_PLACE, Change.VALUES, Change.VALUES_DECAY, Change.VALUES_BEHIND, Change.VALUES_CONV,
        Change.VALUES_COLUMNS,
    )
)  # fmt: skip


# -- halves ------------------------------------------------------------------------------------


def _joined(target: str, parts: Mapping[Change, RawTensor], sizes: Sizes) -> TensorInfo:
    """One tensor from its halves."""
    for first, second, join in _JOINS:
        if first in parts and second in parts:
            return join(target, parts[first], parts[second], sizes)
    raw = next(iter(parts.values()))
    raise damaged(raw.file.name, f"{raw.name} is there without its other half")


def _no_pair(one: RawTensor, other: RawTensor) -> MoetError:
    words = f"{one.name} {list(one.shape)} and {other.name} {list(other.shape)}"
    return damaged(one.file.name, f"{words} do not fit together")


def _joined_biases(target: str, gate: RawTensor, up: RawTensor, _: Sizes) -> TensorInfo:
    """Biases of all experts, both [E, I], as [E, 2I]: gate, up, gate, ..."""
    if len(gate.shape) != 2 or gate.shape != up.shape:
        raise _no_pair(gate, up)

    def rows_of(rows: range) -> Tensor:
        pair = [float_rows(raw, _slice(rows)) for raw in (gate, up)]
        return torch.stack(pair, -1).flatten(1)

    shape = (gate.shape[0], 2 * gate.shape[1])
    return _made(target, target, shape, (gate, up), rows_of)


def _joined_up(target: str, keys: RawTensor, values: RawTensor, _: Sizes) -> TensorInfo:
    """kv_b_proj from its halves: keys [n, r, d], transposed by the converter, values [n, v, r]."""
    shapes = (keys.shape, values.shape)
    if any(len(shape) != 3 for shape in shapes) or keys.shape[:2] != values.shape[::2]:
        raise _no_pair(keys, values)
    n_heads, rank, key_dim = keys.shape
    head_rows = key_dim + values.shape[1]

    def rows_of(rows: range) -> Tensor:
        first, last = rows.start // head_rows, -(-rows.stop // head_rows)
        both = []
        for head in range(first, max(first + 1, last)):
            both.append(float_rows(keys, slice(head * rank, (head + 1) * rank)).T)
            dim = values.shape[1]
            both.append(float_rows(values, slice(head * dim, (head + 1) * dim)))
        skipped = first * head_rows
        return torch.cat(both)[rows.start - skipped : rows.stop - skipped : rows.step]

    shape = (n_heads * head_rows, rank)
    return _made(target, f"{target}.weight", shape, (keys, values), rows_of)


_Join = Callable[[str, RawTensor, RawTensor, Sizes], TensorInfo]
_JOINS: Sequence[tuple[Change, Change, _Join]] = (
    (Change.KEY_UP, Change.VALUE_UP, _joined_up),
    (Change.GATE_BIAS, Change.UP_BIAS, _joined_biases),
    (Change.IN, Change.GATES, _fused),
)
_HALVES = frozenset(change for *pair, _ in _JOINS for change in pair)


def _made(
    target: str,
    name: str,
    shape: tuple[int, ...],
    parents: tuple[RawTensor, ...],
    rows_of: RowsOf,
    *,
    dtype: str | None = None,
) -> TensorInfo:
    """A tensor in `dtype`: by default the plain one that all parents have, else bfloat16."""
    dtypes = {parent.dtype for parent in parents}
    is_plain = len(dtypes) == 1 and dtypes <= set(_PLAIN_FORMATS)
    dtype = dtype or (dtypes.pop() if is_plain else _MADE_DTYPE)
    first = parents[0]
    n_bytes = prod(shape) * DTYPES[dtype].itemsize
    raw = MadeTensor(
        name, dtype, shape, first.file, first.start, n_bytes, first.home, parents, rows_of
    )
    return TensorInfo(target, shape, _PLAIN_FORMATS[dtype], raw)


def float_rows(raw: RawTensor, rows: slice | Tensor) -> Tensor:
    """Rows of a stored tensor as float32, all dimensions but the last taken as rows.

    A vector has one row per item when its numbers are plain.
    """
    if raw.dtype in DTYPES:
        values = raw.tensor()
        return (values.flatten(0, -2) if values.dim() > 1 else values)[rows].to(torch.float32)
    blocks = raw.bytes().view(prod(raw.shape[:-1]), -1)
    if len(raw.shape) == 1:
        return dequantized(blocks, raw.dtype)[0][rows]
    return dequantized(blocks[rows], raw.dtype)


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop, rows.step)
