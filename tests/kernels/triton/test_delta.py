"""The gated delta rule's kernels, interpreted, against their twins; between runs bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
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

SHAPE = DeltaShape(n_keys=1, n_values=2, key_dim=16, value_dim=40)
M, N, DK, DV, C = 1, 2, 16, 40, SHAPE.channels
KERNEL, SLOTS = 4, 2


@dataclass(frozen=True)
class Layer:
    """Random weights, and what its input's products would be for some tokens."""

    a_log: Tensor
    weights: DeltaWeights
    joined: Tensor  # [T, C + 3], with something behind the channels
    gates: Tensor  # [T, 2 N]

    def memory(self) -> DeltaMemory:
        """Filled with what other sequences left."""
        return DeltaMemory(
            torch.randn(SLOTS, N, DK, DV), torch.randn(SLOTS, RING, C),
            torch.randn(SLOTS, RING, M, DK), torch.randn(SLOTS, RING, N, DV),
            torch.rand(SLOTS, RING, N),
        )  # fmt: skip


def layer(n_tokens: int) -> Layer:
    torch.manual_seed(n_tokens)
    a_log, bias = torch.randn(N), torch.randn(N)
    weights = DeltaWeights(torch.randn(C, KERNEL), -a_log.exp(), bias)
    return Layer(a_log, weights, torch.randn(n_tokens, C + 3), torch.randn(n_tokens, 2 * N))


