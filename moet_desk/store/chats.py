"""Chats on disk: one SQLite file, written so that nothing said is lost.

Each change is one durable transaction, also while an answer is being written, so after kill -9 the
text up to the last update is there; such an answer shows as stopped on the next opening. Messages
form a tree: an answer that was asked for again, and a message that was edited, get a sibling. The
schema is in `chat_schema`. One connection behind a lock: any thread may call, calls wait for each
other.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from moet_desk.errors import MoetError, fail
from moet_desk.store.chat_schema import make_index, prepare, store_errors, transaction

_BUSY_S = 5.0  # how long to wait for another program that writes to the file
_TRIGRAM = 3  # shorter words are not in the search index


class Window(StrEnum):
    """Which app has the file open. Of each one runs at a time (`runtime.instance_lock`), so what it
    keeps under its name is its own, also when it starts again. The values are what the file holds.
    """

    APP = "app"
    CONNECTED = "connected"  # on another server


class MessageStatus(StrEnum):
    """How a message ended. The values are what the file holds."""

    DONE = "done"
    WRITING = "writing"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Message:
    """One stored message. `position` counts from 0 within its chat, in the order of storing.

    `parent` is the id of the message it follows, None for a first one. `files` are what was sent
    with it, as objects that say "name" and "text".
    """

    id: int
    parent: int | None
    position: int
    role: str
    content: str
    reasoning: str
    status: MessageStatus
    meta: Mapping[str, Any]
    files: tuple[Mapping[str, Any], ...]
    created: datetime


@dataclass(frozen=True, slots=True)
class Chat:
    """One stored chat; lists leave `messages` empty. `tip` is the last message of the branch that
    was open, None for the newest one; `settings` are how its answers are asked for.
    """

    id: int
    title: str
    model: str
    system: str
    draft: str
    draft_files: tuple[Mapping[str, Any], ...]
    settings: Mapping[str, Any]
    tip: int | None
    created: datetime
    updated: datetime
    messages: tuple[Message, ...] = field(default=())


_WITH_WORD = """
(title LIKE :like ESCAPE '\\'
 OR id IN (SELECT chat_id FROM messages WHERE content LIKE :like ESCAPE '\\'))
"""
_WITH_INDEXED_WORD = """
(title LIKE :like ESCAPE '\\'
 OR id IN (SELECT chat_id FROM messages WHERE id IN
             (SELECT rowid FROM message_words WHERE message_words MATCH :phrase)))
