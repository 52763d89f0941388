"""What transformers 5 saves in its own names and layout is packed like a released folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moet_desk.cli.packing import read_plan
from moet_desk.store.pack_format import DENSE_FILE, ROW_FILES
from moet_desk.store.pack_writer import write_pack
from moet_desk.store.sources import TensorIndex
from tests.engine.tiny_models import CONFIGS, GQA_CONFIGS, random_model


@pytest.mark.parametrize(
    "config",
    [CONFIGS["plain_rope"], GQA_CONFIGS["glm"], GQA_CONFIGS["mixtral"], GQA_CONFIGS["minimax"]],
    ids=["deepseek_v3", "glm4_moe", "mixtral", "minimax_m2"],
)
def test_write_pack__saved_with_merged_experts__bytes_of_the_released_layout(
    config: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model(config, 0.25)
    packs = []
    for name, released in (("released", True), ("own", False)):
        source, pack = tmp_path / name, tmp_path / f"{name}-pack"
        model.save_pretrained(source, save_original_format=released)
        write_pack(source, read_plan(source), pack)
        packs.append(
            {file: (pack / file).read_bytes() for file in (*ROW_FILES.values(), DENSE_FILE)}
        )
        assert json.loads((pack / "pack.json").read_text())["source_format"] == "f32"
    assert packs[0] == packs[1]
    stored = TensorIndex.open(tmp_path / "own").names()
    assert any(name.endswith(".mlp.experts.gate_up_proj") for name in stored)
