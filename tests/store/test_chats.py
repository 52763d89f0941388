"""Chats on disk: order, search, durability against kill -9, damage."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from moet_desk.errors import MoetError
from moet_desk.store.chat_schema import _SCHEMA_1
from moet_desk.store.chats import ChatStore, MessageStatus, Window
from moet_desk.store.saved_prefixes import clear


class Clock:
    """A clock that moves one second per look."""

    def __init__(self) -> None:
        self.now = datetime(2026, 5, 4, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "chats.sqlite3"


@pytest.fixture
def store(path: Path) -> ChatStore:
    return ChatStore.open(path, now=Clock())


def test_delete_chat__saved_prompts__gone_too(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    folder.mkdir()
    (folder / ("ab" * 32 + ".kv")).write_bytes(b"computed")
    store = ChatStore.open(path, now=Clock(), on_delete=lambda: clear(folder))
    first, second = store.create_chat("a"), store.create_chat("b")
    assert len(list(folder.iterdir())) == 1
    store.delete_chat(first)
    assert list(folder.iterdir()) == []
    assert [chat.id for chat in store.list_chats()] == [second]


def test_messages__added_and_updated__come_back_in_order(store: ChatStore) -> None:
    chat_id = store.create_chat("Lions", model="demo", system="Be brief.")
    store.add_message(chat_id, "user", "Tell me.")
    answer = store.add_message(chat_id, "assistant", "", status="writing")
    store.update_message(answer, content="Roar \0 🦁", status="done", meta={"tokens": 3})
    chat = store.get_chat(chat_id)
    assert (chat.title, chat.model, chat.system) == ("Lions", "demo", "Be brief.")
    assert [(m.position, m.role, m.content) for m in chat.messages] == [
        (0, "user", "Tell me."),
        (1, "assistant", "Roar \0 🦁"),
    ]
    assert chat.messages[1].status is MessageStatus.DONE
    assert chat.messages[1].meta == {"tokens": 3}
    assert chat.updated > chat.created


def test_list_chats__several__last_changed_first(store: ChatStore) -> None:
    ids = [store.create_chat(name) for name in "abc"]
    store.add_message(ids[0], "user", "again")
    store.save_draft(ids[1], "a draft is no change of the chat")
    assert [chat.id for chat in store.list_chats()] == [ids[0], ids[2], ids[1]]
    assert [chat.id for chat in store.list_chats(limit=1)] == [ids[0]]
    assert store.get_chat(ids[1]).draft.startswith("a draft")


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", "abc"),
        ("harbour", "a"),
        ("HARB", "a"),
        ("ha", "ab"),
        ("title", "abc"),
        ("title harbour", "a"),
        ("100%", "b"),
        ('say "x', "c"),
        ("_", ""),
        ("昨日は", "c"),
        ("昨日", "c"),
        ("gone", ""),
        ("AND OR NOT", ""),
    ],
)
def test_list_chats__query__all_words_must_occur(
    store: ChatStore, query: str, found: str, *, has_index: bool
) -> None:
    if has_index and not store._has_index:
        pytest.skip("this SQLite has no FTS5")
    store._has_index = has_index
    texts = {"a": "The harbour sleeps", "b": "100% hats \\ gone", "c": 'They say "x" 昨日は'}
    for name, text in texts.items():
        chat_id = store.create_chat(f"{name} title")
        message = store.add_message(chat_id, "user", "gone")
        store.update_message(message, content=text.replace("gone", ""), status="done", meta={})
    assert sorted(chat.title[0] for chat in store.list_chats(query=query)) == list(found)


def test_delete_chat__text__gone_from_the_file_and_id_not_reused(
    store: ChatStore, path: Path
) -> None:
    chat_id = store.create_chat("t")
    message = store.add_message(chat_id, "user", "very-secret-words " * 50)
    store.delete_chat(chat_id)
    store.update_message(message, content="late", status="done", meta={})
    with pytest.raises(MoetError) as caught:
        store.get_chat(chat_id)
    assert caught.value.code == "MD-CHAT-03"
    assert store.list_chats(query="very-secret-words") == ()
    assert store.create_chat("next") > chat_id
    store.close()
    assert b"very-secret-words" not in path.read_bytes()


def test_unknown_chat__every_change__catalogue_error(store: ChatStore) -> None:
    for change in (
        lambda: store.rename(7, "x"),
        lambda: store.save_draft(7, "x"),
        lambda: store.add_message(7, "user", "x"),
    ):
        with pytest.raises(MoetError) as caught:
            change()
        assert caught.value.code == "MD-CHAT-03"
    assert store.list_chats() == ()


def test_add_message__lone_surrogate__stored_with_a_replacement(store: ChatStore) -> None:
    chat_id = store.create_chat("\ud800")
    store.add_message(chat_id, "user", "a\udfffb")
    assert store.get_chat(chat_id).messages[0].content == "a?b"


def test_threads__many_writers__nothing_lost(store: ChatStore) -> None:
    chat_id = store.create_chat("t")

    def write(name: str) -> None:
        for i in range(20):
            store.add_message(chat_id, "user", f"{name}{i}")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    messages = store.get_chat(chat_id).messages
    assert [message.position for message in messages] == list(range(80))


_WRITER = """
import sys
from pathlib import Path
from moet_desk.store.chats import ChatStore
store = ChatStore.open(Path(sys.argv[1]))
chat = store.create_chat("t")
store.add_message(chat, "user", "go")
answer = store.add_message(chat, "assistant", "", status="writing")
text = ""
while True:
    text += f"word{len(text)} "
    store.update_message(answer, content=text, status="writing", meta={})
    print(len(text), flush=True)
