"""Attention over chosen entries that are key and value, interpreted, against the twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.attention_parts import DecodeScratch
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.prepare import Rotation
from moet_desk.kernels.triton.shared_attention import shared_decode

HEADS, GROUPS, DIM, ROTARY, HELD, EPS = 6, 2, 128, 64, 90, 1e-4
LENGTHS, POSITIONS = [1, 32, 70], [0, 40, 700]


def turns() -> Rotation:
    frequencies, magnitude = ref.rope_frequencies(ROTARY, 1e4)
    cos, sin = ref.rope_tables(torch.arange(701), frequencies, magnitude)
    return Rotation(torch.tensor(POSITIONS).int(), cos, sin, interleaved=True)


def rotated(x: Tensor, rotation: Rotation, t: int, *, back: bool = False) -> Tensor:
    """x [1, N, D], its last dims as position t has them."""
    at = rotation.positions[t]
    cos, sin = rotation.cos[at], rotation.sin[at] * (-1 if back else 1)
    part = ref.rotate(x[..., -ROTARY:], cos, sin, interleaved=True)
    return torch.cat([x[..., :-ROTARY], part], -1)


@pytest.mark.parametrize(
    ("form", "splits", "width"),
    [
        *((form, 64, HELD) for form in KvFormat),
        (KvFormat.BF16, 1, HELD),
        (KvFormat.NVFP4, 64, 800),
        (KvFormat.FP8, 64, 2100),
    ],
)
def test_shared_decode__lists_of_all_lengths__as_the_twins_and_each_row_alone(
    form: KvFormat, splits: int, width: int
) -> None:
    source = torch.Generator().manual_seed(3)
    entries = ref.shared_write(torch.randn(HELD, DIM, generator=source), form, ROTARY)
    q, sink = 3 * torch.randn(3, HEADS, DIM, generator=source), torch.randn(HEADS, generator=source)
    table = torch.full((len(LENGTHS), width), 2**20, dtype=torch.int32)  # nothing lies there
    table[:, :HELD] = torch.stack([torch.randperm(HELD, generator=source) for _ in LENGTHS])
    kv = KvPages(entries[:, None].contiguous(), table, form)
    lengths, rotation = torch.tensor(LENGTHS, dtype=torch.int32), turns()
    scratch = DecodeScratch.make(3, HEADS, DIM, device=torch.device("cpu"))
    scratch.sums.fill_(torch.nan)
    scratch.stats.fill_(torch.nan)
    out = torch.empty(GROUPS, 3, HEADS // GROUPS * DIM)
    alone = torch.empty(1, GROUPS, HEADS // GROUPS * DIM).transpose(0, 1)
    options: dict[str, Any] = {"eps": EPS, "scale": 0.1, "scratch": scratch, "splits": splits}
    shared_decode(q, kv, lengths, sink, out, rotation=rotation, **options)
    for t, length in enumerate(LENGTHS):
        seen = ref.shared_read(entries[table[t, :length].long()], form, DIM, ROTARY)
        mask = torch.ones(1, length, dtype=torch.bool)
        heads = rotated(ref.unit(q[t : t + 1], EPS), rotation, t)
        want = ref.shared_attention(heads, seen, mask, sink, scale=0.1).view(1, HEADS, DIM)
        want = rotated(want, rotation, t, back=True).view(GROUPS, -1)
        torch.testing.assert_close(out[:, t], want, rtol=1e-5, atol=2e-6)
    one, own = (
        KvPages(kv.pages, table[1:2], form),
        replace(rotation, positions=rotation.positions[1:2]),
    )
    shared_decode(q[1:2], one, lengths[1:2], sink, alone, rotation=own, **options)
    assert torch.equal(alone[:, 0], out[:, 1])


def test_shared_decode__entries_of_another_size__refused() -> None:
    pages = torch.zeros(4, 1, 584, dtype=torch.uint8)
    kv = KvPages(pages, torch.zeros(1, 4, dtype=torch.int32), KvFormat.FP8)
    scratch = DecodeScratch.make(1, HEADS, DIM, device=torch.device("cpu"))
    q, lengths = torch.zeros(1, HEADS, DIM), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="584"):
        shared_decode(
            q, kv, lengths, torch.zeros(HEADS), q.clone().flatten(1)[None], rotation=turns(),
            eps=EPS, scale=1.0, scratch=scratch,
        )  # fmt: skip
