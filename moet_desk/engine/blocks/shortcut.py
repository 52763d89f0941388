"""A layer of two attentions whose experts run beside its second half (LongCat-Flash).

The experts read what the first dense part reads, and are added behind the second one, so that
fetching them can hide behind an attention and two dense parts.
"""

from __future__ import annotations

from torch import Tensor

from moet_desk.engine.blocks.attention import MlaBlock
from moet_desk.engine.blocks.ffn import Experts, MoeBlock, SwigluFfn
from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.spec import Layer, Mla, MoeFfn
from moet_desk.kernels.reference import rms_norm


class ShortcutBlock:
    """x += A0(norm x); h = norm x; x += F0(h); x += A1(norm x); x += F1(norm x) + experts(h).

    Args:
        layer: one with `around`, latent attention and routed experts.
        weights: below the layer.
        kv_layer: place of the first attention in the KV cache; the second one's is behind it.
        moe_layer: counts from 0.
    """

    def __init__(self, layer: Layer, weights: Weights, *, kv_layer: int, moe_layer: int) -> None:
        mixer, ffn = layer.mixer, layer.ffn
        if not isinstance(mixer, Mla) or not isinstance(ffn, MoeFfn):
            raise TypeError("a shortcut layer has latent attention and routed experts")
        self._attention_norms = [weights(f"input_layernorm.{i}") for i in range(2)]
        self._ffn_norms = [weights(f"post_attention_layernorm.{i}") for i in range(2)]
        self._attentions = [
            MlaBlock(mixer, weights.below(f"self_attn.{i}."), layer=kv_layer + i) for i in range(2)
        ]
        self._dense = [SwigluFfn(weights.below(f"mlps.{i}.")) for i in range(2)]
        self._moe = MoeBlock(ffn, weights.below(ffn.name), moe_layer=moe_layer)

    def __call__(
        self,
        x: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        kv: KvCache,
        sequence: KvSequence,
        experts: Experts,
    ) -> Tensor:
        """Shapes: x [T, H]; cos, sin [T, rope dims / 2]; returns [T, H], all float32."""
        x, normed = self._attend(0, x, eps, cos, sin, kv, sequence)
        beside = self._moe(normed, experts)
        x = x + self._dense[0](normed)
        x, normed = self._attend(1, x, eps, cos, sin, kv, sequence)
        return x + self._dense[1](normed) + beside

    def _attend(
        self,
        half: int,
        x: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        kv: KvCache,
        sequence: KvSequence,
    ) -> tuple[Tensor, Tensor]:
        """The stream behind an attention, and what its dense part reads."""
        normed = rms_norm(x, self._attention_norms[half], eps)
        x = x + self._attentions[half](normed, cos, sin, kv, sequence)
        return x, rms_norm(x, self._ffn_norms[half], eps)
