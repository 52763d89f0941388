"""Multi-head latent attention over the KV pages of one sequence.

One token uses the absorbed form (queries are moved into the latent space, so each cached token
costs r + d_r products per head); a chunk of a prompt expands keys and values once, which is cheaper
there. Formulas: DeepSeek-V2, arXiv 2405.04434 §2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moet_desk.engine.blocks.indexer import IndexerBlock
from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.spec import Mla
from moet_desk.kernels.reference import linear, mla_absorbed, mla_plain, rms_norm, rotate


class MlaBlock:
    """Attention of one layer. `layer` is its place in the KV cache."""

    def __init__(self, mixer: Mla, weights: Weights, *, layer: int) -> None:
        self._mixer = mixer
        self._layer = layer
        w_kv = weights("kv_a_proj_with_mqa")
        if mixer.q_rank is None:
            # one product for queries and latent: both read the same input
            self._w_in = torch.cat([weights("q_proj"), w_kv])
        else:
            self._w_in = torch.cat([weights("q_a_proj"), w_kv])
            self._q_norm = weights("q_a_layernorm") * mixer.q_gain
            self._w_q = weights("q_b_proj")
        self._latent_norm = weights("kv_a_layernorm") * mixer.kv_gain
        w_up = weights("kv_b_proj").view(mixer.n_heads, -1, mixer.kv_rank)
        self._w_uk = w_up[:, : mixer.nope_dim].contiguous()  # [N, d_n, r]
        self._w_uv = w_up[:, mixer.nope_dim :].contiguous()  # [N, d_v, r]
        self._w_out = weights("o_proj")
        self._indexer: IndexerBlock | None = None
        if mixer.indexer is not None:
            self._indexer = IndexerBlock(mixer.indexer, weights.below("indexer."), layer=layer)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv: KvCache, sequence: KvSequence
    ) -> Tensor:
        """Attend from the tokens behind `sequence.length` to themselves and everything before.

        Shapes:
            x [T, H]; cos, sin [T, d_r / 2]; returns [T, H], all float32
        """
        mixer, start, n_tokens = self._mixer, sequence.length, x.shape[0]
        joined = linear(x, self._w_in)
        sizes = [
            self._w_in.shape[0] - mixer.kv_rank - mixer.rope_dim,
            mixer.kv_rank,
            mixer.rope_dim,
        ]
        q, latent, k_rope = torch.split(joined, sizes, -1)
        if mixer.q_rank is not None:
            q = rms_norm(q, self._q_norm, mixer.latent_eps)
            if self._indexer is not None:
                sequence.choice = self._indexer(x, q, cos, sin, kv, sequence)
            q = linear(q, self._w_q)
        heads = q.reshape(n_tokens, mixer.n_heads, -1)  # [T, N, d_n + d_r]
        q_nope, q_rope = torch.split(heads, [mixer.nope_dim, mixer.rope_dim], -1)
        latent = rms_norm(latent, self._latent_norm, mixer.latent_eps)
        interleaved = mixer.rope.interleaved
        q_rope = rotate(q_rope, cos[:, None], sin[:, None], interleaved=interleaved)
        k_rope = rotate(k_rope, cos, sin, interleaved=interleaved)
        kv.write(self._layer, sequence, latent, k_rope)
        choice = sequence.choice if self._indexer or mixer.reuses_choice else None
        if choice is not None and n_tokens == 1:  # the others need not be read
            places = choice[0].nonzero()[:, 0]
            keys, ropes = kv.read_at(self._layer, sequence, places)
            start, choice = len(places) - 1, None
        else:
            keys, ropes = kv.read(self._layer, sequence, start + n_tokens)
        attend = mla_absorbed if n_tokens == 1 else mla_plain
        mixed = attend(
            q_nope, q_rope, keys, ropes, self._w_uk, self._w_uv,
            scale=mixer.softmax_scale, start=start, chosen=choice,
        )  # fmt: skip
        return linear(mixed, self._w_out)
