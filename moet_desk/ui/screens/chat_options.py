"""How the answers of one chat are asked for: system prompt, quality, sampling. UI thread."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static, TextArea

from moet_desk.engine.handle import ModelInfo, Quality
from moet_desk.ui.chat_records import Wishes
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.text_field import TextField
from moet_desk.ui.wish_fields import FIELDS, QUALITIES, WishField, effort_choices


class Choice(Button):
    """A word of several; Enter, Space and the arrows go on to the next one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,space", "step(1)", "Next", id="options.next", show=False),
        Binding("left", "step(-1)", "Before", id="options.before", show=False),
    ]

    def __init__(self, choices: tuple[str, ...], value: str, *, glyphs: Glyphs, name: str) -> None:
        super().__init__("", id=name, compact=True)
        self._choices, self.value, self._glyphs = choices, value, glyphs
        self._draw()

    def _draw(self) -> None:
        word = self.value or "as the model does"
        self.label = Content(f"{self._glyphs.left} {word} {self._glyphs.right}")

    def action_step(self, by: int) -> None:
        at = self._choices.index(self.value) + by
        self.value = self._choices[at % len(self._choices)]
        self._draw()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        self.action_step(1)


class ChatOptions(ModalScreen[dict[str, Any] | None]):
    """Closes with the wishes that were changed, None for none."""

    DEFAULT_CSS = """
    ChatOptions { align: center middle; }
    ChatOptions > Vertical {
        width: 74; max-width: 100%; height: auto; max-height: 100%; padding: 0 1;
        background: $surface; border: round $primary;
    }
    ChatOptions VerticalScroll { height: auto; max-height: 100%; }
    ChatOptions TextArea {
        height: 4; border: none; padding: 0 1; margin-bottom: 1; background: $panel;
        &:focus { border: none; }
    }
    ChatOptions .row { height: 1; }
    ChatOptions .label { width: 16; }
    ChatOptions .label.-choice { width: 15; }
    ChatOptions .help { width: 1fr; color: $dim; padding-left: 2; }
    ChatOptions Input { width: 14; border: none; height: 1; padding: 0 1; background: $panel; }
    ChatOptions Choice { width: 26; text-align: left; content-align: left middle; }
    ChatOptions #wrong { height: auto; color: $status-bad; }
    ChatOptions .buttons { height: auto; align-horizontal: right; padding-top: 1; }
    ChatOptions .buttons Button { margin-left: 2; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Leave", id="options.close"),
        Binding("ctrl+s", "save", "Save", id="options.save", priority=True),
        Binding("down", "app.focus_next", show=False, id="options.down"),
        Binding("up", "app.focus_previous", show=False, id="options.up"),
    ]

    def __init__(self, wishes: Wishes, model: ModelInfo | None, *, glyphs: Glyphs) -> None:
        super().__init__()
        self._wishes = wishes
        self._model = model
        self._glyphs = glyphs

    def compose(self) -> ComposeResult:
        wishes, glyphs = self._wishes, self._glyphs
        with Vertical() as frame:
            frame.border_title = "Options of this chat"
            frame.border_subtitle = "Ctrl+S saves, Esc leaves all as it was"
            with VerticalScroll(can_focus=False):
                yield Static("What the model is told before the first message", markup=False)
                yield TextField(
                    wishes.system, id="system", tab_behavior="focus", highlight_cursor_line=False
                )
                quality = Choice(QUALITIES, wishes.quality.value, glyphs=glyphs, name="quality")
                yield from self._row("Quality", quality, "which experts answer")
                efforts = effort_choices(self._model, wishes.effort)
                if len(efforts) > 1:
                    effort = Choice(efforts, wishes.effort, glyphs=glyphs, name="effort")
                    yield from self._row("Reasoning", effort, "before it answers")
                for field in FIELDS:
                    value = field.show(getattr(wishes, field.name))
                    entry = Input(value, id=field.name, compact=True, placeholder="the model's")
                    yield from self._row(field.label, entry, field.help)
            yield Static("", id="wrong", markup=False)
            with Horizontal(classes="buttons"):
                yield Button(Content("[ Cancel ]"), id="cancel", compact=True)
                yield Button(Content("[ Save ]"), id="save", compact=True)

    def _row(self, label: str, entry: Choice | Input, words: str) -> ComposeResult:
        with Horizontal(classes="row"):
            kind = "label -choice" if isinstance(entry, Choice) else "label"
            yield Static(label, classes=kind, markup=False)
            yield entry
            yield Static(words, classes="help", markup=False)

    def on_mount(self) -> None:
        self.query_one("#wrong").display = False
        self.query_one("#system").focus()

    def on_input_submitted(self) -> None:
        self.action_save()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "save":
            self.action_save()
        elif event.button.id == "cancel":
            self.action_close()

    def action_close(self) -> None:
        self.dismiss(None)

    def action_save(self) -> None:
        """Close with what was changed; a wrong number is said, and the field gets the focus."""
        wished: dict[str, Any] = {"system": self.query_one("#system", TextArea).text.strip()}
        wished["quality"] = Quality(self.query_one("#quality", Choice).value)
        for effort in self.query("#effort").results(Choice):
            wished["effort"] = effort.value
        for field in FIELDS:
            try:
                wished[field.name] = field.read(self.query_one(f"#{field.name}", Input).value)
            except ValueError as problem:
                self._refuse(field, str(problem))
                return
        self.dismiss(
            {name: value for name, value in wished.items() if value != getattr(self._wishes, name)}
        )

    def _refuse(self, field: WishField, words: str) -> None:
        wrong = self.query_one("#wrong", Static)
        wrong.display = True
        wrong.update(Content(f"{self._glyphs.bad} {words}"))
        self.query_one(f"#{field.name}").focus()
