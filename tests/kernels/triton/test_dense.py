"""Dense products against float64, and rows that do not see each other."""

from __future__ import annotations

import pytest
import torch

from moet_desk.kernels.reference import swiglu
from moet_desk.kernels.triton.dense import NormOf, embed, gemv, head_gemv, swiglu_gemv
from moet_desk.kernels.triton.dense_weight import DenseWeight, WeightKind
from moet_desk.kernels.triton.gemm import gemm, gemm_by_group, split, swiglu_split
from moet_desk.kernels.triton.gemv_tiles import GemvTile, Way, lanes_of, way_of
from moet_desk.kernels.triton.norms import rms_norm
from tests.kernels.triton.makers import dense_weight, real_values, relative_error

KINDS = list(WeightKind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(7, 96), (5, 544)])
def test_gemv__odd_sizes__near_float64_and_each_row_alone(kind: WeightKind, n: int, k: int) -> None:
    weight = dense_weight(n, k, kind)
    x, bias, residual = torch.randn(8, k), torch.randn(n), torch.randn(8, n)
    whole = torch.empty(8, n)
    gemv(x, weight, whole, bias=bias, residual=residual)
    assert relative_error(whole, x.double() @ real_values(weight).T + bias + residual) < 5e-7
    for first, count in ((0, 1), (5, 1), (2, 3), (1, 6)):
        rows = slice(first, first + count)
        some = torch.empty(count, n)
        gemv(x[rows], weight, some, bias=bias, residual=residual[rows])
        assert torch.equal(some, whole[rows])


@pytest.mark.parametrize(
    ("k", "kind", "lanes"),
    [
        (4096, WeightKind.FP8, 128), (2048, WeightKind.FP8, 64), (1024, WeightKind.FP8, 32),
        (7168, WeightKind.FP8, 64), (6144, WeightKind.INT8, 128), (4096, WeightKind.BF16, 128),
        (2880, WeightKind.BF16, 128), (1024, WeightKind.F32, 128), (224, WeightKind.BF16, 32),
        (3840, WeightKind.FP8, 64), (3840, WeightKind.BF16, 128), (3824, WeightKind.INT8, 32),
    ],
)  # fmt: skip
def test_lanes_of__width__the_most_that_are_nearly_all_at_work(
    k: int, kind: WeightKind, lanes: int
) -> None:
    assert lanes_of(k, kind) == lanes


def test_way_of__steps_ahead__equal_passes_and_room_for_x() -> None:
    tile = GemvTile(rows=4, warps=1, ahead=4)
    assert way_of(4096, WeightKind.FP8, 1, tile) == Way(4, 4, 128, 2, eager=True)
    assert way_of(8192, WeightKind.FP8, 1, tile) == Way(4, 4, 128, 4, eager=True)
    assert way_of(8192, WeightKind.FP8, 2, tile) == Way(4, 4, 128, 4, eager=False)
    assert way_of(5 * 1024, WeightKind.FP8, 1, tile) == Way(4, 2, 64, 3, eager=True)
    assert way_of(64, WeightKind.BF16, 8, tile) == Way(4, 1, 32, 1, eager=True)
    assert way_of(64, WeightKind.FP8, 8, tile) == Way(4, 1, 32, 1, eager=False)


@pytest.mark.parametrize(
    ("k", "kind"), [(4096, WeightKind.FP8), (2048, WeightKind.INT8), (2944, WeightKind.BF16)]
)
def test_gemv__several_lanes_and_steps__same_bits_by_any_tile_and_near_float64(
    k: int, kind: WeightKind
) -> None:
    weight, x = dense_weight(5, k, kind), torch.randn(2, k)
    wanted = torch.empty(2, 5)
    gemv(x, weight, wanted, tile=GemvTile(rows=4, warps=4))
    assert relative_error(wanted, x.double() @ real_values(weight).T) < 5e-7
    for tile in (GemvTile(8, 4, 2), GemvTile(1, 8, 4)):
        for rows in (1, 2):
            out = torch.empty(rows, 5)
            gemv(x[:rows], weight, out, tile=tile)
            assert torch.equal(out, wanted[:rows])


@pytest.mark.parametrize("kind", KINDS)
def test_gemv__another_tile__same_bits(kind: WeightKind) -> None:
    weight, x = dense_weight(9, 224, kind), torch.randn(2, 224)
    outs = [torch.empty(2, 9) for _ in range(3)]
    for out, rows in zip(outs, (1, 4, 16), strict=True):
        gemv(x, weight, out, tile=GemvTile(rows=rows, warps=1))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_gemv__partial_blocks_of_scales__each_its_own() -> None:
    weight = dense_weight(131, 272, WeightKind.FP8)
    assert weight.scales is not None
    assert weight.scales.shape == (2, 3)
    x, out = torch.randn(1, 272), torch.empty(1, 131)
    gemv(x, weight, out, tile=GemvTile(rows=64, warps=4))
    assert relative_error(out, x.double() @ real_values(weight).T) < 5e-7


