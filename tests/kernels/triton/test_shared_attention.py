"""Attention over chosen entries that are key and value, interpreted, against the twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.attention import DecodeScratch
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.shared_attention import shared_decode

HEADS, DIM, ROTARY, HELD = 5, 128, 64, 90
LENGTHS = [1, 32, 70]


@pytest.mark.parametrize(
    ("form", "splits"), [*((form, 64) for form in KvFormat), (KvFormat.BF16, 1)]
)
def test_shared_decode__lists_of_all_lengths__as_the_twin_and_each_row_alone(
    form: KvFormat, splits: int
) -> None:
    source = torch.Generator().manual_seed(3)
    entries = ref.shared_write(torch.randn(HELD, DIM, generator=source), form, ROTARY)
    q, sink = torch.randn(3, HEADS, DIM, generator=source), torch.randn(HEADS, generator=source)
    table = torch.stack([torch.randperm(HELD, generator=source) for _ in LENGTHS]).int()
    kv = KvPages(entries[:, None].contiguous(), table, form)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    scratch = DecodeScratch.make(3, HEADS, DIM, device=torch.device("cpu"))
    scratch.sums.fill_(torch.nan)
    scratch.stats.fill_(torch.nan)
    out, alone = torch.empty(3, HEADS, DIM), torch.empty(1, HEADS, DIM)
    options: dict[str, Any] = {"scale": 0.1, "scratch": scratch, "splits": splits}
    shared_decode(q, kv, lengths, sink, out, **options)
    for t, length in enumerate(LENGTHS):
        seen = ref.shared_read(entries[table[t, :length].long()], form, DIM, ROTARY)
        mask = torch.ones(1, length, dtype=torch.bool)
        want = ref.shared_attention(q[t : t + 1], seen, mask, sink, scale=0.1)
        torch.testing.assert_close(out[t], want[0], rtol=1e-5, atol=2e-6)
    one = KvPages(kv.pages, table[1:2], form)
    shared_decode(q[1:2], one, lengths[1:2], sink, alone, **options)
    assert torch.equal(alone[0], out[1])


def test_shared_decode__entries_of_another_size__refused() -> None:
    pages = torch.zeros(4, 1, 584, dtype=torch.uint8)
    kv = KvPages(pages, torch.zeros(1, 4, dtype=torch.int32), KvFormat.FP8)
    scratch = DecodeScratch.make(1, HEADS, DIM, device=torch.device("cpu"))
    q, lengths = torch.zeros(1, HEADS, DIM), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="584"):
        shared_decode(q, kv, lengths, torch.zeros(HEADS), q.clone(), scale=1.0, scratch=scratch)
