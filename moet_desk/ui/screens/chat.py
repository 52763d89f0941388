"""The Chat screen: transcript, prompt, loading block, rail; it turns keys into what is sent.

What a chat is and when it is saved is decided by `Conversation`; this screen draws it. Text is
pulled even while another screen is in front, and drawn when this one comes back. UI thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, Markdown, Static, TextArea

from moet_desk.engine.handle import Quality
from moet_desk.errors import MoetError, fail
from moet_desk.marked_text import MarkedText
from moet_desk.telemetry import EngineSnapshot
from moet_desk.ui.bridge import Bridge, FlushPace, Phase
from moet_desk.ui.chat_lines import closing_line, no_model_content, welcome_content
from moet_desk.ui.commands import Command, Verb, parse, parse_temperature
from moet_desk.ui.conversation import Conversation, Sent, Turn
from moet_desk.ui.desk import JobView
from moet_desk.ui.export import to_json, to_markdown
from moet_desk.ui.quality_words import again_words, gate_in_use, quality_words
from moet_desk.ui.screens.chat_list import ChatList
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.frame import SmallWindow, TabLine
from moet_desk.ui.widgets.gauges import (
    History,
    LoadingBlock,
    Rail,
    StatusLine,
    show_number,
    show_percent,
)
from moet_desk.ui.widgets.job_lines import JobLines
from moet_desk.ui.widgets.problem import ProblemPanel
from moet_desk.ui.widgets.prompt import Prompt
from moet_desk.ui.widgets.transcript import AnswerBlock, MessageBlock, Transcript

DRAFT_DELAY_S = 0.3
SHOWN_TURNS = 40  # older ones are kept, not drawn: each costs a few widgets

_TOO_LONG = ("MD-API-03", "MD-CONN-05")
_RETRY, _RESTART, _FORGET, _NEW = "retry", "restart", "forget", "new"


class ChatScreen(Screen[None]):
    """See the module's paragraph."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", id="chat.stop"),
        Binding("ctrl+n", "new", "New", id="chat.new"),
        Binding("ctrl+l", "chats", "Chats", id="chat.list"),
        Binding("ctrl+r", "retry", "Answer again", id="chat.retry", show=False),
        Binding("f9", "quality", "Quality", id="chat.quality"),
        Binding("ctrl+b", "rail", "Rail", id="chat.rail", show=False),
        Binding("ctrl+end", "follow", "Go to the end", id="chat.follow", show=False),
    ]

    def __init__(
        self,
        conversation: Conversation,
        bridge: Bridge,
        *,
        glyphs: Glyphs,
        history: History,
        plain: bool,
        blink: bool,
        marks_reruns: bool = False,
    ) -> None:
        super().__init__()
        self._marks_reruns = marks_reruns
        self._conversation = conversation
        self._bridge = bridge
        self._drawn_once = False
        self._glyphs = glyphs
        self._history = history
        self._plain = plain
        self._blink = blink
        self.pace = FlushPace()
        self._answer: AnswerBlock | None = None
        self._undrawn = MarkedText()
        self._is_placing = False  # blocks of a new turn are on their way to the screen
        self._draft_due_s: float | None = None
        self._loading_drawn: Phase | None = None
        self._rail_wanted = True

    def compose(self) -> ComposeResult:
        yield TabLine("chat", plain=self._plain)
        with Horizontal(id="middle"):
            with Vertical(id="main"):
                yield LoadingBlock(self._glyphs)
                yield Static("", id="welcome", markup=False)
                yield Transcript()
                yield Static("", id="below", markup=False)
            yield Rail(self._glyphs, self._history)
        yield Static("", id="queued", markup=False)
        with Horizontal(id="ask"):
            yield Static(Content(self._glyphs.prompt), id="mark", markup=False)
            yield Prompt(blink=self._blink)
        yield JobLines(self._glyphs)
        yield StatusLine(self._glyphs)
        yield Footer(show_command_palette=False)
        yield SmallWindow(self._glyphs)

    async def on_mount(self) -> None:
        self._drawn_once = True
        self.query_one(Prompt).focus()
        self.query_one(Prompt).replace_text(self._conversation.draft)
        await self._draw_chat()
        self.show(self._bridge.snapshot(), notes=())

    # -- timers --------------------------------------------------------------------------------

    async def pull_text(self) -> None:
        """Take and draw new text; called ten times a second."""
        if not self._drawn_once or self._is_placing:  # the text waits where it is
            return
        conversation = self._conversation
        self._save_draft_if_due()
        if not self.pace.due(self._bridge.clock.monotonic()):
            return
        if conversation.busy:
            pulled = conversation.pull()
            self._undrawn += pulled.text
            if self.is_current or pulled.ended:
                await self._flush()
            if pulled.ended:
                await self._end_answer()
        await self._send_queued()
        self._draw_below()

    async def _send_queued(self) -> None:
        waiting = self._conversation.queued
        try:
            sent = self._conversation.take_queued()
        except MoetError as error:
            self.toast(error)
            self.query_one(Prompt).replace_text(waiting or "")
            self._draw_queued()
            return
        if sent is not None:
            await self._draw_sent(sent)

    def toast(self, error: MoetError) -> None:
        """Say what went wrong with something that is not an answer."""
        self.notify(
            f"{error.cause}\n{error.do}", title=f"{error.title}  {error.code}",
            severity="error", markup=False, timeout=10,
        )  # fmt: skip

    async def _flush(self) -> None:
        answer, live = self._answer, self._conversation.live
        if answer is None:
            return
        if self._undrawn:
            text, self._undrawn = self._undrawn, MarkedText()
            monotonic = self._bridge.clock.monotonic
            started_s = monotonic()
            await answer.append(text)
            self.call_after_refresh(lambda: self.pace.record(monotonic() - started_s))
        if live is None:
            self._keep_end()
            return
        if live.n_tokens == 0 and live.prompt is not None:
            elapsed_s = self._bridge.clock.monotonic() - live.started_s
            answer.show_reading(live.prompt, elapsed_s=elapsed_s)
        else:
            answer.set_closing(self._live_closing())
        self._keep_end()

    def _keep_end(self) -> None:
        self.call_after_refresh(self.query_one(Transcript).settle)

    def show(
        self, snapshot: EngineSnapshot, *, notes: tuple[str, ...], jobs: Sequence[JobView] = ()
    ) -> None:
        """Draw a snapshot and the jobs; called four times a second while in front."""
        if not self._drawn_once:
            return
        self.query_one(JobLines).show(jobs)
        used = max(self._conversation.context_used, snapshot.context_used if self.busy else 0)
        self.query_one(StatusLine).show(snapshot, context_used=used, notes=notes)
        rail = self.query_one(Rail)
        if rail.display:
            rail.show(snapshot)
        self._draw_start()

    @property
    def busy(self) -> bool:
        """Whether an answer is being made."""
        return self._conversation.busy

    def _save_draft_if_due(self) -> None:
        due_s = self._draft_due_s
        if due_s is not None and self._bridge.clock.monotonic() >= due_s:
            self.save_draft()

    def save_draft(self) -> None:
        """Keep the unsent prompt with its chat now."""
        self._draft_due_s = None
        self._conversation.save_draft(self.query_one(Prompt).text)

    # -- drawing -------------------------------------------------------------------------------

    def _draw_start(self) -> None:
        bridge = self._bridge
        loading = bridge.phase in (Phase.PACKING, Phase.OPENING, Phase.LOADING)
        block = self.query_one(LoadingBlock)
        block.display = loading
        if loading:
            title = (
                "First start: packing the model"
                if bridge.phase is Phase.PACKING
                else (f"Loading {bridge.snapshot().model}".rstrip())
            )
            block.show(
                title, bridge.steps(), elapsed_s=bridge.elapsed_s(), pack_rate=bridge.pack_rate
            )
        if bridge.phase is not self._loading_drawn:
            self._loading_drawn = bridge.phase
            if bridge.phase is Phase.FAILED and bridge.error is not None:
                actions = {_RESTART: "Start the engine again"} if bridge.can_restart else {}
                self.run_worker(self._draw_start_problem(bridge.error, actions))
        self._draw_welcome()

    async def _draw_start_problem(
        self, error: MoetError | Mapping[str, Any], actions: dict[str, str]
    ) -> None:
        panel = ProblemPanel(error, glyphs=self._glyphs, actions=actions)
        await self.query_one(Transcript).mount(panel)
        self.call_after_refresh(self.query_one(Transcript).follow)

    def _draw_welcome(self) -> None:
        welcome = self.query_one("#welcome", Static)
        empty = not self._conversation.turns
        welcome.display = empty and self._bridge.phase in (Phase.READY, Phase.IDLE)
        self.query_one(Transcript).display = not welcome.display
        if welcome.display:
            is_ready = self._bridge.phase is Phase.READY
            model = self._bridge.snapshot().model
            content = welcome_content(model) if is_ready else no_model_content()
            if welcome.content != content:
                welcome.update(content)

    async def _draw_chat(self) -> None:
        """Draw the open chat from its turns."""
        transcript = self.query_one(Transcript)
        await transcript.clear()
        self._answer, self._undrawn = None, MarkedText()
        turns = self._conversation.turns
        hidden = len(turns) - SHOWN_TURNS
        if hidden > 0:
            note = Content(f"  {hidden} earlier messages are kept and not shown here")
            await transcript.mount(Static(note, classes="note", markup=False))
        for turn in turns[-SHOWN_TURNS:]:
            await self._draw_turn(turn)
        self._draw_welcome()
        self.call_after_refresh(transcript.follow)
        self._draw_queued()

    async def _draw_turn(self, turn: Turn) -> None:
        transcript = self.query_one(Transcript)
        when = f"{turn.created.astimezone():%H:%M}"
        if turn.role == "user":
            await transcript.add(MessageBlock("You", when=when, text=turn.text))
            return
        block = self._answer_block(when)
        await transcript.add(block)
        if turn.text:
            await block.set_text(MarkedText(turn.text, turn.marks))
        block.set_closing(closing_line(turn, self._glyphs))
        if "error" in turn.meta:
            await block.show_problem(turn.meta["error"], {_RETRY: "Try again"})

    async def _draw_sent(self, text: str) -> None:
        """Draw a message that was just sent, and an empty answer under it."""
        when = f"{self._bridge.clock.wall():%H:%M}"
        with self._placing():
            self._draw_welcome()
            block = MessageBlock("You", when=when, text=text)
            await self.query_one(Transcript).add(block)
            await self._draw_new_answer()
            self._draw_queued()
            if not self._conversation.busy:
                await self._end_answer()

    @contextmanager
    def _placing(self) -> Iterator[None]:
        """Nothing is drawn into an answer before it is on the screen: timers run in the app, and
        this in the screen.
        """
        self._is_placing = True
        try:
            yield
        finally:
            self._is_placing = False

    async def _draw_new_answer(self) -> None:
        transcript = self.query_one(Transcript)
        when = f"{self._bridge.clock.wall():%H:%M}"
        self._undrawn = MarkedText()
        self._answer = self._answer_block(when)
        await transcript.add(self._answer)
        self.call_after_refresh(transcript.follow)

    def _answer_block(self, when: str) -> AnswerBlock:
        name = self._bridge.snapshot().model or "Model"
        return AnswerBlock(name, when=when, glyphs=self._glyphs, shows_marks=self._marks_reruns)

    async def _end_answer(self) -> None:
        """The answer ended: closing line, error panel, the waiting message back if it failed."""
        conversation, answer = self._conversation, self._answer
        if answer is None or not conversation.turns:
            return
        await answer.finish()
        turn = conversation.turns[-1]
        answer.set_closing(closing_line(turn, self._glyphs))
        if conversation.problem is not None:
            await answer.show_problem(conversation.problem, self._ways_out(conversation.problem))
            self._unqueue()
        self._answer = None
        self.pace.reset()
        self._keep_end()

    def _ways_out(self, problem: MoetError) -> dict[str, str]:
        if problem.code in _TOO_LONG:
            can_forget = len(self._conversation.turns) > 2
            forget = {_FORGET: "Forget the oldest turns"} if can_forget else {}
            return forget | {_NEW: "New chat"}
        return {_RETRY: "Try again"}

    def _live_closing(self) -> Content:
        live, snapshot = self._conversation.live, self._bridge.snapshot()
        if live is None or live.n_tokens == 0:
            return Content(f"{self._glyphs.caret} waiting for the first token")
        rate = live.tok_per_s
        parts = [
            "writing",
            *([] if rate is None else [show_number(rate, "tok/s")]),
            f"{live.n_tokens} tokens",
            *(
                []
                if snapshot.remote
                else [f"waiting {show_percent(snapshot.wait_share, 0)} of time"]
            ),
            *([] if live.quality is not Quality.BALANCED else [self.again_words()]),
        ]
        return Content(f"{self._glyphs.caret} " + f" {self._glyphs.dot} ".join(parts))

    def _draw_queued(self) -> None:
        queued = self._conversation.queued
        line = self.query_one("#queued", Static)
        line.display = queued is not None
        if queued is not None:
            line.update(Content(f" next: {clean_line(queued, 60)}   (Esc takes it back)"))

    def _draw_below(self) -> None:
        transcript, below = self.query_one(Transcript), self.query_one("#below", Static)
        shown = not transcript.following and transcript.display
        below.display = shown
        if shown:
            n_screens = max(1, round(transcript.screens_below))
            word = "screen" if n_screens == 1 else "screens"
            writing = ", writing" if self.busy else ""
            content = Content(f" {self._glyphs.down} {n_screens} {word} below{writing} ")
            if below.content != content:
                below.update(content)

    def again_words(self) -> str:
        """What the balanced answer being written made again; empty: none is, or nothing yet."""
        live = self._conversation.live
        if live is None or live.quality is not Quality.BALANCED:
            return ""
        return again_words(live.n_reran, live.n_tokens, live.rerun_s)

    # -- events --------------------------------------------------------------------------------

    def on_text_area_changed(self, _event: TextArea.Changed) -> None:
        self._draft_due_s = self._bridge.clock.monotonic() + DRAFT_DELAY_S

    async def on_prompt_sent(self, event: Prompt.Sent) -> None:
        command = parse(event.text)
        prompt = self.query_one(Prompt)
        if isinstance(command, str):
            self.notify(command, markup=False, severity="warning")
            prompt.give_back(event.text)
        elif isinstance(command, Command):
            await self._obey(command)
        elif not await self.ask(
            event.text.removeprefix("/") if event.text.startswith("//") else event.text
        ):
            prompt.give_back(event.text)
        self.save_draft()

    async def ask(self, text: str) -> bool:
        """Send a message; False if it could not be taken, with a toast that says why."""
        try:
            sent = self._conversation.send(text)
        except MoetError as error:
            self.toast(error)
            return False
        match sent:
            case Sent.REFUSED:
                self.notify("One message is already waiting.", severity="warning")
            case Sent.QUEUED:
                self._draw_queued()
            case Sent.STARTED:
                await self._draw_sent(text)
        return sent is not Sent.REFUSED

    def on_prompt_scrolled(self, event: Prompt.Scrolled) -> None:
        self.query_one(Transcript).page(event.pages)
        self.call_after_refresh(self._draw_below)

    async def on_problem_panel_chosen(self, event: ProblemPanel.Chosen) -> None:
        match event.action:
            case "retry":
                await self.action_retry()
            case "restart":
                self._bridge.restart()
                await event.panel.remove()
            case "forget":
                n_turns = self._conversation.forget_oldest()
                self.notify(f"{n_turns} oldest messages are kept, but no longer sent.")
                await self.action_retry()
            case _:
                await self.action_new()

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        event.stop()
        self.notify(f"Link, not opened: {event.href}", markup=False, timeout=8)

    def on_click(self, event: object) -> None:
        widget = getattr(event, "widget", None)
        if widget is not None and widget.id == "below":
            self.action_follow()

    async def on_screen_resume(self) -> None:
        if not self._is_placing:
            await self._flush()

    # -- actions -------------------------------------------------------------------------------

    async def _obey(self, command: Command) -> None:
        conversation = self._conversation
        match command.verb:
            case Verb.NEW | Verb.CLEAR:
                await self.action_new()
            case Verb.CHATS:
                self.action_chats()
            case Verb.RETRY:
                await self.action_retry()
            case Verb.COPY:
                self.action_copy_answer()
            case Verb.EXPORT:
                self._export(command.argument or "md")
            case Verb.HELP:
                await self.run_action("app.help")
            case Verb.SYSTEM:
                conversation.wish(system=command.argument)
                told = "The model is told this from the next message on."
                self.notify(told if command.argument else "The model is told nothing before.")
            case Verb.TEMPERATURE:
                conversation.wish(temperature=parse_temperature(command.argument))
                self.notify(f"Temperature: {command.argument or 'as the model recommends'}")
            case Verb.FAST | Verb.BALANCED | Verb.EXACT | Verb.QUALITY:
                self._set_quality(Quality(command.argument or command.verb.value))

    def _export(self, kind: str) -> None:
        """Save the chat in the working folder, in a file that was not there before."""
        conversation, now = self._conversation, self._bridge.clock.wall()
        make = to_json if kind == "json" else to_markdown
        model, system = self._bridge.snapshot().model, conversation.wishes.system
        text = make(conversation.turns, model=model, system=system)
        path = Path.cwd() / f"chat-{now:%Y%m%d-%H%M%S}.{kind}"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as problem:
            reason = problem.strerror or str(problem)
            self.toast(fail("MD-DISK-03", path=str(path), reason=reason))
            return
        self.notify(f"Saved as {path}", markup=False, timeout=10)

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

    def action_stop(self) -> None:
        """Take the waiting message back, else stop the answer, else go to the prompt."""
        if self._unqueue():
            return
        if not self._conversation.stop():
            self.query_one(Prompt).focus()

    def _unqueue(self) -> bool:
        text = self._conversation.unqueue()
        if text is None:
            return False
        self.query_one(Prompt).give_back(text)
        self._draw_queued()
        return True

    async def action_new(self) -> None:
        self.save_draft()
        self._conversation.new()
        await self._draw_chat()
        self.query_one(Prompt).replace_text(self._conversation.draft)
        self.query_one(Prompt).focus()

    def action_chats(self) -> None:
        async def chosen(chat_id: int | None) -> None:
            if chat_id is not None and chat_id != self._conversation.chat_id:
                self.save_draft()
                try:
                    self._conversation.open(chat_id)
                except MoetError as error:
                    self.toast(error)
                self.query_one(Prompt).replace_text(self._conversation.draft)
            await self._draw_chat_unless_busy()

        self.app.push_screen(ChatList(self._conversation, now=self._bridge.clock.wall()), chosen)

    async def _draw_chat_unless_busy(self) -> None:
        if not self.busy:
            await self._draw_chat()

    async def action_retry(self) -> None:
        try:
            again = self._conversation.retry()
        except MoetError as error:
            self.toast(error)
            return
        if not again:
            self.notify("There is nothing to answer again right now.")
            return
        with self._placing():
            await self._remove_last_answer()
            await self._draw_new_answer()
            if not self.busy:
                await self._end_answer()

    async def _remove_last_answer(self) -> None:
        blocks = self.query_one(Transcript).children
        if blocks and isinstance(blocks[-1], AnswerBlock):
            await blocks[-1].remove()

    def action_copy_answer(self) -> None:
        answers = [turn for turn in self._conversation.turns if turn.role == "assistant"]
        if answers:
            self.app.copy_to_clipboard(answers[-1].text)
            self.notify("The last answer is on the clipboard, if the terminal allows it.")

    def action_rail(self) -> None:
        self._rail_wanted = not self._rail_wanted
        self.set_class(not self._rail_wanted, "-no-rail")

    async def action_mark_reruns(self) -> None:
        """Underline what balanced answers made again, or stop doing so."""
        self._marks_reruns = not self._marks_reruns
        for block in self.query(AnswerBlock):
            await block.show_marks(self._marks_reruns)
        said = "are underlined" if self._marks_reruns else "are not underlined any more"
        self.notify(f"Words of balanced answers that were made again {said}.")

    def action_follow(self) -> None:
        self.query_one(Transcript).follow()
        self.call_after_refresh(self._draw_below)
