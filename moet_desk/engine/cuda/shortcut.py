"""The launches of a layer of two attentions whose experts run beside its second half, for the rows
of a step and for those of a prompt chunk.

The twin is engine/blocks/shortcut. In a step everything about the experts, asking for missing rows
first of all, is a branch of the graph beside two dense parts and an attention, so that a fetch
hides behind them. A prompt's chunk has its own way of bringing rows early (cuda/expert_stream).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moet_desk.engine.cuda.blocks import (
    Branch,
    DenseLaunches,
    Experts,
    LayerLaunches,
    MoeLaunches,
)
from moet_desk.engine.cuda.buffers import StepBuffers
from moet_desk.engine.cuda.chunk_blocks import (
    ChunkLayer,
    ChunkRows,
    RoutedExperts,
    add_experts,
    blocks_of,
)
from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers
from moet_desk.engine.cuda.dense_weights import DenseSource
from moet_desk.engine.spec import Layer, MoeFfn
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.prepare import Rotation


class ShortcutLaunches:
    """x += A0(norm x); h = norm x; x += F0(h); x += A1(norm x); x += F1(norm x) + experts(h).

    Args:
        layer: one with `around` and routed experts.
        load: reads the weights.
        moe_layer: counts from 0.
        branch: of the experts.
    """

    def __init__(self, layer: Layer, load: DenseSource, *, moe_layer: int, branch: Branch) -> None:
        if layer.around is None or not isinstance(layer.ffn, MoeFfn):
            raise TypeError("a shortcut layer has a dense part and routed experts")
        self._branch = branch
        self.halves = [
            LayerLaunches(layer, load, moe_layer=moe_layer, branch=branch, half=half)
            for half in range(layer.n_mixers)
        ]
        name = f"model.layers.{layer.index}.{layer.ffn.name}"
        self.moe = MoeLaunches(layer.ffn, load, name, moe_layer=moe_layer, branch=branch)

    def launch(
        self,
        b: StepBuffers,
        rows: int,
        *,
        eps: float,
        rotation: Rotation,
        kv: Sequence[KvPages],
        lengths: Tensor,
        experts: Experts,
    ) -> None:
        """x through the layer; `kv` has the pages of both attentions."""
        (first, second), t = self.halves, slice(0, rows)
        first.attend(b, rows, eps=eps, rotation=rotation, kv=kv[0], lengths=lengths)
        first.norm_for_experts(b, rows, eps, experts)
        self.moe.choose(b, rows)
        with self._branch.beside():
            experts(self.moe.moe_layer, b, rows)
        dense_of(first).launch(b, rows, out=b.x[t], residual=b.x[t])
        second.launch(
            b, rows, eps=eps, rotation=rotation, kv=kv[1], lengths=lengths, experts=experts
        )
        self._branch.join()
        self.moe.add(b, rows)


class ChunkShortcut:
    """The same for a chunk.

    Args:
        layer: the step's launches, whose weights are shared.
        buffers: the chunk's.
        halves: its halves for a chunk.
    """

    def __init__(
        self, layer: ShortcutLaunches, buffers: ChunkBuffers, halves: Sequence[ChunkLayer]
    ) -> None:
        self._layer, self._b, self._halves = layer, buffers, halves

    def launch(
        self,
        chunk: ChunkRows,
        memory: Sequence[KvPages],
        experts: RoutedExperts,
    ) -> None:
        """x of the chunk through the layer; `memory` has the pages of both attentions."""
        (first, second), b, moe = self._halves, self._b, self._layer.moe
        dense = [dense_of(half) for half in self._layer.halves]
        for here in blocks_of(chunk, b):
            first.attend(here, chunk, memory[0])
            first.route(moe, here, chunk)
            first.feed(dense[0], here)
            second.attend(here, chunk, memory[1])
            second.feed(dense[1], here)
            if moe.router.n_identity:
                b.x[here].add_(b.kept[: here.stop - here.start])
        add_experts(moe, b, chunk, experts)


def dense_of(half: LayerLaunches) -> DenseLaunches:
    """The dense part of a half."""
    if not isinstance(half.ffn, DenseLaunches):
        raise TypeError("a half has a dense part")
    return half.ffn
