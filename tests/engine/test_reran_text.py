"""Which characters of an answer came from tokens that were made again, down to their bytes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moet_desk.engine.detokenize import Detokenizer, TokenBytes
from moet_desk.engine.handle import GenerateRequest, Quality, RequestStream
from moet_desk.engine.request import ActiveRequest
from moet_desk.engine.sampling import Chosen
from moet_desk.errors import fail
from moet_desk.marked_text import MarkedText, ranges_of
from moet_desk.telemetry import Failed, Finished, TextDelta

END = 999
Tokens = list[tuple[bytes, bool]]


def table(tokens: Tokens) -> TokenBytes:
    """Token i is the i-th of the list, whatever its bytes are."""
    spelling = {i: "".join(map(_spell, token)) for i, (token, _) in enumerate(tokens)}
    return TokenBytes(spelling.get, {"type": "ByteLevel"}, added={END: "<end>"})


def _spell(byte: int) -> str:
    """How byte-level vocabularies write a byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in shown else chr(256 + _HIDDEN.index(byte))


_HIDDEN = [
    b for b in range(256) if b not in {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 256)}
]


def wanted(tokens: Tokens) -> MarkedText:
    """The text and its marks, worked out from all bytes at once."""
    data = b"".join(token for token, _ in tokens)
    flags = [flag for token, flag in tokens for _ in token]
    text, marks, at = "", [], 0
    while at < len(data):
        size = _character_size(data[at:])
        text += data[at : at + size].decode("utf-8", "replace")
        n_characters = len(data[at : at + size].decode("utf-8", "replace"))
        marks += [any(flags[at : at + size])] * n_characters
        at += size
    assert text == data.decode("utf-8", "replace")
    return MarkedText(text, ranges_of(marks))


def _character_size(data: bytes) -> int:
    """Bytes of the first character, or of what one U+FFFD stands for."""
    if len(data) > 1 and data[0] == 0xED and data[1] in range(0xA0, 0xC0):
        return 2  # half a surrogate pair, which Python holds back and gives up on together
    for size in range(1, 5):
        if len(data[:size].decode("utf-8", "replace")) > 1:
            return size - 1
        try:
            data[:size].decode()
        except UnicodeDecodeError as problem:
            if problem.reason == "unexpected end of data":
                continue
            return problem.end - problem.start
        return size
    return len(data)


SPLIT_TEXT = st.text(alphabet="aé€😀 \n", max_size=12).map(str.encode)
BROKEN = st.binary(max_size=10) | st.lists(
    st.sampled_from([b"\xf0", b"\x90", b"\x80", b"\xe2\x82", b"\xed", b"\xa0", b"a", b"\xff"])
).map(b"".join)


@st.composite
def token_lists(draw: Any) -> Tokens:
    data = draw(SPLIT_TEXT | BROKEN)
    tokens, at = [], 0
    while at < len(data):
        size = draw(st.integers(0, 5))
        tokens.append((data[at : at + size], draw(st.booleans())))
        at += size
    return tokens


@given(token_lists())
@settings(max_examples=500, deadline=None)
def test_detokenizer__any_bytes_in_any_tokens__marks_of_every_character(tokens: Tokens) -> None:
    detokenizer, plain = (Detokenizer(table(tokens), hidden=()) for _ in range(2))
    joined = MarkedText()
    for i, (_, marked) in enumerate(tokens):
        piece = detokenizer.push_marked(i, marked=marked)
        assert piece.text == plain.push(i)  # marks hold nothing back
        joined += piece
    assert joined + detokenizer.flush_marked() == wanted(tokens)


class FakeText:
    """As much of a tokenizer as a request touches."""

    eos_ids = frozenset({END})

    def __init__(self, tokens: Tokens) -> None:
        self._table = table(tokens)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._table, self.eos_ids)


def request(tokens: Tokens, stop: tuple[str, ...] = (), limit: int = 1000) -> ActiveRequest:
    asked = GenerateRequest(prompt="q", quality=Quality.BALANCED, stop=stop)
    stream = RequestStream("r", lambda _: None)
    text: Any = FakeText(tokens)
    return ActiveRequest(asked, stream, [1], text=text, sampler=None, limit=limit)  # type: ignore[arg-type]


def write(active: ActiveRequest, tokens: Tokens) -> None:
    for i, (_, marked) in enumerate(tokens):
        if active.ended:
            return
        active.reran = marked
        active.rerun_tokens += marked
        active.rerun_s += 0.5 * marked
        active.accept(Chosen(i))


def sent(active: ActiveRequest) -> MarkedText:
    joined = MarkedText()
    for event in active.stream.take():
        if isinstance(event, TextDelta):
            joined += MarkedText(event.text, event.reran)
    return joined


@given(
    token_lists(), st.booleans(), st.lists(st.sampled_from(["ab", "€😀", "a ", "zz"]), max_size=2)
)
@settings(max_examples=300, deadline=None)
def test_request__held_back_by_stops_and_slow_readers__same_text_and_marks(
    tokens: Tokens, reader_is_slow: bool, stops: list[str]
) -> None:
    active = request(tokens, tuple(stops))
    if reader_is_slow:
        active.stream.room = lambda: False  # type: ignore[method-assign]
    write(active, tokens)
    active.cancel()
    whole = wanted(tokens)
    shown = len(whole)
    for end in range(len(whole) + 1):
        found = [stop for stop in stops if whole.text[:end].endswith(stop)]
        if found:
            shown = end - max(map(len, found))
            break
    assert sent(active) == whole.cut(0, shown)


def test_request__pieces__tell_tokens_and_seconds_of_reruns_once() -> None:
    tokens = [(b"a", True), (b"\xe2\x82", True), (b"\xac", False), (b"b", False), (b"c", True)]
    active = request(tokens, limit=5)
    write(active, tokens)
    *pieces, end = active.stream.take()
    assert all(isinstance(piece, TextDelta) for piece in pieces)
    assert [(p.text, p.reran, p.n_reran, p.rerun_s) for p in pieces] == [
        ("a", ((0, 1),), 1, 0.5),
        ("€", ((0, 1),), 1, 0.5),
        ("b", (), 0, 0.0),
        ("c", ((0, 1),), 1, 0.5),
    ]
    assert isinstance(end, Finished)
    assert (end.usage.rerun_tokens, end.usage.rerun_s) == (3, 1.5)


def test_request__fails_behind_a_rerun__marks_of_the_text_so_far() -> None:
    tokens = [(b"a", False), (b"b", True)]
    active = request(tokens)
    active.stream.room = lambda: False  # type: ignore[method-assign]
    write(active, tokens)
    active.fail(fail("MD-ENG-04", reason="r", model="m"))
    piece, end = active.stream.take()
    assert isinstance(piece, TextDelta)
    assert (piece.text, piece.reran) == ("ab", ((1, 2),))
    assert isinstance(end, Failed)
