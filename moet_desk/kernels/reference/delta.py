"""The gated delta rule and the short causal convolution before it (arXiv 2412.06464).

Called on the engine thread. Pure: states come in and new ones go out, so an old one can be kept to
go back to. One token takes the recurrence as it is written; many take blocks of it, whose rounding
differs.
"""

from __future__ import annotations

import torch
from torch import Tensor

DELTA_BLOCK = 64
"""Tokens whose updates are solved for together."""

_UNIT_EPS = 1e-6


def causal_conv(x: Tensor, tail: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Each channel's weighted sum of its last inputs, then SiLU.

    Shapes:
        x [T, C], tail [k-1, C] the inputs before x, weight [C, k] with the newest input last, all
        float32; returns [T, C], and the tail behind x
    """
    n_tokens, width = x.shape[0], weight.shape[1]
    seen = torch.cat([tail, x])
    out = seen[:n_tokens] * weight[:, 0]
    for i in range(1, width):
        out += seen[i : i + n_tokens] * weight[:, i]
    return torch.nn.functional.silu(out), seen[n_tokens:].clone()


def delta_unit(x: Tensor) -> Tensor:
    """Rows of length 1: x / sqrt(sum(x^2) + 1e-6). Shapes: [..., D] float32 both."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _UNIT_EPS)


def delta_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Logarithm of what stays of the state: -exp(A) * softplus(a + b), at most 0.

    Shapes:
        a [T, N], a_log and dt_bias [N]; returns [T, N], all float32
    """
    return -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: S = e^g S; d = beta (v - S^T k); S += k d^T; the output is S^T q.

    Shapes:
        q and k [N, dk], v [N, dv], decay (g) and beta [N], state [N, dk, dv], all float32; returns
        [N, dv] and the new state
    """
    kept = state * decay.exp()[:, None, None]
    found = torch.bmm(k[:, None], kept)[:, 0]  # [N, dv]
    delta = (v - found) * beta[:, None]
    new = kept.baddbmm_(k[:, :, None], delta[:, None])
    return torch.bmm(q[:, None], new)[:, 0], new


def delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`delta_step` over T tokens, in blocks: the updates of a block depend on each other by a
    triangular system, which is solved once.

    Shapes:
        q and k [T, N, dk], v [T, N, dv], decay and beta [T, N], state [N, dk, dv], all float32;
        returns [T, N, dv] and the state behind the last token
    """
    outputs = []
    for start in range(0, q.shape[0], DELTA_BLOCK):
        part = slice(start, start + DELTA_BLOCK)
        heads, keys, values = (x[part].transpose(0, 1) for x in (q, k, v))
        out, state = _block(heads, keys, values, decay[part].T, beta[part].T, state)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs), state


def _block(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Heads first: q [N, t, dk], decay [N, t]."""
    passed = decay.cumsum(1)  # [N, t]: log of what stays from the block's beginning
    between = (passed[:, :, None] - passed[:, None]).tril().exp().tril()  # [N, t, t]
    weighted = k * beta[..., None]
    system = torch.bmm(weighted, k.transpose(1, 2)) * between  # its diagonal counts as 1
    kept = passed.exp()[..., None]  # [N, t, 1]
    wanted = v * beta[..., None] - torch.bmm(weighted * kept, state)
    delta = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = torch.bmm(q * kept, state)
    out += torch.bmm(torch.bmm(q, k.transpose(1, 2)) * between, delta)
    left = (passed[:, -1:] - passed).exp()[..., None]
    new = state * kept[:, -1:] + torch.bmm((k * left).transpose(1, 2), delta)
    return out, new
