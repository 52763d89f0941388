"""A source's tensors as a plan wants them: one matrix per expert, dense weights that engines read.

Owns cutting merged experts out of their stacks, and which quantised dense weights become bfloat16.
Nothing is copied here: parts are other views of the same files, and what is made is made when it is
read, tile by tile. Pure over an index.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from torch import Tensor

from moet_desk.store.headers import damaged
from moet_desk.store.pack_format import PackPlan
from moet_desk.store.quant_formats import decode_info
from moet_desk.store.sources import TensorIndex
from moet_desk.store.stored_tensors import (
    DTYPES,
    Format,
    MadeTensor,
    PartTensor,
    RawTensor,
    TensorInfo,
)

_FLOATS = (Format.F64, Format.F32, Format.F16, Format.BF16)
# Engines keep FP8 and floats as they are; these would have to be float32 there, so they become what
# such a model's other dense weights are published in.
_MADE = (Format.NVFP4, Format.INT4, Format.INT8)
_MADE_DTYPE = "BF16"

_Tensors = dict[str, TensorInfo]


def view_of(index: TensorIndex, plan: PackPlan) -> TensorIndex:
    """The index under the plan's names, with merged experts cut apart, and dense weights in formats
    that engines read.

    Stacks of other shapes than the plan's stay whole, and the check of the plan names what is
    missing then.

    Raises:
        MoetError: MD-SRC-02 a tensor is there twice, such as an expert alone and in a stack.
    """
    tensors = _renamed(index, plan)
    if "{expert}" in plan.gate:
        for layer in plan.moe_layers:
            _rename_layer(tensors, plan, layer)
            _cut_layer(tensors, plan, layer)
    for name in plan.dense:
        info = tensors.get(name)
        if info is not None and info.format in _MADE:
            tensors[name] = _made(info)
    return TensorIndex.of(tensors, index.files)


def _renamed(index: TensorIndex, plan: PackPlan) -> _Tensors:
    tensors: _Tensors = {}
    for name in index.names():
        info = index.info(name)
        for old, new in plan.renames:
            if name.startswith(old):
                info = _under(info, old, new)
                break
        if info.name in tensors:
            raise damaged(info.weight.file.name, f"{name} is there as {info.name} too")
        tensors[info.name] = info
    return tensors


def _under(info: TensorInfo, old: str, new: str) -> TensorInfo:
    """The tensor with another beginning of its name, and of those of its parts."""

    def moved(raw: RawTensor) -> RawTensor:
        return replace(raw, name=new + raw.name.removeprefix(old))

    return replace(
        info,
        name=new + info.name.removeprefix(old),
        weight=moved(info.weight),
        scale=None if info.scale is None else moved(info.scale),
        extras=tuple(moved(raw) for raw in info.extras),
    )


# -- merged experts ----------------------------------------------------------------------------


def _rename_layer(tensors: _Tensors, plan: PackPlan, layer: int) -> None:
    """Give the MoE part of a layer that is saved as transformers holds it its family's name."""
    own = plan.gate.partition("experts.")[0].format(layer=layer)
    held = f"model.layers.{layer}.mlp."
    if own == held or f"{held}experts.gate_up_proj" not in tensors:
        return
    for name in [name for name in tensors if name.startswith(held)]:
        info = tensors.pop(name)
        weight = replace(info.weight, name=own + info.weight.name.removeprefix(held))
        new = own + name.removeprefix(held)
        if new in tensors:
            raise damaged(weight.file.name, f"{name} is there as {new} too")
        tensors[new] = replace(info, name=new, weight=weight)


def _cut_layer(tensors: _Tensors, plan: PackPlan, layer: int) -> None:
    """Replace the stacks of one layer, gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    base = plan.gate.partition("{expert}")[0].format(layer=layer)
    names = (base + "gate_up_proj", base + "down_proj")
    if any(name not in tensors for name in names):
        return
    gate_up, down = (tensors[name] for name in names)
    turned = _is_turned(gate_up, down, plan)
    if turned is None:
        return
    inter, step = plan.inter, 2 if plan.alternating else 1
    gate_rows = slice(0, 2 * inter if plan.alternating else inter, step)
    up_rows = slice(1 if plan.alternating else inter, 2 * inter, step)
    parts = (
        (plan.gate, gate_up, gate_rows),
        (plan.up, gate_up, up_rows),
        (plan.down, down, slice(0, plan.hidden, 1)),
    )
    for name in names:
        del tensors[name]
    for expert in range(plan.n_experts):
        for template, stack, rows in parts:
            name = template.format(layer=layer, expert=expert)
            if name in tensors:
                raise damaged(stack.weight.file.name, f"{name} is there alone and in {stack.name}")
            tensors[name] = _matrix(stack, name, expert, rows, turned=turned)


def _is_turned(gate_up: TensorInfo, down: TensorInfo, plan: PackPlan) -> bool | None:
    """Whether stacks are transposed, [E, H, 2I] and [E, I, H]; None: they are no such stacks.

    One shape alone may be both, the two together cannot.
    """
    count, hidden, inter = plan.n_experts, plan.hidden, plan.inter
    shapes, formats = (gate_up.shape, down.shape), {gate_up.format, down.format}
    if shapes == ((count, 2 * inter, hidden), (count, hidden, inter)):
        return False if formats <= {*_FLOATS, Format.MXFP4} else None
    if shapes == ((count, hidden, 2 * inter), (count, inter, hidden)):
        return True if formats <= set(_FLOATS) else None
    return None


def _matrix(stack: TensorInfo, name: str, expert: int, rows: slice, *, turned: bool) -> TensorInfo:
    raw = _cut(stack.weight, f"{name}.weight", expert, rows, turned=turned)
    scale = stack.scale
    if scale is not None:
        scale = _cut(scale, f"{name}.weight_scale", expert, rows, turned=turned)
    n_rows = len(range(rows.start, rows.stop, rows.step))
    width = stack.shape[1] if turned else stack.shape[2]
    return TensorInfo(name, (n_rows, width), stack.format, raw, scale)


def _cut(raw: RawTensor, name: str, expert: int, rows: slice, *, turned: bool) -> RawTensor:
    """Some rows of one expert of a stack; where they lie apart, a view of all of that expert."""
    whole, n_bytes = raw.shape[1:], raw.n_bytes // raw.shape[0]
    start = raw.start + expert * n_bytes
    n_rows = len(range(rows.start, rows.stop, rows.step))
    if not turned and rows.step == 1:
        row_bytes = n_bytes // whole[0]
        start += rows.start * row_bytes
        shape = (n_rows, *whole[1:])
        return RawTensor(name, raw.dtype, shape, raw.file, start, n_rows * row_bytes, raw.home)
    shape = (n_rows, whole[0]) if turned else (n_rows, *whole[1:])
    return PartTensor(
        name, raw.dtype, shape, raw.file, start, n_bytes, raw.home, whole, rows, turned
    )


# -- dense weights -----------------------------------------------------------------------------


def _made(info: TensorInfo) -> TensorInfo:
    def rows_of(rows: range) -> Tensor:
        return decode_info(info, rows=slice(rows.start, rows.stop, rows.step))

    weight = info.weight
    n_bytes = prod(info.shape) * DTYPES[_MADE_DTYPE].itemsize
    made = MadeTensor(
        f"{info.name}.weight", _MADE_DTYPE, info.shape, weight.file, weight.start, n_bytes,
        weight.home, info.raws, rows_of,
    )  # fmt: skip
    return TensorInfo(info.name, info.shape, Format.BF16, made)
