"""Bars with numbers, sparklines, the status line, the tier bars and the side rail.

The pure functions turn numbers into rows of text; the widgets keep the last snapshot they were
given and repaint only when their text has changed. Unknown is "–", never 0. UI thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import zip_longest

from rich.cells import cell_len
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from moet_desk.telemetry import TIER_LETTERS, EngineSnapshot, EngineState, LoadStep, Tier
from moet_desk.ui.lean_rows import Rows
from moet_desk.ui.theme import Glyphs, status_variable, tier_variable
from moet_desk.units import show_count, show_disk, show_duration, show_memory, show_rate

CONTEXT_WARN_SHARE = 0.85
HISTORY = 28
_TIERS = (Tier.BASE, Tier.FINE, Tier.RAM, Tier.NVME)
_TIER_NAMES = {
    Tier.BASE: "2-bit slots",
    Tier.FINE: "4-bit slots",
    Tier.RAM: "RAM",
    Tier.NVME: "NVMe",
}


def bar(share: float, width: int, glyphs: Glyphs) -> str:
    """A one-row bar; anything above nothing shows at least one full cell."""
    share = min(1.0, max(0.0, share))
    full = min(width, max(round(share * width), 1 if share > 0 else 0))
    return glyphs.full * full + glyphs.empty * (width - full)


def sparkline(values: Sequence[float | None], width: int, glyphs: Glyphs) -> str:
    """The last `width` values on a scale from 0 to their maximum; unknown ones leave a gap."""
    shown = list(values)[-width:]
    top = max((value for value in shown if value is not None), default=0.0) or 1.0
    last = len(glyphs.spark) - 1
    return "".join(
        " " if value is None else glyphs.spark[round(max(0.0, value) / top * last)]
        for value in shown
    )


def show_percent(share: float | None, digits: int = 1) -> str:
    """A share as "96.1 %", or "–" when it is not known."""
    if share is None:
        return "–"
    shown = f"{share * 100:.{digits}f} %"
    return "<1 %" if digits == 0 and 0 < share < 0.005 else shown


def show_number(value: float | None, unit: str, digits: int = 1) -> str:
    """A figure with its unit, or "–" when it is not known."""
    return "–" if value is None else f"{value:.{digits}f} {unit}"


def guessing(snapshot: EngineSnapshot) -> str:
    """Who guesses words ahead now, how far and for what: "mtp 2, x1.42", "off"; "" if no one may.

    The gain is the speed that is expected of it, 1 as without; a guesser on trial has "?".
    """
    choice = snapshot.draft_choice
    if choice.asked == "off" or choice.source == "off":
        return "" if choice.asked == "off" else "off"
    who = f"{choice.source} {choice.depth}"
    if choice.is_probe:
        return f"{who}?"
    return who if choice.gain is None else f"{who}, x{choice.gain:.2f}"


def guess_lines(snapshot: EngineSnapshot) -> list[Content]:
    """Steps, tokens of each, who guesses and how often that was right; nothing if no one may."""
    who = guessing(snapshot)
    if who in ("", "off"):
        return [Content(f"guesses    {who}")] if who else []
    steps_s = 1e3 / snapshot.step_ms if snapshot.step_ms else None
    right = " ".join(show_percent(share, 0) for share in snapshot.draft_choice.acceptance)
    return [
        Content(
            f"per step   {show_number(snapshot.tokens_per_step, 'tok', 2)},"
            f" {show_number(steps_s, '/s')}"
        ),
        Content(f"guesses    {who}"),
        Content(f"right      {right or '–'}"),
    ]


def tier_shares(snapshot: EngineSnapshot, digits: int) -> Content:
    """Who answered for experts lately, with letters: "G 96.1 % R 3.6 % N 0.3 %"."""
    if snapshot.tier_share is None:
        return Content("")
    parts: list[Content] = []
    for tier in _TIERS:
        if tier is Tier.FINE and not snapshot.sizes.fine_slots:
            continue
        share = snapshot.tier_share[tier]
        letter = Content.styled(TIER_LETTERS[tier], f"bold ${tier_variable(tier)}")
        parts.append(letter + f" {show_percent(share, digits)}")
    return Content(" ").join(parts)


def context_meter(used: int, size: int) -> Content:
    """The context's fill; from 85 % on it carries a mark besides its colour."""
    text = f"ctx {show_count(used)}/{show_count(size)}"
    if size and used / size >= CONTEXT_WARN_SHARE:
        return Content.styled(f"! {text}", "bold $status-warn")
    return Content(text)


