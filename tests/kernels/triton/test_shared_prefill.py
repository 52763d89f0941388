"""Attention of a prompt's rows to entries that are key and value, interpreted, against twins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.head_parts import head_parts
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.prepare import Rotation
from moet_desk.kernels.triton.seen import Pooled
from moet_desk.kernels.triton.shared_prefill import Run, decode_seen, run_attention

HEADS, DIM, ROTARY, WINDOW, RING, FIRST, RATIO = 6, 128, 64, 6, 48, 96, 4
START, ROWS, PAGE, SPREAD, GROUPS = 65, 3, 2, 2, 2
TABLE = [3, 9, 0, 9, 5, 9, 1, 9, 2, 9, 4, 9, 6, 9, 8, 9, 7, 9]
"""Pages of a sequence, of which every second one is used."""


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _memory(form: KvFormat) -> tuple[KvPages, Pooled]:
    """A layer's: two rings, then pages of pooled entries."""
    entries = ref.shared_write(_random(FIRST + 10 * PAGE, DIM, seed=1), form, ROTARY)
    table = torch.tensor([TABLE], dtype=torch.int32)
    kv = KvPages(entries[:, None].contiguous(), table, form)
    own = KvPages(entries[FIRST:].view(10, PAGE, -1), table, form)
    return kv, Pooled(own, RATIO, SPREAD, FIRST)


def _places(position: int, far: list[int]) -> Tensor:
    """Where the entries that a row sees lie in the memory."""
    lie = [FIRST + TABLE[n // PAGE * SPREAD] * PAGE + n % PAGE for n in far]
    return ref.seen_entries(position, lie, first=RING, window=WINDOW, ring=RING)


def _run(pooled: Pooled | None, start: int = START) -> Run:
    return Run(start, RING, RING, WINDOW, pooled, 0 if pooled is None else (start + ROWS) // RATIO)


def _parts(q: Tensor) -> Tensor:
    high = q.bfloat16()
    return torch.stack([high, (q - high.float()).bfloat16()])


def _rotation() -> Rotation:
    frequencies, magnitude = ref.rope_frequencies(ROTARY, 1e4)
    cos, sin = ref.rope_tables(torch.arange(80), frequencies, magnitude)
    return Rotation(torch.zeros(1).int(), cos, sin, interleaved=True)


def _turned(heads: Tensor, positions: list[int], *, back: bool = False) -> Tensor:
    cos, sin = (table[positions][:, None] for table in (_rotation().cos, _rotation().sin))
    turned = ref.rotate(heads[..., -ROTARY:], cos, -sin if back else sin, interleaved=True)
    return torch.cat([heads[..., :-ROTARY], turned], -1)


def _room(run: Run, form: KvFormat) -> Tensor:
    dtype = torch.float32 if form is KvFormat.F32 else torch.bfloat16
    return torch.full((run.ring + run.n_pooled, DIM), torch.nan, dtype=dtype)


@pytest.mark.parametrize("form", KvFormat)
def test_decode_seen__ring_and_pages__entries_of_the_twin(form: KvFormat) -> None:
    kv, pooled = _memory(form)
    run = _run(pooled)
    found = _room(run, form)
    decode_seen(kv, run, found)
    every = ref.shared_read(kv.pages[:, 0], form, DIM, ROTARY)
    at = [*range(RING, 2 * RING), *_places(-1, list(range(run.n_pooled))).tolist()]
    assert torch.equal(found.float(), every[at])
    with pytest.raises(ValueError, match="no room"):
        decode_seen(kv, run, found[1:])
    with pytest.raises(ValueError, match="bytes"):
        decode_seen(kv, run, torch.zeros(99, 2 * DIM))


@pytest.mark.parametrize("form", [KvFormat.FP8, KvFormat.F32])
@pytest.mark.parametrize("start", [0, START])
@pytest.mark.parametrize("sees", ["window", "all", "chosen"])
def test_run_attention__rows_of_a_prompt__as_the_twin_and_each_row_alone(
    form: KvFormat, start: int, sees: str
) -> None:
    kv, pooled = _memory(form)
    far = [list(range((start + t + 1) // RATIO)) for t in range(ROWS)]
    run = _run(None if sees == "window" else pooled, start)
    if sees == "chosen":
        far = [own[1::2] for own in far]
        chosen = torch.full((ROWS, 12), 99, dtype=torch.int32)
        for t, own in enumerate(far):
            chosen[t, : len(own)] = torch.tensor(own)
        counts = torch.tensor([len(own) for own in far], dtype=torch.int32)
        run = replace(run, chosen=(chosen, counts))
    q, sink = _random(ROWS, HEADS, DIM, seed=2), _random(HEADS, seed=3)
    entries, parts = _room(run, form), _parts(q)
    decode_seen(kv, run, entries)
    out = torch.full((2, GROUPS, ROWS, HEADS // GROUPS * DIM), torch.nan, dtype=torch.bfloat16)
    options: dict[str, Any] = {"rotation": _rotation(), "scale": 0.1, "form": form}
    run_attention(parts, entries, run, sink, out, **options)
    for t in range(ROWS):
        places = _places(start + t, [] if sees == "window" else far[t])
        seen = ref.shared_read(kv.pages[places, 0], form, DIM, ROTARY)
        mask = torch.ones(1, len(places), dtype=torch.bool)
        want = ref.shared_attention(parts[:, t].float().sum(0)[None], seen, mask, sink, scale=0.1)
        want = _turned(want, [start + t], back=True).view(GROUPS, -1)
        torch.testing.assert_close(out[:, :, t].float().sum(0), want, rtol=1e-4, atol=2e-6)
    if sees == "all":
        alone = torch.full_like(out, torch.nan)
        own = Run(start + 1, RING, RING, WINDOW, pooled, run.n_pooled)
        run_attention(parts[:, 1:2], entries, own, sink, alone, first=2, **options)
        assert torch.equal(alone[:, :, 2], out[:, :, 1])
        assert alone[:, :, :2].isnan().all()


def test_head_parts__rows_and_heads__near_the_twins() -> None:
    x = 3 * _random(ROWS, HEADS, DIM, seed=4)
    positions = list(range(START, START + ROWS))
    rotation = replace(_rotation(), positions=torch.tensor(positions).int())
    parts = torch.empty(2, ROWS, HEADS, DIM, dtype=torch.bfloat16)
    head_parts(x, parts, rotation=rotation, eps=1e-6)
    want = _turned(ref.unit(x, 1e-6), positions)
    torch.testing.assert_close(parts.float().sum(0), want, rtol=2**-14, atol=1e-6)
    assert parts[1].abs().max() < 2**-6 * parts[0].abs().max()
