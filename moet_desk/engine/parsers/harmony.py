"""Answers of gpt-oss: messages on channels (harmony).

`<|channel|>analysis<|message|>...<|end|>` is reasoning, `final` is the answer, `commentary` with a
recipient (`to=functions.NAME`) is a call and without one is text for the reader. The tags are
special tokens of this model, so text cannot hold them by accident.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moet_desk.engine.parsers.arguments import ToolBook, is_name, read_object
from moet_desk.engine.parsers.base import HoldingParser, tag_start_length, tags_pattern
from moet_desk.engine.parsers.events import Call, Content, Parsed, Reasoning

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
STOPS = ("<|call|>", "<|return|>")
"""Of these, the tokens that end an answer: behind an end of a message another one follows."""

_HEAD_MARKS = (START, CHANNEL)
_BODY_TAGS = tags_pattern((*ENDS, START, CHANNEL))
_HEAD = re.compile(
    r"\s*(?:<\|start\|>\s*assistant)?([^<]*)<\|channel\|>([^<]*)(?:<\|constrain\|>[^<]*)?"
)
_RECIPIENT = re.compile(r"to=(\S+)")
_RECIPIENT_FIRST = " to="


@dataclass(frozen=True, slots=True)
class _Head:
    """Where a message goes."""

    channel: str
    recipient: str | None
    text: str  # as the model wrote it


class HarmonyParser(HoldingParser):
    """See `base.Parser`."""

    def __init__(self, tools: ToolBook, *, calls: bool = True) -> None:
        """Make the parser of one answer; without `calls`, calls are text."""
        super().__init__()
        self._tools, self._calls = tools, calls
        self._head: _Head | None = None
        self._at_start = True

    def _state(self) -> object:
        return self._head

    def _step(self, final: bool) -> list[Parsed]:
        return self._between(final) if self._head is None else self._body(final)

    def _end(self) -> list[Parsed]:
        return self._close("") if self._head is not None else []

    def _between(self, final: bool) -> list[Parsed]:
        """Read a message's head, or text that stands outside of all messages."""
        text = self._held.lstrip()
        marks = (*_HEAD_MARKS, *ENDS)
        first = self._at_start and self._held.startswith(_RECIPIENT_FIRST)
        if any(text.startswith(mark) for mark in _HEAD_MARKS) or first:
            return self._read_head(final)
        for end in ENDS:
            if text.startswith(end):  # of a message that is over already
                self._cut(len(self._held) - len(text) + len(end))
                return []
        starts = (*marks, _RECIPIENT_FIRST) if self._at_start else marks
        if not final and any(mark.startswith(t) for mark in starts for t in (text, self._held)):
            return []
        self._at_start = False
        found = tags_pattern(marks).search(self._held)
        if found is None and final:
            return [Content(self._cut(len(self._held)))]
        partial = tag_start_length(self._held, marks) if found is None else 0
        sure = len(self._held) - partial if found is None else found.start()
        return [Content(self._cut(len(self._held[:sure].rstrip())))]

    def _read_head(self, final: bool) -> list[Parsed]:
        head, mark, _ = self._held.partition(MESSAGE)
        broken = tags_pattern(ENDS).search(head)
        if broken is None and not mark and not final:
            return []
        self._at_start = False
        if broken is not None:
            return [Content(self._cut(broken.start()))]
        if not mark:
            return [Content(self._cut(len(self._held)))]
        match = _HEAD.fullmatch(head)
        if match is None:
            return [Content(self._cut(len(head) + len(mark)))]
        recipient = _RECIPIENT.search(match[1]) or _RECIPIENT.search(match[2])
        channel = (match[2].split() or [""])[0]
        text = self._cut(len(head) + len(mark))
        self._head = _Head(channel, recipient[1] if recipient is not None else None, text)
        return []

    def _body(self, final: bool) -> list[Parsed]:
        tag = _BODY_TAGS.search(self._held)
        if tag is not None:
            text = self._cut(tag.start())
            if tag.group() in ENDS:
                self._cut(len(tag.group()))
            return self._close(text)
        if final:
            return self._close(self._cut(len(self._held)))
        if self._is_call:
            return []
        tags = (*ENDS, START, CHANNEL)
        return self._shown(self._cut(len(self._held) - tag_start_length(self._held, tags)))

    def _close(self, text: str) -> list[Parsed]:
        """End the message with the rest of its text."""
        head, is_call = self._head, self._is_call
        assert head is not None  # noqa: S101 (there is a message to close)
        if not is_call:
            shown = self._shown(text)
            self._head = None
            return shown
        self._head = None
        name = (head.recipient or "").removeprefix("functions.")
        arguments = read_object(text) if text.strip() else "{}"
        if arguments is None or not is_name(name):
            return [Content(head.text + text)]
        self._n_calls += 1
        return [Call(self._n_calls - 1, name, arguments)]

    @property
    def _is_call(self) -> bool:
        return self._calls and self._head is not None and self._head.recipient is not None

    def _shown(self, text: str) -> list[Parsed]:
        is_reasoning = self._head is not None and self._head.channel == "analysis"
        return [Reasoning(text) if is_reasoning else Content(text)] if text else []
