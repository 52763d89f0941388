"""What nearly all parsers share: the scan for tags in text that comes in pieces.

Owns the split of an answer into reasoning, text and calls, for whole answers and for pieces as they
arrive; the events do not depend on how the text was cut. How a block of calls looks is a `Syntax`.
A block counts as a call only once all of it is there and valid, because text that was announced as
a call cannot be taken back: a damaged block comes out as the text it is. Pure; nothing here raises
on any text; a parser is used by one reader.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

from moet_desk.engine.parsers.answers import Think
from moet_desk.engine.parsers.arguments import ToolBook
from moet_desk.engine.parsers.events import Call, Content, Parsed, Reasoning, joined

_MAX_TRIES = 64
"""Tags in a block that never ended at which a call is looked for."""


@dataclass(frozen=True, slots=True)
class Found:
    """A call as read from a block; `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """The first `n_chars` of the held text are these calls; without calls they are text."""

    n_chars: int
    calls: Sequence[Found] = ()


class Syntax(Protocol):
    """How calls look in one format.

    Attributes:
        opens: tags at which a block may begin.
        trailers: tags that are dropped if they come directly behind a call.
        in_reasoning: whether a call may come before the reasoning's closing tag.
    """

    @property
    def opens(self) -> Sequence[str]: ...

    @property
    def trailers(self) -> Sequence[str]: ...

    @property
    def in_reasoning(self) -> bool: ...

    def take(
        self, held: str, at: int, *, since: int, follows: bool, final: bool, tools: ToolBook
    ) -> Taken | None:
        """Read the block that begins at `at`; None: more text must decide.

        Once it decides on some text, it must decide the same on every longer one.

        Args:
            held: the text, white space before `at`.
            at: where one of `opens` stands.
            since: how much of `held` was there when it last wanted more; 0 the first time.
            follows: whether a call came directly before.
            final: no more text will come.
            tools: what the request offers.
        """
        ...


Read = Callable[[str, ToolBook], Found | None]
"""A call from the text between its tags; None if it is not one."""


@dataclass(frozen=True)
class TagSyntax:
    """Calls between an opening and a closing tag, maybe within a section of several.

    Attributes:
        begins: open a call. ends: close it; the next opening tag does so too, and the answer's end.
        read: the call.
        is_open: whether a body cut off here is inside of a value, where a tag may be text.
        sections: may come before the first call.
        section_needed: whether a call only counts in a section.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    read: Read
    is_open: Callable[[str], bool]
    sections: tuple[str, ...] = ()
    section_needed: bool = False
    trailers: tuple[str, ...] = ()
    in_reasoning: bool = False

    @cached_property
    def opens(self) -> tuple[str, ...]:
        """See `Syntax`."""
        return self.sections + self.begins

    @cached_property
    def _tags(self) -> re.Pattern[str]:
        return tags_pattern(self.opens + self.ends)

    def take(
        self, held: str, at: int, *, since: int, follows: bool, final: bool, tools: ToolBook
    ) -> Taken | None:
        """See `Syntax`."""
        start = self._body_start(held, at, follows=follows, final=final)
        if start is None or isinstance(start, Taken):
            return start
        longest = max(map(len, self.ends + self.opens))
        search = max(start, since - longest)
        while (tag := self._tags.search(held, search)) is not None:
            body = held[start : tag.start()]
            if not self.is_open(body):
                found = self.read(body, tools)
                return Taken(self._end_of(tag), () if found is None else (found,))
            search = tag.end()
        return self._unfinished(held, start, tools) if final else None

    def _unfinished(self, held: str, start: int, tools: ToolBook) -> Taken:
        """The answer ended inside a block: a call up to some tag or to the end, else text up to the
        first tag. A value that the end cuts off is no value: half a file must not be written.
        """
        tags = list(self._tags.finditer(held, start))
        ends = [(tag.start(), self._end_of(tag)) for tag in tags[:_MAX_TRIES]]
        whole = [] if self.is_open(held[start:]) else [(len(held), len(held))]
        for end, n_chars in (*ends, *whole):
            found = self.read(held[start:end], tools)
            if found is not None:
                return Taken(n_chars, (found,))
        return Taken(ends[0][1] if ends else len(held))

    def _end_of(self, tag: re.Match[str]) -> int:
        """Where a block that this tag ends is over."""
        return tag.end() if tag.group() in self.ends else tag.start()

    def _body_start(self, held: str, at: int, *, follows: bool, final: bool) -> int | Taken | None:
        section = _standing(held, at, self.sections)
        if section is None:
            end = at + len(_standing(held, at, self.begins) or "")
            return end if follows or not self.section_needed else Taken(end)
        behind = at + len(section)
        inner = len(held) - len(held[behind:].lstrip())
        begin = _standing(held, inner, self.begins)
        if begin is not None:
            return inner + len(begin)
        rest = held[inner:]
        if not final and any(begin.startswith(rest) for begin in self.begins):
            return None
        return Taken(behind)


class HoldingParser(ABC):
    """What parsers share that hold back text until more of it decides."""

    def __init__(self) -> None:
        self._held = ""
        self._n_calls = 0

    def feed(self, text: str) -> list[Parsed]:
        """See `Parser`."""
        self._held += text
        return self._drain(final=False)

    def finish(self) -> list[Parsed]:
        """See `Parser`. A call that lacks only its closing tag counts; models leave it out."""
        return joined([*self._drain(final=True), *self._end()])

    def _drain(self, *, final: bool) -> list[Parsed]:
        parsed: list[Parsed] = []
        while self._held:
            before = len(self._held), self._state()
            parsed += self._step(final)
            if (len(self._held), self._state()) == before:
                break
        return joined(parsed)

    @abstractmethod
    def _state(self) -> object:
        """What a step may change beside the held text."""

    @abstractmethod
    def _step(self, final: bool) -> list[Parsed]:
        """What comes next; if it takes nothing from the held text, more text must decide."""

    def _end(self) -> list[Parsed]:
        """What is left when nothing is held any more."""
        return []

    def _cut(self, n_chars: int) -> str:
        cut, self._held = self._held[:n_chars], self._held[n_chars:]
        return cut


class TagParser(HoldingParser):
    """Splits an answer by tags.

    White space around reasoning, before a call and after the last one is dropped. Text that may be
    the start of a tag, and white space that a tag may follow, is held back until more text decides.
    """

    def __init__(
        self,
        syntax: Syntax | None,
        tools: ToolBook,
        *,
        think: Think | None,
        in_reasoning: bool = False,
    ) -> None:
        """Make the parser of one answer.

        Args:
            syntax: of calls; None if the answer may hold none.
            tools: what the request offers.
            think: the tags of reasoning; None if the model has none.
            in_reasoning: the prompt ends inside of reasoning.
        """
        super().__init__()
        self._syntax, self._tools, self._think = syntax, tools, think
        self._since = 0  # how much of the held text a block has seen
        self._at_start = think is not None and not in_reasoning
        self._reasons = self._bare = in_reasoning and think is not None  # bare: drop white space
        self._follows = False  # nothing but white space since the last call

    def _state(self) -> object:
        return self._at_start

    def _step(self, final: bool) -> list[Parsed]:
        if self._at_start:
            self._start(final)
            return []
        if self._bare:
            self._held = self._held.lstrip()
            self._bare = not self._held
            if self._bare:
                return []
        if self._follows and self._drop_trailer(final):
            return []
        mark = self._marks.search(self._held) if self._marks is not None else None
        if mark is None:
            return self._text(self._sure(final))
        lead = len(self._held[: mark.start()].rstrip())
        if lead:
            return self._text(lead)
        if self._reasons and self._think is not None and mark.group() == self._think.close:
            self._cut(mark.end())
            self._reasons, self._bare = False, True
            return []
        return self._block(mark.start(), final)

    def _start(self, final: bool) -> None:
        """See whether the answer begins with reasoning. A closing tag without one is dropped."""
        assert self._think is not None  # noqa: S101 (only then is there a start to look at)
        text = self._held.lstrip()
        lead = len(self._held) - len(text)
        for tag in (self._think.open, self._think.close):
            if text.startswith(tag):
                self._cut(lead + len(tag))
                self._reasons, self._bare = tag == self._think.open, True
                self._at_start = False
                return
        unclear = self._think.open.startswith(text) or self._think.close.startswith(text)
        self._at_start = unclear and not final

    def _drop_trailer(self, final: bool) -> bool:
        """Drop what belongs to the call before; True if that, or waiting for it, is all to do."""
        trailers = () if self._syntax is None else self._syntax.trailers
        text = self._held.lstrip()
        trailer = _standing(text, 0, trailers)
        if trailer is not None:
            self._cut(len(self._held) - len(text) + len(trailer))
            return True
        if not text and final:
            self._cut(len(self._held))
            return True
        return not final and any(trailer.startswith(text) for trailer in (*trailers, " "))

    def _block(self, at: int, final: bool) -> list[Parsed]:
        assert self._syntax is not None  # noqa: S101 (its tag was found)
        taken = self._syntax.take(
            self._held, at, since=self._since, follows=self._follows, final=final,
            tools=self._tools,
        )  # fmt: skip
        if taken is None:
            self._since = len(self._held)
            return []
        if not taken.calls:
            return self._text(taken.n_chars)
        self._cut(taken.n_chars)
        self._follows = True
        first, self._n_calls = self._n_calls, self._n_calls + len(taken.calls)
        return [
            Call(first + i, call.name, call.arguments, call.id)
            for i, call in enumerate(taken.calls)
        ]

    def _sure(self, final: bool) -> int:
        """How much of the held text no tag can touch any more; it holds none."""
        if self._marks is None:
            return len(self._held)
        if final:
            return len(self._held.rstrip()) if self._reasons else len(self._held)
        sure = len(self._held) - tag_start_length(self._held, self._mark_texts)
        return len(self._held[:sure].rstrip())

    def _text(self, n_chars: int) -> list[Parsed]:
        if not n_chars:
            return []
        text = self._cut(n_chars)
        if text.strip():
            self._follows = False
        return [Reasoning(text) if self._reasons else Content(text)]

    def _cut(self, n_chars: int) -> str:
        self._since = 0
        return super()._cut(n_chars)

    @property
    def _mark_texts(self) -> tuple[str, ...]:
        """The tags that count here."""
        marks: tuple[str, ...] = ()
        if self._syntax is not None and (not self._reasons or self._syntax.in_reasoning):
            marks = tuple(self._syntax.opens)
        if self._reasons and self._think is not None:
            marks += (self._think.close,)
        return marks

    @property
    def _marks(self) -> re.Pattern[str] | None:
        marks = self._mark_texts
        return tags_pattern(marks) if marks else None


@cache
def tags_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of any of these; of two at the same place, the longer one."""
    return re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))


def tag_start_length(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a tag but is not all of it."""
    longest = min(len(text), max((len(tag) for tag in tags), default=1) - 1)
    for n in range(longest, 0, -1):
        end = text[-n:]
        if any(len(tag) > n and tag.startswith(end) for tag in tags):
            return n
    return 0


def _standing(text: str, at: int, tags: Sequence[str]) -> str | None:
    """The tag that stands at a place."""
    fitting = [tag for tag in tags if text.startswith(tag, at)]
    return max(fitting, key=len, default=None)