def spread(left: Content, right: Content, width: int) -> Content:
    """Left and right part of one row; the left one is cut when they do not fit."""
    room = max(0, width - right.cell_length - 1)
    left = left.truncate(room, ellipsis=True) if left.cell_length > room else left
    return left + " " * (width - left.cell_length - right.cell_length) + right


class _Gauge(Rows, Widget):
    """A widget whose lines are made from a record; of its rows those are repainted that differ.

    The lines are kept as drawn, because what they are made from may have moved on since.
    """

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__()
        self._glyphs = glyphs
        self._lines: list[Content] = []

    def make_lines(self, width: int) -> list[Content]:
        """The lines for a width; each gauge has its own."""
        return []

    def redraw(self) -> None:
        """Make the lines anew and repaint what differs."""
        width = self.size.width
        lines = self.make_lines(width)
        pairs = enumerate(zip_longest(self._lines, lines))
        changed = [y for y, (a, b) in pairs if a is None or b is None or not a.is_same(b)]
        self._lines = lines
        if changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def render(self) -> Content:
        return Content("\n").join(self._lines)

    def row(self, y: int) -> Strip:
        return self.rows(range(y, y + 1))[0]

    def rows(self, lines: range) -> Sequence[Strip]:
        if self.text_selection is not None:
            return [super(_Gauge, self).row(y) for y in lines]
        width, none = self.size.width, Content("")
        here = (self._lines[y] if y < len(self._lines) else none for y in lines)
        return [self._line(line, width) for line in here]

    def render_line(self, y: int) -> Strip:
        return self.row(y).apply_offsets(0, y)

    def on_resize(self) -> None:
        self.redraw()


class StatusLine(_Gauge):
    """State, model, context, tiers and speed in one row."""

    DEFAULT_CSS = "StatusLine { height: 1; }"

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__(glyphs)
        self._snapshot = EngineSnapshot()
        self._context_used = 0
        self._notes: tuple[str, ...] = ()

    def show(
        self, snapshot: EngineSnapshot, *, context_used: int, notes: tuple[str, ...] = ()
    ) -> None:
        """Show a snapshot. `context_used` is of the open chat; `notes` stand at the right."""
        self._snapshot, self._context_used, self._notes = snapshot, context_used, notes
        self.redraw()

    def make_lines(self, width: int) -> list[Content]:
        return [self.make_text(width)]

    def make_text(self, width: int) -> Content:
        """The row for a width."""
        snapshot = self._snapshot
        state = snapshot.state
        glyph = self._glyphs.states[state]
        parts = [Content.styled(f"{glyph} {state.value}", f"bold ${status_variable(state)}")]
        if snapshot.model:
            parts.append(Content(snapshot.model))
        if snapshot.opportunistic:
            parts.append(Content.styled("opportunistic", "bold $status-warn"))
        if snapshot.context:
            parts.append(context_meter(self._context_used, snapshot.context))
        shares = tier_shares(snapshot, 1 if width >= 100 else 0)
        if shares:
            parts.append(shares)
        right = list(self._notes)
        if width >= 100 and snapshot.model:
            right.append(show_number(snapshot.decode_tok_per_s, "tok/s") + self._per_step(width))
        if snapshot.device:
            right.append(snapshot.device)
        left = Content(" ") + Content("   ").join(parts)
        return spread(left, Content("   ".join(right) + " "), width)

    def _per_step(self, width: int) -> str:
        """How many tokens a step gives, where guesses make it more than one."""
        share = self._snapshot.tokens_per_step
        return f", {share:.1f} a step" if width >= 120 and share and share >= 1.05 else ""


