"""The conversation as drawn: one block per message, answers as Markdown that grows in flushes.

An answer is a row of Markdown widgets; when the last one is long it is cut at a safe place and a
new one begins, which keeps the cost of a flush flat. The view follows the text only while it is at
the bottom. Text from people, files and models is never markup. UI thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Markdown, Static

from moet_desk.errors import MoetError
from moet_desk.ui.text import SEGMENT_CHARS, clean, find_split, markdown_parser, shown_length
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.gauges import bar, spread
from moet_desk.ui.widgets.problem import ProblemPanel
from moet_desk.units import show_duration

_FOLLOW_ROWS = 2
_SPLIT_STEP = 200  # a new look for a cut is worth its parse after so many characters


class _Head(Widget):
    """Who wrote it, and when."""

    DEFAULT_CSS = "_Head { height: 1; }"

    def __init__(self, who: str, when: str) -> None:
        super().__init__()
        self._who = who
        self._when = when

    def render(self) -> Content:
        who = Content.styled(self._who, "bold $primary")
        return spread(who, Content.styled(self._when, "$dim"), self.size.width)


class MessageBlock(Vertical):
    """A message of the user: head and plain text."""

    DEFAULT_CSS = """
    MessageBlock { height: auto; padding: 0 1 1 1; }
    MessageBlock > .body { padding-left: 2; height: auto; }
    """

    def __init__(self, who: str, *, when: str, text: str) -> None:
        super().__init__()
        self._who = who
        self._when = when
        self.source = clean(text)

    def compose(self) -> ComposeResult:
        yield _Head(self._who, self._when)
        yield Static(Content(self.source.expandtabs(4)), classes="body", markup=False)


class Segment(Markdown):
    """One stretch of an answer. Links never open by themselves."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text, parser_factory=markdown_parser, open_links=False)


class AnswerBlock(Vertical):
    """A message of the model: head, Markdown segments, a closing line, perhaps a problem."""

    DEFAULT_CSS = """
    AnswerBlock { height: auto; padding: 0 1 1 1; }
    AnswerBlock > .body { height: auto; padding-left: 2; }
    AnswerBlock > .closing { height: auto; padding-left: 2; color: $dim; }
    """

    def __init__(self, who: str, *, when: str, glyphs: Glyphs) -> None:
        super().__init__()
        self._who = who
        self._when = when
        self._glyphs = glyphs
        self._body = Vertical(classes="body")
        self._foot = Static(Content(""), classes="closing", markup=False)
        self._tail: Segment | None = None
        self._tail_text = ""  # all text of the last segment, drawn or not
        self._drawn = 0  # characters of it that are drawn
        self._looked_at = 0  # length at the last look for a cut

    def compose(self) -> ComposeResult:
        yield _Head(self._who, self._when)
        yield self._body
        yield self._foot

    async def append(self, text: str) -> None:
        """Draw the next clean piece of a growing answer."""
        self._tail_text += text
        if self._tail is None:
            self._tail = Segment()
            await self._body.mount(self._tail)
        await self._rotate()
        await self._draw(shown_length(self._tail_text))

    async def finish(self) -> None:
        """The answer is complete: draw what was held back."""
        await self._draw(len(self._tail_text))

    async def _draw(self, end: int) -> None:
        if self._tail is not None and end > self._drawn:
            await self._tail.append(self._tail_text[self._drawn : end])
            self._drawn = end

    async def _rotate(self) -> None:
        """Begin a new segment if the last one is long and can be cut."""
        length = len(self._tail_text)
        if self._tail is None or length < max(SEGMENT_CHARS, self._looked_at + _SPLIT_STEP):
            return
        self._looked_at = length
        cut = find_split(self._tail_text)
        if cut is None:
            return
        with self.app.batch_update():
            if cut < self._drawn:
                await self._tail.update(self._tail_text[:cut])
            else:
                await self._draw(cut)
            self._tail = Segment()
            await self._body.mount(self._tail)
        self._tail_text = self._tail_text[cut:]
        self._drawn = self._looked_at = 0

    async def set_text(self, text: str) -> None:
        """Draw a complete answer, cut into segments at once."""
        rest, parts = text, []
        while len(rest) > SEGMENT_CHARS:
            cut = find_split(rest[: SEGMENT_CHARS * 2])
            if cut is None:
                break
            parts.append(rest[:cut])
            rest = rest[cut:]
        await self._body.mount_all([Segment(part) for part in (*parts, rest)])

    def set_closing(self, closing: Content) -> None:
        """Replace the line under the answer."""
        self._foot.update(closing)

    def show_reading(self, done: int, total: int, *, elapsed_s: float) -> None:
        """While the prompt is read: a bar with its numbers, in place of the closing line."""
        rate = done / elapsed_s if elapsed_s > 0 else 0.0
        left = f"   about {show_duration((total - done) / rate)} left" if rate > 0 else ""
        drawn = bar(done / total if total else 0.0, 40, self._glyphs)
        share = f"{done / total * 100:.0f} %" if total else "–"
        speed = f"{rate:.0f} tok/s" if rate else ""
        self.set_closing(
            Content("Reading your message\n")
            + Content.styled(drawn, "$status-ok")
            + Content(f"  {share}   {done:,} of {total:,} tokens\n{speed}{left}")
        )

    async def show_problem(
        self, error: MoetError | Mapping[str, Any], actions: Mapping[str, str]
    ) -> None:
        """Put an error panel under the text so far."""
        await self.mount(ProblemPanel(error, glyphs=self._glyphs, actions=actions))


class Transcript(VerticalScroll, can_focus=True):
    """The scrolled list of blocks. Follows its end until the reader scrolls up."""

    DEFAULT_CSS = "Transcript { height: 1fr; }"

    @property
    def following(self) -> bool:
        """Whether the end is in view (two rows tolerance)."""
        return self.scroll_offset.y >= self.max_scroll_y - _FOLLOW_ROWS

    @property
    def screens_below(self) -> float:
        """How many windows of text are below the view."""
        return (self.max_scroll_y - self.scroll_offset.y) / max(1, self.size.height)

    def follow(self) -> None:
        """Go to the end and stay there."""
        if self.max_scroll_y > 0:
            self.anchor()
        self.keep_end()

    def keep_end(self) -> None:
        """Call after text was drawn: stay at the end, but leave a short chat at the top.

        Textual's anchor would push a chat that is shorter than the window to the bottom.
        """
        if self.max_scroll_y > 0:
            if not self.is_anchored:
                self.anchor()
        elif self.is_anchored or self.scroll_offset.y < 0:
            self.anchor(False)
            self.scroll_to(y=0, animate=False, force=True)

    def page(self, pages: int) -> None:
        """Scroll by windows; upwards this ends following."""
        self.release_anchor()
        self.scroll_relative(y=pages * max(1, self.size.height - 2), animate=False)

    async def add(self, block: MessageBlock | AnswerBlock) -> None:
        """Add a block at the end."""
        await self.mount(block)

    async def clear(self) -> None:
        """Remove all blocks."""
        self.anchor(False)
        await self.remove_children()
