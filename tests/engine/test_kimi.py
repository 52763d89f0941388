"""Kimi-K2.5: the text model inside of its config and files, and what is refused there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moet_desk.engine.families import packed_head, plan_for, spec_for
from moet_desk.engine.parsers.answers import THINK, AnswerFormat, CallFormat
from moet_desk.engine.parsers.formats import choose_format
from moet_desk.errors import MoetError
from moet_desk.store.pack_format import DENSE_FILE, ROW_FILES
from tests.conftest import pack_source
from tests.engine.tiny_models import CONFIGS, random_model, save_source
from tests.store.kimi import CONFIG, TEXT


def test_spec__config_around_the_text_model__the_text_models_own() -> None:
    outer = spec_for(CONFIG, path="config.json", has_mtp=False)
    plain = {key: value for key, value in TEXT.items() if key not in _OLD_KEYS}
    inner = spec_for(plain, path="config.json", has_mtp=False)
    assert outer == replace(inner, model_type="kimi_k25")
    assert not outer.tied_head
    assert packed_head(CONFIG, (1, 2), (), path="c") is False
    names = ["language_model.model.layers.2.eh_proj"]
    assert plan_for(CONFIG, path="config.json", names=names).moe_layers == (1,)


_OLD_KEYS = ("do_sample", "top_k", "num_beams", "torchscript", "pruned_heads", "sep_token_id")


@pytest.mark.parametrize(
    ("outer", "inner", "words"),
    [
        ({"audio_config": {}}, {}, "audio_config"),
        ({"text_config": []}, None, "text_config is []"),
        ({}, {"index_topk": 2048}, "index_topk"),
        ({}, {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({}, {"n_group": 3}, "8 experts in 3 groups"),
    ],
)
def test_spec__what_changes_the_maths__refused_by_name(
    outer: dict[str, Any], inner: dict[str, Any] | None, words: str
) -> None:
    text = {} if inner is None else {"text_config": {**CONFIG["text_config"], **inner}}
    with pytest.raises(MoetError) as caught:
        spec_for({**CONFIG, **text, **outer}, path="config.json", has_mtp=False)
    assert caught.value.code == "MD-SRC-07"
    assert words in caught.value.cause


def test_spec__keys_of_generation_in_a_plain_config__refused_as_before() -> None:
    with pytest.raises(MoetError, match="do_sample"):
        spec_for(TEXT, path="config.json", has_mtp=False)


def test_pack__names_below_language_model__bytes_of_the_plain_text_model(tmp_path: Path) -> None:
    plain, wrapped = tmp_path / "plain", tmp_path / "wrapped"
    save_source(random_model(CONFIGS["kimi_k2"], 0.02), plain)
    state = load_file(plain / "model.safetensors")
    inside = {f"language_model.{name}": value for name, value in state.items()}
    wrapped.mkdir()
    save_file({**inside, "vision_tower.norm.weight": torch.ones(4)}, wrapped / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    text = {"model_type": "kimi_k25", "text_config": config, "vision_config": {}}
    (wrapped / "config.json").write_text(json.dumps(text))
    packs = []
    for source in (plain, wrapped):
        pack = pack_source(source, tmp_path / f"{source.name}-pack")
        packs.append([(pack / file).read_bytes() for file in (*ROW_FILES.values(), DENSE_FILE)])
    assert packs[0] == packs[1]


def test_format__without_a_template_that_says_it__kimis() -> None:
    assert choose_format("kimi_k25", None).calls is CallFormat.KIMI_K2
    assert choose_format("kimi_k25", "</think>") == AnswerFormat(CallFormat.KIMI_K2, THINK)
