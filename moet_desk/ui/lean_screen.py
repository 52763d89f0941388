"""A screen that repaints a few cells for little.

Textual asks every widget in view for all of its rows, and each of those that lie above each other
for the same cells, whatever has changed; then it cuts every row where any widget ends and puts the
pieces together. Here a widget is asked only for rows of which it shows a cell that is repainted,
and a row goes to the terminal in as many pieces as there are widgets side by side. What is drawn is
the same: of two widgets the one in front is seen. UI thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.segment import Segment
from textual import events
from textual._compositor import Compositor, CompositorUpdate
from textual.geometry import Region
from textual.map_geometry import MapGeometry
from textual.screen import Screen
from textual.scrollbar import ScrollBar
from textual.strip import Strip
from textual.widget import Widget

_MANY_SEGMENTS = 8

Piece = tuple[int, int, Strip]
"""Row, column and cells of what is sent."""

Seen = tuple[Widget, Region, Region, int]
"""A widget, its place, and what is seen of that, also as bits of columns."""


class LeanScreen(Screen[None]):
    """A screen on a `LeanCompositor`."""

    _is_held = False  # what changes waits
    _grown: Widget | None = None  # in which something has become taller

    _compositor: LeanCompositor

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
        """Paint nothing meanwhile, and then at once all that has changed: the queues and the timer
        by which Textual comes to paint take a sixth of what some words cost.
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

    def grow(self, widget: Widget) -> None:
        """A widget needs other rows. If the nearest container that keeps its size is enough for
        them, all outside of it stays where it is.
        """
        ancestors = [each for each in widget.ancestors if isinstance(each, Widget)]
        last = next((i for i, each in enumerate(ancestors) if not each.styles.auto_dimensions), -1)
        if widget not in self._compositor or last < 0:
            widget.refresh(layout=True, repaint=False)
            return
        widget._layout_cache.clear()
        widget._layout_updates += 1
        for ancestor in ancestors[: last + 1]:
            ancestor._clear_arrangement_cache()
            ancestor._layout_updates += 1
        self._layout_required |= self._grown not in (None, ancestors[last])
        self._grown = ancestors[last]
        self.repaint(widget)

    async def _on_idle(self, event: events.Idle) -> None:
        if self._is_held:
            event.prevent_default()  # Textual's, which is called next
            await self._invoke_and_clear_callbacks()

    def _on_timer_update(self) -> None:
        if self._is_held:
            self._update_timer.pause()
            return
        if self._grown is not None and self.is_current and not self.app._batch_count:
            part, self._grown = self._grown, None
            changes_all = self._layout_required or self._scroll_required
            self._layout_required |= changes_all or not self._lay_out(part)
        super()._on_timer_update()

    def _lay_out(self, part: Widget) -> bool:
        """Lay out what is in a container. False: it takes a layout of the screen."""
        places = self._compositor.reflow_part(part)
        if places is None:
            return False
        for widget, place in places:
            size, virtual_size, outer = place.region.size, place.virtual_size, place.container_size
            if widget.outer_size != size:
                widget.post_message(events.Resize(size, virtual_size, outer))
            widget._size_updated(size, virtual_size, outer)
        self.screen_layout_refresh_signal.publish(self)
        return True


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

    _viewed: object = None
    _seen: Sequence[Seen] = ()

    def reflow_part(self, part: Widget) -> Sequence[tuple[Widget, MapGeometry]] | None:
        """Arrange what is in a container that keeps its place.

        Returns:
            The places of all that is in it, front to back; None: this is not enough, because there
            are other widgets than before or it is not known where they were.
        """
        places = self._full_map
        if self._full_map_invalidated or part not in places:
            return None
        frame = places[part]
        if not frame.clip.contains_region(frame.region):
            return None
        arranged, _ = self._arrange_root(part, frame.region.size, visible_only=False)
        depth = len(frame.order)
        inside = [widget for widget, at in places.items() if at.order[:depth] == frame.order]
        if arranged.keys() != set(inside):
            return None
        for widget in inside:
            place = arranged[widget]
            if widget is part:
                places[widget] = frame._replace(virtual_size=place.virtual_size)
            else:
                places[widget] = _moved_into(frame, widget, place)
        self._dirty_regions.add(frame.region)
        self._cuts = self._layers = self._layers_visible = None
        self._visible_widgets = self._visible_map = None
        found = [(widget, places[widget]) for widget in inside]
        return sorted(found, key=lambda each: each[1].order, reverse=True)

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

    def _pieces(self, wanted: Mapping[int, int]) -> Iterator[Piece]:
        """The stretches of each row in which one widget is seen, if something of them is wanted.

        Stretches are sent whole, so that no character of two cells is cut through.

        Args:
            wanted: columns of each row, as bits.
        """
        free = dict.fromkeys(wanted, _columns(self.size.region))  # no widget in front covers them
        left = sorted(wanted)  # rows of which something that is wanted is free
        for widget, region, seen, columns in self._view():  # front to back
            top, bottom = seen.y, seen.bottom
            here = [y for y in left if top <= y < bottom]
            if not here:
                continue
            rows = [y for y in here if free[y] & columns & wanted[y]]
            for first, stop in _runs(rows):
                part = Region(seen.x - region.x, first - region.y, seen.width, stop - first)
                for y, strip in enumerate(widget.render_lines(part), first):
                    shown = free[y] & columns
                    if shown == columns:
                        yield y, seen.x, strip
                    else:
                        yield from _parts(y, seen.x, strip, shown, wanted[y])
            for y in here:
                free[y] &= ~columns
            if rows:
                left = [y for y in left if free[y] & wanted[y]]

    def _view(self) -> Sequence[Seen]:
        """What is seen of each widget, front to back; the same until the next layout."""
        places = self.visible_widgets
        if places is not self._viewed:
            found = ((w, region, region.intersection(clip)) for w, (region, clip) in places.items())
            self._seen = [(w, region, seen, _columns(seen)) for w, region, seen in found]
            self._viewed = places
        return self._seen


def _moved_into(frame: MapGeometry, widget: Widget, place: MapGeometry) -> MapGeometry:
    """A place on the screen, from that in a container which was arranged as if it were all.

    Args:
        frame: where the container is.
        widget: something in it.
        place: of that.
    """
    (x, y), (*_, (_, _, first)) = frame.region.offset, frame.order
    region = place.region.translate((x, y))
    return place._replace(
        region=region,
        order=(*frame.order, *((layer, z, first + n) for layer, z, n in place.order[1:])),
        clip=place.clip.translate((x, y)),
        virtual_region=region if isinstance(widget, ScrollBar) else place.virtual_region,
    )


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
