"""The gated delta rule against its definition in float64, in blocks and step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet_desk.kernels.reference import (
    causal_conv,
    delta_chunk,
    delta_decay,
    delta_step,
    delta_unit,
)
from moet_desk.kernels.reference.delta import DELTA_BLOCK

HEADS, KEYS, VALUES = 3, 16, 24
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(n_tokens: int, *, decay: float = 0.3) -> Inputs:
    """q, k, v, decay, beta, state."""
    made = torch.Generator().manual_seed(n_tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    return (
        delta_unit(random(n_tokens, HEADS, KEYS)) * KEYS**-0.5,
        delta_unit(random(n_tokens, HEADS, KEYS)),
        random(n_tokens, HEADS, VALUES),
        -decay * random(n_tokens, HEADS).abs(),
        torch.sigmoid(random(n_tokens, HEADS)),
        random(HEADS, KEYS, VALUES),
    )


def by_definition(given: Inputs) -> tuple[Tensor, Tensor]:
    """Every head and token by itself, float64."""
    q, k, v, decay, beta, state = (part.double() for part in given)
    state, out = state.clone(), torch.zeros_like(v)
    for t in range(q.shape[0]):
        for n in range(HEADS):
            state[n] *= decay[t, n].exp()
            delta = beta[t, n] * (v[t, n] - state[n].T @ k[t, n])
            state[n] += torch.outer(k[t, n], delta)
            out[t, n] = state[n].T @ q[t, n]
    return out, state


@pytest.mark.parametrize("n_tokens", [1, 2, DELTA_BLOCK, DELTA_BLOCK + 1, 150])
def test_delta_chunk__any_length__as_defined(n_tokens: int) -> None:
    given = inputs(n_tokens)
    out, state = delta_chunk(*given)
    want, want_state = by_definition(given)
    assert (out - want).abs().max() < 1e-5
    assert (state - want_state).abs().max() < 1e-5


def test_delta_step__token_by_token__as_defined_and_old_states_left_alone() -> None:
    q, k, v, decay, beta, state = given = inputs(20)
    first, outputs = state.clone(), []
    now = state
    for t in range(20):
        out, now = delta_step(q[t], k[t], v[t], decay[t], beta[t], now)
        outputs.append(out)
    want, want_state = by_definition(given)
    assert (torch.stack(outputs) - want).abs().max() < 1e-5
    assert (now - want_state).abs().max() < 1e-5
    assert torch.equal(state, first)


def test_delta_chunk__strong_decay__no_overflow() -> None:
    given = inputs(130, decay=200.0)
    out, state = delta_chunk(*given)
    want, want_state = by_definition(given)
    assert (out - want).abs().max() < 1e-5
    assert (state - want_state).abs().max() < 1e-5


def test_delta_chunk__in_two_parts__state_carries_over() -> None:
    q, k, v, decay, beta, state = inputs(100)
    whole, end = delta_chunk(q, k, v, decay, beta, state)
    first, middle = delta_chunk(q[:37], k[:37], v[:37], decay[:37], beta[:37], state)
    second, last = delta_chunk(q[37:], k[37:], v[37:], decay[37:], beta[37:], middle)
    assert (torch.cat([first, second]) - whole).abs().max() < 1e-5
    assert (last - end).abs().max() < 1e-5


def test_causal_conv__whole_and_row_by_row__as_defined_and_same_tail() -> None:
    made = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 5, generator=made), torch.randn(5, 4, generator=made)
    before = torch.randn(3, 5, generator=made)
    whole, tail = causal_conv(x, before, weight)
    rows, now = [], before
    for row in x:
        out, now = causal_conv(row[None], now, weight)
        rows.append(out)
    assert (torch.cat(rows) - whole).abs().max() < 1e-6
    assert torch.equal(now, tail)
    assert torch.equal(tail, x[-3:])
    seen = torch.cat([before, x]).double()
    sums = torch.stack([(seen[t : t + 4] * weight.double().T).sum(0) for t in range(9)])
    assert (whole - sums * torch.sigmoid(sums)).abs().max() < 1e-5


def test_delta_decay__never_grows_and_as_defined() -> None:
    a, a_log, bias = torch.linspace(-30, 30, 7)[:, None], torch.tensor([0.5]), torch.tensor([0.2])
    got = delta_decay(a, a_log, bias).double()
    assert (got <= 0).all()
    want = -a_log.double().exp() * torch.log1p((a.double() + bias.double()).exp())
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-12)


def test_delta_unit__zero_row__stays_zero() -> None:
    assert torch.equal(delta_unit(torch.zeros(2, 4)), torch.zeros(2, 4))
    one = delta_unit(torch.full((1, 4), 3.0))
    assert torch.allclose(one, torch.full((1, 4), 0.5))
