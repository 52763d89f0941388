"""The open chat: what is sent, what waits, and when it is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moet_desk.engine.handle import Quality
from moet_desk.engine.scripted import Script, ScriptedEngine, ScriptedFailure
from moet_desk.errors import MoetError, fail
from moet_desk.store.chats import ChatStore
from moet_desk.ui.attachments import Attachment
from moet_desk.ui.bridge import Bridge, Phase
from moet_desk.ui.chat_records import ChatStoreLike, Draft, Pulled, Sent, Status, Wishes
from moet_desk.ui.conversation import SAVE_AGAIN_S, Conversation
from tests.ui.support import FakeChats, HeldClock

LONG = "word " * 400


class Desk:
    """A conversation on a scripted engine."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        chats: ChatStoreLike | None = None,
        ready: bool = True,
    ) -> None:
        self.time = HeldClock()
        self.engine = ScriptedEngine(script)
        self.chats = chats or FakeChats()
        self.bridge = Bridge(lambda: self.engine, clock=self.time.clock())
        while ready and self.bridge.poll() is not Phase.READY:
            pass
        self.conversation = Conversation(self.bridge, self.chats, wishes=Wishes())

    def play(self, seconds: float, *, step_s: float = 0.1) -> list[Pulled]:
        pulled = []
        for _ in range(round(seconds / step_s)):
            self.time.seconds += step_s
            self.engine.advance(step_s)
            pulled.append(self.conversation.pull())
        return pulled

    def finish(self) -> None:
        while self.conversation.busy:
            self.play(1.0)


def test_send__ready__stored_answered_and_titled() -> None:
    desk = Desk(Script(answers=("An answer.",)))
    assert desk.conversation.send("A question\nof two lines") is Sent.STARTED
    desk.finish()
    chat = desk.chats.list_chats(9, "")[0]
    assert chat.title == "A question of two lines"
    stored = [(m.role, m.content, m.status) for m in desk.chats.get_chat(chat.id).messages]
    assert stored == [
        ("user", "A question\nof two lines", "done"),
        ("assistant", "An answer.", "done"),
    ]
    meta = desk.chats.get_chat(chat.id).messages[1].meta
    assert meta["tokens"] == desk.engine.snapshot().tokens > 0
    assert desk.conversation.context_used == meta["prompt_tokens"] + meta["tokens"]


def test_pull__while_writing__saved_about_every_second() -> None:
    chats = FakeChats()
    desk = Desk(Script(answers=(LONG,), tokens_per_s=20), chats=chats)
    desk.conversation.send("q")
    desk.play(5.0)
    assert 4 <= len(chats.saves) <= 5
    status, saved = chats.saves[-1]
    assert status == "writing"
    # what a kill would lose: at most a second of text (20 tokens of at most 6 characters)
    assert len(desk.conversation.turns[-1].text) - len(saved) <= 20 * 6 + 12


def test_real_store__reopened_in_the_middle__text_there_and_stopped(tmp_path: Path) -> None:
    store = ChatStore.open(tmp_path / "chats.sqlite3")
    desk = Desk(Script(answers=(LONG,), tokens_per_s=20), chats=store)
    desk.conversation.send("q")
    desk.play(3.05)
    # another process opens the file as after kill -9: the store was never closed
    after = Desk(chats=ChatStore.open(tmp_path / "chats.sqlite3"))
    chat_id = after.conversation.list_chats("")[0][0].id
    after.conversation.open(chat_id)
    last = after.conversation.turns[-1]
    assert last.status is Status.STOPPED
    written = desk.conversation.turns[-1].text
    assert written.startswith(last.text)
    assert len(last.text) > len(written) / 2
    after.conversation.close()


def test_stop__text_kept_and_marked() -> None:
    desk = Desk(Script(answers=(LONG,)))
    desk.conversation.send("q")
    desk.play(1.0)
    assert desk.conversation.stop()
    desk.finish()
    turn = desk.conversation.turns[-1]
    assert turn.status is Status.STOPPED
    assert turn.text
    assert not desk.conversation.stop()


