"""Promise 1 for models with states: a tiny Qwen3-Next answers the same however it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moet_desk.engine.evaluate import _reruns, _reruns_on_the_way
from moet_desk.store.pack_format import Plane
from tests.engine.oracle import loaded, logits_of
from tests.engine.random_promise import add_qwen_head, alone, check, check_kept, packed_with_text
from tests.engine.test_promise import Answer
from tests.engine.tiny_models import TINY_NEXT


@pytest.fixture(scope="module")
def pack(demo_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("next")
    return packed_with_text(TINY_NEXT, demo_source, folder, add_qwen_head)


@pytest.fixture(scope="module")
def wanted(pack: Path) -> list[Answer]:
    return alone(pack)


def test_tokens__least_pools_and_rows_from_disk__same_bits(
    pack: Path, wanted: list[Answer]
) -> None:
    assert wanted[0] != wanted[2]  # some token of the balanced answer was read again
    counters = check(pack, wanted, pool_slots=4, fine_slots=4, arena_rows=2).counters
    assert counters.evictions > 100


def test_tokens__guesses_of_the_head__same_bits(pack: Path, wanted: list[Answer]) -> None:
    assert check(pack, wanted, drafts="mtp", draft_depth=2).drafts.guessed[0] > 0


def test_answers__prompts_kept_with_their_states__same_bits_without_reading(
    pack: Path, tmp_path: Path
) -> None:
    check_kept(pack, tmp_path)


def test_rewind__one_token_back__same_bits_as_never_read(pack: Path) -> None:
    ids = list(range(300, 330))
    with loaded(pack) as core, torch.inference_mode():
        want = logits_of(core, ids, plane=Plane.BASE, sizes=[20] + [1] * 10)
        sequence = core.kv.reserve(64)
        assert sequence is not None
        chunk, one = core.prefiller._experts[Plane.BASE], core.decoder._experts[Plane.BASE]
        core.model.forward(torch.tensor(ids[:20]), core.kv, sequence, chunk)
        for i, token in enumerate(ids[20:], 20):
            for read in (7, token):  # a wrong one first
                core.kv.rewind(sequence, i)
                hidden = core.model.forward(torch.tensor([read]), core.kv, sequence, one)
            assert torch.equal(core.model.logits(hidden)[0], want[i])
        core.kv.rewind(sequence, 3)
        with pytest.raises(ValueError, match="behind 3 tokens"):
            core.model.forward(torch.tensor([7]), core.kv, sequence, one)


def test_rewind__last_token_of_a_chunk__read_again_from_the_state_before(pack: Path) -> None:
    ids = torch.arange(300, 324)
    with loaded(pack) as core, torch.inference_mode():
        found = []
        for wrong in (None, 9):
            sequence = core.kv.reserve(64)
            assert sequence is not None
            chunk, one = core.prefiller._experts[Plane.BASE], core.decoder._experts[Plane.FINE]
            read = ids.clone()
            if wrong is not None:
                read[-1] = wrong
            core.model.forward(read, core.kv, sequence, chunk)
            core.kv.rewind(sequence, len(ids) - 1)
            found.append(core.model.forward(ids[-1:], core.kv, sequence, one))
    assert torch.equal(*found)


def test_reruns__on_the_way_and_from_behind__same_tokens(demo_pack: Path, pack: Path) -> None:
    """A gate's curve counts the same for models that cannot go back far."""
    ids = torch.arange(300, 340)
    with loaded(demo_pack) as core, torch.inference_mode():
        sequences = [core.kv.reserve(64) for _ in range(2)]
        assert sequences[0] is not None
        assert sequences[1] is not None
        core.prefiller.hidden(ids, sequences[0], Plane.BASE)
        behind = _reruns(core, ids, sequences[0], 25)
        assert _reruns_on_the_way(core, ids, sequences[1], 25) == behind
    with loaded(pack) as core, torch.inference_mode():
        sequence = core.kv.reserve(64)
        assert sequence is not None
        found = _reruns_on_the_way(core, ids, sequence, 25)
        assert len(found) == 14
        fresh = core.kv.reserve(64)
        assert fresh is not None
        core.prefiller.hidden(ids[:25], fresh, Plane.BASE)
        hidden = core.prefiller.hidden(ids[25:26], fresh, Plane.FINE)
        assert found[0] == int(core.model.logits(hidden)[0].argmax())
