"""Connections of residual streams, interpreted, against the twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.triton.quant import planar_shape, quantize_rows
from moet_desk.kernels.triton.streams import (
    Given,
    StreamGates,
    StreamScratch,
    advance,
    enter,
    multiply_many,
    write_back,
)

TOKENS, N, HIDDEN, EPS, NORM_EPS = 2, 4, 160, 1e-3, 1e-6
ROWS = 2 * N + N * N


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


PROJECT = _random(ROWS, N * HIDDEN, seed=2) / 16
NORM = _random(HIDDEN, seed=9)


def _gates(steps: int) -> StreamGates:
    return StreamGates(_random(ROWS, seed=3), _random(3, seed=4), steps, EPS, NORM_EPS)


def _want(streams: Tensor, steps: int) -> ref.Connections:
    gates = _gates(steps)
    weights = ref.StreamWeights(PROJECT, gates.base, gates.scale)
    return ref.connections(streams, weights, steps=steps, eps=EPS, norm_eps=NORM_EPS)


def _entered(streams: Tensor, steps: int, norm: Tensor | None) -> tuple[Tensor, StreamScratch]:
    """What a block reads behind nothing, and what was left."""
    scratch = StreamScratch.make(len(streams), N, HIDDEN, torch.device("cpu"))
    advance(streams, None, PROJECT, scratch=scratch)
    out = torch.full((len(streams), HIDDEN), torch.nan)
    enter(streams, _gates(steps), norm, scratch=scratch, out=out)
    return out, scratch


def _products_near(scratch: StreamScratch, streams: Tensor) -> None:
    """The products that were left are those of these streams."""
    found, last = scratch.parts.sum(1), ROWS + N * N
    products, squares = streams.flatten(1) @ PROJECT.T, streams.square().sum((1, 2))
    torch.testing.assert_close(found[:, :ROWS], products, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[:, last], squares, rtol=1e-5, atol=1e-5)
    if not scratch.many:
        pairs = (streams @ streams.transpose(1, 2)).flatten(1)
        torch.testing.assert_close(found[:, ROWS:last], pairs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 20])
def test_enter__tokens__near_the_twin(steps: int) -> None:
    streams = _random(TOKENS, N, HIDDEN, seed=1)
    want = _want(streams, steps)
    out, scratch = _entered(streams, steps, None)
    _, write, mix = torch.split(scratch.made, [N, N, N * N], 1)
    torch.testing.assert_close(out, want.block_input(streams), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(write, want.write, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mix.view(-1, N, N), want.mix, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", Activations)
def test_enter__with_norm_and_codes__near_the_twin_and_its_codes(kind: Activations) -> None:
    streams = _random(TOKENS, N, HIDDEN, seed=1)
    scratch = StreamScratch.make(TOKENS, N, HIDDEN, torch.device("cpu"))
    advance(streams, None, PROJECT, scratch=scratch)
    out = torch.empty(TOKENS, HIDDEN)
    found, want = (
        (
            torch.zeros(TOKENS, *planar_shape(HIDDEN, kind), dtype=torch.int32),
            torch.zeros(TOKENS, HIDDEN // 32),
        )
        for _ in range(2)
    )
    enter(streams, _gates(2), NORM, scratch=scratch, out=out, codes=found[0], scales=found[1])
    read = _want(streams, 2).block_input(streams)
    torch.testing.assert_close(out, ref.rms_norm(read, NORM, NORM_EPS), rtol=1e-5, atol=1e-5)
    quantize_rows(out, *want)
    assert torch.equal(found[0], want[0])
    assert torch.equal(found[1], want[1])


@pytest.mark.parametrize("top_k", [0, 3])
def test_advance__what_a_block_gave__streams_and_products_near_the_twin(top_k: int) -> None:
    streams, y = _random(TOKENS, N, HIDDEN, seed=1), _random(TOKENS, HIDDEN, seed=5)
    want = _want(streams, 3)
    _, scratch = _entered(streams, 3, NORM)
    part, weights = _random(TOKENS * top_k, HIDDEN, seed=6), _random(TOKENS, top_k, seed=7)
    given = Given(y, part, weights) if top_k else Given(y)
    whole = y + (weights[..., None] * part.view(TOKENS, top_k, HIDDEN)).sum(1)
    after = streams.clone()
    advance(after, given, PROJECT, scratch=scratch)
    torch.testing.assert_close(after, want.after(streams, whole), rtol=1e-5, atol=1e-5)
    _products_near(scratch, after)


def test_multiply_many__tokens_of_a_prompt__products_and_what_is_read() -> None:
    many, last = 66, slice(64, 66)  # of two programs, the second with two known ones
    streams = _random(many, N, HIDDEN, seed=1)
    scratch = StreamScratch.make(many, N, HIDDEN, torch.device("cpu"), parts=2)
    scratch.parts.fill_(torch.nan)
    multiply_many(streams, PROJECT, scratch=scratch)
    _products_near(scratch, streams)
    out, codes = torch.empty(2, HIDDEN), torch.zeros(2, HIDDEN, dtype=torch.int8)
    scales, own = torch.zeros(2, HIDDEN // 32), scratch.of(last)
    enter(streams[last], _gates(1), NORM, scratch=own, out=out, codes=codes, scales=scales)
    want = _want(streams[last], 1)
    read = ref.rms_norm(want.block_input(streams[last]), NORM, NORM_EPS)
    torch.testing.assert_close(out, read, rtol=1e-5, atol=1e-5)
    mix = scratch.made[last, 2 * N :].view(-1, N, N)
    torch.testing.assert_close(mix, want.mix, rtol=1e-5, atol=1e-6)
    expected, factors = torch.zeros_like(codes), torch.zeros_like(scales)
    quantize_rows(out, expected, factors)
    assert torch.equal(codes, expected)
    assert torch.equal(scales, factors)


def test_write_back__a_block_gave_y__near_the_twin() -> None:
    streams, y = _random(TOKENS, N, HIDDEN, seed=1), _random(TOKENS, HIDDEN, seed=5)
    _, scratch = _entered(streams, 3, None)
    after = streams.clone()
    write_back(after, y, scratch=scratch)
    torch.testing.assert_close(after, _want(streams, 3).after(streams, y), rtol=1e-5, atol=1e-5)


def test_end__tokens__near_the_twin() -> None:
    streams = _random(TOKENS, N, HIDDEN, seed=1)
    project, base = _random(N, N * HIDDEN, seed=6) / 16, _random(N, seed=7)
    scale, out = _random(1, seed=8), torch.empty(TOKENS, HIDDEN)
    scratch = StreamScratch.make(TOKENS, N, HIDDEN, torch.device("cpu"))
    advance(streams, None, project, scratch=scratch)
    enter(streams, StreamGates(base, scale, 1, EPS, NORM_EPS), None, scratch=scratch, out=out)
    want = ref.collapse(streams, project, base, scale, eps=EPS, norm_eps=NORM_EPS)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_enter__streams_cancel_out__norm_of_what_is_left() -> None:
    streams = _random(TOKENS, N, HIDDEN, seed=1)
    streams[:, 1] = -streams[:, 0]
    streams[:, 3] = -streams[:, 2]
    want = _want(streams, 3)
    out, _ = _entered(streams, 3, NORM)
    read = ref.rms_norm(want.block_input(streams), NORM, NORM_EPS)
    torch.testing.assert_close(out, read, rtol=1e-4, atol=1e-4)


def test_block__one_token_of_two__same_bits() -> None:
    y = _random(TOKENS, HIDDEN, seed=5)
    results = []
    for rows in (slice(0, TOKENS), slice(1, 2)):
        streams = _random(TOKENS, N, HIDDEN, seed=1)[rows].clone()
        out, scratch = _entered(streams, 20, NORM)
        advance(streams, Given(y[rows]), PROJECT, scratch=scratch)
        results.append((out, scratch.made[:, N:], scratch.parts[..., : ROWS + N * N + 1], streams))
    for together, alone in zip(*results, strict=True):
        assert torch.equal(together[1], alone[0])
