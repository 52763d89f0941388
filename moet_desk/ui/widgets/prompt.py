"""The prompt: a text area of up to eight rows; Enter sends, Ctrl+J is a new line. UI thread."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea


class Prompt(TextArea):
    """Where messages are written. Posts `Sent` and `Scrolled`; keeps the text until told."""

    DEFAULT_CSS = """
    Prompt {
        height: auto; max-height: 8; min-height: 3; border: none; padding: 0 1 0 0;
        background: $background; &:focus { border: none; background-tint: $background 0%; }
    }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send", id="chat.send", priority=True, show=False),
        Binding(
            "ctrl+j,alt+enter,shift+enter", "newline", "New line", id="chat.newline",
            priority=True, show=False,
        ),
        Binding(
            "pageup", "page(-1)", "Read up", id="chat.page_up", priority=True, show=False
        ),
        Binding(
            "pagedown", "page(1)", "Read down", id="chat.page_down", priority=True, show=False
        ),
    ]  # fmt: skip

    class Sent(Message):
        """Enter was pressed on a prompt that holds more than blanks."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

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

    def action_send(self) -> None:
        if self.text.strip():
            self.post_message(self.Sent(self.text.strip("\n")))

    def action_newline(self) -> None:
        self.insert("\n")

    def action_page(self, pages: int) -> None:
        self.post_message(self.Scrolled(pages))

    def replace_text(self, text: str) -> None:
        """Put a text in, caret at its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)