"""


@pytest.mark.parametrize("n_updates", [1, 7, 40])
def test_open__writer_was_killed__text_is_there_and_shows_as_stopped(
    path: Path, n_updates: int
) -> None:
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        n_durable = [int(writer.stdout.readline()) for _ in range(n_updates)][-1]
        writer.send_signal(signal.SIGKILL)
    answer = ChatStore.open(path).get_chat(1).messages[1]
    assert answer.status is MessageStatus.STOPPED
    assert len(answer.content) >= n_durable
    assert answer.content.startswith("word0 word6 "[: len(answer.content)])


@pytest.mark.parametrize("damage", ["foreign", "header", "middle", "newer", "other program"])
def test_open__file_cannot_be_used__said_and_left_alone(
    store: ChatStore, path: Path, damage: str
) -> None:
    chat_id = store.create_chat("t")
    for i in range(100):
        store.add_message(chat_id, "user", f"{i} " * 200)
    store.close()
    if damage == "foreign":
        path.write_text("these are my notes, no database " * 200)
    elif damage == "header":
        path.write_bytes(b"\0" * 100 + path.read_bytes()[100:])
    elif damage == "middle":
        data = bytearray(path.read_bytes())
        data[4096 * 2 : 4096 * 6] = b"\xa5" * 4096 * 4
        path.write_bytes(data)
    elif damage == "newer":
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 99")
    else:
        path.unlink()
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE recipes (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(MoetError) as caught:
        ChatStore.open(path)
    assert caught.value.code == "MD-CHAT-02"
    assert str(path) in caught.value.cause
    assert path.read_bytes() == before


def test_open__again__everything_is_kept(store: ChatStore, path: Path) -> None:
    chat_id = store.create_chat("t")
    store.add_message(chat_id, "user", "hello")
    store.close()
    again = ChatStore.open(path)
    assert again.get_chat(chat_id).messages[0].content == "hello"
    assert again.list_chats(query="hello")
    assert path.stat().st_mode & 0o777 == 0o600


def test_open__cannot_be_made__catalogue_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file" / "chats.sqlite3", tmp_path):
        with pytest.raises(MoetError) as caught:
            ChatStore.open(bad)
        assert caught.value.code == "MD-DISK-03"


def test_write__disk_is_full__said_and_nothing_lost(store: ChatStore) -> None:
    chat_id = store.create_chat("t")
    store.add_message(chat_id, "user", "kept")
    n_pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {n_pages}")
    with pytest.raises(MoetError) as caught:
        store.add_message(chat_id, "user", "x" * 10**6)
    assert caught.value.code == "MD-DISK-02"
    assert [m.content for m in store.get_chat(chat_id).messages] == ["kept"]


def test_write__another_program_holds_the_file__said_and_written_when_it_lets_go(
    store: ChatStore, path: Path
) -> None:
    chat_id = store.create_chat("t")
    store._connection.execute("PRAGMA busy_timeout = 20")
    with sqlite3.connect(path) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(MoetError, match="another program is using it") as caught:
            store.add_message(chat_id, "user", "kept")
        other.rollback()
    assert caught.value.code == "MD-CHAT-02"
    store.add_message(chat_id, "user", "kept")
    assert [m.content for m in store.get_chat(chat_id).messages] == ["kept"]


@pytest.mark.parametrize("jump", [timedelta(days=-400), timedelta(hours=9), timedelta(days=9000)])
def test_clock_jumps__messages_stay_in_their_order(
    store: ChatStore, path: Path, jump: timedelta
) -> None:
    chat_id = store.create_chat("t")
    store.add_message(chat_id, "user", "one")
    assert isinstance(store._now, Clock)
    store._now.now += jump
    answer = store.add_message(chat_id, "assistant", "", status="writing")
    store.update_message(answer, content="two", status="done", meta={})
    store.close()
    again = ChatStore.open(path, now=Clock())
    again.add_message(chat_id, "user", "three")
    assert [m.content for m in again.get_chat(chat_id).messages] == ["one", "two", "three"]
    assert [chat.id for chat in again.list_chats()] == [chat_id]


def test_backup_copy__while_open__is_a_valid_store(
    store: ChatStore, path: Path, tmp_path: Path
) -> None:
    store.add_message(store.create_chat("t"), "user", "hello")
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", tmp_path / f"copy.sqlite3{suffix}")
    assert ChatStore.open(tmp_path / "copy.sqlite3").list_chats(query="hello")


OLD_FILE = """
INSERT INTO chats (title, created, updated) VALUES ('old', 1, 1), ('other', 1, 1);
INSERT INTO messages (chat_id, position, role, content, status, meta, created) VALUES
  (1, 0, 'user', 'q', 'done', '{}', 1),
  (1, 1, 'assistant', 'first', 'replaced', '{"reason": "stop"}', 1),
  (2, 0, 'user', 'of the other', 'done', '{}', 1),
  (1, 2, 'assistant', 'second', 'replaced', '{"reason": "cancelled"}', 1),
  (1, 3, 'assistant', 'third', 'replaced', '{"error": {"code": "MD-ENG-04"}}', 1),
  (1, 4, 'assistant', 'kept', 'done', '{}', 1),
  (1, 5, 'user', 'next', 'done', '{}', 1);
