"""The help panel: keys that work where it was opened, slash commands, glyphs. UI thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from moet_desk.telemetry import TIER_LETTERS, Tier
from moet_desk.ui.commands import WORDS
from moet_desk.ui.theme import Glyphs, tier_variable

_MEANINGS = {
    Tier.FINE: "4-bit slot: the model as shipped",
    Tier.BASE: "2-bit slot: ready to compute",
    Tier.RAM: "in RAM: one copy away",
    Tier.NVME: "on disk: read when needed",
}


def help_content(keys: Sequence[tuple[str, str, str]], glyphs: Glyphs) -> Content:
    """The page's text. `keys` are (key, what it does, binding id)."""
    lines = [Content.styled("Keys here", "bold")]
    lines += [
        Content.assemble(f"  {key:<22}{text:<28}", (name, "$dim")) for key, text, name in keys
    ]
    lines += [Content(""), Content.styled("Commands in the prompt", "bold")]
    for verb, (argument, text) in WORDS.items():
        lines.append(Content(f"  {f'/{verb.value} {argument}':<22}{text}"))
    lines += [Content(""), Content.styled("Where an expert is", "bold")]
    for tier in reversed(Tier):
        glyph = (f"  {glyphs.tiers[tier]} {TIER_LETTERS[tier]}", f"${tier_variable(tier)}")
        lines.append(Content.assemble(glyph, f"   {_MEANINGS[tier]}"))
    lines.append(Content(f"  {glyphs.unused}     not used yet"))
    lines += [
        Content(""),
        Content("A tier changes speed, never text. Keys can be changed under [keys]"),
        Content("in config.toml by the ids at the right."),
    ]
    return Content("\n").join(lines)


class HelpPanel(ModalScreen[None]):
    """Shows `help_content` over a screen."""

    DEFAULT_CSS = """
    HelpPanel { align: center middle; }
    HelpPanel > VerticalScroll {
        width: 78; max-width: 100%; height: auto; max-height: 90%; padding: 1 2;
        background: $surface; border: round $primary;
    }
    HelpPanel Static { height: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q", "app.pop_screen", "Close", id="help.close"),
    ]

    def __init__(self, keys: Sequence[tuple[str, str, str]], glyphs: Glyphs) -> None:
        super().__init__()
        self._keys = keys
        self._glyphs = glyphs

    def compose(self) -> ComposeResult:
        with VerticalScroll() as scroll:
            scroll.border_title = "Help"
            scroll.border_subtitle = "Esc closes"
            yield Static(help_content(self._keys, self._glyphs), markup=False)
