"""Gated DeltaNet on a device: the launches of a layer, and the states of all sequences.

The twin is engine/blocks/gdn. A state moves on in place, so a sequence goes back only to where its
newest step began, or to before the last token of the chunk that was read last: its last tokens are
kept as parts that are not added yet (kernels/triton/delta). Nothing of a step allocates, waits or
branches on data. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moet_desk.engine.cuda.chunk_buffers import Room
from moet_desk.engine.cuda.dense_weights import DenseSource, reordered
from moet_desk.engine.recurrent import SlotList, pending_of
from moet_desk.engine.spec import Gdn
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.delta import (
    RING,
    DeltaMemory,
    DeltaRows,
    DeltaShape,
    DeltaWeights,
    delta_conv,
    delta_step,
    gated_norm,
    keep_inputs,
)
from moet_desk.kernels.triton.delta_chunk import BLOCK, DeltaScratch, delta_chunk
from moet_desk.kernels.triton.dense import gemv
from moet_desk.kernels.triton.gemm import gemm


def shape_of(mixer: Gdn) -> DeltaShape:
    """What kernels have to know of a layer."""
    return DeltaShape(mixer.n_keys, mixer.n_values, mixer.key_dim, mixer.value_dim)


@dataclass(frozen=True, slots=True)
class DeltaBuffers:
    """Of a step, float32.

    Attributes:
        joined: [R, C + N * dv], the convolution's inputs and the output's gates.
        gates: [R, 2N], of beta and of the decay.
        mixed: [R, C]; heads: [R, N, dv].
    """

    joined: Tensor
    gates: Tensor
    mixed: Tensor
    heads: Tensor

    @classmethod
    def make(cls, mixer: Gdn, rows: int, device: torch.device) -> DeltaBuffers:
        n, dv, channels = mixer.n_values, mixer.value_dim, mixer.channels

        def f32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(
            f32(rows, channels + n * dv), f32(rows, 2 * n), f32(rows, channels), f32(rows, n, dv)
        )


@dataclass(frozen=True, slots=True)
class ChunkStates:
    """States that a chunk's rows move on.

    Attributes:
        memory: of the layer.
        slot: of the sequence.
        runs: int32 [2, RUN_COLUMNS]: what is pending before the chunk, and its last row.
        begins, ends: whether these rows are the chunk's first and its last ones.
    """

    memory: DeltaMemory
    slot: int
    runs: Tensor
    begins: bool = True
    ends: bool = True


class GdnLaunches:
    """The mixer of one layer: from `normed` to `x` with what it gives added."""

    def __init__(self, mixer: Gdn, load: DenseSource, name: str) -> None:
        self.mixer, self._shape = mixer, shape_of(mixer)
        if mixer.fused:
            joined, gates = load.matrix(name + "in_proj_qkvz"), load.matrix(name + "in_proj_ba")
            order, order_of_gates = _apart(mixer)
            joined, gates = reordered(joined, order), reordered(gates, order_of_gates)
        else:
            joined = load.matrix(name + "in_proj_qkv", name + "in_proj_z")
            gates = load.matrix(name + "in_proj_b", name + "in_proj_a")
        self.w_in, self.w_gates = joined, gates
        conv = load.vector(name + "conv1d").reshape(mixer.channels, mixer.kernel).contiguous()
        rate = -load.vector(name + "A_log").exp()
        self._weights = DeltaWeights(conv, rate, load.vector(name + "dt_bias"))
        self._norm = load.vector(name + "norm")
        self.w_out = load.matrix(name + "out_proj")

    def launch(self, b: DeltaBuffers, normed: Tensor, x: Tensor, rows: DeltaRows) -> None:
        """For the rows of a step: normed [T, H], x [T, H] += what the layer gives."""
        t, shape = slice(0, x.shape[0]), self._shape
        joined, gates, mixed, heads = b.joined[t], b.gates[t], b.mixed[t], b.heads[t]
        gemv(normed, self.w_in, joined)
        gemv(normed, self.w_gates, gates)
        delta_conv(joined, self._weights, rows, mixed, shape)
        delta_step(mixed, gates, self._weights, rows, heads, shape)
        gated_norm(heads, joined[:, shape.channels :], self._norm, self.mixer.norm_eps)
        gemv(heads.flatten(1), self.w_out, x, residual=x)

    def mix_block(
        self, parts: Tensor, positions: Tensor, states: ChunkStates, *, start: int, wide: Room,
        narrow: Room,
    ) -> Tensor:  # fmt: skip
        """What the heads give [M, N * dv] for some rows of a chunk, in `narrow`.

        Of the chunk's last row the part stays pending, so that it can be read again.

        Shapes:
            parts [2, M, H] bfloat16 of the normed rows, positions [M] int32 from `start` on
        """
        shape, rows, memory = self._shape, parts.shape[1], states.memory
        n, dk, dv, channels = shape.n_values, shape.key_dim, shape.value_dim, shape.channels
        joined, gates = wide.take(rows, self.w_in.n), wide.take(rows, self.w_gates.n)
        gemm(parts, self.w_in, joined)
        gemm(parts, self.w_gates, gates)
        mixed, heads = narrow.take(rows, channels), narrow.take(rows, n, dv)
        scratch = DeltaScratch(
            heads, narrow.take(rows, n, dk),
            narrow.take(-(-rows // BLOCK), n, BLOCK, BLOCK), narrow.take(rows, n),
        )  # fmt: skip
        before, last = (
            DeltaRows(memory, states.runs[i : i + 1], positions) for i in range(len(states.runs))
        )
        if states.begins:
            delta_step(mixed, gates, self._weights, before, heads, shape)
        delta_conv(joined, self._weights, last, mixed, shape, whole=True)
        keep_inputs(joined[:, :channels], last, states.slot)
        many = rows - 1 if states.ends else rows
        if many:
            delta_chunk(
                mixed[:many], gates[:many], self._weights, memory.matrices, shape,
                slot=states.slot, start=start, scratch=scratch,
            )  # fmt: skip
        if states.ends:
            last = replace(last, positions=positions[many:])
            delta_step(mixed[many:], gates[many:], self._weights, last, heads[many:], shape)
        gated_norm(heads, joined[:, channels:], self._norm, self.mixer.norm_eps)
        return heads.view(rows, -1)


class DeviceStates(SlotList):
    """States of all layers for some sequences at a time; see `engine.recurrent.StateSlots`.

    Args:
        mixers: of the layers with a state, all of one shape.
        n_slots: sequences.
        device: where they are.
    """

    def __init__(self, mixers: Sequence[Gdn], n_slots: int, device: torch.device) -> None:
        first = mixers[0]
        if any(shape_of(mixer) != shape_of(first) for mixer in mixers):
            raise ValueError("layers with states of several shapes")
        super().__init__(n_slots)
        self._mixer = first
        m, n, dk, dv = first.n_keys, first.n_values, first.key_dim, first.value_dim

        def f32(*shape: int) -> Tensor:
            size = (len(mixers), n_slots, *shape)
            return torch.zeros(size, dtype=torch.float32, device=device)

        parts = (
            f32(n, dk, dv), f32(RING, first.channels), f32(RING, m, dk), f32(RING, n, dv),
            f32(RING, n),
        )  # fmt: skip
        self._layers = [DeltaMemory(*(p[i] for p in parts)) for i in range(len(mixers))]

    def layer(self, place: int) -> DeltaMemory:
        """Of one layer with a state."""
        return self._layers[place]

    @property
    def state_bytes(self) -> int:
        """Bytes of `to_bytes`."""
        return len(self._layers) * self._mixer.state_bytes(KvFormat.F32)

    def pooled(self, layer: int) -> None:
        """See `StateSlots`: these layers have no entries."""

    def to_bytes(self, slot: int, base: int, length: int) -> NDArray[np.uint8]:
        pending = pending_of(base, length)
        found = []
        for layer in self._layers:
            own = layer.slot(slot)
            moved = replace(own, matrices=own.matrices.clone())
            self._settle(moved, pending, length)
            places = torch.arange(length - self._mixer.kernel + 1, length) % RING
            tail = own.inputs[0][places.to(own.inputs.device)]
            found += [moved.matrices.flatten(), tail.flatten()]
        flat: NDArray[np.uint8] = torch.cat(found).cpu().numpy().view(np.uint8)
        return flat

    def from_bytes(self, flat: NDArray[np.uint8], slot: int, length: int) -> None:
        device = self._layers[0].matrices.device
        numbers = torch.from_numpy(flat.copy().view(np.float32)).to(device)
        matrix = self._layers[0].matrices[0].numel()
        places = (torch.arange(length - self._mixer.kernel + 1, length) % RING).to(device)
        for layer, own in zip(self._layers, numbers.chunk(len(self._layers)), strict=True):
            layer.matrices[slot].copy_(own[:matrix].view_as(layer.matrices[slot]))
            layer.inputs[slot].index_copy_(0, places, own[matrix:].view(len(places), -1))

    def _settle(self, memory: DeltaMemory, pending: int, length: int) -> None:
        """Add what is pending in a memory of one slot."""
        if not pending:
            return
        device, mixer = memory.matrices.device, self._mixer
        runs = torch.tensor([[0, pending, 0, 0]], dtype=torch.int32, device=device)
        positions = torch.tensor([length], dtype=torch.int32, device=device)
        nothing = torch.zeros(1, mixer.channels, device=device)
        weights = DeltaWeights(nothing, nothing, nothing)  # a run without rows reads none
        rows = DeltaRows(memory, runs, positions)
        delta_step(nothing, nothing, weights, rows, nothing, shape_of(mixer))


def _apart(mixer: Gdn) -> tuple[Tensor, Tensor]:
    """Where the rows of a fused product lie, by what they give: queries, keys, values and gates of
    all heads; betas and decays.
    """
    times = mixer.n_values // mixer.n_keys
    own = times * mixer.value_dim
    rows = torch.arange(mixer.channels + mixer.n_values * mixer.value_dim)
    sizes = [mixer.key_dim, mixer.key_dim, own, own]
    heads = torch.split(rows.view(mixer.n_keys, -1), sizes, 1)
    gates = torch.arange(2 * mixer.n_values).view(mixer.n_keys, -1).chunk(2, 1)
    joined = torch.cat([part.flatten() for part in heads])
    return joined, torch.cat([part.flatten() for part in gates])
