"""Attention over cached entries: MLA absorbed and plain, and grouped-query.

Called on the engine thread. Pure. T query rows stand at positions start .. start+T-1 of
S = start+T entries and see everything up to themselves. Up to `ROWS` rows are computed one by one,
each exactly as if it had come alone, so a decode step's bits do not depend on how many tokens it
carries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROWS = 8
"""Most rows of one decode step."""


def mla_absorbed(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    scale: float,
    start: int,
    chosen: Tensor | None = None,
) -> Tensor:
    """Multi-head latent attention in the latent space: nothing of the cache is expanded.

    Scores are ((U_K^T q_n) . c + q_r . k_r) * scale, the output U_V (sum p c) (models.md §1.3.1).
    Of what a row may see, it sees only the entries that are `chosen` for it.

    Shapes:
        q_nope [T, N, dn], q_rope [T, N, dr], latent [S, r], k_rope [S, dr], w_uk [N, dn, r],
        w_uv [N, dv, r], all float32; chosen [T, S] bool; returns [T, N*dv]
    """

    def rows(lo: int, hi: int, seen: int) -> Tensor:
        query = torch.bmm(q_nope[lo:hi].transpose(0, 1), w_uk)  # [N, t, r]
        scores = torch.matmul(query, latent[:seen].T)
        scores += torch.matmul(q_rope[lo:hi].transpose(0, 1), k_rope[:seen].T)  # [N, t, S]
        few = None if chosen is None else chosen[lo:hi, :seen]
        probs = _causal_softmax(scores, scale, start + lo, chosen=few)
        mixed = torch.matmul(probs, latent[:seen])  # [N, t, r]
        return _heads_last(torch.bmm(mixed, w_uv.transpose(1, 2)))

    return _by_rows(rows, q_nope.shape[0], start)


def mla_plain(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    scale: float,
    start: int,
    chosen: Tensor | None = None,
) -> Tensor:
    """`mla_absorbed` with keys and values expanded per head: cheaper when T is large.

    Shapes:
        as `mla_absorbed`
    """
    key = torch.matmul(latent, w_uk.transpose(1, 2))  # [N, S, dn]
    value = torch.matmul(latent, w_uv.transpose(1, 2))  # [N, S, dv]

    def rows(lo: int, hi: int, seen: int) -> Tensor:
        scores = torch.bmm(q_nope[lo:hi].transpose(0, 1), key[:, :seen].transpose(1, 2))
        scores += torch.matmul(q_rope[lo:hi].transpose(0, 1), k_rope[:seen].T)  # [N, t, S]
        few = None if chosen is None else chosen[lo:hi, :seen]
        probs = _causal_softmax(scores, scale, start + lo, chosen=few)
        return _heads_last(torch.bmm(probs, value[:, :seen]))

    return _by_rows(rows, q_nope.shape[0], start)


def gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    start: int,
    window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention: N/M query heads share a key head.

    With a window, row t sees only the last `window` entries, itself included. A sink is one more
    logit per head that takes probability and gives no value (models.md §1.3.5).

    Shapes:
        q [T, N, D], k [S, M, D], v [S, M, Dv], sink [N], float32; returns [T, N*Dv]
    """
    n_heads, n_keys = q.shape[1], k.shape[1]
    share = n_heads // n_keys

    def rows(lo: int, hi: int, seen: int) -> Tensor:
        count = hi - lo
        first = 0 if window is None else max(0, start + lo + 1 - window)
        grouped = q[lo:hi].view(count, n_keys, share, -1).permute(1, 2, 0, 3)  # [M, share, t, D]
        keys = k[first:seen].permute(1, 2, 0)  # [M, D, s]
        scores = torch.bmm(grouped.reshape(n_keys, share * count, -1), keys)
        probs = _causal_softmax(
            scores.view(n_heads, count, -1), scale, start + lo - first, window=window, sink=sink
        )
        mixed = torch.bmm(
            probs.view(n_keys, share * count, -1), v[first:seen].transpose(0, 1)
        )  # [M, share * t, Dv]
        return _heads_last(mixed.view(n_heads, count, -1))

    return _by_rows(rows, q.shape[0], start)


def _by_rows(rows: Callable[[int, int, int], Tensor], count: int, start: int) -> Tensor:
    """Run `rows(lo, hi, entries seen)` for each row alone, or for a whole chunk of a prompt."""
    if count > ROWS:
        return rows(0, count, start + count)
    if count == 1:
        return rows(0, 1, start + 1)
    return torch.cat([rows(t, t + 1, start + t + 1) for t in range(count)])


def _causal_softmax(
    scores: Tensor,
    scale: float,
    start: int,
    *,
    window: int | None = None,
    sink: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """Probabilities [N, T, S] of scaled scores; row t sees entries to start + t. Eats `scores`."""
    _, count, seen = scores.shape
    scores.mul_(scale)
    if count > 1:
        at = torch.arange(start, start + count, device=scores.device)
        age = at[:, None] - torch.arange(seen, device=scores.device)  # [T, S]
        hidden = age < 0 if window is None else (age < 0) | (age >= window)
        scores.masked_fill_(hidden, float("-inf"))
    if chosen is not None:
        scores.masked_fill_(~chosen, float("-inf"))
    if sink is None:
        return scores.softmax(-1)
    column = sink[:, None, None].expand(-1, count, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1].contiguous()


def _heads_last(x: Tensor) -> Tensor:
    """[N, T, D] -> [T, N*D]."""
    return x.transpose(0, 1).reshape(x.shape[1], -1)
