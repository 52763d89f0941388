"""Token ids back to text: the bytes of each token, and an incremental decoder.

Knows two spellings of bytes inside tokenizer.json: byte-level BPE (each byte is one printable
character) and byte fallback ("<0xF0>", with "▁" for a space). No torch, no IO. `TokenBytes` is
shared and may be read by any thread; a `Detokenizer` belongs to one request.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from moet_desk.errors import fail
from moet_desk.marked_text import MarkedText
from moet_desk.store.tokenizer_json import byte_letters

_BYTE_OF_CHARACTER = {letter: byte for byte, letter in enumerate(byte_letters())}
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # a whole token stored as text, e.g. an added one that is not in the list
        return token.encode("utf-8", "replace")


def _with_fallback(token: str) -> bytes:
    match = _FALLBACK.fullmatch(token)
    if match is not None:
        return bytes((int(match[1], 16),))
    return token.replace("▁", " ").encode("utf-8", "replace")


def _decoder_kinds(decoder: Mapping[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    kinds = {str(decoder.get("type"))}
    for part in decoder.get("decoders") or ():
        kinds |= _decoder_kinds(part)
    return kinds


class TokenBytes:
    """The bytes of every token of one vocabulary, worked out on first use and remembered."""

    __slots__ = ("_bytes_of", "_known", "_spell")

    def __init__(
        self,
        spell: Callable[[int], str | None],
        decoder: Mapping[str, Any] | None,
        *,
        added: Mapping[int, str],
    ) -> None:
        """Make the table.

        Args:
            spell: id -> the token as tokenizer.json writes it; None for an unused id.
            decoder: the "decoder" entry of tokenizer.json.
            added: added tokens, id -> text; they are plain text, not spelt bytes.

        Raises:
            MoetError: MD-SRC-07, the decoder is of a kind that is not known here.
        """
        kinds = _decoder_kinds(decoder)
        if "ByteLevel" in kinds:
            self._bytes_of = _byte_level
        elif kinds & {"ByteFallback", "Metaspace"}:
            self._bytes_of = _with_fallback
        else:
            found = ", ".join(sorted(kinds)) or "none"
            reason = f"its decoder ({found}) is neither byte-level nor byte-fallback"
            raise fail("MD-SRC-07", path="tokenizer.json", reason=reason)
        self._spell = spell
        self._known = {token_id: text.encode() for token_id, text in added.items()}

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            token = self._spell(token_id)
            known = b"" if token is None else self._bytes_of(token)
            self._known[token_id] = known
        return known


class Detokenizer:
    """Turns the tokens of one answer into text as they come, in constant time per token.

    Special tokens are text like any other (parsers of tool calls need them); only the ids in
    `hidden` (the end-of-sequence ones) print nothing.
    """

    __slots__ = ("_decode", "_held_is_marked", "_hidden", "_table")

    def __init__(self, table: TokenBytes, hidden: Collection[int]) -> None:
        self._table = table
        self._hidden = frozenset(hidden)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._held_is_marked = False  # whether a token of the unfinished character was marked

    def push(self, token_id: int) -> str:
        """Add a token; return the characters that are complete now, possibly none."""
        if token_id in self._hidden:
            return ""
        return self._decode.decode(self._table[token_id])

    def push_marked(self, token_id: int, *, marked: bool) -> MarkedText:
        """`push`; characters are marked of which at least one byte is from a marked token."""
        held, held_is_marked = bool(self._decode.getstate()[0]), self._held_is_marked
        if held and held_is_marked is not marked and token_id not in self._hidden:
            return self._push_mixed(self._table[token_id], marked)
        text = self.push(token_id)
        if token_id not in self._hidden:
            self._held_is_marked = marked
        return MarkedText.whole(text, marked=marked)

    def _push_mixed(self, added: bytes, marked: bool) -> MarkedText:
        """Add bytes behind those of a token with another mark, one by one until the held ones are
        gone: as the end of a character, or as U+FFFD if they cannot become one.
        """
        for at in range(len(added)):
            text = self._decode.decode(added[at : at + 1])
            if not text:
                continue
            byte_is_held = bool(self._decode.getstate()[0])
            ended_it = len(text) == 1 and not byte_is_held  # the byte ends the held character
            n_of_held = 1 if ended_it else len(text) - (not byte_is_held)
            of_both = ended_it or at > 0
            first = MarkedText.whole(text[:n_of_held], marked=of_both or self._held_is_marked)
            rest = text[n_of_held:] + self._decode.decode(added[at + 1 :])
            self._held_is_marked = marked
            return first + MarkedText.whole(rest, marked=marked)
        self._held_is_marked |= marked and bool(added)
        return MarkedText()

    def flush_marked(self) -> MarkedText:
        """`flush`, with the mark of the unfinished character."""
        return MarkedText.whole(self.flush(), marked=self._held_is_marked)

    def flush(self) -> str:
        """End the text: bytes of an unfinished character come out as one U+FFFD."""
        tail = self._decode.decode(b"", True)
        self._decode.reset()
        return tail
