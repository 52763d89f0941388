"""A tiny LongCat-Flash-Lite. transformers has no class for it: its layers are LongCat-Flash's, and
the embedding before them is written here a second time, from its public definition (arXiv
2601.21204 and the model's own file modeling_longcat_ngram.py), with whole numbers of any size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.tiny_models import CONFIGS, random_model, save_source

END = 2
NGRAMS: dict[str, Any] = {
    "ngram_vocab_size_ratio": 3, "emb_neighbor_num": 5, "emb_split_num": 2, "eos_token_id": END,
}  # fmt: skip
LITE: dict[str, Any] = {
    **CONFIGS["longcat"], "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 5e6, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1, "mscale_all_dim": 1, "original_max_position_embeddings": 16,
    },
}  # fmt: skip


def table_sizes(config: dict[str, Any]) -> list[tuple[int, int]]:
    """Rows of each table, and tokens of its n-grams."""
    least, splits = config["ngram_vocab_size_ratio"] * config["vocab_size"], config["emb_split_num"]
    n_tables = splits * (config["emb_neighbor_num"] - 1)
    return [(least + 2 * i + 1, 2 + i // splits) for i in range(n_tables)]


def numbers(tokens: Sequence[int], config: dict[str, Any]) -> list[list[int]]:
    """The row in each table for each token."""
    found, begin = [], 0
    for at, token in enumerate(tokens):
        rows = []
        for n_rows, size in table_sizes(config):
            seen = [tokens[i] if i >= begin else 0 for i in range(at, at - size, -1)]
            rows.append(sum(t * config["vocab_size"] ** i for i, t in enumerate(seen)) % n_rows)
        found.append(rows)
        begin = at + 1 if token == config["eos_token_id"] else begin
    return found


def embedded(state: dict[str, Tensor], config: dict[str, Any], tokens: Sequence[int]) -> Tensor:
    """What goes into the first layer, [T, H]."""
    vectors = [state["model.embed_tokens.weight"][list(tokens)]]
    for i, rows in enumerate(zip(*numbers(tokens, config), strict=True)):
        name = f"model.ngram_embeddings.{{}}.{i}.weight"
        table, product = state[name.format("embedders")], state[name.format("post_projs")]
        vectors.append(table.float()[list(rows)] @ product.float().T)
    return torch.stack(vectors).mean(0)


def add_tables(
    folder: Path, init: float = 0.25, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Make a saved LongCat-Flash a Lite with random tables; what its file then holds."""
    config = {**json.loads((folder / "config.json").read_text()), **NGRAMS}
    config["model_type"] = "longcat_flash_ngram"
    state = load_file(folder / "model.safetensors")
    spread = torch.Generator().manual_seed(7)
    hidden, sizes = config["hidden_size"], table_sizes(config)
    width = hidden // len(sizes)
    for i, (n_rows, _) in enumerate(sizes):
        for part, rows in (("embedders", n_rows), ("post_projs", hidden)):
            made = (init * torch.randn(rows, width, generator=spread)).to(dtype)
            state[f"model.ngram_embeddings.{part}.{i}.weight"] = made
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return state


def saved_lite(folder: Path, init: float) -> tuple[Any, dict[str, Tensor]]:
    """A source in `folder`; transformers' layers, and the file's tensors."""
    model = random_model(LITE, init)
    save_source(model, folder)
    return model, add_tables(folder, init)


def wanted(model: Any, state: dict[str, Tensor], tokens: Sequence[int]) -> Tensor:
    """Logits behind each token, [T, V]."""
    vectors = embedded(state, {**LITE, **NGRAMS}, tokens)
    with torch.no_grad():
        logits: Tensor = model(inputs_embeds=vectors[None]).logits[0]
    return logits
