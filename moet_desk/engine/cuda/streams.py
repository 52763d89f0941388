"""The launches of layers between residual streams, for the rows of a step. The twin is
engine/blocks/streams.

Nothing here allocates, waits or branches on data.
"""

from __future__ import annotations

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
from moet_desk.kernels.triton.quant import rms_norm_quantize
from moet_desk.kernels.triton.streams import StreamScratch, block_input, connect, write_back


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
        self._streams, self._eps = streams, eps
        self._project = load.vector(name + "fn").contiguous()
        self._base, self._scale = load.vector(name + "base"), load.vector(name + "scale")
        self.norm = load.norm(norm)

    def read(self, x: Tensor, out: Tensor, scratch: StreamScratch) -> None:
        """What the block reads, before its norm: x [T, n, H], out [T, H]; leaves `scratch.made`."""
        connect(
            x, self._project, self._base, self._scale, steps=self._streams.sinkhorn_steps,
            eps=self._streams.eps, norm_eps=self._eps, scratch=scratch,
        )  # fmt: skip
        block_input(x, self._project.shape[0], scratch=scratch, out=out)


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

    def launch(self, b: StepBuffers, rows: PooledRows, tokens: Tensor, experts: Experts) -> None:
        """The streams of a step's rows, which read `tokens` [T] int32, through the layer."""
        t, streams = slice(0, rows.n), streams_of(b)
        x, normed, block = streams.x[t], b.normed[t], b.x[t]
        self.around_mixer.read(x, block, streams.scratch)
        rms_norm(block, self.around_mixer.norm, self.eps, out=normed)
        self.mixer.launch(
            streams.pooled, self._products, normed, rows, block, scratch=b.attention,
            branch=self._branch,
        )  # fmt: skip
        write_back(x, block, scratch=streams.scratch)
        self.around_ffn.read(x, block, streams.scratch)
        rms_norm_quantize(
            block, self.around_ffn.norm, self.eps, out=normed,
            codes=b.codes[experts.activations][t], scales=b.scales[t],
        )  # fmt: skip
        self.ffn.launch(b, rows.n, experts, tokens=tokens, adds=False)
        write_back(x, block, scratch=streams.scratch)


class StreamEnd:
    """What makes one hidden state of the streams behind the last layer; its norm is the caller's.

    Args:
        streams, load, eps: as `Connected`.
        name: what all names begin with.
    """

    def __init__(self, streams: Streams, load: DenseSource, name: str, eps: float) -> None:
        self._end = Connected(streams, load, name + "hc_head_", norm=name + "norm", eps=eps)

    @property
    def norm(self) -> Tensor:
        """The final norm."""
        return self._end.norm

    def launch(self, b: StepBuffers, rows: int) -> None:
        """x of the rows becomes that state."""
        t, streams = slice(0, rows), streams_of(b)
        self._end.read(streams.x[t], b.x[t], streams.scratch)


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
        self.layer.launch(b, rows, tokens, experts)
        self.end.launch(b, rows.n)


def streams_of(b: StepBuffers) -> StreamBuffers:
    """The buffers of streams."""
    assert b.streams is not None, "a model with streams has buffers for them"  # noqa: S101
    return b.streams


def spread(x: Tensor, streams: Tensor) -> None:
    """Every stream begins as the token's vector: x [T, H] to streams [T, n, H]."""
    streams.copy_(x[:, None].expand_as(streams))
