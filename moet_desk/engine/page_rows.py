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
    """One layer's rows of one kind. A row for more tokens than a page has lies in parts on as many
    pages, or whole on the first of them, where kernels read it.

    Attributes:
        memory: uint8 [n_pages, rows or parts of a page, bytes of each].
        row_bytes: of a whole row.
        n_parts: of a row.
        spread: pages of a sequence that share a row, which lies on the first of them.
    """

    memory: Tensor
    row_bytes: int
    n_parts: int = 1
    spread: int = 1

    @classmethod
    def make(
        cls, n_pages: int, page_tokens: int, ratio: int, n_bytes: int, device: torch.device | None
    ) -> PageRows:
        """For one row of every `ratio` tokens.

        Raises:
            ValueError: neither of `ratio` and `page_tokens` is a multiple of the other.
        """
        _check_ratio(page_tokens, ratio)
        n_parts = max(1, ratio // page_tokens)
        shape = (n_pages, max(1, page_tokens // ratio), -(-n_bytes // n_parts))
        return cls(torch.zeros(shape, dtype=torch.uint8, device=device), n_bytes, n_parts)

    @classmethod
    def whole(cls, memory: Tensor, n_pages: int, page_tokens: int, ratio: int) -> PageRows:
        """One row of every `ratio` tokens, each in one piece, in memory [rows, bytes]: so many rows
        as `rows_needed` says.

        Raises:
            ValueError: as `make`.
        """
        count = rows_needed(n_pages, page_tokens, ratio)
        own = memory[:count].view(n_pages, count // n_pages, memory.shape[1])
        return cls(own, int(memory.shape[1]), spread=max(1, ratio // page_tokens))

    @classmethod
    def of(cls, memory: Tensor) -> PageRows:
        """Whole rows in memory that is there."""
        return cls(memory, int(memory.shape[2]))

    def store(self, pages: Sequence[int], at: int, rows: Tensor) -> None:
        """Rows [T, bytes] from row `at` of a sequence on. Behind its last page comes its first."""
        pages = pages[:: self.spread]
        size, width = self.memory.shape[1:]
        if self.n_parts > 1:
            spare = self.n_parts * width - rows.shape[1]
            rows = torch.nn.functional.pad(rows, (0, spare)).view(-1, width)
            at *= self.n_parts
        if rows.shape[0] == 1:
            self.memory[pages[at // size % len(pages)], at % size] = rows[0]
            return
        done = 0
        while done < rows.shape[0]:
            page, offset = divmod(at + done, size)
            count = min(size - offset, rows.shape[0] - done)
            target = self.memory[pages[page % len(pages)], offset : offset + count]
            target.copy_(rows[done : done + count])
            done += count

    def first(self, pages: Sequence[int], count: int, *, in_a_row: bool) -> Tensor:
        """The first `count` rows of a sequence, [count, bytes]; a view where its pages follow each
        other.
        """
        pages = pages[:: self.spread]
        size, width = self.memory.shape[1:]
        n_pages = -(-count * self.n_parts // size)
        if in_a_row and pages and self.spread == 1:
            own = self.memory[pages[0] : pages[0] + n_pages]
        else:
            own = self.memory[list(pages[:n_pages])]
        return self._whole(own.reshape(-1, width)[: count * self.n_parts])

    def between(self, pages: Sequence[int], first: int, end: int) -> Tensor:
        """Rows `first` to `end` of a sequence whose pages are taken in turn, [n, bytes]."""
        size, width = self.memory.shape[1:]
        begin = first // size
        own = [pages[i % len(pages)] for i in range(begin, -(-end // size))]
        return self.memory[own].view(-1, width)[first - begin * size : end - begin * size]

    def at(self, pages: Sequence[int], places: Tensor) -> Tensor:
        """The rows at places of a sequence, int64 [K]: [K, bytes]."""
        pages = pages[:: self.spread]
        size, device = self.memory.shape[1], self.memory.device
        if self.n_parts > 1:
            places = (places[:, None] * self.n_parts + torch.arange(self.n_parts)).flatten()
        own = torch.tensor(pages)[places // size]
        return self._whole(self.memory[own.to(device), (places % size).to(device)])

    def _whole(self, parts: Tensor) -> Tensor:
        """Rows [n, bytes] of their parts [n * parts, bytes of a part]."""
        if self.n_parts == 1:
            return parts
        joined = parts.reshape(-1, self.n_parts * parts.shape[1])
        return joined[:, : self.row_bytes].contiguous()


def rows_needed(n_pages: int, page_tokens: int, ratio: int) -> int:
    """Whole rows of every `ratio` tokens on so many pages: one of a page at least.

    Raises:
        ValueError: as `PageRows.make`.
    """
    _check_ratio(page_tokens, ratio)
    return n_pages * max(1, page_tokens // ratio)


def _check_ratio(page_tokens: int, ratio: int) -> None:
    if ratio % page_tokens and page_tokens % ratio:
        raise ValueError(f"pages of {page_tokens} tokens, a row for {ratio} of them")
