"""What the kernel refuses while files are written and read: an error of the catalogue or a word in
the log, and what was there before is there still.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moet_desk import config, runtime
from moet_desk.engine import heat
from moet_desk.errors import MoetError
from moet_desk.locations import locate
from moet_desk.store.chats import ChatStore
from moet_desk.store.durable import disk_errors, replace_file, write_at, write_new
from moet_desk.store.library import Library
from moet_desk.store.pack_format import HEAT_FILE
from moet_desk.store.pack_reader import PackReader
from moet_desk.store.responses import Kept, ResponseStore
from moet_desk.store.saved_prefixes import SavedPrefixes
from moet_desk.store.server_keys import read_key, save_key
from moet_desk.store.sources import TensorIndex
from moet_desk.store.state_file import change_record, read_record, write_record
from tests.faults import (
    FOLDERS,
    MAPS,
    READS,
    RENAMES,
    SYNCS,
    WRITES,
    Refusal,
    n_open_files,
    opens,
    opens_to_write,
    refused,
)


@pytest.fixture(autouse=True)
def nothing_left_open() -> None:
    """Files of tests before, which go when garbage is looked for, are not to be counted."""
    gc.collect()


FULL_DISK = [Refusal(WRITES, errno.ENOSPC), Refusal(WRITES, errno.EDQUOT)]
ENDS_IN_FULL = [*FULL_DISK, Refusal(SYNCS, errno.ENOSPC), opens_to_write(errno.ENOSPC)]
REFUSED = [
    Refusal(WRITES, errno.EIO),
    Refusal(SYNCS, errno.EIO),
    Refusal(RENAMES, errno.EIO),
    Refusal(RENAMES, errno.EACCES),
    opens_to_write(errno.EACCES),
    opens_to_write(errno.EROFS),
    opens_to_write(errno.EMFILE),
    opens_to_write(errno.EIO),
]
KEY = b"k" * 32


@dataclass
class Writer:
    """Something on disk that is written anew.

    Attributes:
        first: puts it there.
        write: changes it.
        read: what can be seen of it.
        skips: calls that it does not make.
        quiet: whether a write that fails is no error: nobody asked for it.
    """

    first: Callable[[Path], Any]
    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    skips: tuple[tuple[str, ...], ...] = ()
    quiet: bool = False


def chats(folder: Path) -> ChatStore:
    return ChatStore.open(folder / "chats.sqlite3")


def add_chat(folder: Path) -> None:
    store = chats(folder)
    store.add_message(store.create_chat("t"), "user", "what was said")
    store.close()


def add_message(folder: Path) -> None:
    store = chats(folder)
    try:
        store.add_message(store.list_chats()[0].id, "user", "x" * 10_000)
    finally:
        store.close()


def said(folder: Path) -> list[str]:
    store = chats(folder)
    try:
        return [m.content for c in store.list_chats() for m in store.get_chat(c.id).messages]
    finally:
        store.close()


def prefixes(folder: Path, key: bytes) -> None:
    saved = SavedPrefixes(folder, n_bytes=10**6)
    saved.write(key, np.arange(2000, dtype=np.uint8))
    saved.close()


def has_prefix(folder: Path) -> bool:
    saved = SavedPrefixes(folder, n_bytes=10**6)
    found = saved.read(KEY)
    saved.close()
    return found is not None and found.tobytes() == np.arange(2000, dtype=np.uint8).tobytes()


WRITERS = {
    "file": Writer(
        lambda f: replace_file(f / "a", [b"old"]),
        lambda f: write_all(f / "a"),
        lambda f: (f / "a").read_bytes(),
    ),
    "record": Writer(
        lambda f: write_record(f / "app.json", {"model": "old"}),
        lambda f: change_record(f / "app.json", lambda kept: {**kept, "more": 1}),
        lambda f: read_record(f / "app.json"),
    ),
    "settings": Writer(
        lambda f: config.save_setting(f / "config.toml", "log.level", "error"),
        lambda f: config.save_setting(f / "config.toml", "log.level", "debug"),
        lambda f: (f / "config.toml").read_text(),
    ),
    "key": Writer(
        lambda f: save_key(f / "keys.json", "https://a:1", "first"),
        lambda f: save_key(f / "keys.json", "https://b:2", "second"),
        lambda f: read_key(f / "keys.json", "https://a:1"),
    ),
    "heat": Writer(
        lambda f: heat.write(f, [(1, 2.0)]),
        lambda f: heat.write(f, [(2, 3.0)]),
        lambda f: heat.read(f),
        skips=(SYNCS,),
        quiet=True,
    ),
    "chats": Writer(add_chat, add_message, said, skips=(RENAMES,)),
    "prompts": Writer(
        lambda f: prefixes(f, KEY),
        lambda f: prefixes(f, b"n" * 32),
        has_prefix,
        skips=(SYNCS,),
        quiet=True,
    ),
}


def write_all(path: Path) -> None:
    with disk_errors(path):
        replace_file(path, [b"new" * 5000, b"end"])


def code_of(refusal: Refusal, work: Callable[[], object]) -> str | None:
    """The error of the catalogue that this ends in, None if it ends well."""
    try:
        refused(refusal, work)
    except MoetError as error:
        return error.code
    return None


@pytest.mark.parametrize("name", WRITERS)
def test_write__refused_at_any_call__said_and_the_old_one_is_whole(
    name: str, tmp_path: Path
) -> None:
    kept = WRITERS[name]
    warm = tmp_path / "warm"
    warm.mkdir()
    kept.first(warm)
    kept.write(warm)  # imports what it needs
    kept.read(warm)
    for i, refusal in enumerate([*ENDS_IN_FULL, *REFUSED]):
        if refusal.calls in kept.skips:
            continue
        folder = tmp_path / str(i)
        folder.mkdir()
        kept.first(folder)
        before, n_files = kept.read(folder), n_open_files()
        code = code_of(refusal, partial(kept.write, folder))
        want = "MD-DISK-02" if refusal in ENDS_IN_FULL else "MD-DISK-03"
        if kept.quiet:
            assert code is None
        elif name == "chats":
            assert code in ("MD-CHAT-02", want)  # SQLite names some of them otherwise
        else:
            assert code == want
        assert n_open_files() == n_files, refusal
        assert kept.read(folder) == before, refusal
        kept.write(folder)  # the disk is well again
    assert n_open_files() == n_files


def test_record__cannot_be_read_just_now__is_not_replaced_by_a_shorter_one(tmp_path: Path) -> None:
    save_key(tmp_path / "keys.json", "https://a:1", "first")
    for refusal in (Refusal(READS, errno.EIO), opens(errno.EMFILE), opens(errno.EACCES)):
        with pytest.raises(MoetError) as caught:
            refused(refusal, lambda: save_key(tmp_path / "keys.json", "https://b:2", "second"))
        assert caught.value.code == "MD-DISK-03"
    assert read_key(tmp_path / "keys.json", "https://a:1") == "first"


@pytest.mark.parametrize("refusal", [*FULL_DISK, Refusal(WRITES, errno.EIO)], ids=str)
def test_new_file__refused__nothing_half_is_left(refusal: Refusal, tmp_path: Path) -> None:
    path = tmp_path / "chat.md"
    with pytest.raises(MoetError, match="MD-DISK"):
        refused(refusal, lambda: write_new(path, "words " * 5000))
    assert not path.exists()
    write_new(path, "words")
    with pytest.raises(MoetError, match="MD-DISK-03"):
        write_new(path, "others")
    assert path.read_text() == "words"


def test_write_at__short_writes__are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intact, data = os.pwrite, bytes(range(251)) * 20
    monkeypatch.setattr(os, "pwrite", lambda fd, part, at: intact(fd, part[:700], at))
    with (tmp_path / "a").open("wb") as file:
        write_at(file.fileno(), data, 3)
    assert (tmp_path / "a").read_bytes() == bytes(3) + data


def test_responses__file_refused__memory_serves_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def work() -> Kept | None:
        store = ResponseStore(tmp_path / "responses.sqlite3")
        store.put("a", Kept([], {"output": "x"}))
        found = store.get("a")
        store.close()
        return found

    for refusal in (opens_to_write(errno.EROFS), opens(errno.EMFILE)):
        caplog.clear()
        assert refused(refusal, work) == Kept([], {"output": "x"})
        assert caplog.records


def test_log__disk_full__lines_are_lost_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = locate({}, tmp_path)

    def work() -> tuple[str, ...]:
        running = runtime.start_logging(places, "info", "own.log")
        for _ in range(50):
            logging.getLogger("moet_desk.test").error("words " * 500)
        running.close()
        return running.recent()

    for refusal in (Refusal(WRITES, errno.ENOSPC), Refusal(WRITES, errno.EIO)):
        assert any("words" in line for line in refused(refusal, work))
    said_on_screen = capsys.readouterr()
    assert said_on_screen.err == said_on_screen.out == ""


# -- reading ---------------------------------------------------------------------------------

CANNOT_READ = [
    opens(errno.EACCES),
    opens(errno.EIO),
    opens(errno.EMFILE),
    opens(errno.ENODEV),
    Refusal(READS, errno.EIO),
    Refusal(READS, errno.ENODEV),
]


def open_pack(folder: Path) -> None:
    PackReader.open(folder).close()


@pytest.mark.parametrize("refusal", CANNOT_READ, ids=str)
def test_read__refused__error_of_the_catalogue_or_none(
    refusal: Refusal, tiny_pack: Path, tiny_source: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "config.toml"
    config.save_setting(settings, "log.level", "error")
    (tiny_pack / HEAT_FILE).write_bytes(b'{"rows": [[1, 2.0]]}')
    listed = "MD-PACK-07" if refusal.calls == ("openat",) else None  # else each pack says it
    readers: list[tuple[Callable[[], object], str | None]] = [
        (lambda: open_pack(tiny_pack), "MD-PACK-07"),
        (lambda: TensorIndex.open(tiny_source), "MD-SRC-02"),
        (lambda: config.load(settings, environment={}), "MD-CFG-01"),
        (lambda: Library(tiny_pack.parent).packs(), listed),
        (lambda: heat.read(tiny_pack), None),
        (lambda: read_record(settings), None),
    ]
    for read, code in readers:
        n_files = n_open_files()
        read()  # imports what it needs
        assert code_of(refusal, read) == code
        assert n_open_files() == n_files


def test_map__refused__weights_of_a_source_cannot_be_read(tiny_source: Path) -> None:
    TensorIndex.open(tiny_source)
    with pytest.raises(MoetError) as caught:
        refused(Refusal(MAPS, errno.ENOMEM), lambda: TensorIndex.open(tiny_source))
    assert caught.value.code == "MD-SRC-02"


def test_folder__cannot_be_made__said(tmp_path: Path) -> None:
    for number, code in ((errno.EROFS, "MD-DISK-03"), (errno.ENOSPC, "MD-DISK-02")):
        with pytest.raises(MoetError) as caught:
            refused(
                Refusal(FOLDERS, number), lambda: write_record(tmp_path / "new" / "app.json", {})
            )
        assert caught.value.code == code
