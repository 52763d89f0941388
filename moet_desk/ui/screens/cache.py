"""The Cache screen: where every expert is, who answers, and how much time is spent waiting.

It draws the snapshots the app hands it twice a second, only while it is in front; Space
freezes the picture. UI thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from enum import Enum
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from moet_desk.telemetry import (
    TIER_LETTERS,
    CacheView,
    EngineSnapshot,
    EngineState,
    Tier,
    TierSizes,
    VramView,
)
from moet_desk.ui.cache_cells import ENDS, LIST_HEAD, Measure, measures
from moet_desk.ui.clock import Clock
from moet_desk.ui.desk import JobView
from moet_desk.ui.lean_screen import LeanScreen
from moet_desk.ui.paces import GAUGE_PERIOD_S, PicturePace
from moet_desk.ui.theme import RAMP_STEPS, Glyphs, tier_variable
from moet_desk.ui.widgets.cache_lists import ExpertList, LayerStrips
from moet_desk.ui.widgets.frame import SmallWindow, TabLine
from moet_desk.ui.widgets.gauges import History, StatusLine, TierBars, WaitLine, spread
from moet_desk.ui.widgets.heatmap import Heatmap, header_line
from moet_desk.ui.widgets.job_lines import JobLines
from moet_desk.ui.widgets.key_line import KeyLine
from moet_desk.units import show_memory

_EXPLANATION = """\
A mixture-of-experts model asks only a few of its experts for each token.
Experts that are in a slot answer at once. The others are fetched first:

  G  a 2-bit slot: ready to compute        Q  a 4-bit slot: the model as shipped
  R  RAM: one copy away                    N  on disk: read when it is needed

Where an expert is changes how fast an answer comes, never its words."""


_ELSEWHERE = """\
The answers come from {server}.
Its experts are not on this computer, so there is nothing to show here.

