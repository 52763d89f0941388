"""A recording on the screens: its header line, its questions in the chat, and making one.

`Player` stands between what is played and the app; it knows no widget. UI thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from textual.content import Content

from moet_desk.engine.handle import EngineHandle, Quality
from moet_desk.engine.playback import Cue, Playback, Question
from moet_desk.errors import MoetError, fail
from moet_desk.ui.clock import Clock
from moet_desk.ui.conversation import Conversation
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.gauges import spread

SEEK_S = 5.0


class RecorderLike(Protocol):
    """A recording that is being made (`engine.recorder.TraceRecorder`)."""

    path: Path
    problem: MoetError | None

    @property
    def seconds(self) -> float: ...
    @property
    def full(self) -> bool: ...
    def close(self) -> None: ...


Record = Callable[[EngineHandle, Path], RecorderLike]
"""Starts a recording of an engine into a file. May raise a `MoetError`."""


class Chat(Protocol):
    """What the player needs of the chat screen."""

    async def ask(self, text: str) -> bool: ...
    async def action_new(self) -> None: ...


class Player:
    """Moves a recording on and lets the chat ask what was asked then.

    Args:
        playback: what is played.
        conversation: the chat, which waits for each answer's end before the next question.
    """

    def __init__(self, playback: Playback, conversation: Conversation) -> None:
        self.playback = playback
        self._conversation = conversation
        self._cues: deque[Cue] = deque()

    async def turn(self, chat: Chat | None) -> bool:
        """Show what is due now; questions wait while there is no chat to ask them in. Returns
        whether the place went back.
        """
        new = self.playback.advance()
        went_back = any(not isinstance(cue, Question) for cue in new)
        if went_back:
            self._cues.clear()
        self._cues += new
        while chat is not None and self._cues:
            cue = self._cues[0]
            if isinstance(cue, Question):
                if self._conversation.busy:
                    break
                self._conversation.wish(quality=Quality(cue.quality))
                await chat.ask(cue.text)
            else:
                await chat.action_new()
            self._cues.popleft()
        return went_back

    def control(self, what: str) -> None:
        """One of the keys: toggle, back, forward, slower, faster, begin."""
        playback = self.playback
        match what:
            case "toggle":  # at the end: begin anew
                playback.pause(not (playback.paused or playback.ended))
            case "back":
                playback.seek(playback.position_s - SEEK_S)
            case "forward":
                playback.seek(playback.position_s + SEEK_S)
            case "slower":
                playback.change_speed(-1)
            case "faster":
                playback.change_speed(1)
            case "begin":
                playback.seek(0.0)
            case _:
                raise ValueError(what)

    def header(self, width: int, glyphs: Glyphs) -> Content:
        """The line that says on every screen that this is a recording, of what, where and when."""
        playback, what = self.playback, self.playback.recording
        weights = " (made-up weights)" if what.made_up and width >= 100 else ""
        words = f"Recording: {what.model}{weights}, {what.date}, {what.machine}"
        if width >= 120:
            words += ". No model is running here."
        place = f"{show_place(playback.position_s)}/{show_place(what.length_s)}"
        speed = f"{playback.speed:g}x"
        right = Content(f" {self._state()} {place} {speed}  F12 ")
        mark = Content.styled(f" {glyphs.now} ", "bold $status-warn")
        return spread(mark + Content.styled(words, "bold $status-warn"), right, width)

    def _state(self) -> str:
        if self.playback.ended:
            return "end"
        return "paused" if self.playback.paused else "plays"


class Tape:
    """The recording that is being made from the app, if any. Pictures alone, no words of chats."""

    def __init__(self, record: Record | None, clock: Clock) -> None:
        self._record = record
        self._clock = clock
        self._recorder: RecorderLike | None = None

    @property
    def note(self) -> str:
        """For the status line: "recording 0:12", "" while none is made."""
        return "" if self._recorder is None else f"recording {show_place(self._recorder.seconds)}"

    @property
    def must_end(self) -> bool:
        """Whether the file is full or cannot be written any more."""
        recorder = self._recorder
        return recorder is not None and (recorder.full or recorder.problem is not None)

    def toggle(self, engine: EngineHandle | None, folder: Path) -> str:
        """Begin a recording in a folder, or end the one that is made; returns what to say.

        Raises:
            MoetError: MD-TRACE-05 it cannot be written, MD-ENG-07 no model is loaded.
        """
        if self._recorder is not None:
            return self.end()
        if self._record is None:
            return "Nothing can be recorded here."
        if engine is None:
            raise fail("MD-ENG-07", why="")
        path = folder / f"moet-desk-{self._clock.wall():%Y%m%d-%H%M%S}.mdtrace"
        self._recorder = self._record(engine, path)
        return "Recording; R ends it. No words of your chats are in it."

    def end(self) -> str:
        """End it, if one is made; returns what to say. Raises MD-TRACE-05."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return ""
        why = " It is as long as one may be." if recorder.full else ""
        recorder.close()
        return f"Recorded: {recorder.path}{why}"


def show_place(seconds: float) -> str:
    """Seconds as "0:07"."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
