"""Hyper-connections: several residual streams around each block where others have one.

Called on the engine thread. Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """Weights of the connections around one block, N streams of H numbers.

    Shapes:
        project [2N + N*N, N*H], base [2N + N*N], scale [3], all float32
    """

    project: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class Connections:
    """How one block reads and writes the streams of each token.

    Shapes:
        read [T, N], write [T, N], mix [T, N, N] (from, to), all float32
    """

    read: Tensor
    write: Tensor
    mix: Tensor

    def block_input(self, streams: Tensor) -> Tensor:
        """streams [T, N, H] -> [T, H] float32, before the block's norm."""
        return (self.read[..., None] * streams).sum(1)

    def after(self, streams: Tensor, output: Tensor) -> Tensor:
        """The streams behind a block: streams [T, N, H], its output [T, H] -> [T, N, H]."""
        mixed = self.mix.transpose(1, 2) @ streams
        return self.write[..., None] * output[:, None] + mixed


def connections(
    streams: Tensor, weights: StreamWeights, *, steps: int, eps: float, norm_eps: float
) -> Connections:
    """The connections of one block for tokens; `steps` times the mix is made doubly stochastic.

    Shapes:
        streams [T, N, H] float32
    """
    n = streams.shape[1]
    projected = _project(streams, weights.project, norm_eps)  # [T, 2N + N*N]
    read, write, mix = torch.split(projected, [n, n, n * n], -1)
    base_read, base_write, base_mix = torch.split(weights.base, [n, n, n * n])
    scale = weights.scale
    mixing = (mix * scale[2] + base_mix).view(-1, n, n)
    return Connections(
        torch.sigmoid(read * scale[0] + base_read) + eps,
        2.0 * torch.sigmoid(write * scale[1] + base_write),
        _balanced(mixing.softmax(-1) + eps, steps, eps),
    )


def collapse(
    streams: Tensor, project: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """The one hidden state behind the last layer, before the final norm.

    Shapes:
        streams [T, N, H], project [N, N*H], base [N], scale [1], all float32; returns [T, H]
    """
    read = torch.sigmoid(_project(streams, project, norm_eps) * scale + base) + eps
    return (read[..., None] * streams).sum(1)


def _project(streams: Tensor, project: Tensor, norm_eps: float) -> Tensor:
    flat = streams.flatten(1)
    normed = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    return normed @ project.T


def _balanced(mix: Tensor, steps: int, eps: float) -> Tensor:
    """Sinkhorn: columns and rows divided by their sums in turn, columns first and last."""
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(steps - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix
