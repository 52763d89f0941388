"""Tool calls in the Hermes format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Owns the split of an answer into plain text and calls, for whole answers and for pieces as they
arrive; the events do not depend on how the text was cut. A block counts as a call only once all of
it is there and valid, because text that was announced as a call cannot be taken back: a damaged
block comes out as the text it is. Pure; used by one reader at a time.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_TAG = re.compile(f"{OPEN}|{CLOSE}")
_ESCAPED = re.compile(r"\\.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """One complete call. `arguments` is the text of a JSON object."""

    index: int
    name: str
    arguments: str


Parsed = Content | Call


class HermesParser:
    """Feed it the answer's text; it returns what is certain by now.

    White space before a call and after the last one is dropped. Text that may be the start of a
    tag, and white space that a call may follow, is held back until more text decides.
    """

    __slots__ = ("_held", "_n_calls", "_searched")

    def __init__(self) -> None:
        self._held = ""
        self._searched = 0  # where in the held block the search for its end goes on
        self._n_calls = 0

    @property
    def n_calls(self) -> int:
        """Calls found so far."""
        return self._n_calls

    def feed(self, text: str) -> list[Parsed]:
        """Take the next piece of the answer."""
        self._held += text
        return self._drain(final=False)

    def finish(self) -> list[Parsed]:
        """The answer has ended: return all that was held back.

        A call that lacks only its closing tag counts; models leave it out at the end.
        """
        return self._drain(final=True)

    def _drain(self, *, final: bool) -> list[Parsed]:
        parsed: list[Parsed] = []
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                parsed.append(Content(self._take_text(final=final)))
                return _joined(parsed)
            before = self._held[:start].rstrip()
            parsed.append(self._take(len(before)))
            step = self._take_block(start - len(before) + len(OPEN), final=final)
            if step is None:
                return _joined(parsed)
            parsed.append(step)

    def _take(self, n_chars: int) -> Content:
        taken, self._held = self._held[:n_chars], self._held[n_chars:]
        self._searched = max(0, self._searched - n_chars)
        return Content(taken)

    def _take_text(self, *, final: bool) -> str:
        """Release text that no tag can touch any more; the buffer holds no opening tag."""
        if final:
            rest = self._take(len(self._held)).text
            return "" if self._n_calls and not rest.strip() else rest
        sure = len(self._held) - _tag_start_length(self._held)
        return self._take(len(self._held[:sure].rstrip())).text

    def _take_block(self, start: int, *, final: bool) -> Parsed | None:
        """Release the block whose body begins at `start`, as a call or as text; None: wait."""
        at = max(start, self._searched)
        while (tag := _TAG.search(self._held, at)) is not None:
            body = self._held[start : tag.start()]
            end = tag.end() if tag.group() == CLOSE else tag.start()
            call = self._as_call(body)
            if call is not None:
                self._take(end)
                return call
            if not _in_string(body):
                return self._take(end)
            at = tag.end()
        if not final:
            # A tag may be cut at the end of the buffer.
            self._searched = max(start, len(self._held) - len(CLOSE))
            return None
        return self._take_unfinished(start)

    def _take_unfinished(self, start: int) -> Parsed:
        """The answer ended inside a block: a call without its end, or text up to the first tag."""
        call = self._as_call(self._held[start:])
        if call is not None:
            self._take(len(self._held))
            return call
        tag = _TAG.search(self._held, start)
        if tag is None:
            return self._take(len(self._held))
        return self._take(tag.end() if tag.group() == CLOSE else tag.start())

    def _as_call(self, body: str) -> Call | None:
        read = _read_call(body)
        if read is None:
            return None
        self._n_calls += 1
        return Call(self._n_calls - 1, *read)


def _read_call(body: str) -> tuple[str, str] | None:
    """Name and arguments text of a block's body, None if it is not a call."""
    try:
        block = _load(body)
        name, arguments = block["name"], block.get("arguments", block.get("parameters"))
        if isinstance(arguments, str):
            arguments = _load(arguments)
        text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not name or not isinstance(arguments, dict | None):
        return None
    return name, text


def _load(text: str) -> Any:
    # Not strict: models put raw newlines into the strings of their JSON.
    return json.loads(text, strict=False)


def _in_string(body: str) -> bool:
    """Whether a JSON object cut off here is inside a string (which may hold a tag as text)."""
    return body.lstrip().startswith("{") and _ESCAPED.sub("", body).count('"') % 2 == 1


def _tag_start_length(text: str) -> int:
    """Length of the longest end of `text` that begins an opening tag."""
    longest = min(len(text), len(OPEN) - 1)
    return next((n for n in range(longest, 0, -1) if OPEN.startswith(text[-n:])), 0)


def _joined(parsed: list[Parsed]) -> list[Parsed]:
    """Join neighbouring texts and drop empty ones."""
    joined: list[Parsed] = []
    for item in parsed:
        if isinstance(item, Content) and joined and isinstance(joined[-1], Content):
            joined[-1] = Content(joined[-1].text + item.text)
        elif isinstance(item, Call) or item.text:
            joined.append(item)
    return joined
