"""Promise 1 for models with states: a tiny Qwen3-Next answers the same however it runs.

The weights are random, so the text means nothing; the tokenizer is the demo model's.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moet_desk.engine.evaluate import _reruns, _reruns_with_states
from moet_desk.engine.handle import Quality, Sampling
from moet_desk.store.pack_format import Plane
from tests.conftest import pack_source
from tests.engine.oracle import loaded, logits_of
from tests.engine.test_balanced import balanced
from tests.engine.test_kept_prompts import BEGINNING, TAILS
from tests.engine.test_kept_prompts import answer as answer_with_cached
from tests.engine.test_kept_prompts import ask as ask_long
from tests.engine.test_promise import STORY, SUM, Answer, answer, ask, engine
from tests.engine.tiny_models import TINY_NEXT, random_model, save_source

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=0.8, seed=11)
REQUESTS = [
    ask(STORY, Quality.FAST, GREEDY),
    ask(SUM, Quality.EXACT, DRAWN),
    balanced(STORY, GREEDY, gate=0.5),
]
CHUNK = 32


def save_head(folder: Path, spread: torch.Generator) -> None:
    """Add an MTP head under released names: a copy of the attention layer, and its own parts."""
    state = load_file(folder / "model.safetensors")
    for name, value in list(state.items()):
        if name.startswith("model.layers.3."):
            state[name.replace("model.layers.3.", "mtp.layers.0.")] = value.clone()
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        state[f"mtp.{name}.weight"] = 0.1 * torch.randn(64, generator=spread)
    state["mtp.fc.weight"] = 0.25 * torch.randn(64, 128, generator=spread)
    save_file(state, folder / "model.safetensors")


@pytest.fixture(scope="module")
def pack(demo_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("next")
    save_source(random_model({**TINY_NEXT, "vocab_size": 8192}, 0.25), folder / "source")
    save_head(folder / "source", torch.Generator().manual_seed(5))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_source / name, folder / "source")
    return pack_source(folder / "source", folder / "pack")


@pytest.fixture(scope="module")
def wanted(pack: Path) -> list[Answer]:
    """Each request alone, everything resident."""
    with engine(pack) as handle:
        return [answer(handle, [request])[0] for request in REQUESTS]


@pytest.mark.parametrize(
    "options",
    [
        {"pool_slots": 4, "fine_slots": 4, "arena_rows": 2},
        {"drafts": "mtp", "draft_depth": 2},
    ],
    ids=["least pools and rows from disk", "guesses of the head"],
)
def test_tokens__however_it_runs__same_bits(
    pack: Path, wanted: list[Answer], options: dict[str, Any]
) -> None:
    assert wanted[0] != wanted[2]  # some token of the balanced answer was read again
    with engine(pack, **options) as handle:
        assert [answer(handle, [request])[0] for request in REQUESTS] == wanted
        assert answer(handle, REQUESTS) == wanted
        counters, drafts = handle.snapshot().counters, handle.snapshot().drafts
    if "drafts" in options:
        assert drafts.guessed[0] > 0
    else:
        assert counters.evictions > 100


def test_answers__prompts_kept_with_their_states__same_bits_without_reading(
    pack: Path, tmp_path: Path
) -> None:
    requests = [
        ask_long(BEGINNING + TAILS[0]),
        ask_long(BEGINNING + TAILS[1]),
        ask_long(BEGINNING + TAILS[0], Quality.BALANCED, gate=0.95),
    ]
    with engine(pack, prefill_chunk=CHUNK) as handle:
        wanted = [answer_with_cached(handle, request)[0] for request in requests]
    on_disk: dict[str, Any] = {"saved_prefixes": tmp_path, "saved_bytes": 10**9}
    whole: list[int] = []
    for first_time in (True, False):  # the second engine finds them on disk
        with engine(pack, prefill_chunk=CHUNK, prefix_bytes=10**8, **on_disk) as handle:
            whole = [(handle.count_tokens(r) - 1) // CHUNK * CHUNK for r in requests]
            found = [answer_with_cached(handle, request) for request in requests]
        assert [tokens for tokens, _ in found] == wanted
        cached = [n for _, n in found]
        assert cached[1] >= 3 * CHUNK
        assert cached == whole or first_time
        assert cached[0] == (0 if first_time else whole[0])


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
        assert _reruns_with_states(core, ids, sequences[1], 25) == behind
    with loaded(pack) as core, torch.inference_mode():
        sequence = core.kv.reserve(64)
        assert sequence is not None
        found = _reruns_with_states(core, ids, sequence, 25)
        assert len(found) == 14
        fresh = core.kv.reserve(64)
        assert fresh is not None
        core.prefiller.hidden(ids[:25], fresh, Plane.BASE)
        hidden = core.prefiller.hidden(ids[25:26], fresh, Plane.FINE)
        assert found[0] == int(core.model.logits(hidden)[0].argmax())
