"""The Cache screen as text: a line for each layer, and a sorted list of all experts.

Both are read line by line from the newest `CacheView`, so that only what is on the screen costs
something. Everything is said in words and numbers; colour only repeats it. UI thread.
"""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from moet_desk.telemetry import TIER_LETTERS, CacheView, Tier
from moet_desk.ui.cache_cells import (
    LayerFigures,
    Order,
    layer_profile,
    list_line,
    sorted_experts,
)
from moet_desk.ui.theme import Glyphs, tier_variable
from moet_desk.ui.widgets.gauges import bar, show_percent

_TIERS = (Tier.FINE, Tier.BASE, Tier.RAM, Tier.NVME)
_FETCH_BAR = 12


class CacheLines(ScrollView, can_focus=True):
    """A scrolling picture of lines with a cursor."""

    DEFAULT_CSS = """
    CacheLines { height: 1fr; scrollbar-size-horizontal: 0; overflow-x: hidden; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", id="cache.list_up", show=False),
        Binding("down,j", "move(1)", "Down", id="cache.list_down", show=False),
        Binding("pageup", "page(-1)", "Page up", id="cache.list_page_up", show=False),
        Binding("pagedown", "page(1)", "Page down", id="cache.list_page_down", show=False),
        Binding("home,g", "move(-1000000)", "First", id="cache.list_first", show=False),
        Binding("end,G", "move(1000000)", "Last", id="cache.list_last", show=False),
    ]

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__()
        self._glyphs = glyphs
        self._view: CacheView | None = None
        self._at = 0
        self._n_lines = 0
        self._looks: dict[str, Style] = {}

    def show(self, view: CacheView) -> None:
        """Take a view and draw it."""
        self._view = view
        self.make(view)
        self.virtual_size = Size(self.size.width, self._n_lines)
        self.refresh()

    def make(self, view: CacheView) -> None:
        """Work out the lines."""

    def line(self, at: int) -> list[tuple[str, str]]:
        """Texts of a line, each with the name of a theme variable or ""."""
        return []

    def render_line(self, y: int) -> Strip:
        at = y + self.scroll_offset.y
        if self._view is None or at >= self._n_lines:
            return Strip.blank(self.size.width, self._style(""))
        on_line = at == self._at and self.has_focus
        mark = self._glyphs.now if on_line else " "
        parts = [(mark, ""), *self.line(at)]
        cursor = Style(reverse=True) if on_line else Style()
        segments = [Segment(text, self._style(name) + cursor) for text, name in parts]
        return Strip(segments).adjust_cell_length(self.size.width, self._style(""))

    def _style(self, name: str) -> Style:
        if name not in self._looks:
            variables = self.app.theme_variables
            ground = Color.parse(variables["background"]).rich_color
            ink = Color.parse(variables[name or "foreground"]).rich_color
            self._looks[name] = Style(color=ink, bgcolor=ground)
        return self._looks[name]

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._looks = {}

    def action_move(self, lines: int) -> None:
        self._at = min(max(0, self._at + lines), max(0, self._n_lines - 1))
        top, height = self.scroll_offset.y, self.size.height
        if self._at < top:
            self.scroll_to(y=self._at, animate=False)
        elif self._at >= top + height:
            self.scroll_to(y=self._at - height + 1, animate=False)
        self.refresh()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.size.height - 1))


class LayerStrips(CacheLines):
    """A bar for each layer: where its experts are, what slots answered, and who is fetched most."""

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__(glyphs)
        self._layers: list[LayerFigures] = []

    def make(self, view: CacheView) -> None:
        self._layers = layer_profile(view)
        self._n_lines = len(self._layers)

    def line(self, at: int) -> list[tuple[str, str]]:
        figures = self._layers[at]
        numbers = "".join(f" {TIER_LETTERS[tier]}{figures.by_tier[tier]:>4}" for tier in _TIERS)
        hits = f"  hits {show_percent(figures.hit_share):>7}"
        fetched = f"  fetches {show_percent(figures.fetch_share):>7} "
        wide = _FETCH_BAR if self.size.width >= 100 else 0
        drawn = bar(figures.fetch_share or 0.0, wide, self._glyphs)
        room = self.size.width - 6 - len(numbers) - len(hits) - len(fetched) - wide - 1
        pieces = _pieces(figures.by_tier, max(4, room))
        return [
            (f"L{figures.layer:02d}  ", "dim"),
            *((self._glyphs.tiers[tier] * n, tier_variable(tier)) for tier, n in pieces),
            (numbers, "dim"),
            (hits, ""),
            (fetched, "dim"),
            (drawn, tier_variable(Tier.RAM)),
        ]


def _pieces(by_tier: tuple[int, int, int, int], width: int) -> list[tuple[Tier, int]]:
    """Columns of each tier in a bar of `width`, the fastest first; together they fill it."""
    total, done, begun = sum(by_tier), 0, 0
    pieces = []
    for tier in _TIERS:
        done += by_tier[tier]
        end = round(width * done / total) if total else 0
        pieces.append((tier, end - begun))
        begun = end
    return pieces


class ExpertList(CacheLines):
    """All experts, sorted; each with place, heat, uses, fetches, evictions and last use."""

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__(glyphs)
        self._places: list[int] = []
        self.order = Order.USES

    def make(self, view: CacheView) -> None:
        self._places = sorted_experts(view, self.order)
        self._n_lines = len(self._places)

    def next_order(self) -> None:
        """Sort by the next thing."""
        orders = list(Order)
        self.order = orders[(orders.index(self.order) + 1) % len(orders)]
        if self._view is not None:
            self.show(self._view)

    def line(self, at: int) -> list[tuple[str, str]]:
        if self._view is None:
            return []
        text = list_line(self._view, self._places[at])
        return [(text[1:], "")]
