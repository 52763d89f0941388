"""Chats on disk: one SQLite file, written so that nothing said is lost.

Each change is one durable transaction, also while an answer is being written, so after kill -9 the
text up to the last update is there; such an answer shows as stopped on the next opening. Owns the
schema and its migrations. One connection behind a lock: any thread may call, calls wait for each
other.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from moet_desk.errors import MoetError, fail

_BUSY_S = 5.0  # how long to wait for another program that writes to the file
_CHECKED_BYTES = 64 * 2**20  # larger files are not read through at every start
_TRIGRAM = 3  # shorter words are not in the search index


class MessageStatus(StrEnum):
    """How a message ended. The values are what the file holds."""

    DONE = "done"
    WRITING = "writing"
    STOPPED = "stopped"
    FAILED = "failed"
    REPLACED = "replaced"  # answered again


@dataclass(frozen=True, slots=True)
class Message:
    """One stored message. `position` counts from 0 within its chat."""

    id: int
    position: int
    role: str
    content: str
    reasoning: str
    status: MessageStatus
    meta: Mapping[str, Any]
    created: datetime


@dataclass(frozen=True, slots=True)
class Chat:
    """One stored chat; lists leave `messages` empty."""

    id: int
    title: str
    model: str
    system: str
    draft: str
    created: datetime
    updated: datetime
    messages: tuple[Message, ...] = field(default=())


_SCHEMA_1 = """
CREATE TABLE chats (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  title TEXT NOT NULL,
  model TEXT NOT NULL DEFAULT '',
  system TEXT NOT NULL DEFAULT '',
  draft TEXT NOT NULL DEFAULT '',
  created REAL NOT NULL,
  updated REAL NOT NULL
);
CREATE INDEX chats_by_time ON chats (updated DESC, id DESC);
CREATE TABLE messages (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  chat_id INTEGER NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
  position INTEGER NOT NULL,
  role TEXT NOT NULL,
  content TEXT NOT NULL,
  reasoning TEXT NOT NULL DEFAULT '',
  status TEXT NOT NULL,
  meta TEXT NOT NULL DEFAULT '{}',
  created REAL NOT NULL,
  UNIQUE (chat_id, position)
);
CREATE INDEX messages_being_written ON messages (status) WHERE status = 'writing';
"""

# Entry i brings a file from version i to version i + 1; PRAGMA user_version holds the version.
_MIGRATIONS: tuple[str, ...] = (_SCHEMA_1,)

_SEARCH_INDEX = """
CREATE VIRTUAL TABLE IF NOT EXISTS message_words USING fts5 (
  content, content='messages', content_rowid='id', tokenize='trigram'
);
CREATE TRIGGER IF NOT EXISTS words_added AFTER INSERT ON messages BEGIN
  INSERT INTO message_words (rowid, content) VALUES (new.id, new.content);
END;
CREATE TRIGGER IF NOT EXISTS words_removed AFTER DELETE ON messages BEGIN
  INSERT INTO message_words (message_words, rowid, content)
    VALUES ('delete', old.id, old.content);
END;
CREATE TRIGGER IF NOT EXISTS words_changed AFTER UPDATE OF content ON messages BEGIN
  INSERT INTO message_words (message_words, rowid, content)
    VALUES ('delete', old.id, old.content);
  INSERT INTO message_words (rowid, content) VALUES (new.id, new.content);
