"""Tells a model's reasoning from its answer while the text arrives. Pure; one reader."""

from __future__ import annotations

import re

from moet_desk.engine.handle import RequestStream
from moet_desk.engine.parsers.answers import CallFormat, PromptEnd
from moet_desk.engine.parsers.events import Parsed, Reasoning
from moet_desk.engine.parsers.formats import make_parser
from moet_desk.marked_text import MarkedText, join

_HARMONY = re.compile(r"(?:<\|(?!message)[a-z]+\|>[^<]*)*<\|message\|>|<\|[a-z]+\|>")
"""What stands between two messages of that format."""


class Splitter:
    """Takes clean text with marks; returns reasoning, and the answer with its marks.

    The parser knows no marks, so its pieces are found again in what it was fed: they come in order,
    and only tags and white space are left out between them.
    """

    def __init__(self, stream: RequestStream) -> None:
        answers = stream.answers
        self.has_tags = answers.think is not None or answers.calls is CallFormat.HARMONY
        in_reasoning = stream.prompt_end is PromptEnd.REASONING
        self._parser = make_parser(answers, (), in_reasoning=in_reasoning)
        tags = () if answers.think is None else (answers.think.open, answers.think.close)
        self._left_out = re.compile("|".join(map(re.escape, tags))) if tags else _HARMONY
        self._raw = MarkedText()  # fed, and not told yet

    def feed(self, piece: MarkedText) -> tuple[str, MarkedText]:
        """The next piece."""
        if not self.has_tags:
            return "", piece
        self._raw += piece
        return self._told(self._parser.feed(piece.text))

    def finish(self) -> tuple[str, MarkedText]:
        """The answer has ended: what was held back."""
        return self._told(self._parser.finish()) if self.has_tags else ("", MarkedText())

    def _told(self, parsed: list[Parsed]) -> tuple[str, MarkedText]:
        thought: list[str] = []
        answer: list[MarkedText] = []
        for item in parsed:
            text = getattr(item, "text", "")  # without tools there are no calls
            found = self._take(text)
            if isinstance(item, Reasoning):
                thought.append(text)
            else:
                answer.append(found)
        return "".join(thought), join(answer)

    def _take(self, text: str) -> MarkedText:
        """Cut a piece out of the raw text, with its marks."""
        raw, at = self._raw.text, 0
        while not raw.startswith(text, at):
            blank = len(raw) - len(raw[at:].lstrip())
            tag = self._left_out.match(raw, blank)
            if tag is None:
                at = raw.find(text, at)
                break
            at = tag.end()
        if at < 0:
            return MarkedText(text)
        end = at + len(text)
        found, self._raw = self._raw.cut(at, end), self._raw.cut(end)
        return found
