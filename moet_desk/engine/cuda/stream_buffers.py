"""Static memory of residual streams and what stands between them, of a step or a prompt chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moet_desk.engine.cuda.pooled import PooledBuffers
from moet_desk.engine.cuda.pooled_sizes import PooledSizes, pooled_mixers
from moet_desk.engine.spec import Spec
from moet_desk.kernels.triton.streams import StreamScratch


@dataclass(frozen=True, slots=True)
class StreamBuffers:
    """Of a model with residual streams, R rows.

    Attributes:
        x: [R, n, H], the streams.
        scratch: connections of a block.
        pooled: of its attention, for blocks of rows.
    """

    x: Tensor
    scratch: StreamScratch
    pooled: PooledBuffers

    @classmethod
    def make(
        cls,
        spec: Spec,
        rows: int,
        *,
        block: int,
        splits: int,
        context: int,
        device: torch.device,
        parts: int | None = None,
    ) -> StreamBuffers | None:
        """For `rows` rows, whose attention takes `block` at a time; with `parts` of a prompt, see
        `StreamScratch`. None for other models.
        """
        if spec.streams is None:
            return None
        n, size = spec.streams.n, PooledSizes.of(pooled_mixers(spec, with_head=True), context)
        return cls(
            torch.zeros((rows, n, spec.hidden), device=device),
            StreamScratch.make(rows, n, spec.hidden, device, parts=parts),
            PooledBuffers.make(size, block, splits, device),
        )

    def n_bytes(self) -> int:
        """What all of it takes."""
        owners = (self, self.scratch, self.pooled, self.pooled.places, self.pooled.run)
        names = [(one, name) for one in owners if one for name in one.__dataclass_fields__]
        fields = [getattr(one, name) for one, name in names]
        tensors = [field for field in fields if isinstance(field, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
