"""Attention with a window over pages that are taken in turn: the bits of one over all pages."""

from __future__ import annotations

from typing import Any

import torch

from moet_desk.engine.cuda.buffers import StepInputs
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.kernels import reference as ref
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.attention import gqa_decode
from moet_desk.kernels.triton.attention_parts import DecodeScratch
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.prefill_attention import gqa_prefill

HEADS, KEYS, D = 2, 1, 32
PAGE, WINDOW, ROWS, LENGTH = 16, 20, 18, 120
RING = -(-(WINDOW + ROWS) // PAGE) + 1
CPU = torch.device("cpu")


def test_attention__pages_in_turn__same_bits_as_all_pages() -> None:
    torch.manual_seed(0)
    form = KvFormat.BF16
    k, v = torch.randn(LENGTH, KEYS, D), torch.randn(LENGTH, KEYS, D)
    size = ref.gqa_entry_bytes(form, KEYS, D, D)
    n_pages = -(-LENGTH // PAGE)
    sequence = KvSequence(list(range(n_pages)), ring=[5, 2, 7, 1])
    assert len(sequence.ring) == RING
    tables = [sequence.pages, sequence.ring_pages()]
    found = []
    for pages in tables:
        memory = torch.zeros((n_pages + 1, PAGE, size), dtype=torch.uint8)
        table = torch.tensor([pages], dtype=torch.int32)
        for at, entry in enumerate(ref.gqa_write(k, v, form)):  # the newest one wins
            memory[pages[at // PAGE], at % PAGE] = entry
        options: dict[str, Any] = {"n_keys": KEYS, "scale": 0.3, "window": WINDOW}
        q = torch.randn(ROWS, HEADS, D, generator=torch.Generator().manual_seed(1))
        out, last = torch.empty(ROWS, HEADS, D), torch.empty(2, HEADS, D)
        gqa_prefill(q, KvPages(memory, table, form), out, start=LENGTH - ROWS, **options)
        seen = torch.tensor([LENGTH - 1, LENGTH], dtype=torch.int32)
        rows = KvPages(memory, table.expand(2, -1), form)
        scratch = DecodeScratch.make(2, HEADS, D, device=CPU)
        gqa_decode(q[:2], rows, seen, last, scratch=scratch, **options)
        found.append(torch.cat([out, last]))
    assert torch.equal(*found)
    assert found[0].isfinite().all()


def test_step_inputs__rows_of_several_sequences__both_tables_of_each() -> None:
    inputs = StepInputs(6, CPU, has_rings=True)
    first, second = KvSequence([3, 4, 5, 9], ring=[1, 0]), KvSequence([7, 8], ring=[2, 3])
    head = KvSequence(first.pages)  # the MTP head's count of the same tokens
    for rows in ([first, first, second], [head, first, first], [second, first, head]):
        for i, sequence in enumerate(rows):
            inputs.set_row(i, 11, 5, sequence.pages, sequence.ring)
        inputs.send()
        table, ring = inputs.unpack(3)[3], inputs.ring_table(3)
        for i, sequence in enumerate(rows):
            n = len(sequence.pages)
            assert table[i, :n].tolist() == sequence.pages
            assert not sequence.ring or ring[i, :n].tolist() == sequence.ring_pages()
    plain = StepInputs(6, CPU)
    assert plain.ring_table(2).shape == plain.unpack(2)[3].shape == (2, 6)
