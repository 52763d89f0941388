"""The list of earlier chats: search, open, delete with a question. UI thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from moet_desk.errors import MoetError
from moet_desk.ui.chat_records import StoredChat
from moet_desk.ui.conversation import Conversation
from moet_desk.ui.text import clean_line
from moet_desk.ui.widgets.gauges import spread
from moet_desk.ui.widgets.problem import ConfirmDialog

_WIDTH = 68


def show_when(when: datetime, now: datetime) -> str:
    """A date for a list: the time today, else the day."""
    local = when.astimezone(now.tzinfo)
    return f"{local:%H:%M}" if local.date() == now.date() else f"{local:%Y-%m-%d}"


@dataclass(frozen=True, slots=True)
class Opened:
    """The chat to open, and what was looked for in it."""

    chat_id: int
    query: str = ""


def found_content(excerpt: str, query: str, width: int) -> Content:
    """One line of a message, with the words that were looked for underlined."""
    line = clean_line(excerpt, width)
    content = Content.styled(f"  {line}", "$dim")
    for word in query.split():
        at = line.lower().find(word.lower())
        if at >= 0:
            content = content.stylize("bold underline", 2 + at, 2 + at + len(word))
    return content


class ChatList(ModalScreen[Opened | None]):
    """Closes with the chat to open, None for none."""

    DEFAULT_CSS = """
    ChatList { align: center middle; }
    ChatList > Vertical {
        width: 74; max-width: 100%; height: 80%; padding: 0 1;
        background: $surface; border: round $primary;
    }
    ChatList Input { border: none; height: 1; margin: 1 0; padding: 0 1; }
    ChatList OptionList { height: 1fr; border: none; padding: 0; background: $surface; }
    ChatList .empty { padding: 1; height: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Close", id="chats.close"),
        Binding("down", "into_list", "Down", id="chats.down", show=False),
        Binding("delete,ctrl+d", "delete", "Delete", id="chats.delete", priority=True),
    ]

    def __init__(
        self, conversation: Conversation, *, now: datetime, on_gone: Callable[[], None]
    ) -> None:
        """`on_gone` is called when the open chat was deleted."""
        super().__init__()
        self._conversation = conversation
        self._on_gone = on_gone
        self._now = now
        self._with_text: set[int] = set()  # chats of which a message holds what is looked for

    def compose(self) -> ComposeResult:
        with Vertical() as frame:
            frame.border_title = "Earlier chats"
            frame.border_subtitle = "Enter opens, Delete deletes, Esc closes"
            yield Input(placeholder="Search titles and text", compact=True)
            yield Static("", classes="empty", markup=False)
            yield OptionList()

    def on_mount(self) -> None:
        self._fill("")
        self.query_one(Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def _fill(self, query: str) -> None:
        try:
            chats = self._conversation.list_chats(query.strip())
        except MoetError as error:
            chats = ()
            self.notify(error.cause, title=error.title, severity="error", markup=False)
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options([self._option(chat, excerpt, query) for chat, excerpt in chats])
        self._with_text = {chat.id for chat, excerpt in chats if excerpt}
        if chats:
            options.highlighted = 0
        empty = self.query_one(".empty", Static)
        empty.display = not chats
        nothing = "No earlier chats. They are kept only on this computer."
        empty.update(Content(f"No chat contains this: {query}" if query else nothing))

    def _option(self, chat: StoredChat, excerpt: str, query: str) -> Option:
        title = clean_line(chat.title or "untitled", _WIDTH - 14)
        when = Content.styled(show_when(chat.updated, self._now), "$dim")
        row = spread(Content(title), when, _WIDTH)
        if excerpt:
            row = Content("\n").join([row, found_content(excerpt, query, _WIDTH - 2)])
        return Option(row, id=str(chat.id))

    def _highlighted(self) -> int | None:
        options = self.query_one(OptionList)
        if options.highlighted is None:
            return None
        option = options.get_option_at_index(options.highlighted)
        return None if option.id is None else int(option.id)

    def on_input_submitted(self) -> None:
        self._open()

    def on_option_list_option_selected(self) -> None:
        self._open()

    def _open(self) -> None:
        chat_id = self._highlighted()
        query = self.query_one(Input).value.strip()
        in_text = query if chat_id in self._with_text else ""
        self.dismiss(None if chat_id is None else Opened(chat_id, in_text))

    def action_close(self) -> None:
        self.dismiss(None)

    def action_into_list(self) -> None:
        self.query_one(OptionList).focus()

    def action_delete(self) -> None:
        chat_id = self._highlighted()
        if chat_id is None:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                was_open = chat_id == self._conversation.chat_id
                try:
                    self._conversation.delete(chat_id)
                except MoetError as error:
                    self.notify(error.cause, title=error.title, severity="error", markup=False)
                if was_open:
                    self._on_gone()
                self._fill(self.query_one(Input).value)

        dialog = ConfirmDialog(
            "Delete this chat?",
            body="Its messages are removed from this computer. This cannot be undone.",
            act="Delete",
            keep="Keep",
        )
        self.app.push_screen(dialog, answered)