def test_send__busy__one_waits_and_goes_when_free() -> None:
    desk = Desk(Script(answers=("First.", "Second.")))
    talk = desk.conversation
    talk.send("one")
    assert talk.send("two") is Sent.QUEUED
    assert talk.send("three") is Sent.REFUSED
    assert talk.take_queued() is None
    desk.finish()
    assert talk.take_queued() == Draft("two")
    desk.finish()
    assert [t.text for t in talk.turns] == ["one", "First.", "two", "Second."]


def test_send__before_ready__waits() -> None:
    desk = Desk(ready=False)
    assert desk.conversation.send("early") is Sent.QUEUED
    assert desk.conversation.unqueue() == Draft("early")
    assert desk.conversation.queued is None


def test_request__turns_and_wishes() -> None:
    desk = Desk(Script(answers=("A.",)))
    talk = desk.conversation
    talk.wish(
        system="Be brief.", temperature=0.0, quality=Quality.BALANCED, gate=0.5, max_tokens=50
    )
    talk.send("q")
    desk.finish()
    request = talk.request()
    assert request.messages is not None
    assert [dict(m) for m in request.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "A."},
    ]
    assert request.sampling.temperature == 0.0
    assert (request.quality, request.gate, request.max_tokens) == (Quality.BALANCED, 0.5, 50)


def test_retry__old_answer_kept_as_another_version() -> None:
    chats = FakeChats()
    desk = Desk(Script(answers=("First try.", "Second try.")), chats=chats)
    talk = desk.conversation
    talk.send("q")
    desk.finish()
    assert talk.retry()
    desk.finish()
    assert [t.text for t in talk.turns] == ["q", "Second try."]
    assert talk.branch_of(talk.turns[1]) == (2, 2)
    stored = next(iter(chats.chats.values())).messages
    assert [(m.content, m.status) for m in stored[1:]] == [
        ("First try.", "done"),
        ("Second try.", "done"),
    ]
    chat_id = talk.chat_id
    assert chat_id is not None
    talk.new()
    assert not talk.retry()
    talk.open(chat_id)
    assert [t.text for t in talk.turns] == ["q", "Second try."]


def test_failure__marked_with_its_error() -> None:
    failure = ScriptedFailure("MD-ENG-04", {"reason": "x"}, after_tokens=4)
    desk = Desk(Script(failures={0: failure}))
    desk.conversation.send("q")
    desk.finish()
    turn = desk.conversation.turns[-1]
    assert turn.status is Status.FAILED
    assert turn.meta["error"]["code"] == "MD-ENG-04"
    assert turn.text


def test_submit_refused__answer_failed_and_not_busy() -> None:
    desk = Desk(Script(context=8))
    desk.conversation.send("far too long " * 9)
    assert not desk.conversation.busy
    assert desk.conversation.problem is not None
    assert desk.conversation.problem.code == "MD-API-03"


def test_forget_oldest__half_of_the_turns__never_the_last_question() -> None:
    desk = Desk(Script(answers=("A.",)))
    talk = desk.conversation
    for i in range(4):
        talk.send(f"q{i}")
        desk.finish()
    assert talk.forget_oldest() == 4
    messages = talk.request().messages
    assert messages is not None
    assert messages[0]["content"] == "q2"
    while talk.forget_oldest():
        pass
    messages = talk.request().messages
    assert messages is not None
    assert messages[0]["content"] == "q3"


def test_new_and_open__while_writing__stopped_and_kept() -> None:
    desk = Desk(Script(answers=(LONG,)))
    talk = desk.conversation
    talk.send("q")
    desk.play(1.0)
    chat_id = talk.chat_id
    assert chat_id is not None
    talk.new()
    assert (talk.busy, talk.turns, talk.chat_id) == (False, [], None)
    talk.open(chat_id)
    assert talk.turns[-1].status is Status.STOPPED
    assert talk.turns[-1].text


def test_draft__per_chat__kept() -> None:
    desk = Desk(Script(answers=("A.",)))
    talk = desk.conversation
    talk.save_draft("unsent")
    assert talk.draft == Draft("unsent")
    talk.send("q")
    desk.finish()
    talk.save_draft("in the chat")
    chat_id = talk.chat_id
    assert chat_id is not None
    talk.new()
    assert talk.draft == Draft()
    talk.open(chat_id)
    assert talk.draft == Draft("in the chat")


