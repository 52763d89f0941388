"""A layer between residual streams: each of its two blocks reads a mix of them and writes to all
(hyper-connections, arXiv 2409.19606; DeepSeek-V4).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moet_desk.engine.blocks.ffn import Experts, MoeBlock
from moet_desk.engine.blocks.pooled import PooledBlock
from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.kv_cache import KvCache, KvSequence
from moet_desk.engine.spec import Layer, MoeFfn, PooledAttention, Streams
from moet_desk.kernels.reference import StreamWeights, collapse, connections, rms_norm


class _Connected:
    """Connections around one block, and its norm."""

    def __init__(self, streams: Streams, weights: Weights, part: str, eps: float) -> None:
        self._streams, self._eps = streams, eps
        names = (f"hc_{part}_fn", f"hc_{part}_base", f"hc_{part}_scale")
        self._weights = StreamWeights(*(weights(name) for name in names))
        self._norm = weights.norm(f"{part}_norm")

    def __call__(self, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        """Shapes: x [T, n, H]; `block` maps [T, H] to [T, H]."""
        made = connections(
            x, self._weights, steps=self._streams.sinkhorn_steps, eps=self._streams.eps,
            norm_eps=self._eps,
        )  # fmt: skip
        return made.after(x, block(rms_norm(made.block_input(x), self._norm, self._eps)))


class StreamBlock:
    """One decoder layer over streams.

    Args:
        layer: one with pooled attention and routed experts.
        weights: below the layer.
        state_layer: its place among the layers with a state.
        moe_layer: counts from 0.
    """

    def __init__(
        self,
        layer: Layer,
        streams: Streams,
        weights: Weights,
        *,
        eps: float,
        state_layer: int,
        moe_layer: int,
    ) -> None:
        mixer, ffn = layer.mixer, layer.ffn
        if not isinstance(mixer, PooledAttention) or not isinstance(ffn, MoeFfn):
            raise TypeError("a layer of streams has pooled attention and routed experts")
        self._around_mixer = _Connected(streams, weights, "attn", eps)
        self._around_ffn = _Connected(streams, weights, "ffn", eps)
        self._mixer = PooledBlock(mixer, weights.below("attn."), layer=state_layer)
        self.ffn = MoeBlock(ffn, weights.below(ffn.name), moe_layer=moe_layer)

    def __call__(
        self, x: Tensor, ids: Tensor, kv: KvCache, sequence: KvSequence, experts: Experts
    ) -> Tensor:
        """Shapes: x [T, n, H] float32, ids [T] int64; returns [T, n, H]."""
        x = self._around_mixer(x, lambda u: self._mixer(u, kv, sequence))
        return self._around_ffn(x, lambda u: self.ffn(u, experts, ids))


class StreamEnd:
    """What makes one hidden state of the streams behind the last layer, norm included."""

    def __init__(self, streams: Streams, weights: Weights, *, norm: str, eps: float) -> None:
        self._streams, self._eps = streams, eps
        self._project, self._base = weights("hc_head_fn"), weights("hc_head_base")
        self._scale, self._norm = weights("hc_head_scale"), weights.norm(norm)

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, n * H]; returns [T, H]."""
        streams = x.view(len(x), self._streams.n, -1)
        hidden = collapse(
            streams, self._project, self._base, self._scale, eps=self._streams.eps,
            norm_eps=self._eps,
        )  # fmt: skip
        return rms_norm(hidden, self._norm, self._eps)
