"""The last line: the keys of what has the focus, as many as fit, and always the one for help.

UI thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.widgets import Footer
from textual.widgets._footer import FooterKey

_BLANKS = 3  # around and between a key and its word


class KeyLine(Footer):
    """A footer of which nothing is cut off."""

    def __init__(self) -> None:
        super().__init__(show_command_palette=False)

    def compose(self) -> ComposeResult:
        keys = [key for key in super().compose() if isinstance(key, FooterKey)]
        widths = [cell_len(key.key_display) + cell_len(key.description) + _BLANKS for key in keys]
        shown = [keys[at] for at in fitting(widths, self.app.size.width)]
        self.styles.grid_size_columns = len(shown)
        yield from shown

    def on_resize(self) -> None:
        self.call_after_refresh(self.recompose)


def fitting(widths: Sequence[int], width: int) -> list[int]:
    """Which of some things in a row are shown in `width` cells: the last one, and the first ones
    that fit beside it.
    """
    if not widths:
        return []
    left = width - widths[-1]
    shown: list[int] = []
    for at, needed in enumerate(widths[:-1]):
        left -= needed
        if left < 0:
            break
        shown.append(at)
    return [*shown, len(widths) - 1]