def test_gemv__residual_is_the_result__added_in_place() -> None:
    weight, x, out = dense_weight(4, 64, WeightKind.BF16), torch.randn(2, 64), torch.randn(2, 4)
    want = out.double() + x.double() @ real_values(weight).T
    gemv(x, weight, out, residual=out)
    assert relative_error(out, want) < 5e-7


@pytest.mark.parametrize("tile", [GemvTile(4, 1), GemvTile(16, 1), GemvTile(4, 2)], ids=str)
def test_gemv__first_columns_normed__bits_of_another_launch(tile: GemvTile) -> None:
    """With two warps it is another launch: a norm of 40 numbers has one."""
    weight, x = dense_weight(50, 64, WeightKind.BF16), torch.randn(3, 64)
    scale, arrived = torch.rand(40) + 0.5, torch.zeros(1, dtype=torch.int32)
    want, out = torch.zeros(3, 50), torch.zeros(3, 50)
    want_normed = torch.zeros(3, 40)
    gemv(x, weight, want, tile=tile)
    rms_norm(want[:, :40], scale, 1e-6, out=want_normed)
    for _ in range(2):
        normed = torch.zeros(3, 44)[:, :40]
        gemv(x, weight, out, norm=NormOf(scale, 1e-6, normed, arrived), tile=tile)
        assert torch.equal(out, want)
        assert torch.equal(normed, want_normed)
        assert int(arrived) == 0
    assert want_normed.all()


def test_gemv__nan_in_a_row__that_row_only() -> None:
    weight, x, out = dense_weight(4, 64, WeightKind.FP8), torch.randn(3, 64), torch.empty(3, 4)
    x[1, 5] = torch.nan
    gemv(x, weight, out)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [None, 0.7])
def test_swiglu_gemv__against_float64(kind: WeightKind, limit: float | None) -> None:
    weight, x, out = dense_weight(256, 64, kind), torch.randn(2, 64), torch.empty(2, 128)
    swiglu_gemv(x, weight, out, limit=limit, tile=GemvTile(rows=64, warps=4))
    both = x.double() @ real_values(weight).T
    assert relative_error(out, swiglu(both[:, :128], both[:, 128:], limit)) < 1e-6
    alone = torch.empty(1, 128)
    swiglu_gemv(x[1:], weight, alone, limit=limit, tile=GemvTile(rows=32, warps=4))
    assert torch.equal(alone[0], out[1])


@pytest.mark.parametrize("kind", KINDS)
def test_head_gemv__rows_of_each_head__with_its_part_of_x(kind: WeightKind) -> None:
    weight, x = dense_weight(3 * 72, 64, kind), torch.randn(2, 3, 64)
    out = torch.empty(2, 3 * 24)
    head_gemv(x, weight, out, first=48, count=24, pitch=72)
    wanted = real_values(weight).view(3, 72, 64)[:, 48:]
    assert relative_error(out, torch.einsum("thk,hnk->thn", x.double(), wanted).flatten(1)) < 5e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embed__ids__their_rows(dtype: torch.dtype) -> None:
    table, out = torch.randn(7, 70).to(dtype), torch.empty(3, 70)
    embed(torch.tensor([3, 0, 6], dtype=torch.int32), table, out)
    assert torch.equal(out, table[[3, 0, 6]].float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(5, 13, 96), (33, 140, 224)])
def test_gemm__odd_sizes__within_2e_5(kind: WeightKind, m: int, n: int, k: int) -> None:
    weight, x = dense_weight(n, k, kind), torch.randn(m, k)
    bias, residual = torch.randn(n), torch.randn(m, n)
    parts, out = torch.empty(2, m, k, dtype=torch.bfloat16), torch.empty(m, n)
    split(x, parts)
    gemm(parts, weight, out, bias=bias, residual=residual)
    assert relative_error(out, x.double() @ real_values(weight).T + bias + residual) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_gemm_by_group__inputs_of_their_own__within_2e_5(kind: WeightKind) -> None:
    weight, x = dense_weight(3 * 44, 96, kind), torch.randn(3, 17, 96)
    parts, out = torch.empty(2, 3 * 17, 96, dtype=torch.bfloat16), torch.empty(17, 150)
    split(x.view(3 * 17, 96), parts)
    gemm_by_group(parts.view(2, 3, 17, 96), weight, out[:, : 3 * 44])
    each = real_values(weight).view(3, 44, 96).transpose(1, 2)
    wanted = (x.double() @ each).transpose(0, 1).flatten(1)
    assert relative_error(out[:, : 3 * 44], wanted) < 2e-5
    with pytest.raises(ValueError, match="do not fit"):
        gemm_by_group(parts[:, : 2 * 17].view(2, 2, 17, 96), dense_weight(9, 96, kind), out)


