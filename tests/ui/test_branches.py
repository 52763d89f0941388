"""Versions of messages: what an edit and another answer leave behind, and how one comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet_desk.engine.scripted import Script
from moet_desk.errors import MoetError, fail
from moet_desk.store.chats import ChatStore
from moet_desk.ui.branches import Tree
from moet_desk.ui.chat_records import Draft, Status, Turn
from tests.ui.support import NOON, FakeChats
from tests.ui.test_conversation import Desk


def turn(number: int, parent: int | None) -> Turn:
    return Turn(number, "user", f"t{number}", Status.DONE, NOON, parent=parent)


def ids(turns: list[Turn]) -> list[int]:
    return [each.id for each in turns]


#  1 - 2 - 4 - 5
#    \ 3 - 6
#        \ 7
FAMILY = [(1, None), (2, 1), (3, 1), (4, 2), (5, 4), (6, 3), (7, 3)]


def test_tree__path_siblings_and_where_a_branch_ends() -> None:
    tree = Tree(turn(*pair) for pair in FAMILY)
    assert ids(tree.path_to(None)) == [1, 3, 7]
    assert ids(tree.path_to(99)) == [1, 3, 7]
    assert tree.end_of(2) == 5
    assert ids(tree.path_to(6)) == [1, 3, 6]
    assert ids(tree.path_to(5)) == [1, 2, 4, 5]
    assert tree.end_of(3) == 6  # where the reader was last, not the newest
    first, second = tree.path_to(5)[:2]
    assert tree.siblings(first) == [1]
    assert tree.siblings(second) == [2, 3]


def test_tree__parent_is_missing__begins_there() -> None:
    tree = Tree([turn(5, 4), turn(6, 5)])
    assert ids(tree.path_to(6)) == [5, 6]
    assert Tree().path_to(None) == []


def talked(desk: Desk, *questions: str) -> None:
    for question in questions:
        desk.conversation.send(question)
        desk.finish()


def texts(desk: Desk) -> list[str]:
    return [each.text for each in desk.conversation.turns]


def test_edit__in_the_middle__new_branch_and_the_old_one_comes_back(tmp_path: Path) -> None:
    store = ChatStore.open(tmp_path / "chats.sqlite3")
    desk = Desk(Script(answers=("A.", "B.", "C.")), chats=store)
    talked(desk, "one", "two")
    talk = desk.conversation
    assert talk.edit(talk.turns[0], Draft("one, better"))
    assert not talk.edit(talk.turns[0], Draft("while it is written"))
    assert not talk.move(talk.turns[0], -1)
    desk.finish()
    assert texts(desk) == ["one, better", "C."]
    assert talk.branch_of(talk.turns[0]) == (2, 2)
    assert not talk.move(talk.turns[0], 1)
    assert talk.move(talk.turns[0], -1)
    assert texts(desk) == ["one", "A.", "two", "B."]
    store.close()
    again = Desk(chats=ChatStore.open(tmp_path / "chats.sqlite3"))
    again.conversation.open(again.conversation.list_chats("")[0][0].id)
    assert texts(again) == ["one", "A.", "two", "B."]
    assert again.conversation.move(again.conversation.turns[0], 1)
    assert texts(again) == ["one, better", "C."]
    messages = again.conversation.request().messages
    assert messages is not None
    assert [m["content"] for m in messages] == ["one, better", "C."]


def test_retry__an_earlier_answer__what_followed_stays_behind_the_old_one() -> None:
    desk = Desk(Script(answers=("A.", "B.", "C.")))
    talked(desk, "one", "two")
    talk = desk.conversation
    used = talk.context_used
    assert talk.retry(talk.turns[1])
    desk.finish()
    assert texts(desk) == ["one", "C."]
    assert talk.context_used < used
    assert talk.go_to(talk.all_turns[3].id)
    assert texts(desk) == ["one", "A.", "two", "B."]
    assert talk.context_used == used


def test_edit__a_message_of_another_branch__sent_beside_it() -> None:
    desk = Desk(Script(answers=("A.", "B.", "C.", "D.")))
    talked(desk, "one", "two")
    talk = desk.conversation
    two = talk.turns[2]
    assert talk.edit(talk.turns[0], Draft("uno"))
    desk.finish()
    assert two not in talk.turns
    assert talk.edit(two, Draft("due"))
    desk.finish()
    assert texts(desk) == ["one", "A.", "due", "D."]
    assert talk.branch_of(talk.turns[2]) == (2, 2)


def sent(desk: Desk) -> list[str]:
    return [str(message["content"]) for message in desk.conversation.request().messages or ()]


def test_oldest_left_out__an_older_message_is_answered_again__is_sent() -> None:
    """What is left out of a long branch may not be all of a shorter one."""
    desk = Desk(Script(answers=("A.", "B.", "C.", "D.", "E.", "F.")))
    talked(desk, "one", "two", "three")
    talk = desk.conversation
    one, two, three = talk.turns[::2]
    talk.forget_oldest()
    assert sent(desk) == ["three", "C."]
    assert talk.edit(three, Draft("tre"))
    desk.finish()
    assert sent(desk) == ["tre", "D."]
    assert talk.retry(two)
    desk.finish()
    assert sent(desk) == ["one", "A.", "two", "E."]
    talk.forget_oldest()
    assert talk.edit(one, Draft("uno"))
    desk.finish()
    assert sent(desk) == ["uno", "F."]


def test_edit__store_is_full__nothing_sent_and_the_branch_stays() -> None:
    class Full(FakeChats):
        full = False

        def add_message(self, chat_id: int, role: str, content: str, **more: object) -> int:
            if self.full:
                raise fail("MD-DISK-02", path="chats", done="nothing")
            return super().add_message(chat_id, role, content, status=str(more["status"]))

    chats = Full()
    desk = Desk(Script(answers=("A.",)), chats=chats)
    talked(desk, "one")
    chats.full = True
    with pytest.raises(MoetError):
        desk.conversation.edit(desk.conversation.turns[0], Draft("other"))
    with pytest.raises(MoetError):
        desk.conversation.retry()
    assert texts(desk) == ["one", "A."]
    assert not desk.conversation.busy


def test_wishes__of_each_chat__come_back_with_it(tmp_path: Path) -> None:
    desk = Desk(Script(answers=("A.",)), chats=ChatStore.open(tmp_path / "chats.sqlite3"))
    talk = desk.conversation
    talk.wish(temperature=0.25, top_k=7, system="Be brief.")
    talked(desk, "one")
    first, wishes = talk.chat_id, talk.wishes
    assert first is not None
    talk.new()
    assert (talk.wishes.temperature, talk.wishes.system) == (None, "")
    talked(desk, "two")
    talk.wish(seed=3, system="Be long.")
    second = talk.chat_id
    assert second is not None
    talk.open(first)
    assert talk.wishes == wishes
    assert talk.request().sampling.top_k == 7
    talk.open(second)
    assert (talk.wishes.seed, talk.wishes.top_k, talk.wishes.system) == (3, None, "Be long.")
