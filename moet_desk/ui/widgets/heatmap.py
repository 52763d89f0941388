"""The live expert grid: layers down, experts across, drawn row by row with the line API.

It owns the picture, the cursor and the choice of measure; it is given `CacheView` records and
repaints only the rows whose generation has changed (whole repaints cost 63 ms on a 256 x 61 grid,
rows 1.5 ms each; measured 2026-11-29). Drawn on the UI thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from moet_desk.telemetry import TIER_LETTERS, CacheView, Tier
from moet_desk.ui.theme import RAMP_STEPS, Glyphs, tier_variable

LEFT = 6
RIGHT = 7
_MAX_CELL_WIDTH = 3
_MAX_ROW_HEIGHT = 2  # with cells three columns wide this is nearly square


class Measure(Enum):
    """What a cell shows."""

    TIER = "answered by"
    HEAT = "heat"


@dataclass(frozen=True, slots=True)
class Grid:
    """How experts are laid out: `group` experts per cell, `cell_width` columns per cell."""

    n_experts: int
    group: int
    cell_width: int

    @property
    def n_cells(self) -> int:
        return -(-self.n_experts // self.group)

    def experts(self, cell: int) -> range:
        """The experts behind a cell."""
        return range(cell * self.group, min(self.n_experts, (cell + 1) * self.group))


def plan_grid(n_experts: int, width: int) -> Grid:
    """Lay out `n_experts` in `width` columns, margins included.

    The group is the smallest divisor that fits; where that would waste more than half of the room
    (a prime number of experts), the last cell is allowed to hold fewer.
    """
    room = max(1, width - LEFT - RIGHT)
    least = max(1, -(-n_experts // room))
    group = next(g for g in range(least, max(least, n_experts) + 1) if n_experts % g == 0)
    if group > 2 * least:
        group = least
    n_cells = max(1, -(-n_experts // group))
    return Grid(n_experts, group, max(1, min(_MAX_CELL_WIDTH, room // n_cells)))


def cell_value(view: CacheView, row: int, experts: range, measure: Measure) -> int | None:
    """The `Tier` or ramp step of a cell; None: not used.

    A group shows the tier of its hottest expert (the one that answers most), and the highest heat.
    An expert that was never used counts as used when a slot holds it (kept from the last run).
    """
    heat, tiers = view.heat[row], view.tiers[row]
    hottest = max(experts, key=lambda e: (heat[e], tiers[e]))
    if measure is Measure.HEAT:
        return heat[hottest] or None
    return None if heat[hottest] == 0 and tiers[hottest] < Tier.BASE else tiers[hottest]


_PLACES = {
    Tier.FINE: "4-bit slot",
    Tier.BASE: "2-bit slot",
    Tier.RAM: "in RAM",
    Tier.NVME: "on disk",
}


def describe(view: CacheView, row: int, experts: range) -> str:
    """The line under the grid about the experts below the cursor."""
    tiers, heat = view.tiers[row], view.heat[row]
    layer, hottest = view.layers[row], RAMP_STEPS - 1
    if len(experts) == 1:
        tier = Tier(tiers[experts[0]])
        where = f"{TIER_LETTERS[tier]} {_PLACES[tier]}"
        return (
            f"Layer {layer}, expert {experts[0]}:  {where}   heat {heat[experts[0]]} of {hottest}"
        )
    shown = "   ".join(f"{e} {TIER_LETTERS[tiers[e]]} {heat[e]}" for e in experts[:8])
    more = f"  and {len(experts) - 8} more" if len(experts) > 8 else ""
    return f"Layer {layer}, experts {experts[0]}-{experts[-1]}:  {shown}{more}   heat 0-{hottest}"


class Heatmap(ScrollView, can_focus=True):
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
        for row in changed:
            self._refresh_row(row)

    def _refresh_row(self, row: int) -> None:
        for line in range(row * self._row_height, (row + 1) * self._row_height):
            self.refresh_line(line)

    def fit(self, rows: int) -> None:
        """Take at most `rows` lines; cells become taller where there is room for all layers."""
        self._room = rows
        self._lay_out()

    def set_measure(self, measure: Measure) -> None:
        """Show something else of the same view."""
        self.measure = measure
        self.refresh()

    @property
    def grid(self) -> Grid:
        """How the experts are laid out now."""
        return self._grid

    def cursor_text(self) -> str:
        """The line about the experts under the cursor, "" without a view."""
        if self._view is None:
            return ""
        return describe(self._view, self._row, self._grid.experts(self._cell))

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
        n_lines = n_layers * self._row_height
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
        view = self._view
        row, part = divmod(y + self.scroll_offset.y, self._row_height)
        if self._styles is None:
            self._styles = _Styles(self.app.theme_variables)
        styles = self._styles
        if view is None or row >= len(view.layers):
            return Strip.blank(self.size.width, styles.ground)
        on_row = row == self._row and self.has_focus
        mark = self._glyphs.now if on_row else " "
        label = f"{mark}L{view.layers[row]:02d}" if part == 0 else ""
        segments = [Segment(label.ljust(LEFT), styles.label)]
        for cell in range(self._grid.n_cells):
            value = cell_value(view, row, self._grid.experts(cell), self.measure)
            glyph, style = self._cell_look(value, part, styles)
            if on_row and cell == self._cell:
                style = style + styles.cursor
            segments.append(Segment(glyph * self._grid.cell_width, style))
        hit = _shown_hit(view.hit_share[row]) if part == 0 else ""
        segments.append(Segment(f" {hit:>5}", styles.label))
        strip = Strip(segments).simplify()
        return strip.adjust_cell_length(self.size.width, styles.ground)

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
        before = self._row
        self._row = min(max(0, row), len(self._view.layers) - 1)
        self._cell = min(max(0, cell), self._grid.n_cells - 1)
        for row_shown in {before, self._row}:
            self._refresh_row(row_shown)
        top, height = self.scroll_offset.y, self.size.height
        first, last = self._row * self._row_height, (self._row + 1) * self._row_height - 1
        if first < top:
            self.scroll_to(y=first, animate=False)
        elif last >= top + height:
            self.scroll_to(y=last - height + 1, animate=False)
        self.post_message(self.CursorMoved())

    def action_move(self, rows: int, cells: int) -> None:
        self.move_to(self._row + rows, self._cell + cells)

    def action_page(self, pages: int) -> None:
        self.move_to(
            self._row + pages * max(1, self.size.height // self._row_height - 1), self._cell
        )

    def action_edge(self, side: int) -> None:
        self.move_to(0 if side < 0 else 10**6, self._cell)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._point(event)

    def on_click(self, event: events.Click) -> None:
        self._point(event)

    def _point(self, event: events.MouseEvent) -> None:
        if self._view is None:
            return
        row = (event.y + self.scroll_offset.y) // self._row_height
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
