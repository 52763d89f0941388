"""An embedding with tables of n-grams before a device's launches, interpreted, against the CPU
engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moet_desk.engine.cuda.expert_stream import Reading
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.tiny_models import random_model, save_source
from tests.engine.tiny_ngrams import END, LITE, add_tables
from tests.kernels.triton.test_chunk import OPTIONS, on_device, read

N_PROMPT = 9  # of two chunks
IDS = [7, 250, END, 31, 9, 44, 83, END, 61, 5, 199]


@pytest.mark.slow
def test_engine__prompt_in_chunks_then_steps__near_the_cpu_engine(tmp_path: Path) -> None:
    config = {**LITE, "kv_lora_rank": 32, "num_layers": 1, "n_routed_experts": 16, "moe_topk": 2}
    save_source(random_model(config, 0.25), tmp_path / "source")
    add_tables(tmp_path / "source", dtype=torch.bfloat16)
    pack = pack_source(tmp_path / "source", tmp_path / "pack")
    with loaded(pack, **OPTIONS) as cpu:
        want = logits_of(cpu, IDS, plane=Plane.FINE, sizes=[N_PROMPT, 1, 1])[N_PROMPT - 1 :]
    with on_device(pack) as core:
        sequence, other = core.kv.reserve(len(IDS)), core.kv.reserve(len(IDS))
        assert sequence is not None
        assert other is not None
        prompt = read(core, IDS[:N_PROMPT], sequence, Reading.EXACT)
        # a wrong guess behind a token, then the token that came, beside another sequence
        guessed = [StepRow(token, sequence, i) for i, token in enumerate([IDS[N_PROMPT], 77])]
        first = core.model.run(guessed, Plane.FINE)[0].clone()
        sequence.length += 1
        beside = core.model.run([StepRow(9, other), StepRow(IDS[-1], sequence)], Plane.FINE)
        found = torch.stack([prompt, first, beside[1]])
    assert (found - want).abs().max() < 1e-3 * want.std()
