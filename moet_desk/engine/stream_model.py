"""A model with several residual streams between its layers (DeepSeek-V4). The twin is `model`.

What it gives behind tokens are all streams, which its MTP head reads too; `logits` makes one hidden
state of them.
"""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from moet_desk.engine.blocks.ffn import Expecting, Experts
from moet_desk.engine.blocks.streams import StreamBlock, StreamEnd
from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.model import Model
from moet_desk.engine.spec import Layer, Spec, Streams
from moet_desk.kernels.reference import linear, rms_norm


class StreamModel(Model):
    """As `Model`; its hidden states are [T, n * H]."""

    def __init__(self, spec: Spec, streams: Streams, weights: Weights) -> None:
        self.spec = spec
        self._streams = streams
        self._embedding = weights("model.embed_tokens")  # [V, H]
        self._head = weights("lm_head")
        eps = spec.norm_eps
        self._end = StreamEnd(streams, weights.below("model."), norm="norm", eps=eps)
        self._layers = [
            StreamBlock(
                layer, streams, weights.below(f"model.layers.{layer.index}."), eps=eps,
                state_layer=i, moe_layer=i,
            )
            for i, layer in enumerate(spec.layers)
        ]  # fmt: skip

    def layers(
        self, ids: Tensor, kv: KvCache, sequence: KvSequence, experts: Experts
    ) -> Generator[None, None, Tensor]:
        """See `Model.layers`; returns [T, n * H]."""
        if isinstance(experts, Expecting):
            for layer in self._layers:
                if (known := layer.ffn.known(ids)) is not None:
                    experts.expect(layer.ffn.moe_layer, known)
        x = spread(self.embed(ids), self._streams.n)
        for layer in self._layers:
            x = layer(x, ids, kv, sequence, experts)
            yield
        sequence.length += ids.shape[0]
        return x.flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: hidden [T, n * H] -> [T, V] float32."""
        return linear(self._end(hidden), self._head)

    def logits_of(self, collapsed: Tensor) -> Tensor:
        """The same of states [T, H] behind an end of streams."""
        return linear(collapsed, self._head)


class StreamHead:
    """The MTP head of such a model (kind 4): a layer over streams of its own, whose window is all
    that it sees.

    Each stream of the state behind a token is joined with the vector of the token that followed.
    Its state lies behind those of the model's layers, its experts behind the model's last MoE
    layer.

    Args:
        model: the model that it guesses for.
        layer: `Spec.mtp`.
        weights: of the whole model.
    """

    def __init__(
        self, model: StreamModel, streams: Streams, layer: Layer, weights: Weights
    ) -> None:
        spec = model.spec
        below = weights.below(f"model.layers.{layer.index}.")
        self._model, self._streams, self._eps = model, streams, spec.norm_eps
        self._token_norm, self._hidden_norm = below.norm("enorm"), below.norm("hnorm")
        self._w_token, self._w_hidden = below("e_proj"), below("h_proj")
        self._block = StreamBlock(
            layer, streams, below, eps=spec.norm_eps, state_layer=len(spec.recurrent),
            moe_layer=len(spec.main_moe_layers),
        )  # fmt: skip
        self._end = StreamEnd(streams, below, norm="norm", eps=spec.norm_eps)

    def forward(
        self, ids: Tensor, hidden: Tensor, kv: KvCache, sequence: KvSequence, experts: Experts
    ) -> Tensor:
        """See `MtpHead.forward`; hidden and what is returned are [T, n * H]."""
        n_tokens = ids.shape[0]
        token = linear(rms_norm(self._model.embed(ids), self._token_norm, self._eps), self._w_token)
        before = rms_norm(hidden.view(n_tokens, self._streams.n, -1), self._hidden_norm, self._eps)
        x = token[:, None] + linear(before, self._w_hidden)
        x = self._block(x, ids, kv, sequence, experts)
        sequence.length += n_tokens
        return x.flatten(1)

    def logits(self, states: Tensor) -> Tensor:
        """Scores of what follows: states [T, n * H] -> [T, V] float32."""
        return self._model.logits_of(self._end(states))


def spread(x: Tensor, n: int) -> Tensor:
    """Every stream begins as the token's vector: [T, H] -> [T, n, H]."""
    return x[:, None].expand(-1, n, -1)
