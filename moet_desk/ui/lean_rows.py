"""Widgets that are repainted often, and cost little when they are.

Textual works out the frame of a widget again for each row it draws: its border, padding, colours
and effects, 150 calls a row. Here that is done once, until the look or the width changes. What is
drawn is the same. UI thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self, cast

from rich.color import Color as Ink
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.containers import VerticalScroll
from textual.content import Content
from textual.filter import LineFilter
from textual.geometry import Region, Size
from textual.scrollbar import ScrollBar, ScrollBarRender
from textual.strip import Strip
from textual.style import Style as Look
from textual.visual import RenderOptions
from textual.widget import Widget
from textual.widgets import Static

from moet_desk.ui.lean_screen import LeanScreen

if TYPE_CHECKING:
    _Widget = Widget
    _Scroll = VerticalScroll
else:
    _Widget = _Scroll = object  # so that the Textual class stays the first, for its style sheet


_MOST_STYLES = 1000

is_one_row = re.compile(r"[^\n\t]*").fullmatch
"""Whether a text is one row, if that has the cells for it."""


class Growing(_Widget):
    """A widget in a `Transcript` that may become taller: one layout, not two.

    Textual makes another layout when a widget's own size has changed in the first one. Only scroll
    bars need that, and they ask for it themselves.
    """

    def _size_updated(
        self, size: Size, virtual_size: Size, container_size: Size, layout: bool = True
    ) -> bool:
        return super()._size_updated(size, virtual_size, container_size, layout=False)


class Framed(_Widget):
    """What stays the same from row to row, kept until the look changes.

    A subclass has no border above or below it, no outline and no effect (tint, opacity, hatch).
    """

    _drawn_look: object = None

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._drawn_look = None

    def _has_new_look(self) -> bool:
        app, rules = self.app, self.styles._cache_key
        look = (app.theme, rules, self.outer_size.width, app.get_line_filters())
        if look == self._drawn_look:
            return False
        self._drawn_look = look
        return True

    def _any_row(self, y: int) -> Strip:
        """A row as Textual draws it."""
        return super().render_lines(Region(0, y, self.outer_size.width, 1))[0]


class Ground(Framed):
    """A container of which only the background is seen: its rows are all alike."""

    _row = Strip([])

    def render_lines(self, crop: Region) -> list[Strip]:
        """Rows of the part `crop` of the widget."""
        if self._has_new_look():
            self._row = self._any_row(0)
        return [self._row.crop(*crop.column_span)] * crop.height


class Rows(Framed):
    """A widget that has its rows ready. A subclass may have edges at the left and the right."""

    _left = _right = Strip([])
    _filters: Sequence[LineFilter] = ()
    _ground: Color = Color(0, 0, 0)
    _base = Look()
    _named: dict[str, Look] = {}  # noqa: RUF012  # replaced for each look
    _unchanged: dict[int, Style] = {}  # noqa: RUF012  # replaced for each look

    def refresh(
        self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False
    ) -> Self:
        """Repaint the regions, or all of it; with a layout as Textual does, so that both come
        together.
        """
        screen = self.screen if self._is_mounted and self.is_attached else None
        others = layout or recompose or self._layout_required or not repaint
        if others or not isinstance(screen, LeanScreen):
            return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)
        self._layout_cache.clear()
        self.clear_cached_dimensions()
        self._set_dirty(*regions)
        screen.repaint(self)
        return self

    def row(self, y: int) -> Strip:
        """A row of the content as it is seen, as wide as that."""
        return super().render_line(y)

    def rows(self, lines: range) -> Sequence[Strip]:
        """Some of them, one after the other."""
        return [self.row(y) for y in lines]

    def render_lines(self, crop: Region) -> list[Strip]:
        """Rows of the part `crop` of the widget."""
        if self.auto_links and self.hover_style._link_id:  # the mouse is over a link
            return super().render_lines(crop)
        if self._has_new_look():
            self._draw_frame()
        rows = [self._framed(row) for row in self.rows(crop.line_range)]
        span = crop.column_span
        return rows if span == (0, self.outer_size.width) else [row.crop(*span) for row in rows]

    def _draw_frame(self) -> None:
        width = self.outer_size.width - self.scrollbar_size_vertical  # the bar is in front
        gutter = self.styles.gutter
        self._filters, self._unchanged = self.get_line_filters(), {}
        self._base, self._named = self.visual_style, {}
        _, self._ground = self.background_colors
        if gutter.width:
            row = self._any_row(0)
            self._left = row.crop(0, gutter.left)
            self._right = row.crop(width - gutter.right, width)
        else:
            self._left = self._right = Strip([])

    def _look_of(self, name: str | Look) -> Look:
        """The look that a name in a text stands for."""
        if not isinstance(name, str):
            return name
        if name not in self._named:
            self._named[name] = self._get_style(name)
        return self._named[name]

    def _line(self, text: Content, width: int) -> Strip:
        """One row of text, cut or filled up to `width` cells."""
        base, look_of = self._base, self._look_of
        if text.cell_length > width:
            (row, *_) = text.render_strips(width, 1, base, RenderOptions(look_of, {}))
        else:
            row = one_row(text, base, look_of)
        return row.adjust_cell_length(width, base.rich_style)

    def _framed(self, row: Strip) -> Strip:
        if not self._is_filtered(row):
            for each in self._filters:
                row = row.apply_filter(each, self._ground)
        if not (self._left or self._right):
            return row
        return Strip.join([self._left, row, self._right])

    def _is_filtered(self, row: Strip) -> bool:
        """Whether the filters leave the row as it is, as they do with true colours."""
        known = self._unchanged
        for segment in row:
            style = segment.style
            if style is not None and id(style) not in known:
                one = Strip([segment], 1)
                for each in self._filters:
                    one = one.apply_filter(each, self._ground)
                if next(iter(one)) != segment:
                    return False
                if len(known) >= _MOST_STYLES:
                    known.clear()
                known[id(style)] = style
        return True


def one_row(line: Content, style: Look, get_style: Callable[[str | Look], Look]) -> Strip:
    """A text that fits into a row, without all that Textual does to wrap it."""
    parts = line.render(style, end="", parse_style=get_style)
    return Strip([Segment(text, (style + look).rich_style) for text, look in parts if text])


class Words(Rows, Static):
    """Text whose rows are drawn without what it does not have: alignment and links."""

    _words: tuple[Content, int, Look] | None = None  # what was drawn
    _strips: Sequence[Strip] = ()

    def row(self, y: int) -> Strip:
        return self.rows(range(y, y + 1))[0]

    def rows(self, lines: range) -> Sequence[Strip]:
        content = self.content
        if self.text_selection is not None or not isinstance(content, Content):
            return [super(Words, self).row(y) for y in lines]
        width, style = self.size.width, self._base
        drawn = self._words
        if drawn is None or drawn[0] is not content or drawn[1:] != (width, style):
            self._words, self._strips = (content, width, style), self._draw(content, width)
        blank = Strip.blank(width, style.rich_style)
        return [self._strips[y] if y < len(self._strips) else blank for y in lines]

    def _draw(self, content: Content, width: int) -> list[Strip]:
        if content.cell_length <= width and is_one_row(content.plain):
            return [self._line(content, width)]
        rows = content.render_strips(width, None, self._base, RenderOptions(self._look_of, {}))
        return [row.adjust_cell_length(width, self._base.rich_style) for row in rows]

    def render_line(self, y: int) -> Strip:
        return self.row(y).apply_offsets(0, y)


class LeanScroll(_Scroll):
    """A scrolled container whose vertical bar is a `LeanBar`."""

    @property
    def vertical_scrollbar(self) -> ScrollBar:
        """Its bar, made when it is asked for first."""
        if self._vertical_scrollbar is None:
            bar = LeanBar(vertical=True, name="vertical", thickness=self.scrollbar_size_vertical)
            bar.display = False
            self._vertical_scrollbar = bar
            self.app._start_widget(self, bar)
        return self._vertical_scrollbar


class LeanBar(Rows, ScrollBar):
    """A scroll bar that repaints only the rows in which it has changed.

    Textual draws all of it anew whenever anything was scrolled, twice for each layout.
    """

    _cells: Sequence[Segment] = ()  # of each row, as they are now

    def refresh(
        self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False
    ) -> Self:
        """Repaint what has changed."""
        textual = super(Rows, self).refresh  # whose scrolling comes through the queues as well
        if regions or layout or recompose or not (repaint and self._cells and self.is_attached):
            self._cells = ()
            return textual(*regions, repaint=repaint, layout=layout, recompose=recompose)
        before, now = self._cells, self._draw()
        if len(before) != len(now):
            return textual()
        changed = [y for y, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
        if changed:
            n_rows = changed[-1] + 1 - changed[0]
            textual(Region(0, changed[0], self.size.width, n_rows))
        return self

    def _draw(self) -> Sequence[Segment]:
        bar = cast("ScrollBarRender", self.render())
        style = cast("Style", bar.style)
        drawn = bar.render_bar(
            size=self.size.height, virtual_size=bar.virtual_size, window_size=bar.window_size,
            position=bar.position, thickness=self.size.width,
            back_color=style.bgcolor or Ink.default(), bar_color=style.color or Ink.default(),
        )  # fmt: skip
        base = self.visual_style.rich_style
        segments = list(drawn.segments)
        kinds = {id(each): each for each in segments}  # of all rows there are at most five
        looks = {
            at: Segment(each.text, base if each.style is None else base + each.style)
            for at, each in kinds.items()
        }
        self._cells = [looks[id(each)] for each in segments]
        return self._cells

    def _draw_frame(self) -> None:
        super()._draw_frame()
        self._draw()

    def rows(self, lines: range) -> Sequence[Strip]:
        size = self.size
        if len(self._cells) != size.height:
            self._draw()
        kinds = {id(cell): cell for cell in self._cells}
        strips = {at: Strip([cell], size.width) for at, cell in kinds.items()}
        return [strips[id(self._cells[y])] for y in lines]
