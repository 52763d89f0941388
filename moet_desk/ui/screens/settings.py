"""The Settings screen: every setting of the schema, where its value comes from, when it counts.

There is no list of its own: rows, help, ranges and checks come from `settings.SETTINGS`. Each
change is saved at once. UI thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, OptionList

from moet_desk import config
from moet_desk.config import Loaded
from moet_desk.errors import MoetError
from moet_desk.settings import SETTINGS, Applies, Setting
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.pick_list import ListScreen

_MARKS = {Applies.RELOAD: "R reload", Applies.RESTART: "restart"}
_ALL = tuple(SETTINGS.values())


class SettingsScreen(ListScreen):
    """See the module's paragraph."""

    MODE = "settings"

    class Saved(Message):
        """A setting was saved; what counts at once is put into effect by the app."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    DEFAULT_CSS = "SettingsScreen #value { display: none; margin: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "step(-1)", "Less", id="settings.left", show=False),
        Binding("right", "step(1)", "Change", id="settings.right"),
        Binding("r", "reset", "Default", id="settings.reset"),
        Binding("escape", "back", "Back", id="settings.back"),
    ]

    def __init__(self, config_file: Path, glyphs: Glyphs, *, plain: bool) -> None:
        super().__init__(glyphs, plain=plain)
        self._file = config_file
        self._loaded: Loaded | None = None
        self._changed: set[str] = set()  # here, since the start
        self._problem: MoetError | None = None

    def more(self) -> ComposeResult:
        yield Input(id="value", compact=True)

    def fill(self) -> None:
        try:
            self._loaded, self._problem = config.load(self._file), None
        except MoetError as error:
            self._problem = error
        self.set_rows([self._row(setting) for setting in _ALL])
        self._draw_words()

    @property
    def setting(self) -> Setting:
        """The one under the cursor."""
        return _ALL[self.list.highlighted or 0]

    def _value(self, setting: Setting) -> Any:
        loaded = self._loaded
        if loaded is None:
            return setting.default
        return config.read_value(loaded.settings, setting.name)

    def _row(self, setting: Setting) -> Content:
        value = clean_line(setting.show(self._value(setting)) or "empty", 26)
        source = self._loaded.source_of(setting.name).kind.value if self._loaded else ""
        mark = _MARKS.get(setting.applies, "") if setting.name in self._changed else ""
        row = Content(f" {setting.name:<26} {value:<27}")
        return row + f"{source:<13}{mark}"  # in no colour of its own: the row may be marked

    def _draw_words(self) -> None:
        n_open = sum(SETTINGS[name].applies in _MARKS for name in self._changed)
        waits = f"   {n_open} wait for a reload or restart" if n_open else ""
        self.put("top", Content.styled(f" Settings   {self._file}{waits}", "bold"))
        if self._problem is not None:
            error = self._problem
            words = f"{self._glyphs.bad} {error.title}  {error.code}\n{error.cause}\nDo: {error.do}"
            self.put("words", Content.styled(clean_lines(words), "$status-bad"))
            return
        setting = self.setting
        locked = ""
        source = self._loaded.source_of(setting.name) if self._loaded else None
        if source is not None and source.is_locked:
            locked = f"\nSet by {source.name}, which overrides what is saved here."
        default = setting.show(setting.default) or "empty"
        words = (
            f"{setting.help}\n{setting.range_words}; default {default}; "
            f"counts: {setting.applies.value}{locked}"
        )
        self.put("words", Content(words))

    # -- changing --------------------------------------------------------------------------------

    def on_option_list_option_highlighted(self, _event: OptionList.OptionHighlighted) -> None:
        self._problem = None
        self._draw_words()

    def on_option_list_option_selected(self, _event: OptionList.OptionSelected) -> None:
        field = self.query_one("#value", Input)
        value = self._value(self.setting)
        shown = self.setting.show(value)
        field.value = "" if self.setting.is_secret else shown
        field.password = self.setting.is_secret
        field.display = True
        field.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if self._save(event.value):
            self._close_field()

    def _close_field(self) -> None:
        self.query_one("#value", Input).display = False
        self.list.focus()

    def _save(self, value: Any) -> bool:
        """Save; a value that cannot be is refused under the list, and the field stays open."""
        setting = self.setting
        try:
            config.save_setting(self._file, setting.name, value)
        except MoetError as error:
            self._problem = error
            self._draw_words()
            return False
        self._changed.add(setting.name)
        self.fill()
        self.post_message(self.Saved(setting.name))
        return True

    def action_step(self, by: int) -> None:
        """Go on to the next choice of a setting that has some."""
        setting = self.setting
        choices = setting.choices or (("false", "true") if setting.kind is bool else ())
        if not choices:
            self.notify("Enter changes this one.")
            return
        now = setting.show(self._value(setting))
        at = choices.index(now) if now in choices else 0
        self._save(choices[(at + by) % len(choices)])

    def action_reset(self) -> None:
        """Back to the default."""
        self._save(None)

    async def action_back(self) -> None:
        """Leave the field, then the screen."""
        if self.query_one("#value", Input).display:
            self._problem = None
            self._close_field()
            self._draw_words()
        else:
            await self.run_action("app.go('chat')")


def clean_lines(text: str) -> str:
    """Lines without anything a terminal would obey."""
    return "\n".join(clean_line(line, 300) for line in text.splitlines())
