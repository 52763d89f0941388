"""From source tensors to the bytes of a pack: the plan check, expert rows and the dense file.

Owns what the bytes are; writing them durably is `pack_writer`, mending them `pack_verify`. The same
source and plan give the same bytes always. No state changes after construction, so the packer's
threads share one `RowMaker`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import blake3
import torch
from torch import Tensor

from moet_desk.errors import MoetError, fail
from moet_desk.kernels.layouts import GROUP, ExpertLayout, pack_expert
from moet_desk.store.pack_format import DIGEST_BYTES, PackPlan, Plane
from moet_desk.store.plan_view import view_of
from moet_desk.store.quant_formats import TILE_WEIGHTS, check_finite, fp4_of
from moet_desk.store.row_table import ROW_FORMATS
from moet_desk.store.sources import DTYPES, Format, RawTensor, TensorIndex

_CHUNK_BYTES = 8 << 20
# pack_expert holds two 8-byte numbers per weight of [gate; up] and a nibble of all (2026-11-29)
_WORK_BYTES_PER_WEIGHT = 16
_QUANTIZE_BYTES_PER_WEIGHT = 24  # of one tile, when the source is not FP4


@dataclass(frozen=True, slots=True)
class MadeRow:
    """One expert's rows, padded to their strides, and their blake3-128 digests."""

    row: int
    base: memoryview
    fine: memoryview
    base_digest: bytes
    fine_digest: bytes

    def of(self, plane: Plane) -> memoryview:
        return self.base if plane is Plane.BASE else self.fine

    def digest(self, plane: Plane) -> bytes:
        return self.base_digest if plane is Plane.BASE else self.fine_digest


def row_digest(data: bytes | bytearray | memoryview) -> bytes:
    """blake3 of a whole padded row, cut to 128 bits."""
    return blake3.blake3(data).digest(length=DIGEST_BYTES)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch from splitting the small operations of one row over all cores.

    Its threads wait for each other by spinning: with another program on the second core a row took
    30 ms instead of 3 (2026-11-29). Whole rows are made side by side; process-wide.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class RowMaker:
    """Makes any row of a pack from its source.

    Args:
        index: the source's tensors.
        plan: which of them are experts and which are dense.

    Attributes:
        index: the tensors as the plan names them (`plan_view`).

    Raises:
        MoetError: the plan does not fit the source: MD-SRC-02 an expert is there twice, MD-SRC-03
            tensors missing, MD-SRC-04 a wrong shape, MD-SRC-05 a format that cannot be read,
            MD-SRC-08 tensors nobody knows.
    """

    def __init__(self, index: TensorIndex, plan: PackPlan) -> None:
        self.plan = plan
        if plan.hidden % GROUP or plan.inter % GROUP or not plan.n_rows:
            reason = f"experts of {plan.hidden} x {plan.inter}, not whole blocks of {GROUP}"
            raise fail("MD-SRC-05", tensor=plan.gate, format=reason)
        self.layout = ExpertLayout(plan.hidden, plan.inter)
        self.index = view_of(index, plan)
        self.kinds = _check_plan(self.index, plan)

    @property
    def source_format(self) -> str:
        """How the experts are stored, e.g. "mxfp4"; several are joined with "+"."""
        return "+".join(sorted(self.kinds))

    @property
    def left_out(self) -> dict[str, int]:
        """Beginnings of names that the plan leaves out, and how many of the tensors have each."""
        names = self.index.names()
        counts = {start: sum(n.startswith(start) for n in names) for start in self.plan.ignored}
        return {start: count for start, count in counts.items() if count}

    @property
    def is_lossless(self) -> bool:
        """Whether the fine rows reproduce the source exactly."""
        return self.kinds == {Format.MXFP4.value}

    @property
    def row_bytes(self) -> int:
        """Bytes of both rows of an expert on disk."""
        return self.layout.base_stride + self.layout.fine_stride

    @property
    def work_bytes(self) -> int:
        """Memory that making one row takes at most, the row included."""
        n_weights = 3 * self.plan.hidden * self.plan.inter
        work = n_weights * _WORK_BYTES_PER_WEIGHT + self.row_bytes
        if not self.is_lossless:
            work += min(TILE_WEIGHTS, n_weights) * _QUANTIZE_BYTES_PER_WEIGHT
        return work

    def make(self, row: int) -> MadeRow:
        """Quantise and lay out one expert.

        Raises:
            MoetError: MD-SRC-06 NaN or infinite numbers.
        """
        layer, expert = divmod(row, self.plan.n_experts)
        number = self.plan.moe_layers[layer]
        gate = self._matrix(self.plan.gate, number, expert)
        up = self._matrix(self.plan.up, number, expert)
        down = self._matrix(self.plan.down, number, expert)
        base, fine = map(_buffer, pack_expert(gate, up, down))
        self._forget(number, expert)
        return MadeRow(row, base, fine, row_digest(base), row_digest(fine))

    def _forget(self, layer: int, expert: int) -> None:
        for template in (self.plan.gate, self.plan.up, self.plan.down):
            if "{expert}" in template:  # else other rows need the same tensor
                for raw in self.index.info(template.format(layer=layer, expert=expert)).raws:
                    raw.forget()

    def _matrix(self, template: str, layer: int, expert: int) -> tuple[Tensor, Tensor]:
        name = template.format(layer=layer, expert=expert)
        return fp4_of(self.index, name, expert=None if "{expert}" in template else expert)


