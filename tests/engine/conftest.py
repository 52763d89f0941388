"""Tiny models that several files compare with transformers: made and packed once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import pack_source
from tests.engine.tiny_models import IDS, MODELS, random_model, save_source, use_packed_experts

TinyPack = Callable[[str, float], tuple[Path, Tensor]]


@pytest.fixture(scope="session")
def tiny_pack(tmp_path_factory: pytest.TempPathFactory) -> TinyPack:
    """Packs a model of `MODELS` with weights of a spread; returns the pack, which is not to be
    changed, and transformers' logits of `IDS` on its values.
    """

    @functools.cache
    def make(name: str, init: float) -> tuple[Path, Tensor]:
        model = random_model(MODELS[name], init)
        folder = tmp_path_factory.mktemp("tiny")
        save_source(model, folder / "source")
        pack = pack_source(folder / "source", folder / "pack")
        with torch.no_grad():
            use_packed_experts(model, pack)
            return pack, model(IDS[None]).logits[0]

    return make
