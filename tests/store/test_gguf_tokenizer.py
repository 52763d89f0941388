"""Tokenizers from GGUF fields: sentencepiece by its definition, ids, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from moet_desk.engine.text import Text
from moet_desk.errors import MoetError
from moet_desk.store.gguf.fields import Fields
from moet_desk.store.gguf.tokenizer import tokenizer_files

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "ca", "bb", "cabc", "aa", "é"]


def sentencepiece_fields(**own: Any) -> Fields:
    special = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("[INST]", USER)]
    tokens = [*special, *((f"<0x{i:02X}>", BYTE) for i in range(256))]
    tokens += [(piece, NORMAL) for piece in PIECES]
    values = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return Fields({**values, **own}, file="m.gguf")


def byte_fields(**own: Any) -> Fields:
    values = {
        "general.architecture": "qwen3moe",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*sorted(ByteLevel.alphabet()), "ab", "<|x|>", "[PAD]", "[PAD]"],
        "tokenizer.ggml.token_type": [NORMAL] * 257 + [CONTROL, UNUSED, UNUSED],
        "tokenizer.ggml.merges": ["a b"],
    }
    return Fields({**values, **own}, file="m.gguf")


def text_of(fields: Fields, folder: Path) -> Text:
    for name, data in tokenizer_files(fields, 1000).items():
        (folder / name).write_bytes(data)
    return Text.load(folder)


def by_definition(text: str) -> list[str]:
    """Join the two neighbours whose whole has the best score, the first such pair, until none."""
    pieces = ["▁", *text.replace(" ", "▁")]
    while True:
        joined = [a + b for a, b in pairwise(pieces)]
        ranked = [(PIECES.index(whole), i) for i, whole in enumerate(joined) if whole in PIECES]
        if not ranked:
            return pieces
        _, i = min(ranked)
        pieces[i : i + 2] = [joined[i]]


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_str(
        tokenizer_files(sentencepiece_fields(), 1000)["tokenizer.json"].decode()
    )


@settings(max_examples=200, deadline=None)
@given(text=st.text("abc ", max_size=14))
def test_sentencepiece__any_text__is_merged_by_score(sentencepiece: Tokenizer, text: str) -> None:
    if not text:
        return
    got = sentencepiece.encode(text, add_special_tokens=False)
    assert got.tokens == by_definition(text)
    assert sentencepiece.decode(got.ids) == text


def test_sentencepiece__text_side__bytes_special_tokens_and_bos(tmp_path: Path) -> None:
    text = text_of(sentencepiece_fields(), tmp_path)
    ids = text.encode("ab ñ")
    assert text.decode(ids) == " ab ñ"
    assert [text.token_bytes(i) for i in ids[-2:]] == [b"\xc3", b"\xb1"]
    assert text.encode_prompt("a")[0] == text.bos_id == 1
    assert text.eos_ids == {2}
    assert 3 in text.encode("a[INST]b")
    assert 1 not in text.encode_plain("<s>")
    bare = text_of(sentencepiece_fields(**{"tokenizer.ggml.add_space_prefix": False}), tmp_path)
    assert bare.decode(bare.encode("ab")) == "ab"


def test_byte_level__text_side__ids_ends_and_unused_tokens(tmp_path: Path) -> None:
    none = 0xFFFFFFFF
    fields = byte_fields(
        **{
            "tokenizer.ggml.eos_token_id": 257, "tokenizer.ggml.eot_token_id": 4,
            "tokenizer.ggml.eom_token_id": 257, "tokenizer.ggml.bos_token_id": none,
            "tokenizer.chat_template": "{{ messages[0].content }}<|x|>",
            "general.sampling.temp": 0.699999988079071, "general.sampling.top_k": 20,
        }
    )  # fmt: skip
    text = text_of(fields, tmp_path)
    assert text.encode("ab<|x|>é") == [256, 257, *text.encode("é")]
    assert text.encode_chat([{"role": "user", "content": "ab<|x|>"}])[-1] == 257
    assert text.encode_chat([{"role": "user", "content": "ab<|x|>"}]).count(257) == 1
    assert (text.eos_ids, text.bos_id) == ({257, 4}, None)
    assert (text.defaults.temperature, text.defaults.top_k) == (0.7, 20)
    assert text.token_bytes(258) == b""
    settings_file = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings_file == {"add_bos_token": False, "eos_token": "<|x|>"}


def test_byte_level__composed_and_decomposed__are_one_text_where_the_model_says_so(
    tmp_path: Path,
) -> None:
    text = text_of(byte_fields(), tmp_path)
    assert text.encode("e\u0301") == text.encode("\u00e9")
    plain = text_of(byte_fields(**{"tokenizer.ggml.pre": "glm4"}), tmp_path)
    assert plain.encode("e\u0301") != plain.encode("\u00e9")


@pytest.mark.parametrize(
    ("own", "code", "words"),
    [
        ({"tokenizer.ggml.model": "t5"}, "MD-GGUF-04", 'its kind is "t5"'),
        ({"tokenizer.ggml.model": None}, "MD-GGUF-05", "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.pre": "viking"}, "MD-GGUF-04", 'its way to cut text is "viking"'),
        ({"tokenizer.ggml.tokens": []}, "MD-GGUF-05", "no list of texts tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "MD-GGUF-05", "no list of texts"),
        ({"tokenizer.ggml.token_type": [1]}, "MD-GGUF-05", "token_type for each token"),
        ({"tokenizer.ggml.token_type": [NORMAL] * 260}, "MD-GGUF-05", "'[PAD]') is there twice"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "MD-GGUF-05", "no pair of its tokens"),
        ({"tokenizer.ggml.merges": ["a c"]}, "MD-GGUF-05", "no pair of its tokens"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "MD-GGUF-05", "beyond its vocabulary"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "MD-GGUF-05", "is no number"),
    ],
)
def test_byte_level__fields_that_cannot_be__are_named(
    own: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(MoetError) as caught:
        tokenizer_files(byte_fields(**own), 1000)
    assert caught.value.code == code
    assert words in caught.value.cause


@pytest.mark.parametrize("scores", [None, [0.0], ["x"] * 274])
def test_sentencepiece__scores_that_cannot_be__are_named(scores: Any) -> None:
    with pytest.raises(MoetError, match="MD-GGUF-05"):
        tokenizer_files(sentencepiece_fields(**{"tokenizer.ggml.scores": scores}), 1000)


def test_tokenizer_files__more_tokens_than_the_embedding_has__refused() -> None:
    with pytest.raises(MoetError, match="lists 260 tokens, its embedding has 259"):
        tokenizer_files(byte_fields(), 259)
