"""Promise 1 for families of which there is no small trained model: what their tests share.

The weights are random, so the text means nothing; the tokenizer is the demo model's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moet_desk.engine.handle import Quality, Sampling
from moet_desk.telemetry import EngineSnapshot
from tests.conftest import pack_source
from tests.engine.test_balanced import balanced
from tests.engine.test_kept_prompts import BEGINNING, CHUNK, TAILS
from tests.engine.test_kept_prompts import answer as answer_with_cached
from tests.engine.test_kept_prompts import ask as ask_long
from tests.engine.test_mtp_parity import save_head, with_head
from tests.engine.test_promise import STORY, SUM, Answer, answer, ask, engine
from tests.engine.tiny_models import random_model, save_source

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=0.8, seed=11)
REQUESTS = [
    ask(STORY, Quality.FAST, GREEDY),
    ask(SUM, Quality.EXACT, DRAWN),
    balanced(STORY, GREEDY, gate=0.5),
]

LONG_REQUESTS = [
    ask_long(BEGINNING + TAILS[0]),
    ask_long(BEGINNING + TAILS[1]),
    ask_long(BEGINNING + TAILS[0], Quality.BALANCED, gate=0.95),
]
"""Prompts that begin alike, of several chunks."""

AddHead = Callable[[Any, Path], None]
"""Adds an MTP head to a saved source: (transformers' model, folder)."""


def packed_with_text(
    config: dict[str, Any], demo_source: Path, folder: Path, add_head: AddHead | None = None
) -> Path:
    """A pack of a model with large random weights that reads and writes text."""
    model = random_model({**config, "vocab_size": 8192}, 0.25)
    save_source(model, folder / "source")
    if add_head is not None:
        add_head(model, folder / "source")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_source / name, folder / "source")
    return pack_source(folder / "source", folder / "pack")


def add_known_head(model: Any, folder: Path) -> None:
    """transformers' own head, where it has one."""
    save_head(with_head(model), folder)


def add_qwen_head(model: Any, folder: Path) -> None:
    """A head under released names: a copy of the last layer, and its own parts."""
    state = load_file(folder / "model.safetensors")
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    for name, value in list(state.items()):
        if name.startswith(last):
            state[name.replace(last, "mtp.layers.0.")] = value.clone()
    spread = torch.Generator().manual_seed(5)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        state[f"mtp.{name}.weight"] = 0.1 * torch.randn(64, generator=spread)
    state["mtp.fc.weight"] = 0.25 * torch.randn(64, 128, generator=spread)
    save_file(state, folder / "model.safetensors")


def alone(pack: Path, **options: Any) -> list[Answer]:
    """The answer to each request by itself, everything resident."""
    with engine(pack, **options) as handle:
        return [answer(handle, [request])[0] for request in REQUESTS]


def check(pack: Path, wanted: list[Answer], **options: Any) -> EngineSnapshot:
    """See that requests alone and beside each other give these answers; what was counted."""
    with engine(pack, **options) as handle:
        assert [answer(handle, [request])[0] for request in REQUESTS] == wanted
        assert answer(handle, REQUESTS) == wanted
        return handle.snapshot()


def check_kept(pack: Path, folder: Path, **options: Any) -> None:
    """Prompts that were read before, in this engine or in the one before, change no answer."""
    options = {**options, "prefill_chunk": CHUNK}
    with engine(pack, **options) as handle:
        wanted = [answer_with_cached(handle, request)[0] for request in LONG_REQUESTS]
    on_disk: dict[str, Any] = {"saved_prefixes": folder, "saved_bytes": 10**9}
    for first_time in (True, False):  # the second engine finds them on disk
        with engine(pack, prefix_bytes=10**8, **on_disk, **options) as handle:
            whole = [(handle.count_tokens(r) - 1) // CHUNK * CHUNK for r in LONG_REQUESTS]
            found = [answer_with_cached(handle, request) for request in LONG_REQUESTS]
        assert [tokens for tokens, _ in found] == wanted
        cached = [n for _, n in found]
        assert cached[1] >= 3 * CHUNK
        assert cached == whole or first_time
        assert cached[0] == (0 if first_time else whole[0])
