"""The Settings screen: every setting of the schema, where its value comes from, when it counts.

There is no list of its own: rows, help, ranges and checks come from `settings.SETTINGS`. Each
change is saved at once. UI thread.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, OptionList

from moet_desk import config
from moet_desk.config import Loaded, SourceKind
from moet_desk.errors import MoetError
from moet_desk.settings import SETTINGS, Applies, Setting
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.filter_line import FilterLine, matches
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
        Binding("u", "undo", "Undo", id="settings.undo"),
        Binding("slash", "filter", "Search", id="settings.filter"),
        Binding("escape", "back", "Back", id="settings.back"),
    ]

    def __init__(self, config_file: Path, glyphs: Glyphs, *, plain: bool) -> None:
        super().__init__(glyphs, plain=plain)
        self._file = config_file
        self._loaded: Loaded | None = None
        self._shown: tuple[Setting, ...] = _ALL
        self._changed: set[str] = set()  # here, since the start
        self._undo: list[
            tuple[str, Any]
        ] = []  # names and what stood in the file before, newest last
        self._problem: MoetError | None = None

    def more(self) -> ComposeResult:
        yield FilterLine(self.fill, self.focus_list)
        yield Input(id="value", compact=True)

    def fill(self) -> None:
        try:
            self._loaded, self._problem = config.load(self._file), None
        except MoetError as error:
            self._problem = error
        marked, wanted = self.setting, self.query_one(FilterLine).text
        self._shown = tuple(s for s in _ALL if matches(wanted, s.name, s.help))
        self.set_rows([self._row(setting) for setting in self._shown])
        if marked in self._shown:
            self.list.highlighted = self._shown.index(marked)
        self._draw_words()

    @property
    def setting(self) -> Setting | None:
        """The one under the cursor."""
        at = self.list.highlighted or 0
        return self._shown[at] if at < len(self._shown) else None

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
        undo = "   U takes the last change back" if self._undo else ""
        self.put("top", Content.styled(f" Settings{waits}{undo}   {self._file}", "bold"))
        if self._problem is not None:
            error = self._problem
            words = f"{self._glyphs.bad} {error.title}  {error.code}\n{error.cause}\nDo: {error.do}"
            self.put("words", Content.styled(clean_lines(words), "$status-bad"))
            return
        setting = self.setting
        if setting is None:
            self.put("words", Content(_not_found(self.query_one(FilterLine).text)))
            return
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
        setting = self.setting
        if setting is None:
            return
        field = self.query_one("#value", Input)
        field.value = "" if setting.is_secret else setting.show(self._value(setting))
        field.password = setting.is_secret
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
        if setting is None:
            return False
        try:
            before = self._in_file(setting)
            config.save_setting(self._file, setting.name, value)
        except MoetError as error:
            self._problem = error
            self._draw_words()
            return False
        self._undo.append((setting.name, before))
        self._changed.add(setting.name)
        self.fill()
        self.post_message(self.Saved(setting.name))
        return True

    def _in_file(self, setting: Setting) -> Any:
        """What the file says, None if nothing; the environment may say another thing."""
        loaded = config.load(self._file, environment={})
        is_there = loaded.source_of(setting.name).kind is SourceKind.FILE
        return config.read_value(loaded.settings, setting.name) if is_there else None

    def action_step(self, by: int) -> None:
        """Go on to the next choice of a setting that has some."""
        setting = self.setting
        if setting is None:
            return
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

    def action_undo(self) -> None:
        """Put back what stood in the file before the last change."""
        if not self._undo:
            self.notify("Nothing was changed here since the start.")
            return
        name, before = self._undo[-1]
        try:
            config.save_setting(self._file, name, before)
        except MoetError as error:
            self._problem = error
            self._draw_words()
            return
        self._undo.pop()
        if all(name != other for other, _ in self._undo):
            self._changed.discard(name)
        self.query_one(FilterLine).action_close()
        self.list.highlighted = [setting.name for setting in _ALL].index(name)
        self.notify(f"{name} is as it was.")

    def action_filter(self) -> None:
        """Show only settings with certain words in their name or help."""
        self.query_one(FilterLine).open()

    async def action_back(self) -> None:
        """Leave the field, then the screen."""
        if self.query_one("#value", Input).display:
            self._problem = None
            self._close_field()
            self._draw_words()
        else:
            await self.run_action("app.go('chat')")


def _not_found(wanted: str) -> str:
    close = difflib.get_close_matches(wanted, list(SETTINGS), n=1, cutoff=0.4)
    guess = f" Did you mean {close[0]}?" if close else ""
    return f'No setting has "{clean_line(wanted, 40)}" in its name or help.{guess}'


def clean_lines(text: str) -> str:
    """Lines without anything a terminal would obey."""
    return "\n".join(clean_line(line, 300) for line in text.splitlines())
