"""The open chat: its messages, the answer being written, the waiting message, and their storage.

It decides what is sent and when something is saved; it draws nothing. While an answer is written
its text is saved every second, so a killed process loses at most that. UI thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from typing import Any, Protocol

from moet_desk.engine.handle import GenerateRequest, Quality, Sampling
from moet_desk.errors import MoetError
from moet_desk.marked_text import MarkedText, Ranges
from moet_desk.telemetry import FinishReason, Usage
from moet_desk.ui.bridge import Bridge, LiveAnswer, Phase
from moet_desk.ui.text import clean_line

SAVE_PERIOD_S = 1.0
TITLE_CHARS = 60


class Status(Enum):
    """How a message ended; the values are what the store keeps."""

    DONE = "done"
    WRITING = "writing"
    STOPPED = "stopped"
    FAILED = "failed"
    REPLACED = "replaced"  # answered again; kept, not shown


class StoredMessage(Protocol):
    """A message as the store returns it."""

    @property
    def id(self) -> int: ...
    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def created(self) -> datetime: ...


class StoredChat(Protocol):
    """A chat as the store returns it; lists leave `messages` empty."""

    @property
    def id(self) -> int: ...
    @property
    def title(self) -> str: ...
    @property
    def system(self) -> str: ...
    @property
    def draft(self) -> str: ...
    @property
    def updated(self) -> datetime: ...
    @property
    def messages(self) -> Sequence[StoredMessage]: ...


class ChatStoreLike(Protocol):
    """What the screens need of `store.chats.ChatStore`; every method may raise a `MoetError`."""

    def create_chat(self, title: str, *, model: str, system: str) -> int: ...
    def list_chats(self, limit: int, query: str) -> Sequence[StoredChat]: ...
    def get_chat(self, chat_id: int) -> StoredChat: ...
    def delete_chat(self, chat_id: int) -> None: ...
    def add_message(self, chat_id: int, role: str, content: str, *, status: str) -> int: ...
    def update_message(
        self, message_id: int, *, content: str, status: str, meta: Mapping[str, Any]
    ) -> None: ...
    def save_draft(self, chat_id: int, draft: str) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Turn:
    """One message of the open chat."""

    id: int
    role: str
    text: str
    status: Status
    created: datetime
    meta: dict[str, Any] = field(default_factory=dict)
    marks: Ranges = ()  # of `text`: what was made again; not stored


@dataclass(frozen=True, slots=True)
class Wishes:
    """How answers are asked for; None means the model's own recommendation."""

    quality: Quality = Quality.FAST
    gate: float | None = None
    temperature: float | None = None
    system: str = ""
    max_tokens: int | None = None