This screen needs a model of this computer:
open moet-desk without --connect."""

_OTHER_ROWS = 12  # waiting, title, header, cursor and story, tier bars, precision, legend
_PICTURE_SHARE = 0.012  # of a core
_SLOW_S = 1.0
"""Between two sortings of the list, and two looks at ages: 11,000 experts take 10 ms."""


class Picture(Enum):
    """How the experts are drawn."""

    GRID = "grid"
    DENSE = "dense"  # two layers a line, by colour alone
    LAYERS = "layers"
    LIST = "list"


class CacheScreen(LeanScreen):
    """See the module's paragraph. `show` is called by the app's gauge timer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "measure", "Measure", id="cache.measure"),
        Binding("v", "view", "View", id="cache.view"),
        Binding("o", "order", "Order", id="cache.order", show=False),
        Binding("space", "pause", "Pause", id="cache.pause"),
        Binding("r", "record", "Record", id="cache.record"),
        Binding("escape", "app.go('chat')", "Chat", id="cache.back"),
    ]

    def __init__(
        self, glyphs: Glyphs, history: History, *, clock: Clock, plain: bool,
        period_s: float = GAUGE_PERIOD_S,
    ) -> None:  # fmt: skip
        super().__init__()
        self._clock = clock
        self._drawn_once = False
        self._glyphs = glyphs
        self._history = history
        self._plain = plain
        self._pace = PicturePace(period_s, share=_PICTURE_SHARE)
        self._snapshot = EngineSnapshot()
        self._paused_at: datetime | None = None
        self._measure_chosen = False
        self._precision = ""
        self._picture = Picture.GRID
        self._slow_due_s = 0.0

    def compose(self) -> ComposeResult:
        yield TabLine("cache", plain=self._plain)
        with Vertical(id="picture"):
            yield WaitLine(self._glyphs, self._history)
            yield Static("", id="title", markup=False)
            yield Static("", id="header", markup=False)
            yield Static(Content(_EXPLANATION), id="explanation", markup=False)
            yield Heatmap(self._glyphs)
            yield LayerStrips(self._glyphs)
            yield ExpertList(self._glyphs)
            yield Static("", id="cursor", markup=False)
            yield TierBars(self._glyphs, self._history)
            yield Static("", id="precision", markup=False)
            yield Static("", id="legend", markup=False)
        yield JobLines(self._glyphs)
        yield StatusLine(self._glyphs)
        yield KeyLine()
        yield SmallWindow(self._glyphs)

    def on_mount(self) -> None:
        self._drawn_once = True
        self._draw()
        self.query_one(Heatmap).focus()

    # -- what is shown -------------------------------------------------------------------------

    def show(
        self,
        snapshot: EngineSnapshot,
        *,
        context_used: int,
        notes: tuple[str, ...],
        precision: str,
        jobs: Sequence[JobView] = (),
    ) -> None:
        """Draw a snapshot; when paused only the jobs and the status line move. `precision` is a
        line about how the next prompt is read and when a balanced answer computes again.
        """
        if not self._drawn_once:
            return
        self.query_one(JobLines).show(jobs)
        self.query_one(StatusLine).show(snapshot, context_used=context_used, notes=notes)
        if self._paused_at is None and self._pace.due(self._clock.monotonic()):
            began_s = self._clock.cpu()
            self._snapshot, self._precision = snapshot, precision
            self._draw()
            self.call_after_refresh(lambda: self._pace.record(self._clock.cpu() - began_s))

    def _draw(self) -> None:
        snapshot, heatmap = self._snapshot, self.query_one(Heatmap)
        view = snapshot.cache
        if view is not None and resident_words(view, snapshot.sizes) and not self._measure_chosen:
            heatmap.measure = Measure.HEAT
        self._arrange()
        words = _ELSEWHERE if snapshot.remote else _EXPLANATION
        self._set("explanation", Content(words.replace("{server}", snapshot.remote)))
        for name in ("WaitLine", "TierBars", "#precision", "#legend"):
            self.query_one(name).display = not snapshot.remote
        if view is not None:
            self._draw_view(view)
        self.query_one(WaitLine).show(snapshot)
        self.query_one(TierBars).show(snapshot)
        self._draw_words()

    def _arrange(self) -> None:
        """Which of the pictures is there."""
        has_view, picture = self._snapshot.cache is not None, self._picture
        is_grid = picture in (Picture.GRID, Picture.DENSE)
        self.query_one(Heatmap).display = has_view and is_grid
        self.query_one("#cursor").display = has_view and is_grid
        self.query_one(LayerStrips).display = has_view and picture is Picture.LAYERS
        self.query_one(ExpertList).display = has_view and picture is Picture.LIST
        self.query_one("#header").display = has_view
        self.query_one("#explanation").display = not has_view

    def _draw_view(self, view: CacheView) -> None:
        now_s = self._clock.monotonic()
        slow = now_s >= self._slow_due_s
        if slow:
            self._slow_due_s = now_s + _SLOW_S
        match self._picture:
            case Picture.GRID | Picture.DENSE:
                self.query_one(Heatmap).show(view)
                if slow:
                    self.query_one(Heatmap).grow_older()
            case Picture.LAYERS:
                self.query_one(LayerStrips).show(view)
            case Picture.LIST if slow:
                self.query_one(ExpertList).show(view)
            case _:
                pass

    def _draw_words(self) -> None:
        heatmap, width = self.query_one(Heatmap), self.size.width
        self._set("title", self._title_line(heatmap, width))
        self._set("header", Content.styled(self._header(width), "$dim"))
        cursor = [heatmap.cursor_text(), heatmap.story_text()]
        lines = [Content(f" {line}").truncate(width, ellipsis=True) for line in cursor]
        self._set("cursor", Content("\n").join(lines))
        precision = Content(f" {self._precision}").truncate(width, ellipsis=True)
        self._set("precision", precision)
        self._set("legend", self._legend(heatmap, width))

    def _header(self, width: int) -> str:
        match self._picture:
            case Picture.LIST:
                return LIST_HEAD[:width]
            case Picture.LAYERS:
                return " where the experts of each layer are, and who is fetched most"[:width]
            case _:
                return header_line(self.query_one(Heatmap).grid, width)

    def _legend(self, heatmap: Heatmap, width: int) -> Content:
        match self._picture:
            case Picture.LIST:
                order = self.query_one(ExpertList).order.value
                return spread(Content(""), Content(f"order: {order} "), width)
            case Picture.LAYERS:
                return legend_line(Measure.TIER, self._glyphs, width)
            case picture:
                look = replace(self._glyphs, tiers="█" * 4, ramp="█" * RAMP_STEPS)
                glyphs = look if picture is Picture.DENSE else self._glyphs
                return legend_line(heatmap.measure, glyphs, width)

    def _set(self, name: str, content: Content) -> None:
        static = self.query_one(f"#{name}", Static)
        if static.content != content:
            static.update(content, layout=False)  # all have fixed heights

    def _title_line(self, heatmap: Heatmap, width: int) -> Content:
        view = self._snapshot.cache
        if self._paused_at is not None:
            state = f"paused, {self._paused_at:%H:%M:%S}, engine still runs"
        elif self._snapshot.state is EngineState.WRITING:
            state = f"live {1 / self._pace.period_s:.0f}/s"
        elif self._snapshot.state is EngineState.READING:
            state = "reading the prompt"
        else:
            state = "idle"
        right = Content.styled(f"{state}  [Space] ", "$dim")
        if self._snapshot.remote:
            return Content.styled(" No experts here", "bold")
        if view is None:
            return spread(Content.styled(" No model is loaded yet", "bold"), right, width)
        text, slots = resident_words(view, self._snapshot.sizes), vram_words(self._snapshot.vram)
        if not text:
            grouped = self._picture in (Picture.GRID, Picture.DENSE) and heatmap.grid.group > 1
            per_cell = f", {heatmap.grid.group} experts per cell" if grouped else ""
            text = f" Where experts are{per_cell}, {len(view.layers)} layers"
            if self._snapshot.counters.lookups == 0 and not slots:
                text += ". Ask something and this fills in."
        return spread(Content.styled(text + slots, "bold"), right, width)

    # -- actions -------------------------------------------------------------------------------

    def on_heatmap_cursor_moved(self) -> None:
        self._draw_words()

    def on_resize(self) -> None:
        self.call_after_refresh(self._fit)

    def _fit(self) -> None:
        self.query_one(Heatmap).fit(self.query_one("#picture").size.height - _OTHER_ROWS)
        self._draw_words()

    def action_measure(self) -> None:
        heatmap, view = self.query_one(Heatmap), self._snapshot.cache
        self._measure_chosen = True
        offered = measures(view) if view is not None else (Measure.TIER, Measure.HEAT)
        at = offered.index(heatmap.measure) + 1 if heatmap.measure in offered else 0
        heatmap.set_measure(offered[at % len(offered)])
        self._draw_words()

    def action_view(self) -> None:
        pictures = [each for each in Picture if each is not Picture.DENSE or not self._plain]
        self._picture = pictures[(pictures.index(self._picture) + 1) % len(pictures)]
        self.query_one(Heatmap).set_dense(self._picture is Picture.DENSE)
        self._slow_due_s = 0.0
        self._draw()
        shown = {Picture.LAYERS: LayerStrips, Picture.LIST: ExpertList}
        self.query_one(shown.get(self._picture, Heatmap)).focus()

    def action_order(self) -> None:
        self.query_one(ExpertList).next_order()
        self._draw_words()

    async def action_record(self) -> None:
        await self.run_action("app.record")

    async def action_pause(self) -> None:
        if self.app.check_action("playback", ()):  # of a recording, all stands still
            await self.run_action("app.playback('toggle')")
            return
        paused = self._paused_at is not None
        self._paused_at = None if paused else self._clock.wall()
        self._draw_words()


