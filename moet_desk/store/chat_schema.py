"""The file of the chats: its schema, migrations, search index, and what its errors mean.

`store.chats` owns the connection and calls this once, when the file is opened.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moet_desk.errors import MoetError, fail
from moet_desk.errors.disk import unwritable

_CHECKED_BYTES = 64 * 2**20  # larger files are not read through at every start

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

_SCHEMA_2 = """
ALTER TABLE messages ADD COLUMN parent INTEGER;
ALTER TABLE messages ADD COLUMN files TEXT NOT NULL DEFAULT '[]';
ALTER TABLE chats ADD COLUMN tip INTEGER;
ALTER TABLE chats ADD COLUMN settings TEXT NOT NULL DEFAULT '{}';
ALTER TABLE chats ADD COLUMN draft_files TEXT NOT NULL DEFAULT '[]';
UPDATE messages SET parent = (
  SELECT before.id FROM messages AS before
  WHERE before.chat_id = messages.chat_id AND before.position < messages.position
    AND before.status <> 'replaced'
  ORDER BY before.position DESC LIMIT 1
);
UPDATE messages SET status = CASE
  WHEN json_extract(meta, '$.error') IS NOT NULL THEN 'failed'
  WHEN json_extract(meta, '$.reason') = 'cancelled' THEN 'stopped'
  ELSE 'done' END
WHERE status = 'replaced';
"""
# No foreign key on `parent`: deleting a long chat would cascade once per message, and SQLite stops
# at 1,000 levels.

# Entry i brings a file from version i to version i + 1; PRAGMA user_version holds the version.
_MIGRATIONS: tuple[str, ...] = (_SCHEMA_1, _SCHEMA_2)

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


_NEW_DRAFTS = """
CREATE TABLE IF NOT EXISTS new_drafts (
  window TEXT PRIMARY KEY,
  draft TEXT NOT NULL DEFAULT '',
  draft_files TEXT NOT NULL DEFAULT '[]'
)
"""
# Like the search index no version of its own: programs that do not know it leave it as it is.

_BEFORE_WINDOWS = """
INSERT OR IGNORE INTO new_drafts SELECT 'app', draft, draft_files FROM new_chat;
DROP TABLE new_chat
"""
# There was one draft for all windows once.


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Make the connection durable, refuse a file that is not ours, bring it to our schema.

    Raises:
        MoetError: MD-CHAT-02 the file is damaged, foreign or newer. Errors of sqlite3 pass.
    """
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA secure_delete = ON")
    # FULL: each commit survives a power cut. One fsync per update, about one a second.
    connection.execute("PRAGMA synchronous = FULL")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    _refuse_foreign(connection, path, version)
    connection.execute("PRAGMA journal_mode = WAL")
    for number in range(version, len(_MIGRATIONS)):
        _migrate(connection, number)
    with transaction(connection):
        connection.execute(_NEW_DRAFTS)
        if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'new_chat'").fetchone():
            for statement in _BEFORE_WINDOWS.split(";\n"):
                connection.execute(statement)


def _refuse_foreign(connection: sqlite3.Connection, path: Path, version: int) -> None:
    if version > len(_MIGRATIONS):
        reason = f"it was written by a newer moet-desk (format {version})"
        raise fail("MD-CHAT-02", path=str(path), reason=reason)
    has_tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if version < 0 or (version == 0 and has_tables):
        raise fail("MD-CHAT-02", path=str(path), reason="it belongs to another program")
    if path.stat().st_size <= _CHECKED_BYTES:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise fail("MD-CHAT-02", path=str(path), reason=f"it is damaged ({found})")


def _migrate(connection: sqlite3.Connection, number: int) -> None:
    with transaction(connection):
        if connection.execute("PRAGMA user_version").fetchone()[0] > number:
            return  # another process was faster
        for statement in _MIGRATIONS[number].split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {number + 1}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk has ended it already
            connection.execute("ROLLBACK")
        raise


def make_index(connection: sqlite3.Connection) -> bool:
    """Make the search index; False if this SQLite has no FTS5 with trigrams."""
    try:
        existed = connection.execute(
            "SELECT 1 FROM sqlite_schema WHERE name = 'message_words'"
        ).fetchone()
        connection.executescript(_SEARCH_INDEX)
        if existed is None:
            connection.execute("INSERT INTO message_words (message_words) VALUES ('rebuild')")
    except sqlite3.OperationalError as problem:
        if "no such module" in str(problem) or "no such tokenizer" in str(problem):
            return False
        raise
    return True


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn what SQLite and the system refuse into catalogue errors."""
    try:
        yield
    except sqlite3.DatabaseError as problem:
        raise _error_of(problem, path) from problem
    except UnicodeDecodeError as problem:  # SQLite may quote damaged bytes in what it says
        raise fail("MD-CHAT-02", path=str(path), reason="it is damaged") from problem
    except OSError as problem:
        raise unwritable(path, problem) from problem


def _error_of(problem: sqlite3.DatabaseError, path: Path) -> MoetError:
    primary = getattr(problem, "sqlite_errorcode", 0) & 0xFF  # the low byte is the kind
    if primary == sqlite3.SQLITE_FULL:
        return fail("MD-DISK-02", path=str(path), done="the last message")
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return fail("MD-DISK-03", path=str(path), reason=str(problem))
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return fail("MD-CHAT-02", path=str(path), reason="another program is using it")
    return fail("MD-CHAT-02", path=str(path), reason=str(problem))
