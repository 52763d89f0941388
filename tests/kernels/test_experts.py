"""Expert arithmetic: the canonical order by hand, exact bits for any batch, and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moet_desk.kernels.kinds import Activations, Glu
from moet_desk.kernels.reference import (
    ExpertBias,
    combine,
    expert_mlp,
    expert_mlp_float,
    expert_rows,
    gated,
    quantize_activations,
    swiglu,
)
from tests.kernels.makers import Expert, Matrix, random_expert, real_values
from tests.kernels.test_layouts import NIBBLE_VALUES

SHAPES = [(512, 128), (96, 32), (1056, 64), (2080, 96)]  # 16, 3, 33 and 65 blocks


def canonical(q: Tensor, s: Tensor, matrix: Matrix) -> Tensor:
    """One token by the written rule, number by number in numpy float32."""
    nibbles, scales = matrix
    doubled = (2 * torch.tensor(NIBBLE_VALUES)[nibbles.long()]).long()
    n, k = nibbles.shape
    dots = (doubled * q.long()).view(n, k // 32, 32).sum(-1)  # exact integers
    lanes = np.zeros((32, n), np.float32)
    for g in range(k // 32):
        power = np.exp2(scales[:, g].numpy().astype(np.float32) - np.float32(128))
        term = dots[:, g].numpy().astype(np.float32) * power * np.float32(s[g])
        lanes[g % 32] += term
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half:]
    return torch.from_numpy(lanes[0])


@pytest.mark.parametrize(("hidden", "inter"), SHAPES)
def test_expert_mlp__one_token__canonical_order_bit_for_bit(hidden: int, inter: int) -> None:
    expert = random_expert(hidden, inter)
    q, s = quantize_activations(torch.randn(1, hidden))
    mid = canonical(q[0], s[0], expert.gate_up)
    act_q, act_s = quantize_activations(swiglu(mid[None, :inter], mid[None, inter:]))
    want = canonical(act_q[0], act_s[0], expert.down)
    got = expert_mlp(q, s, expert.fine_slot(), expert.layout)
    assert torch.equal(got[0], want)


@pytest.mark.parametrize(("hidden", "inter"), SHAPES)
@pytest.mark.parametrize("limit", [None, 7.0])
def test_expert_mlp__any_batch__same_bits(hidden: int, inter: int, limit: float | None) -> None:
    expert = random_expert(hidden, inter)
    slot = expert.base_slot()
    x = torch.randn(8, hidden) * torch.logspace(-2, 2, 8)[:, None]
    q, s = quantize_activations(x)
    alone = [
        expert_mlp(q[t : t + 1], s[t : t + 1], slot, expert.layout, glu=Glu(limit))[0]
        for t in range(8)
    ]
    for count in range(2, 9):
        for start in range(9 - count):
            part = slice(start, start + count)
            got = expert_mlp(q[part], s[part], slot, expert.layout, glu=Glu(limit))
            assert torch.equal(got, torch.stack(alone[part]))


def test_expert_mlp__long_chunk_and_two_threads__same_bits() -> None:
    expert = random_expert(512, 128)
    slot = expert.fine_slot()
    q, s = quantize_activations(torch.randn(1500, 512))  # more than one tile
    got = expert_mlp(q, s, slot, expert.layout)
    torch.set_num_threads(2)
    again = expert_mlp(q, s, slot, expert.layout)
    assert torch.equal(got, again)
    for t in (0, 511, 512, 777, 1499):
        one = expert_mlp(q[t : t + 1], s[t : t + 1], slot, expert.layout)
        assert torch.equal(one[0], got[t])


def test_expert_mlp__order_of_tokens__moves_with_them() -> None:
    expert = random_expert(96, 32)
    slot = expert.fine_slot()
    q, s = quantize_activations(torch.randn(8, 96))
    order = torch.randperm(8)
    got = expert_mlp(q, s, slot, expert.layout)
    assert torch.equal(expert_mlp(q[order], s[order], slot, expert.layout), got[order])


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize(("hidden", "inter"), SHAPES)
def test_expert_rows__several_slots__bits_of_one_by_one(
    hidden: int, inter: int, count: int
) -> None:
    experts = [random_expert(hidden, inter) for _ in range(count)]
    layout = experts[0].layout
    slots = [expert.base_slot() for expert in experts]
    q, s = quantize_activations(torch.randn(1, hidden))
    got = expert_rows(q, s, slots, layout, glu=Glu(10.0))
    want = torch.cat([expert_mlp(q, s, slot, layout, glu=Glu(10.0)) for slot in slots])
    assert torch.equal(got, want)


def double_mlp(x: Tensor, expert: Expert, limit: float | None) -> Tensor:
    gate_up = real_values(expert.gate_up, NIBBLE_VALUES)
    gate, up = (x.double() @ gate_up.T).chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(gate) * up) @ real_values(expert.down, NIBBLE_VALUES).T


@pytest.mark.parametrize("limit", [None, 1.0])
def test_expert_mlp__against_float64__int8_noise_only(limit: float | None) -> None:
    expert = random_expert(512, 128, low=118, high=122)
    x = torch.randn(32, 512)
    want = double_mlp(x, expert, limit)
    slot = expert.fine_slot()
    got = expert_mlp(*quantize_activations(x), slot, expert.layout, glu=Glu(limit))
    exact = expert_mlp_float(x, slot, expert.layout, glu=Glu(limit))
    assert relative(got, want) < 0.02
    assert relative(exact, want) < 2e-6


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def test_expert_mlp__nan_in_one_token__that_row_only() -> None:
    expert = random_expert(64, 32)
    slot = expert.fine_slot()
    x = torch.randn(3, 64)
    clean = expert_mlp(*quantize_activations(x), slot, expert.layout)
    x[1, 5] = float("nan")
    got = expert_mlp(*quantize_activations(x), slot, expert.layout)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_swiglu__against_float64__and_its_far_ends() -> None:
    g, u = torch.randn(1000) * 8, torch.randn(1000)
    want = g.double() / (1 + torch.exp(-g.double())) * u
    assert torch.allclose(swiglu(g, u).double(), want, rtol=1e-6, atol=1e-12)
    ends = torch.tensor([-200.0, 200.0, 0.0])
    assert torch.equal(swiglu(ends, torch.ones(3)), torch.tensor([0.0, 200.0, 0.0]))


def test_expert_rows__biases_and_another_glu__same_bits_as_one_by_one() -> None:
    glu, layout = Glu(limit=7.0, alpha=1.702, shift=1.0), random_expert(64, 32).layout
    slots = [random_expert(64, 32, low=118, high=124).fine_slot() for _ in range(3)]
    bias = ExpertBias(torch.randn(3, 64), torch.randn(3, 64))
    q, s = quantize_activations(torch.randn(1, 64))
    got = expert_rows(q, s, slots, layout, glu=glu, bias=bias)
    for k, slot in enumerate(slots):
        one = ExpertBias(bias.gate_up[k : k + 1], bias.down[k : k + 1])
        assert torch.equal(got[k : k + 1], expert_mlp(q, s, slot, layout, glu=glu, bias=one))


def test_gated__gpt_oss__by_its_formula() -> None:
    g = torch.tensor([9.0, 7.0, 2.0, -9.0, 0.0])
    u = torch.tensor([-8.0, 8.0, -1.0, 0.5, 3.0])
    cut_g = torch.tensor([7.0, 7.0, 2.0, -9.0, 0.0], dtype=torch.float64)  # never cut below
    cut_u = torch.tensor([-7.0, 7.0, -1.0, 0.5, 3.0], dtype=torch.float64)
    want = (cut_u + 1) * cut_g / (1 + torch.exp(-1.702 * cut_g))
    got = gated(g, u, Glu(limit=7.0, alpha=1.702, shift=1.0))
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=0.0)


def test_swiglu__limit__cuts_gate_above_and_up_on_both_sides() -> None:
    g = torch.tensor([20.0, -20.0, 1.0, 1.0])
    u = torch.tensor([1.0, 1.0, 50.0, -50.0])
    sigmoid = 1 / (1 + torch.exp(-torch.tensor([10.0, -20.0, 1.0, 1.0])))
    want = torch.tensor([10.0, -20.0, 1.0, 1.0]) * sigmoid * torch.tensor([1.0, 1.0, 10.0, -10.0])
    assert torch.allclose(swiglu(g, u, 10.0), want)


def test_swiglu__any_place_in_a_tensor__same_bits() -> None:
    g, u = torch.randn(40_000) * 4, torch.randn(40_000)
    whole = swiglu(g, u)
    for width in (1, 7, 40):  # torch's own silu differs in the last bit in 4 % of such places
        for start in range(0, 1000, width):
            part = slice(start, start + width)
            assert torch.equal(swiglu(g[part], u[part]), whole[part])


def test_combine__weights__added_in_order() -> None:
    parts, weights = torch.randn(5, 4, 64), torch.rand(5, 4)
    want = torch.zeros(5, 64)
    for t in range(5):
        row = parts[t, 0] * weights[t, 0]
        for k in range(1, 4):
            row = row + parts[t, k] * weights[t, k]
        want[t] = row
    assert torch.equal(combine(parts, weights), want)
    assert torch.equal(combine(parts[2:3], weights[2:3])[0], want[2])


@pytest.mark.parametrize("kind", list(Activations), ids=lambda kind: kind.name)
def test_block_products__largest_values__exact_in_float32(kind: Activations) -> None:
    """All weights 6, all activations at their limit: the largest sum a block can have."""
    sign = torch.tensor([1.0, -1.0]).repeat(16)
    for flip in (torch.ones(32), sign):
        weights = (6.0 * flip).double()
        q = torch.full((32,), float(kind.value)) * flip
        partial = torch.cumsum(q * weights.float(), 0)
        assert partial.double().tolist() == torch.cumsum(q.double() * weights, 0).tolist()
        assert abs(float(partial[-1])) * 2 < 2**24  # half units


def test_expert_mlp__fifteen_bits__nearly_float_and_any_batch_same_bits() -> None:
    expert = random_expert(96, 64, low=120, high=124)
    slot, kind = expert.fine_slot(), Activations.INT15
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(6))
    q, s = quantize_activations(x, kind)
    assert q.abs().max() == kind.value
    got = expert_mlp(q, s, slot, expert.layout, kind=kind)
    exact = expert_mlp_float(x, slot, expert.layout)
    assert (got - exact).norm() < 2e-4 * exact.norm()
    for t in range(8):
        one = slice(t, t + 1)
        assert torch.equal(expert_mlp(q[one], s[one], slot, expert.layout, kind=kind)[0], got[t])
        rows = expert_rows(q[one], s[one], [slot, slot], expert.layout, kind=kind)
        assert torch.equal(rows, got[t].expand(2, -1))


def test_fifteen_bits__as_two_bytes__same_integer() -> None:
    q = torch.arange(-32512, 32513)
    high = (q + 128) >> 8
    low = q - 256 * high
    assert (int(high.min()), int(high.max())) == (-127, 127)
    assert (int(low.min()), int(low.max())) == (-128, 127)
    assert torch.equal(256 * high + low, q)
