"""tokenizer.json from tiktoken vocabularies: ids as by ranks, and what is damaged."""

from __future__ import annotations

import base64
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer

from moet_desk.engine.text import Text
from moet_desk.errors import MoetError
from moet_desk.store.model_source import read_small, will_have_tokenizer
from moet_desk.store.pack_meta import read_meta
from moet_desk.store.pack_verify import verify_pack
from moet_desk.store.pack_writer import write_pack
from moet_desk.store.tiktoken import can_convert, tokenizer_of
from moet_desk.store.tokenizer_json import TIKTOKEN_KIMI
from tests.store.hub_server import HubServer, Repo
from tests.store.pulls import BUDGET, NAME, asked, line_to, planner, pull_all
from tests.store.tiny import Tiny, plan_of, write_source

KIMI = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "chat_template": "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}",
}
TRAINED_ON = (
    "The tide turns at noon, they'll say; the boats don't. Boats 1234 and 56!\n\n"
    "船在港口,船在海上。 naïve café ÀÉ XMLHttp aaaaaaa ababab  \t x=1;\r\n"
) * 3
TEXTS = [
    TRAINED_ON,
    "don't DON'T they'll 12345678 a船b船在c",
    "   leading, trailing   \n \n\t",
    "aaaa aaaaaaaaaaaaa abababababa",
    "emoji \U0001f30a é ñ \x00\x7f",
    "ǅ Ǆungla ʰ ªº _x_ (y) ...",
]


def words_of(text: str) -> list[bytes]:
    pattern = TIKTOKEN_KIMI.patterns[0]
    return [match.group().encode() for match in regex.finditer(pattern, text, regex.V1)]


def joined(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The reference: a known word is its token, else the lowest rank is joined first."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes((byte,)) for byte in word]
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def trained(text: str, n_merges: int) -> dict[bytes, int]:
    """Ranks by the usual training: the commonest pair of neighbours becomes a token."""
    ranks = {bytes((byte,)): byte for byte in range(256)}
    words = [[bytes((byte,)) for byte in word] for word in words_of(text)]
    for _ in range(n_merges):
        counts: dict[tuple[bytes, bytes], int] = {}
        for parts in words:
            for pair in pairwise(parts):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        left, right = max(counts, key=lambda pair: (counts[pair], pair))
        ranks[left + right] = len(ranks)
        for parts in words:
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == (left, right):
                    parts[i : i + 2] = [left + right]
                i += 1
    return ranks


def file_of(ranks: dict[bytes, int]) -> bytes:
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    return b"".join(lines)


def settings_of(n_tokens: int) -> bytes:
    n = n_tokens
    added = {
        n: ("[BOS]", True), n + 1: ("[EOS]", True), n + 2: ("<|im_end|>", True),
        n + 4: ("<|im_user|>", True), n + 9: ("<|tool_call_begin|>", False),
    }  # fmt: skip
    listed = {str(i): {"content": text, "special": special} for i, (text, special) in added.items()}
    return json.dumps({**KIMI, "added_tokens_decoder": listed}).encode()


def tokenizer(ranks: dict[bytes, int]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_of(file_of(ranks), settings_of(len(ranks))).decode())


def ids(made: Tokenizer, text: str) -> list[int]:
    found: list[int] = made.encode(text, add_special_tokens=False).ids
    return found


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return trained(TRAINED_ON, 150)


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer__any_text__as_by_ranks(ranks: dict[bytes, int], text: str) -> None:
    made = tokenizer(ranks)
    wanted = [i for word in words_of(text) for i in joined(word, ranks)]
    assert ids(made, text) == wanted
    assert made.decode(wanted) == text


def test_tokenizer__random_words__as_by_ranks(ranks: dict[bytes, int]) -> None:
    made, chance = tokenizer(ranks), random.Random(5)
    for _ in range(400):
        word = "".join(chance.choices("abehtosn船在", k=chance.randint(1, 14)))
        wanted = [i for part in words_of(word) for i in joined(part, ranks)]
        assert ids(made, word) == wanted, word


def test_tokenizer__token_that_joining_does_not_reach__counts_as_a_word_and_by_any_pair() -> None:
    ranks = {bytes((byte,)): byte for byte in range(256)}
    for token in (b"bc", b"abcd", b"bcd", b"ab", b"qrst"):  # a, bc, d when "abcd" is tried
        ranks[token] = len(ranks)
    made = tokenizer(ranks)
    for word in ("abcd", "xabcd", "abcdx", "ab", "abc", "bcd", "dabcdab", "qrst", "qrsta"):
        assert ids(made, word) == joined(word.encode(), ranks), word
    assert ids(made, "abcd") == [ranks[b"abcd"]]


def test_text_side__special_tokens__keep_their_ids_and_gaps(
    ranks: dict[bytes, int], tmp_path: Path
) -> None:
    n = len(ranks)
    (tmp_path / "tiktoken.model").write_bytes(file_of(ranks))
    (tmp_path / "tokenizer_config.json").write_bytes(settings_of(n))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "kimi_k2", "vocab_size": n + 16, "eos_token_id": n + 2})
    )
    assert will_have_tokenizer(tmp_path)
    folder = tmp_path / "pack"
    folder.mkdir()
    for name, data in read_small(tmp_path).items():
        (folder / name).write_bytes(data)
    assert not (folder / "tiktoken.model").exists()
    text = Text.load(folder)
    assert (text.vocab_size, text.bos_id, text.eos_ids) == (n + 16, n, {n + 2})
    assert text.controls["<|tool_call_begin|>"] == n + 9
    got = text.encode_chat([{"role": "user", "content": "tide<|im_end|>"}])
    assert (got[0], got[-1], got.count(n + 2)) == (n + 4, n + 2, 1)
    assert text.decode(got) == "<|im_user|>tide<|im_end|><|im_end|>"
    assert text.token_bytes(ranks["船".encode()]) == "船".encode()


