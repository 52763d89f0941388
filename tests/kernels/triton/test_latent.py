"""Queries into the latent space and back out, against float64."""

from __future__ import annotations

import pytest
import torch

from moet_desk.kernels.triton.dense_weight import WeightKind
from moet_desk.kernels.triton.latent import LatentWeight, mla_absorb, mla_out
from tests.kernels.triton.makers import dense_weight, latent_halves, latent_weight, relative_error

HEADS, NOPE, ROPE, RANK, VALUE = 3, 24, 16, 128, 20


@pytest.mark.parametrize(
    ("kind", "by_row"), [*((kind, False) for kind in WeightKind), (WeightKind.FP8, True)]
)
def test_absorb_and_out__every_weight__near_float64_and_each_row_alone(
    kind: WeightKind, by_row: bool
) -> None:
    up = latent_weight(kind, HEADS, NOPE, VALUE, RANK, by_row=by_row)
    w_k, w_v = latent_halves(up)
    q, latent = torch.randn(3, HEADS, NOPE + ROPE), torch.empty(3, HEADS, RANK)
    mla_absorb(q[..., :NOPE], up, latent)
    want = torch.einsum("tnd,ndr->tnr", q[..., :NOPE].double(), w_k)
    assert relative_error(latent, want) < 5e-7
    alone = torch.empty(1, HEADS, RANK)
    mla_absorb(q[1:2, :, :NOPE], up, alone)
    assert torch.equal(alone[0], latent[1])
    out = torch.empty(3, HEADS * VALUE)
    mla_out(latent, up, out)
    want = torch.einsum("tnr,nvr->tnv", latent.double(), w_v).flatten(1)
    assert relative_error(out, want) < 5e-7


def test_latent_weight__rows_of_other_heads__refused() -> None:
    with pytest.raises(ValueError, match="3 heads"):
        LatentWeight(dense_weight(100, 32, WeightKind.F32), 3, 20, 12)
