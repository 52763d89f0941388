"""Grouped-query layers of whole families on a device's launches, interpreted, against the CPU's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.engine.blocks.gqa import GqaBlock
from moet_desk.engine.blocks.weights import Weights
from moet_desk.engine.cuda.blocks import Branch, LayerLaunches
from moet_desk.engine.cuda.buffers import StepBuffers
from moet_desk.engine.cuda.chunk_blocks import ChunkLayer
from moet_desk.engine.cuda.chunk_buffers import ChunkBuffers
from moet_desk.engine.cuda.dense_weights import DenseLoader
from moet_desk.engine.cuda.expert_stream import Reading
from moet_desk.engine.cuda.loader import load as load_cuda
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.families import spec_for
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.kv_cache import KvCache
from moet_desk.engine.model import RopeTable
from moet_desk.engine.spec import Gqa, Spec
from moet_desk.kernels.kinds import KvFormat
from moet_desk.kernels.reference import rms_norm
from moet_desk.kernels.triton.kv_entries import KvPages
from moet_desk.kernels.triton.norms import rms_norm as device_rms_norm
from moet_desk.kernels.triton.prepare import Rotation
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.tiny_models import GQA_CONFIGS, random_model, save_source

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1, "vocab_size": 32, "hidden_size": 32, "num_experts_per_tok": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    # three query heads share a key head, which is no power of two, as GLM's twelve do
    "glm": {**GQA_CONFIGS["glm"], **SMALL, "first_k_dense_replace": 0, "num_attention_heads": 6},
    "minimax": {**GQA_CONFIGS["minimax"], **SMALL},
    "olmoe": {**GQA_CONFIGS["olmoe"], **SMALL, "hidden_size": 64},
    "mixtral": {**GQA_CONFIGS["mixtral"], **SMALL, "head_dim": 16},
    # of the seven tokens some see three only
    "gpt_oss": {**GQA_CONFIGS["gpt_oss"], **SMALL, "sliding_window": 3},
}
HELD, ROWS = 3, 4
"""Tokens that the cache holds before, and tokens of the step or of the chunk."""


@dataclass(frozen=True)
class Tiny:
    """The first layer of a tiny model, and what the CPU makes of `x` behind `HELD` tokens."""

    spec: Spec
    reader: PackReader
    rope: RopeTable
    kv: KvCache
    x: Tensor  # [ROWS, H]
    want: Tensor  # [ROWS, H], x with the attention added

    @property
    def mixer(self) -> Gqa:
        mixer = self.spec.layers[0].mixer
        assert isinstance(mixer, Gqa)
        return mixer


def tiny(name: str, form: KvFormat, folder: Path) -> Tiny:
    save_source(random_model(CONFIGS[name], 0.25), folder / "source")
    reader = PackReader.open(pack_source(folder / "source", folder / "pack"))
    spec = spec_for(reader.config(), path="config.json", has_mtp=False)
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Gqa)
    weights = Weights(reader.dense_tensor, "model.layers.0.")
    block = GqaBlock(mixer, weights.below("self_attn."), layer=0)
    norm = weights("input_layernorm")
    kv = KvCache(mixer, n_layers=1, n_pages=4, page_tokens=4, form=form)
    sequence = kv.reserve(HELD + ROWS)
    assert sequence is not None
    x = torch.randn(HELD + ROWS, spec.hidden, generator=torch.Generator().manual_seed(3))
    rope = RopeTable(mixer.rope, HELD + ROWS)
    added = []
    for at in range(HELD + ROWS):
        here = slice(at, at + 1)
        normed = rms_norm(x[here], norm, spec.norm_eps)
        added.append(block(normed, rope.cos[here], rope.sin[here], kv, sequence))
        sequence.length += 1
    kv.pages(0)[1:] = 0  # the device writes its own entries from the fourth on
    kv.pages(0)[0, HELD:] = 0
    return Tiny(spec, reader, rope, kv, x[HELD:], (x + torch.cat(added))[HELD:])


def launches(model: Tiny) -> LayerLaunches:
    load = DenseLoader(model.reader, CPU)
    return LayerLaunches(model.spec.layers[0], load, moe_layer=0, branch=Branch(CPU))


def off(model: Tiny, got: Tensor) -> float:
    return float((got - model.want).abs().max() / (model.want - model.x).std())


CASES = [
    ("glm", KvFormat.F32),
    *(
        pytest.param(name, KvFormat.F32, marks=pytest.mark.slow)
        for name in CONFIGS
        if name != "glm"
    ),
    pytest.param("glm", KvFormat.FP8, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "form"), CASES, ids=lambda value: getattr(value, "value", value))
def test_attention__rows_of_a_step_and_of_a_chunk__near_the_cpu_block(
    name: str, form: KvFormat, tmp_path: Path
) -> None:
    model = tiny(name, form, tmp_path)
    # an entry at the edge of two FP8 steps may fall on the other side
    is_exact = form is KvFormat.F32
    layer, pages = launches(model), model.kv.pages(0)
    before = pages.clone()
    positions = torch.arange(HELD, HELD + ROWS, dtype=torch.int32)
    table = torch.tensor([[0, 1]], dtype=torch.int32).expand(ROWS, -1)
    rotation = Rotation(positions, model.rope.cos, model.rope.sin, interleaved=False)
    kv = KvPages(pages, table, form)

    b = StepBuffers.make(model.spec, CPU, context=8)
    b.x[:ROWS] = model.x
    device_rms_norm(b.x[:ROWS], layer.attention_norm, model.spec.norm_eps, out=b.normed[:ROWS])
    layer.attention.launch(b, ROWS, rotation, kv, positions + 1)
    assert off(model, b.x[:ROWS]) < (1e-5 if is_exact else 2e-2)
    stepped = pages.clone()
    assert not torch.equal(stepped, before)

    pages.copy_(before)
    chunk = ChunkBuffers.make(model.spec, ROWS, context=8, device=CPU)
    chunk.x.copy_(model.x)
    reading = ChunkLayer(
        layer, chunk, cos=model.rope.cos, sin=model.rope.sin, interleaved=False,
        eps=model.spec.norm_eps,
    )  # fmt: skip
    reading._attend(slice(0, ROWS), rotation, kv, HELD)
    assert off(model, chunk.x) < (2e-4 if is_exact else 2e-2)  # of two bfloat16 parts
    model.reader.close()


WHOLE = {
    "glm": {**CONFIGS["glm"], "num_hidden_layers": 2, "first_k_dense_replace": 1},
    "minimax": CONFIGS["minimax"],
    "mixtral": {**CONFIGS["mixtral"], "num_experts_per_tok": 2},
    "gpt_oss": {
        **CONFIGS["gpt_oss"], "num_experts_per_tok": 2, "num_hidden_layers": 2,
        "sliding_window": 2, "swiglu_limit": 0.3,
    },
}  # fmt: skip
"""A dense layer, shared expert and sigmoid router; names of its own; softmax with a sum of one;
windows in one of two layers, sinks, biases everywhere and a GLU of its own.
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", list(WHOLE))
def test_engine__prompt_and_step__near_the_cpu_engine(name: str, tmp_path: Path) -> None:
    save_source(random_model(WHOLE[name], 0.25), tmp_path / "source")
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    ids = [5, 9, 3]
    options: dict[str, Any] = {"kv_format": "f32", "context": 64, "ram_bytes": 10**9}
    with loaded(pack, **options) as cpu:
        want = logits_of(cpu, ids, plane=Plane.FINE)[1:]
    given = EngineOptions(
        save_heat=False, max_running=1, vram_bytes=10**9, prefill_chunk=8, **options
    )
    core = load_cuda(pack, given, device=CPU)
    sequence = core.kv.reserve(8)
    assert sequence is not None
    model = core.prefiller._model
    chunk = model.begin(ids[:2], sequence, Reading.EXACT)
    while chunk.next_layer < model.n_layers:
        model.layer(chunk)
    got = [model.logits(chunk).clone()]
    sequence.length += 2
    got.append(core.model.run([StepRow(ids[2], sequence)], Plane.FINE)[0].clone())
    core.close()
    assert (torch.stack(got) - want).abs().max() < 2e-3 * want.std()