class Sent(Enum):
    """What became of a message."""

    STARTED = "started"
    QUEUED = "queued"  # sent when the answer or the loading has ended
    REFUSED = "refused"  # one is already waiting


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought: new text, and whether the answer has ended with it."""

    text: MarkedText
    ended: bool


class Conversation:
    """The open chat. See the module's paragraph."""

    def __init__(self, bridge: Bridge, chats: ChatStoreLike, *, wishes: Wishes) -> None:
        self._bridge = bridge
        self._chats = chats
        self._saved_s = 0.0
        self._saved_chars = 0
        self._new_draft = ""  # of the chat that is not stored yet
        self._opened_draft = ""
        self._stopping = False
        self._system_of_new = wishes.system
        self.wishes = wishes
        self.chat_id: int | None = None
        self.turns: list[Turn] = []
        self.forgotten = 0  # turns at the beginning that are not sent any more
        self.queued: str | None = None
        self.live: LiveAnswer | None = None
        self.problem: MoetError | None = None  # of the last answer
        self.store_problem: MoetError | None = None  # saving failed; the chat goes on in memory
        self.context_used = 0

    # -- chats ---------------------------------------------------------------------------------

    def new(self) -> None:
        """Leave this chat (its answer is stopped and kept) and begin an empty one."""
        self._leave()
        self._reset()

    def open(self, chat_id: int) -> None:
        """Leave this chat and open a stored one; answers a crash cut off count as stopped.

        Raises:
            MoetError: it is not there or cannot be read; the open chat stays.
        """
        chat = self._chats.get_chat(chat_id)
        self._leave()
        self._reset()
        self.chat_id = chat.id
        self._opened_draft = chat.draft
        self.wish(system=chat.system)
        for message in chat.messages:
            status = Status(message.status)
            if status is Status.REPLACED:
                continue
            if status is Status.WRITING:
                status = Status.STOPPED
            meta = dict(message.meta)
            turn = Turn(message.id, message.role, message.content, status, message.created, meta)
            self.turns.append(turn)
            self.context_used = int(meta.get("context_used", self.context_used))
            if "system" in meta:
                self.wish(system=str(meta["system"]))

    def _reset(self) -> None:
        self.chat_id = None
        self.turns = []
        self.forgotten = 0
        self.problem = None
        self.context_used = 0
        self.wish(system=self._system_of_new)

    def _leave(self) -> None:
        self.queued = None
        if self.live is not None:
            self.live.stop()
            self.live.pull()
            self._end(Status.STOPPED)

    def delete(self, chat_id: int) -> None:
        """Delete a stored chat; if it is open, a new one is begun."""
        if chat_id == self.chat_id:
            self.new()
        self._chats.delete_chat(chat_id)

    def list_chats(self, query: str, *, limit: int = 200) -> Sequence[StoredChat]:
        """Stored chats, newest first, that contain `query`."""
        return self._chats.list_chats(limit, query)

    @property
    def draft(self) -> str:
        """The unsent prompt that the open chat had when it was opened."""
        return self._new_draft if self.chat_id is None else self._opened_draft

    def save_draft(self, text: str) -> None:
        """Keep an unsent prompt with its chat."""
        if self.chat_id is None:
            self._new_draft = text
        else:
            chat_id = self.chat_id
            self._guard(lambda: self._chats.save_draft(chat_id, text))

    def wish(self, **changes: Any) -> None:
        """Change how the next answers are asked for; names are the fields of `Wishes`."""
        self.wishes = replace(self.wishes, **changes)

    # -- sending -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether an answer is being made."""
        return self.live is not None

    def send(self, text: str) -> Sent:
        """Send a message now, or queue it behind the answer or the loading.

        Raises:
            MoetError: the store cannot take it; nothing was sent.
        """
        if not self.busy and self._bridge.phase is Phase.READY:
            self._start(text)
            return Sent.STARTED
        if self.queued is not None:
            return Sent.REFUSED
        self.queued = text
        return Sent.QUEUED

    def take_queued(self) -> str | None:
        """Send the waiting message if it can go now; returns it."""
        ready = self.queued is not None and not self.busy and self._bridge.phase is Phase.READY
        if not ready or self.queued is None:
            return None
        text, self.queued = self.queued, None
        self._start(text)
        return text

    def unqueue(self) -> str | None:
        """Take the waiting message back; returns it."""
        text, self.queued = self.queued, None
        return text

    def _start(self, text: str) -> None:
        if self.chat_id is None:
            self.chat_id = self._chats.create_chat(
                clean_line(text, TITLE_CHARS),
                model=self._bridge.snapshot().model,
                system=self.wishes.system,
            )
            self._new_draft = ""
        self._add("user", text, Status.DONE)
        self._answer()

    def _add(self, role: str, text: str, status: Status) -> Turn:
        if self.chat_id is None:
            raise RuntimeError("no chat is open")
        message_id = self._chats.add_message(self.chat_id, role, text, status=status.value)
        turn = Turn(message_id, role, text, status, self._bridge.clock.wall())
        self.turns.append(turn)
        return turn

    def _answer(self) -> None:
        request = self.request()
        self._add("assistant", "", Status.WRITING)
        self.problem = None
        self._stopping = False
        self._saved_s = self._bridge.clock.monotonic()
        self._saved_chars = 0
        try:
            self.live = self._bridge.submit(request)
        except MoetError as error:
            self._end_with(Status.FAILED, "", error)

    def request(self) -> GenerateRequest:
        """The request for an answer to the turns so far."""
        wishes = self.wishes
        messages = [{"role": "system", "content": wishes.system}] if wishes.system else []
        messages += [
            {"role": turn.role, "content": turn.text}
            for turn in self.turns[self.forgotten :]
            if turn.role == "user" or turn.text
        ]
        return GenerateRequest(
            messages=messages,
            sampling=Sampling(temperature=wishes.temperature),
            max_tokens=wishes.max_tokens,
            quality=wishes.quality,
            gate=wishes.gate,
            client="chat",
        )

    def retry(self) -> bool:
        """Answer the last message again; the old answer stays in the store. False: nothing to."""
        if self.busy or self._bridge.phase is not Phase.READY or not self.turns:
            return False
        last = self.turns[-1]
        if last.role == "assistant":
            self.turns.pop()
            self._save(last, Status.REPLACED)
        if not self.turns or self.turns[-1].role != "user":
            return False
        self._answer()
        return True

    def forget_oldest(self) -> int:
        """Leave the older half of the turns out of what is sent; returns how many."""
        kept = self.turns[self.forgotten :]
        middle = len(kept) // 2
        starts = [i for i, turn in enumerate(kept) if turn.role == "user" and i > 0]
        after = next((i for i in starts if i >= middle), starts[-1] if starts else 0)
        self.forgotten += after
        return after

    # -- the answer ----------------------------------------------------------------------------

    def stop(self) -> bool:
        """Stop the answer; its text is kept. False: none is being written."""
        if self.live is None:
            return False
        self._stopping = True
        self.live.stop()
        return True

    def pull(self) -> Pulled:
        """Take new text, save it when it is time, and end the answer when it has ended."""
        live = self.live
        if live is None:
            return Pulled(MarkedText(), ended=False)
        text = live.pull()
        turn = self.turns[-1]
        turn.text, turn.marks = live.text.text, live.text.marks
        if live.ended:
            self._end(self._status_of(live))
            return Pulled(text, ended=True)
        now_s = self._bridge.clock.monotonic()
        if now_s - self._saved_s >= SAVE_PERIOD_S and len(turn.text) > self._saved_chars:
            self._saved_s, self._saved_chars = now_s, len(turn.text)
            self._save(turn, Status.WRITING)
        return Pulled(text, ended=False)

    def _status_of(self, live: LiveAnswer) -> Status:
        if live.error is not None:
            return Status.FAILED
        cancelled = live.finished is not None and live.finished.reason is FinishReason.CANCELLED
        return Status.STOPPED if cancelled or self._stopping else Status.DONE

    def _end(self, status: Status) -> None:
        live = self.live
        if live is None:
            return
        meta = self.turns[-1].meta
        if live.finished is not None:
            meta["reason"] = live.finished.reason.value
            meta["quality"] = live.finished.quality
        if live.usage is not None:
            self.context_used = live.usage.prompt_tokens + live.usage.completion_tokens
            meta |= _figures(live.usage) | {"context_used": self.context_used}
        self.turns[-1].marks = live.text.marks
        self._end_with(status, live.text.text, live.error)

    def _end_with(self, status: Status, text: str, error: MoetError | None) -> None:
        turn = self.turns[-1]
        turn.text, turn.status = text, status
        if error is not None:
            turn.meta["error"] = error.to_dict()
        if self.wishes.system:
            turn.meta["system"] = self.wishes.system
        self.problem = error
        self.live = None
        self._save(turn, status)

    def _save(self, turn: Turn, status: Status) -> None:
        self._guard(
            lambda: self._chats.update_message(
                turn.id, content=turn.text, status=status.value, meta=turn.meta
            )
        )

    def _guard(self, save: Callable[[], None]) -> None:
        """Save; a store that cannot (full disk) must not end the answer in front of the reader."""
        try:
            save()
        except MoetError as error:
            self.store_problem = error
        else:
            self.store_problem = None

    def keep(self) -> None:
        """Stop the answer, and store what was written of it."""
        self._leave()

    def close(self) -> None:
        """The window closes: keep what was written and close the store."""
        self.keep()
        self._guard(self._chats.close)


def _figures(usage: Usage) -> dict[str, Any]:
    """The figures of the closing line, as they are stored with a message."""
    return {
        "tokens": usage.completion_tokens,
        "prompt_tokens": usage.prompt_tokens,
        "first_token_s": usage.first_token_s,
        "decode_s": usage.decode_s,
        "wait_s": usage.wait_s,
        "rerun_tokens": usage.rerun_tokens,
        "rerun_s": usage.rerun_s,
        "opportunistic": usage.opportunistic,
    }