def test_draft__of_a_new_chat__there_when_the_app_opens_again_and_gone_when_sent() -> None:
    chats, file = FakeChats(), Attachment("notes.md", "# é", 4)
    Desk(Script(), chats=chats).conversation.save_draft("unsent", (file,))
    desk = Desk(Script(answers=("A.",)), chats=chats)
    talk = desk.conversation
    assert talk.draft == Draft("unsent", (file,))
    talk.send("unsent", (file,))
    assert chats.new_draft() == ("", [])
    assert talk.draft == Draft()
    desk.finish()
    talk.save_draft("in the chat")
    assert Desk(Script(), chats=chats).conversation.draft == Draft()


def test_draft__store_cannot_take_the_message__stays_stored() -> None:
    class Full(FakeChats):
        def add_message(self, *_: Any, **__: Any) -> int:
            raise fail("MD-DISK-02", path="p", done="3 messages")

    chats = Full()
    talk = Desk(Script(answers=("A.",)), chats=chats).conversation
    talk.save_draft("unsent")
    with pytest.raises(MoetError):
        talk.send("unsent")
    assert chats.new_draft()[0] == "unsent"


class FullDisk(FakeChats):
    def update_message(self, message_id: int, **changes: Any) -> None:
        raise fail("MD-DISK-02", path="chats.sqlite3", done="3 messages")


class FullForAWhile(FakeChats):
    is_full = True

    def update_message(self, message_id: int, **changes: Any) -> None:
        if self.is_full:
            raise fail("MD-DISK-02", path="chats.sqlite3", done="3 messages")
        super().update_message(message_id, **changes)


@pytest.mark.parametrize("how", ["time", "next answer", "leaving", "opening"])
def test_store_can_save_again__answers_that_were_not_saved_are(how: str) -> None:
    chats = FullForAWhile()
    desk = Desk(Script(answers=("An answer.", "Another.")), chats=chats)
    talk = desk.conversation
    talk.send("q")
    desk.finish()
    chat_id = talk.chat_id
    assert chat_id is not None
    talk.save_draft("a draft can be saved")
    assert talk.store_problem is not None
    chats.is_full = False
    talk.save_when_due()  # just tried
    assert talk.store_problem is not None
    if how == "time":
        desk.time.seconds += SAVE_AGAIN_S
        talk.save_when_due()
    elif how == "next answer":
        talk.send("q")
        desk.finish()
    elif how == "leaving":
        talk.keep()
    else:
        talk.open(chat_id)
        assert talk.turns[1].text == "An answer."
    stored = chats.get_chat(chat_id).messages[1]
    assert (stored.content, stored.status) == ("An answer.", "done")
    assert talk.store_problem is None


def test_chat_deleted_with_an_answer_not_saved__nothing_is_owed() -> None:
    chats = FullForAWhile()
    desk = Desk(Script(answers=("An answer.", "Another.")), chats=chats)
    talk = desk.conversation
    talk.send("q")
    desk.finish()
    assert talk.chat_id is not None
    talk.delete(talk.chat_id)
    chats.is_full = False
    talk.send("q")
    desk.finish()
    assert talk.store_problem is None


def test_store_cannot_save__answer_goes_on_and_it_is_reported() -> None:
    desk = Desk(Script(answers=("An answer.",)), chats=FullDisk())
    desk.conversation.send("q")
    desk.finish()
    assert desk.conversation.turns[-1].text == "An answer."
    assert desk.conversation.store_problem is not None


def test_open__missing_chat__open_chat_stays() -> None:
    class Missing(FakeChats):
        def get_chat(self, chat_id: int) -> Any:
            raise fail("MD-CHAT-02", path="p", reason="gone")

    desk = Desk(Script(answers=("A.",)), chats=Missing())
    desk.conversation.send("q")
    desk.finish()
    with pytest.raises(MoetError, match="MD-CHAT-02"):
        desk.conversation.open(99)
    assert len(desk.conversation.turns) == 2
