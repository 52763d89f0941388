"""Dense weights on the device, as shipped: FP8 stays FP8, bfloat16 stays bfloat16. Where the plan
says so, matrices that are larger than 8 bits are rounded on their way (`engine.dense_format`).

Matrices that read the same input are joined into one, so that one launch does their product. FP8
matrices with a scale per row (or one for all rows) can always be joined, those with blocks of
scales where the 128-row blocks meet. If they do not, or if formats differ, the joined matrix is
decoded to float32 instead, which changes no value.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moet_desk.engine.dense_format import PLAIN, DenseFormat, may_round
from moet_desk.engine.ngram_rows import Rows
from moet_desk.kernels.reference import quantize_dense
from moet_desk.kernels.triton.dense_weight import DenseWeight, WeightKind
from moet_desk.store.pack_reader import PackReader
from moet_desk.store.quant_formats import e8m0
from moet_desk.store.sources import Format, TensorInfo

SCALE_BLOCK = 128
_ROUNDED_NUMBERS = 1 << 24  # at a time: 64 MiB in float32


class DenseSource(Protocol):
    """Where a step's dense weights come from: a pack, or made-up ones for measuring."""

    def vector(self, name: str) -> Tensor: ...

    def norm(self, name: str) -> Tensor: ...

    def matrix(self, *names: str) -> DenseWeight: ...

    def table(self, name: str) -> Tensor: ...

    def rows(self, name: str) -> Rows: ...


class DenseLoader:
    """Reads a pack's dense tensors onto `device`; `norm_offset` as `Spec` has it."""

    def __init__(
        self,
        reader: PackReader,
        device: torch.device,
        form: DenseFormat = DenseFormat.STORED,
        *,
        norm_offset: float = 0.0,
    ) -> None:
        self._reader = reader
        self._device = device
        self._form = form
        self._norm_offset = norm_offset

    def vector(self, name: str) -> Tensor:
        """A norm, a bias or a small table as float32."""
        return self._reader.dense_tensor(name).to(self._device)

    def norm(self, name: str) -> Tensor:
        """The factor of a norm as float32: its weight, and the offset if the model has one."""
        weight = self.vector(name)
        return weight + self._norm_offset if self._norm_offset else weight

    def matrix(self, *names: str) -> DenseWeight:
        """One matrix, or several below each other, in the stored format or rounded.

        Shapes:
            each [N_i, K]; together [sum N_i, K]
        """
        infos = [self._reader.dense.info(name) for name in names]
        formats = {info.format for info in infos}
        if self._form is DenseFormat.INT8 and all(map(_is_rounded, infos)):
            return self._rounded(infos)
        if formats == {Format.BF16}:
            return DenseWeight(self._put(_below([info.weight.tensor() for info in infos])))
        is_block_wise = formats == {Format.FP8} and _blocks_meet(infos)
        if is_block_wise or formats == {Format.FP8_ROWS}:
            values = _below([info.weight.tensor().view(torch.uint8) for info in infos])
            scales = _below([_scale(info) for info in infos])
            return DenseWeight(self._put(values).view(torch.float8_e4m3fn), self._put(scales))
        decoded = _below([self._reader.dense_tensor(name) for name in names])
        return DenseWeight(self._put(decoded))

    def _rounded(self, infos: list[TensorInfo]) -> DenseWeight:
        """int8 with a scale per 32 inputs; some rows at a time, to need little room beside."""
        pieces = [
            quantize_dense(self._put(rows))
            for info in infos
            for rows in torch.split(self._stored(info), max(1, _ROUNDED_NUMBERS // info.shape[1]))
        ]
        values, scales = zip(*pieces, strict=True)
        return DenseWeight(torch.cat(values), torch.cat(scales))

    def _stored(self, info: TensorInfo) -> Tensor:
        if info.format is Format.BF16:
            return info.weight.tensor()
        return self._reader.dense_tensor(info.name)

    def table(self, name: str) -> Tensor:
        """A matrix as it is, such as the embedding: bfloat16 or float32 [V, H]."""
        info = self._reader.dense.info(name)
        stored = info.weight.tensor() if info.format is Format.BF16 else None
        return self._put(self._reader.dense_tensor(name) if stored is None else stored)

    def rows(self, name: str) -> Rows:
        """What reads rows of a matrix on the host."""
        return self._reader.dense_rows(name)

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous().to(self._device)


def reordered(weight: DenseWeight, order: Tensor) -> DenseWeight:
    """The same rows in another order: row i is the old row `order[i]`. Where blocks of scales would
    be torn apart, the weight is decoded to float32 instead.

    Shapes:
        order [N] int64
    """
    order = order.to(weight.values.device)
    if weight.scales is None:
        return DenseWeight(weight.values[order])
    if weight.kind is WeightKind.INT8:
        return DenseWeight(weight.values[order], weight.scales[order])
    codes = weight.raw[order].view(torch.float8_e4m3fn)
    if weight.scale_rows == 1:
        return DenseWeight(codes, weight.scales[order])
    firsts = order[::SCALE_BLOCK]
    whole = firsts.repeat_interleave(SCALE_BLOCK)[: len(order)]
    inner = torch.arange(len(order), device=order.device) % SCALE_BLOCK
    if bool((firsts % SCALE_BLOCK == 0).all()) and torch.equal(order, whole + inner):
        return DenseWeight(codes, weight.scales[firsts // SCALE_BLOCK])
    return DenseWeight(as_float(weight).values[order])


def as_float(weight: DenseWeight) -> DenseWeight:
    """An e4m3 weight decoded to float32."""
    assert weight.scales is not None, "e4m3 has scales"  # noqa: S101
    if weight.scale_rows == 1:
        return DenseWeight(weight.values.float() * weight.scales)
    by_row = weight.scales.repeat_interleave(SCALE_BLOCK, 0)[: weight.n]
    scales = by_row.repeat_interleave(SCALE_BLOCK, 1)[:, : weight.k]
    return DenseWeight(weight.values.float() * scales)


def _is_rounded(info: TensorInfo) -> bool:
    return info.format.name in PLAIN and may_round(info.name, info.shape)


def _below(parts: list[Tensor]) -> Tensor:
    """Matrices below each other; a single one is not copied again."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _blocks_meet(infos: list[TensorInfo]) -> bool:
    """Whether every matrix but the last ends where a block of scales ends."""
    return all(info.shape[0] % SCALE_BLOCK == 0 for info in infos[:-1])


def _scale(info: TensorInfo) -> Tensor:
    """Scales as float32, which holds those of every stored kind (Qwen3 ships bfloat16).

    Of blocks [N/128, K/128], or of rows [N, 1].
    """
    if info.scale is None:
        raise ValueError(f"{info.name} has no scales")
    stored = info.scale.tensor()
    if info.format is Format.FP8_ROWS:
        return stored.float().reshape(-1, 1).expand(info.shape[0], 1)
    return e8m0(stored) if info.scale.dtype == "F8_E8M0" else stored.float()
