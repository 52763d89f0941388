"""Kept responses: what comes back, what is dropped, who may read the file."""

from __future__ import annotations

import random
import sqlite3
import string
import threading
from pathlib import Path

import pytest

from moet_desk.store.responses import Kept, ResponseStore

SAID = [{"role": "user", "content": "한국어 😀"}]


def kept(text: str = "x") -> Kept:
    return Kept(SAID, {"output": text})


def test_put__get__equal_also_after_opening_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "responses.sqlite3"
    store = ResponseStore(path)
    store.put("a", kept())
    assert store.get("a") == kept()
    assert store.get("b") is None
    store.close()
    again = ResponseStore(path)
    assert again.get("a") == kept()
    assert again.delete("a")
    assert not again.delete("a")
    assert again.get("a") is None
    again.close()


def test_file__only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite3"
    ResponseStore(path).put("a", kept())
    assert {file.name: file.stat().st_mode & 0o077 for file in tmp_path.iterdir()} == {
        file.name: 0 for file in tmp_path.iterdir()
    }
    assert path.stat().st_mode & 0o777 == 0o600


def test_limits__oldest_go_first() -> None:
    store = ResponseStore(max_records=3)
    for name in "abcde":
        store.put(name, kept())
    assert [name for name in "abcde" if store.get(name)] == ["c", "d", "e"]


def test_limits__bytes__newest_that_fit_stay() -> None:
    noise = "".join(random.Random(5).choices(string.printable, k=20_000))
    store = ResponseStore(max_bytes=60_000)
    for name in "abcdefgh":
        store.put(name, kept(noise[ord(name) - 97 :]))
    there = [name for name in "abcdefgh" if store.get(name)]
    assert there == list("abcdefgh")[-len(there) :]
    assert 1 <= len(there) < 8


def test_limits__one_too_large__is_not_kept_and_drops_nothing() -> None:
    store = ResponseStore(max_bytes=2_000)
    store.put("a", kept())
    noise = "".join(random.Random(5).choices(string.printable, k=20_000))
    store.put("b", kept(noise))
    assert store.get("b") is None
    assert store.get("a") == kept()


def test_damaged_file__is_set_aside_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "responses.sqlite3"
    path.write_bytes(b"no database at all, " * 100)
    store = ResponseStore(path)
    store.put("a", kept())
    assert store.get("a") == kept()
    assert (tmp_path / "responses.sqlite3.damaged").read_bytes().startswith(b"no database")
    assert "set aside" in caplog.text
    assert str(tmp_path) not in caplog.text


def test_file_fails_later__reported_and_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResponseStore(tmp_path / "responses.sqlite3")
    store.put("a", kept())
    store.close()
    store.put("b", kept())
    assert store.get("a") is None
    assert not store.delete("a")
    assert [word in caplog.text for word in ("b is not kept", "'a' cannot be read")] == [True] * 2
    assert list(tmp_path.iterdir()) == [tmp_path / "responses.sqlite3"]  # closed in order


def test_file_that_another_program_holds__stays_and_memory_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "responses.sqlite3"
    ResponseStore(path).close()
    before = path.read_bytes()
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **{**k, "timeout": 0.05}))
    with connect(path) as other:
        other.execute("BEGIN EXCLUSIVE")
        store = ResponseStore(path)
        store.put("a", kept())
        assert store.get("a") == kept()
        other.rollback()
    assert "kept in memory" in caplog.text
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*.damaged"))


def test_folder_that_cannot_be_made__memory_serves(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    store = ResponseStore(tmp_path / "file" / "responses.sqlite3")
    store.put("a", kept())
    assert store.get("a") == kept()


def test_threads__all_are_kept() -> None:
    store = ResponseStore()
    threads = [threading.Thread(target=store.put, args=(f"r{i}", kept())) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(store.get(f"r{i}") for i in range(20))