"""


class ChatStore:
    """The chats of one user. Open it with `ChatStore.open`."""

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        now: Callable[[], datetime],
        on_delete: Callable[[], None],
        window: Window,
    ) -> None:
        self._path, self._on_delete, self._window = path, on_delete, window
        self._connection = connection
        self._now = now
        self._lock = threading.RLock()
        self._has_index = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        on_delete: Callable[[], None] = lambda: None,
        window: Window = Window.APP,
    ) -> ChatStore:
        """Open the file, making or upgrading it; answers that a crash cut off become stopped.

        Args:
            path: the file.
            now: the clock.
            on_delete: called when a chat was deleted, to remove what else is known of it.
            window: whose the unsent prompt of a new chat is.

        Raises:
            MoetError: MD-CHAT-02 the file is damaged, foreign or newer than this program; it is
                left as it is. MD-DISK-02 or MD-DISK-03 it cannot be written.
        """
        with store_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            connection = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
        store = cls(path, connection, now, on_delete, window)
        try:
            with store_errors(path):
                store._prepare()
        except MoetError:
            connection.close()
            raise
        return store

    def close(self) -> None:
        """Close the file; the store cannot be used afterwards."""
        with self._lock:
            self._connection.close()

    # -- chats ---------------------------------------------------------------------------------

    def create_chat(
        self,
        title: str,
        *,
        model: str = "",
        system: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> int:
        """Store an empty chat; returns its id, which is never used again."""
        now = self._now().timestamp()
        row = (_clean(title), _clean(model), _clean(system), _json(settings or {}), now, now)
        with self._writing() as connection:
            cursor = connection.execute(
                """
                INSERT INTO chats (title, model, system, settings, created, updated)
                VALUES (?, ?, ?, ?, ?, ?)
                """,
                row,
            )
        return _new_id(cursor)

    def list_chats(self, limit: int = 200, query: str = "") -> tuple[Chat, ...]:
        """Return chats without messages, newest first.

        Args:
            limit: how many at most.
            query: all of its words must occur in the title or in a message (parts of words count).
        """
        conditions, values = self._conditions(query)
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT * FROM chats {conditions} ORDER BY updated DESC, id DESC LIMIT :limit",
                {**values, "limit": limit},
            ).fetchall()
        return tuple(_chat_of(row) for row in rows)

    def excerpts(self, query: str, chat_ids: Sequence[int]) -> Mapping[int, str]:
        """Return, by chat, a stretch of its newest message that contains the query's longest word.

        Chats of which only the title contains it are left out.
        """
        words = sorted(_clean(query).split(), key=len)
        if not words or not chat_ids:
            return {}
        word = words[-1]
        marks = ", ".join("?" * len(chat_ids))
        with self._reading() as connection:
            rows = connection.execute(
                f"""
                SELECT chat_id, MAX(position), substr(
                  content, max(1, instr(lower(content), lower(?)) - 30), 200) AS part
                FROM messages WHERE content LIKE ? ESCAPE '\\' AND chat_id IN ({marks})
                GROUP BY chat_id
                """,
                (word, _like(word), *chat_ids),
            ).fetchall()
        return {row["chat_id"]: row["part"] for row in rows}

    def get_chat(self, chat_id: int) -> Chat:
        """Return a chat with all of its messages.

        Raises:
            MoetError: MD-CHAT-03, there is none with this id.
        """
        with self._reading() as connection:
            row = connection.execute("SELECT * FROM chats WHERE id = ?", (chat_id,)).fetchone()
            if row is None:
                raise fail("MD-CHAT-03", chat=chat_id, path=str(self._path))
            messages = connection.execute(
                "SELECT * FROM messages WHERE chat_id = ? ORDER BY position", (chat_id,)
            ).fetchall()
        return _chat_of(row, tuple(_message_of(message) for message in messages))

    def delete_chat(self, chat_id: int) -> None:
        """Delete a chat and its messages for good; the text is overwritten in the file.

        Raises:
            MoetError: MD-CHAT-02 and MD-DISK-02, 03, and those of `on_delete`.
        """
        with self._writing() as connection:
            connection.execute("DELETE FROM chats WHERE id = ?", (chat_id,))
        self._on_delete()

    def rename(self, chat_id: int, title: str) -> None:
        """Give a chat another title. Raises MD-CHAT-03."""
        self._change_chat(chat_id, "title", title)

    def new_draft(self) -> tuple[str, tuple[Mapping[str, Any], ...]]:
        """Return the unsent prompt of this window's chat that is not stored yet, and the files
        beside it.
        """
        with self._reading() as connection:
            row = connection.execute(
                "SELECT * FROM new_drafts WHERE window = ?", (self._window,)
            ).fetchone()
        return ("", ()) if row is None else (_text(row["draft"]), _objects(row["draft_files"]))

    def save_draft(self, chat_id: int | None, draft: str) -> None:
        """Keep the unsent prompt of a chat, None: of this window's that is not stored yet.

        Raises:
            MoetError: MD-CHAT-03.
        """
        if chat_id is None:
            self._change_new("draft", _clean(draft))
        else:
            self._change_chat(chat_id, "draft", draft)

    def save_draft_files(self, chat_id: int | None, files: Sequence[Mapping[str, Any]]) -> None:
        """Keep the files beside the unsent prompt of a chat. Raises MD-CHAT-03."""
        if chat_id is None:
            self._change_new("draft_files", _json(files))
        else:
            self._change_chat(chat_id, "draft_files", _json(files))

    def save_settings(self, chat_id: int, *, system: str, settings: Mapping[str, Any]) -> None:
        """Keep how the answers of a chat are asked for. Raises MD-CHAT-03."""
        self._change_chat(chat_id, "system", system)
        self._change_chat(chat_id, "settings", _json(settings))

    def set_tip(self, chat_id: int, message_id: int) -> None:
        """Remember the last message of the branch that is open. Raises MD-CHAT-03."""
        self._change_chat(chat_id, "tip", message_id)

    # -- messages ------------------------------------------------------------------------------

    def add_message(
        self,
        chat_id: int,
        role: str,
        content: str,
        *,
        status: str = MessageStatus.DONE,
        parent: int | None = None,
        files: Sequence[Mapping[str, Any]] = (),
        meta: Mapping[str, Any] | None = None,
    ) -> int:
        """Put a message behind another one of its chat, and make it the tip; returns its id.

        Raises:
            MoetError: MD-CHAT-03, there is no such chat.
        """
        now = self._now().timestamp()
        values = {
            "chat_id": chat_id,
            "role": role,
            "content": _clean(content),
            "status": MessageStatus(status).value,
            "parent": parent,
            "files": _json(files),
            "meta": _json(meta or {}),
            "now": now,
        }
        with self._writing() as connection:
            self._touch(connection, chat_id)
            cursor = connection.execute(
                """
                INSERT INTO messages
                  (chat_id, position, role, content, status, parent, files, meta, created)
                SELECT :chat_id, COALESCE(MAX(position) + 1, 0), :role, :content,
                  :status, :parent, :files, :meta, :now FROM messages WHERE chat_id = :chat_id
                """,
                values,
            )
            tip = {"tip": _new_id(cursor), "chat_id": chat_id}
            connection.execute("UPDATE chats SET tip = :tip WHERE id = :chat_id", tip)
        return tip["tip"]

    def update_message(
        self,
        message_id: int,
        *,
        content: str,
        status: str,
        meta: Mapping[str, Any],
        reasoning: str | None = None,
    ) -> None:
        """Replace what a message says; durable when it returns.

        Called about once a second while an answer is written. A message whose chat was deleted
        meanwhile is left deleted.
        """
        values = {
            "id": message_id,
            "content": _clean(content),
            "status": MessageStatus(status).value,
            "meta": _json(meta),
            "reasoning": None if reasoning is None else _clean(reasoning),
            "now": self._now().timestamp(),
        }
        with self._writing() as connection:
            connection.execute(
                """
                UPDATE messages SET content = :content, status = :status, meta = :meta,
                  reasoning = COALESCE(:reasoning, reasoning) WHERE id = :id
                """,
                values,
            )
            connection.execute(
                """
                UPDATE chats SET updated = :now
                WHERE id = (SELECT chat_id FROM messages WHERE id = :id)
                """,
                values,
            )

    # -- inside --------------------------------------------------------------------------------

    def _prepare(self) -> None:
        connection = self._connection
        prepare(connection, self._path)
        self._has_index = make_index(connection)
        with self._writing():
            connection.execute(
                "UPDATE messages SET status = ? WHERE status = ?",
                (MessageStatus.STOPPED.value, MessageStatus.WRITING.value),
            )

    def _conditions(self, query: str) -> tuple[str, dict[str, Any]]:
        parts: list[str] = []
        values: dict[str, Any] = {}
        for i, word in enumerate(_clean(query).split()):
            is_indexed = self._has_index and len(word) >= _TRIGRAM
            part = _WITH_INDEXED_WORD if is_indexed else _WITH_WORD
            parts.append(part.replace(":like", f":like{i}").replace(":phrase", f":phrase{i}"))
            values[f"like{i}"] = _like(word)
            if is_indexed:
                values[f"phrase{i}"] = '"' + word.replace('"', '""') + '"'
        return ("WHERE " + " AND ".join(parts) if parts else ""), values

    def _change_new(self, column: str, value: str) -> None:
        with self._writing() as connection:
            connection.execute(
                f"""
                INSERT INTO new_drafts (window, {column}) VALUES (?, ?)
                ON CONFLICT (window) DO UPDATE SET {column} = excluded.{column}
                """,
                (self._window, value),
            )

    def _change_chat(self, chat_id: int, column: str, value: str | int) -> None:
        stored = _clean(value) if isinstance(value, str) else value
        with self._writing() as connection:
            cursor = connection.execute(
                f"UPDATE chats SET {column} = ? WHERE id = ?", (stored, chat_id)
            )
            self._require(cursor, chat_id)

    def _touch(self, connection: sqlite3.Connection, chat_id: int) -> None:
        now = self._now().timestamp()
        cursor = connection.execute("UPDATE chats SET updated = ? WHERE id = ?", (now, chat_id))
        self._require(cursor, chat_id)

    def _require(self, cursor: sqlite3.Cursor, chat_id: int) -> None:
        if cursor.rowcount == 0:
            raise fail("MD-CHAT-03", chat=chat_id, path=str(self._path))

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, store_errors(self._path):
            yield self._connection

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or nothing."""
        with self._lock, store_errors(self._path), transaction(self._connection):
            yield self._connection


