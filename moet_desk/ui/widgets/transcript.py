"""The conversation as drawn: a window of message blocks that moves with the reader.

A chat may have thousands of messages, and each block costs a few widgets in every layout; so only
those around the view are drawn. Parts of them that are far out of view are parked. The view follows
the text only while it is at the bottom. UI thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from moet_desk.ui.chat_records import Status, Turn
from moet_desk.ui.lean_rows import Growing, LeanScroll
from moet_desk.ui.widgets.blocks import AnswerBlock, Block
from moet_desk.ui.widgets.segments import Segment

LEAST_TURNS, MOST_TURNS = 16, 60
"""Messages that stay drawn in any case, and at most; the ones farthest from the view go."""
_MOST_SCREENS = 5  # of messages like those that come into the window
_OPENED_SCREENS = 3  # drawn when a chat is opened
_STEP_SCREENS = 1  # drawn when the view comes near an end of the window
_TALL_SCREENS = 4  # drawn before any message may go
_OTHER_ROWS = 4  # of a message: head, closing line, blanks
_LONGEST_ROWS = 12  # of the user's messages, which are folded
_FOLLOW_ROWS = 2
_LAYOUTS = 8  # Markdown takes some until its height is known


class Transcript(Growing, LeanScroll, VerticalScroll, can_focus=True):
    """The scrolled list of blocks. Follows its end until the reader scrolls up.

    With the focus it has a block cursor; the keys of a block are the screen's actions.
    """

    FOCUS_ON_CLICK = False  # who selects text goes on typing in the prompt
    DEFAULT_CSS = """
    Transcript { height: 1fr; }
    Transcript > .edge { height: 2; padding: 0 1; color: $dim; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "screen.copy_block", "Copy", id="block.copy"),
        Binding("c", "screen.copy_code", "Code", id="block.code"),
        Binding("e", "screen.edit", "Edit", id="block.edit"),
        Binding("r", "screen.retry_here", "Again", id="block.again"),
        Binding("space,enter", "fold", "Fold", id="block.fold"),
        Binding("left", "screen.version(-1)", "Version before", id="block.left", show=False),
        Binding("right", "screen.version(1)", "Version behind", id="block.right", show=False),
        Binding("k", "cursor(-1)", "Message before", id="block.up", show=False),
        Binding("j", "cursor(1)", "Message behind", id="block.down", show=False),
    ]

    def __init__(self, make: Callable[[Turn], Block]) -> None:
        """`make` makes the block of a message; it is drawn by `fill`."""
        super().__init__()
        self._make = make
        self._settling = False
        self._turns: Sequence[Turn] = ()
        self._first = self._last = 0  # the window: which of the turns are drawn
        self._cursor: Turn | None = None
        self._edge = Static("", classes="edge", markup=False)
        self._placing = asyncio.Lock()  # one at a time moves the window
        self._stays = False  # the reader is somewhere; until the end is reached or asked for
        self._moving = False  # blocks come or go, and the view is not in its place yet

    def compose(self) -> ComposeResult:
        self._edge.display = False
        yield self._edge

    # -- what is drawn -------------------------------------------------------------------------

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the window."""
        return [child for child in self.children if isinstance(child, Block)]

    def block_of(self, turn: Turn) -> Block | None:
        """The block of a message, None if it is not in the window."""
        return next((block for block in self.blocks if block.turn is turn), None)

    async def sync(self, turns: Sequence[Turn]) -> None:
        """Draw a chat that has changed at its end, or another one; goes to the end."""
        async with self._placing:
            await self._sync(turns)
        self.call_after_refresh(self.follow)

    async def _sync(self, turns: Sequence[Turn]) -> None:
        before, self._turns = self._turns, list(turns)
        if self._cursor not in self._turns:
            self.set_cursor(None)  # at once: a key may move it while blocks come and go
        pairs = zip(before, turns, strict=False)
        same = next(
            (i for i, (a, b) in enumerate(pairs) if a is not b), min(len(before), len(turns))
        )
        is_far = self._reach(len(turns), -1, _OPENED_SCREENS) > same
        if same < self._first or self._last < len(before) or is_far:
            await self._draw_end()
        else:
            gone = [block for block in self.blocks if block.turn in before[same:]]
            await self.remove_children(gone)
            self._last = min(self._last, same)
            for turn in turns[same:]:
                await self._append(turn)
            await self._trim_top(MOST_TURNS)

    async def seek(self, turn: Turn | None, wanted: str = "") -> None:
        """Mark a text in a message, and in no other one."""
        for block in self.blocks:
            await block.seek(wanted if turn is not None and block.turn is turn else "")

    async def show_at(self, turn: Turn) -> None:
        """Bring a message into the window, put the cursor there and scroll to it; nothing if it is
        no part of the chat any more, or not yet.
        """
        if turn not in self._turns:
            return
        if self.block_of(turn) is None:
            at = self._turns.index(turn)
            async with self._placing:
                first, last = self._reach(at, -1, _STEP_SCREENS), self._reach(at, 1, _STEP_SCREENS)
                await self._draw_window(first, last)
        self.set_cursor(turn)
        block = self.block_of(turn)
        if block is not None:
            self._stay()
            self._moving = True
            self.call_after_refresh(self._go_to, block)

    def _go_to(self, block: Block) -> None:
        """Show a message: all of it if it fits, else from its beginning."""
        is_seen = self.region.contains_region(block.region)
        if block.is_attached and not is_seen:
            self.scroll_to_widget(block, animate=False, top=True, force=True)
        self._moving = False

    def _stay(self) -> None:
        self._stays = True
        self.anchor(False)

    def _reach(self, at: int, by: int, screens: int) -> int:
        """The end of a window that begins at a message and goes on for some screens of text."""
        width, rows = max(20, self.size.width - 4), screens * max(10, self.size.height)
        while rows > 0 and 0 <= at + min(0, by) < len(self._turns):
            turn = self._turns[at + min(0, by)]
            lines = turn.text.count("\n") + len(turn.text) // width
            rows -= _OTHER_ROWS + (min(lines, _LONGEST_ROWS) if turn.role == "user" else lines)
            at += by
        return at

    async def _draw_end(self) -> None:
        n = len(self._turns)
        await self._draw_window(self._reach(n, -1, _OPENED_SCREENS), n)

    async def _draw_window(self, first: int, last: int) -> None:
        self._first, self._last = max(0, first), min(len(self._turns), last)
        self._stay()
        others = [child for child in self.children if child is not self._edge]
        blocks = [self._made(turn) for turn in self._turns[self._first : self._last]]
        with self.app.batch_update():
            await self.remove_children(others)
            await self.mount_all(blocks)
            await fill(blocks)
            self._draw_edge()

    def _made(self, turn: Turn) -> Block:
        block = self._make(turn)
        block.mark(turn is self._cursor)
        return block

    async def _append(self, turn: Turn) -> None:
        block = self._made(turn)
        self._last += 1
        await self.add(block)
        await fill([block])

    async def add(self, block: Block) -> None:
        """Put a block at the end."""
        await self.mount(block)

    @property
    def _is_tall(self) -> bool:
        """Whether there is enough to let some go: folded messages may leave little of many."""
        return self.virtual_size.height > _TALL_SCREENS * self.size.height

    async def _trim_top(self, most: int) -> None:
        surplus = len(self.blocks) - most
        if surplus > 0 and self._is_tall:
            await self.remove_children(self.blocks[:surplus])
            self._first += surplus
        self._draw_edge()

    def _draw_edge(self) -> None:
        self._edge.display = self._first > 0
        if self._first:
            word = "message" if self._first == 1 else "messages"
            words = f"{self._first:,} earlier {word}; scroll up, or Ctrl+Home for the first"
            self._edge.update(Content(words))

    async def _extend(self) -> None:
        """Draw more at the end of the window that the view is near to; let go what is far."""
        if self._placing.locked() or self._moving or not self.size.height:
            return
        async with self._placing:
            near = self.size.height
            if self._first > 0 and self.scroll_offset.y < near:
                await self._extend_up()
            elif self.n_below and self.scroll_offset.y > self.max_scroll_y - near:
                await self._extend_down()

    async def _extend_up(self) -> None:
        blocks, first = self.blocks, self._reach(self._first, -1, _STEP_SCREENS)
        added = [self._made(turn) for turn in self._turns[first : self._first]]
        kept = blocks[0]
        with self._holding(kept, added[0]):
            await self.mount_all(added, before=kept)
            await fill(added)
            surplus = len(blocks) + len(added) - _most(added)
            if surplus > 0 and self._is_tall:
                await self.remove_children(blocks[-surplus:])
                self._last -= surplus
            self._first = first
            self._draw_edge()

    async def _extend_down(self) -> None:
        blocks, last = self.blocks, self._reach(self._last, 1, _STEP_SCREENS)
        added = [self._made(turn) for turn in self._turns[self._last : last]]
        with self._holding(blocks[-1], added[0]):
            await self.mount_all(added)
            await fill(added)
            self._last = last
            await self._trim_top(_most(added))

    @contextmanager
    def _holding(self, block: Block, added: Block) -> Iterator[None]:
        """The view stays where it is although blocks above it come or go.

        Args:
            block: one that stays.
            added: one that comes; with it the layout is the new one.
        """
        before = block.virtual_region.y
        self._stay()
        self._moving = True
        with self.app.batch_update():
            yield
        self.call_after_refresh(self._shift, block, before, added, _LAYOUTS)

    def _shift(self, block: Block, before: int, added: Block, tries: int) -> None:
        now = block.virtual_region.y
        if block.is_attached and now != before:
            y = self.scroll_offset.y + now - before
            self.scroll_to(y=y, animate=False, force=True, immediate=True)
        if tries and (not added.size.height or now != before):
            self.call_after_refresh(self._shift, block, now, added, tries - 1)
        else:
            self._moving = False
            self.call_after_refresh(self.settle)  # the window may be taller than what was added

    # -- the cursor ----------------------------------------------------------------------------

    @property
    def cursor(self) -> Turn | None:
        """The message under the block cursor."""
        return self._cursor

    def set_cursor(self, turn: Turn | None) -> None:
        """Put the block cursor on a message, or take it away."""
        self._cursor = turn
        for block in self.blocks:
            block.mark(turn is not None and block.turn is turn)

    async def action_cursor(self, by: int) -> None:
        """Go to the message before or behind."""
        if not self._turns:
            return
        if self._cursor is None:
            at = len(self._turns) - 1 if by < 0 else self._first
        else:
            at = self._turns.index(self._cursor) + by
        await self.show_at(self._turns[max(0, min(len(self._turns) - 1, at))])

    async def action_fold(self) -> None:
        """Fold or unfold the message under the cursor."""
        block = self.block_of(self._cursor) if self._cursor is not None else None
        if block is not None:
            await block.toggle()

    def on_block_chosen(self, event: Block.Chosen) -> None:
        event.stop()
        self.focus(scroll_visible=False)
        self.set_cursor(event.turn)

    async def first(self) -> None:
        """Go to the first message."""
        if self._turns:
            await self.show_at(self._turns[0])

    # -- scrolling -----------------------------------------------------------------------------

    @property
    def following(self) -> bool:
        """Whether the end is in view (two rows tolerance)."""
        at_end = self._last == len(self._turns)
        return at_end and self.scroll_offset.y >= self.max_scroll_y - _FOLLOW_ROWS

    @property
    def n_below(self) -> int:
        """How many messages behind the window are not drawn."""
        return len(self._turns) - self._last

    @property
    def screens_below(self) -> float:
        """How many windows of text are below the view."""
        return (self.max_scroll_y - self.scroll_offset.y) / max(1, self.size.height)

    async def to_end(self) -> None:
        """Draw the end of the chat and follow it."""
        if self.n_below:
            async with self._placing:
                await self._draw_end()
        self.call_after_refresh(self.follow)

    def follow(self) -> None:
        """Go to the end of the window and stay there."""
        self._stays = False
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
            await self._extend()
            await self._park()
        finally:
            self._settling = False

    def _keep_end(self) -> None:
        """Stay at the end, but leave a short chat at the top.

        Textual's anchor would push a chat that is shorter than the window to the bottom.
        """
        at_end = 0 < self.max_scroll_y <= self.scroll_offset.y and not self.n_below
        if at_end and not self._moving:
            self._stays = False
        if self._stays:
            return
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
        for segment in self._segments():
            place = segment.region
            if not place.height:
                continue
            if segment.parked and place.overlaps(near):
                await segment.unpark()
            elif not segment.parked and not place.overlaps(far):
                await segment.park()

    def _segments(self) -> list[Segment]:
        blocks = [block for block in self.children if isinstance(block, AnswerBlock)]
        return [segment for block in blocks for segment in block.segments]

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) != round(new_value):
            self.call_after_refresh(self.settle)

    def on_resize(self) -> None:
        for segment in self._segments():
            segment.refit(segment.size.width)
        self.call_after_refresh(self.settle)

    def page(self, pages: int) -> None:
        """Scroll by windows; upwards this ends following."""
        self.release_anchor()
        self.scroll_relative(y=pages * max(1, self.size.height - 2), animate=False)


def _most(added: Sequence[Block]) -> int:
    """How many blocks may be drawn when about a screen of them is added."""
    return min(MOST_TURNS, max(LEAST_TURNS, _MOST_SCREENS * len(added)))


async def fill(blocks: Sequence[Block]) -> None:
    """Draw the text of blocks that are on the screen now, at once: each alone is a layout."""
    await asyncio.gather(*(_fill(block) for block in blocks))


async def _fill(block: Block) -> None:
    if isinstance(block, AnswerBlock) and block.turn is not None:
        if block.turn.status is Status.WRITING:
            await block.grow(block.turn)
        else:
            await block.show(block.turn)
