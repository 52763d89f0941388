"""The launches of layers between residual streams, for the rows of a step. The twin is
engine/blocks/streams.

Nothing here allocates, waits or branches on data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moet_desk.engine.cuda.blocks import Branch, Experts, MoeLaunches
from moet_desk.engine.cuda.buffers import MAX_ROWS, StepBuffers
from moet_desk.engine.cuda.dense_weights import DenseSource
from moet_desk.engine.cuda.pooled import PooledLaunches, PooledRows
from moet_desk.engine.cuda.products import StepProducts
from moet_desk.engine.cuda.stream_buffers import StreamBuffers
from moet_desk.engine.model import RopeTable
from moet_desk.engine.spec import Layer, MoeFfn, PooledAttention, Rope, Spec, Streams
from moet_desk.kernels.triton.dense import gemv
from moet_desk.kernels.triton.norms import rms_norm
from moet_desk.kernels.triton.streams import (
    Given,
    StreamGates,
    StreamScratch,
    advance,
    enter,
    multiply_many,
)


class Turns:
    """cos and sin of each rope that a model's layers have, [positions, dim / 2], made once."""

    def __init__(self, positions: int, device: torch.device) -> None:
        self._positions, self._device = positions, device
        self._known: dict[Rope, tuple[Tensor, Tensor]] = {}

    def of(self, rope: Rope) -> tuple[Tensor, Tensor]:
        if rope not in self._known:
            made = RopeTable(rope, self._positions)
            self._known[rope] = made.cos.to(self._device), made.sin.to(self._device)
        return self._known[rope]


