"""Experts of a prompt chunk against `reference.expert_mlp`, for 2-bit and FP4 rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference
from moet_desk.kernels.kinds import SWIGLU, Activations, Glu
from moet_desk.kernels.reference import ExpertBias
from moet_desk.kernels.triton.grouped import (
    Batch,
    PairGroups,
    RowAddresses,
    add_rows,
    expand,
    group_pairs,
    grouped_down,
    grouped_gate_up,
    make_batch,
    make_batches,
)
from tests.kernels.makers import Expert, quads_expert, random_expert
from tests.kernels.triton.moe_makers import expanded, plain_codes, random_bias, wanted_bytes

N_EXPERTS = 5


def addresses(rows: list[Tensor]) -> Tensor:
    return torch.tensor([row.data_ptr() for row in rows])


def row_addresses(experts: list[Expert], *, fine: bool) -> RowAddresses:
    return RowAddresses(
        experts[0].layout,
        addresses([expert.base_row for expert in experts]),
        addresses([expert.fine_row for expert in experts]) if fine else None,
    )


def random_ids(n_tokens: int, top_k: int) -> Tensor:
    chosen = torch.rand(n_tokens, N_EXPERTS).topk(top_k, dim=1).indices
    return chosen.sort(dim=1).values  # ascending, as prefill passes them


def run_batch(
    rows: RowAddresses, batch: Batch, groups: PairGroups, x: Tensor, *,
    glu: Glu = SWIGLU, kind: Activations = Activations.INT8, bias: ExpertBias | None = None,
) -> Tensor:  # fmt: skip
    layout = rows.layout
    workspace = torch.empty(len(batch.experts), layout.slot_floats, dtype=torch.int8)
    expand(rows, batch, workspace)
    codes, scales = plain_codes(x, kind)
    mid = torch.empty(batch.n_rows, layout.inter)
    grouped_gate_up(
        rows, batch, workspace, groups=groups, codes=codes, scales=scales, out=mid, glu=glu,
        bias=None if bias is None else bias.gate_up,
    )  # fmt: skip
    part = torch.empty(batch.n_rows, layout.hidden)
    mid_codes, mid_scales = plain_codes(mid, kind)
    grouped_down(
        rows, batch, workspace, codes=mid_codes, scales=mid_scales, out=part,
        bias=None if bias is None else bias.down,
    )  # fmt: skip
    return part


@pytest.mark.parametrize("fine", [False, True])
def test_expand__rows__the_weights_of_the_reference(fine: bool) -> None:
    experts = [random_expert(96, 64) for _ in range(N_EXPERTS)]
    batch = make_batch([1, 0, 2, 1, 1], range(N_EXPERTS), device="cpu")
    workspace = torch.empty(4, experts[0].layout.slot_floats, dtype=torch.int8)
    expand(row_addresses(experts, fine=fine), batch, workspace)
    for place, number in enumerate([0, 2, 3, 4]):
        expert = experts[number]
        slot = expert.fine_slot() if fine else expert.base_slot()
        at = 0
        for matrix, (_, scales) in zip(
            (expert.layout.gate_up, expert.layout.down), (expert.gate_up, expert.down), strict=True
        ):
            got = workspace[place, at : at + matrix.n * matrix.k].view(matrix.n, matrix.k).float()
            unit = torch.exp2(scales.float() - (128 if fine else 127)).repeat_interleave(32, 1)
            want = slot[at : at + matrix.n * matrix.k].view(matrix.k, matrix.n).T
            assert torch.equal(got * unit, want)
            at += matrix.n * matrix.k


@pytest.mark.parametrize("fine", [False, True])
def test_expand__every_quad_of_nibbles__the_bytes_of_the_definition(fine: bool) -> None:
    expert = quads_expert(2048, 64, scale=120, turns=[3])  # gate_up holds all 65,536
    got = expanded(expert, device="cpu", fine=fine)
    assert all(map(torch.equal, got, wanted_bytes(expert, fine=fine)))


# In another order a sum can move a hidden value over a rounding edge: by one step of its codes.
NEAR = {Activations.INT8: 2e-3, Activations.INT15: 1e-5}


@pytest.mark.parametrize(
    ("fine", "kind", "glu", "has_bias"),
    [
        (False, Activations.INT8, SWIGLU, False),
        (False, Activations.INT8, Glu(1.0, 1.702, 1.0), True),
        (True, Activations.INT15, SWIGLU, False),
        (True, Activations.INT15, Glu(1.0), False),
        (True, Activations.INT15, Glu(1.0, 1.702, 1.0), True),
        (True, Activations.INT8, SWIGLU, False),
    ],
)
def test_grouped__chunk__as_the_reference(
    fine: bool, kind: Activations, glu: Glu, has_bias: bool
) -> None:
    experts = [random_expert(64, 32, low=118, high=122) for _ in range(N_EXPERTS)]
    ids, x = random_ids(12, 2), torch.randn(12, 64)
    groups = group_pairs(ids, N_EXPERTS)
    batch = make_batch(groups.counts.tolist(), range(N_EXPERTS), device="cpu", pairs=16)
    rows = row_addresses(experts, fine=fine)
    bias = random_bias(rows.layout, N_EXPERTS) if has_bias else None
    part = run_batch(rows, batch, groups, x, glu=glu, kind=kind, bias=bias)
    q, s = reference.quantize_activations(x, kind)
    for row, pair in enumerate(groups.order.tolist()):
        t, k = divmod(pair, 2)
        expert = experts[int(ids[t, k])]
        slot = expert.fine_slot() if fine else expert.base_slot()
        own = None
        if bias is not None:
            one = ids[t, k : k + 1]
            own = ExpertBias(bias.gate_up[one], bias.down[one])
        want = reference.expert_mlp(
            q[t : t + 1], s[t : t + 1], slot, expert.layout, glu=glu, bias=own, kind=kind
        )
        assert float((part[row] - want[0]).norm() / want.norm()) < NEAR[kind]


def test_add_rows__any_batches__same_bits_as_combine() -> None:
    experts = [random_expert(64, 32, low=118, high=122) for _ in range(N_EXPERTS)]
    rows = row_addresses(experts, fine=False)
    ids, x, weights = random_ids(9, 3), torch.randn(9, 64), torch.rand(9, 3)
    groups = group_pairs(ids, N_EXPERTS)
    counts = groups.counts.tolist()
    sums = []
    for cuts in ([0, 5], [0, 1, 5], [0, 2, 2, 5]):
        out = torch.zeros(9, 64)
        for begin, end in pairwise(cuts):
            batch = make_batch(counts, range(begin, end), device="cpu", pairs=16)
            if batch.n_rows:
                part = run_batch(rows, batch, groups, x)
                add_rows(part, batch, groups, weights=weights, out=out)
        sums.append(out)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    whole = make_batch(counts, range(N_EXPERTS), device="cpu", pairs=32)
    part = run_batch(rows, whole, groups, x)
    by_pair = part[groups.position.long()]  # [M, K, H]
    assert torch.equal(sums[0], reference.combine(by_pair, weights))


def test_make_batches__tables_in_one_piece__those_of_each_batch() -> None:
    counts, pieces = [3, 0, 40, 1, 0, 200], [range(3), range(3, 5), range(5, 6)]
    sent = list[Tensor]()

    def send(table: Tensor) -> Tensor:
        sent.append(table)
        return table

    batches = make_batches(counts, pieces, send)
    assert len(sent) == 1
    for batch, piece in zip(batches, pieces, strict=True):
        want = make_batch(counts, piece, device="cpu")
        assert torch.equal(batch.experts, want.experts)
        assert torch.equal(batch.tiles, want.tiles)
        assert (batch.pairs, batch.first) == (want.pairs, want.first)
        assert batch.n_rows == want.n_rows == sum(counts[piece.start : piece.stop])


def test_make_batch__tiles__cover_each_row_once() -> None:
    counts = [3, 0, 40, 16, 17]
    batch = make_batch(counts, range(2, 5), device="cpu", pairs=16)
    assert (batch.first, batch.n_rows) == (3, 73)
    assert batch.experts.tolist() == [2, 3, 4]
    assert batch.tiles.tolist() == [
        [2, 0, 0, 16],
        [2, 0, 16, 16],
        [2, 0, 32, 8],
        [3, 1, 40, 16],
        [4, 2, 56, 16],
        [4, 2, 72, 1],
    ]


def test_group_pairs__positions__invert_the_order() -> None:
    ids = random_ids(12, 3)
    groups = group_pairs(ids, N_EXPERTS)
    flat = ids.reshape(-1)
    assert torch.equal(flat[groups.order.long()], flat.sort(stable=True).values)
    assert torch.equal(groups.order[groups.position.reshape(-1).long()], torch.arange(36).int())
    assert torch.equal(groups.tokens, groups.order // 3)
    assert int(groups.counts.sum()) == 36