class History:
    """Recent values for the sparklines, one per second. Owned by the UI thread."""

    def __init__(self) -> None:
        self.tok_per_s: deque[float | None] = deque(maxlen=HISTORY)
        self.wait_share: deque[float | None] = deque(maxlen=HISTORY)
        self.slot_rate: deque[float | None] = deque(maxlen=HISTORY)  # bytes/s into slots
        self.disk_rate: deque[float | None] = deque(maxlen=HISTORY)  # bytes/s from disk
        self._moved: tuple[float, int, int] | None = None
        self._due_s = 0.0

    def clear(self) -> None:
        """Forget all: time went back."""
        self.tok_per_s.clear()
        self.wait_share.clear()
        self.slot_rate.clear()
        self.disk_rate.clear()
        self._moved, self._due_s = None, 0.0

    def add(self, snapshot: EngineSnapshot, now_s: float) -> None:
        """Take a snapshot; called twice a second, keeps one value of each."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + 1.0
        writing = snapshot.state is EngineState.WRITING
        self.tok_per_s.append(snapshot.decode_tok_per_s if writing else None)
        self.wait_share.append(snapshot.wait_share if writing else None)
        now = (now_s, snapshot.counters.bytes_ram_to_slot, snapshot.counters.bytes_nvme_to_ram)
        if self._moved is not None and now_s > self._moved[0] and now[1] >= self._moved[1]:
            seconds = now_s - self._moved[0]
            self.slot_rate.append((now[1] - self._moved[1]) / seconds)
            self.disk_rate.append(max(0, now[2] - self._moved[2]) / seconds)
        self._moved = now


def wait_line(snapshot: EngineSnapshot, history: History, *, width: int, glyphs: Glyphs) -> Content:
    """The line that maps to what a person feels: time spent waiting for experts, first."""
    guesses = guessing(snapshot)
    per_step = show_number(snapshot.tokens_per_step, "tok", 2)
    steps = f", {per_step} ({guesses})" if guesses not in ("", "off") and width >= 110 else ""
    share = hit_share(snapshot)
    return Content.assemble(
        (f"waiting {show_percent(snapshot.wait_share, 0)} of time ", "bold"),
        (sparkline(history.wait_share, 16 if width >= 100 else 12, glyphs), "$status-ok"),
        f"  {show_number(snapshot.step_ms, 'ms/step', 0)}{steps}",
        f"   {show_number(snapshot.decode_tok_per_s, 'tok/s')}   hits {show_percent(share)}",
    ).truncate(width, ellipsis=True)


def hit_share(snapshot: EngineSnapshot) -> float | None:
    """Share of the recent look-ups that a slot answered."""
    shares = snapshot.tier_share
    return None if shares is None else shares[Tier.BASE] + shares[Tier.FINE]


def move_line(snapshot: EngineSnapshot, history: History, *, width: int, glyphs: Glyphs) -> Content:
    """What was copied into slots and read from disk, in all and lately."""
    counters = snapshot.counters
    moved = disk = "–"
    if counters.lookups:
        moved = show_memory(counters.bytes_ram_to_slot)
        disk = show_memory(counters.bytes_nvme_to_ram)
    more = ""
    if snapshot.reads is not None and width >= 110:
        cached = "" if snapshot.reads.direct else ", cached"
        more += f", p95 {snapshot.reads.p95_ms:.1f} ms{cached}"
    if counters.promotions and width >= 110:
        more += f"   {counters.promotions:,} promoted"
    if snapshot.vram is not None and width >= 110:
        more += f"   card: {show_memory(snapshot.vram.free)} free"
    n = 16 if width >= 100 else 8
    return Content.assemble(
        f"moved {moved} ", (sparkline(history.slot_rate, n, glyphs), f"${tier_variable(Tier.RAM)}"),
        f" {_newest(history.slot_rate)}   disk {disk} ",
        (sparkline(history.disk_rate, n, glyphs), f"${tier_variable(Tier.NVME)}"),
        f" {_newest(history.disk_rate)}{more}",
    ).truncate(width, ellipsis=True)  # fmt: skip


def _newest(rates: Sequence[float | None]) -> str:
    rate = rates[-1] if rates else None
    return "–" if rate is None else show_rate(rate)


def tier_lines(snapshot: EngineSnapshot, width: int, glyphs: Glyphs) -> list[Content]:
    """One line per tier: how full it is and what share of look-ups it answered."""
    sizes = snapshot.sizes
    held = {
        Tier.BASE: (sizes.base_slots_used, sizes.base_slots),
        Tier.FINE: (sizes.fine_slots_used, sizes.fine_slots),
        Tier.RAM: (sizes.arena_rows_used, sizes.arena_rows),
        Tier.NVME: (sizes.rows, sizes.rows),
    }
    lines = []
    for tier in _TIERS:
        used, size = held[tier]
        share = None if snapshot.tier_share is None else snapshot.tier_share[tier]
        of_rows = show_percent(used / sizes.rows if sizes.rows else None)
        colour = f"${tier_variable(tier)}"
        numbers = f"{used:>7,} of {size:>6,} {of_rows:>8}   answers {show_percent(share):>7}  "
        head = f"{TIER_LETTERS[tier]} {_TIER_NAMES[tier]:<12}"
        room = max(4, width - len(head) - len(numbers) - 2)
        lines.append(
            Content.assemble(
                " ", (head, f"bold {colour}"), numbers, (bar(share or 0.0, room, glyphs), colour)
            )
        )
    return lines


class _SnapshotGauge(_Gauge):
    """A gauge of the newest snapshot and of the history behind it."""

    def __init__(self, glyphs: Glyphs, history: History) -> None:
        super().__init__(glyphs)
        self._history = history
        self._snapshot = EngineSnapshot()

    def show(self, snapshot: EngineSnapshot) -> None:
        """Show a snapshot."""
        self._snapshot = snapshot
        self.redraw()


class WaitLine(_SnapshotGauge):
    """The leading figure of the Cache screen."""

    DEFAULT_CSS = "WaitLine { height: 1; }"

    def make_lines(self, width: int) -> list[Content]:
        waiting = wait_line(self._snapshot, self._history, width=width - 1, glyphs=self._glyphs)
        return [Content(" ") + waiting]


class TierBars(_SnapshotGauge):
    """The four tiers and what moves between them, under the heatmap."""

    DEFAULT_CSS = "TierBars { height: 5; }"

    def make_lines(self, width: int) -> list[Content]:
        moves = move_line(self._snapshot, self._history, width=width - 1, glyphs=self._glyphs)
        return [*tier_lines(self._snapshot, width, self._glyphs), Content(" ") + moves]


class Rail(_SnapshotGauge):
    """The right column of wide windows: tiers, speed, waiting, requests."""

    DEFAULT_CSS = "Rail { width: 34; padding: 0 1; }"

    def make_lines(self, width: int) -> list[Content]:
        return [line.truncate(width) for line in self._all_lines()]

    def _all_lines(self) -> list[Content]:
        snapshot, glyphs = self._snapshot, self._glyphs
        if snapshot.remote:
            return self._of_server()
        lines = [Content.styled("Tiers, recent look-ups", "bold")]
        for tier in _TIERS:
            share = None if snapshot.tier_share is None else snapshot.tier_share[tier]
            colour = f"${tier_variable(tier)}"
            letter = (f"{TIER_LETTERS[tier]} ", f"bold {colour}")
            drawn = (bar(share or 0.0, 8, glyphs), colour)
            lines.append(
                Content.assemble(letter, f"{_TIER_NAMES[tier]:<11} {show_percent(share):>7} ")
                + Content.styled(*drawn)
            )
        speed = show_number(snapshot.decode_tok_per_s, "tok/s")
        lines += [
            Content(""),
            Content.assemble(("Speed      ", "bold"), speed),
            Content.styled(sparkline(self._history.tok_per_s, HISTORY, glyphs), "$status-ok"),
            Content(f"waiting    {show_percent(snapshot.wait_share, 0)} of time"),
            Content(f"step       {show_number(snapshot.step_ms, 'ms')}"),
            *guess_lines(snapshot),
            Content(f"reading    {show_number(snapshot.prefill_tok_per_s, 'tok/s', 0)}"),
            Content(""),
            Content(
                f"requests   {snapshot.requests_running} now, {snapshot.requests_waiting} next"
            ),
        ]
        return lines

    def _of_server(self) -> list[Content]:
        """Of a server elsewhere only this is known."""
        snapshot = self._snapshot
        return [
            Content.styled("Another server", "bold"),
            Content(snapshot.device),
            Content(""),
            Content.assemble(
                ("Speed      ", "bold"), show_number(snapshot.decode_tok_per_s, "pieces/s")
            ),
            Content.styled(sparkline(self._history.tok_per_s, HISTORY, self._glyphs), "$status-ok"),
            Content(f"requests   {snapshot.requests_running} now"),
        ]


def loading_lines(
    steps: Sequence[LoadStep],
    *,
    width: int,
    glyphs: Glyphs,
    pack_rate: tuple[int, float] = (0, 0.0),
) -> list[Content]:
    """The lines of the loading block: glyph, name, bar with numbers, seconds.

    `pack_rate` is (bytes done, bytes per second) of a step counted in rows.
    """
    current = next((i for i, step in enumerate(steps) if not step.finished), len(steps))
    named = max((len(step.name) for step in steps), default=0)
    lines = []
    for i, step in enumerate(steps):
        glyph, style = glyphs.todo, "$dim"
        if step.finished:
            glyph, style = glyphs.ok, "$status-ok"
        elif i == current:
            glyph, style = glyphs.now, "bold $status-warn"
        seconds = show_duration(step.seconds) if step.seconds else ""
        numbers = _step_numbers(step, pack_rate) if step.total else ""
        room = width - named - cell_len(numbers) - cell_len(seconds) - 11
        drawn = bar(step.done / step.total, max(4, min(20, room)), glyphs) if step.total else ""
        left = Content.assemble((f" {glyph} ", style), f"{step.name:<{named}}  ")
        left += Content.styled(drawn, "$status-ok") + f"  {numbers}"
        lines.append(spread(left, Content(seconds + " "), width))
    return lines


def _step_numbers(step: LoadStep, pack_rate: tuple[int, float]) -> str:
    if step.unit == "bytes":
        rate = step.done / step.seconds if step.seconds else 0.0
        done, total = show_memory(step.done), show_memory(step.total)
        if done.split()[-1] == total.split()[-1]:
            done = done.split()[0]
        return f"{done} of {total}" + (f"  {show_memory(rate)}/s" if rate else "")
    n_bytes, rate = pack_rate if step.unit == "rows" else (0, 0.0)
    parts = [f"{step.done:,} of {step.total:,} {step.unit}"]
    parts += [show_disk(n_bytes)] if n_bytes else []
    parts += [show_rate(rate)] if rate else []
    return "  ".join(parts)


class LoadingBlock(Widget):
    """The loading screen's full-width block: steps, bars, bytes and seconds."""

    DEFAULT_CSS = "LoadingBlock { height: auto; padding: 1 0; }"

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__()
        self._glyphs = glyphs
        self._steps: tuple[LoadStep, ...] = ()
        self._title = ""
        self._elapsed_s = 0.0
        self._pack_rate = (0, 0.0)

    def show(
        self,
        title: str,
        steps: tuple[LoadStep, ...],
        *,
        elapsed_s: float,
        pack_rate: tuple[int, float],
    ) -> None:
        """Show the steps; called at 4 Hz while loading."""
        grown = len(steps) != len(self._steps)
        self._title, self._steps = title, steps
        self._elapsed_s, self._pack_rate = elapsed_s, pack_rate
        self.refresh(layout=grown)

    def render(self) -> Content:
        width = self.size.width
        seconds = Content.styled(show_duration(self._elapsed_s) + " ", "$dim")
        head = spread(Content.styled(f" {self._title}", "bold"), seconds, width)
        lines = loading_lines(
            self._steps, width=width, glyphs=self._glyphs, pack_rate=self._pack_rate
        )
        safe = " You can write already; it is sent when the model is ready."
        return Content("\n").join(
            [head, Content(""), *lines, Content(""), Content.styled(safe, "$dim")]
        )
