"""The embedding with tables of n-grams on a device: rows are read on the host, which knows all
tokens, and travel with a step's inputs. The twin is `engine.blocks.ngrams`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moet_desk.engine.cuda.buffers import MAX_ROWS
from moet_desk.engine.cuda.dense_weights import DenseSource
from moet_desk.engine.families.tensors import NGRAM_PRODUCTS
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.engine.ngram_rows import NgramRows
from moet_desk.engine.spec import Ngrams
from moet_desk.kernels.triton.dense import gemv
from moet_desk.kernels.triton.dense_weight import DenseWeight


class DeviceNgrams:
    """The tables, the product of their rows, and the rows of a step.

    Args:
        ngrams, vocab: as `NgramRows`.
        load: where the weights come from.
        device: what computes.

    Attributes:
        products: [H, tables * width].
    """

    def __init__(self, ngrams: Ngrams, vocab: int, load: DenseSource, device: torch.device) -> None:
        self._rows = NgramRows(ngrams, vocab, load.rows)
        self._share = 1.0 / (1 + ngrams.n_tables)
        parts = [load.table(f"{NGRAM_PRODUCTS}{i}") for i in range(ngrams.n_tables)]
        self.products = DenseWeight(torch.cat(parts, 1).contiguous())
        shape = (MAX_ROWS, self.products.k)
        self._host = torch.zeros(shape, pin_memory=device.type == "cuda")
        self._device = torch.zeros(shape, device=device)

    def set_row(self, row: int, sequence: KvSequence, position: int, token: int) -> None:
        """A row of the next step reads a token of a sequence. Raises as `NgramRows.of`."""
        sequence.remember(position, [token])
        self._host[row] = self._rows.of(sequence.tokens, 1)[0]

    def send(self) -> None:
        """Copy the rows over; ordered before the launches that follow on the stream."""
        self._device.copy_(self._host, non_blocking=True)

    def launch(self, x: Tensor) -> None:
        """From vectors of a step's tokens to what goes into the first layer.

        Shapes:
            x [T, H] float32, in place
        """
        gemv(self._device[: x.shape[0]], self.products, x, residual=x)
        x.mul_(self._share)

    def read_chunk(
        self,
        tokens: Sequence[int],
        sequence: KvSequence,
        x: Tensor,
        block: Tensor,
        product: Callable[[Tensor, Tensor], None],
    ) -> None:
        """The same of tokens of a prompt behind what the sequence holds.

        Args:
            tokens: their ids.
            sequence: whose they are.
            x: their vectors [T, H], in place.
            block: room for some rows [B, tables * width] on the device.
            product: adds some rows [n, tables * width] times `products` to some of x [n, H].
        """
        sequence.remember(sequence.length, tokens)
        for at in range(0, len(tokens), len(block)):
            part = x[at : at + len(block)]
            n = part.shape[0]
            rows = self._rows.of(sequence.tokens[: sequence.length + at + n], n)
            if block.device.type == "cuda":
                rows = rows.pin_memory()
            block[:n].copy_(rows, non_blocking=True)
            product(block[:n], part)
        x.mul_(self._share)
