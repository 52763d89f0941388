"""What sparse attention looks at: an indexer's keys, and its choice for new tokens.

The maths is in `kernels.reference.indexer`; here are the weights, the rope and the cache. DeepSeek
Sparse Attention, as in the released DeepSeek-V3.2 and GLM-5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.spec import Indexer
from moet_desk.kernels.reference import choose, index_scores, layer_norm, linear, rotate


class IndexerBlock:
    """The indexer of one layer. `layer` is its place in the KV cache."""

    def __init__(self, indexer: Indexer, weights: Weights, *, layer: int) -> None:
        self._indexer = indexer
        self._layer = layer
        self._w_query = weights("wq_b")
        self._w_key = weights("wk")
        self._key_norm, self._key_bias = weights("k_norm"), weights("k_norm.bias")
        self._w_heads = weights("weights_proj")

    def __call__(
        self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, kv: KvCache, sequence: KvSequence
    ) -> Tensor | None:
        """Keep the keys of the tokens behind `sequence.length` and choose what these look at.

        Shapes:
            x [T, H], latent [T, r_q], cos, sin [T, d_r / 2], all float32; returns [T, S] bool

        Returns:
            what was chosen; None if that is all, because no token sees more than it may choose.
        """
        indexer, start, n_tokens = self._indexer, sequence.length, x.shape[0]
        key = layer_norm(linear(x, self._w_key), self._key_norm, self._key_bias, indexer.norm_eps)
        kv.write_index(self._layer, sequence, self._turned(key, cos, sin))
        seen = start + n_tokens
        if seen <= indexer.top_k:
            return None
        queries = linear(latent, self._w_query).view(n_tokens, indexer.n_heads, -1)
        queries = self._turned(queries, cos[:, None], sin[:, None])
        # both scales are positive, so they can be taken out of the relu
        scale = (indexer.n_heads * indexer.head_dim) ** -0.5
        weights = linear(x, self._w_heads) * scale
        keys = kv.read_index(self._layer, sequence, seen)
        scores = index_scores(queries, keys, weights, torch.arange(start + 1, seen + 1))
        return choose(scores, indexer.top_k)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Keys [T, D] or queries [T, N, D] with their first numbers rotated."""
        turning = 2 * cos.shape[-1]
        turned = rotate(x[..., :turning], cos, sin, interleaved=self._indexer.interleaved)
        return torch.cat([turned, x[..., turning:]], -1)
