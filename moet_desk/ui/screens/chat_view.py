"""What the Chat screen shows: transcript, prompt, files, loading block, rail; its timers draw it.

What a chat is and when it is saved is decided by `Conversation`. Text is pulled even while another
screen is in front, and drawn when this one comes back. Keys are in `screens.chat`. UI thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Static, TextArea

from moet_desk.errors import MoetError
from moet_desk.telemetry import EngineSnapshot
from moet_desk.ui.bridge import Bridge, Phase
from moet_desk.ui.chat_lines import (
    closing_line,
    live_again_words,
    live_closing_line,
    no_model_content,
    recorded_content,
    welcome_content,
)
from moet_desk.ui.chat_records import Draft, Status, Turn
from moet_desk.ui.conversation import Conversation
from moet_desk.ui.desk import JobView
from moet_desk.ui.lean_screen import LeanScreen
from moet_desk.ui.paces import AnswerPace, PicturePace
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.blocks import AnswerBlock, Block, MessageBlock
from moet_desk.ui.widgets.chips import Chips
from moet_desk.ui.widgets.find_line import FindLine
from moet_desk.ui.widgets.frame import SmallWindow, TabLine
from moet_desk.ui.widgets.gauges import (
    History,
    LoadingBlock,
    Rail,
    StatusLine,
)
from moet_desk.ui.widgets.job_lines import JobLines
from moet_desk.ui.widgets.key_line import KeyLine
from moet_desk.ui.widgets.problem import ProblemPanel
from moet_desk.ui.widgets.prompt import Prompt
from moet_desk.ui.widgets.transcript import Transcript

DRAFT_DELAY_S = 0.3
_FIGURES_S = 0.5  # between two looks of the line under an answer that is written
_RAIL_SHARE = 0.002  # of a core

_TOO_LONG = ("MD-API-03", "MD-CONN-05")
RETRY, RESTART, FORGET, NEW = "retry", "restart", "forget", "new"
"""Ways out of a problem, which its panel offers."""


class ChatView(LeanScreen):
    """See the module's paragraph."""

    AUTO_FOCUS = "Prompt"

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
        self._shows_thoughts = False
        self._conversation = conversation
        self._bridge = bridge
        self._drawn_once = False
        self._glyphs = glyphs
        self._history = history
        self._plain = plain
        self._blink = blink
        self.pace = AnswerPace(bridge.clock)
        self._rail_pace = PicturePace(0.0, share=_RAIL_SHARE)
        self._rail_began_s: float | None = None  # CPU time before it was drawn, until it is painted
        self._figures_due_s = 0.0
        self._is_placing = False  # blocks of a new turn are on their way to the screen
        self._draft_due_s: float | None = None
        self._loading_drawn: Phase | None = None
        self._edited: Turn | None = None  # what the prompt holds another version of
        self._put_by = Draft()  # what the prompt held before

    def compose(self) -> ComposeResult:
        yield TabLine("chat", plain=self._plain)
        with Horizontal(id="middle"):
            with Vertical(id="main"):
                yield LoadingBlock(self._glyphs)
                yield Static("", id="welcome", markup=False)
                yield Transcript(self._block)
                yield Static("", id="below", markup=False)
            yield Rail(self._glyphs, self._history)
        yield FindLine()
        yield Static("", id="queued", markup=False)
        with Vertical(id="ask"):
            yield Chips(self._glyphs, count=self._bridge.count_tokens)
            with Horizontal(id="write"):
                yield Static(Content(self._glyphs.prompt), id="mark", markup=False)
                yield Prompt(blink=self._blink)
        yield JobLines(self._glyphs)
        yield StatusLine(self._glyphs)
        yield KeyLine()
        yield SmallWindow(self._glyphs)

    async def on_mount(self) -> None:
        self._drawn_once = True
        self.prompt.focus()
        self._put_draft(self._conversation.draft)
        await self._draw_chat()
        self.show(self._bridge.snapshot(), notes=())

    def set_blink(self, blink: bool) -> None:
        """Whether the caret pulses."""
        self._blink = blink
        if self._drawn_once:
            self.prompt.cursor_blink = blink

    @cached_property
    def prompt(self) -> Prompt:
        """Where messages are written."""
        return self.query_one(Prompt)

    @cached_property
    def transcript(self) -> Transcript:
        """The conversation as drawn."""
        return self.query_one(Transcript)

    @cached_property
    def chips(self) -> Chips:
        """The files that go with the next message."""
        return self.query_one(Chips)

    @cached_property
    def _below(self) -> Static:
        return self.query_one("#below", Static)

    # -- timers --------------------------------------------------------------------------------

    async def pull_text(self) -> None:
        """Take and draw new text; called ten times a second."""
        if not self._drawn_once or self._is_placing:  # the text waits where it is
            return
        conversation, is_current = self._conversation, self.is_current
        self._save_draft_if_due()
        self.prompt.cursor_blink = self._blink and not conversation.busy  # each blink is a repaint
        if not self.pace.due(in_front=is_current):
            return
        if conversation.busy:
            pulled = conversation.pull()
            if is_current or pulled.ended:
                await self._flush(is_new=bool(pulled.text or pulled.thought))
            if pulled.ended:
                await self._end_answer()
        await self._send_queued()
        if is_current:
            self._draw_below()

    async def _send_queued(self) -> None:
        waiting = self._conversation.queued
        try:
            sent = self._conversation.take_queued()
        except MoetError as error:
            self.toast(error)
            self._give_back_waiting(waiting or Draft())
            self._draw_queued()
            return
        if sent is not None:
            self.save_draft()
            await self._draw_turns()

    def toast(self, error: MoetError) -> None:
        """Say what went wrong with something that is not an answer."""
        self.notify(
            f"{error.cause}\n{error.do}", title=f"{error.title}  {error.code}",
            severity="error", markup=False, timeout=10,
        )  # fmt: skip

    @property
    def _answer(self) -> AnswerBlock | None:
        """The block of the last answer; None while the reader is far away from it."""
        turns = self._conversation.turns
        block = self.transcript.block_of(turns[-1]) if turns else None
        return block if isinstance(block, AnswerBlock) else None

    async def _flush(self, *, is_new: bool = True) -> None:
        answer, live = self._answer, self._conversation.live
        if answer is None or answer.turn is None:
            return
        if is_new:
            await self._draw_text(answer, answer.turn)
        if live is None:
            self._keep_end()
            return
        if live.n_tokens == 0 and live.prompt is not None:
            elapsed_s = self._bridge.clock.monotonic() - live.started_s
            answer.show_reading(live.prompt, elapsed_s=elapsed_s)
            self._keep_end()  # it has more rows than the line before it
        elif self._bridge.clock.monotonic() >= self._figures_due_s:
            self._figures_due_s = self._bridge.clock.monotonic() + _FIGURES_S * 0.9
            snapshot = self._bridge.snapshot()
            if answer.set_closing(live_closing_line(live, snapshot, self._glyphs)):
                self._keep_end()

    async def _draw_text(self, answer: AnswerBlock, turn: Turn) -> None:
        self.pace.begin()
        grew = await answer.grow(turn, room=self._room(answer))
        self.pace.end(grew=grew)
        if grew:
            self._keep_end()

    def painted(self, *, text: bool = False) -> None:
        """What was drawn is on the screen, perhaps text: take into account what that has cost."""
        if text:
            self.pace.painted()
        if self._rail_began_s is not None:
            self._rail_pace.record(self._bridge.clock.cpu() - self._rail_began_s)
            self._rail_began_s = None

    def _room(self, answer: AnswerBlock) -> int:
        live, most = self._conversation.live, self.transcript.outer_size.height * 2 // 3
        if live is None or answer.live is None:
            return 0
        seconds = self._bridge.clock.monotonic() - live.started_s - (live.first_token_s or 0.0)
        return self.pace.room(answer.live.n_rows, seconds, most)

    def _keep_end(self) -> None:
        self.call_after_refresh(self.transcript.settle)

    def show(
        self, snapshot: EngineSnapshot, *, notes: tuple[str, ...], jobs: Sequence[JobView] = ()
    ) -> None:
        """Draw a snapshot and the jobs; called twice a second while in front."""
        if not self._drawn_once:
            return
        self.query_one(JobLines).show(jobs)
        self.chips.poll(snapshot.context)
        used = max(self._conversation.context_used, snapshot.context_used if self.busy else 0)
        self.query_one(StatusLine).show(snapshot, context_used=used, notes=notes)
        self._draw_rail(snapshot)
        self._draw_start()

    def _draw_rail(self, snapshot: EngineSnapshot) -> None:
        rail, clock = self.query_one(Rail), self._bridge.clock
        if rail.display and self._rail_pace.due(clock.monotonic()):
            self._rail_began_s = clock.cpu()
            rail.show(snapshot)
            if not self.busy:  # else the app says when it is painted
                self.call_after_refresh(self.painted)

    @property
    def busy(self) -> bool:
        """Whether an answer is being made."""
        return self._conversation.busy

    def _save_draft_if_due(self) -> None:
        due_s = self._draft_due_s
        if due_s is not None and self._bridge.clock.monotonic() >= due_s:
            self.save_draft()

    def save_draft(self) -> None:
        """Keep the unsent prompt and its files with its chat now."""
        self._draft_due_s = None
        draft = (self._conversation.queued or Draft()) + self._unsent()
        self._conversation.save_draft(draft.text, draft.files)

    def _unsent(self) -> Draft:
        """What was written and not sent: with another version of a message, if that says something
        new, what the prompt held before it.
        """
        written, edited = self._written(), self._edited
        if edited is None:
            return written
        text = "" if written.text == edited.text else written.text
        return self._put_by + Draft(text, tuple(f for f in written.files if f not in edited.files))

    def _written(self) -> Draft:
        return Draft(self.prompt.text, self.chips.files)

    def _put_draft(self, draft: Draft) -> None:
        self.prompt.replace_text(draft.text)
        self.chips.put(draft.files)

    def _give_back(self, draft: Draft) -> None:
        """Put what could not be sent before what was written since."""
        if draft.text:
            self.prompt.give_back(draft.text)
        self.chips.put((*draft.files, *self.chips.files))

    def _give_back_waiting(self, draft: Draft) -> None:
        """Likewise a message that waited, which is no part of another version of a sent one."""
        if self._edited is None:
            self._give_back(draft)
        else:
            self._put_by = draft + self._put_by

    def on_text_area_changed(self, _event: TextArea.Changed) -> None:
        self._draft_due_s = self._bridge.clock.monotonic() + DRAFT_DELAY_S

    def on_chips_changed(self) -> None:
        self._draft_due_s = self._bridge.clock.monotonic() + DRAFT_DELAY_S

    async def on_screen_resume(self) -> None:
        if not self._is_placing and self._drawn_once:
            await self._flush()

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
                actions = {RESTART: "Start the engine again"} if bridge.can_restart else {}
                self.run_worker(self._draw_start_problem(bridge.error, actions))
        self._draw_welcome()

    async def _draw_start_problem(
        self, error: MoetError | Mapping[str, Any], actions: dict[str, str]
    ) -> None:
        panel = ProblemPanel(error, glyphs=self._glyphs, actions=actions)
        await self.transcript.mount(panel)
        answer = self._answer
        for other in () if answer is None else answer.query(ProblemPanel):
            if other.code == panel.code:  # what ended the answer is told once, with its way out
                await other.remove()
        self.call_after_refresh(self.transcript.follow)

    def _draw_welcome(self) -> None:
        welcome = self.query_one("#welcome", Static)
        empty = not self._conversation.turns
        welcome.display = empty and self._bridge.phase in (Phase.READY, Phase.IDLE)
        self.transcript.display = not welcome.display
        if welcome.display:
            is_ready = self._bridge.phase is Phase.READY
            model = self._bridge.snapshot().model
            content = welcome_content(model) if is_ready else no_model_content()
            if self._bridge.is_recording:
                content = recorded_content(model)
            if welcome.content != content:
                welcome.update(content)

    async def _draw_chat(self) -> None:
        """Draw the open chat from its turns."""
        await self.transcript.sync([])
        await self._draw_turns()

    async def _draw_turns(self) -> None:
        """Draw what has changed at the end of the chat, or all of it, and go there."""
        with self._placing():
            self._draw_welcome()
            await self.transcript.sync(self._conversation.turns)
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

    def _block(self, turn: Turn) -> Block:
        """The block of a message; its text is drawn once it is on the screen."""
        when = f"{turn.created.astimezone():%H:%M}"
        branch = self._conversation.branch_of(turn)
        if turn.role == "user":
            return MessageBlock(
                "You", when=when, text=turn.text, files=turn.files, glyphs=self._glyphs,
                turn=turn, branch=branch,
            )  # fmt: skip
        block = AnswerBlock(
            self._bridge.snapshot().model or "Model", when=when, glyphs=self._glyphs,
            shows_marks=self._marks_reruns, shows_thought=self._shows_thoughts,
            turn=turn, branch=branch,
        )  # fmt: skip
        if turn.status is not Status.WRITING:
            block.set_closing(closing_line(turn, self._glyphs))
            if "error" in turn.meta:
                self.call_after_refresh(self._show_problem, block, turn.meta["error"])
        return block

    async def _show_problem(self, block: AnswerBlock, problem: Mapping[str, Any]) -> None:
        panels = (each for each in self.transcript.children if isinstance(each, ProblemPanel))
        if block is self._answer and problem.get("code") in {panel.code for panel in panels}:
            return  # told under the chat, with its way out
        if block.is_attached and not block.query(ProblemPanel):
            await block.show_problem(problem, self._ways_out(problem, block.turn))

    async def _end_answer(self) -> None:
        """The answer ended: closing line, error panel, the waiting message back if it failed."""
        conversation, answer = self._conversation, self._answer
        if conversation.problem is not None:
            self._unqueue()
        if answer is not None and answer.turn is not None:
            await answer.finish()
            answer.set_closing(closing_line(answer.turn, self._glyphs))
            if "error" in answer.turn.meta:
                await self._show_problem(answer, answer.turn.meta["error"])
        self.pace.reset()
        self._keep_end()

    def _ways_out(self, problem: Mapping[str, Any], turn: Turn | None) -> dict[str, str]:
        """What can be done about an answer that failed; about an old one nothing."""
        turns = self._conversation.turns
        if not turns or turn is not turns[-1]:
            return {}
        if problem.get("code") in _TOO_LONG:
            forget = {FORGET: "Forget the oldest turns"} if len(turns) > 2 else {}
            return forget | {NEW: "New chat"}
        return {RETRY: "Try again"}

    def _unqueue(self) -> bool:
        draft = self._conversation.unqueue()
        if draft is None:
            return False
        self._give_back_waiting(draft)
        self._draw_queued()
        return True

    def _draw_queued(self) -> None:
        """The line over the prompt: a message that waits, or what the prompt is a version of."""
        queued, line = self._conversation.queued, self.query_one("#queued", Static)
        line.display = queued is not None or self._edited is not None
        if queued is not None:
            words = clean_line(queued.text, 60) or queued.files[0].name
            line.update(Content(f" next: {words}   (Esc takes it back)"))
        elif self._edited is not None:
            words = "another version of your message; Enter sends it, Esc leaves it as it was"
            line.update(Content(f" {words}"))

    def _draw_below(self) -> None:
        transcript, below = self.transcript, self._below
        shown = not transcript.following and transcript.display and bool(transcript.blocks)
        below.display = shown
        if shown:
            n, word = max(1, round(transcript.screens_below)), "screen"
            if transcript.n_below:
                n, word = transcript.n_below, "message"
            word += "" if n == 1 else "s"
            writing = ", writing" if self.busy else ""
            content = Content(f" {self._glyphs.down} {n:,} {word} below{writing} ")
            if below.content != content:
                below.update(content)

    def again_words(self) -> str:
        """What the balanced answer being written made again; empty: none is, or nothing yet."""
        return live_again_words(self._conversation.live)