def _new_id(cursor: sqlite3.Cursor) -> int:
    if cursor.lastrowid is None:
        raise RuntimeError("an INSERT gave no id")
    return cursor.lastrowid


def _clean(text: str) -> str:
    """Text without lone surrogates, which cannot be stored as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _json(value: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(dict(value) if isinstance(value, Mapping) else [dict(one) for one in value])


def _like(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


# Values that this program does not write come from damage. They are read as nothing said, so that
# the rest of a chat can still be opened.


def _time_of(seconds: Any) -> datetime:
    try:
        return datetime.fromtimestamp(float(seconds), UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def _value(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _object(text: Any) -> Mapping[str, Any]:
    value = _value(text)
    return value if isinstance(value, dict) else {}


def _objects(text: Any) -> tuple[Mapping[str, Any], ...]:
    value = _value(text)
    return tuple(one for one in value if isinstance(one, dict)) if isinstance(value, list) else ()


def _status(value: Any) -> MessageStatus:
    return MessageStatus(value) if value in list(MessageStatus) else MessageStatus.STOPPED


def _chat_of(row: sqlite3.Row, messages: tuple[Message, ...] = ()) -> Chat:
    return Chat(
        id=row["id"],
        title=_text(row["title"]),
        model=_text(row["model"]),
        system=_text(row["system"]),
        draft=_text(row["draft"]),
        draft_files=_objects(row["draft_files"]),
        settings=_object(row["settings"]),
        tip=row["tip"],
        created=_time_of(row["created"]),
        updated=_time_of(row["updated"]),
        messages=messages,
    )


def _message_of(row: sqlite3.Row) -> Message:
    return Message(
        id=row["id"],
        parent=row["parent"],
        position=row["position"],
        role=_text(row["role"]),
        content=_text(row["content"]),
        reasoning=_text(row["reasoning"]),
        status=_status(row["status"]),
        meta=_object(row["meta"]),
        files=_objects(row["files"]),
        created=_time_of(row["created"]),
    )
