"""Where rows of a gated DeltaNet went when it was converted to GGUF.

Owns the orders of rows and columns; reading is `gguf.tensors`. Two things are done to such layers.
Of qwen3next the product of the input, one block of query, key, values and gates per head of keys,
is cut into all queries, keys and values, and all gates. Of qwen35moe the heads of values are dealt
out, so that neighbours belong to neighbouring heads of keys. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads and widths of a file's DeltaNet layers; zeros where there are none."""

    keys: int = 0
    values: int = 0
    key_dim: int = 0
    value_dim: int = 0

    @property
    def channels(self) -> int:
        """Rows of queries, keys and values together."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim

    def value_rows(self, n_rows: int, *, behind: int = 0) -> Tensor | None:
        """The stored row of each published one, where the rows from `behind` on are heads of values
        that were dealt out; None: these are no such rows.
        """
        width, rest = divmod(n_rows - behind, self.values) if self.values else (0, 1)
        if rest or width < 1 or not self.keys or self.values % self.keys:
            return None
        head = torch.arange(self.values).view(-1, self.keys).T.reshape(-1)
        rows = behind + (head[:, None] * width + torch.arange(width)).reshape(-1)
        return torch.cat([torch.arange(behind), rows])

    def fused_rows(self) -> Tensor:
        """For each row of the published product, its row in that of all queries, keys and values
        with all gates below.
        """
        each = self.values // self.keys * self.value_dim
        at = 0
        parts = []
        for width in (self.key_dim, self.key_dim, each, each):
            parts.append(at + torch.arange(self.keys * width).view(self.keys, width))
            at += self.keys * width
        return torch.cat(parts, 1).reshape(-1)
