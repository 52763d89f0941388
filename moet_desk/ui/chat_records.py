"""Records of a chat: what the store returns, what the screens hold, how answers are asked for.

Plain data and the protocol of the store; `Conversation` decides with them. UI thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import Enum
from typing import Any, Protocol

from moet_desk.engine.handle import Quality, Sampling
from moet_desk.marked_text import MarkedText, Ranges
from moet_desk.ui.attachments import Attachment


class Status(Enum):
    """How a message ended; the values are what the store keeps."""

    DONE = "done"
    WRITING = "writing"
    STOPPED = "stopped"
    FAILED = "failed"


class StoredMessage(Protocol):
    """A message as the store returns it."""

    @property
    def id(self) -> int: ...
    @property
    def parent(self) -> int | None: ...
    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def files(self) -> Sequence[Mapping[str, Any]]: ...
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
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def draft(self) -> str: ...
    @property
    def draft_files(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def tip(self) -> int | None: ...
    @property
    def updated(self) -> datetime: ...
    @property
    def messages(self) -> Sequence[StoredMessage]: ...


class ChatStoreLike(Protocol):
    """What the screens need of `store.chats.ChatStore`; every method may raise a `MoetError`."""

    def create_chat(
        self, title: str, *, model: str, system: str, settings: Mapping[str, Any]
    ) -> int: ...
    def list_chats(self, limit: int, query: str) -> Sequence[StoredChat]: ...
    def excerpts(self, query: str, chat_ids: Sequence[int]) -> Mapping[int, str]: ...
    def get_chat(self, chat_id: int) -> StoredChat: ...
    def delete_chat(self, chat_id: int) -> None: ...
    def add_message(
        self,
        chat_id: int,
        role: str,
        content: str,
        *,
        status: str,
        parent: int | None,
        files: Sequence[Mapping[str, Any]],
    ) -> int: ...
    def update_message(
        self,
        message_id: int,
        *,
        content: str,
        status: str,
        meta: Mapping[str, Any],
        reasoning: str | None,
    ) -> None: ...
    def set_tip(self, chat_id: int, message_id: int) -> None: ...
    def save_settings(self, chat_id: int, *, system: str, settings: Mapping[str, Any]) -> None: ...
    def new_draft(self) -> tuple[str, Sequence[Mapping[str, Any]]]: ...
    def save_draft(self, chat_id: int | None, draft: str) -> None: ...
    def save_draft_files(self, chat_id: int | None, files: Sequence[Mapping[str, Any]]) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Turn:
    """One message of the open chat, equal to no other. `parent` is the id of the one it follows."""

    id: int
    role: str
    text: str
    status: Status
    created: datetime
    meta: dict[str, Any] = field(default_factory=dict)
    marks: Ranges = ()  # of `text`: what was made again; not stored
    parent: int | None = None
    thought: str = ""  # the model's reasoning
    files: tuple[Attachment, ...] = ()


def turn_of(message: StoredMessage) -> Turn:
    """A stored message; an answer that a crash cut off counts as stopped."""
    status = Status(message.status)
    return Turn(
        message.id,
        message.role,
        message.content,
        Status.STOPPED if status is Status.WRITING else status,
        message.created,
        {name: value for name, value in message.meta.items() if _is_sound(name, value)},
        parent=message.parent,
        thought=message.reasoning,
        files=tuple(Attachment.from_stored(file) for file in message.files),
    )


_WHOLE = ("top_k", "seed", "max_tokens")
_FIGURES = frozenset((
    "tokens", "prompt_tokens", "first_token_s", "decode_s", "wait_s", "rerun_tokens", "rerun_s",
    "context_used", "thought_s", "thought_tokens",
))  # fmt: skip


def _is_sound(name: str, value: Any) -> bool:
    """Whether something stored beside a message can be drawn; it may come from a damaged file."""
    if name in _FIGURES:
        return _is_number(value)
    return isinstance(value, Mapping) if name == "error" else True


def _is_number(value: Any) -> bool:
    """Whether a value can be counted with."""
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) < 2**62


@dataclass(frozen=True, slots=True)
class Draft:
    """A message that was not sent yet."""

    text: str = ""
    files: tuple[Attachment, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text.strip() or self.files)

    def __add__(self, other: Draft) -> Draft:
        """Both in one, this one's words first."""
        text = "\n".join(part for part in (self.text, other.text) if part)
        return Draft(text, (*self.files, *other.files))


@dataclass(frozen=True, slots=True)
class Wishes:
    """How answers are asked for; None means the model's own recommendation."""

    quality: Quality = Quality.FAST
    gate: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    system: str = ""
    max_tokens: int | None = None
    effort: str = ""  # of reasoning, "" as the model does by itself

    @property
    def sampling(self) -> Sampling:
        """The part that chooses tokens."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
        )

    def to_stored(self) -> dict[str, Any]:
        """What is kept with a chat, beside its system prompt: all that is not None."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        values.pop("system")
        return values | {"quality": self.quality.value}

    def with_stored(self, values: Mapping[str, Any], *, system: str) -> Wishes:
        """The wishes of a stored chat; one of an older version says nothing and keeps these."""
        if not values:
            return replace(self, system=system)
        names = ("gate", "temperature", "top_p", "min_p", *_WHOLE)
        known: dict[str, Any] = {}
        for name in names:
            value: Any = values.get(name)
            if _is_number(value):
                known[name] = int(value) if name in _WHOLE else value
        effort = values.get("effort")
        known["effort"] = effort if isinstance(effort, str) else ""
        named = values.get("quality")
        quality = Quality(named) if named in [q.value for q in Quality] else self.quality
        return Wishes(**{**known, "quality": quality, "system": system})


class Sent(Enum):
    """What became of a message."""

    STARTED = "started"
    QUEUED = "queued"  # sent when the answer or the loading has ended
    REFUSED = "refused"  # one is already waiting


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought: new text, new reasoning, and whether the answer has ended with it."""

    text: MarkedText
    ended: bool
    thought: str = ""