def test_split__two_parts__16_bits_of_x() -> None:
    x, parts = torch.randn(3, 70), torch.empty(2, 3, 70, dtype=torch.bfloat16)
    split(x, parts)
    assert ((parts.double().sum(0) - x).abs() <= x.abs() * 2.0**-15).all()


def test_swiglu_split__halves_of_rows__parts_of_the_twins_result() -> None:
    both, parts = torch.randn(3, 80), torch.empty(2, 3, 40, dtype=torch.bfloat16)
    swiglu_split(both, parts, limit=0.5)
    assert relative_error(parts.double().sum(0), swiglu(both[:, :40], both[:, 40:], 0.5)) < 2e-5


def test_dense_weight__scales_of_another_grid__refused() -> None:
    values = torch.zeros(130, 64, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="do not fit"):
        DenseWeight(values, torch.zeros(1, 1))
    with pytest.raises(ValueError, match="do not fit"):
        DenseWeight(values)
    with pytest.raises(ValueError, match="cannot be"):
        DenseWeight(torch.zeros(2, 2, dtype=torch.int32))


def test_gemv__nine_rows__refused() -> None:
    weight = dense_weight(4, 32, WeightKind.F32)
    with pytest.raises(ValueError, match=r"not 1\.\.8 rows"):
        gemv(torch.zeros(9, 32), weight, torch.empty(9, 4))


# -- a scale per row ---------------------------------------------------------------------------


def test_gemv__scale_per_row__near_float64_and_each_row_alone() -> None:
    weight, x = dense_weight(131, 272, WeightKind.FP8, by_row=True), torch.randn(3, 272)
    assert weight.scale_rows == 1
    outs = [torch.empty(3, 131) for _ in range(2)]
    for out, rows in zip(outs, (16, 64), strict=True):
        gemv(x, weight, out, tile=GemvTile(rows=rows, warps=4))
    assert relative_error(outs[0], x.double() @ real_values(weight).T) < 5e-7
    assert torch.equal(outs[0], outs[1])
    alone = torch.empty(1, 131)
    gemv(x[1:2], weight, alone)
    assert torch.equal(alone[0], outs[0][1])


def test_swiglu_gemv__scale_per_row__halves_need_not_meet_a_block() -> None:
    weight = dense_weight(2 * 40, 160, WeightKind.FP8, by_row=True)
    x, out = torch.randn(2, 160), torch.empty(2, 40)
    swiglu_gemv(x, weight, out)
    both = x.double() @ real_values(weight).T
    assert relative_error(out, swiglu(both[:, :40], both[:, 40:], None)) < 1e-6
    with pytest.raises(ValueError, match="share a block"):
        swiglu_gemv(x, dense_weight(2 * 40, 160, WeightKind.FP8), out)


def test_head_gemv__scale_per_row__rows_of_each_head() -> None:
    weight, x = dense_weight(3 * 72, 160, WeightKind.FP8, by_row=True), torch.randn(2, 3, 160)
    out = torch.empty(2, 3 * 24)
    head_gemv(x, weight, out, first=48, count=24, pitch=72)
    wanted = real_values(weight).view(3, 72, 160)[:, 48:]
    assert relative_error(out, torch.einsum("thk,hnk->thn", x.double(), wanted).flatten(1)) < 5e-7


@pytest.mark.parametrize(("m", "n", "k"), [(5, 13, 96), (17, 140, 208)])
def test_gemm__scale_per_row__within_2e_5(m: int, n: int, k: int) -> None:
    weight, x = dense_weight(n, k, WeightKind.FP8, by_row=True), torch.randn(m, k)
    parts, out = torch.empty(2, m, k, dtype=torch.bfloat16), torch.empty(m, n)
    split(x, parts)
    gemm(parts, weight, out)
    assert relative_error(out, x.double() @ real_values(weight).T) < 2e-5


def test_dense_weight__one_row__scales_are_a_block() -> None:
    values = torch.zeros(1, 64, dtype=torch.float8_e4m3fn)
    assert DenseWeight(values, torch.zeros(1, 1)).scale_rows == 128
    with pytest.raises(ValueError, match="do not fit"):
        DenseWeight(values.expand(130, 64).contiguous(), torch.zeros(129, 1))
    with pytest.raises(ValueError, match="do not fit"):
        DenseWeight(torch.zeros(4, 8), torch.zeros(4, 1))
