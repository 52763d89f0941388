"""The conversation as drawn: one block per message, answers as Markdown that grows in flushes.

An answer is a row of Markdown widgets; when the last one is long it is cut at a safe place and a
new one begins, and those far out of view are parked, which keeps the cost of a flush flat. The view
follows the text only while it is at the bottom. Text from people, files and models is never markup.
UI thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from moet_desk.errors import MoetError
from moet_desk.marked_text import MarkedText, Ranges
from moet_desk.telemetry import PrefillProgress
from moet_desk.ui.text import SEGMENT_CHARS, clean, shortened, shown_length, split_segments
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.gauges import bar, spread
from moet_desk.ui.widgets.marked_markdown import MarkedMarkdown
from moet_desk.ui.widgets.problem import ProblemPanel
from moet_desk.units import show_duration

_FOLLOW_ROWS = 2
_MESSAGE_LINES, _MESSAGE_CHARS = 100, 8000  # to draw 1 MB took 11 s
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
        shown = shortened(self.source, max_lines=_MESSAGE_LINES, max_chars=_MESSAGE_CHARS)
        yield Static(Content(shown.expandtabs(4)), classes="body", markup=False)


class Segment(MarkedMarkdown):
    """One stretch of an answer.

    A parked segment keeps its height but holds no widgets: laying out 400 of them costs 30 ms per
    flush (measured on 2 cores, 2026-11-29).
    """

    def __init__(self, text: str = "", *, marks: Ranges = (), shows_marks: bool = False) -> None:
        super().__init__(text, marks=marks, shows_marks=shows_marks)
        self._parked_text: str | None = None
        self._parked_width = 0

    @property
    def text(self) -> str:
        """The whole Markdown, also while parked."""
        return self.source if self._parked_text is None else self._parked_text

    @property
    def parked(self) -> bool:
        """Whether it holds no widgets now."""
        return self._parked_text is not None

    async def park(self) -> None:
        """Let the widgets go, keep the room they took."""
        if self.parked or not self.size.height:
            return
        self._parked_text, self._parked_width = self.source, self.size.width
        self.styles.height = self.size.height
        await self.remove_children()

    async def unpark(self) -> None:
        """Draw it again."""
        text, self._parked_text = self._parked_text, None
        if text is not None:
            await self.update(text)
            self.styles.height = "auto"

    async def redraw(self) -> None:
        """Draw from the source; a parked segment is drawn when it comes near."""
        if not self.parked:
            await super().redraw()

    def refit(self, width: int) -> None:
        """The window has another width: guess the height until it is drawn again."""
        if self.parked and width and width != self._parked_width:
            rows = round(self.size.height * self._parked_width / width)
            self.styles.height, self._parked_width = max(1, rows), width


def cut_segments(text: MarkedText) -> list[MarkedText]:
    """`split_segments` with the marks of each part."""
    parts, start = [], 0
    for part in split_segments(text.text):
        parts.append(text.cut(start, start + len(part)))
        start += len(part)
    return parts


class AnswerBlock(Vertical):
    """A message of the model: head, Markdown segments, a closing line, perhaps a problem."""

    DEFAULT_CSS = """
    AnswerBlock { height: auto; padding: 0 1 1 1; }
    AnswerBlock > .body { height: auto; padding-left: 2; }
    AnswerBlock > .closing { height: auto; padding-left: 2; color: $dim; }
    """

    def __init__(self, who: str, *, when: str, glyphs: Glyphs, shows_marks: bool = False) -> None:
        super().__init__()
        self._who = who
        self._when = when
        self._glyphs = glyphs
        self._shows_marks = shows_marks
        self._body = Vertical(classes="body")
        self._foot = Static(Content(""), classes="closing", markup=False)
        self.segments: list[Segment] = []
        self._tail: Segment | None = None  # the segment that grows
        self._tail_text = MarkedText()  # all text of the last segment, drawn or not
        self._drawn = 0  # characters of it that are drawn
        self._looked_at = 0  # length at the last look for a cut
        self._drawing = asyncio.Lock()  # text may arrive while the marks are switched

    def compose(self) -> ComposeResult:
        yield _Head(self._who, self._when)
        yield self._body
        yield self._foot

    async def append(self, piece: MarkedText) -> None:
        """Draw the next clean piece of a growing answer."""
        async with self._drawing:
            self._tail_text += piece
            if self._tail is None:
                self._tail = await self._add(self._segment(MarkedText()))
            await self._rotate()
            await self._draw(shown_length(self._tail_text.text))

    def _segment(self, text: MarkedText) -> Segment:
        return Segment(text.text, marks=text.marks, shows_marks=self._shows_marks)

    async def finish(self) -> None:
        """The answer is complete: draw what was held back."""
        async with self._drawing:
            await self._draw(len(self._tail_text))
            self._tail = None

    async def _add(self, segment: Segment) -> Segment:
        self.segments.append(segment)
        await self._body.mount(segment)
        return segment

    def at_rest(self) -> list[Segment]:
        """The segments that do not grow any more."""
        return [segment for segment in self.segments if segment is not self._tail]

    async def _draw(self, end: int) -> None:
        if self._tail is not None and end > self._drawn:
            self._tail.marks = self._tail_text.marks
            await self._tail.append(self._tail_text.text[self._drawn : end])
            self._drawn = end

    async def _rotate(self) -> None:
        """Begin a new segment if the last one is long and can be cut."""
        length = len(self._tail_text)
        if self._tail is None or length < max(SEGMENT_CHARS, self._looked_at + _SPLIT_STEP):
            return
        self._looked_at = length
        first, *others = cut_segments(self._tail_text)
        if not others:
            return
        self._tail.marks = first.marks
        with self.app.batch_update():
            if len(first) < self._drawn:
                await self._tail.update(first.text)
            else:
                await self._draw(len(first))
            for part in others[:-1]:
                await self._add(self._segment(part))
            self._tail = await self._add(self._segment(MarkedText()))
        self._tail_text = others[-1]
        self._drawn = self._looked_at = 0

    async def set_text(self, text: MarkedText) -> None:
        """Draw a complete answer, cut into segments at once."""
        self.segments = [self._segment(part) for part in cut_segments(text)]
        await self._body.mount_all(self.segments)

    async def show_marks(self, shown: bool) -> None:
        """Underline the marked text, or stop doing so."""
        self._shows_marks = shown
        async with self._drawing:
            for segment in self.at_rest():
                await segment.show_marks(shown)
            if self._tail is not None and self._tail.shows_marks is not shown:
                self._tail.shows_marks = shown
                await self._tail.redraw_growing()

    def set_closing(self, closing: Content) -> None:
        """Replace the line under the answer."""
        self._foot.display = bool(closing)
        self._foot.update(closing)

    def show_reading(self, prompt: PrefillProgress, *, elapsed_s: float) -> None:
        """While the prompt is read: a bar with its numbers, in place of the closing line."""
        done, total = prompt.done, prompt.total
        rate = (done - prompt.restored) / elapsed_s if elapsed_s > 0 else 0.0
        left = f"   about {show_duration((total - done) / rate)} left" if rate > 0 else ""
        drawn = bar(done / total if total else 0.0, 40, self._glyphs)
        share = f"{done / total * 100:.0f} %" if total else "–"
        speed = f"{rate:.0f} tok/s" if rate else ""
        kept = f"   {prompt.restored:,} known from before" if prompt.restored else ""
        self.set_closing(
            Content("Reading your message\n")
            + Content.styled(drawn, "$status-ok")
            + Content(f"  {share}   {done:,} of {total:,} tokens\n{speed}{left}{kept}")
        )

    async def show_problem(
        self, error: MoetError | Mapping[str, Any], actions: Mapping[str, str]
    ) -> None:
        """Put an error panel under the text so far."""
        await self.mount(ProblemPanel(error, glyphs=self._glyphs, actions=actions))


class Transcript(VerticalScroll, can_focus=True):
    """The scrolled list of blocks. Follows its end until the reader scrolls up."""

    DEFAULT_CSS = "Transcript { height: 1fr; }"

    def __init__(self) -> None:
        super().__init__()
        self._settling = False

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
        self._keep_end()

    async def settle(self) -> None:
        """Call after text was drawn or the view moved: follow the end, park what is far away."""
        self._keep_end()
        if self._settling:
            return
        self._settling = True
        try:
            await self._park()
        finally:
            self._settling = False

    def _keep_end(self) -> None:
        """Stay at the end, but leave a short chat at the top.

        Textual's anchor would push a chat that is shorter than the window to the bottom.
        """
        if self.max_scroll_y > 0:
            if not self.is_anchored:
                self.anchor()
        elif self.is_anchored or self.scroll_offset.y < 0:
            self.anchor(False)
            self.scroll_to(y=0, animate=False, force=True)

    async def _park(self) -> None:
        view = self.region
        near = view.grow((view.height // 2, 0, view.height // 2, 0))
        far = view.grow((view.height, 0, view.height, 0))
        for segment in self._segments_at_rest():
            place = segment.region
            if not place.height:
                continue
            if segment.parked and place.overlaps(near):
                await segment.unpark()
            elif not segment.parked and not place.overlaps(far):
                await segment.park()

    def _segments_at_rest(self) -> list[Segment]:
        blocks = [block for block in self.children if isinstance(block, AnswerBlock)]
        return [segment for block in blocks for segment in block.at_rest()]

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value):
            self.call_after_refresh(self.settle)

    def on_resize(self) -> None:
        for segment in self._segments_at_rest():
            segment.refit(segment.size.width)
        self.call_after_refresh(self.settle)

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
