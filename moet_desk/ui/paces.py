"""How often the screens draw what changes all the time. Pure but for the clock; UI thread."""

from __future__ import annotations

from moet_desk.ui.clock import Clock

TEXT_PERIOD_S = 0.1
GAUGE_PERIOD_S = 0.5
START_PERIOD_S = 0.25
CALM_PERIOD_S = 1.0
"""Of the gauges: usually, while a model is loaded and on screens of lists, and with less motion."""

_TEXT_SHARE, _LAYOUT_SHARE = 0.008, 0.0025
"""Of a core: what flushes of text may take, and what those may that change the layout."""
_SLOWEST_TEXT_S, _SLOWEST_LAYOUT_S = 0.2, 3.0
_MOST_TEXT_SHARE, _STRETCHED_TEXT_S = 0.02, 0.3
"""Where flushes of text five times a second would take more than this, they are more seldom."""
_EARLY = 0.9  # of a period: a timer that fires early must not skip a turn
_HIDDEN_S = 0.5  # between two looks for text while another screen is in front


class FlushPace:
    """How often text is drawn: every 100 ms, more slowly while drawing takes long.

    A flush over 40 ms doubles the period up to 400 ms, a faster one halves it again. One slow flush
    alone is not worth a word (the first code block loads its highlighter); two in a row are.
    """

    SLOW_S = 0.040
    SLOWEST_S = 0.4

    def __init__(self, base_s: float = TEXT_PERIOD_S) -> None:
        self._base_s = self.period_s = base_s

    @property
    def slow(self) -> bool:
        """Whether drawing does not keep up; the status line says so."""
        return self.period_s >= self._base_s * 4

    def reset(self) -> None:
        """An answer has ended: the next one starts at the usual pace."""
        self.period_s = self._base_s

    def record(self, flush_s: float) -> None:
        """Take the duration of a flush into account."""
        if flush_s > self.SLOW_S:
            self.period_s = min(self.SLOWEST_S, self.period_s * 2)
        else:
            self.period_s = max(self._base_s, self.period_s / 2)


class PicturePace:
    """How often something is drawn: so often that drawing takes this share of a core.

    Never more often than `base_s`, never less than `slowest_s`.
    """

    SHARE = 0.015

    def __init__(self, base_s: float, *, share: float = SHARE, slowest_s: float = 1.0) -> None:
        self._base_s = self.period_s = base_s
        self._share, self._slowest_s = share, slowest_s
        self._due_s = 0.0

    def due(self, now_s: float) -> bool:
        """Whether a picture may be drawn now; if so, sets the time of the next one."""
        if now_s < self._due_s:
            return False
        self._due_s = now_s + self.period_s * _EARLY
        return True

    def record(self, cpu_s: float) -> None:
        """Take what a picture has cost into account, half of it each time."""
        wanted = min(self._slowest_s, max(self._base_s, cpu_s / self._share))
        self.period_s = (self.period_s + wanted) / 2


class AnswerPace:
    """When the text of an answer is drawn, and how much room is held ready for it.

    Both follow from what drawing has cost on this computer so far.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._flush = FlushPace()
        self._text = PicturePace(TEXT_PERIOD_S, share=_TEXT_SHARE, slowest_s=_SLOWEST_TEXT_S)
        self._most = PicturePace(TEXT_PERIOD_S, share=_MOST_TEXT_SHARE, slowest_s=_STRETCHED_TEXT_S)
        self._layout = PicturePace(0.0, share=_LAYOUT_SHARE, slowest_s=_SLOWEST_LAYOUT_S)
        self._due_s = 0.0
        self._began: tuple[float, float] = (0.0, 0.0)  # clock and CPU when drawing began
        self._grew: bool | None = None  # what was drawn and not measured yet
        self.n_flushes = 0
        """How often text was drawn."""

    @property
    def slow(self) -> bool:
        """Whether drawing does not keep up; the status line says so."""
        return self._flush.slow

    def reset(self) -> None:
        """An answer has ended: the next one starts at the usual pace."""
        self._flush.reset()

    @property
    def _period_s(self) -> float:
        return max(self._flush.period_s, self._text.period_s, self._most.period_s)

    @property
    def skips_turns(self) -> bool:
        """Whether text is drawn in every second turn of a timer of `TEXT_PERIOD_S`."""
        return TEXT_PERIOD_S < self._period_s * _EARLY <= 2 * TEXT_PERIOD_S

    def due(self, *, in_front: bool) -> bool:
        """Whether text may be drawn now; if so, sets the time of the next one."""
        now_s = self._clock.monotonic()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + (self._period_s if in_front else _HIDDEN_S) * _EARLY
        return True

    def room(self, n_rows: int, seconds: float, most: int) -> int:
        """Blank rows to hold ready, so that layouts are as seldom as they cost.

        Args:
            n_rows: of the text so far.
            seconds: that it took to come.
            most: rows at most.
        """
        return min(most, round(n_rows / max(1.0, seconds) * self._layout.period_s))

    def begin(self) -> None:
        """Text is drawn now."""
        self.n_flushes += 1
        self._began = self._clock.monotonic(), self._clock.cpu()

    def end(self, *, grew: bool) -> None:
        """It was drawn; `grew`: it needs another layout."""
        self._grew = grew

    def painted(self) -> None:
        """It is on the screen: take into account what that has cost."""
        if self._grew is None:
            return
        began_s, cpu_s = self._began
        self._flush.record(self._clock.monotonic() - began_s)
        for pace in (self._layout,) if self._grew else (self._text, self._most):
            pace.record(self._clock.cpu() - cpu_s)
        self._grew = None