END;
"""

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
    ) -> None:
        self._path, self._on_delete = path, on_delete
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
    ) -> ChatStore:
        """Open the file, making or upgrading it; answers that a crash cut off become stopped.

        Args:
            path: the file.
            now: the clock.
            on_delete: called when a chat was deleted, to remove what else is known of it.

        Raises:
            MoetError: MD-CHAT-02 the file is damaged, foreign or newer than this program; it is
                left as it is. MD-DISK-02 or MD-DISK-03 it cannot be written.
        """
        with _store_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            connection = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
        store = cls(path, connection, now, on_delete)
        try:
            with _store_errors(path):
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

    def create_chat(self, title: str, *, model: str = "", system: str = "") -> int:
        """Store an empty chat; returns its id, which is never used again."""
        now = self._now().timestamp()
        row = (_clean(title), _clean(model), _clean(system), now, now)
        with self._writing() as connection:
            cursor = connection.execute(
                "INSERT INTO chats (title, model, system, created, updated) VALUES (?, ?, ?, ?, ?)",
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

    def save_draft(self, chat_id: int, draft: str) -> None:
        """Keep the unsent prompt of a chat. Raises MD-CHAT-03."""
        self._change_chat(chat_id, "draft", draft)

    # -- messages ------------------------------------------------------------------------------

    def add_message(
        self,
        chat_id: int,
        role: str,
        content: str,
        *,
        status: str = MessageStatus.DONE,
        reasoning: str = "",
        meta: Mapping[str, Any] | None = None,
    ) -> int:
        """Put a message at the end of a chat; returns its id.

        Raises:
            MoetError: MD-CHAT-03, there is no such chat.
        """
        now = self._now().timestamp()
        values = {
            "chat_id": chat_id,
            "role": role,
            "content": _clean(content),
            "reasoning": _clean(reasoning),
            "status": MessageStatus(status).value,
            "meta": json.dumps(dict(meta or {})),
            "now": now,
        }
        with self._writing() as connection:
            self._touch(connection, chat_id)
            cursor = connection.execute(
                """
                INSERT INTO messages
                  (chat_id, position, role, content, reasoning, status, meta, created)
                SELECT :chat_id, COALESCE(MAX(position) + 1, 0), :role, :content, :reasoning,
                  :status, :meta, :now FROM messages WHERE chat_id = :chat_id
                """,
                values,
            )
        return _new_id(cursor)

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
            "meta": json.dumps(dict(meta)),
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
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        # FULL: each commit survives a power cut. One fsync per update, about one a second.
        connection.execute("PRAGMA synchronous = FULL")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        self._refuse_foreign(version)
        connection.execute("PRAGMA journal_mode = WAL")
        for number in range(version, len(_MIGRATIONS)):
            self._migrate(number)
        self._has_index = self._make_index()
        with self._writing():
            connection.execute(
                "UPDATE messages SET status = ? WHERE status = ?",
                (MessageStatus.STOPPED.value, MessageStatus.WRITING.value),
            )

    def _refuse_foreign(self, version: int) -> None:
        if version > len(_MIGRATIONS):
            reason = f"it was written by a newer moet-desk (format {version})"
            raise fail("MD-CHAT-02", path=str(self._path), reason=reason)
        has_tables = self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if version == 0 and has_tables:
            raise fail("MD-CHAT-02", path=str(self._path), reason="it belongs to another program")
        if self._path.stat().st_size <= _CHECKED_BYTES:
            found = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise fail("MD-CHAT-02", path=str(self._path), reason=f"it is damaged ({found})")

    def _migrate(self, number: int) -> None:
        with self._writing() as connection:
            if connection.execute("PRAGMA user_version").fetchone()[0] > number:
                return  # another process was faster
            for statement in _MIGRATIONS[number].split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number + 1}")

    def _make_index(self) -> bool:
        """Make the search index; False if this SQLite has no FTS5 with trigrams."""
        try:
            existed = self._connection.execute(
                "SELECT 1 FROM sqlite_schema WHERE name = 'message_words'"
            ).fetchone()
            self._connection.executescript(_SEARCH_INDEX)
            if existed is None:
                self._connection.execute(
                    "INSERT INTO message_words (message_words) VALUES ('rebuild')"
                )
        except sqlite3.OperationalError as problem:
            if "no such module" in str(problem) or "no such tokenizer" in str(problem):
                return False
            raise
        return True

    def _conditions(self, query: str) -> tuple[str, dict[str, Any]]:
        parts: list[str] = []
        values: dict[str, Any] = {}
        for i, word in enumerate(_clean(query).split()):
            is_indexed = self._has_index and len(word) >= _TRIGRAM
            part = _WITH_INDEXED_WORD if is_indexed else _WITH_WORD
            parts.append(part.replace(":like", f":like{i}").replace(":phrase", f":phrase{i}"))
            escaped = word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
            values[f"like{i}"] = f"%{escaped}%"
            if is_indexed:
                values[f"phrase{i}"] = '"' + word.replace('"', '""') + '"'
        return ("WHERE " + " AND ".join(parts) if parts else ""), values

    def _change_chat(self, chat_id: int, column: str, value: str) -> None:
        with self._writing() as connection:
            cursor = connection.execute(
                f"UPDATE chats SET {column} = ? WHERE id = ?", (_clean(value), chat_id)
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
        with self._lock, _store_errors(self._path):
            yield self._connection

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or nothing."""
        with self._lock, _store_errors(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk has ended it already
                    self._connection.execute("ROLLBACK")
                raise


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    """Turn what SQLite and the system refuse into catalogue errors."""
    try:
        yield
    except sqlite3.DatabaseError as problem:
        raise _error_of(problem, path) from problem
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise fail("MD-DISK-03", path=str(path), reason=reason) from problem


def _error_of(problem: sqlite3.DatabaseError, path: Path) -> MoetError:
    primary = getattr(problem, "sqlite_errorcode", 0) & 0xFF  # the low byte is the kind
    if primary == sqlite3.SQLITE_FULL:
        return fail("MD-DISK-02", path=str(path), done="the last message")
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return fail("MD-DISK-03", path=str(path), reason=str(problem))
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return fail("MD-CHAT-02", path=str(path), reason="another program is using it")
    return fail("MD-CHAT-02", path=str(path), reason=str(problem))


def _new_id(cursor: sqlite3.Cursor) -> int:
    if cursor.lastrowid is None:
        raise RuntimeError("an INSERT gave no id")
    return cursor.lastrowid


def _clean(text: str) -> str:
    """Text without lone surrogates, which cannot be stored as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _time_of(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _chat_of(row: sqlite3.Row, messages: tuple[Message, ...] = ()) -> Chat:
    return Chat(
        id=row["id"],
        title=row["title"],
        model=row["model"],
        system=row["system"],
        draft=row["draft"],
        created=_time_of(row["created"]),
        updated=_time_of(row["updated"]),
        messages=messages,
    )


def _message_of(row: sqlite3.Row) -> Message:
    return Message(
        id=row["id"],
        position=row["position"],
        role=row["role"],
        content=row["content"],
        reasoning=row["reasoning"],
        status=MessageStatus(row["status"]),
        meta=json.loads(row["meta"]),
        created=_time_of(row["created"]),
    )
