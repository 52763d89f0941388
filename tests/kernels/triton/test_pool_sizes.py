"""Steps and prompts while pools shrink and grow, and when the card runs out of memory in the middle
of one. Interpreted, on a made-up card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.engine.cuda import expert_stream, load_pools, pools
from moet_desk.engine.cuda.loader import CudaCore
from moet_desk.engine.cuda.loader import load as load_cuda
from moet_desk.engine.cuda.step import StepRow
from moet_desk.engine.handle import EngineOptions
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.fake_card import FakeCard
from tests.engine.tiny_models import TINY, YARN, random_model, save_source
from tests.kernels.triton.test_chunk import IDS, PromptOnly

pytestmark = pytest.mark.slow

SMALL = {
    **TINY, "rope_parameters": YARN, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64,
    "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
TOKENS = [5, 9, 33]
CHANGES = {1: 2, 2: 3}  # slots before which token


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sizes")
    save_source(random_model(SMALL, 0.25), folder / "source")
    return pack_source(folder / "source", folder / "pack")


@contextmanager
def on_card(pack: Path) -> Iterator[CudaCore]:
    options = EngineOptions(
        save_heat=False, kv_format="f32", context=64, ram_bytes=10**9, vram_bytes=10**9,
        max_running=2, prefill_chunk=16,
    )  # fmt: skip
    card = FakeCard(unit=4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_pools, "open_driver", lambda device: card)
        patch.setattr("moet_desk.engine.cuda.vmm.SMALL_PIECE", 4096)
        core = load_cuda(pack, options, device=torch.device("cpu"))
    core.prefiller._clock = lambda: 0.0  # no turn ends before its chunk
    try:
        yield core
    finally:
        core.close()


def steps(core: CudaCore, before: Callable[[int], None], n: int = len(TOKENS)) -> Tensor:
    """Logits of the first tokens, one step each; `before` is called before a token's."""
    sequence = core.kv.reserve(16)
    assert sequence is not None
    found = []
    for i, token in enumerate(TOKENS[:n]):
        before(i)
        found.append(core.model.run([StepRow(token, sequence)], Plane.BASE).clone())
        sequence.length += 1
    core.kv.release(sequence)
    return torch.cat(found)


@pytest.fixture(scope="module")
def wanted(pack: Path) -> Tensor:
    with on_card(pack) as core:
        return steps(core, lambda i: None)


def test_steps__pools_shrink_and_grow_between_them__same_bits(pack: Path, wanted: Tensor) -> None:
    with on_card(pack) as core:
        sizes = []

        def change(i: int) -> None:
            if i in CHANGES:
                sizes.append([pool.resize(CHANGES[i]) for pool in core.pools.values()])

        assert torch.equal(steps(core, change), wanted)
        assert sizes == [[n, n] for n in CHANGES.values()]
        counters = core.residency.counters(step_s=0.0)
        assert counters.hits_base < counters.lookups


def out_of_memory() -> None:
    raise RuntimeError("Triton Error [CUDA]: out of memory")


def failing_once(module: Any, name: str, at: int, patch: pytest.MonkeyPatch) -> None:
    """The `at`-th call of a launcher finds no memory."""
    intact, calls = getattr(module, name), [0]

    def launch(*given: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            out_of_memory()
        return intact(*given, **more)

    patch.setattr(module, name, launch)


def test_step__stops_between_look_up_and_fetch__no_slot_claims_what_never_came(
    pack: Path, wanted: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_card(pack) as core:
        for pool in core.pools.values():
            pool.resize(4)
        sequence = core.kv.reserve(4)
        assert sequence is not None
        failing_once(pools, "fetch", 1, monkeypatch)
        with pytest.raises(RuntimeError, match="out of memory"):
            core.model.run([StepRow(TOKENS[0], sequence)], Plane.BASE)
        assert torch.equal(steps(core, lambda i: None, n=1), wanted[:1])


@pytest.mark.parametrize("keeps_more", [False, True], ids=["entries alone", "a ring too"])
def test_prompt__chunk_does_not_fit_once__begun_anew_where_that_is_sound(
    pack: Path, monkeypatch: pytest.MonkeyPatch, *, keeps_more: bool
) -> None:
    with on_card(pack) as core:
        roomier = list[bool]()
        core.prefiller._make_room = lambda: roomier.append(True)
        request = PromptOnly(core)
        failing_once(expert_stream, "grouped_down", 1, monkeypatch)
        if keeps_more:
            request.kv.ring = [0]
            with pytest.raises(RuntimeError, match="out of memory"):
                core.prefiller.step(request)  # type: ignore[arg-type]
            assert not roomier
            return
        assert core.prefiller.step(request) == len(IDS)  # type: ignore[arg-type]
        assert roomier == [True]
        again = PromptOnly(core)
        assert core.prefiller.step(again) == len(IDS)  # type: ignore[arg-type]
        assert torch.equal(request.logits, again.logits)


def test_prompt__chunk_does_not_fit_twice__the_request_gets_the_fault(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_card(pack) as core:
        monkeypatch.setattr(expert_stream, "grouped_down", lambda *given, **more: out_of_memory())
        request = PromptOnly(core)
        with pytest.raises(RuntimeError, match="out of memory"):
            core.prefiller.step(request)  # type: ignore[arg-type]
        assert request.kv.length == 0