def _buffer(row: Tensor) -> memoryview:
    return memoryview(row.numpy())  # type: ignore[arg-type]  # numpy's stubs know no Buffer


def _check_plan(index: TensorIndex, plan: PackPlan) -> set[str]:
    """Compare plan and source; return how the experts are stored."""
    experts = dict(_expert_shapes(plan))
    wanted = {**plan.dense, **experts}
    missing = [name for name in wanted if name not in index]
    if missing:
        raise _missing(missing, len(wanted))
    for name, want in wanted.items():
        info = index.info(name)
        if info.format is Format.UNKNOWN:
            raise fail("MD-SRC-05", tensor=name, format=info.stored_as)
        if info.shape != tuple(want):
            raise fail("MD-SRC-04", tensor=name, got=list(info.shape), want=list(want))
        if plan.by_row and name.startswith(plan.by_row) and info.format not in ROW_FORMATS:
            raise fail("MD-SRC-05", tensor=name, format=info.stored_as)
    unknown = [
        name for name in index.names() if name not in wanted and not name.startswith(plan.ignored)
    ]
    if unknown:
        family = plan.model_type
        raise fail("MD-SRC-08", n_unknown=len(unknown), first=unknown[0], family=family)
    kinds = {index.info(name).kind for name in experts}
    if Format.INTEGER.value in kinds:
        name = next(name for name in experts if index.info(name).format is Format.INTEGER)
        raise fail("MD-SRC-05", tensor=name, format=index.info(name).stored_as)
    return kinds


def _expert_shapes(plan: PackPlan) -> Iterator[tuple[str, tuple[int, ...]]]:
    wide, narrow = (plan.inter, plan.hidden), (plan.hidden, plan.inter)
    for template, shape in ((plan.gate, wide), (plan.up, wide), (plan.down, narrow)):
        for layer in plan.moe_layers:
            if "{expert}" not in template:
                yield template.format(layer=layer), (plan.n_experts, *shape)
                continue
            for expert in range(plan.n_experts):
                yield template.format(layer=layer, expert=expert), shape


def _missing(names: Sequence[str], n_total: int) -> MoetError:
    return fail(
        "MD-SRC-03",
        n_missing=len(names),
        n_total=n_total,
        index="config.json",
        first=names[0],
        files="all .safetensors files of this model",
    )


# -- the dense file ----------------------------------------------------------------------------


def dense_tensors(index: TensorIndex, plan: PackPlan) -> list[RawTensor]:
    """The stored tensors that dense.safetensors takes over, in the order they lie there.

    By falling item size, then name: so every tensor begins on a multiple of its item size and can
    be viewed without a copy.
    """
    raws = [raw for name in plan.dense for raw in index.info(name).raws]
    return sorted(raws, key=lambda raw: (-DTYPES[raw.dtype].itemsize, raw.name))


def dense_header(raws: Sequence[RawTensor]) -> bytes:
    """Length and JSON header of a safetensors file that holds `raws` in this order."""
    table: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    at = 0
    for raw in raws:
        offsets = [at, at + raw.n_bytes]
        table[raw.name] = {"dtype": raw.dtype, "shape": raw.shape, "data_offsets": offsets}
        at += raw.n_bytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def dense_bytes(index: TensorIndex, plan: PackPlan) -> int:
    """Size of dense.safetensors."""
    raws = dense_tensors(index, plan)
    return len(dense_header(raws)) + sum(raw.n_bytes for raw in raws)


def dense_chunks(index: TensorIndex, plan: PackPlan) -> Iterator[memoryview]:
    """The content of dense.safetensors, piece by piece.

    Raises:
        MoetError: MD-SRC-06 a tensor holds NaN or infinite numbers.
    """
    raws = dense_tensors(index, plan)
    yield memoryview(dense_header(raws))
    owner = {raw.name: name for name in plan.dense for raw in index.info(name).raws}
    checked: set[str] = set()
    for raw in raws:
        name = owner[raw.name]
        if name not in checked:
            checked.add(name)
            check_finite(index, name)
        yield from raw.chunks(_CHUNK_BYTES)
        raw.forget()
