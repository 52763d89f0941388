"""One decoder layer, or half of one that has two attentions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moet_desk.engine.blocks.attention import MlaBlock
from moet_desk.engine.blocks.ffn import Experts, MoeBlock, SwigluFfn
from moet_desk.engine.blocks.gdn import GdnBlock
from moet_desk.engine.blocks.gqa import GqaBlock
from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.spec import Gdn, Layer, Mla, MoeFfn, PooledAttention
from moet_desk.kernels.reference import rms_norm


@dataclass(frozen=True, slots=True)
class Place:
    """Where new tokens of a sequence stand.

    Attributes:
        cos, sin: of their positions, [T, rope dims / 2] float32.
        kv: where entries of all layers are.
        sequence: which of them are this sequence's.
        eps: of the norms.
    """

    cos: Tensor
    sin: Tensor
    kv: KvCache
    sequence: KvSequence
    eps: float


class Block:
    """x += attention(norm x); x += ffn(norm x).

    Args:
        layer: what it is made of.
        weights: below the layer.
        kv_layer: place among the layers that store entries, or among those with a state.
        moe_layer: counts from 0.
        half: of a layer with two attentions, which one, with the dense part behind it.
    """

    def __init__(
        self,
        layer: Layer,
        weights: Weights,
        *,
        kv_layer: int,
        moe_layer: int,
        half: int | None = None,
    ) -> None:
        at = "" if half is None else f".{half}"
        self._attention_norm = weights.norm("input_layernorm" + at)
        self._ffn_norm = weights.norm("post_attention_layernorm" + at)
        mixer, attention = layer.mixer, weights.below(f"self_attn{at}.")
        self._attention: MlaBlock | GqaBlock | GdnBlock
        if isinstance(mixer, Gdn):
            self._attention = GdnBlock(mixer, weights.below("linear_attn."), layer=kv_layer)
        elif isinstance(mixer, Mla):
            self._attention = MlaBlock(mixer, attention, layer=kv_layer)
        elif isinstance(mixer, PooledAttention):
            raise TypeError("pooled attention stands between streams")
        else:
            self._attention = GqaBlock(mixer, attention, layer=kv_layer)
        self._ffn: MoeBlock | SwigluFfn
        if half is None and isinstance(layer.ffn, MoeFfn):
            below = weights.below(layer.ffn.name)
            self._ffn = MoeBlock(layer.ffn, below, moe_layer=moe_layer)
        else:
            self._ffn = SwigluFfn(weights.below("mlp." if half is None else f"mlps{at}."))

    def __call__(self, x: Tensor, at: Place, experts: Experts) -> Tensor:
        """Shapes: x [T, H]; returns [T, H], float32."""
        x, normed = self.attend(x, at)
        return x + self.feed(normed, experts)

    def attend(self, x: Tensor, at: Place) -> tuple[Tensor, Tensor]:
        """The stream behind the attention, and what the feed-forward part reads."""
        normed = rms_norm(x, self._attention_norm, at.eps)
        x = x + self._attention(normed, at.cos, at.sin, at.kv, at.sequence)
        return x, rms_norm(x, self._ffn_norm, at.eps)

    def feed(self, normed: Tensor, experts: Experts) -> Tensor:
        """What the feed-forward part adds."""
        return self._ffn(normed, experts) if isinstance(self._ffn, MoeBlock) else self._ffn(normed)
