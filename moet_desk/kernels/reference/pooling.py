"""Pooled entries of attention: a window's tokens become one, weighted by a softmax per number.

A window that is still open is kept as running sums, not as its tokens, so its size does not depend
on the window. All records are frozen and no tensor in them is changed: to mark a state is to keep
it, to rewind is to use it again. Called on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Running:
    """Softmax-weighted means in the making: the greatest logits, and both sums relative to them.

    Shapes:
        peak, total, weighted [..., D] float32
    """

    peak: Tensor
    total: Tensor
    weighted: Tensor

    @staticmethod
    def empty(dim: int) -> Running:
        return Running(torch.full((dim,), -torch.inf), torch.zeros(dim), torch.zeros(dim))

    @staticmethod
    def of(values: Tensor, logits: Tensor) -> Running:
        """Of the tokens of each window: values, logits [..., T, D] float32, logits finite."""
        peak = logits.amax(-2)
        shares = (logits - peak[..., None, :]).exp()
        return Running(peak, shares.sum(-2), (shares * values).sum(-2))

    def join(self, other: Running) -> Running:
        """Of the tokens of both, of which one at least has any."""
        peak = torch.maximum(self.peak, other.peak)
        mine, theirs = (self.peak - peak).exp(), (other.peak - peak).exp()
        return Running(
            peak,
            self.total * mine + other.total * theirs,
            self.weighted * mine + other.weighted * theirs,
        )

    def part(self, start: int, end: int) -> Running:
        """Some of the numbers: [..., D] -> [..., end - start]."""
        chosen = (x[..., start:end] for x in (self.peak, self.total, self.weighted))
        return Running(*chosen)

    def mean(self) -> Tensor:
        """The entries, [..., D] float32; NaN if there was no token."""
        return self.weighted / self.total


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """The state of one layer's pool between tokens.

    With overlap a token gives two parts of `dim` numbers: the first one for the next window's
    entry, the second one for that of its own window.

    Attributes:
        sums: of the window that is open, over all parts.
        before: with overlap, of the part that the window before it left for this one.
    """

    ratio: int
    dim: int
    n_tokens: int
    sums: Running
    before: Running | None

    @staticmethod
    def start(ratio: int, dim: int, *, overlap: bool) -> OpenWindow:
        """At the start of a sequence; entries have `dim` numbers."""
        sums = Running.empty(2 * dim if overlap else dim)
        return OpenWindow(ratio, dim, 0, sums, Running.empty(dim) if overlap else None)

    def read(self, values: Tensor, logits: Tensor) -> tuple[OpenWindow, Tensor]:
        """The state behind T tokens, and the entries of the windows that they close.

        Shapes:
            values, logits [T, D] float32, with overlap [T, 2 D]; T at least 1
            returns entries [n, D] float32, before their norm and rotation
        """
        first = min(len(values), self.ratio - self.n_tokens)
        open_one = self.sums.join(Running.of(values[:first], logits[:first]))
        if self.n_tokens + first < self.ratio:
            after = OpenWindow(self.ratio, self.dim, self.n_tokens + first, open_one, self.before)
            return after, values.new_empty((0, self.dim))
        n_whole, n_left = divmod(len(values) - first, self.ratio)
        shape = (n_whole, self.ratio, values.shape[1])
        whole = (x[first : len(x) - n_left].reshape(shape) for x in (values, logits))
        closed = _behind(open_one, Running.of(*whole))
        entries, before = self._entries(closed)
        sums = Running.empty(values.shape[1])
        if n_left:
            sums = Running.of(values[-n_left:], logits[-n_left:])
        return OpenWindow(self.ratio, self.dim, n_left, sums, before), entries

    def _entries(self, closed: Running) -> tuple[Tensor, Running | None]:
        """Entries of closed windows, and what the last one leaves for the next."""
        if self.before is None:
            return closed.mean(), None
        left = closed.part(0, self.dim)
        before = _behind(self.before, _rows(left, slice(0, -1)))
        last = _rows(left, slice(-1, None))
        entries = before.join(closed.part(self.dim, 2 * self.dim)).mean()
        return entries, Running(last.peak[0], last.total[0], last.weighted[0])


def _rows(sums: Running, rows: slice) -> Running:
    return Running(sums.peak[rows], sums.total[rows], sums.weighted[rows])


def _behind(first: Running, others: Running) -> Running:
    """One window's sums [D] before those of others [n, D]: [n + 1, D]."""
    return Running(
        torch.cat([first.peak[None], others.peak]),
        torch.cat([first.total[None], others.total]),
        torch.cat([first.weighted[None], others.weighted]),
    )
