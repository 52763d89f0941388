"""Attention of a prompt's rows to entries chosen for each, interpreted, against the twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton import chosen_prefill as kernels
from moet_desk.kernels.triton.chosen_prefill import chosen_prefill
from moet_desk.kernels.triton.dense import WeightKind
from moet_desk.kernels.triton.gemm import gemm_of_heads, split
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.latent import LatentWeight
from moet_desk.kernels.triton.prefill_attention import PrefillScratch
from tests.kernels.triton.makers import (
    dense_weight,
    latent_halves,
    latent_weight,
    paged,
    real_values,
    relative_error,
)

CPU = torch.device("cpu")
SCALE, TOP_K, START = 0.2, 40, 83
COUNTS = [40, 1, 33, 40, 32, 7]
"""Of each row: more and less than a tile, whole ones too."""


def choice(seen: int, counts: list[int], top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places, how many are of each row, and the same as a mask; what is behind is nonsense."""
    chosen = torch.full((len(counts), top_k), 1 << 30, dtype=torch.int32)
    mask = torch.zeros(len(counts), seen, dtype=torch.bool)
    for t, count in enumerate(counts):
        own = torch.randperm(seen - len(counts) + t + 1)[:count].sort().values
        chosen[t, :count], mask[t, own] = own.int(), True
    return chosen, torch.tensor(counts, dtype=torch.int32), mask


class Prompt:
    """Rows of a prompt of random numbers, with what each is to see."""

    def __init__(self, up: LatentWeight, form: KvFormat, dr: int) -> None:
        rows, r = len(COUNTS), up.weight.k
        self.up, self.form, self.dr, self.seen = up, form, dr, START + rows
        stored = ref.mla_write(torch.randn(self.seen, r), torch.randn(self.seen, dr), form)
        self.kv: KvPages = paged([stored], 16, form)
        self.q = torch.randn(rows, up.heads, up.dn + dr)  # of which a kernel reads the first
        self.rope = torch.randn(rows, up.heads, dr)
        self.chosen, self.counts, mask = choice(self.seen, COUNTS, TOP_K)
        latent, k_rope = (x.double() for x in ref.mla_read(stored, form, r, dr))
        self.want = ref.mla_absorbed(
            self.q[..., : up.dn].double(), self.rope.double(), latent, k_rope, *latent_halves(up),
            scale=SCALE, start=START, chosen=mask,
        )  # fmt: skip

    def read(self, rows: slice, *, at_once: int) -> Tensor:
        """What these rows give, as many at a time."""
        up, r = self.up, self.up.weight.k
        floats = at_once * up.heads * (2 * r + self.dr)
        scratch = PrefillScratch(
            torch.full((2 * self.seen * r,), torch.nan, dtype=torch.bfloat16),
            torch.full((self.seen * self.dr,), torch.nan),
            torch.full((floats,), torch.nan),
        )
        q, rope = self.q[rows], self.rope[rows]
        out = torch.full((len(q), up.heads * up.dv), torch.nan)
        chosen_prefill(
            q[..., : up.dn], rope, self.kv, up, self.chosen[rows], self.counts[rows], out,
            entries=self.seen, scale=SCALE, scratch=scratch,
        )  # fmt: skip
        return out


@pytest.mark.parametrize("form", KvFormat)
def test_chosen_prefill__every_format__as_the_twin_and_each_row_alone(
    form: KvFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    prompt = Prompt(latent_weight(WeightKind.BF16, 18, 24, 20, 64), form, 16)
    found = prompt.read(slice(0, 6), at_once=6)
    assert relative_error(found, prompt.want) < 3e-5
    assert torch.equal(prompt.read(slice(0, 6), at_once=4), found)
    monkeypatch.setattr(kernels, "SMALL_TILE", replace(kernels.SMALL_TILE, held=True))
    assert torch.equal(prompt.read(slice(0, 6), at_once=6), found)
    for t in range(6):
        assert torch.equal(prompt.read(slice(t, t + 1), at_once=1)[0], found[t])


@pytest.mark.parametrize(
    ("kind", "by_row"), [*((kind, False) for kind in WeightKind), (WeightKind.FP8, True)]
)
@pytest.mark.parametrize(("dn", "dv", "r"), [(24, 20, 128), (40, 48, 32)])
def test_chosen_prefill__every_weight__as_the_twin(
    kind: WeightKind, by_row: bool, dn: int, dv: int, r: int
) -> None:
    torch.manual_seed(2)
    prompt = Prompt(latent_weight(kind, 3, dn, dv, r, by_row=by_row), KvFormat.NVFP4, 8)
    assert relative_error(prompt.read(slice(0, 6), at_once=5), prompt.want) < 3e-5


def test_chosen_prefill__latents_of_several_tiles__as_the_twin() -> None:
    torch.manual_seed(3)
    prompt = Prompt(latent_weight(WeightKind.FP8, 2, 72, 136, 288), KvFormat.BF16, 48)
    assert relative_error(prompt.read(slice(0, 6), at_once=6), prompt.want) < 3e-5


def test_chosen_prefill__too_little_room__refused() -> None:
    prompt = Prompt(latent_weight(WeightKind.BF16, 3, 24, 20, 64), KvFormat.NVFP4, 16)
    with pytest.raises(ValueError, match="single row"):
        prompt.read(slice(0, 6), at_once=0)
    prompt.seen += 1
    prompt.kv = KvPages(prompt.kv.pages[..., 1:], prompt.kv.table, prompt.form)
    with pytest.raises(ValueError, match="bytes"):
        prompt.read(slice(0, 6), at_once=6)


@pytest.mark.parametrize("kind", WeightKind)
def test_gemm_of_heads__some_rows_of_each__near_float64(kind: WeightKind) -> None:
    heads, rows, k, first, count, pitch = 3, 21, 128, 24, 40, 67
    x, weight = torch.randn(heads, rows, k), dense_weight(heads * pitch, k, kind)
    parts, out = torch.empty(2, heads, rows, k, dtype=torch.bfloat16), torch.empty(rows, 120)
    split(x.flatten(0, 1), parts.flatten(1, 2))
    gemm_of_heads(parts, weight, out, first=first, count=count)
    own = real_values(weight).view(heads, pitch, k)[:, first : first + count]
    want = torch.einsum("nmk,nck->mnc", x.double(), own).flatten(1)
    assert relative_error(out, want) < 1e-5
    with pytest.raises(ValueError, match="do not fit"):
        gemm_of_heads(parts, weight, out, first=first, count=pitch - first + 1)
