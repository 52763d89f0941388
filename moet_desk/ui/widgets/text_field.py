"""A text area of several rows whose lines may come and go while its caret is on them. UI thread."""

from __future__ import annotations

from textual.geometry import Offset
from textual.widgets import TextArea


class TextField(TextArea):
    """Textual's, without the end of the app when undoing takes away the line of the caret and the
    scroll bar with it: the area then brings the caret into view before it has moved it.
    """

    def scroll_cursor_visible(self, center: bool = False, animate: bool = False) -> Offset:
        """Bring the caret into view, if its line is still there."""
        if self.cursor_location[0] >= self.document.line_count:
            return Offset(0, 0)
        return super().scroll_cursor_visible(center=center, animate=animate)
