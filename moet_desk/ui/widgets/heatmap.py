"""The live expert grid: layers down, experts across, drawn row by row with the line API.

It owns the picture and the cursor; it is given `CacheView` records and repaints only the rows whose
generation has changed (whole repaints cost 63 ms on a 256 x 61 grid, rows 1.5 ms each; measured
2026-11-29). Dense, a line holds two layers, as the two halves of its cells; that needs colours.
Drawn on the UI thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from moet_desk.telemetry import CacheView, Tier
from moet_desk.ui.cache_cells import (
    LEFT,
    Grid,
    Measure,
    describe,
    hottest,
    plan_grid,
    row_values,
    tell,
)
from moet_desk.ui.lean_rows import Rows
from moet_desk.ui.theme import RAMP_STEPS, Glyphs, tier_variable

_MAX_ROW_HEIGHT = 2  # with cells three columns wide this is nearly square
_UPPER_HALF = "▀"


class Heatmap(Rows, ScrollView, can_focus=True):
    """The grid widget. Give it views with `show`."""

    DEFAULT_CSS = """
    Heatmap { height: 1fr; scrollbar-size-horizontal: 0; overflow-x: hidden; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1, 0)", "Up", id="cache.up", show=False),
        Binding("down,j", "move(1, 0)", "Down", id="cache.down", show=False),
        Binding("left,h", "move(0, -1)", "Left", id="cache.left", show=False),
        Binding("right,l", "move(0, 1)", "Right", id="cache.right", show=False),
        Binding("pageup", "page(-1)", "Page up", id="cache.page_up", show=False),
        Binding("pagedown", "page(1)", "Page down", id="cache.page_down", show=False),
        Binding("home,g", "edge(-1)", "First layer", id="cache.first", show=False),
        Binding("end,G", "edge(1)", "Last layer", id="cache.last", show=False),
        Binding("enter", "next_expert", "Next expert", id="cache.next", show=False),
    ]

    class CursorMoved(Message):
        """The cursor stands on other experts."""

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__()
        self._glyphs = glyphs
        self._view: CacheView | None = None
        self._generations: tuple[int, ...] = ()
        self._hits: tuple[float | None, ...] = ()
        self._grid = Grid(1, 1, 1)
        self._row = 0
        self._cell = 0
        self._row_height = 1
        self._room = 0
        self._styles: _Styles | None = None
        self._dense = False
        self._chosen: int | None = None  # of the experts under the cursor; None: the hottest
        self.measure = Measure.TIER

    # -- what is shown -------------------------------------------------------------------------

    def show(self, view: CacheView) -> None:
        """Take a view and repaint the rows that differ from the last one."""
        before, self._view = self._view, view
        if before is None or before.layers != view.layers or before.n_experts != view.n_experts:
            self._lay_out()
            return
        changed = [
            row
            for row, (old, new) in enumerate(zip(self._generations, view.generations, strict=True))
            if old != new or _shown_hit(self._hits[row]) != _shown_hit(view.hit_share[row])
        ]
        self._generations, self._hits = view.generations, view.hit_share
        self._refresh_rows(changed)

    def grow_older(self) -> None:
        """Repaint what changes with time alone; called once a second."""
        if self.measure is Measure.AGE:
            self.refresh()

    def _lines_of(self, row: int) -> range:
        if self._dense:
            return range(row // 2, row // 2 + 1)
        return range(row * self._row_height, (row + 1) * self._row_height)

    def _row_of(self, line: int) -> int:
        """The layer of a line, of two the upper one."""
        return line * 2 if self._dense else line // self._row_height

    def _refresh_row(self, row: int) -> None:
        self._refresh_rows([row])

    def _refresh_rows(self, rows: Iterable[int]) -> None:
        """Repaint the lines of some layers that are in view."""
        top, (width, height) = self.scroll_offset.y, self.size
        spans = [self._lines_of(row) for row in rows]
        seen = [
            Region(0, lines.start - top, width, len(lines))
            for lines in spans
            if lines.stop > top and lines.start < top + height
        ]
        if seen:
            self.refresh(*seen)

    def fit(self, rows: int) -> None:
        """Take at most `rows` lines; cells become taller where there is room for all layers."""
        self._room = rows
        self._lay_out()

    def set_measure(self, measure: Measure) -> None:
        """Show something else of the same view."""
        self.measure = measure
        self.refresh()

    def set_dense(self, dense: bool) -> None:
        """Whether a line holds two layers."""
        self._dense = dense
        self._lay_out()

    @property
    def grid(self) -> Grid:
        """How the experts are laid out now."""
        return self._grid

    def cursor_text(self) -> str:
        """The line about the experts under the cursor, "" without a view."""
        if self._view is None:
            return ""
        return describe(self._view, self._row, self._grid.experts(self._cell))

    def story_text(self) -> str:
        """The story of one of them, the hottest if none was chosen."""
        if self._view is None:
            return ""
        experts = self._grid.experts(self._cell)
        story = tell(self._view, self._row, self._told(self._view, experts))
        return f"{story}   Enter: next" if story and len(experts) > 1 else story

    def _told(self, view: CacheView, experts: range) -> int:
        """The expert that is told of."""
        chosen = self._chosen
        if chosen is not None and chosen in experts:
            return chosen
        return hottest(view, self._row, experts)

    def _lay_out(self) -> None:
        view = self._view
        if view is None:
            return
        self._grid = plan_grid(view.n_experts, self.size.width)
        self._generations, self._hits = view.generations, view.hit_share
        self._row = min(self._row, len(view.layers) - 1)
        self._cell = min(self._cell, self._grid.n_cells - 1)
        n_layers = len(view.layers)
        self._row_height = max(1, min(_MAX_ROW_HEIGHT, self._room // n_layers))
        n_lines = self._lines_of(n_layers - 1).stop
        self.styles.max_height = n_lines
        self.virtual_size = Size(self.size.width, n_lines)
        self.refresh()
        self.post_message(self.CursorMoved())

    def on_resize(self) -> None:
        self._lay_out()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles = None

    # -- drawing -------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        return self.row(y)

    def row(self, y: int) -> Strip:
        view, line = self._view, y + self.scroll_offset.y
        row = self._row_of(line)
        if self._styles is None:
            self._styles = _Styles(self.app.theme_variables)
        styles = self._styles
        if view is None or row >= len(view.layers):
            return Strip.blank(self.size.width, styles.ground)
        first = line == self._lines_of(row).start
        on_line = self._row in ((row, row + 1) if self._dense else (row,)) and self.has_focus
        mark = self._glyphs.now if on_line else " "
        label = f"{mark}L{view.layers[self._row if on_line else row]:02d}" if first else ""
        looks = self._dense_looks(row, styles) if self._dense else self._looks(row, line, styles)
        if on_line:
            glyph, style = looks[self._cell]
            looks[self._cell] = glyph, style + styles.cursor
        segments = [Segment(label.ljust(LEFT), styles.label), *self._runs(looks)]
        hit = _shown_hit(view.hit_share[row]) if first else ""
        segments.append(Segment(f" {hit:>5}", styles.label))
        used = LEFT + self._grid.n_cells * self._grid.cell_width + 6
        strip = Strip(segments, used)
        return strip.adjust_cell_length(self.size.width, styles.ground)

    def _runs(self, looks: list[tuple[str, Style]]) -> Iterator[Segment]:
        """One segment for neighbours of one style: a quarter of the time of one for each cell."""
        width = self._grid.cell_width
        text, running = "", looks[0][1]
        for glyph, style in looks:
            if style is not running:
                yield Segment(text, running)
                text, running = "", style
            text += glyph * width
        yield Segment(text, running)

    def _looks(self, row: int, line: int, styles: _Styles) -> list[tuple[str, Style]]:
        """Glyph and style of each cell of a line."""
        assert self._view is not None  # noqa: S101
        part = line - self._lines_of(row).start
        values = row_values(self._view, row, self._grid, self.measure)
        looks = {value: self._cell_look(value, part, styles) for value in set(values)}
        return [looks[value] for value in values]

    def _dense_looks(self, row: int, styles: _Styles) -> list[tuple[str, Style]]:
        """The same for two layers, the upper one in the upper half."""
        view = self._view
        assert view is not None  # noqa: S101
        upper = row_values(view, row, self._grid, self.measure)
        none: list[int | None] = [None] * len(upper)
        lower = none
        if row + 1 < len(view.layers):
            lower = row_values(view, row + 1, self._grid, self.measure)
        inks = styles.tiers if self.measure is Measure.TIER else styles.ramp
        return [(_UPPER_HALF, styles.both(inks, a, b)) for a, b in zip(upper, lower, strict=True)]

    def _cell_look(self, value: int | None, part: int, styles: _Styles) -> tuple[str, Style]:
        """Glyph and style of a cell's line `part`; heat is one bar over all of its lines."""
        glyphs = self._glyphs
        if value is None:
            return glyphs.unused, styles.unused
        if self.measure is Measure.TIER:
            return glyphs.tiers[value], styles.tiers[value]
        if self._row_height == 1 or not glyphs.stacks:
            return glyphs.ramp[value], styles.ramp[value]
        eighths = round(value * 8 * self._row_height / (RAMP_STEPS - 1))
        here = min(8, eighths - 8 * (self._row_height - 1 - part))
        return (glyphs.spark[here - 1] if here > 0 else " "), styles.ramp[value]

    # -- cursor --------------------------------------------------------------------------------

    def move_to(self, row: int, cell: int) -> None:
        """Put the cursor on a cell; values outside are clamped."""
        if self._view is None:
            return
        before, self._chosen = self._row, None
        self._row = min(max(0, row), len(self._view.layers) - 1)
        self._cell = min(max(0, cell), self._grid.n_cells - 1)
        for row_shown in {before, self._row}:
            self._refresh_row(row_shown)
        top, height = self.scroll_offset.y, self.size.height
        lines = self._lines_of(self._row)
        first, last = lines.start, lines.stop - 1
        if first < top:
            self.scroll_to(y=first, animate=False)
        elif last >= top + height:
            self.scroll_to(y=last - height + 1, animate=False)
        self.post_message(self.CursorMoved())

    def action_move(self, rows: int, cells: int) -> None:
        self.move_to(self._row + rows, self._cell + cells)

    def action_page(self, pages: int) -> None:
        page = self._row_of(self.size.height) - self._row_of(1)
        self.move_to(self._row + pages * max(1, page), self._cell)

    def action_edge(self, side: int) -> None:
        self.move_to(0 if side < 0 else 10**6, self._cell)

    def action_next_expert(self) -> None:
        """Tell of the next expert in the cell under the cursor."""
        if self._view is None:
            return
        experts = self._grid.experts(self._cell)
        shown = self._told(self._view, experts)
        self._chosen = experts[(shown - experts.start + 1) % len(experts)]
        self.post_message(self.CursorMoved())

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._point(event)

    def on_click(self, event: events.Click) -> None:
        self._point(event)

    def _point(self, event: events.MouseEvent) -> None:
        if self._view is None:
            return
        row = self._row_of(event.y + self.scroll_offset.y)
        cell = (event.x - LEFT) // self._grid.cell_width
        inside = 0 <= cell < self._grid.n_cells and row < len(self._view.layers)
        if inside and (row, cell) != (self._row, self._cell):
            self.move_to(row, cell)

    def on_focus(self) -> None:
        self._refresh_row(self._row)

    def on_blur(self) -> None:
        self._refresh_row(self._row)


def _shown_hit(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:.1f}"


class _Styles:
    """Rich styles of one theme, made once per theme."""

    def __init__(self, variables: dict[str, str]) -> None:
        ground = Color.parse(variables["background"]).rich_color

        def ink(name: str) -> Style:
            return Style(color=Color.parse(variables[name]).rich_color, bgcolor=ground)

        self.ground = Style(bgcolor=ground)
        self.label = ink("dim")
        self.unused = ink("dim")
        self.cursor = Style(reverse=True, bold=True)
        self.tiers = [ink(tier_variable(tier)) for tier in Tier]
        self.ramp = [ink(f"ramp-{step}") for step in range(RAMP_STEPS)]
        self._both: dict[tuple[Style | None, Style | None], Style] = {}

    def both(self, inks: list[Style], upper: int | None, lower: int | None) -> Style:
        """Style of a cell whose halves have two values, made once."""
        key = (None if upper is None else inks[upper], None if lower is None else inks[lower])
        if key not in self._both:
            one, two = (self.ground.bgcolor if ink is None else ink.color for ink in key)
            self._both[key] = Style(color=one, bgcolor=two)
        return self._both[key]


def header_line(grid: Grid, width: int) -> str:
    """The row of expert numbers above the grid."""
    body = [" "] * (grid.n_cells * grid.cell_width)
    marks = 4 if len(body) >= 40 else 2
    for part in range(marks):
        cell = part * grid.n_cells // marks
        text, at = str(cell * grid.group), cell * grid.cell_width
        body[at : at + len(text)] = text
    last = str(grid.n_experts - 1)
    body[len(body) - len(last) :] = last
    return (" " * LEFT + "".join(body) + " hit %")[:width]
