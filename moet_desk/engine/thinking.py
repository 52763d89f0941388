"""A limit on the tokens of an answer's reasoning: when they are used up, its end tag is written.

A `ThinkingBudget` belongs to one answer and to the engine thread. The sampler asks it before each
choice and tells it the token, in order, so guesses (drafts) that were not taken never reach it.
What it says depends on the tokens so far alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from moet_desk.engine.handle import GenerateRequest
from moet_desk.engine.parsers.answers import PromptEnd, Think
from moet_desk.engine.parsers.formats import reasoning_ends
from moet_desk.engine.text import Text
from moet_desk.errors import fail


class _State(Enum):
    """Where an answer is."""

    BEFORE = "before"  # it may still begin to reason
    REASONS = "reasons"
    BEHIND = "behind"


class ThinkingBudget:
    """Counts the tokens of one answer's reasoning and ends it.

    Reasoning is found as the parser of answers finds it: in the text, since not every model has its
    tags as tokens.
    """

    __slots__ = ("_bytes_of", "_ends", "_left", "_open", "_state", "_tail", "_to_write")

    def __init__(
        self, limit: int, think: Think, *, ends: Sequence[str], close_ids: Sequence[int],
        bytes_of: Callable[[int], bytes], end: PromptEnd,
    ) -> None:  # fmt: skip
        """Begin an answer.

        Args:
            limit: most tokens between the tags.
            think: the tags.
            ends: texts that end reasoning, the closing tag among them.
            close_ids: the closing tag, as tokens.
            bytes_of: of a token.
            end: what the prompt says of reasoning.
        """
        self._left, self._to_write = limit, list(close_ids)
        self._open, self._ends = think.open.encode(), tuple(one.encode() for one in ends)
        self._bytes_of = bytes_of
        self._tail = b""  # text in which a tag may have begun
        self._state = {
            PromptEnd.UNSAID: _State.BEFORE,
            PromptEnd.REASONING: _State.REASONS,
            PromptEnd.ANSWER: _State.BEHIND,
        }[end]

    @property
    def active(self) -> bool:
        """Whether it may still have a say. Once false, it stays so."""
        return self._state is not _State.BEHIND

    def forced(self) -> int | None:
        """The token that must come next; None if the choice is free."""
        return self._to_write[0] if self._state is _State.REASONS and self._left <= 0 else None

    def take(self, token_id: int) -> None:
        """The answer goes on with this token."""
        if self._state is _State.BEHIND:
            return
        if self.forced() is not None:
            del self._to_write[0]
            if not self._to_write:
                self._state = _State.BEHIND
            return
        self._tail += self._bytes_of(token_id)
        if self._state is _State.BEFORE:
            self._begin()
        else:
            self._left -= 1
        if self._state is _State.REASONS:
            if any(end in self._tail for end in self._ends):
                self._state = _State.BEHIND
            self._tail = self._tail[-max(map(len, self._ends)) :]

    def _begin(self) -> None:
        text = self._tail.lstrip()
        if text.startswith(self._open):
            self._state, self._tail = _State.REASONS, text[len(self._open) :]
        elif not self._open.startswith(text):
            self._state = _State.BEHIND


def budget_of(request: GenerateRequest, text: Text, end: PromptEnd) -> ThinkingBudget | None:
    """The budget of a request; None if it has none.

    Args:
        request: may have one.
        text: the model's text side.
        end: what its prompt says of reasoning.

    Raises:
        MoetError: MD-API-04, it cannot be kept.
    """
    limit, think = request.thinking_budget, text.answers.think
    if limit is None:
        return None
    if limit < 0:
        raise fail("MD-API-04", parameter="thinking_budget", reason=f"{limit} is below 0")
    if think is None:
        reason = "this model has no tags around its reasoning"
        raise fail("MD-API-04", parameter="thinking_budget", reason=reason)
    close_ids = text.encode(think.close)
    if think.close not in text.decode(close_ids):
        reason = f"this model's tokenizer cannot write {think.close}"
        raise fail("MD-API-04", parameter="thinking_budget", reason=reason)
    return ThinkingBudget(
        limit, think, ends=reasoning_ends(text.answers, calls=bool(request.tools)),
        close_ids=close_ids, bytes_of=text.token_bytes, end=end,
    )  # fmt: skip
