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
    """A softmax-weighted mean in the making: the greatest logit, and both sums relative to it.

    Shapes:
        peak, total, weighted [D] float32
    """

    peak: Tensor
    total: Tensor
    weighted: Tensor

    @staticmethod
    def empty(dim: int) -> Running:
        return Running(torch.full((dim,), -torch.inf), torch.zeros(dim), torch.zeros(dim))

    def add(self, values: Tensor, logits: Tensor) -> Running:
        """With one more token: values, logits [D] float32, logits finite."""
        return self.join(Running(logits, torch.ones_like(logits), values))

    def join(self, other: Running) -> Running:
        """Of the tokens of both, of which one at least has any."""
        peak = torch.maximum(self.peak, other.peak)
        mine, theirs = (self.peak - peak).exp(), (other.peak - peak).exp()
        return Running(
            peak,
            self.total * mine + other.total * theirs,
            self.weighted * mine + other.weighted * theirs,
        )

    def mean(self) -> Tensor:
        """The entry, [D] float32; NaN if there was no token."""
        return self.weighted / self.total


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """The state of one layer's pool between tokens.

    With overlap a token gives two parts: one for the entry of its own window, one for the next
    window's.
    """

    ratio: int
    n_tokens: int
    own: Running
    for_next: Running | None
    from_last: Running | None

    @staticmethod
    def start(ratio: int, dim: int, *, overlap: bool) -> OpenWindow:
        """At the start of a sequence; entries have `dim` numbers."""
        other = Running.empty(dim) if overlap else None
        return OpenWindow(ratio, 0, Running.empty(dim), other, other)

    def add(self, values: Tensor, logits: Tensor) -> tuple[OpenWindow, Tensor | None]:
        """The state behind one more token, and the entry if that token closes its window.

        Shapes:
            values, logits [D] float32, with overlap [2 D], the part for the next window first;
            the entry is [D] float32, before its norm and rotation
        """
        for_next, dim = self.for_next, self.own.peak.shape[0]
        if for_next is not None:
            for_next = for_next.add(values[:dim], logits[:dim])
        own = self.own.add(values[-dim:], logits[-dim:])
        if self.n_tokens + 1 < self.ratio:
            filled = OpenWindow(self.ratio, self.n_tokens + 1, own, for_next, self.from_last)
            return filled, None
        whole = own if self.from_last is None else self.from_last.join(own)
        fresh = OpenWindow.start(self.ratio, dim, overlap=for_next is not None)
        after = OpenWindow(self.ratio, 0, fresh.own, fresh.for_next, for_next)
        return after, whole.mean()