class Connected:
    """Connections around one block of a layer, and the block's norm; or those of an end.

    Args:
        streams: of the model.
        load: reads the weights.
        name: what the weights' names begin with.
        norm: name of the norm.
        eps: of norms.
    """

    def __init__(
        self, streams: Streams, load: DenseSource, name: str, *, norm: str, eps: float
    ) -> None:
        self._project = load.vector(name + "fn").contiguous()
        self._gates = StreamGates(
            load.vector(name + "base"), load.vector(name + "scale"), streams.sinkhorn_steps,
            streams.eps, eps,
        )  # fmt: skip
        self.norm = load.norm(norm)

    def advance(self, x: Tensor, given: Given | None, scratch: StreamScratch) -> None:
        """Streams x [T, n, H] take what the block before gave, if there was one; of a step."""
        advance(x, given, self._project, scratch=scratch)

    def begin_many(self, x: Tensor, scratch: StreamScratch) -> None:
        """What comes before `enter` for streams x [T, n, H] of a prompt."""
        multiply_many(x, self._project, scratch=scratch)

    def enter(
        self,
        x: Tensor,
        out: Tensor,
        scratch: StreamScratch,
        *,
        normed: bool = True,
        codes: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> None:
        """What the block reads, behind its norm: x [T, n, H], out [T, H]; leaves `scratch.made`."""
        enter(
            x, self._gates, self.norm if normed else None, scratch=scratch, out=out, codes=codes,
            scales=scales,
        )  # fmt: skip


class StreamLaunches:
    """One decoder layer over streams.

    Args:
        layer: one with pooled attention and routed experts.
        streams: of the model.
        load: reads the weights.
        eps: of norms.
        moe_layer: counts from 0.
        branch: of the shared expert, and of attention's pools.
        turns: rope tables.
        context: longest sequence.
    """

    def __init__(
        self,
        layer: Layer,
        streams: Streams,
        load: DenseSource,
        *,
        eps: float,
        moe_layer: int,
        branch: Branch,
        turns: Turns,
        context: int,
    ) -> None:
        name, mixer, ffn = f"model.layers.{layer.index}.", layer.mixer, layer.ffn
        if not isinstance(mixer, PooledAttention) or not isinstance(ffn, MoeFfn):
            raise TypeError("a layer of streams has pooled attention and routed experts")
        self.eps = eps
        self.around_mixer, self.around_ffn = (
            Connected(streams, load, f"{name}hc_{part}_", norm=f"{name}{part}_norm", eps=eps)
            for part in ("attn", "ffn")
        )
        self.mixer = PooledLaunches(
            mixer, load, name + "attn.", turns=turns.of(mixer.rope), context=context
        )
        self.ffn = MoeLaunches(ffn, load, name + ffn.name, moe_layer=moe_layer, branch=branch)
        self._products, self._branch = StepProducts(), branch
        self._behind: Connected | None = None

    def lead_to(self, behind: Connected) -> None:
        """Name the connections that read what this layer leaves."""
        self._behind = behind

    def begin(self, b: StepBuffers, rows: int) -> None:
        """What comes before the first layer's launch."""
        streams = streams_of(b)
        self.around_mixer.advance(streams.x[:rows], None, streams.scratch)

    def launch(self, b: StepBuffers, rows: PooledRows, tokens: Tensor, experts: Experts) -> None:
        """The streams of a step's rows, which read `tokens` [T] int32, through the layer."""
        assert self._behind is not None, "layers are chained when they are made"  # noqa: S101
        t, streams = slice(0, rows.n), streams_of(b)
        x, normed, block, scratch = streams.x[t], b.normed[t], b.x[t], streams.scratch
        self.around_mixer.enter(x, normed, scratch)
        self.mixer.launch(
            streams.pooled, self._products, normed, rows, block, scratch=b.attention,
            branch=self._branch,
        )  # fmt: skip
        self.around_ffn.advance(x, Given(block), scratch)
        codes, scales = b.codes[experts.activations][t], b.scales[t]
        self.around_ffn.enter(x, normed, scratch, codes=codes, scales=scales)
        self.ffn.launch(b, rows.n, experts, tokens=tokens, adds=False)
        self._behind.advance(x, self.ffn.given(b, rows.n), scratch)


class StreamEnd:
    """What makes one hidden state of the streams behind the last layer; its norm is the caller's.

    Args:
        streams, load, eps: as `Connected`.
        name: what all names begin with.
    """

    def __init__(self, streams: Streams, load: DenseSource, name: str, eps: float) -> None:
        self.around = Connected(streams, load, name + "hc_head_", norm=name + "norm", eps=eps)

    @property
    def norm(self) -> Tensor:
        """The final norm."""
        return self.around.norm

    def launch(self, b: StepBuffers, rows: int) -> None:
        """x of the rows becomes that state, behind the layer that leads to here."""
        t, streams = slice(0, rows), streams_of(b)
        self.around.enter(streams.x[t], b.x[t], streams.scratch, normed=False)

    def launch_alone(self, b: StepBuffers, rows: int) -> None:
        """The same of streams that no layer left."""
        streams = streams_of(b)
        self.around.advance(streams.x[:rows], None, streams.scratch)
        self.launch(b, rows)


def chain(layers: Sequence[StreamLaunches], end: StreamEnd) -> None:
    """Let each layer lead to the one behind it, and the last one to the end."""
    around = [*(layer.around_mixer for layer in layers[1:]), end.around]
    for layer, behind in zip(layers, around, strict=True):
        layer.lead_to(behind)


@dataclass(frozen=True, slots=True)
class StreamMaker:
    """Makes the parts of a model over streams; arguments as `StreamLaunches` has them."""

    spec: Spec
    load: DenseSource
    branch: Branch
    turns: Turns
    context: int

    @property
    def streams(self) -> Streams:
        """Those of the model.

        Raises:
            ValueError: it has none.
        """
        if self.spec.streams is None:
            raise ValueError("a model without streams")
        return self.spec.streams

    def layer(self, layer: Layer, moe_layer: int) -> StreamLaunches:
        """One layer."""
        return StreamLaunches(
            layer, self.streams, self.load, eps=self.spec.norm_eps, moe_layer=moe_layer,
            branch=self.branch, turns=self.turns, context=self.context,
        )  # fmt: skip

    def end(self, name: str) -> StreamEnd:
        """What is behind the last layer; names begin with `name`."""
        return StreamEnd(self.streams, self.load, name, self.spec.norm_eps)


class StreamHeadLaunches:
    """The MTP head of a model with streams (kind 4), and what leads into it. The twin is
    `engine.stream_model.StreamHead`.

    Attributes:
        states: [MAX_ROWS, n, H], what the model, or the head, knew at the token before each row.
    """

    def __init__(self, make: StreamMaker, layer: Layer) -> None:
        name, load, spec = f"model.layers.{layer.index}.", make.load, make.spec
        self.token_norm, self.hidden_norm = load.norm(name + "enorm"), load.norm(name + "hnorm")
        self.w_token, self.w_hidden = load.matrix(name + "e_proj"), load.matrix(name + "h_proj")
        self.layer = make.layer(layer, len(spec.main_moe_layers))
        self.end = make.end(name)
        chain([self.layer], self.end)
        self.final_norm = self.end.norm
        shape = (MAX_ROWS, make.streams.n, spec.hidden)
        self.states = torch.zeros(shape, device=self.w_token.values.device)

    def launch(self, b: StepBuffers, rows: PooledRows, tokens: Tensor, experts: Experts) -> None:
        """x becomes the head's output before its norm; x holds the tokens' vectors before."""
        t, streams, eps = slice(0, rows.n), streams_of(b), self.layer.eps
        rms_norm(b.x[t], self.token_norm, eps, out=b.normed[t])
        gemv(b.normed[t], self.w_token, b.x[t])
        for i in range(self.states.shape[1]):
            rms_norm(self.states[t, i], self.hidden_norm, eps, out=b.normed[t])
            gemv(b.normed[t], self.w_hidden, streams.x[t, i], residual=b.x[t])
        self.layer.begin(b, rows.n)
        self.layer.launch(b, rows, tokens, experts)
        self.end.launch(b, rows.n)


def streams_of(b: StepBuffers) -> StreamBuffers:
    """The buffers of streams."""
    assert b.streams is not None, "a model with streams has buffers for them"  # noqa: S101
    return b.streams


def spread(x: Tensor, streams: Tensor) -> None:
    """Every stream begins as the token's vector: x [T, H] to streams [T, n, H]."""
    streams.copy_(x[:, None].expand_as(streams))