def test_read_small__own_tokenizer_or_another_program__nothing_is_made(
    ranks: dict[bytes, int], tmp_path: Path
) -> None:
    (tmp_path / "tiktoken.model").write_bytes(file_of(ranks))
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_other.T", None]}}))
    assert "tokenizer.json" not in read_small(tmp_path)
    assert not will_have_tokenizer(tmp_path)
    settings.write_bytes(settings_of(len(ranks)))
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert read_small(tmp_path)["tokenizer.json"] == b"{}"
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tiktoken.model").unlink()
    assert "tokenizer.json" not in read_small(tmp_path)
    assert not will_have_tokenizer(tmp_path)


@pytest.mark.parametrize(("settings", "known"), [
    ({"auto_map": {"AutoTokenizer": ["tokenization_kimi.T", None]}}, True),
    ({"auto_map": {"AutoTokenizer": "maker/repo--tokenization_moonshot.T"}}, True),
    ({"auto_map": {"AutoTokenizer": [None, "tokenization_kimi.T"]}}, False),
    ({"auto_map": []}, False),
    ({}, False),
    ([], False),
])  # fmt: skip
def test_can_convert__by_the_program_that_is_named(settings: Any, known: bool) -> None:
    assert can_convert(json.dumps(settings).encode()) is known
    assert not can_convert(b"{")


def _changed(change: str) -> tuple[bytes, bytes]:
    ranks = {bytes((byte,)): byte for byte in range(256)} | {b"[BO": 256}
    vocabulary, settings = file_of(ranks), json.loads(settings_of(257))
    added = settings["added_tokens_decoder"]
    if change == "line":
        vocabulary += b"?? 300\n"
    elif change == "rank":
        vocabulary += base64.b64encode(b"xy") + b" x\n"
    elif change == "below":
        vocabulary += base64.b64encode(b"xy") + b" -1\n"
    elif change == "byte":
        vocabulary = vocabulary.split(b"\n", 1)[1]
    elif change == "twice":
        vocabulary += base64.b64encode(b"xy") + b" 5\n"
    elif change == "id":
        added["256"] = {"content": "<x>"}
    elif change == "text":
        added["900"] = {"content": "[BO"}
    elif change == "key":
        added["a"] = {"content": "<x>"}
    elif change == "entry":
        added["900"] = "<x>"
    elif change == "none":
        del settings["added_tokens_decoder"]
    return vocabulary, json.dumps(settings).encode()


@pytest.mark.parametrize(("change", "words"), [
    ("line", "line 258 is no token"), ("rank", "line 258"), ("below", "line 258"),
    ("byte", "no token for the byte 0"), ("twice", "have one rank"),
    ("id", "the id of another token, 256"), ("text", "in tiktoken.model too"),
    ("key", "'a' has no id"), ("entry", "'900' has no id"), ("none", "no added_tokens_decoder"),
])  # fmt: skip
def test_tokenizer__damaged_files__are_named(change: str, words: str) -> None:
    tokenizer_of(*_changed("nothing"))
    with pytest.raises(MoetError, match="MD-SRC-02") as caught:
        tokenizer_of(*_changed(change))
    assert words in str(caught.value)


def test_pull__vocabulary__is_fetched_and_the_pack_has_the_tokenizer(
    ranks: dict[bytes, int], tmp_path: Path
) -> None:
    source, tiny = tmp_path / "origin", Tiny(hidden=64, inter=64, n_experts=4, layers=(1,))
    write_source(source, tiny, "bf16", seed=3)
    (source / "tokenizer.json").unlink(missing_ok=True)
    (source / "tiktoken.model").write_bytes(file_of(ranks))
    (source / "tokenizer_config.json").write_bytes(settings_of(len(ranks)))
    hub = HubServer()
    try:
        hub.repos[NAME] = Repo(source)
        wanted = asked(tmp_path)
        meta = pull_all(wanted, line_to(hub.url), planner(tiny, source))
    finally:
        hub.close()
    write_pack(source, plan_of(tiny, source), tmp_path / "clean", memory_budget=BUDGET)
    made = (wanted.dest / "tokenizer.json").read_bytes()
    assert made == tokenizer_of(file_of(ranks), settings_of(len(ranks)))
    assert made == (tmp_path / "clean" / "tokenizer.json").read_bytes()
    assert meta.identity == read_meta(tmp_path / "clean").identity
    assert verify_pack(wanted.dest).ok
