"""An embedding that looks back: what goes into the first layer is the mean of a token's vector and
of those of the n-grams that end there. Called on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.families.tensors import NGRAM_PRODUCTS
from moet_desk.engine.ngram_rows import NgramRows
from moet_desk.engine.spec import Ngrams
from moet_desk.kernels.reference import linear


class NgramEmbedding:
    """The tables of a model, and the product that their rows go through.

    Args:
        ngrams, vocab: as `NgramRows`.
        weights: of the whole model.
    """

    def __init__(self, ngrams: Ngrams, vocab: int, weights: Weights) -> None:
        self._rows = NgramRows(ngrams, vocab, weights.rows)
        self._n_vectors = 1 + ngrams.n_tables
        parts = [weights(f"{NGRAM_PRODUCTS}{i}") for i in range(ngrams.n_tables)]
        self._products = torch.cat(parts, 1)  # [H, tables * width]: their sum is one product

    def __call__(self, x: Tensor, tokens: Sequence[int]) -> Tensor:
        """The means for the last tokens of a sequence.

        Shapes:
            x [T, H] float32, vectors of the last T of `tokens`, which are the sequence's ids up to
            and with them; returns [T, H]

        Raises:
            MoetError: as `NgramRows.of`.
        """
        return (x + linear(self._rows.of(tokens, len(x)), self._products)) / self._n_vectors
