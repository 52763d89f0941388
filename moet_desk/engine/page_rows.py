"""Rows of bytes on pages: where those of a sequence lie, how they are written and read.

Owned by the engine thread, inside of `kv_cache`. Knows no formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PageRows:
    """One layer's rows of one kind.

    Attributes:
        memory: uint8 [n_pages, rows of a page, bytes of a row].
        step: pages that a row is for: only every `step`-th page of a sequence has rows.
    """

    memory: Tensor
    step: int = 1

    @classmethod
    def make(
        cls, n_pages: int, page_tokens: int, ratio: int, n_bytes: int, device: torch.device | None
    ) -> PageRows:
        """For one row of every `ratio` tokens.

        Raises:
            ValueError: neither of `ratio` and `page_tokens` is a multiple of the other.
        """
        if ratio % page_tokens and page_tokens % ratio:
            raise ValueError(f"pages of {page_tokens} tokens, a row for {ratio} of them")
        shape = (n_pages, max(1, page_tokens // ratio), n_bytes)
        return cls(
            torch.zeros(shape, dtype=torch.uint8, device=device), max(1, ratio // page_tokens)
        )

    @property
    def row_bytes(self) -> int:
        return int(self.memory.shape[2])

    def store(self, pages: Sequence[int], at: int, rows: Tensor) -> None:
        """Rows [T, bytes] from row `at` of a sequence on."""
        size, own = self.memory.shape[1], pages[:: self.step]
        if rows.shape[0] == 1:
            self.memory[own[at // size], at % size] = rows[0]
            return
        done = 0
        while done < rows.shape[0]:
            page, offset = divmod(at + done, size)
            count = min(size - offset, rows.shape[0] - done)
            target = self.memory[own[page], offset : offset + count]
            target.copy_(rows[done : done + count])
            done += count

    def first(self, pages: Sequence[int], count: int, *, in_a_row: bool) -> Tensor:
        """The first `count` rows of a sequence, [count, bytes]; a view where its pages follow each
        other.
        """
        n_pages = -(-count // self.memory.shape[1])
        if in_a_row and pages:
            start = pages[0]
            own = self.memory[start : start + n_pages * self.step : self.step]
        else:
            own = self.memory[list(pages[: n_pages * self.step : self.step])]
        return own.reshape(-1, self.row_bytes)[:count]

    def at(self, pages: Sequence[int], places: Tensor) -> Tensor:
        """The rows at places of a sequence, int64 [K]: [K, bytes]."""
        size = self.memory.shape[1]
        own = torch.tensor(pages[:: self.step])[places // size]
        device = self.memory.device
        return self.memory[own.to(device), (places % size).to(device)]
