"""Attention of a step against float64 and the twin, over pages of every format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.attention import gqa_decode, mla_decode
from moet_desk.kernels.triton.attention_parts import DecodeScratch
from moet_desk.kernels.triton.kv_entries import KvPages
from tests.kernels.triton.makers import paged, relative_error

FORMS = list(KvFormat)
CPU = torch.device("cpu")
HEADS, ROPE, RANK = 3, 16, 128
LENGTHS = [1, 64, 65, 200]  # one entry, a full part, one more, four parts


def mla_case(form: KvFormat, lengths: list[int]) -> tuple[list[Tensor], KvPages, Tensor, Tensor]:
    entries = [ref.mla_write(torch.randn(n, RANK), torch.randn(n, ROPE), form) for n in lengths]
    q_latent = torch.randn(len(lengths), HEADS, RANK)
    return entries, paged(entries, 16, form), q_latent, torch.randn(len(lengths), HEADS, ROPE)


def run_mla(q_latent: Tensor, q_rope: Tensor, kv: KvPages, lengths: list[int]) -> Tensor:
    rows, heads, r = q_latent.shape
    scratch = DecodeScratch.make(rows, heads, r, device=CPU)
    scratch.sums.fill_(torch.nan)  # what no part has written must not be read
    scratch.stats.fill_(torch.nan)
    out = torch.empty(rows, heads, r)
    seen = torch.tensor(lengths, dtype=torch.int32)
    mla_decode(q_latent, q_rope, kv, seen, out, scale=0.1, scratch=scratch)
    return out


@pytest.mark.parametrize("form", FORMS)
def test_mla_decode__rows_of_all_lengths__near_float64_and_each_row_alone(form: KvFormat) -> None:
    entries, kv, q_latent, q_rope = mla_case(form, LENGTHS)
    out = run_mla(q_latent, q_rope, kv, LENGTHS)
    for t, length in enumerate(LENGTHS):
        latent, k_rope = (x.double() for x in ref.mla_read(entries[t], form, RANK, ROPE))
        scores = q_latent[t].double() @ latent.T + q_rope[t].double() @ k_rope.T
        assert relative_error(out[t], (scores * 0.1).softmax(-1) @ latent) < 1e-6
        one = KvPages(kv.pages, kv.table[t : t + 1], form)
        alone = run_mla(q_latent[t : t + 1], q_rope[t : t + 1], one, [length])
        assert torch.equal(alone[0], out[t])


def test_mla_decode__more_than_64_parts__parts_grow() -> None:
    length = 64 * 64 + 1
    entries, kv, q_latent, q_rope = mla_case(KvFormat.NVFP4, [length])
    out = run_mla(q_latent, q_rope, kv, [length])
    latent, k_rope = (x.double() for x in ref.mla_read(entries[0], kv.form, RANK, ROPE))
    scores = q_latent[0].double() @ latent.T + q_rope[0].double() @ k_rope.T
    assert relative_error(out[0], (scores * 0.1).softmax(-1) @ latent) < 1e-6


def test_mla_decode__nan_entry__shows_in_the_row_that_sees_it() -> None:
    entries, kv, q_latent, q_rope = mla_case(KvFormat.BF16, [70, 70])
    broken = entries[1].clone()
    broken[69, :2] = torch.tensor([0xC0, 0x7F], dtype=torch.uint8)
    kv = paged([entries[0], broken], 16, KvFormat.BF16)
    assert run_mla(q_latent, q_rope, kv, [70, 69]).isfinite().all()
    out = run_mla(q_latent, q_rope, kv, [70, 70])
    assert out[0].isfinite().all()
    assert out[1].isnan().any(-1).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("window", "with_sink"), [(None, False), (70, True)])
def test_gqa_decode__rows_of_all_lengths__as_the_twin(
    form: KvFormat, window: int | None, with_sink: bool
) -> None:
    heads, keys, d, dv = 6, 2, 32, 48
    lengths = [1, 65, 150]
    entries = [
        ref.gqa_write(torch.randn(n, keys, d), torch.randn(n, keys, dv), form) for n in lengths
    ]
    kv, q = paged(entries, 16, form), torch.randn(3, heads, d)
    sink = torch.randn(heads) if with_sink else None
    options = {"n_keys": keys, "scale": 0.2, "window": window, "sink": sink}
    out = torch.empty(3, heads, dv)
    scratch = DecodeScratch.make(3, heads, dv, device=CPU)
    scratch.stats.fill_(torch.nan)
    scratch.sums.fill_(torch.nan)
    seen = torch.tensor(lengths, dtype=torch.int32)
    gqa_decode(q, kv, seen, out, scratch=scratch, **options)  # type: ignore[arg-type]
    for t, length in enumerate(lengths):
        k, v = ref.gqa_read(entries[t], form, keys, d, dv)
        want = ref.gqa(q[t : t + 1], k, v, scale=0.2, start=length - 1, window=window, sink=sink)
        assert relative_error(out[t].flatten(), want[0]) < 1e-6
    one, alone = KvPages(kv.pages, kv.table[1:2], form), torch.empty(1, heads, dv)
    gqa_decode(q[1:2], one, seen[1:2], alone, scratch=scratch, **options)  # type: ignore[arg-type]
    assert torch.equal(alone[0], out[1])


def test_decode__scratch_too_small__refused() -> None:
    _, kv, q_latent, q_rope = mla_case(KvFormat.F32, [3])
    scratch = DecodeScratch.make(1, HEADS - 1, RANK, device=CPU)
    seen = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(ValueError, match="no room"):
        mla_decode(
            q_latent, q_rope, kv, seen, torch.empty_like(q_latent), scale=0.1, scratch=scratch
        )
