"""An embedding that looks back: tables of n-grams beside the vectors of tokens.

What goes into the first layer is the mean of a token's vector and of those of the n-grams that end
there (`spec.Ngrams`). The tables are larger than all else together, so their rows are read when
they are needed. All that it keeps of a sequence are its token ids (`KvSequence.tokens`), so going
back costs nothing. Called on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.families.tensors import NGRAM_PRODUCTS, NGRAM_TABLES
from moet_desk.engine.spec import Ngrams
from moet_desk.kernels.reference import linear


class NgramEmbedding:
    """The tables of a model, and what is made of their rows.

    Args:
        ngrams: sizes.
        vocab: token ids; the base of the hash.
        weights: of the whole model, with `rows`.
    """

    def __init__(self, ngrams: Ngrams, vocab: int, weights: Weights) -> None:
        self._ngrams = ngrams
        self._tables = [weights.rows(f"{NGRAM_TABLES}{i}") for i in range(ngrams.n_tables)]
        parts = [weights(f"{NGRAM_PRODUCTS}{i}") for i in range(ngrams.n_tables)]
        self._products = torch.cat(parts, 1)  # [H, tables * width]: their sum is one product
        self._hash = NgramHash(ngrams, vocab)

    def __call__(self, x: Tensor, tokens: Sequence[int]) -> Tensor:
        """The mean of vectors of the last tokens of a sequence and of their n-grams.

        Shapes:
            x [T, H] float32, vectors of the last T of `tokens`, which are the sequence's ids up to
            and with them; returns [T, H]

        Raises:
            MoetError: MD-NVME-05 a row cannot be read.
        """
        return (x + linear(self.rows(tokens, len(x)), self._products)) / (1 + self._ngrams.n_tables)

    def rows(self, tokens: Sequence[int], count: int) -> Tensor:
        """The tables' rows of the last `count` tokens: [count, tables * width] float32."""
        seen = tokens[-(count + self._ngrams.longest - 1) :]
        numbers = self._hash(torch.tensor(seen), count)
        columns = [
            read(own.tolist()) for read, own in zip(self._tables, numbers.unbind(1), strict=True)
        ]
        return torch.cat(columns, 1)


class NgramHash:
    """Rows of the tables for n-grams: a number in base `vocab`, whose lowest digit is the newest
    token, modulo the rows of the table.
    """

    def __init__(self, ngrams: Ngrams, vocab: int) -> None:
        self._ngrams = ngrams
        sizes = [ngrams.rows(table) for table in range(ngrams.n_tables)]
        self._sizes = torch.tensor(sizes)
        # powers modulo the rows: products of two such numbers fit 64 bits, the number does not
        powers = [
            [
                pow(vocab, back, rows) if back < ngrams.size(table) else 0
                for table, rows in enumerate(sizes)
            ]
            for back in range(ngrams.longest)
        ]
        self._powers = torch.tensor(powers)  # [longest, tables]

    def __call__(self, tokens: Tensor, count: int) -> Tensor:
        """Rows for the last `count` of some tokens; those before are what they may look back at.

        Shapes:
            tokens [S] int64; returns [count, tables] int64
        """
        places = torch.arange(len(tokens))
        ends = torch.where(tokens == self._ngrams.end, places + 1, 0)
        first = torch.cat([ends.new_zeros(1), ends.cummax(0).values[:-1]])  # of a token's segment
        found = torch.zeros(len(tokens), self._ngrams.n_tables, dtype=torch.int64)
        for back, powers in enumerate(self._powers):
            before = tokens[(places - back).clamp_min(0)]
            seen = torch.where(places - back >= first, before, 0)
            found += seen[:, None] * powers
        return (found % self._sizes)[len(tokens) - count :]
