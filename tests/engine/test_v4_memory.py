"""What a card holds of DeepSeek-V4-Flash: as much as the planner was told; where entries lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers
from moet_desk.engine.cuda.chunk_sizes import chunk_bytes
from moet_desk.engine.cuda.pool_states import PooledStates, PoolMemory
from moet_desk.engine.cuda.pooled_sizes import pooled_mixers
from moet_desk.engine.families.deepseek_v4 import spec
from moet_desk.engine.kv_cache import KvCache
from moet_desk.engine.model_shape import device_kv_format, kv_token_bytes, slot_bytes
from moet_desk.engine.page_rows import PageRows
from moet_desk.engine.spec import Spec
from moet_desk.kernels.kinds import KvFormat
from tests.engine.test_deepseek_v4_config import FLASH

META = torch.device("meta")


@pytest.fixture(scope="module")
def flash() -> Spec:
    return spec(FLASH, path="config.json", has_mtp=True)


@pytest.mark.parametrize(("rows", "context"), [(64, 300), (256, 8192), (2048, 131_072)])
def test_chunk_bytes__flash__as_many_as_the_buffers_have(
    flash: Spec, rows: int, context: int
) -> None:
    made = ChunkBuffers.make(flash, rows, context=context, device=META)
    assert chunk_bytes(flash, rows, context=context) == made.n_bytes()
    assert made.block_rows == min(rows, 512)


@pytest.mark.parametrize("form", list(KvFormat))
def test_states__flash__slots_and_pages_as_planned(flash: Spec, form: KvFormat) -> None:
    mixers = pooled_mixers(flash, with_head=True)
    assert len(mixers) == 44

    def n_bytes(slots: int, pages: int) -> int:
        states = PooledStates(mixers, slots, form, n_pages=pages, page_tokens=64, device=META)
        return sum(_bytes(states.layer(i)) for i in range(len(mixers)))

    own = n_bytes(2, 8)
    assert n_bytes(3, 8) - own == slot_bytes(flash, form, with_head=True)
    more, token = n_bytes(2, 10) - own, kv_token_bytes(flash, form, on_card=True)
    assert 128 * (token - 1) < more <= 128 * token
    without = slot_bytes(flash, form) + mixers[-1].slot_bytes(form)
    assert without == slot_bytes(flash, form, with_head=True)


def _bytes(memory: PoolMemory) -> int:
    tensors = [memory.rows, *memory.states()]
    tensors += [] if memory.keys is None else [memory.keys.memory]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_device_kv_format__flash__as_released_unless_wished(flash: Spec) -> None:
    assert device_kv_format("auto", flash) is KvFormat.FP8
    assert device_kv_format("nvfp4", flash) is KvFormat.NVFP4


def test_page_rows__whole_rows_of_two_pages__on_the_first_of_them() -> None:
    memory = torch.zeros(6, 4, dtype=torch.uint8)
    rows = PageRows.whole(memory, n_pages=6, page_tokens=64, ratio=128)
    assert (rows.memory.shape, rows.spread) == ((6, 1, 4), 2)
    pages = [2, 3, 5, 0, 1]
    written = torch.arange(1, 13, dtype=torch.uint8).view(3, 4)
    rows.store(pages, 0, written[:2])
    rows.store(pages, 2, written[2:])
    assert torch.equal(memory[[2, 5, 1]], written)
    assert not memory[[0, 3, 4]].any()
    assert torch.equal(rows.first(pages, 3, in_a_row=True), written)
    assert torch.equal(rows.at(pages, torch.tensor([2, 0])), written[[2, 0]])


def test_states__of_another_length_than_kept__refused(flash: Spec) -> None:
    mixers = [replace(mixer, window=8) for mixer in pooled_mixers(flash, with_head=False)[:4]]
    cpu = torch.device("cpu")
    states = PooledStates(mixers, 2, KvFormat.FP8, n_pages=4, page_tokens=64, device=cpu)
    kv = KvCache(
        mixers[0], n_layers=0, n_pages=4, page_tokens=64, form=KvFormat.FP8, slots=states,
        recurrent=mixers,
    )  # fmt: skip
    sequence, other = kv.reserve(100), kv.reserve(100)
    assert sequence is not None
    assert other is not None
    for i in range(4):
        memory = states.layer(i)
        memory.rows.random_(generator=torch.Generator().manual_seed(i))
        for sums in memory.states():
            sums.normal_(generator=torch.Generator().manual_seed(i))
    sequence.base, sequence.length = 68, 70
    kept = kv.take_out(sequence, 0, 70)
    kv.put_in(other, 0, kept)
    assert other.base == 70
    assert (kv.take_out(other, 0, 70) == kept).all()
    own, at = states.layer(3), torch.arange(63, 70)
    assert torch.equal(own.rows[at % own.ring], own.rows[own.ring + at % own.ring])
    with pytest.raises(ValueError, match="no state was kept behind 60 tokens"):
        kv.take_out(sequence, 0, 60)
