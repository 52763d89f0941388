"""The router: from logits to the chosen experts and their weights.

Called on the engine thread. Pure; a token's choice does not depend on the other tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moet_desk.kernels.kinds import Score


def route(
    logits: Tensor,
    *,
    top_k: int,
    score: Score,
    selection_bias: Tensor | None = None,
    n_groups: int = 1,
    kept_groups: int = 1,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token and how much each counts.

    The bias takes part in the choice, not in the weights. With groups, only experts of the
    `kept_groups` groups whose two best biased scores sum highest can be chosen. Among equal scores
    the lowest id wins. Logits with a NaN or infinity give ids that are in range but arbitrary, and
    NaN for every weight of that token: check the weights.

    Shapes:
        logits [T, E] float32, selection_bias [E] float32
        returns ids [T, K] int64, best first, and weights [T, K] float32
    """
    scores = _scores(logits, score)  # [T, E]
    choice = scores if selection_bias is None else scores + selection_bias
    if n_groups > 1:
        choice = _only_best_groups(choice, n_groups, kept_groups)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]  # [T, K]
    return ids, _weights(logits, scores, ids, score, renormalize=renormalize, scale=scale)


def weights_of(
    logits: Tensor, ids: Tensor, *, score: Score, renormalize: bool, scale: float
) -> Tensor:
    """How much experts count that something other than the logits chose, as `route` weighs them.

    Shapes:
        logits [T, E] float32, ids [T, K] int64; returns [T, K] float32
    """
    scores = _scores(logits, score)
    return _weights(logits, scores, ids, score, renormalize=renormalize, scale=scale)


def _weights(
    logits: Tensor, scores: Tensor, ids: Tensor, score: Score, *, renormalize: bool, scale: float
) -> Tensor:
    weights = scores.gather(-1, ids)
    if score is Score.TOPK_SOFTMAX:
        weights = weights.softmax(-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if scale != 1.0:
        weights = weights * scale
    # The NaN may lie in an expert that was not chosen; x * 0 is 0 unless x is NaN or infinite.
    return weights + (logits * 0.0).sum(-1, keepdim=True)


def _scores(logits: Tensor, score: Score) -> Tensor:
    """Scores of logits, the same bits wherever a value lies in the tensor.

    That is true of torch's exp and log1p, not of its sigmoid and softplus, whose vector and scalar
    paths round differently.
    """
    if score is Score.SOFTMAX:
        return logits.softmax(-1)
    if score is Score.SIGMOID:
        return torch.exp(-logits).add_(1.0).reciprocal_()
    if score is Score.SQRT_SOFTPLUS:
        return (logits.clamp(min=0.0) + torch.exp(-logits.abs()).log1p_()).sqrt_()
    return logits


def _only_best_groups(choice: Tensor, n_groups: int, kept: int) -> Tensor:
    """Set the scores outside the best groups to -inf."""
    grouped = choice.view(choice.shape[0], n_groups, -1)  # [T, groups, E/groups]
    best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    order = best_two.sort(dim=-1, descending=True, stable=True).indices[:, kept:]
    dropped = torch.zeros_like(best_two, dtype=torch.bool).scatter_(1, order, True)
    return grouped.masked_fill(dropped[..., None], float("-inf")).view_as(choice)
