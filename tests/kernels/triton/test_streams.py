"""Connections of residual streams, interpreted, against the twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.triton.streams import StreamScratch, block_input, connect, write_back

TOKENS, N, HIDDEN, EPS = 3, 4, 200, 1e-3
ROWS = 2 * N + N * N


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _made(streams: Tensor, steps: int) -> tuple[ref.Connections, StreamScratch]:
    weights = ref.StreamWeights(
        _random(ROWS, N * HIDDEN, seed=2) / 16, _random(ROWS, seed=3), _random(3, seed=4)
    )
    scratch = StreamScratch.make(TOKENS, N, HIDDEN, torch.device("cpu"))
    connect(
        streams, weights.project, weights.base, weights.scale, steps=steps, eps=EPS,
        norm_eps=1e-6, scratch=scratch,
    )  # fmt: skip
    want = ref.connections(streams, weights, steps=steps, eps=EPS, norm_eps=1e-6)
    return want, scratch


@pytest.mark.parametrize("steps", [1, 20])
def test_connect__tokens__near_the_twin(steps: int) -> None:
    streams = _random(TOKENS, N, HIDDEN, seed=1)
    want, scratch = _made(streams, steps)
    read, write, mix = torch.split(scratch.made, [N, N, N * N], 1)
    torch.testing.assert_close(read, want.read, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(write, want.write, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mix.view(-1, N, N), want.mix, rtol=1e-5, atol=1e-6)


def test_block__read_and_written_back__near_the_twin() -> None:
    streams, y = _random(TOKENS, N, HIDDEN, seed=1), _random(TOKENS, HIDDEN, seed=5)
    want, scratch = _made(streams, 3)
    out = torch.empty(TOKENS, HIDDEN)
    block_input(streams, ROWS, scratch=scratch, out=out)
    torch.testing.assert_close(out, want.block_input(streams), rtol=1e-5, atol=1e-5)
    after = streams.clone()
    write_back(after, y, scratch=scratch)
    torch.testing.assert_close(after, want.after(streams, y), rtol=1e-5, atol=1e-5)


def test_collapse__tokens__near_the_twin() -> None:
    streams = _random(TOKENS, N, HIDDEN, seed=1)
    project, base = _random(N, N * HIDDEN, seed=6) / 16, _random(N, seed=7)
    scale, out = _random(1, seed=8), torch.empty(TOKENS, HIDDEN)
    scratch = StreamScratch.make(TOKENS, N, HIDDEN, torch.device("cpu"))
    connect(streams, project, base, scale, steps=1, eps=EPS, norm_eps=1e-6, scratch=scratch)
    block_input(streams, N, scratch=scratch, out=out)
    want = ref.collapse(streams, project, base, scale, eps=EPS, norm_eps=1e-6)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_connect__one_token_of_three__same_bits() -> None:
    streams = _random(TOKENS, N, HIDDEN, seed=1)
    _, together = _made(streams, 20)
    _, alone = _made(streams[1:2], 20)
    assert torch.equal(alone.made[0], together.made[1])
