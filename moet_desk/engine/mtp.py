"""The multi-token-prediction head that guesses the token after the next one (kind V).

One decoder layer more, fed with what the model knows of a token's position and with the token that
followed it; DeepSeek-V3, arXiv 2412.19437 §2.2. GLM ships the same. A guess may be wrong: whoever
asks has to check it, so nothing here decides about an answer. Engine thread.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moet_desk.engine.blocks.ffn import Experts
from moet_desk.engine.blocks.layer import Block
from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.model import Model
from moet_desk.engine.spec import Layer
from moet_desk.kernels.reference import linear, rms_norm


class MtpHead:
    """The head over a model's own embedding and output matrix.

    Its KV lies behind the model's last layer and its experts behind the model's last MoE layer.

    Args:
        model: the model that it guesses for.
        layer: `Spec.mtp`.
        weights: of the whole model.
    """

    def __init__(self, model: Model, layer: Layer, weights: Weights) -> None:
        spec = model.spec
        weights = replace(weights, norm_offset=spec.norm_offset)
        below = weights.below(f"model.layers.{layer.index}.")
        self._model, self._eps = model, spec.norm_eps
        self._token_norm, self._hidden_norm = below.norm("enorm"), below.norm("hnorm")
        self._w_join = below("eh_proj")  # [H, 2H]: the token's half first
        n_moe = len(spec.main_moe_layers)
        self._block = Block(layer, below, kv_layer=spec.n_kv_layers, moe_layer=n_moe)
        self._final_norm = below.norm("shared_head.norm")

    def forward(
        self, ids: Tensor, hidden: Tensor, kv: KvCache, sequence: KvSequence, experts: Experts
    ) -> Tensor:
        """Read tokens with the states behind the tokens before them.

        Row i guesses what follows `ids[i]`. Its output, with that guess as the next token, can be
        read again for the guess after that.

        Args:
            ids: the tokens.
            hidden: of each, what `Model.forward` gave for the token before it, or the head itself.
            kv: pages with a layer for the head.
            sequence: the head's own count of the sequence's tokens, on the same pages; moved on.
            experts: routed experts, of the head's layer too.

        Shapes:
            ids [T] int64, hidden [T, H]; returns [T, H] float32 for `Model.logits`
        """
        model, start, n_tokens = self._model, sequence.length, ids.shape[0]
        token = rms_norm(model.embed(ids), self._token_norm, self._eps)
        before = rms_norm(hidden, self._hidden_norm, self._eps)
        x = linear(torch.cat([token, before], -1), self._w_join)
        x = self._block(x, model.place(n_tokens, kv, sequence), experts)
        sequence.length, sequence.choice = start + n_tokens, None
        return rms_norm(x, self._final_norm, self._eps)

    def logits(self, states: Tensor) -> Tensor:
        """Scores of what follows: states [T, H] -> [T, V] float32."""
        return self._model.logits(states)
