"""The Chat screen: what keys, commands and buttons do. UI thread."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widgets import Input, Markdown

from moet_desk.engine.handle import Quality
from moet_desk.errors import MoetError
from moet_desk.store.durable import write_new
from moet_desk.ui.attachments import Attachment, pasted, read_attachment
from moet_desk.ui.chat_records import Draft, Sent, Turn
from moet_desk.ui.commands import Command, Verb, parse, parse_temperature
from moet_desk.ui.export import to_json, to_markdown
from moet_desk.ui.quality_words import gate_in_use, quality_words
from moet_desk.ui.screens.attach import AttachDialog
from moet_desk.ui.screens.chat_list import ChatList, Opened
from moet_desk.ui.screens.chat_options import ChatOptions
from moet_desk.ui.screens.chat_view import FORGET, RESTART, RETRY, ChatView
from moet_desk.ui.text import code_blocks
from moet_desk.ui.widgets.blocks import AnswerBlock, Block
from moet_desk.ui.widgets.find_line import FindLine, find_turns
from moet_desk.ui.widgets.folds import ThoughtFold
from moet_desk.ui.widgets.problem import ProblemPanel
from moet_desk.ui.widgets.prompt import Prompt


class ChatScreen(ChatView):
    """See the module's paragraph."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", id="chat.stop"),
        Binding("ctrl+n", "new", "New", id="chat.new"),
        Binding("ctrl+l", "chats", "Chats", id="chat.list"),
        Binding("ctrl+r", "retry", "Answer again", id="chat.retry", show=False),
        Binding("f9", "quality", "Quality", id="chat.quality"),
        Binding("ctrl+b", "rail", "Rail", id="chat.rail", show=False),
        Binding("ctrl+end", "follow", "Go to the end", id="chat.follow", show=False),
        Binding("ctrl+home", "first", "First message", id="chat.first", priority=True, show=False),
        Binding("alt+up", "block(-1)", "Message before", id="chat.block_up", show=False),
        Binding("alt+down", "block(1)", "Message behind", id="chat.block_down", show=False),
        Binding("ctrl+t", "thoughts", "Reasoning", id="chat.thinking", show=False),
        Binding("ctrl+f", "find", "Find", id="chat.find", priority=True, show=False),
        Binding("ctrl+o", "attach", "Attach a file", id="chat.attach", show=False),
        Binding("ctrl+s", "options", "Options of this chat", id="chat.options", show=False),
    ]

    _code_at = 0  # which block of code of the message under the cursor is copied next
    _code_of: Turn | None = None
    _found: list[Turn]
    _found_at = 0

    # -- sending -------------------------------------------------------------------------------

    async def on_prompt_sent(self, event: Prompt.Sent) -> None:
        command = parse(event.text)
        if isinstance(command, str):
            self.notify(command, markup=False, severity="warning")
            self.prompt.give_back(event.text)
        elif isinstance(command, Command):
            await self._obey(command)
        else:
            slashes = event.text.startswith("//")
            await self._send(event.text.removeprefix("/") if slashes else event.text)
        self.save_draft()

    async def _send(self, text: str) -> None:
        draft = Draft(text, self.chips.files)
        if not draft:
            return
        self.chips.put(())
        if not await self.ask(draft.text, draft.files):
            self._give_back(draft)

    async def ask(self, text: str, files: tuple[Attachment, ...] = ()) -> bool:
        """Send a message; False if it could not be taken, with a toast that says why."""
        try:
            if self._edited is not None:
                return await self._send_version(self._edited, Draft(text, files))
            sent = self._conversation.send(text, files)
        except MoetError as error:
            self.toast(error)
            return False
        match sent:
            case Sent.REFUSED:
                self.notify("One message is already waiting.", severity="warning")
            case Sent.QUEUED:
                self._draw_queued()
            case Sent.STARTED:
                await self._draw_turns()
        return sent is not Sent.REFUSED

    async def _send_version(self, turn: Turn, draft: Draft) -> bool:
        if not self._conversation.edit(turn, draft):
            self.notify("This can be sent when no answer is being written.", severity="warning")
            return False
        self._leave_edit(since=self._written())
        await self._draw_turns()
        return True

    # -- events --------------------------------------------------------------------------------

    def on_prompt_scrolled(self, event: Prompt.Scrolled) -> None:
        self.transcript.page(event.pages)
        self.call_after_refresh(self._draw_below)

    def on_prompt_pasted(self, event: Prompt.Pasted) -> None:
        number = sum(file.name.startswith("pasted text") for file in self.chips.files) + 1
        try:
            self.chips.add(pasted(event.text, number))
        except MoetError as error:
            self.toast(error)

    def on_prompt_erased_behind(self) -> None:
        self.chips.take_away()

    async def on_block_moved(self, event: Block.Moved) -> None:
        await self._move(event.turn, event.by)

    async def on_problem_panel_chosen(self, event: ProblemPanel.Chosen) -> None:
        match event.action:
            case action if action == RETRY:
                await self.action_retry()
            case action if action == RESTART:
                self._bridge.restart()
                await event.panel.remove()
            case action if action == FORGET:
                n_turns = self._conversation.forget_oldest()
                self.notify(f"{n_turns} oldest messages are kept, but no longer sent.")
                await self.action_retry()
            case _:
                await self.action_new()

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        event.stop()
        self.notify(f"Link, not opened: {event.href}", markup=False, timeout=8)

    async def on_click(self, event: object) -> None:
        widget = getattr(event, "widget", None)
        if widget is not None and widget.id == "below":
            await self.action_follow()

    # -- commands ------------------------------------------------------------------------------

    async def _obey(self, command: Command) -> None:
        conversation, argument = self._conversation, command.argument
        match command.verb:
            case Verb.NEW | Verb.CLEAR:
                await self.action_new()
            case Verb.CHATS:
                self.action_chats()
            case Verb.RETRY:
                await self.action_retry()
            case Verb.EDIT:
                self.action_edit()
            case Verb.FILE:
                self._attach_file(argument) if argument else self.action_attach()
            case Verb.FIND:
                self.query_one(FindLine).open(argument)
            case Verb.OPTIONS:
                self.action_options()
            case Verb.COPY:
                self.action_copy_answer()
            case Verb.EXPORT:
                self._export(argument or "md")
            case Verb.HELP:
                await self.run_action("app.help")
            case Verb.SYSTEM:
                conversation.wish(system=argument)
                told = "The model is told this from the next message on."
                self.notify(told if argument else "The model is told nothing before.")
            case Verb.TEMPERATURE:
                conversation.wish(temperature=parse_temperature(argument))
                self.notify(f"Temperature: {argument or 'as the model recommends'}")
            case Verb.FAST | Verb.BALANCED | Verb.EXACT | Verb.QUALITY:
                self._set_quality(Quality(argument or command.verb.value))

    def _export(self, kind: str) -> None:
        """Save the chat in the working folder, in a file that was not there before."""
        conversation, now = self._conversation, self._bridge.clock.wall()
        make = to_json if kind == "json" else to_markdown
        model, system = self._bridge.snapshot().model, conversation.wishes.system
        text = make(conversation.turns, model=model, system=system)
        path = Path.cwd() / f"chat-{now:%Y%m%d-%H%M%S}.{kind}"
        try:
            write_new(path, text)
        except MoetError as problem:
            self.toast(problem)
            return
        self.notify(f"Saved as {path}", markup=False, timeout=10)

    def action_export(self, kind: str = "md") -> None:
        """Save the chat as Markdown or JSON."""
        self._export(kind)

    def _set_quality(self, quality: Quality) -> None:
        info = self._bridge.model()
        if info is not None and not info.has_qualities:
            self.notify("The server decides how it computes.")
            return
        self._conversation.wish(quality=quality)
        gate = gate_in_use(self._bridge.model(), self._conversation.wishes.gate)
        self.notify(f"From the next message on: {quality_words(quality, gate)}.", markup=False)

    def action_quality(self) -> None:
        """Go on to the next quality; fast follows exact."""
        order = list(Quality)
        at = order.index(self._conversation.wishes.quality)
        self._set_quality(order[(at + 1) % len(order)])

    def action_options(self) -> None:
        """System prompt and sampling of this chat."""

        def chosen(changes: dict[str, object] | None) -> None:
            if changes:
                self._conversation.wish(**changes)
                self.notify("From the next message of this chat on.")

        panel = ChatOptions(self._conversation.wishes, self._bridge.model(), glyphs=self._glyphs)
        self.app.push_screen(panel, chosen)

    def action_attach(self) -> None:
        """Choose a file that goes with the next message."""

        def chosen(path: Path | None) -> None:
            if path is not None:
                self._attach_file(str(path))

        self.app.push_screen(AttachDialog(Path.cwd(), glyphs=self._glyphs), chosen)

    def _attach_file(self, path: str) -> None:
        try:
            self.chips.add(read_attachment(Path(path).expanduser()))
        except MoetError as error:
            self.toast(error)

    # -- the chat ------------------------------------------------------------------------------

    async def action_stop(self) -> None:
        """Take the waiting message back, else leave a version, else stop the answer, else go to
        the prompt.
        """
        if self._unqueue():
            return
        if self._edited is not None:
            self._leave_edit()
        elif not self._conversation.stop():
            self.transcript.set_cursor(None)
        self.prompt.focus()

    async def action_new(self) -> None:
        self.save_draft()
        self._conversation.new()
        await self._show_other_chat()

    async def _show_other_chat(self) -> None:
        self._edited = None
        self._found = []  # of the chat that was open
        self.query_one(FindLine).display = False
        self._put_draft(self._conversation.draft)
        await self._draw_chat()
        self.prompt.focus()

    def action_chats(self) -> None:
        async def chosen(opened: Opened | None) -> None:
            if opened is not None and opened.chat_id != self._conversation.chat_id:
                self.save_draft()
                try:
                    self._conversation.open(opened.chat_id)
                except MoetError as error:
                    self.toast(error)
                await self._show_other_chat()
            elif self._conversation.chat_id is None and not self.busy:
                await self._draw_chat()  # the open one was deleted
            if opened is not None and opened.query:
                self.query_one(FindLine).open(opened.query)

        now = self._bridge.clock.wall()
        chats = ChatList(self._conversation, now=now, on_gone=self._keep_for_new)
        self.app.push_screen(chats, chosen)

    def _keep_for_new(self) -> None:
        """The open chat was deleted: what the prompt holds joins the draft of the new one."""
        if self._edited is not None:
            self._leave_edit()
        self._give_back(self._conversation.draft)
        self.save_draft()

    async def action_retry(self) -> None:
        """Answer the last message again."""
        await self._retry(None)

    async def action_retry_here(self) -> None:
        """Answer the message under the cursor again."""
        await self._retry(self.transcript.cursor)

    async def _retry(self, turn: Turn | None) -> None:
        try:
            again = self._conversation.retry(turn)
        except MoetError as error:
            self.toast(error)
            return
        if again:
            await self._draw_turns()
            if turn is not None:
                self.transcript.set_cursor(self._conversation.turns[-1])
        else:
            self.notify("There is nothing to answer again right now.")

    # -- one message ---------------------------------------------------------------------------

    async def action_block(self, by: int) -> None:
        """Move the block cursor."""
        self.transcript.focus(scroll_visible=False)
        await self.transcript.action_cursor(by)

    def action_copy_block(self) -> None:
        """Copy the message under the cursor, or the last answer."""
        turn = self.transcript.cursor
        if turn is None:
            self.action_copy_answer()
        else:
            self._copy(turn.text, "The message")

    def action_copy_answer(self) -> None:
        answers = [turn for turn in self._conversation.turns if turn.role == "assistant"]
        if answers:
            self._copy(answers[-1].text, "The last answer")

    def action_copy_code(self) -> None:
        """Copy a block of code of the message under the cursor, each time the next one."""
        answers = [turn for turn in self._conversation.turns if turn.role == "assistant"]
        turn = self.transcript.cursor or (answers[-1] if answers else None)
        codes = [] if turn is None else code_blocks(turn.text)
        if not codes:
            self.notify("There is no block of code in this message.")
            return
        at = self._code_at % len(codes) if turn is self._code_of else 0
        self._code_of, self._code_at = turn, at + 1
        self._copy(codes[at], f"Code {at + 1} of {len(codes)}" if len(codes) > 1 else "The code")

    def _copy(self, text: str, what: str) -> None:
        self.app.copy_to_clipboard(text)
        self.notify(f"{what} is on the clipboard, if the terminal allows it.")

    def action_edit(self) -> None:
        """Write another version of the message under the cursor, or of the last one."""
        turns = self._conversation.turns
        cursor = self.transcript.cursor
        end = turns.index(cursor) + 1 if cursor in turns else len(turns)
        turn = next((turn for turn in reversed(turns[:end]) if turn.role == "user"), None)
        if turn is None:
            self.notify("There is no message of yours to write again.")
            return
        self._put_by = self._unsent()
        self._edited = turn
        self._put_draft(Draft(turn.text, turn.files))
        self._draw_queued()
        self.prompt.focus()

    def _leave_edit(self, *, since: Draft | None = None) -> None:
        """Give the prompt what it held before, and what was written since a version was sent."""
        self._edited = None
        self._put_draft(self._put_by + (since or Draft()))
        self._draw_queued()

    async def action_version(self, by: int) -> None:
        """Show another version of the message under the cursor; what follows it comes along."""
        if self.transcript.cursor is not None:
            await self._move(self.transcript.cursor, by)

    async def _move(self, turn: Turn, by: int) -> None:
        if turn not in self._conversation.turns:
            return  # a second click, on a block that is about to leave
        at = self._conversation.turns.index(turn)
        if self._conversation.move(turn, by):
            await self._draw_turns()
            await self.transcript.show_at(self._conversation.turns[at])
        elif self.busy:
            self.notify("Other versions can be shown when the answer has ended.")

    async def action_thoughts(self) -> None:
        """Unfold all reasoning, or fold it."""
        self._shows_thoughts = not self._shows_thoughts
        for fold in self.query(ThoughtFold):
            await fold.open(self._shows_thoughts)

    # -- search --------------------------------------------------------------------------------

    def action_find(self) -> None:
        """Search in this chat."""
        self.query_one(FindLine).open()

    async def on_find_line_changed(self, event: FindLine.Changed) -> None:
        self._found = find_turns(self._conversation.all_turns, event.query_text)
        self._found_at = len(self._found) - 1
        await self._show_found()

    async def on_find_line_wanted(self, event: FindLine.Wanted) -> None:
        if self._found:
            self._found_at = (self._found_at + event.by) % len(self._found)
        await self._show_found()

    async def _show_found(self) -> None:
        line = self.query_one(FindLine)
        if not self._found:
            line.say("nothing found" if line.query_one(Input).value.strip() else "")
            return
        turn = self._found[self._found_at]
        line.say(f"{self._found_at + 1} of {len(self._found)}")
        on_path = turn in self._conversation.turns
        if not self._conversation.go_to(turn.id):
            line.say(f"{self._found_at + 1} of {len(self._found)}, in another version")
            return
        if not on_path:
            await self._draw_turns()
        await self.transcript.show_at(turn)
        await self.transcript.seek(turn, line.query_one(Input).value)

    async def on_find_line_closed(self) -> None:
        self.prompt.focus()
        await self.transcript.seek(None)

    # -- the view ------------------------------------------------------------------------------

    def action_rail(self) -> None:
        self.toggle_class("-no-rail")

    async def action_mark_reruns(self) -> None:
        """Underline what balanced answers made again, or stop doing so."""
        await self.show_reruns(not self._marks_reruns)
        said = "are underlined" if self._marks_reruns else "are not underlined any more"
        self.notify(f"Words of balanced answers that were made again {said}.")

    async def show_reruns(self, shown: bool) -> None:
        """Underline them, or do not."""
        self._marks_reruns = shown
        for block in self.query(AnswerBlock):
            await block.show_marks(shown)

    async def action_follow(self) -> None:
        """Go to the end and follow the text again."""
        await self.transcript.to_end()
        self.call_after_refresh(self._draw_below)

    async def action_first(self) -> None:
        """Go to the first message."""
        await self.transcript.first()
        self.call_after_refresh(self._draw_below)
