"""A layer of two attentions whose experts run beside its second half (LongCat-Flash).

The experts read what the first dense part reads, and are added behind the second one, so that
fetching them can hide behind an attention and two dense parts.
"""

from __future__ import annotations

from torch import Tensor

from moet_desk.engine.blocks.ffn import Experts, MoeBlock
from moet_desk.engine.blocks.layer import Block, Place
from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.spec import Layer, MoeFfn


class ShortcutBlock:
    """x += A0(norm x); h = norm x; x += F0(h); x += A1(norm x); x += F1(norm x) + experts(h).

    Args:
        layer: one with `around` and routed experts.
        weights: below the layer.
        kv_layer: place of the first attention in the KV cache; the second one's is behind it.
        moe_layer: counts from 0.
    """

    def __init__(self, layer: Layer, weights: Weights, *, kv_layer: int, moe_layer: int) -> None:
        if not isinstance(layer.ffn, MoeFfn):
            raise TypeError("a shortcut layer has routed experts")
        self._first, self._second = (
            Block(layer, weights, kv_layer=kv_layer + half, moe_layer=moe_layer, half=half)
            for half in range(layer.n_mixers)
        )
        self._moe = MoeBlock(layer.ffn, weights.below(layer.ffn.name), moe_layer=moe_layer)

    def __call__(self, x: Tensor, at: Place, experts: Experts) -> Tensor:
        """As `Block`."""
        x, normed = self._first.attend(x, at)
        beside = self._moe(normed, experts)
        x = x + self._first.feed(normed, experts)
        return self._second(x, at, experts) + beside
