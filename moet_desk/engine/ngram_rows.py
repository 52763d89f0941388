"""Rows of the tables of n-grams that tokens need (`spec.Ngrams`), read on the host.

The tables are larger than all else of such a model together, so their rows are read when they are
needed. All that is kept of a sequence are its token ids (`KvSequence.tokens`), so going back costs
nothing. Called on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.engine.families.tensors import NGRAM_TABLES
from moet_desk.engine.spec import Ngrams

Numbers = NDArray[np.int64]


class Rows(Protocol):
    """A matrix of which single rows are read."""

    def expect(self, rows: Sequence[int]) -> None:
        """These will be read soon."""
        ...

    def read(self, rows: Sequence[int]) -> Tensor:
        """Rows by number: [n, width] float32."""
        ...


class NgramRows:
    """The tables of a model.

    Args:
        ngrams: sizes.
        vocab: token ids; the base of the hash.
        table: gives a table by its name.
    """

    def __init__(self, ngrams: Ngrams, vocab: int, table: Callable[[str], Rows]) -> None:
        self._ngrams = ngrams
        self._hash = NgramHash(ngrams, vocab)
        self._tables = [table(f"{NGRAM_TABLES}{i}") for i in range(ngrams.n_tables)]

    def of(self, tokens: Sequence[int], count: int) -> Tensor:
        """The rows of the last `count` of a sequence's tokens, tables beside each other.

        Shapes:
            tokens: the sequence's ids up to and with them; returns [count, tables * width] float32
        Raises:
            MoetError: MD-NVME-05 a row cannot be read.
        """
        seen = tokens[-(count + self._ngrams.longest - 1) :]
        numbers = self._hash(np.array(seen, np.int64), count).T.tolist()
        for table, rows in zip(self._tables, numbers, strict=True):
            table.expect(rows)
        parts = [table.read(rows) for table, rows in zip(self._tables, numbers, strict=True)]
        return torch.cat(parts, 1)


class NgramHash:
    """Rows of the tables for n-grams: a number in base `vocab`, whose lowest digit is the newest
    token, modulo the rows of the table.
    """

    def __init__(self, ngrams: Ngrams, vocab: int) -> None:
        self._end, sizes = ngrams.end, [ngrams.rows(i) for i in range(ngrams.n_tables)]
        self._sizes = np.array(sizes, np.int64)
        # powers modulo the rows: products of two such numbers fit 64 bits, the number does not
        powers = [
            [pow(vocab, back, rows) if back < ngrams.size(i) else 0 for i, rows in enumerate(sizes)]
            for back in range(ngrams.longest)
        ]
        self._powers = np.array(powers, np.int64)  # [longest, tables]

    def __call__(self, tokens: Numbers, count: int) -> Numbers:
        """Rows for the last `count` of some tokens; those before are what they may look back at.

        Shapes:
            tokens [S]; returns [count, tables]
        """
        places = np.arange(len(tokens))
        ends = np.where(tokens == self._end, places + 1, 0)
        first = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]])  # of a token's segment
        found = np.zeros((len(tokens), len(self._sizes)), np.int64)
        for back, powers in enumerate(self._powers):
            seen = np.where(places - back >= first, np.roll(tokens, back), 0)
            found += seen[:, None] * powers
        rows: Numbers = found[len(tokens) - count :] % self._sizes
        return rows
