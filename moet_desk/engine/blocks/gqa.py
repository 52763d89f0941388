"""Grouped-query attention over the KV pages of one sequence.

One block for its variants: biases, a norm of queries and keys per head or over the whole width,
rope on a part of each head, an output gate, sinks and windows. Plain multi-head attention is the
case of as many key heads as query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.spec import Gqa, QkNorm
from moet_desk.kernels.reference import gqa, linear, rms_norm, rotate


class GqaBlock:
    """Attention of one layer. `layer` is its place in the KV cache."""

    def __init__(self, mixer: Gqa, weights: Weights, *, layer: int) -> None:
        self._mixer = mixer
        self._layer = layer
        parts = ("q_proj", "k_proj", "v_proj")
        # one product: all three read the same input
        self._w_in = torch.cat([weights(part) for part in parts])
        self._bias: Tensor | None = None
        if mixer.has_bias:
            self._bias = torch.cat([weights(part + ".bias") for part in parts])
        has_norm = mixer.qk_norm is not QkNorm.NONE
        self._q_norm = weights.norm("q_norm") if has_norm else None
        self._k_norm = weights.norm("k_norm") if has_norm else None
        self._sinks = weights("sinks") if mixer.has_sinks else None
        self._w_out = weights("o_proj")
        self._out_bias = weights("o_proj.bias") if mixer.out_bias else None

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: KvCache, sequence: KvSequence
    ) -> Tensor:
        """Attend from the tokens behind `sequence.length` to themselves and everything before.

        Shapes:
            x [T, H]; cos, sin [T, rope dims / 2]; returns [T, H], all float32
        """
        mixer, start, n_tokens = self._mixer, sequence.length, x.shape[0]
        joined = linear(x, self._w_in)
        if self._bias is not None:
            joined += self._bias
        width = mixer.n_keys * mixer.head_dim
        q, k, v = torch.split(joined, [joined.shape[1] - 2 * width, width, width], -1)
        gate: Tensor | None = None
        if mixer.out_gate:  # of each head the query, then the gate
            q, gate = q.view(n_tokens, mixer.n_heads, -1).chunk(2, -1)
            q, gate = q.flatten(1), gate.flatten(1)
        q = self._turned(self._normed(q, self._q_norm), cos, sin)
        k = self._turned(self._normed(k, self._k_norm), cos, sin)
        kv.write(self._layer, sequence, k, v.reshape(n_tokens, mixer.n_keys, -1))
        first = 0 if mixer.window is None else max(0, start + 1 - mixer.window)
        keys, values = kv.read(self._layer, sequence, start + n_tokens, first=first)
        mixed = gqa(
            q, keys, values, scale=mixer.softmax_scale, start=start - first,
            window=mixer.window, sink=self._sinks,
        )  # fmt: skip
        if gate is not None:
            mixed = mixed * torch.sigmoid(gate)
        out = linear(mixed, self._w_out)
        return out if self._out_bias is None else out + self._out_bias

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Queries or keys [T, heads * D] after their norm, as heads [T, heads, D]."""
        mixer = self._mixer
        if weight is not None and mixer.qk_norm is QkNorm.FULL:
            x = rms_norm(x, weight, mixer.norm_eps)
        heads = x.reshape(x.shape[0], -1, mixer.head_dim)
        if weight is not None and mixer.qk_norm is QkNorm.HEAD:
            heads = rms_norm(heads, weight, mixer.norm_eps)
        return heads

    def _turned(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads [T, heads, D] with their first numbers rotated."""
        rope = self._mixer.rope
        turned = rotate(
            heads[..., : rope.dim], cos[:, None], sin[:, None], interleaved=rope.interleaved
        )
        return torch.cat([turned, heads[..., rope.dim :]], -1)
