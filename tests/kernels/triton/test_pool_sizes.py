"""Steps with slots that were given back, and when the card runs out of memory in the middle of one.

Interpreted, on a made-up card.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.engine.cuda import load_pools, pools
from moet_desk.engine.cuda.loader import CudaCore
from moet_desk.engine.cuda.loader import load as load_cuda
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.cuda.vram import CardMemory
from moet_desk.engine.handle import EngineOptions
from moet_desk.kernels.triton.cache import forget
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.fake_card import FakeCard
from tests.engine.tiny_models import TINY, YARN, random_model, save_source

pytestmark = pytest.mark.slow

SMALL = {
    **TINY, "rope_parameters": YARN, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64,
    "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
TOKEN = 5


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sizes")
    save_source(random_model(SMALL, 0.25), folder / "source")
    return pack_source(folder / "source", folder / "pack")


@pytest.fixture(scope="module")
def core(pack: Path) -> Iterator[CudaCore]:
    options = EngineOptions(
        save_heat=False, kv_format="f32", context=64, ram_bytes=10**9, vram_bytes=10**9,
        max_running=4, prefill_chunk=16,
    )  # fmt: skip
    card = FakeCard(unit=4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_pools, "open_driver", lambda device: card)
        patch.setattr("moet_desk.engine.cuda.vmm.SMALL_PIECE", 4096)
        core = load_cuda(pack, options, device=torch.device("cpu"))
    assert core.vram is not None
    core.vram._card = CardMemory(lambda: card.free, lambda: None)
    yield core
    core.close()


def resize(core: CudaCore, n_slots: int) -> None:
    for pool in core.pools.values():
        assert pool.resize(n_slots) == n_slots


def step(core: CudaCore) -> Tensor:
    """Logits behind a token."""
    sequence = core.kv.reserve(4)
    assert sequence is not None
    logits = core.model.run([StepRow(TOKEN, sequence)], Plane.BASE).clone()
    core.kv.release(sequence)
    return logits


@pytest.fixture(scope="module")
def wanted(core: CudaCore) -> Tensor:
    """Everything in slots, as the plan says."""
    return step(core)


def test_step__few_slots_whose_rows_are_fetched__same_bits(core: CudaCore, wanted: Tensor) -> None:
    resize(core, 2)
    forget(core.pools[Plane.BASE].tables)
    before = core.residency.counters(step_s=0.0)
    assert torch.equal(step(core), wanted)
    after = core.residency.counters(step_s=0.0)
    assert after.hits_base == before.hits_base
    assert int(core.pools[Plane.BASE].tables.owner[2:].max()) == -1


def out_of_memory() -> None:
    raise RuntimeError("Triton Error [CUDA]: out of memory")


def test_step__stops_between_look_up_and_fetch__no_slot_claims_what_never_came(
    core: CudaCore, wanted: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    resize(core, 16)
    forget(core.pools[Plane.BASE].tables)  # so that there is something to fetch
    sequence = core.kv.reserve(4)
    assert sequence is not None
    one_launch = pools.route_and_look_up

    def only_look_up(*given: Any, **how: Any) -> None:
        one_launch(*given, **{**how, "slots": None, "arena": None})
        out_of_memory()

    monkeypatch.setattr(pools, "route_and_look_up", only_look_up)
    with pytest.raises(RuntimeError, match="out of memory"):
        core.model.run([StepRow(TOKEN, sequence)], Plane.BASE)
    monkeypatch.setattr(pools, "route_and_look_up", one_launch)
    core.kv.release(sequence)
    assert int(core.pools[Plane.BASE].tables.n_free) == 16  # before a prompt can read them
    assert torch.equal(step(core), wanted)
