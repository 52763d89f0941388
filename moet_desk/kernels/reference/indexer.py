"""Which cached entries a token attends to: an indexer's scores and the best of them.

Used by attention that picks a few entries of a long context (DeepSeek-V3.2 and V4, GLM-5).
Called on the engine thread. Pure functions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(queries: Tensor, keys: Tensor, head_weights: Tensor) -> Tensor:
    """Sum over heads of weight * relu(query . key / sqrt(D)) / sqrt(N). Weights may be negative.

    Shapes:
        queries [T, N, D], keys [S, D], head_weights [T, N], all float32; returns [T, S] float32
    """
    n_heads, dim = queries.shape[1:]
    products = torch.relu(queries @ keys.T).mul_(dim**-0.5)  # [T, N, S]
    return torch.einsum("tns,tn->ts", products, head_weights * n_heads**-0.5)


def best_entries(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """The `top_k` best of each token's first `visible` entries, as a mask.

    Among equal scores the lowest index wins: with few heads many scores are exactly 0, and every
    way to compute must then choose the same entries. A token that sees no more than `top_k` has
    all it sees.

    Shapes:
        scores [T, S] float32, visible [T] int64; returns [T, S] bool
    """
    seen = torch.arange(scores.shape[1]) < visible[:, None]
    ranked = scores.masked_fill(~seen, -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return torch.zeros_like(seen).scatter_(1, order, value=True) & seen