PRAGMA user_version = 1;
"""


def test_open__file_of_the_first_version__replaced_answers_become_siblings(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.executescript(_SCHEMA_1 + OLD_FILE)
    chat = ChatStore.open(path).get_chat(1)
    by_id = {message.id: message for message in chat.messages}
    parents = {m.content: by_id[m.parent].content for m in chat.messages if m.parent is not None}
    assert parents == {"first": "q", "second": "q", "third": "q", "kept": "q", "next": "kept"}
    status = {m.content: m.status.value for m in chat.messages}
    assert [status[name] for name in ("first", "second", "third", "kept")] == [
        "done", "stopped", "failed", "done",
    ]  # fmt: skip
    assert chat.tip is None


def test_branches_files_and_settings__come_back(store: ChatStore, path: Path) -> None:
    chat_id = store.create_chat("t", settings={"temperature": 0.5})
    files = [{"name": "a.md", "text": "# é"}]
    question = store.add_message(chat_id, "user", "q", files=files)
    first = store.add_message(chat_id, "assistant", "one", parent=question)
    second = store.add_message(chat_id, "assistant", "two", parent=question)
    assert store.get_chat(chat_id).tip == second
    store.set_tip(chat_id, first)
    store.save_settings(chat_id, system="Be brief.", settings={"top_k": 5})
    store.save_draft_files(chat_id, files)
    store.update_message(
        first, content="one", status="done", meta={}, reasoning="I think it is one."
    )
    store.close()
    chat = ChatStore.open(path).get_chat(chat_id)
    assert (chat.tip, chat.system, chat.settings) == (first, "Be brief.", {"top_k": 5})
    assert [m.parent for m in chat.messages] == [None, question, question]
    assert chat.messages[0].files == chat.draft_files == tuple(files)
    assert chat.messages[1].reasoning == "I think it is one."


def test_new_draft__of_no_chat_yet__kept_beside_those_of_chats(
    store: ChatStore, path: Path
) -> None:
    assert store.new_draft() == ("", ())
    chat_id = store.create_chat("t")
    store.save_draft(None, "for later \ud800")
    store.save_draft_files(None, [{"name": "a.md"}])
    store.save_draft(chat_id, "of a chat")
    store.close()
    again = ChatStore.open(path)
    assert again.new_draft() == ("for later ?", ({"name": "a.md"},))
    assert again.get_chat(chat_id).draft == "of a chat"
    again.save_draft(None, "")
    assert again.new_draft() == ("", ({"name": "a.md"},))


def test_new_draft__of_two_windows__each_keeps_its_own_over_a_start(
    store: ChatStore, path: Path
) -> None:
    other = ChatStore.open(path, window=Window.CONNECTED)
    store.save_draft(None, "for the model at home")
    other.save_draft_files(None, [{"name": "b.md"}])
    other.save_draft(None, "for the server")
    store.save_draft_files(None, [{"name": "a.md"}])
    store.close()
    other.close()
    again = ChatStore.open(path)
    assert again.new_draft() == ("for the model at home", ({"name": "a.md"},))
    other = ChatStore.open(path, window=Window.CONNECTED)
    assert other.new_draft() == ("for the server", ({"name": "b.md"},))


def test_open__file_with_one_draft_for_all_windows__it_is_the_app_s(path: Path) -> None:
    ChatStore.open(path).close()
    with sqlite3.connect(path) as connection:
        connection.executescript(
            """
            DROP TABLE new_drafts;
            CREATE TABLE new_chat (
              id INTEGER PRIMARY KEY CHECK (id = 0), draft TEXT NOT NULL, draft_files TEXT NOT NULL
            );
            INSERT INTO new_chat VALUES (0, 'from before', '[{"name": "a.md"}]');
            """
        )
    connected = ChatStore.open(path, window=Window.CONNECTED)
    assert connected.new_draft() == ("", ())
    for _ in range(2):  # what was brought over once is not again
        store = ChatStore.open(path)
        assert store.new_draft() == ("from before", ({"name": "a.md"},))
        store.close()


def test_delete_chat__thousands_of_messages_in_a_row__all_gone(store: ChatStore) -> None:
    chat_id = store.create_chat("long")
    rows = [(chat_id, i, "user", "m", "done", i or None, 1.0) for i in range(3000)]
    store._connection.executemany(
        "INSERT INTO messages (chat_id, position, role, content, status, parent, created)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        rows,
    )
    store.delete_chat(chat_id)
    assert store._connection.execute("SELECT count(*) FROM messages").fetchone()[0] == 0


def test_excerpts__newest_message_with_the_word(store: ChatStore) -> None:
    chats = [store.create_chat(name) for name in ("harbour only in the title", "b", "c")]
    store.add_message(chats[1], "user", "an old Harbour")
    store.add_message(chats[1], "assistant", "x" * 500 + " the HARBOUR sleeps " + "y" * 500)
    store.add_message(chats[2], "user", "harbour of another chat")
    found = store.excerpts("the harbour", chats[:2])
    assert list(found) == [chats[1]]
    assert "the HARBOUR sleeps" in found[chats[1]]
    assert len(found[chats[1]]) == 200
    assert store.excerpts("", chats) == store.excerpts("harbour", []) == {}
