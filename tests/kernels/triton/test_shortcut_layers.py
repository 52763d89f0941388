"""Two attentions per layer with experts beside the second one, and identity experts, on a device's
launches, interpreted, against the CPU engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moet_desk.engine.cuda.expert_stream import Reading
from moet_desk.engine.cuda.step_rows import StepRow, most_rows
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.tiny_models import CONFIGS, random_model, save_source
from tests.kernels.triton.test_chunk import OPTIONS, on_device, read

N_PROMPT, N_STEP = 9, 2
TOP_K = CONFIGS["longcat"]["moe_topk"]
IDS = torch.randint(
    3, 256, (N_PROMPT + N_STEP,), generator=torch.Generator().manual_seed(3)
).tolist()  # fmt: skip


def packed(folder: Path, *, identity_bias: float = 0.0) -> Path:
    model = random_model({**CONFIGS["longcat"], "kv_lora_rank": 32, "num_layers": 1}, 0.25)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            tensor.data[8:] += identity_bias
    save_source(model, folder / "source")
    return pack_source(folder / "source", folder / "pack")


@pytest.mark.slow
def test_engine__prompt_in_chunks_then_a_step__near_the_cpu_engine(tmp_path: Path) -> None:
    pack = packed(tmp_path)
    with loaded(pack, **OPTIONS) as cpu:
        sizes = [N_PROMPT] + [1] * N_STEP
        want = logits_of(cpu, IDS, plane=Plane.FINE, sizes=sizes)[N_PROMPT - 1 :]
    with on_device(pack) as core:
        sequence, other = core.kv.reserve(len(IDS)), core.kv.reserve(len(IDS))
        assert sequence is not None
        assert other is not None
        prompt = read(core, IDS[:N_PROMPT], sequence, Reading.EXACT)
        rows = [StepRow(token, sequence, i) for i, token in enumerate(IDS[N_PROMPT:])]
        together = core.model.run(rows, Plane.FINE).clone()
        # beside a row of a sequence that sees only itself, and after being undone
        mixed = core.model.run([StepRow(9, other), rows[0]], Plane.FINE)
        assert torch.equal(mixed[1], together[0])
        asked = core.residency.counters(step_s=0.0).lookups
        assert 0 < asked < 4 * TOP_K  # of four rows, some chose identity experts
    assert (torch.cat([prompt[None], together]) - want).abs().max() < 1e-3 * want.std()


@pytest.mark.slow
def test_engine__identity_experts_alone__no_row_is_asked_for(tmp_path: Path) -> None:
    pack = packed(tmp_path, identity_bias=10.0)
    with loaded(pack, **OPTIONS) as cpu:
        want = logits_of(cpu, IDS[:4], plane=Plane.BASE, sizes=[3, 1])[2:]
    with on_device(pack) as core:
        sequence = core.kv.reserve(4)
        assert sequence is not None
        prompt = read(core, IDS[:3], sequence, Reading.FAST)
        core.model.buffers.part.fill_(torch.nan)  # nothing is written there, nothing may be read
        after = core.model.run([StepRow(IDS[3], sequence)], Plane.BASE)
        counters = core.residency.counters(step_s=0.0)
    assert counters.lookups == 0
    assert (torch.stack([prompt, after[0]]) - want).abs().max() < 1e-3 * want.std()


@pytest.mark.parametrize(("top_k", "rows"), [(3, 8), (8, 8), (10, 6), (12, 5)])
def test_most_rows__a_look_up_takes_64_pairs(top_k: int, rows: int) -> None:
    assert most_rows(top_k) == rows
