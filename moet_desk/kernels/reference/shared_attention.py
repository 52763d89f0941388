"""Attention in which one head is key and value of all query heads, and its grouped output product.

Called on the engine thread. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def shared_attention(
    queries: Tensor, entries: Tensor, seen: Tensor, sinks: Tensor, *, scale: float
) -> Tensor:
    """Softmax over the entries a token sees and its head's sink, which gives nothing.

    Shapes:
        queries [T, N, D], entries [S, D], sinks [N], all float32; seen [T, S] bool
        returns [T, N, D] float32
    """
    logits = (queries @ entries.T).mul_(scale).masked_fill_(~seen[:, None], -torch.inf)
    with_sink = torch.cat([logits, sinks[None, :, None].expand(logits.shape[0], -1, 1)], -1)
    return with_sink.softmax(-1)[..., :-1] @ entries


def grouped_output(mixed: Tensor, inner: Tensor, outer: Tensor, *, groups: int) -> Tensor:
    """Each group of heads through its own low-rank product, all of them through one.

    Shapes:
        mixed [T, N, D], inner [groups * r, N / groups * D], outer [H, groups * r], all float32;
        returns [T, H] float32
    """
    by_group = mixed.reshape(mixed.shape[0], groups, -1)
    low = torch.einsum("tgi,gri->tgr", by_group, inner.view(groups, -1, inner.shape[1]))
    return low.flatten(1) @ outer.T


def seen_entries(
    position: int, far: Sequence[int], *, first: int, window: int, ring: int
) -> Tensor:
    """Where the entries that a token sees lie: those of its window in a ring that begins at
    `first`, in order, then `far` ones.

    Shapes:
        returns [S] int64
    """
    near = torch.arange(max(0, position + 1 - window), position + 1) % ring + first
    return torch.cat([near, torch.tensor(list(far), dtype=torch.int64)])


def unit(heads: Tensor, eps: float) -> Tensor:
    """Each head scaled to RMS 1, without weights: [..., D] -> [..., D]."""
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True).add_(eps))
