"""A screen that repaints a few cells for little.

Textual asks every widget in view for all of its rows, and each of those that lie above each other
for the same cells, whatever has changed; then it cuts every row where any widget ends and puts the
pieces together. Here a widget is asked only for rows of which it shows a cell that is repainted,
and a row goes to the terminal in as many pieces as there are widgets side by side. What is drawn is
the same: of two widgets the one in front is seen. UI thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.segment import Segment
from textual import events
from textual._compositor import Compositor, CompositorUpdate
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

_MANY_SEGMENTS = 8

Piece = tuple[int, int, Strip]
"""Row, column and cells of what is sent."""


class LeanScreen(Screen[None]):
    """A screen on a `LeanCompositor`."""

    _is_held = False  # what changes waits

    def __init__(self) -> None:
        super().__init__()
        self._compositor = LeanCompositor()

    def repaint(self, widget: Widget) -> None:
        """A widget knows what of it is to be repainted. Textual sends a message from the widget's
        queue to the screen's for that, which costs more than to paint a row.
        """
        if widget in self._compositor:
            self._dirty_widgets.add(widget)
            if not self._is_held:
                self.check_idle()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Paint nothing meanwhile, and then at once all that has changed: the screen's queue and
        timer, by which Textual comes to paint, take a quarter of what words in few rows cost.
        """
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        must_paint = self._dirty_widgets or self._layout_required or self._scroll_required
        if must_paint or self._repaint_required:
            with self._context():
                self._on_timer_update()
        elif self._callbacks:
            self.check_idle()  # which calls them

    async def _on_idle(self, event: events.Idle) -> None:
        if self._is_held:
            event.prevent_default()  # Textual's, which is called next
            await self._invoke_and_clear_callbacks()

    def _on_timer_update(self) -> None:
        if self._is_held:
            self._update_timer.pause()
        else:
            super()._on_timer_update()


class LeanUpdate(CompositorUpdate):
    """Pieces of rows, each sent where it belongs."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = sorted(pieces, key=lambda piece: piece[:2])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for at, (y, x, strip) in enumerate(self.pieces):
            if at and y != self.pieces[at - 1][0]:
                yield Segment.line()
            yield Control.move_to(x, y).segment
            yield from strip

    def render_segments(self, console: Console) -> str:
        """What the terminal is sent. A piece beside the one before needs no move."""
        parts: list[str] = []
        at = (-1, 0)
        for y, x, strip in self.pieces:
            if at != (y, x):
                parts.append(f"\x1b[{y + 1};{x + 1}H")
            parts.append(strip.render(console))
            at = (y, x + strip.cell_length)
        return "".join(parts)


class LeanCompositor(Compositor):
    """A compositor that renders only what is repainted and seen."""

    def render_full_update(self, simplify: bool = False) -> CompositorUpdate:  # type: ignore[override]
        """What is sent for the whole screen; to simplify is for pictures of it."""
        if simplify:
            return super().render_full_update(simplify)
        self._dirty_regions.clear()
        screen = self.size.region
        return LeanUpdate(self._pieces(dict.fromkeys(screen.line_range, _columns(screen))))

    def render_partial_update(self) -> LeanUpdate | None:  # type: ignore[override]
        """What is sent for the regions that have changed, None if there are none."""
        screen = self.size.region
        wanted: dict[int, int] = {}
        for region in self._dirty_regions:
            seen = region.intersection(screen)
            columns = _columns(seen)
            for y in seen.line_range:
                wanted[y] = wanted.get(y, 0) | columns
        self._dirty_regions.clear()
        return LeanUpdate(self._pieces(wanted)) if wanted else None

    def _pieces(self, wanted: dict[int, int]) -> Iterator[Piece]:
        """The stretches of each row in which one widget is seen, if something of them is wanted.

        Stretches are sent whole, so that no character of two cells is cut through.

        Args:
            wanted: columns of each row, as bits.
        """
        free = dict.fromkeys(wanted, _columns(self.size.region))  # no widget in front covers them
        for widget, (region, clip) in self.visible_widgets.items():  # front to back
            seen = region.intersection(clip)
            columns = _columns(seen)
            rows = [y for y in seen.line_range if y in wanted and free[y] & columns & wanted[y]]
            for first, stop in _runs(rows):
                part = Region(seen.x - region.x, first - region.y, seen.width, stop - first)
                for y, strip in enumerate(widget.render_lines(part), first):
                    shown = free[y] & columns
                    if shown == columns:
                        yield y, seen.x, strip
                    else:
                        yield from _parts(y, seen.x, strip, shown, wanted[y])
            for y in seen.line_range:
                if y in free:
                    free[y] &= ~columns


def _columns(region: Region) -> int:
    """The columns of a region as bits."""
    return ((1 << region.width) - 1) << region.x


def _parts(y: int, left: int, strip: Strip, shown: int, wanted: int) -> Iterator[Piece]:
    """What is seen of a row of a widget behind others.

    Args:
        y: the row.
        left: column where the widget begins.
        strip: all of its row.
        shown: columns where it is seen, as bits.
        wanted: columns that are repainted.
    """
    while shown:
        x = (shown & -shown).bit_length() - 1
        rest = shown >> x
        width = (~rest & (rest + 1)).bit_length() - 1
        columns = ((1 << width) - 1) << x
        if columns & wanted:
            yield y, x, _cut(strip, x - left, x - left + width)
        shown &= ~columns


def _cut(strip: Strip, start: int, stop: int) -> Strip:
    """Some cells of a row. Of one with many pieces the end is cut off without measuring them all;
    the others keep what was cut, for the next time.
    """
    segments = list(strip)
    if start or len(segments) < _MANY_SEGMENTS:
        return strip.crop(start, stop)
    width = strip.cell_length
    while width > stop:
        last = segments.pop()
        width -= last.cell_length
        if width < stop:
            segments.append(last.split_cells(stop - width)[0])
            width = stop
    return Strip(segments, width)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stretches of numbers without a gap, each as its first and the one behind its last."""
    start = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield rows[start], rows[at - 1] + 1
            start = at
