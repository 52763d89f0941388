"""Stretches of an answer as Markdown widgets, which can be parked while they are out of view.

Text from models is never markup. UI thread.
"""

from __future__ import annotations

from textual.geometry import Size

from moet_desk.marked_text import MarkedText, Ranges
from moet_desk.ui.text import find_all, split_segments
from moet_desk.ui.widgets.marked_markdown import MarkedMarkdown, mark_sought


class Segment(MarkedMarkdown):
    """One stretch of an answer.

    A parked segment keeps its height but holds no widgets: laying out 400 of them costs 30 ms per
    flush (measured on 2 cores, 2026-11-29).
    """

    def __init__(
        self,
        text: str = "",
        *,
        marks: Ranges = (),
        shows_marks: bool = False,
        plain: bool = False,
        parked: Size | None = None,
    ) -> None:
        """`parked`: the room it is known to take; it holds no widgets at first."""
        super().__init__(
            text if parked is None else "", marks=marks, shows_marks=shows_marks, plain=plain
        )
        self._parked_text: str | None = None
        self._parked_width = 0
        if parked is not None:
            self._parked_text, self._parked_width = text, parked.width
            self.styles.height = parked.height
        self._sought = ""

    @property
    def text(self) -> str:
        """The whole Markdown, also while parked."""
        return self.source if self._parked_text is None else self._parked_text

    @property
    def parked(self) -> bool:
        """Whether it holds no widgets now."""
        return self._parked_text is not None

    async def park(self) -> None:
        """Let the widgets go, keep the room they took."""
        if self.parked or not self.size.height:
            return
        self._parked_text, self._parked_width = self.source, self.size.width
        self.styles.height = self.size.height
        await self.remove_children()

    async def unpark(self) -> None:
        """Draw it again."""
        text, self._parked_text = self._parked_text, None
        if text is not None:
            await self.update(text)
            self.styles.height = "auto"
            self._show_sought()

    async def redraw(self) -> None:
        """Draw from the source; a parked segment is drawn when it comes near."""
        if not self.parked:
            await super().redraw()
            self._show_sought()

    async def seek(self, wanted: str) -> None:
        """Mark a text that is looked for wherever it stands; "" takes the marks away."""
        if wanted != self._sought:
            was_marked, self._sought = bool(find_all(self.text, self._sought)), wanted
            if was_marked:
                await self.redraw()
            else:
                self._show_sought()

    def _show_sought(self) -> None:
        if not self.parked and self._sought:
            mark_sought(self, self._sought)

    def refit(self, width: int) -> None:
        """The window has another width: guess the height until it is drawn again."""
        if self.parked and width and width != self._parked_width:
            rows = round(self.size.height * self._parked_width / width)
            self.styles.height, self._parked_width = max(1, rows), width


def cut_segments(text: MarkedText) -> list[MarkedText]:
    """`split_segments` with the marks of each part."""
    parts, start = [], 0
    for part in split_segments(text.text):
        parts.append(text.cut(start, start + len(part)))
        start += len(part)
    return parts
