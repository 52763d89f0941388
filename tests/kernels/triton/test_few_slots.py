"""Steps over few slots on a device's launches, interpreted: rows that come too late for one wait,
and clocks that are set back.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moet_desk.engine.cuda import step
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.tiny_models import TINY, YARN, random_model, save_source
from tests.kernels.triton.slow_drive import check_steps_done_again, slow_drive
from tests.kernels.triton.test_chunk import on_device

pytestmark = pytest.mark.slow

SMALL = {
    **TINY, "rope_parameters": YARN, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64,
    "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": None, "n_routed_experts": 64, "num_experts_per_tok": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    save_source(random_model(SMALL, 0.25), folder / "source")
    return pack_source(folder / "source", folder / "pack")


def test_steps__drive_too_slow_for_one_wait__done_again_same_bits(pack: Path) -> None:
    check_steps_done_again(pack, [7, 21, 3])


def test_step__too_slow_for_all_attempts__fails_and_the_next_one_is_right(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_device(pack, arena_rows=1, pool_slots=8, max_running=1) as core:
        sequence = core.kv.reserve(1)
        assert sequence is not None
        with slow_drive() as again, monkeypatch.context() as patch:
            patch.setattr(step, "REPEAT_S", 0.0)
            with pytest.raises(MoetError, match="no answer in time"):
                core.model.run([StepRow(7, sequence)], Plane.BASE)
            assert again.count == 0
            patch.setattr(step, "REPEAT_S", 60.0)
            late = core.model.run([StepRow(7, sequence)], Plane.BASE).clone()
            assert again.count == 1  # what the failed one gave up on has come
        assert (core.model.run([StepRow(7, sequence)], Plane.BASE) == late).all()


def test_steps__clocks_set_back_meanwhile__same_bits_and_slots(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for every in (step.STEPS_BETWEEN_REBASES, 2):
        monkeypatch.setattr(step, "STEPS_BETWEEN_REBASES", every)
        with on_device(pack, pool_slots=8, max_running=1) as core:
            sequence, logits = core.kv.reserve(8), []
            assert sequence is not None
            before = int(core.residency._pools[Plane.BASE].tables.clock)
            for token in (7, 21, 3):
                logits.append(core.model.run([StepRow(token, sequence)], Plane.BASE).clone())
                sequence.length += 1
            tables = core.residency._pools[Plane.BASE].tables
            found.append((torch.cat(logits), tables.slot_of.clone(), int(tables.clock) - before))
    (want, slots, steps), (again, same, left) = found
    assert torch.equal(want, again)
    assert torch.equal(slots, same)
    assert (steps, left) == (3, 1)
