"""The demo model as a GGUF file: the same rows, the same logits, the same text side."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Regex, pre_tokenizers

from moet_desk.engine.text import Text
from moet_desk.store.gguf.tokenizer import SPLITS
from moet_desk.store.model_source import ModelSource
from moet_desk.store.pack_format import BASE_FILE, FINE_FILE, Plane
from moet_desk.store.quant_formats import decode, fp4_of
from moet_desk.store.sources import TensorIndex
from tests.conftest import DEMO, pack_source
from tests.engine.oracle import loaded, logits_of
from tests.store import gguf_files
from tests.store.deepseek import CONFIG

IDS = [0, 2, 300, 1200, 77, 4000, 3, 15, 900, 42]


def mxfp4_blocks(nibbles: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks of 17 bytes, written by their definition."""
    blocks = nibbles.reshape(*scales.shape, 32)
    codes = blocks[..., :16] | (blocks[..., 16:] << 4)
    return np.concatenate((scales[..., None], codes), axis=-1).reshape(*scales.shape[:-1], -1)


@pytest.fixture(scope="module")
def demo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with its FP4 experts bit for bit and all else in float32."""
    index = TensorIndex.open(DEMO)
    config = json.loads((DEMO / "config.json").read_text())
    dense = {
        name if name.endswith("bias") else f"{name}.weight": decode(index, name)
        for name in index.names()
        if ".experts." not in name
    }
    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    stacks = {}
    for layer in range(1, 10):
        for part in ("gate", "up", "down"):
            name = f"model.layers.{layer}.mlp.experts.{{}}.{part}_proj"
            found = [fp4_of(index, name.format(expert)) for expert in range(32)]
            codes, scales = (np.stack([pair[i].numpy() for pair in found]) for i in (0, 1))
            stacks[f"blk.{layer}.ffn_{part}_exps.weight"] = mxfp4_blocks(codes, scales)
    gguf_files.write_gguf(path, dense, config, tokenizer=DEMO, mxfp4=stacks)
    return path


@pytest.mark.slow
def test_pack__demo_as_gguf__same_rows_logits_and_prompt(
    demo_file: Path, demo_pack: Path, tmp_path: Path
) -> None:
    source = ModelSource.open(demo_file)
    assert source.config["num_hidden_layers"] == 9
    pack = pack_source(demo_file, tmp_path / "demo")
    for name in (BASE_FILE, FINE_FILE):
        assert (pack / name).read_bytes() == (demo_pack / name).read_bytes()
    record = json.loads((pack / "pack.json").read_text())
    assert (record["source_format"], record["fine_is_lossless"]) == ("mxfp4", True)
    for plane in Plane:
        got = []
        for folder in (pack, demo_pack):
            with loaded(folder) as core:
                got.append(logits_of(core, IDS, plane=plane))
        assert torch.equal(*got)
    messages = [{"role": "user", "content": "Count: 12, 345. Grüße, 你好! <|end|>"}]
    made, own = Text.load(pack), Text.load(demo_pack)
    assert made.encode_chat(messages) == own.encode_chat(messages)
    assert (made.eos_ids, made.bos_id) == (own.eos_ids, own.bos_id)
    assert made.vocab_size == own.vocab_size
    assert made.decode(list(range(0, 8192, 7))) == own.decode(list(range(0, 8192, 7)))


def test_text__demo_tokenizer_from_fields__encodes_alike(tmp_path: Path) -> None:
    own = Text.load(DEMO)
    folder = text_files(tmp_path / "demo.gguf", DEMO)
    made = Text.load(folder)
    for text in ("It's 2026!\n\n  Two  spaces", "日本語 and Ω≈3.14", "\t\r\n", "x" * 50, "<think>"):
        assert made.encode(text) == own.encode(text)
        assert made.encode_plain(text) == own.encode_plain(text)
        assert made.decode(made.encode(text)) == text
    assert json.loads((folder / "tokenizer_config.json").read_text())["add_bos_token"] is False


def text_files(path: Path, tokenizer: Path) -> Path:
    """The small files made from a file with this tokenizer and one token more than it needs."""
    config = {**CONFIG, "vocab_size": 8193}
    tensors = gguf_files.random_tensors(config)
    gguf_files.write_gguf(path, tensors, config, tokenizer=tokenizer)
    for name, data in ModelSource.open(path).small.items():
        (path.parent / name).write_bytes(data)
    return path.parent


def test_splits__every_pattern__is_valid_and_loses_nothing() -> None:
    text = "Hello, world's 12345 été日本語 かな 한국어!\n\n  I'LL be\tthere?? xX_yY ЁЖ--//\r\n  "
    for name, splits in SPLITS.items():
        cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in splits.patterns]
        words = pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)
        assert "".join(word for word, _ in words) == text, name
        assert len(words) > 15, name


WORDS = {
    "gpt-2": ["a", " 12345", ",", " I", "'ll", " 日本語かなx"],
    "llama-bpe": ["a", " ", "123", "45", ",", " I", "'ll", " 日本語かなx"],
    "qwen2": ["a", " ", "1", "2", "3", "4", "5", ",", " I", "'ll", " 日本語かなx"],
    "deepseek-v3": ["a", " ", "123", "45", ",", " I", "'ll", " ", "日本語かな", "x"],
    "gpt-4o": ["a", " ", "123", "45", ",", " I'll", " 日本語かなx"],
    "kimi-k2": ["a", " ", "123", "45", ",", " I'll", " ", "日本語", "かなx"],
    "tekken": ["a", " ", "1", "2", "3", "4", "5", ",", " I", "'ll", " 日本語かなx"],
    "smollm": ["a", " ", "1", "2", "3", "4", "5", ",", " I", "'ll", " 日本語かなx"],
}


@pytest.mark.parametrize("name", WORDS)
def test_splits__cut_as_their_tokenizers_do(name: str) -> None:
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in SPLITS[name].patterns]
    words = pre_tokenizers.Sequence(cuts).pre_tokenize_str("a 12345, I'll 日本語かなx")
    assert [word for word, _ in words] == WORDS[name]
