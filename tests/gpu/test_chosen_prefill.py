"""Attention of a prompt's rows to chosen entries on a GPU, at GLM-5.2's and DeepSeek-V3.2's sizes:
against float64, and each row alone.
"""

from __future__ import annotations

import pytest
import torch

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.chosen_prefill import chosen_prefill
from moet_desk.kernels.triton.dense import WeightKind
from moet_desk.kernels.triton.prefill_attention import PrefillScratch
from tests.gpu.test_attention import on_gpu
from tests.kernels.triton.makers import latent_halves, latent_weight, paged, relative_error
from tests.kernels.triton.test_chosen_prefill import choice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda")
ROWS, SEEN, TOP_K, R, DR = 40, 3000, 2048, 512, 64
GLM, V3 = (64, 192, 256), (128, 128, 128)
"""Heads, their numbers that are not rotated, and their values."""


@pytest.mark.parametrize(
    ("form", "kind", "sizes"),
    [
        (KvFormat.NVFP4, WeightKind.INT8, GLM),
        (KvFormat.NVFP4, WeightKind.FP8, V3),
        (KvFormat.BF16, WeightKind.BF16, GLM),
        (KvFormat.FP8, WeightKind.FP8, GLM),
        (KvFormat.F32, WeightKind.BF16, V3),
    ],
)
def test_chosen_prefill__rows_of_a_prompt__near_float64_and_each_row_alone(
    form: KvFormat, kind: WeightKind, sizes: tuple[int, int, int]
) -> None:
    torch.manual_seed(7)
    heads, dn, dv = sizes
    up = latent_weight(kind, heads, dn, dv, R, device="cuda")
    entries = ref.mla_write(torch.randn(SEEN, R), torch.randn(SEEN, DR), form)
    kv = on_gpu(paged([entries], 64, form))
    counts = [TOP_K, 1, 63, 64, 65, TOP_K - 1, 1000, *[TOP_K] * (ROWS - 7)]
    chosen, seen, mask = (x.to(GPU) for x in choice(SEEN, counts, TOP_K))
    q, scale = torch.randn(ROWS, heads, dn + DR, device=GPU), (dn + DR) ** -0.5
    rope = torch.randn(ROWS, heads, DR, device=GPU)
    scratch = PrefillScratch.make(SEEN, R, DR, per_entry=16 * (dn + dv), device=GPU)

    def read(first: int, count: int, scratch: PrefillScratch = scratch) -> torch.Tensor:
        own = slice(first, first + count)
        for left in (scratch.parts, scratch.ropes, scratch.expanded):
            left.fill_(torch.nan)
        out = torch.full((count, heads * dv), torch.nan, device=GPU)
        # Copies, so that every call has aligned tensors and runs the same variant.
        chosen_prefill(
            q[own, :, :dn], rope[own], kv, up, chosen[own].clone(), seen[own].clone(), out,
            entries=SEEN, scale=scale, scratch=scratch,
        )  # fmt: skip
        return out

    found = read(0, ROWS)
    latent, k_rope = (x.to(GPU).double() for x in ref.mla_read(entries, form, R, DR))
    want = ref.mla_absorbed(
        q[..., :dn].double(), rope.double(), latent, k_rope, *latent_halves(up),
        scale=scale, start=SEEN - ROWS, chosen=mask,
    )  # fmt: skip
    for t in range(ROWS):
        assert relative_error(found[t], want[t]) < 3e-5, counts[t]
    for first, count in ((0, 1), (5, 1), (39, 1), (3, 20), (17, 23)):
        assert torch.equal(read(first, count), found[first : first + count])
    few = PrefillScratch(
        scratch.parts, scratch.ropes, scratch.expanded[: 17 * heads * (2 * R + DR)]
    )
    assert torch.equal(read(0, ROWS, few), found)
