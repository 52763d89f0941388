"""Dense products, norms and KV entries on a GPU, at the shapes of the models we name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton import dense, latent
from moet_desk.kernels.triton.dense import NormOf, embed, gemv, swiglu_gemv
from moet_desk.kernels.triton.dense_weight import WeightKind
from moet_desk.kernels.triton.gemm import gemm, split, swiglu_split
from moet_desk.kernels.triton.kv_entries import KvPages, gqa_write, mla_write
from moet_desk.kernels.triton.latent import mla_absorb, mla_out
from moet_desk.kernels.triton.norms import rms_norm
from moet_desk.kernels.triton.prepare import Rotation, gqa_prepare, mla_prepare, rotate_queries
from tests.kernels.triton.makers import (
    dense_weight,
    latent_halves,
    latent_weight,
    real_values,
    relative_error,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = "cuda"
STORED = [WeightKind.FP8, WeightKind.BF16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def invariant(
    run: Callable[[Tensor, Tensor], None], x: Tensor, width: int, counts: tuple[int, ...] = (1, 3)
) -> Tensor:
    """Results [8, width] of 8 rows; steps of `counts` rows must give each row the same bits."""
    whole = torch.empty(8, width, device=GPU)
    run(x, whole)
    for count in counts:
        some = torch.empty(count, width, device=GPU)
        first = (3 * count) % (9 - count)
        run(x[first : first + count].contiguous(), some)
        assert torch.equal(some, whole[first : first + count]), f"{count} rows"
    return whole


@pytest.mark.parametrize(
    ("kind", "n", "k"),
    [
        (WeightKind.FP8, 4096, 4096),
        (WeightKind.BF16, 4096, 4096),
        (WeightKind.FP8, 2112, 7168),
        (WeightKind.BF16, 2112, 2048),
        (WeightKind.BF16, 512, 512),
        (WeightKind.FP8, 500, 528),
        (WeightKind.FP8, 512, 1024),  # 32 lanes share a row
        (WeightKind.FP8, 512, 2048),  # 64 lanes
        (WeightKind.INT8, 512, 8192),  # 128 lanes
    ],
)
def test_gemv__real_shapes__near_float64_for_any_number_of_rows(
    kind: WeightKind, n: int, k: int
) -> None:
    weight, x = dense_weight(n, k, kind, device=GPU), torch.randn(8, k, device=GPU)
    counts = tuple(range(1, 8)) if n in (500, 512) else (1, 4)
    out = invariant(lambda rows, to: gemv(rows, weight, to), x, n, counts)
    assert relative_error(out, x.double() @ real_values(weight).T) < 1e-6


@pytest.mark.parametrize(("n", "k", "columns"), [(1536, 4096, 1024), (2112, 7168, 1536)])
def test_gemv__first_columns_normed__bits_of_another_launch_for_any_number_of_rows(
    n: int, k: int, columns: int
) -> None:
    weight, x = dense_weight(n, k, WeightKind.FP8, device=GPU), torch.randn(8, k, device=GPU)
    scale = torch.rand(columns, device=GPU) + 0.5
    arrived = torch.zeros(1, dtype=torch.int32, device=GPU)
    whole, want = torch.empty(8, n, device=GPU), torch.empty(8, columns, device=GPU)
    gemv(x, weight, whole)
    rms_norm(whole[:, :columns], scale, 1e-6, out=want)
    for rows in (1, 2, 3, 8) * 20:
        out, normed = torch.empty(rows, n, device=GPU), torch.empty(rows, columns, device=GPU)
        gemv(x[:rows], weight, out, norm=NormOf(scale, 1e-6, normed, arrived))
        assert torch.equal(out, whole[:rows])
        assert torch.equal(normed, want[:rows])
        assert int(arrived) == 0


def test_gemv__float32_router__near_float64() -> None:
    weight = dense_weight(256, 4096, WeightKind.F32, device=GPU)
    x = torch.randn(8, 4096, device=GPU)
    out = invariant(lambda rows, to: gemv(rows, weight, to), x, 256)
    assert relative_error(out, x.double() @ real_values(weight).T) < 1e-6


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize(("inter", "k"), [(2048, 4096), (256, 512)])
def test_swiglu_gemv__shared_expert__near_float64(kind: WeightKind, inter: int, k: int) -> None:
    weight, x = dense_weight(2 * inter, k, kind, device=GPU), torch.randn(8, k, device=GPU)
    out = invariant(lambda rows, to: swiglu_gemv(rows, weight, to, limit=7.0), x, inter)
    both = x.double() @ real_values(weight).T
    assert relative_error(out, ref.swiglu(both[:, :inter], both[:, inter:], 7.0)) < 2e-6


@pytest.mark.parametrize(
    ("kind", "heads", "dn", "dv", "r"),
    [
        (WeightKind.BF16, 64, 128, 128, 512),
        (WeightKind.FP8, 64, 192, 256, 512),
        (WeightKind.BF16, 8, 32, 64, 128),
    ],
)
def test_latent__absorb_and_out__near_float64(
    kind: WeightKind, heads: int, dn: int, dv: int, r: int
) -> None:
    up = latent_weight(kind, heads, dn, dv, r, device=GPU)
    w_k, w_v = latent_halves(up)
    q = torch.randn(8, heads * (dn + 64), device=GPU)

    def absorb(rows: Tensor, to: Tensor) -> None:
        mla_absorb(rows.view(-1, heads, dn + 64)[..., :dn], up, to.view(-1, heads, r))

    got = invariant(absorb, q, heads * r).view(8, heads, r)
    want = torch.einsum("tnd,ndr->tnr", q.view(8, heads, -1)[..., :dn].double(), w_k)
    assert relative_error(got, want) < 1e-6
    out = invariant(
        lambda rows, to: mla_out(rows.view(-1, heads, r), up, to), got.flatten(1), heads * dv
    )
    assert relative_error(out, torch.einsum("tnr,nvr->tnv", got.double(), w_v).flatten(1)) < 1e-6


def test_e4m3__converted_in_hardware_or_by_bits__same_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no e4m3")
    weight = dense_weight(512, 1024, WeightKind.FP8, device=GPU)
    up = latent_weight(WeightKind.FP8, 4, 64, 64, 256, device=GPU)
    x, q = torch.randn(3, 1024, device=GPU), torch.randn(3, 4, 64, device=GPU)
    results = []
    for hardware in (True, False):
        for module in (dense, latent):
            monkeypatch.setattr(module, "has_e4m3", lambda device, answer=hardware: answer)
        out, moved = torch.empty(3, 512, device=GPU), torch.empty(3, 4, 256, device=GPU)
        gemv(x, weight, out)
        mla_absorb(q, up, moved)
        results.append((out, moved))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


# Two bfloat16 parts leave 2.3e-6 of a float32 (rms; at most 2**-17); cutting the weight too and
# leaving out low x low makes it 4e-6. Within a chunk of 64 inputs the tensor core's sum loses at
# most 2**-23 in each of its 4 large additions and as much again where it aligns products: 1e-6.
GEMM_LIMIT = 1e-5


@pytest.mark.parametrize("kind", list(WeightKind))
@pytest.mark.parametrize(("m", "n", "k"), [(300, 4096, 4096), (65, 576, 7168), (33, 500, 544)])
def test_gemm__chunks_of_a_prompt__near_float64(kind: WeightKind, m: int, n: int, k: int) -> None:
    weight, x = dense_weight(n, k, kind, device=GPU), torch.randn(m, k, device=GPU)
    residual = torch.randn(m, n, device=GPU)
    parts = torch.empty(2, m, k, dtype=torch.bfloat16, device=GPU)
    out = torch.empty(m, n, device=GPU)
    split(x, parts)
    gemm(parts, weight, out, residual=residual)
    assert relative_error(out - residual, x.double() @ real_values(weight).T) < GEMM_LIMIT


def test_gemm__one_sign__no_drift_of_the_sum() -> None:
    weight = dense_weight(256, 7168, WeightKind.BF16, device=GPU)
    weight.values.abs_()
    x = torch.rand(64, 7168, device=GPU)
    parts = torch.empty(2, 64, 7168, dtype=torch.bfloat16, device=GPU)
    out = torch.empty(64, 256, device=GPU)
    split(x, parts)
    gemm(parts, weight, out)
    assert relative_error(out, x.double() @ real_values(weight).T) < GEMM_LIMIT


def test_swiglu_split__halves_of_rows__parts_of_the_twins_result() -> None:
    both = torch.randn(40, 4096, device=GPU)
    parts = torch.empty(2, 40, 2048, dtype=torch.bfloat16, device=GPU)
    swiglu_split(both, parts)
    want = ref.swiglu(both[:, :2048].double(), both[:, 2048:].double())
    assert relative_error(parts.double().sum(0), want) < 1e-5


@pytest.mark.parametrize("hidden", [512, 2048, 7168])
def test_rms_norm__rows__near_the_twin(hidden: int) -> None:
    x, w = torch.randn(8, hidden, device=GPU), torch.randn(hidden, device=GPU)
    out = invariant(lambda rows, to: rms_norm(rows, w, 1e-6, out=to), x, hidden)
    want = ref.rms_norm(x.double(), w.double(), 1e-6)
    assert relative_error(out, want) < 5e-7


def test_embed__ids__their_rows() -> None:
    table = torch.randn(1000, 4096, device=GPU).bfloat16()
    ids, out = torch.tensor([3, 999, 0], dtype=torch.int32, device=GPU), torch.empty(3, 4096)
    out = out.to(GPU)
    embed(ids, table, out)
    assert torch.equal(out, table[ids.long()].float())


POSITIONS = torch.tensor([5, 0, 127], dtype=torch.int32)
TABLE = torch.tensor([[1, 2], [0, 3], [4, 5]], dtype=torch.int32)  # pages of 64 entries


def pages(form: KvFormat, entry_bytes: int) -> KvPages:
    shape = (6, 64, entry_bytes)
    return KvPages(torch.zeros(shape, dtype=torch.uint8, device=GPU), TABLE.to(GPU), form)


def entries(kv: KvPages) -> Tensor:
    return torch.stack([kv.pages[1, 5], kv.pages[0, 0], kv.pages[5, 63]]).cpu()


@pytest.mark.parametrize("form", list(KvFormat))
def test_write__entries__the_twins_bytes(form: KvFormat) -> None:
    latents, ropes = torch.randn(3, 512) * 3, torch.randn(3, 64)
    latents[0, :32] = 0
    want = ref.mla_write(latents, ropes, form)
    kv = pages(form, want.shape[1])
    mla_write(latents.to(GPU), ropes.to(GPU), kv, POSITIONS.to(GPU))
    assert torch.equal(entries(kv), want)
    k, v = torch.randn(3, 4, 128), torch.randn(3, 4, 128) * 30
    want = ref.gqa_write(k, v, form)
    kv = pages(form, want.shape[1])
    gqa_write(k.to(GPU), v.to(GPU), kv, POSITIONS.to(GPU))
    assert torch.equal(entries(kv), want)


def rotation(dim: int, *, interleaved: bool) -> tuple[Rotation, Tensor, Tensor]:
    cos, sin = ref.rope_tables(torch.arange(256), ref.rope_frequencies(dim, 1e4)[0])
    by = Rotation(POSITIONS.to(GPU), cos.to(GPU), sin.to(GPU), interleaved)
    at = POSITIONS.long()
    return by, cos[at], sin[at]


@pytest.mark.parametrize("interleaved", [True, False])
def test_mla_prepare__deepseek_shape__near_the_twin(interleaved: bool) -> None:
    by, cos, sin = rotation(64, interleaved=interleaved)
    joined, w, q_w = torch.randn(3, 1536 + 512 + 64), torch.randn(512), torch.randn(1536)
    kv = pages(KvFormat.F32, ref.mla_entry_bytes(KvFormat.F32, 512, 64))
    q_latent = torch.empty(3, 1536, device=GPU)
    mla_prepare(
        joined.to(GPU), w.to(GPU), 1e-6, rotation=by, kv=kv, q_out=q_latent, q_weight=q_w.to(GPU)
    )
    q, c, k = torch.split(joined, [1536, 512, 64], -1)
    assert relative_error(q_latent.cpu(), ref.rms_norm(q, q_w, 1e-6)) < 5e-7
    got = ref.mla_read(entries(kv), KvFormat.F32, 512, 64)
    assert relative_error(got[0], ref.rms_norm(c, w, 1e-6)) < 5e-7
    assert relative_error(got[1], ref.rotate(k, cos, sin, interleaved=interleaved)) < 5e-7
    queries, q_rope = torch.randn(3, 64, 192), torch.empty(3, 64, 64, device=GPU)
    rotate_queries(queries.to(GPU), q_rope, rotation=by)
    want = ref.rotate(queries[..., 128:], cos[:, None], sin[:, None], interleaved=interleaved)
    assert relative_error(q_rope.cpu(), want) < 5e-7


def test_gqa_prepare__qwen_shape__near_the_twin() -> None:
    by, cos, sin = rotation(128, interleaved=False)
    joined, w = torch.randn(3, (32 + 4 + 4) * 128), torch.randn(128)
    kv = pages(KvFormat.F32, ref.gqa_entry_bytes(KvFormat.F32, 4, 128, 128))
    q_out = torch.empty(3, 32, 128, device=GPU)
    weights = {"q_weight": w.to(GPU), "k_weight": w.to(GPU)}
    gqa_prepare(joined.to(GPU), q_out, rotation=by, kv=kv, dv=128, eps=1e-6, **weights)
    heads = joined.view(3, 40, 128)
    turned = ref.rotate(
        ref.rms_norm(heads[:, :36], w, 1e-6), cos[:, None], sin[:, None], interleaved=False
    )
    assert relative_error(q_out.cpu(), turned[:, :32]) < 5e-7
    k, v = ref.gqa_read(entries(kv), KvFormat.F32, 4, 128, 128)
    assert relative_error(k, turned[:, 32:]) < 5e-7
    assert torch.equal(v, heads[:, 36:])