def twin(given: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Mixed inputs [T, C], outputs [T, N, dv] and the last state [N, dk, dv] of a new sequence."""
    convolved, _ = ref.causal_conv(given.joined[:, :C], torch.zeros(3, C), given.weights.conv)
    q, k, v = torch.split(convolved, [M * DK, M * DK, N * DV], -1)
    q, k = (ref.delta_unit(part.reshape(-1, M, DK)) for part in (q, k))
    q = q * DK**-0.5
    mixed = torch.cat([q.flatten(1), k.flatten(1), v], 1)
    q, k = (part.repeat_interleave(N // M, 1) for part in (q, k))
    beta = torch.sigmoid(given.gates[:, :N])
    decay = ref.delta_decay(given.gates[:, N:], given.a_log, given.weights.dt_bias)
    state, outputs = torch.zeros(N, DK, DV), []
    for t, value in enumerate(v.reshape(-1, N, DV)):
        out, state = ref.delta_step(q[t], k[t], value, decay[t], beta[t], state)
        outputs.append(out)
    return mixed, torch.stack(outputs), state


class Sequence:
    """What a host keeps of a sequence in slot 1, and its launches."""

    def __init__(self, given: Layer) -> None:
        self.given, self.memory, self.length, self.base = given, given.memory(), 0, 0

    def rows(self, lines: list[list[int]], first: int) -> DeltaRows:
        positions = torch.arange(first, first + max(1, len(lines)), dtype=torch.int32)
        return DeltaRows(self.memory, torch.tensor(lines, dtype=torch.int32), positions)

    def step(self, count: int) -> Tensor:
        """`count` rows behind the length, which does not move."""
        at, pending = self.length, self.length - self.base
        lines = [[1, pending, r, 0 if r else count] for r in range(count)]
        rows, mixed, out = self.rows(lines, at), torch.zeros(count, C), torch.zeros(count, N, DV)
        part = slice(at, at + count)
        delta_conv(self.given.joined[part], self.given.weights, rows, mixed, SHAPE)
        delta_step(mixed, self.given.gates[part], self.given.weights, rows, out, SHAPE)
        self.base = at
        return out

    def settle(self) -> Tensor:
        """The state with all that is pending: a run without rows."""
        rows = self.rows([[1, self.length - self.base, 0, 0]], self.length)
        none = torch.zeros(1, C), torch.zeros(1, 2 * N)
        delta_step(*none, self.given.weights, rows, torch.zeros(1, N, DV), SHAPE)
        self.base = self.length
        return self.memory.matrices[1]

    def chunk(self, count: int) -> Tensor:
        self.settle()
        rows = self.rows([[1, 0, 0, 0]] * count, self.length)
        part, mixed = slice(self.length, self.length + count), torch.zeros(count, C)
        joined = self.given.joined[part]
        delta_conv(joined, self.given.weights, rows, mixed, SHAPE, whole=True)
        keep_inputs(joined[:, :C], rows, 1)
        blocks = -(-count // BLOCK)
        scratch = DeltaScratch(
            torch.randn(count, N, DV), torch.randn(count, N, DK),
            torch.randn(blocks, N, BLOCK, BLOCK), torch.randn(count, N),
        )  # fmt: skip
        delta_chunk(
            mixed, self.given.gates[part], self.given.weights, self.memory.matrices, SHAPE,
            slot=1, start=self.length, scratch=scratch,
        )  # fmt: skip
        self.length += count
        self.base = self.length
        return scratch.changes


def test_steps__guesses_and_going_back__same_bits_and_as_the_twin() -> None:
    given = layer(14)
    _, want, want_state = twin(given)
    one, many = Sequence(given), Sequence(given)
    single = []
    for _ in range(14):
        single.append(one.step(1))
        one.length += 1
    for rows, right in ((8, 6), (5, 2), (3, 0), (6, 6)):
        out = many.step(rows)
        at = many.length
        assert torch.equal(out, torch.cat(single[at : at + rows])), (at, rows)
        many.length += right
    assert (torch.cat(single) - want).abs().max() < 1e-5
    assert many.length == 14
    assert torch.equal(one.settle(), many.settle())
    assert (one.memory.matrices[1] - want_state).abs().max() < 1e-5


def test_step__runs_side_by_side__each_as_if_alone() -> None:
    given = layer(5)
    alone = Sequence(given)
    want = alone.step(3)
    together = Sequence(given)
    lines = [[0, 0, 0, 2], [0, 0, 1, 0], [1, 0, 0, 3], [1, 0, 1, 0], [1, 0, 2, 0]]
    rows = DeltaRows(
        together.memory,
        torch.tensor(lines, dtype=torch.int32),
        torch.tensor([0, 1, 0, 1, 2], dtype=torch.int32),
    )
    of = torch.tensor([3, 4, 0, 1, 2])
    mixed, out = torch.zeros(5, C), torch.zeros(5, N, DV)
    delta_conv(given.joined[of], given.weights, rows, mixed, SHAPE)
    delta_step(mixed, given.gates[of], given.weights, rows, out, SHAPE)
    assert torch.equal(out[2:], want)
    assert torch.equal(together.memory.deltas[1, :3], alone.memory.deltas[1, :3])


@pytest.mark.parametrize("sizes", [[18], pytest.param([66, 1, 5], marks=pytest.mark.slow)], ids=str)
def test_chunks__any_sizes_then_steps__as_the_twin(sizes: list[int]) -> None:
    given = layer(sum(sizes) + 2)
    mixed, want, _ = twin(given)
    sequence = Sequence(given)
    found = [sequence.chunk(size) for size in sizes]
    for _ in range(2):
        found.append(sequence.step(1))
        sequence.length += 1
    assert (torch.cat(found) - want).abs().max() < 2e-5
    rows = sequence.rows([[1, 0, 0, 0]] * 18, 0)
    got = torch.zeros(18, C)
    delta_conv(given.joined[:18], given.weights, rows, got, SHAPE, whole=True)
    assert (got - mixed[:18]).abs().max() < 1e-6


def test_chunk__keys_that_repeat__as_the_twin() -> None:
    """The changes then depend on each other most."""
    given = layer(24)
    given.joined[:] = given.joined[0]
    given.gates[:, :N], given.gates[:, N:] = 9.0, -12.0
    _, want, want_state = twin(given)
    sequence = Sequence(given)
    assert (sequence.chunk(24) - want).abs().max() < 2e-5
    assert (sequence.memory.matrices[1] - want_state).abs().max() < 2e-5


def test_gated_norm__each_head__as_the_twin() -> None:
    torch.manual_seed(0)
    x, gate, weight = torch.randn(3, N, DV), torch.randn(3, N * DV + 5), torch.randn(DV)
    z = gate[:, : N * DV].reshape(3, N, DV)
    want = ref.rms_norm(x, weight, 1e-6) * torch.nn.functional.silu(z)
    gated_norm(x, gate, weight, 1e-6)
    assert (x - want).abs().max() < 1e-6
