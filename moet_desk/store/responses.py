"""Answers of the endpoint that clients may go on from: one SQLite file of bounded size.

A record holds the whole conversation up to its answer, so dropping an old one never breaks a newer
one. It is a convenience, not a promise: a file that cannot be read is set aside, what cannot be
written or read later on is reported in the log and missing, and writes survive the program but not
a power cut. One connection behind a lock: any thread may call.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MAX_RECORDS = 2000
MAX_BYTES = 64 * 2**20
"""What all records together may take, compressed."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  created REAL NOT NULL,
  n_bytes INTEGER NOT NULL,
  record BLOB NOT NULL
);
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """A response: the chat messages up to its answer, and its body as it was sent."""

    messages: Sequence[Mapping[str, Any]]
    body: Mapping[str, Any]


class ResponseStore:
    """The newest responses. `path` None keeps them in memory."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        max_records: int = MAX_RECORDS,
        max_bytes: int = MAX_BYTES,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._now = now
        self._lock = threading.Lock()
        self._file = _open(path)

    def put(self, response_id: str, kept: Kept) -> None:
        """Keep a response, and drop the oldest ones if there are too many."""
        text = json.dumps([list(kept.messages), kept.body], separators=(",", ":"))
        record = zlib.compress(text.encode(), 1)
        if len(record) > self._max_bytes:
            log.warning("response %s is too large to be kept: %d bytes", response_id, len(record))
            return
        row = (response_id, self._now(), len(record), record)
        insert = "INSERT INTO responses (id, created, n_bytes, record) VALUES (?, ?, ?, ?)"
        try:
            with self._lock, self._file as file:
                file.execute(insert, row)
                self._drop_oldest(file)
        except sqlite3.Error as problem:
            log.warning("response %s is not kept: %s", response_id, problem)

    def get(self, response_id: str) -> Kept | None:
        """The response of that id, if it is still there."""
        query = "SELECT record FROM responses WHERE id = ?"
        try:
            with self._lock:
                row = self._file.execute(query, (response_id,)).fetchone()
            if row is None:
                return None
            messages, body = json.loads(zlib.decompress(row[0]))
        except (sqlite3.Error, zlib.error, ValueError, TypeError) as problem:
            log.warning("response %r cannot be read: %s", response_id, problem)
            return None
        return Kept(messages, body)

    def delete(self, response_id: str) -> bool:
        """Forget a response; False if it is not there."""
        try:
            with self._lock, self._file as file:
                done = file.execute("DELETE FROM responses WHERE id = ?", (response_id,))
        except sqlite3.Error as problem:
            log.warning("response %r cannot be deleted: %s", response_id, problem)
            return False
        return done.rowcount > 0

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _drop_oldest(self, file: sqlite3.Connection) -> None:
        """Keep the newest records that fit both limits."""
        ranked = """
        SELECT number, ROW_NUMBER() OVER newest AS place, SUM(n_bytes) OVER newest AS upto
        FROM responses WINDOW newest AS (ORDER BY number DESC)
        """
        too_old = f"SELECT number FROM ({ranked}) WHERE place > ? OR upto > ?"
        file.execute(
            f"DELETE FROM responses WHERE number IN ({too_old})",
            (self._max_records, self._max_bytes),
        )


def _open(path: Path | None) -> sqlite3.Connection:
    if path is None:
        return _connect(":memory:")
    try:
        return _open_file(path)
    except (OSError, sqlite3.Error, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        log.warning("responses are kept in memory: %s cannot be used: %s", path.name, reason)
        return _connect(":memory:")


def _open_file(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    _make_private(path)
    try:
        return _connect(str(path))
    except sqlite3.OperationalError:  # another program has it, or the drive is full
        raise
    except (sqlite3.DatabaseError, UnicodeDecodeError) as problem:  # SQLite may quote the damage
        aside = path.with_name(path.name + ".damaged")
        log.warning("%s cannot be read (%s); it is set aside as %s", path.name, problem, aside.name)
        path.replace(aside)
        for end in ("-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        _make_private(path)
        return _connect(str(path))


def _make_private(path: Path) -> None:
    """Make the file if it is not there. It holds what was said: only its owner may read it."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _connect(where: str) -> sqlite3.Connection:
    file = sqlite3.connect(where, timeout=5.0, check_same_thread=False)
    try:
        file.execute("PRAGMA auto_vacuum = FULL")  # only counts before the first table
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
        file.executescript(_SCHEMA)
        file.execute("SELECT COUNT(*), SUM(n_bytes) FROM responses").fetchone()
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        file.close()
        raise
    return file
