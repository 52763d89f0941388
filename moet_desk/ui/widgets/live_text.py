"""The answer while it is written, as one widget that draws its own rows.

Only the last block is drawn anew when words come; blocks that have ended keep their rows. The
widget grows by more rows than it needs when words come fast, so that most flushes change no layout:
they repaint a row or two. When the answer is complete, segments of Markdown take its place and look
the same. UI thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from markdown_it.token import Token
from textual import events
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget
from textual.widgets import Markdown

from moet_desk.marked_text import MarkedText
from moet_desk.ui.lean_rows import Growing, Rows
from moet_desk.ui.lean_screen import LeanScreen
from moet_desk.ui.markdown_marks import MARKS, mark_tokens
from moet_desk.ui.text import SEGMENT_CHARS, last_block, markdown_parser, shown_length
from moet_desk.ui.widgets.code_colours import CodeColours, plain_lines
from moet_desk.ui.widgets.markdown_rows import LOOKS, STYLES, RowDrawer
from moet_desk.ui.widgets.marked_markdown import PLAIN_BULLETS, underlined
from moet_desk.ui.widgets.open_rows import OpenCode, OpenRows, has_fence
from moet_desk.ui.widgets.segments import cut_segments

_COLOUR_AGAIN, _COLOUR_STEP, _COLOUR_TURNS = 1.25, 40, 2
"""When growing code is coloured anew: longer by this factor, and by so many characters, and by what
comes in so many turns; code that is complete is in any case."""


class LiveText(Growing, Rows, Widget):
    """A growing Markdown text. Give it all of the text with `show`."""

    DEFAULT_CSS = "LiveText { height: auto; width: 1fr; color: $foreground;" + STYLES + "}"
    COMPONENT_CLASSES: ClassVar[set[str]] = LOOKS

    def __init__(self, *, plain: bool, shows_marks: bool = False) -> None:
        """`plain`: bullets in ASCII."""
        super().__init__()
        bullets = PLAIN_BULLETS if plain else Markdown.BULLETS
        self._drawer = RowDrawer(self, bullets, self._code_lines)
        self._colours = CodeColours(self)
        self._shows_marks = shows_marks
        self._text = MarkedText()
        self._kept: list[Strip] = []  # rows of the blocks that have ended
        self._kept_chars = self._drawn_chars = 0
        self._ended: list[tuple[int, int]] = []  # characters and rows of what was kept at a time
        self._tail: list[Strip] = []  # rows of the last block
        self._rows = 1  # its height
        self._code = ""  # what of the last block is coloured, in whole lines
        self._code_rows: list[Strip] = []
        self._n_new = 0  # characters that came last
        self._grows = False  # what is drawn now may go on
        self._open: OpenRows | None = None
        self._shown_end = 0  # of the text that is drawn
        self._width = 0
        self._theme = ""

    @property
    def text(self) -> str:
        """What it was given."""
        return self._text.text

    @property
    def n_rows(self) -> int:
        """How many rows the text takes now."""
        return len(self._kept) + len(self._tail)

    @property
    def n_rows_held(self) -> int:
        """Its height: those rows, and blank ones for the next words."""
        return self._rows

    # -- text ----------------------------------------------------------------------------------

    def show(self, text: MarkedText, *, room: int = 0) -> None:
        """Draw the whole text so far.

        Args:
            text: what was shown before, and more.
            room: blank rows to take as well if the widget has to become taller.
        """
        self._n_new, self._text = len(text) - len(self._text), text
        self._draw(room)

    def show_marks(self, shown: bool) -> None:
        """Underline the marked text, or stop doing so."""
        if shown is not self._shows_marks:
            self._shows_marks = shown
            self._draw_anew()

    def places(self) -> list[tuple[MarkedText, int, bool]]:
        """The text in parts that render as the whole does, each with the rows it takes here and
        whether it is near the view.
        """
        if not self._width:  # it was never seen
            return [(part, 0, True) for part in cut_segments(self._text)]
        y, height = self.region.y, self.screen.size.height
        found: list[tuple[MarkedText, int, bool]] = []
        start = 0
        for n_chars, rows in self._parts():
            part = self._text.cut(start, start + n_chars)
            is_near = y + rows > -height // 2 and y < height + height // 2
            found.append((part, rows, is_near))
            start, y = start + n_chars, y + rows
        return found

    def _parts(self) -> list[tuple[int, int]]:
        """Characters and rows of stretches that are neither short nor long, the last one's too."""
        parts = [(0, 0)]
        last = (len(self._text) - self._kept_chars, len(self._tail))
        for n_chars, rows in (*self._ended, last):
            before = parts[-1]
            if before[0] and before[0] + n_chars > SEGMENT_CHARS:
                parts.append((n_chars, rows))
            else:
                parts[-1] = (before[0] + n_chars, before[1] + rows)
        return parts

    def _draw_anew(self) -> None:
        self._kept, self._ended, self._tail = [], [], []
        self._kept_chars = self._drawn_chars = 0
        self._open = None
        self._drawer.forget_looks()
        self._draw(0)
        self.refresh()

    def _draw(self, room: int) -> None:
        self._width = (
            self.outer_size.width - self.styles.gutter.width
        )  # `size` takes ten times as long
        if not self._width:  # drawn once it has its place
            return
        if not self._much_is_new() and self._extend(room):
            return
        first, before, self._open = len(self._kept), self._tail, None
        rest = self._text.cut(self._kept_chars)
        if self._much_is_new():
            for part in cut_segments(rest)[:-1]:
                self._keep(self._parse(part), len(part))
            rest = self._text.cut(self._kept_chars)
        self._drawn_chars, before_end = len(self._text), self._kept_chars
        tail = rest.cut(0, shown_length(rest.text))
        tokens = self._parse(tail)
        line = last_block(tokens, tail.text)
        if line:
            at = next(i for i, token in enumerate(tokens) if _begins_at(token, line))
            n_chars = sum(len(each) + 1 for each in tail.text.split("\n")[:line])
            self._keep(tokens[:at], n_chars)
            tokens = tokens[at:]
        self._grows = True
        self._tail = self._drawer.draw(tokens, self._width)
        self._shown_end = before_end + len(tail)
        self._open = self._opened(tokens)
        self._repaint(first, before, [*self._kept[first:], *self._tail], room)

    def _extend(self, room: int) -> bool:
        """Draw what was added if it goes on with what was there. False: the block is drawn anew."""
        text = self._text.text
        if self._open is None or (self._text.marks and self._shows_marks):
            return False
        end = self._kept_chars + shown_length(text[self._kept_chars :])
        new, self._drawn_chars = text[self._shown_end : end], len(text)
        if new:
            at = self._open.first
            rows = self._open.grow(new)
            if rows is None:
                return False
            self._shown_end, before = end, self._tail[at:]
            self._tail[at:] = rows
            self._repaint(len(self._kept) + at, before, rows, room)
        return True

    def _opened(self, tokens: Sequence[Token]) -> OpenRows | None:
        """What is at the end of the rows, if more may come that changes only the last ones."""
        source = self._text.text[self._kept_chars : self._shown_end]
        last = tokens[-1] if tokens else None
        if last is None or last.type != "fence":
            return self._drawer.open_words(source, self._tail)
        first, _, code = source.partition("\n")
        if not first.startswith(last.markup) or not code.strip() or has_fence(code):
            return None
        return OpenCode(code, self._plain_code, self._code_waits, self._tail[-1:])

    def _plain_code(self, code: str) -> list[Strip]:
        lines = plain_lines(code, self._drawer.code_style)
        return self._drawer.code_rows(lines, self._width)

    def _code_waits(self, n_chars: int) -> bool:
        n_done, step = len(self._code), max(_COLOUR_STEP, _COLOUR_TURNS * self._n_new)
        return n_chars < max(n_done * _COLOUR_AGAIN, n_done + step)

    def _keep(self, tokens: Sequence[Token], n_chars: int) -> None:
        """Draw blocks that have ended, once and for all."""
        self._grows, self._code, self._code_rows = False, "", []
        rows = self._drawer.draw(tokens, self._width)
        self._kept += rows
        self._kept_chars += n_chars
        self._ended.append((n_chars, len(rows)))

    def _parse(self, text: MarkedText) -> list[Token]:
        tokens = markdown_parser().parse(text.text)
        if self._shows_marks and text.marks:
            mark_tokens(tokens, text.text, text.marks)
        return tokens

    def _much_is_new(self) -> bool:
        return len(self._text) - self._drawn_chars > SEGMENT_CHARS // 2

    def _repaint(
        self, first: int, before: Sequence[Strip], now: Sequence[Strip], room: int
    ) -> None:
        """Repaint what differs from the rows that were there from row `first` on."""
        pairs = enumerate(zip(before, now, strict=False))
        same = next((y for y, (old, new) in pairs if old != new), min(len(before), len(now)))
        if self.n_rows > self._rows:
            self._rows = self.n_rows + room
            self._take_rows()
        changed = max(len(before), len(now)) - same
        if changed:
            self.refresh(Region(0, first + same, self._width, changed))

    def _take_rows(self) -> None:
        screen = self.screen
        if isinstance(screen, LeanScreen):
            screen.grow(self)
        else:
            self.refresh(layout=True, repaint=False)

    def _code_lines(self, token: Token, style: Style) -> list[Strip]:
        """The lines of a block of code in colour; while it grows, the last ones wait for theirs."""
        code = token.content.rstrip()
        waits = self._grows and self._code_waits(len(code))
        if waits and code.startswith(self._code):
            return self._code_rows + plain_lines(code[len(self._code) :], style)
        if token.meta.get(MARKS) is None:
            rows = self._colours.lines(code, token.info, style)
        else:
            content = underlined(self._colours.content(code, token.info), token)
            rows = self._colours.draw(content, style)
        if self._grows and token.meta.get(MARKS) is None:
            self._code, self._code_rows = code[: code.rfind("\n") + 1], rows[:-1]
        return rows

    # -- widget --------------------------------------------------------------------------------

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Its rows, and those kept ready for the next words."""
        return self._rows

    def _size_updated(
        self, size: Size, virtual_size: Size, container_size: Size, layout: bool = True
    ) -> bool:
        if size.width == self._size.width:
            self._size = size  # rows that were there stay as they are drawn
        return super()._size_updated(size, virtual_size, container_size, layout)

    def on_resize(self, event: events.Resize) -> None:
        if event.size.width != self._width:
            self._rows, self._theme = 1, self.app.theme
            self._draw_anew()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        if self._width and self.app.theme != self._theme:
            self._theme = self.app.theme
            self.call_later(self._draw_anew)  # when all styles are the new ones

    def row(self, y: int) -> Strip:
        return self.rows(range(y, y + 1))[0]

    def rows(self, lines: range) -> list[Strip]:
        n_kept = len(self._kept)
        rows = self._kept[lines.start : lines.stop]
        rows += self._tail[max(0, lines.start - n_kept) : max(0, lines.stop - n_kept)]
        if self.text_selection is not None:
            rows = [self._selected(row, y) for y, row in enumerate(rows, lines.start)]
        n_blank = len(lines) - len(rows)
        if n_blank:
            rows += [Strip.blank(self.size.width, self.visual_style.rich_style)] * n_blank
        return rows

    def render_line(self, y: int) -> Strip:
        """A row in which each word knows where it stands, which the mouse asks for."""
        return self.row(y).apply_offsets(0, y)

    def _selected(self, row: Strip, y: int) -> Strip:
        selection = self.text_selection
        span = None if selection is None else selection.get_span(y)
        if span is None:
            return row
        start, end = span
        end = row.cell_length if end == -1 else end
        style = self.screen.get_component_rich_style("screen--selection")
        parts = row.divide([start, end, row.cell_length])
        return Strip.join([parts[0], parts[1].apply_style(style), *parts[2:]])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The words that were selected with the mouse, row by row."""
        rows = [row.text.rstrip() for row in (*self._kept, *self._tail)]
        return selection.extract("\n".join(rows)), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Repaint what is selected."""
        self.refresh()


def _begins_at(token: Token, line: int) -> bool:
    return token.level == 0 and token.map is not None and token.map[0] == line
