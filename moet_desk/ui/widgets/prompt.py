"""The prompt: a text area of up to eight rows; Enter sends, Ctrl+J is a new line. UI thread."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from moet_desk.ui.attachments import is_long
from moet_desk.ui.widgets.text_field import TextField

_IN_ORDER = frozenset({"chat.send", "chat.newline"})


class Prompt(TextField):
    """Where messages are written. Posts `Sent`, `Scrolled`, `Pasted` and `ErasedBehind`.

    A sent text leaves the prompt at once, so that what is typed next is not lost; `give_back` puts
    it in front again if it could not be taken.
    """

    DEFAULT_CSS = """
    Prompt {
        height: auto; max-height: 8; min-height: 3; border: none; padding: 0 1 0 0;
        background: $background; &:focus { border: none; background-tint: $background 0%; }
    }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send", id="chat.send", show=False),
        Binding(
            "ctrl+j,alt+enter,shift+enter", "newline", "New line", id="chat.newline", show=False
        ),
        Binding(
            "pageup", "page(-1)", "Read up", id="chat.page_up", priority=True, show=False
        ),
        Binding(
            "pagedown", "page(1)", "Read down", id="chat.page_down", priority=True, show=False
        ),
    ]  # fmt: skip

    class Sent(Message):
        """Enter was pressed. The text may be empty: files may be beside it."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Pasted(Message):
        """A text was pasted that is too long to stand here."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class ErasedBehind(Message):
        """Backspace at the very beginning."""

    class Scrolled(Message):
        """The reader wants to move through the chat by windows."""

        def __init__(self, pages: int) -> None:
            super().__init__()
            self.pages = pages

    def __init__(self, *, blink: bool) -> None:
        super().__init__(
            soft_wrap=True,
            tab_behavior="focus",
            placeholder="Ask anything. Enter sends, Ctrl+J new line, / commands",
            highlight_cursor_line=False,
        )
        self.cursor_blink = blink

    async def _on_paste(self, event: events.Paste) -> None:
        """A megabyte in a text area takes seconds to lay out, and nobody would read it there."""
        if is_long(event.text):
            event.stop()
            event.prevent_default()
            self.post_message(self.Pasted(event.text))
        else:
            await super()._on_paste(event)

    def action_paste(self) -> None:
        """Paste what was copied in the app."""
        text = self.app.clipboard
        if is_long(text):
            self.post_message(self.Pasted(text))
        else:
            super().action_paste()

    def action_delete_left(self) -> None:
        """Backspace; with nothing before the caret it is told."""
        if self.cursor_location == (0, 0) and self.selection.is_empty:
            self.post_message(self.ErasedBehind())
        super().action_delete_left()

    async def _on_key(self, event: events.Key) -> None:
        """Send and new line in the order of the keys.

        A priority binding would act at once, while characters typed just before still wait in this
        widget's queue: text and Enter in one burst (a paste from another program, a fast typist on
        a slow line) sent only the first letters.
        """
        active = None if event.is_printable else self.screen.active_bindings.get(event.key)
        if active is None or active.node is not self or active.binding.id not in _IN_ORDER:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()
        await self.run_action(active.binding.action)

    def action_send(self) -> None:
        self.post_message(self.Sent(self.text.strip("\n") if self.text.strip() else ""))
        if self.text.strip():
            self.load_text("")

    def action_newline(self) -> None:
        self.insert("\n")

    def action_page(self, pages: int) -> None:
        self.post_message(self.Scrolled(pages))

    def give_back(self, text: str) -> None:
        """Put a text that could not be sent before what was typed since."""
        self.replace_text(f"{text}\n{self.text}" if self.text else text)

    def replace_text(self, text: str) -> None:
        """Put a text in, caret at its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)
