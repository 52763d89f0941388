"""Norms, and what stands between a layer's first product and attention, against the twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.kv_entries import KvPages, gqa_write, mla_write
from moet_desk.kernels.triton.norms import rms_norm
from moet_desk.kernels.triton.prepare import Rotation, gqa_prepare, mla_prepare, rotate_queries

ROWS, HEADS, NOPE, ROPE, RANK = 3, 5, 24, 16, 64
POSITIONS = torch.tensor([5, 0, 7], dtype=torch.int32)
TABLE = torch.tensor([[1, 2], [0, 3], [4, 4]], dtype=torch.int32)  # pages of 4 entries
FORMS = list(KvFormat)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")


def rotation(*, interleaved: bool) -> Rotation:
    frequencies, magnitude = ref.rope_frequencies(ROPE, 1e4)
    cos, sin = ref.rope_tables(torch.arange(64), frequencies, magnitude)
    return Rotation(POSITIONS, cos, sin, interleaved)


def turned(x: Tensor, by: Rotation) -> Tensor:
    """`reference.rotate` of [T, ..., dr] at the rows' positions."""
    at = POSITIONS.long()
    shape = (ROWS, *[1] * (x.dim() - 2), ROPE // 2)
    return ref.rotate(x, by.cos[at].view(shape), by.sin[at].view(shape), interleaved=by.interleaved)


def pages(form: KvFormat, entry_bytes: int) -> KvPages:
    return KvPages(torch.zeros(5, 4, entry_bytes, dtype=torch.uint8), TABLE, form)


def entries(kv: KvPages) -> Tensor:
    """The entries of the three rows; nothing else may have been written."""
    found = torch.stack([kv.pages[2, 1], kv.pages[0, 0], kv.pages[4, 3]])
    assert kv.pages.count_nonzero() == found.count_nonzero()
    return found


@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm__rows_and_one_alone__near_the_twin(plus_one: bool) -> None:
    x, w, out = torch.randn(3, 70), torch.randn(70), torch.empty(3, 70)
    rms_norm(x, w, 1e-6, out=out, plus_one=plus_one)
    assert torch.allclose(out, ref.rms_norm(x, w, 1e-6, plus_one=plus_one), rtol=1e-6, atol=1e-6)
    alone = torch.empty(1, 70)
    rms_norm(x[1:2], w, 1e-6, out=alone, plus_one=plus_one)
    assert torch.equal(alone[0], out[1])


def test_rms_norm__a_part_of_wider_rows_in_place__the_rest_stays() -> None:
    joined, w = torch.randn(3, 70), torch.randn(40)
    before = joined.clone()
    part = joined[:, 10:50]
    rms_norm(part, w, 1e-6, out=part)
    want = ref.rms_norm(before[:, 10:50], w, 1e-6)
    assert torch.allclose(joined[:, 10:50], want, rtol=1e-6, atol=1e-6)
    assert torch.equal(joined[:, :10], before[:, :10])
    assert torch.equal(joined[:, 50:], before[:, 50:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("r", "dr"), [(128, 32), (64, 16), (192, 8)])
def test_mla_write__any_values__the_twins_bytes(form: KvFormat, r: int, dr: int) -> None:
    latent, rope = torch.randn(ROWS, r) * 3, torch.randn(ROWS, dr)
    latent[0, :16] = 0
    latent[2, 5] = 1e6
    want = ref.mla_write(latent, rope, form)
    kv = pages(form, want.shape[1])
    mla_write(latent, rope, kv, POSITIONS)
    assert torch.equal(entries(kv), want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("d", "dv"), [(48, 16), (128, 64), (160, 32)])
def test_gqa_write__any_values__the_twins_bytes(form: KvFormat, d: int, dv: int) -> None:
    k, v = torch.randn(ROWS, 2, d), torch.randn(ROWS, 2, dv) * 20
    want = ref.gqa_write(k, v, form)
    kv = pages(form, want.shape[1])
    gqa_write(k, v, kv, POSITIONS)
    assert torch.equal(entries(kv), want)


@pytest.mark.parametrize("form", FORMS)
def test_mla_write__nan__still_there_when_read(form: KvFormat) -> None:
    latent, rope = torch.randn(ROWS, 64), torch.randn(ROWS, 16)
    latent[1, 3] = torch.nan
    kv = pages(form, ref.mla_entry_bytes(form, 64, 16))
    mla_write(latent, rope, kv, POSITIONS)
    read, _ = ref.mla_read(entries(kv), form, 64, 16)
    assert read[1].isnan().any()
    assert read[[0, 2]].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("interleaved", [True, False])
def test_mla_prepare__no_query_latent__entry_and_turned_queries(
    form: KvFormat, interleaved: bool
) -> None:
    by = rotation(interleaved=interleaved)
    joined = torch.randn(ROWS, HEADS * (NOPE + ROPE) + RANK + ROPE)
    weight, q_rope = torch.randn(RANK), torch.empty(ROWS, HEADS, ROPE)
    kv = pages(form, ref.mla_entry_bytes(form, RANK, ROPE))
    mla_prepare(joined, weight, 1e-6, rotation=by, kv=kv, q_out=q_rope)
    q, latent, k_rope = torch.split(joined, [HEADS * (NOPE + ROPE), RANK, ROPE], -1)
    assert torch.equal(q_rope, turned(q.reshape(ROWS, HEADS, -1)[..., NOPE:], by))
    want = ref.mla_write(ref.rms_norm(latent, weight, 1e-6), turned(k_rope, by), form)
    got, wanted = (ref.mla_read(e, form, RANK, ROPE) for e in (entries(kv), want))
    assert torch.allclose(got[0], wanted[0], rtol=1e-6, atol=2e-6)
    assert torch.equal(got[1], wanted[1])


def test_mla_prepare__query_latent__normed_then_turned_behind_its_product() -> None:
    by = rotation(interleaved=True)
    joined = torch.randn(ROWS, 40 + RANK + ROPE)
    weight, q_weight, latent = torch.randn(RANK), torch.randn(40), torch.empty(ROWS, 40)
    kv = pages(KvFormat.F32, ref.mla_entry_bytes(KvFormat.F32, RANK, ROPE))
    mla_prepare(joined, weight, 1e-6, rotation=by, kv=kv, q_out=latent, q_weight=q_weight)
    want = ref.rms_norm(joined[:, :40], q_weight, 1e-6)
    assert torch.allclose(latent, want, rtol=1e-6, atol=2e-6)
    rope = ref.mla_read(entries(kv), KvFormat.F32, RANK, ROPE)[1]
    assert torch.equal(rope, turned(joined[:, -ROPE:], by))
    q, q_rope = torch.randn(ROWS, HEADS, NOPE + ROPE), torch.empty(ROWS, HEADS, ROPE)
    rotate_queries(q, q_rope, rotation=by)
    assert torch.equal(q_rope, turned(q[..., NOPE:], by))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_gqa_prepare__partial_rotation__entry_and_queries(
    form: KvFormat, interleaved: bool, normed: bool
) -> None:
    by = rotation(interleaved=interleaved)
    d, dv, keys = 32, 16, 2
    joined, q_out = torch.randn(ROWS, (4 + keys) * d + keys * dv), torch.empty(ROWS, 4, d)
    weights = {"q_weight": torch.randn(d), "k_weight": torch.randn(d)} if normed else {}
    kv = pages(form, ref.gqa_entry_bytes(form, keys, d, dv))
    gqa_prepare(joined, q_out, rotation=by, kv=kv, dv=dv, eps=1e-6, **weights)
    parts = torch.split(joined, [4 * d, keys * d, keys * dv], -1)
    q, k = parts[0].reshape(ROWS, 4, d), parts[1].reshape(ROWS, keys, d)
    if normed:
        q = ref.rms_norm(q, weights["q_weight"], 1e-6)
        k = ref.rms_norm(k, weights["k_weight"], 1e-6)
    q, k = (torch.cat([turned(x[..., :ROPE], by), x[..., ROPE:]], -1) for x in (q, k))
    assert torch.allclose(q_out, q, rtol=1e-6, atol=2e-6)
    want = ref.gqa_write(k, parts[2].reshape(ROWS, keys, dv), form)
    if not normed:
        assert torch.equal(entries(kv), want)
    got, wanted = (ref.gqa_read(e, form, keys, d, dv) for e in (entries(kv), want))
    assert torch.allclose(got[0], wanted[0], rtol=1e-6, atol=2e-6)
    assert torch.equal(got[1], wanted[1])


def test_prepare__pages_of_another_size__refused() -> None:
    kv = pages(KvFormat.BF16, 100)
    with pytest.raises(ValueError, match="100 bytes"):
        mla_write(torch.zeros(ROWS, 64), torch.zeros(ROWS, 16), kv, POSITIONS)
