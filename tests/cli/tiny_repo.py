"""A tiny random DeepSeek-V3 model with the demo's tokenizer, in several files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from moet_desk.engine.families import plan_for
from moet_desk.store.library import embedded_source
from tests.store.tiny import expert_shapes, write_weights

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def write_repo(folder: Path, *, shards: int = 4, seed: int = 0) -> None:
    """Write the model; its answers are noise, and its config is the demo's but for sizes."""
    demo = embedded_source()
    config = json.loads((demo / "config.json").read_bytes())
    config |= {"num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 8}
    config |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config |= {"num_nextn_predict_layers": 0}
    config.pop("quantization_config", None)
    plan = plan_for(config, path="config.json", names=[])
    shapes = {**plan.dense, **expert_shapes(plan)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator) * 0.05
        is_bias = name.endswith("bias")
        tensors[name if is_bias else f"{name}.weight"] = values if is_bias else values.bfloat16()
    folder.mkdir(parents=True)
    write_weights(folder, tensors, shards=shards)
    (folder / "config.json").write_text(json.dumps(config))
    for name in _COPIED:
        if (demo / name).is_file():
            shutil.copy(demo / name, folder / name)
