"""Messages as drawn: the user's as plain text, answers as Markdown.

An answer is one `LiveText` while it is written, which keeps the cost of a flush small and flat, and
a row of Markdown widgets when it is complete. Reasoning and long messages are folded. Text from
people, files and models is never markup. UI thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Size
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from moet_desk.errors import MoetError
from moet_desk.marked_text import MarkedText
from moet_desk.telemetry import PrefillProgress
from moet_desk.ui.attachments import Attachment
from moet_desk.ui.chat_records import Turn
from moet_desk.ui.lean_rows import Ground, Growing, Words
from moet_desk.ui.text import clean, clean_line, find_all
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.folds import Fold, ThoughtFold
from moet_desk.ui.widgets.gauges import bar, spread
from moet_desk.ui.widgets.live_text import LiveText
from moet_desk.ui.widgets.marked_markdown import needs_other_rows, sought
from moet_desk.ui.widgets.problem import ProblemPanel
from moet_desk.ui.widgets.segments import Segment, cut_segments
from moet_desk.units import show_duration

_FOLD_LINES, _FOLD_CHARS = 16, 1600  # a message beyond one of these is folded
_SHOWN_LINES, _SHOWN_CHARS = 8, 800


class Head(Widget):
    """Who wrote it, which of several versions it is, and when."""

    DEFAULT_CSS = "Head { height: 1; }"

    class Clicked(Message):
        """A click; on the arrows beside the version `by` is -1 or 1, else 0."""

        def __init__(self, by: int) -> None:
            super().__init__()
            self.by = by

    def __init__(self, who: str, when: str, *, branch: tuple[int, int], glyphs: Glyphs) -> None:
        super().__init__()
        self._who, self._when, self._glyphs = who, when, glyphs
        number, total = branch
        self._branch = f"{glyphs.left} {number}/{total} {glyphs.right}" if total > 1 else ""
        self.marked = False

    def mark(self, marked: bool) -> None:
        """Whether the block cursor is here: a glyph in the margin."""
        if marked is not self.marked:
            self.marked = marked
            self.refresh()

    def render(self) -> Content:
        mark = Content.styled(self._glyphs.now, "bold $accent") if self.marked else Content(" ")
        who = Content.styled(self._who, "bold $primary")
        parts = [Content.styled(self._branch, "$accent")] if self._branch else []
        right = Content("   ").join([*parts, Content.styled(self._when, "$dim")])
        return spread(mark + who, right, self.size.width)

    def on_click(self, event: events.Click) -> None:
        start = self.size.width - len(self._when) - 3 - len(self._branch)
        by = 0
        if self._branch and start <= event.x < start + len(self._branch):
            by = -1 if event.x < start + len(self._branch) // 2 else 1
        self.post_message(self.Clicked(by))


class Block(Growing, Ground, Vertical):
    """What all messages share: their record, their head, and that they can be folded."""

    DEFAULT_CSS = """
    Block { height: auto; padding: 0 1 1 0; }
    Block > .body { height: auto; padding-left: 3; }
    Block > .fold { padding-left: 3; }
    """

    class Moved(Message):
        """The reader wants another version of this message."""

        def __init__(self, turn: Turn, by: int) -> None:
            super().__init__()
            self.turn, self.by = turn, by

    class Chosen(Message):
        """The reader wants the block cursor here."""

        def __init__(self, turn: Turn) -> None:
            super().__init__()
            self.turn = turn

    def __init__(
        self,
        who: str,
        *,
        when: str,
        glyphs: Glyphs,
        turn: Turn | None = None,
        branch: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__()
        self.turn = turn
        self._glyphs = glyphs
        self._head = Head(who, when, branch=branch, glyphs=glyphs)

    def mark(self, marked: bool) -> None:
        """Whether the block cursor is here."""
        self._head.mark(marked)

    def on_head_clicked(self, event: Head.Clicked) -> None:
        event.stop()
        if self.turn is not None and event.by:
            self.post_message(self.Moved(self.turn, event.by))
        elif self.turn is not None:
            self.post_message(self.Chosen(self.turn))

    async def toggle(self) -> None:
        """Fold what can be folded, or unfold it."""

    async def seek(self, wanted: str) -> None:
        """Mark a text that is looked for; "" takes the marks away."""


class MessageBlock(Block):
    """A message of the user: head, files, plain text; a long text is folded at first."""

    def __init__(
        self,
        who: str,
        *,
        when: str,
        text: str,
        glyphs: Glyphs,
        files: tuple[Attachment, ...] = (),
        turn: Turn | None = None,
        branch: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__(who, when=when, glyphs=glyphs, turn=turn, branch=branch)
        self.source = clean(text)
        self._files = files
        self._lines = self.source.split("\n")
        self._wanted = ""
        is_long = len(self._lines) > _FOLD_LINES or len(self.source) > _FOLD_CHARS
        self._fold = Fold(glyphs) if is_long else None
        self._text = Static(self._content(), classes="body", markup=False)

    def compose(self) -> ComposeResult:
        yield self._head
        for file in self._files:
            name = Content(f"{self._glyphs.file} {clean_line(file.words, 120)}")
            yield Static(name.stylize("$accent"), classes="body", markup=False)
        self._text.display = bool(self.source)
        yield self._text
        if self._fold is not None:
            self._say_fold()
            yield self._fold

    @property
    def folded(self) -> bool:
        """Whether only the beginning is shown."""
        return self._fold is not None and not self._fold.is_open

    def _content(self) -> Content:
        shown = self.source
        if self.folded:
            shown = "\n".join(self._lines[:_SHOWN_LINES])[:_SHOWN_CHARS]
        content = Content(shown.expandtabs(4))
        return sought(content, self._wanted) or content

    def _say_fold(self) -> None:
        if self._fold is not None:
            words = f"all {len(self._lines):,} lines, {len(self.source):,} characters"
            self._fold.say("fold" if self._fold.is_open else words)

    async def toggle(self) -> None:
        """Show all of a long text, or its beginning."""
        if self._fold is not None:
            self._fold.is_open = not self._fold.is_open
            self._text.update(self._content())
            self._say_fold()

    async def seek(self, wanted: str) -> None:
        if wanted != self._wanted:
            self._wanted = wanted
            if self.folded and find_all(self.source, wanted):
                await self.toggle()
            self._text.update(self._content())

    async def on_fold_clicked(self, event: Fold.Clicked) -> None:
        event.stop()
        await self.toggle()


class _Body(Growing, Ground, Vertical):
    """Where the text of an answer stands."""

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Its rows; while the answer is written those of one widget, without an arrangement."""
        children = self.displayed_children
        if len(children) == 1 and isinstance(children[0], LiveText):
            return children[0].get_content_height(container, viewport, width)
        return super().get_content_height(container, viewport, width)


