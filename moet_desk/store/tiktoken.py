"""tokenizer.json from a tiktoken vocabulary, as Kimi's models are published.

Such a source has `tiktoken.model`, tokens with their ranks, and a tokenizer written in Python,
which is never run here. What that program adds is known for Kimi alone: how text is cut. Special
tokens and their ids are in tokenizer_config.json. Pure, no torch.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from moet_desk.store.headers import damaged
from moet_desk.store.tokenizer_json import (
    TIKTOKEN_KIMI,
    added_token,
    byte_letters,
    byte_level_bpe,
)

TIKTOKEN_FILE = "tiktoken.model"
_SETTINGS_FILE = "tokenizer_config.json"
_PROGRAMS = ("tokenization_kimi", "tokenization_moonshot")
_FAR = 1 << 62  # beyond every rank


def can_convert(settings: bytes) -> bool:
    """Whether it is known how the tokenizer of this tokenizer_config.json cuts text."""
    try:
        named = json.loads(settings).get("auto_map", {}).get("AutoTokenizer")
    except (ValueError, RecursionError, AttributeError):
        return False
    first = named[0] if isinstance(named, list) and named else named
    return isinstance(first, str) and first.partition(".")[0].endswith(_PROGRAMS)


def tokenizer_of(vocabulary: bytes, settings: bytes) -> bytes:
    """tokenizer.json.

    Args:
        vocabulary: tiktoken.model: lines of a token in base64 and its rank.
        settings: tokenizer_config.json, with "added_tokens_decoder"; `can_convert` says yes to it.

    Raises:
        MoetError: MD-SRC-02 one of the two is damaged.
    """
    ranks = _ranks(vocabulary)
    special = list(_special(json.loads(settings)))
    used = set(ranks.values())
    for token_id, text, _ in special:
        if token_id in used:
            raise damaged(_SETTINGS_FILE, f"{text!r} has the id of another token, {token_id}")
        used.add(token_id)
    letters = byte_letters()
    spelt = {token: "".join(letters[byte] for byte in token) for token in ranks}
    ids = {spelt[token]: rank for token, rank in ranks.items()}
    for token_id, text, _ in special:
        if text in ids:
            raise damaged(_SETTINGS_FILE, f"its token {text!r} is in {TIKTOKEN_FILE} too")
        ids[text] = token_id
    made = byte_level_bpe(
        ids,
        TIKTOKEN_KIMI,
        merges=[[spelt[left], spelt[right]] for left, right in _merges(ranks)],
        added=[added_token(i, text, special=is_special) for i, text, is_special in special],
    )
    return json.dumps(made, ensure_ascii=False).encode()


def _ranks(vocabulary: bytes) -> dict[bytes, int]:
    """Tokens in the order of their ranks, every byte among them."""
    found: dict[bytes, int] = {}
    for number, line in enumerate(vocabulary.splitlines(), 1):
        if not line:
            continue
        word, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(word, validate=True)
            found[token] = int(rank)
        except ValueError as problem:
            raise damaged(TIKTOKEN_FILE, f"line {number} is no token with its rank") from problem
        if not token or int(rank) < 0:
            raise damaged(TIKTOKEN_FILE, f"line {number} is no token with its rank")
    absent = [byte for byte in range(256) if bytes((byte,)) not in found]
    if absent:
        raise damaged(TIKTOKEN_FILE, f"it has no token for the byte {absent[0]}")
    if len(set(found.values())) != len(found):
        raise damaged(TIKTOKEN_FILE, "two of its tokens have one rank")
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _special(settings: Mapping[str, Any]) -> Iterator[tuple[int, str, bool]]:
    """Id and text of the tokens beside the vocabulary, and whether they are special."""
    listed = settings.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        raise damaged(_SETTINGS_FILE, "it has no added_tokens_decoder")
    for key, entry in listed.items():
        text = entry.get("content") if isinstance(entry, dict) else None
        if not key.isascii() or not key.isdigit() or not isinstance(text, str) or not text:
            raise damaged(_SETTINGS_FILE, f"its added token {key!r} has no id and text")
        yield int(key), text, entry.get("special") is True


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pairs that joining makes tokens of, in the order of the tokens' ranks.

    tiktoken joins any two neighbours that are a token together. What lies in a token has been
    joined by lower ranks by then, to the same two parts whatever stands around: the pair is found
    by joining the token's own bytes. Where that leaves more than two parts, only higher ranks can
    bring two together, so every pair counts.
    """
    for token, rank in ranks.items():
        if len(token) < 2:
            continue
        parts = _joined(token, ranks, rank)
        if len(parts) == 2:
            yield parts[0], parts[1]
            continue
        cuts = range(1, len(token))
        pairs = [(token[:i], token[i:]) for i in cuts if {token[:i], token[i:]} <= ranks.keys()]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _joined(token: bytes, ranks: Mapping[bytes, int], limit: int) -> list[bytes]:
    """The bytes of a token, joined as far as ranks below `limit` do it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(left + right, _FAR) for left, right in pairwise(parts)]
        best = min(found)
        if best >= limit:
            break
        at = found.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
