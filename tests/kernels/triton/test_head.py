"""The MTP head on a device's launches, interpreted, against the CPU engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moet_desk.engine.cuda.draft import DeviceHead
from moet_desk.engine.cuda.head import halves
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.draft import CpuHead, state_of
from moet_desk.engine.handle import GenerateRequest
from moet_desk.engine.sampling import Chosen, Draw
from moet_desk.kernels.triton.dense_weight import WeightKind
from moet_desk.store.pack_format import Plane
from tests.engine.oracle import loaded
from tests.engine.test_mtp_parity import packed_with_head
from tests.kernels.triton.makers import dense_weight, real_values
from tests.kernels.triton.test_chunk import IDS, OPTIONS, on_device

N_TOKENS = 4


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_with_head(0.25, tmp_path_factory.mktemp("head"))[2]


class Greedy:
    """A request for the likeliest tokens of a prompt."""

    def __init__(self, core: Any, plane: Plane) -> None:
        sequence = core.kv.reserve(len(IDS) + N_TOKENS)
        assert sequence is not None
        self.kv, self.prompt_ids, self.plane = sequence, IDS, plane
        self.request = GenerateRequest()
        self.out_ids: list[int] = []
        self.tau: float | None = None
        self.draft: Any = None
        self.limit, self.steps, self.rerun_tokens = N_TOKENS, 0, 0
        self.accepted = 0
        self.sampler = self
        self.errors: list[Exception] = []

    @property
    def ended(self) -> bool:
        return len(self.out_ids) >= self.limit

    def draw(self, ahead: int = 0) -> Draw:
        return Draw(temperature=0.0)

    def take(self, token: int) -> Chosen:
        return Chosen(token)

    def choose(self, logits: torch.Tensor) -> Chosen:
        return Chosen(int(logits.argmax()))

    def accept(self, chosen: Chosen) -> None:
        self.out_ids.append(chosen.token_id)

    def note_read(self) -> None:
        pass

    def note_drafts(self, n_guessed: int, n_right: int) -> None:
        self.accepted += n_right

    def fail(self, error: Exception) -> None:
        self.errors.append(error)


def answered(core: Any, plane: Plane) -> Greedy:
    request: Any = Greedy(core, plane)
    while not request.out_ids:
        core.prefiller.step(request)
        assert not request.errors
    while not request.ended:
        core.decoder.step([request])
    core.kv.release(request.kv)
    assert not request.errors
    return request


@pytest.mark.slow
def test_head__prompt_in_chunks_and_steps__near_the_cpu_engine(pack: Path) -> None:
    with loaded(pack, **OPTIONS, drafts="mtp") as cpu, torch.inference_mode():
        drafter = cpu.decoder.drafting.mtp
        assert drafter is not None
        assert isinstance(drafter.head, CpuHead)
        kv, own = cpu.kv.reserve(32), cpu.kv.reserve(32)
        many = cpu.prefiller._experts[Plane.FINE]
        ids = torch.tensor(IDS)
        assert kv is not None
        assert own is not None
        hidden = cpu.model.forward(ids[:-1], cpu.kv, kv, many)
        states = drafter.head.head.forward(ids[1:], hidden, cpu.kv, own, many)
        want, want_state = cpu.model.logits(states[-1:])[0], states[-1]
    with on_device(pack, drafts="mtp") as core:
        request: Any = Greedy(core, Plane.FINE)
        request.prompt_ids = IDS[:-1]  # the head reads the last token in a step of its own
        while not request.out_ids:
            core.prefiller.step(request)
            assert not request.errors
        state = state_of(request)
        assert (state.sequence.length, state.waiting) == (len(IDS) - 2, 1)
        head = core.decoder.drafting.mtp.head
        assert isinstance(head, DeviceHead)
        guess, found = head.read(IDS[-1:], state.pending[0], state.sequence, Plane.FINE)
        logits = core.model.buffers.logits[0]
        assert (logits - want).abs().max() < 2e-3 * want.std()
        assert (found[0] - want_state).abs().max() < 2e-3 * want_state.std()
        assert guess == int(logits.argmax())
        assert state.sequence.length == len(IDS) - 1


@pytest.mark.slow
def test_head__guesses_between_two_steps__each_may_take_the_slots_of_those_before(
    pack: Path,
) -> None:
    """Else there are soon none left where they are few, and the look-up looks for one for ever."""
    with on_device(pack, drafts="mtp") as core:
        sequence = core.kv.reserve(4)
        assert sequence is not None
        tables, top_k = core.pools[Plane.BASE].tables, core.spec.moe_ffn.router.top_k
        asked: set[int] = set()
        for token, states in zip((5, 200, 77), torch.randn(3, 1, core.spec.hidden), strict=True):
            core.model.guess([StepRow(token, sequence)], Plane.BASE, states)
            in_use = tables.owner[tables.last_used > 0].tolist()
            assert len(in_use) == top_k
            asked.update(in_use)
        assert len(asked) > top_k


@pytest.mark.long
@pytest.mark.slow
def test_answers__with_the_head__equal_those_without(pack: Path) -> None:
    with on_device(pack) as core:
        want = answered(core, Plane.BASE).out_ids
    with on_device(pack, drafts="mtp", draft_depth=1) as core:
        found = answered(core, Plane.BASE)
        counts = core.decoder.drafting.acceptance.counters()
    assert found.out_ids == want
    assert counts.guessed[0] >= found.steps - 1  # none where the answer has no room
    assert found.steps + found.accepted == N_TOKENS - 1


def test_halves__scale_per_row__both_keep_it() -> None:
    joined = dense_weight(24, 192, WeightKind.FP8, by_row=True)
    first, second = halves(joined)
    assert torch.equal(torch.cat([real_values(first), real_values(second)], 1), real_values(joined))
    with pytest.raises(ValueError, match="do not meet at 96"):
        halves(dense_weight(24, 192, WeightKind.FP8))
