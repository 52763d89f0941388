"""Attention of a prompt chunk against the twins, over pages of every format."""

from __future__ import annotations

import pytest
import torch

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.dense_weight import WeightKind
from moet_desk.kernels.triton.prefill_attention import PrefillScratch, gqa_prefill, mla_prefill
from tests.kernels.triton.makers import latent_halves, latent_weight, paged, relative_error

FORMS = list(KvFormat)
CPU = torch.device("cpu")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("count", "start"), [(21, 0), (17, 40)])
def test_mla_prefill__chunk_of_a_prompt__as_the_twin(
    form: KvFormat, count: int, start: int
) -> None:
    heads, dn, dv, r, dr = 3, 48, 64, 64, 16
    up = latent_weight(WeightKind.BF16, heads, dn, dv, r)
    seen = start + count
    entries = ref.mla_write(torch.randn(seen, r), torch.randn(seen, dr), form)
    q, q_rope = torch.randn(count, heads, dn + dr), torch.randn(count, heads, dr)
    out = torch.empty(count, heads * dv)
    scratch = PrefillScratch.make(seen, r, dr, per_entry=2 * (dn + dv), device=CPU)
    kv = paged([entries], 16, form)
    mla_prefill(q[..., :dn], q_rope, kv, up, out, start=start, scale=0.2, scratch=scratch)
    latent, k_rope = (x.double() for x in ref.mla_read(entries, form, r, dr))
    want = ref.mla_plain(
        q[..., :dn].double(),
        q_rope.double(),
        latent,
        k_rope,
        *latent_halves(up),
        scale=0.2,
        start=start,
    )
    assert relative_error(out, want) < 3e-5


@pytest.mark.parametrize(
    ("kind", "by_row"),
    [(WeightKind.FP8, False), (WeightKind.FP8, True), (WeightKind.INT8, True)],
)
def test_mla_prefill__scaled_weights__groups_begin_at_a_block_of_scales(
    kind: WeightKind, by_row: bool
) -> None:
    heads, dn, dv, r, dr = 4, 48, 48, 64, 16  # 96 rows a head: every fourth head begins a block
    up = latent_weight(kind, heads + 1, dn, dv, r, by_row=by_row)
    entries = ref.mla_write(torch.randn(9, r), torch.randn(9, dr), KvFormat.F32)
    kv, q = paged([entries], 16, KvFormat.F32), torch.randn(9, heads + 1, dn)
    q_rope, out = torch.randn(9, heads + 1, dr), torch.empty(9, (heads + 1) * dv)
    scratch = PrefillScratch.make(9, r, dr, per_entry=4 * (dn + dv), device=CPU)
    mla_prefill(q, q_rope, kv, up, out, start=0, scale=0.2, scratch=scratch)
    latent, k_rope = (x.double() for x in ref.mla_read(entries, KvFormat.F32, r, dr))
    want = ref.mla_plain(
        q.double(), q_rope.double(), latent, k_rope, *latent_halves(up), scale=0.2, start=0
    )
    assert relative_error(out, want) < 3e-5
    if by_row:  # any group of heads will do
        three = PrefillScratch.make(9, r, dr, per_entry=3 * (dn + dv), device=CPU)
        again = torch.empty_like(out)
        mla_prefill(q, q_rope, kv, up, again, start=0, scale=0.2, scratch=three)
        assert relative_error(again, want) < 3e-5
        return
    small = PrefillScratch.make(9, r, dr, per_entry=3 * (dn + dv), device=CPU)
    with pytest.raises(ValueError, match="one head"):
        mla_prefill(q, q_rope, kv, up, out, start=0, scale=0.2, scratch=small)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("window", "with_sink"), [(None, False), (9, True)])
def test_gqa_prefill__chunk_of_a_prompt__as_the_twin(
    form: KvFormat, window: int | None, with_sink: bool
) -> None:
    heads, keys, d, dv, count, start = 6, 2, 32, 48, 13, 60
    k, v = torch.randn(start + count, keys, d), torch.randn(start + count, keys, dv)
    entries = ref.gqa_write(k, v, form)
    q, out = torch.randn(count, heads, d), torch.empty(count, heads, dv)
    sink = torch.randn(heads) if with_sink else None
    gqa_prefill(
        q, paged([entries], 16, form), out,
        n_keys=keys, start=start, scale=0.3, window=window, sink=sink,
    )  # fmt: skip
    k, v = ref.gqa_read(entries, form, keys, d, dv)
    want = ref.gqa(q, k, v, scale=0.3, start=start, window=window, sink=sink)
    assert relative_error(out.flatten(1), want) < 3e-5
