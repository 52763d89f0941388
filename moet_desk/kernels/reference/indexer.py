"""An indexer's choice: which entries of the cache a row of sparse attention looks at.

Called on the engine thread. Pure; knows nothing of models, so any attention over chosen entries can
use it. Up to `ROWS` rows are computed one by one, each exactly as if it had come alone, as in
`attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moet_desk.kernels.reference.attention import ROWS

_BLOCK_FLOATS = 1 << 24
"""Most products of all heads held at once: long contexts are scored a few rows at a time."""


def index_scores(q: Tensor, keys: Tensor, weights: Tensor, seen: Tensor) -> Tensor:
    """How much each row wants each entry: sum over heads of weight * relu(q . k).

    Args:
        q: queries of each head.
        keys: of the entries, one for all heads.
        weights: of the heads; may be negative.
        seen: how many entries each row may see, ascending. What it may not see gets -inf.

    Shapes:
        q [T, N, D], keys [S, D], weights [T, N] float32, seen [T] int64; returns [T, S] float32
    """
    n_rows, n_heads, _ = q.shape
    n_keys = keys.shape[0]
    scores = q.new_full((n_rows, n_keys), float("-inf"))
    if n_rows <= ROWS:
        for row, count in enumerate(seen.tolist()):
            scores[row, :count] = _summed(q[row], keys[:count], weights[row])
        return scores
    step = max(1, _BLOCK_FLOATS // max(1, n_heads * n_keys))
    for lo in range(0, n_rows, step):
        hi = min(n_rows, lo + step)
        products = torch.matmul(q[lo:hi], keys.T).relu_()  # [t, N, S]
        scores[lo:hi] = torch.bmm(weights[lo:hi, None], products)[:, 0]
    at = torch.arange(n_keys, device=q.device)
    return scores.masked_fill_(at >= seen[:, None], float("-inf"))


def choose(scores: Tensor, top_k: int) -> Tensor:
    """The `top_k` highest scores of each row, of equal ones the lowest index; all that are not
    -inf if they are fewer. A NaN counts as the highest, so that it shows.

    Shapes:
        scores [T, S] float32; returns [T, S] bool
    """
    hidden = float("-inf")
    scores = scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=hidden)
    if scores.shape[1] <= top_k:
        return scores > hidden
    least = scores.topk(top_k, -1).values[:, -1:]  # a value, so its ties do not matter
    above, level = scores > least, scores == least
    room = top_k - above.sum(-1, keepdim=True)
    return (above | (level & (level.cumsum(-1) <= room))) & (scores > hidden)


def _summed(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Scores [S] of one row: q [N, D], keys [S, D], weights [N]."""
    return torch.mv(torch.matmul(q, keys.T).relu_().T, weights)