class AnswerBlock(Block):
    """A message of the model: head, reasoning, Markdown, a closing line, perhaps a problem."""

    DEFAULT_CSS = """
    AnswerBlock > .closing { height: auto; padding-left: 3; color: $dim; }
    """

    def __init__(
        self,
        who: str,
        *,
        when: str,
        glyphs: Glyphs,
        shows_marks: bool = False,
        shows_thought: bool = False,
        turn: Turn | None = None,
        branch: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__(who, when=when, glyphs=glyphs, turn=turn, branch=branch)
        self._shows_marks = shows_marks
        self.thought = ThoughtFold(glyphs, is_open=shows_thought)
        self._rest = Fold(glyphs, is_open=True)  # of the whole answer
        self._taken = 0  # characters of the turn's text that were given to `append`
        self._body = _Body(classes="body")
        self._foot = Words(Content(""), classes="closing", markup=False)
        self.segments: list[Segment] = []
        self.live: LiveText | None = None  # while it is written
        self._text = MarkedText()  # what `live` was given
        self._wanted = ""
        self._drawing = asyncio.Lock()  # text may arrive while the marks are switched

    def compose(self) -> ComposeResult:
        yield self._head
        yield self.thought
        self._rest.display = False
        yield self._rest
        yield self._body
        yield self._foot

    async def grow(self, turn: Turn, *, room: int = 0) -> bool:
        """Draw what is new in the turn of an answer that is being written.

        Args:
            turn: of this block.
            room: see `LiveText.show`.

        Returns:
            Whether the text needs more room than it had.
        """
        rows = 0 if self.live is None else self.live.n_rows_held
        await self.thought.show(turn.thought, turn.meta, is_done=bool(turn.text))
        if len(turn.text) > self._taken:
            piece = MarkedText(turn.text, turn.marks).cut(self._taken)
            self._taken = len(turn.text)
            await self.append(piece, room=room)
        return self.live is not None and self.live.n_rows_held != rows

    async def show(self, turn: Turn) -> None:
        """Draw a complete answer."""
        await self.thought.show(turn.thought, turn.meta, is_done=True)
        if turn.text:
            await self.set_text(MarkedText(turn.text, turn.marks))

    async def toggle(self) -> None:
        """Fold the answer to one line, or unfold it."""
        rest = self._rest
        length = sum(len(segment.text) for segment in self.segments) + len(self._text)
        rest.is_open = not rest.is_open
        self._body.display = rest.is_open
        rest.display = not rest.is_open
        rest.say(f"answer folded, {length:,} characters")

    async def seek(self, wanted: str) -> None:
        self._wanted = wanted
        if wanted and not self._rest.is_open:
            await self.toggle()
        for segment in self.segments:
            await segment.seek(wanted)

    async def on_fold_clicked(self, event: Fold.Clicked) -> None:
        event.stop()
        if event.fold is self._rest:
            await self.toggle()

    async def append(self, piece: MarkedText, *, room: int = 0) -> None:
        """Draw the next clean piece of a growing answer."""
        async with self._drawing:
            self._text += piece
            if self.live is None:
                plain = self._glyphs.name == "ascii"
                self.live = LiveText(plain=plain, shows_marks=self._shows_marks)
                await self._body.mount(self.live)
            self.live.show(self._text, room=room)

    def _segment(self, text: MarkedText, parked: Size | None = None) -> Segment:
        plain = self._glyphs.name == "ascii"
        return Segment(
            text.text, marks=text.marks, shows_marks=self._shows_marks, plain=plain, parked=parked
        )

    async def finish(self) -> None:
        """The answer is complete: Markdown takes the place of what was drawn row by row."""
        async with self._drawing:
            live = self.live
            if live is None:
                return
            live.show(self._text)
            self.segments = [
                self._segment(part, None if near else Size(live.size.width, rows))
                for part, rows, near in live.places()
            ]
            with self.app.batch_update():
                await self._body.mount_all(self.segments)
                await live.remove()
            self.live, self._text = None, MarkedText()
        await self.seek(self._wanted)

    async def set_text(self, text: MarkedText) -> None:
        """Draw a complete answer, cut into segments at once."""
        self.segments = [self._segment(part) for part in cut_segments(text)]
        await self._body.mount_all(self.segments)

    async def show_marks(self, shown: bool) -> None:
        """Underline the marked text, or stop doing so."""
        self._shows_marks = shown
        async with self._drawing:
            for segment in self.segments:
                await segment.show_marks(shown)
            if self.live is not None:
                self.live.show_marks(shown)

    def set_closing(self, closing: Content) -> bool:
        """Replace the line under the answer. Returns whether it needs another layout."""
        grows = self._foot.display is not bool(closing) or needs_other_rows(self._foot, closing)
        self._foot.display = bool(closing)
        self._foot.update(closing, layout=grows)
        return grows

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
