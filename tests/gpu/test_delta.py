"""Gated DeltaNet on a card: kernels at Qwen3-Next's widths, and a tiny one's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
)
from moet_desk.kernels.triton.delta_chunk import BLOCK, DeltaScratch, delta_chunk
from tests.engine.random_promise import (
    add_qwen_head,
    alone,
    check,
    check_kept,
    packed_with_text,
)
from tests.engine.tiny_models import DELTA_CONFIGS
from tests.kernels.triton.makers import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

M, N, D = 16, 32, 128
SHAPE = DeltaShape(M, N, D, D)
C = SHAPE.channels


def inputs(n_tokens: int) -> tuple[Tensor, Tensor, Tensor, DeltaWeights]:
    """Joined products, gates, logarithms A and weights, on the card."""
    torch.manual_seed(n_tokens)
    a_log = torch.rand(N) * 2
    weights = DeltaWeights(
        torch.randn(C, 4).cuda() * 0.5, -a_log.exp().cuda(), torch.randn(N).cuda()
    )
    return torch.randn(n_tokens, C).cuda(), torch.randn(n_tokens, 2 * N).cuda(), a_log, weights


def memory() -> DeltaMemory:
    return DeltaMemory(
        torch.randn(2, N, D, D).cuda(), torch.randn(2, RING, C).cuda(),
        torch.randn(2, RING, M, D).cuda(), torch.randn(2, RING, N, D).cuda(),
        torch.rand(2, RING, N).cuda(),
    )  # fmt: skip


def twin(joined: Tensor, gates: Tensor, a_log: Tensor, weights: DeltaWeights) -> Tensor:
    """Outputs [T, N, D], float64 where sums are long."""
    convolved, _ = ref.causal_conv(joined.cpu(), torch.zeros(3, C), weights.conv.cpu())
    q, k, v = torch.split(convolved, [M * D, M * D, N * D], -1)
    q, k = (ref.delta_unit(part.reshape(-1, M, D)) for part in (q, k))
    q, k = (part.repeat_interleave(N // M, 1) for part in (q * D**-0.5, k))
    beta = torch.sigmoid(gates[:, :N].cpu())
    decay = ref.delta_decay(gates[:, N:].cpu(), a_log, weights.dt_bias.cpu())
    state, out = torch.zeros(N, D, D).double(), []
    for t, value in enumerate(v.reshape(-1, N, D)):
        parts = [x.double() for x in (q[t], k[t], value, decay[t], beta[t])]
        y, state = ref.delta_step(parts[0], parts[1], parts[2], parts[3], parts[4], state)
        out.append(y)
    return torch.stack(out)


def stepped(sizes: list[int], *, in_graph: bool = False) -> Tensor:
    """Outputs of tokens one step after the other, all guesses right."""
    joined, gates, _, weights = inputs(sum(sizes))
    states, at, pending, found = memory(), 0, 0, []
    for size in sizes:
        lines = [[1, pending, i, 0 if i else size] for i in range(size)]
        rows = DeltaRows(
            states,
            torch.tensor(lines, dtype=torch.int32).cuda(),
            torch.arange(at, at + size, dtype=torch.int32).cuda(),
        )
        part = slice(at, at + size)
        mixed, out = torch.zeros(size, C).cuda(), torch.zeros(size, N, D).cuda()

        def launch(part: slice, rows: DeltaRows, mixed: Tensor, out: Tensor) -> None:
            delta_conv(joined[part], weights, rows, mixed, SHAPE)
            delta_step(mixed, gates[part], weights, rows, out, SHAPE)

        if in_graph and at:  # the kernels are compiled by then
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch(part, rows, mixed, out)
            graph.replay()
        else:
            launch(part, rows, mixed, out)
        found.append(out.clone())
        at, pending = at + size, size
    return torch.cat(found)


def test_steps__any_sizes_and_in_a_graph__same_bits_near_the_twin() -> None:
    joined, gates, a_log, weights = inputs(48)
    want = twin(joined, gates, a_log, weights)
    single = stepped([1] * 48)
    assert relative_error(single.cpu(), want) < 1e-5
    assert torch.equal(stepped([8] * 6), single)
    assert torch.equal(stepped([1, 2, 3, 4, 5, 8, 8, 7, 6, 3, 1], in_graph=True), single)


@pytest.mark.parametrize("repeats", [False, True], ids=["random", "keys that repeat"])
def test_chunk__several_blocks__near_the_twin(repeats: bool) -> None:
    joined, gates, a_log, weights = inputs(300)
    if repeats:  # the changes then depend on each other most
        joined[:] = joined[0]
        gates[:, :N], gates[:, N:] = 9.0, -12.0
    want = twin(joined, gates, a_log, weights)
    runs, positions = torch.zeros(1, 4), torch.arange(300)
    states, mixed = memory(), torch.zeros(300, C).cuda()
    rows = DeltaRows(states, runs.int().cuda(), positions.int().cuda())
    delta_conv(joined, weights, rows, mixed, SHAPE, whole=True)
    blocks = -(-300 // BLOCK)
    scratch = DeltaScratch(
        torch.randn(300, N, D).cuda(), torch.randn(300, N, D).cuda(),
        torch.randn(blocks, N, BLOCK, BLOCK).cuda(), torch.randn(300, N).cuda(),
    )  # fmt: skip
    delta_chunk(mixed, gates, weights, states.matrices, SHAPE, slot=0, start=0, scratch=scratch)
    assert relative_error(scratch.changes.cpu(), want) < 1e-4


@pytest.mark.parametrize("name", list(DELTA_CONFIGS))
def test_answers__however_it_runs_on_the_card__same_bits(
    name: str, demo_source: Path, tmp_path: Path
) -> None:
    config = {**DELTA_CONFIGS[name], "num_experts": 16}  # of 8 the least RAM holds all
    pack = packed_with_text(config, demo_source, tmp_path, add_qwen_head)
    on_card: dict[str, Any] = {"device": "cuda", "context": 512}
    wanted = alone(pack, drafts="off", **on_card)
    least = {"pool_slots": 16, "fine_slots": 16, "arena_rows": 2}
    from_disk = alone(pack, drafts="off", arena_rows=2, **on_card)  # fast prompts at 2 bits then
    assert from_disk[1] == wanted[1]  # the exact one
    assert check(pack, from_disk, **least, **on_card).counters.from_nvme > 0
    for drafts in ("mtp", "lookup"):
        drafted = check(pack, wanted, drafts=drafts, draft_depth=3, **on_card).drafts
        assert drafts == "lookup" or drafted.guessed[0] > 0
    check_kept(pack, tmp_path / "prefixes", **on_card)
