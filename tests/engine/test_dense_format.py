"""Dense weights rounded to 8 bits: what is rounded, that sizes on paper are those that are loaded,
and that both twins compute with the same numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moet_desk.engine.cuda.dense_weights import DenseLoader
from moet_desk.engine.dense_format import DenseFormat, may_round, rounded_bytes
from moet_desk.engine.planned_model import dense_saving
from moet_desk.kernels.reference import dense_values, quantize_dense
from moet_desk.kernels.triton.dense_weight import WeightKind
from moet_desk.store.pack_format import DENSE_FILE
from tests.engine.test_dense_weights import Reader

LAYER = "model.layers.0."
KEPT = (
    "lm_head", "model.embed_tokens", LAYER + "mlp.gate", LAYER + "mlp.router.classifier",
    LAYER + "self_attn.indexer.wq_b", LAYER + "eh_proj", LAYER + "attn.compressor.wkv",
    LAYER + "attn.compressor.ape", LAYER + "hc_attn_fn", "model.hc_head_fn", LAYER + "e_proj",
    LAYER + "ffn.gate.tid2eid",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_dense__any_numbers__half_a_step_away_at_most(dtype: torch.dtype) -> None:
    w = (torch.randn(40, 96) * torch.logspace(-30, 3, 40)[:, None]).to(dtype)
    w[3, 32:64] = 0
    w[4, 5] = -w[4].abs().max() * 3  # an outlier spoils its own block only
    q, scales = quantize_dense(w)
    step = scales.double().repeat_interleave(32, 1)
    assert ((dense_values(q, scales).double() - w.double()).abs() <= step / 2).all()
    exact = w.double().view(40, 3, 32).abs().amax(-1) / 127
    assert (scales.double() >= exact).all()  # or integers would be cut
    assert (scales.double() <= exact * (1 + 2**-7)).all()
    assert not dense_values(q, scales)[3, 32:64].any()


def test_quantize_dense__rows_of_a_matrix__do_not_see_each_other() -> None:
    w = torch.randn(6, 64)
    whole, part = quantize_dense(w), quantize_dense(w[2:4])
    assert torch.equal(whole[0][2:4], part[0])
    assert torch.equal(whole[1][2:4], part[1])


def test_may_round__products_alone() -> None:
    assert may_round(LAYER + "self_attn.o_proj", (64, 96))
    assert may_round(LAYER + "mlp.shared_experts.down_proj", (64, 96))
    assert not may_round(LAYER + "self_attn.o_proj", (64, 80))  # groups are not whole
    assert not may_round(LAYER + "input_layernorm", (64,))
    assert not any(may_round(name, (64, 96)) for name in KEPT)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dense file of a pack: two products in bfloat16, one in float32, one in FP8, the head."""
    folder, source = tmp_path_factory.mktemp("dense"), torch.Generator().manual_seed(3)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    tensors = {
        LAYER + "a.weight": made(40, 96).bfloat16(), LAYER + "b.weight": made(8, 96).bfloat16(),
        LAYER + "c.weight": made(12, 64), LAYER + "norm.weight": made(96).bfloat16(),
        LAYER + "d.weight": made(8, 96).to(torch.float8_e4m3fn),
        LAYER + "d.weight_scale_inv": torch.ones(1, 1), "lm_head.weight": made(50, 96).bfloat16(),
    }  # fmt: skip
    save_file(tensors, folder / DENSE_FILE)
    return folder


def test_loader__int8__the_cpu_s_numbers_and_the_plan_s_bytes(dense: Path) -> None:
    reader: Any = Reader(dense)
    rounded = DenseLoader(reader, torch.device("cpu"), DenseFormat.INT8)
    joined, single = rounded.matrix(LAYER + "a", LAYER + "b"), rounded.matrix(LAYER + "c")
    assert (joined.kind, single.kind) == (WeightKind.INT8, WeightKind.INT8)
    for weight, names in ((joined, "ab"), (single, "c")):
        assert weight.scales is not None
        want = torch.cat([reader.dense_tensor(LAYER + name) for name in names])
        want = dense_values(*quantize_dense(want))
        assert torch.equal(dense_values(weight.values, weight.scales), want)
    assert rounded.matrix("lm_head").kind is WeightKind.BF16
    assert rounded.matrix(LAYER + "d").kind is WeightKind.FP8
    taken = sum(t.nbytes for w in (joined, single) for t in (w.values, w.scales) if t is not None)
    assert taken == sum(rounded_bytes(shape) for shape in ((40, 96), (8, 96), (12, 64)))
    assert dense_saving(dense) == 2 * 48 * 96 + 4 * 12 * 64 - taken
