"""Models with gated DeltaNet on a device's launches, interpreted, against the CPU engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moet_desk.engine.blocks.gdn import GdnBlock
from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.cuda.chunk_buffers import Room
from moet_desk.engine.cuda.delta import ChunkStates, DeltaBuffers, DeviceStates, GdnLaunches
from moet_desk.engine.cuda.dense_weights import DenseLoader
from moet_desk.engine.cuda.expert_stream import Reading
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.families import spec_for
from moet_desk.engine.kv_cache import KvCache
from moet_desk.engine.spec import Gdn
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.triton.delta import DeltaRows
from moet_desk.kernels.triton.gemm import split
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.tiny_models import DELTA_CONFIGS, random_model, save_source
from tests.kernels.triton.slow_drive import check_steps_done_again
from tests.kernels.triton.test_chunk import OPTIONS, on_device, read

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 32, "num_experts": 4,
    "num_experts_per_tok": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "head_dim": 16,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_layer__rows_of_a_chunk_then_of_a_step__near_the_cpu_block(
    name: str, tmp_path: Path
) -> None:
    config = {**DELTA_CONFIGS[name], **SMALL, "linear_num_key_heads": 2}
    config["linear_num_value_heads"] = 4
    save_source(random_model(config, 0.25), tmp_path / "source")
    reader = PackReader.open(pack_source(tmp_path / "source", tmp_path / "pack"))
    spec = spec_for(reader.config(), path="config.json", has_mtp=False)
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Gdn)
    n_rows, n_chunk = 5, 3
    x = torch.randn(n_rows, spec.hidden, generator=torch.Generator().manual_seed(3))
    weights = Weights(reader.dense_tensor, "model.layers.0.linear_attn.")
    kv = KvCache(
        spec.attention, n_layers=1, n_pages=4, page_tokens=4, form=KvFormat.F32, recurrent=[mixer]
    )
    sequence = kv.reserve(8)
    assert sequence is not None
    block, none = GdnBlock(mixer, weights, layer=0), torch.empty(0)
    want = block(x, none, none, kv, sequence)

    layer = GdnLaunches(mixer, DenseLoader(reader, CPU), "model.layers.0.linear_attn.")
    memory = DeviceStates([mixer], 2, CPU).layer(0)
    positions = torch.arange(n_rows, dtype=torch.int32)
    parts = torch.empty(2, n_chunk, spec.hidden, dtype=torch.bfloat16)
    split(x[:n_chunk], parts)
    runs = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 1]], dtype=torch.int32)
    rooms = {"wide": Room(torch.randn(10**5)), "narrow": Room(torch.randn(10**5))}
    states = ChunkStates(memory, 1, runs)
    heads = layer.mix_block(parts, positions[:n_chunk], states, start=0, **rooms)
    out = weights("out_proj")
    assert (heads @ out.T - want[:n_chunk]).abs().max() < 2e-4 * want.std()
    rows = torch.tensor([[1, 1, 0, 2], [1, 0, 1, 0]], dtype=torch.int32)
    added = torch.zeros(n_rows - n_chunk, spec.hidden)
    here = DeltaRows(memory, rows, positions[n_chunk:])
    layer.launch(DeltaBuffers.make(mixer, 2, CPU), x[n_chunk:], added, here)
    assert (added - want[n_chunk:]).abs().max() < 2e-4 * want.std()  # behind the chunk's state
    reader.close()


@pytest.mark.slow
def test_engine__prompt_in_chunks_then_steps__near_the_cpu_engine(tmp_path: Path) -> None:
    n_prompt, n_step = 9, 2
    save_source(random_model({**DELTA_CONFIGS["qwen3_next"], **SMALL}, 0.25), tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    made = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 32, (n_prompt + n_step,), generator=made).tolist()
    with loaded(pack, **OPTIONS) as cpu:
        sizes = [n_prompt] + [1] * n_step
        want = logits_of(cpu, ids, plane=Plane.FINE, sizes=sizes)[n_prompt - 1 :]
    with on_device(pack, max_running=2) as core:  # chunks of 8
        sequence, other = core.kv.reserve(len(ids)), core.kv.reserve(len(ids))
        assert sequence is not None
        assert other is not None
        assert core.kv.reserve(1) is None  # states of two, however many pages are left
        prompt = read(core, ids[:n_prompt], sequence, Reading.EXACT)
        assert (prompt - want[0]).abs().max() < 1e-3 * want.std()
        sequence.length -= 1  # as a balanced answer does
        again = core.model.run([StepRow(ids[n_prompt - 1], sequence)], Plane.FINE)[0].clone()
        assert (again - want[0]).abs().max() < 1e-3 * want.std()
        sequence.length += 1
        kept = core.kv.take_out(sequence, 0, n_prompt)
        guessed = [StepRow(t, sequence, i) for i, t in enumerate(ids[n_prompt:])]
        together = core.model.run([*guessed, StepRow(9, other)], Plane.FINE).clone()
        assert (together[:2] - want[1:]).abs().max() < 1e-3 * want.std()
        sequence.length -= 1  # from where that step began
        with pytest.raises(ValueError, match="no state was kept behind"):
            core.model.run([StepRow(ids[0], sequence)], Plane.FINE)
        with pytest.raises(ValueError, match="must follow each other"):
            core.model.run([StepRow(ids[0], other, 1)], Plane.FINE)

        core.kv.put_in(other, 0, kept)  # in another slot
        other.length = n_prompt
        assert (core.kv.take_out(other, 0, n_prompt) == kept).all()
        one = core.model.run([StepRow(ids[n_prompt], other)], Plane.FINE)[0]
        assert torch.equal(one, together[0])
        core.kv.release(sequence)
        assert core.kv.reserve(1) is not None


@pytest.mark.long
@pytest.mark.slow
def test_steps__drive_too_slow_for_one_wait__done_again_same_bits(tmp_path: Path) -> None:
    config = {**DELTA_CONFIGS["qwen3_next"], **SMALL, "num_experts": 32}
    save_source(random_model(config, 0.25), tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    check_steps_done_again(pack, [7, 21, 3, 30])
