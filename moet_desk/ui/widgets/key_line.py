"""The last line: the keys of what has the focus, as many as fit, and always the one for help.

UI thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.reactive import reactive
from textual.widgets import Footer
from textual.widgets._footer import FooterKey

_BLANKS = 3  # around and between a key and its word


@dataclass(frozen=True)
class Key:
    """What the line says of one action."""

    key: str
    shown: str
    words: str
    action: str
    is_enabled: bool
    tooltip: str

    @property
    def width(self) -> int:
        return cell_len(self.shown) + cell_len(self.words) + _BLANKS


class KeyBox(FooterKey):
    """A key as the footer draws it. It never changes its width: Textual's own follow the footer's
    setting, and their styles are worked out three times for that.
    """

    compact = reactive(False)


class KeyLine(Footer):
    """A footer of which nothing is cut off. It is made anew only when it says something else: the
    focus moves with every key that is pressed in a list.
    """

    def __init__(self) -> None:
        super().__init__(show_command_palette=False)
        self._keys: tuple[Key, ...] = ()

    def compose(self) -> ComposeResult:
        self._keys = self._wanted()
        self.styles.grid_size_columns = len(self._keys)
        for key in self._keys:
            yield KeyBox(
                key.key, key.shown, key.words, key.action,
                disabled=not key.is_enabled, tooltip=key.tooltip,
            )  # fmt: skip

    async def recompose(self) -> None:
        if self._wanted() != self._keys:
            await super().recompose()

    def on_resize(self) -> None:
        self.call_after_refresh(self.recompose)

    def _wanted(self) -> tuple[Key, ...]:
        """The keys to show: the first one of each action."""
        if not self._bindings_ready:
            return ()
        keys: dict[str, Key] = {}
        for _, binding, is_enabled, tooltip in self.screen.active_bindings.values():
            if binding.show and binding.action not in keys:
                shown = self.app.get_key_display(binding)
                keys[binding.action] = Key(
                    binding.key, shown, binding.description, binding.action, is_enabled, tooltip
                )
        all_keys = list(keys.values())
        return tuple(
            all_keys[at] for at in fitting([key.width for key in all_keys], self.app.size.width)
        )


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