def resident_words(view: CacheView, sizes: TierSizes) -> str:
    """Which answers need no fetch because all experts are in slots of their kind; empty: none."""
    n_all = len(view.layers) * view.n_experts
    base, fine = sizes.base_slots_used >= n_all, sizes.fine_slots_used >= n_all
    if base and fine:
        return f" All {n_all:,} experts are in slots. Nothing to fetch."
    if base:
        return f" All {n_all:,} experts are in 2-bit slots. Fast fetches nothing."
    if fine:
        return f" All {n_all:,} experts are in 4-bit slots. Exact fetches nothing."
    return ""


def vram_words(vram: VramView | None) -> str:
    """How much the slots take of the card, where that is not what the plan gave them."""
    if vram is None or vram.slots == vram.planned:
        return ""
    now, planned = show_memory(vram.slots), show_memory(vram.planned)
    return f"   Slots: {now}, planned {planned}: {vram.why}"


def legend_line(measure: Measure, glyphs: Glyphs, width: int) -> Content:
    """What the glyphs mean, and the measure that is shown."""
    parts = [Content(" ")]
    if measure is Measure.TIER:
        for tier in reversed(Tier):
            look = f"bold ${tier_variable(tier)}"
            parts.append(Content.styled(glyphs.tiers[tier] * 2, look) + f" {TIER_LETTERS[tier]}   ")
    else:
        low, high = ENDS[measure]
        parts.append(Content(f"{low} "))
        parts += [
            Content.styled(glyphs.ramp[step] * 2, f"$ramp-{step}") for step in range(1, RAMP_STEPS)
        ]
        parts.append(Content(f" {high}   "))
    parts.append(Content.assemble((glyphs.unused, "$dim"), " not used"))
    return spread(Content("").join(parts), Content(f"measure: {measure.value} "), width)
