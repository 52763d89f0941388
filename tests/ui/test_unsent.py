"""What was typed and not sent stays: through other versions, deleted chats, closed windows."""

from __future__ import annotations

from typing import Any

import pytest

from moet_desk.engine.scripted import Script
from moet_desk.errors import MoetError, fail
from moet_desk.ui.attachments import Attachment
from moet_desk.ui.chat_records import Draft
from moet_desk.ui.screens.chat_list import ChatList
from tests.ui.support import FakeChats, Stage
from tests.ui.test_conversation import Desk

LONG = "word " * 400


async def press(stage: Stage, pilot: Any, *keys: str) -> None:
    await pilot.press(*keys)
    await stage.settle(pilot)


async def ask(stage: Stage, pilot: Any, question: str, seconds: float = 2.0) -> None:
    await stage.ask(pilot, question)
    await stage.play(pilot, seconds)


def stored(stage: Stage) -> str:
    """The draft of the only chat."""
    [chat] = stage.chats.chats.values()
    return str(chat.draft)


@pytest.mark.asyncio
async def test_hang_up__message_waits__kept_with_what_was_typed_behind_it() -> None:
    stage = Stage(Script(answers=(LONG,)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await ask(stage, pilot, "one", 0.5)
        await stage.ask(pilot, "two")
        await press(stage, pilot, *"three")
        stage.app.hang_up()
    assert stored(stage) == "two\nthree"


@pytest.mark.asyncio
async def test_open_chat_is_deleted__prompt_and_draft_of_a_new_one_are_both_kept() -> None:
    stage = Stage(Script(answers=("A.",)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await ask(stage, pilot, "fox?")
        await press(stage, pilot, "ctrl+n", *"for later")
        await press(stage, pilot, "ctrl+l")
        await press(stage, pilot, "enter")
        assert stage.app.chat.prompt.text == ""
        await press(stage, pilot, *"to the fox")
        await press(stage, pilot, "ctrl+l")
        await press(stage, pilot, "delete")
        await press(stage, pilot, "right", "enter")
        assert isinstance(stage.app.screen, ChatList)
        assert stage.chats.new_draft()[0] == "for later\nto the fox"  # also if it is killed now
        await press(stage, pilot, "escape")
        assert stage.app.chat.prompt.text == "for later\nto the fox"


@pytest.mark.asyncio
async def test_open_chat_is_deleted__while_a_version_is_written__next_message_can_be_sent() -> None:
    stage = Stage(Script(answers=("A.", "B.")))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await ask(stage, pilot, "fox?")
        await press(stage, pilot, *"half", "alt+up", "e")
        await press(stage, pilot, "ctrl+l")
        await press(stage, pilot, "delete")
        await press(stage, pilot, "right", "enter", "escape")
        assert stage.app.chat.prompt.text == "half"
        await press(stage, pilot, "enter")
        await stage.play(pilot, 2.0)
        assert [turn.text for turn in stage.app.conversation.turns] == ["half", "B."]


@pytest.mark.asyncio
async def test_version_is_begun_while_a_message_waits__escape_gives_that_back() -> None:
    stage = Stage(Script(answers=(LONG,)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await ask(stage, pilot, "one", 0.5)
        await stage.ask(pilot, "two")
        await press(stage, pilot, *"three", "alt+up", "k", "e")
        assert stage.app.chat.prompt.text == "one"
        await press(stage, pilot, "escape")  # takes the waiting message back
        assert stage.app.chat.prompt.text == "one"
        await press(stage, pilot, "escape")  # leaves the version
        assert stage.app.chat.prompt.text == "two\nthree"


@pytest.mark.asyncio
async def test_version__in_writing__stored_as_a_draft_until_it_is_sent() -> None:
    stage = Stage(Script(answers=("A.", "B.")))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await ask(stage, pilot, "one")
        await press(stage, pilot, *"half", "alt+up", "k", "e")
        await stage.play(pilot, 1.0)
        assert stored(stage) == "half"  # the version says nothing new yet
        await press(stage, pilot, *", better")
        await stage.play(pilot, 1.0)
        assert stored(stage) == "half\none, better"
        await press(stage, pilot, "enter")
        await stage.play(pilot, 2.0)
        assert stored(stage) == "half"
        assert stage.app.chat.prompt.text == "half"


@pytest.mark.asyncio
async def test_version__left_for_one_of_another_message__comes_back_with_the_prompt() -> None:
    stage = Stage(Script(answers=("A.", "B.")))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await ask(stage, pilot, "one")
        await ask(stage, pilot, "two")
        await press(stage, pilot, "alt+up", "k", "e", *" changed")
        await press(stage, pilot, "alt+up", "k", "k", "e")
        assert stage.app.chat.prompt.text == "one"
        await press(stage, pilot, "escape")
        assert stage.app.chat.prompt.text == "two changed"


@pytest.mark.asyncio
async def test_version_is_sent__what_was_typed_before_the_screen_took_it__stays() -> None:
    stage = Stage(Script(answers=("A.", "B.")))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await ask(stage, pilot, "one")
        await press(stage, pilot, *"half", "alt+up", "k", "e")
        prompt = stage.app.chat.prompt
        prompt.action_send()
        prompt.insert("next")  # in the same turn of the prompt's queue
        await stage.settle(pilot)
        await stage.play(pilot, 2.0)
        assert stage.app.conversation.turns[-1].text == "B."
        assert prompt.text == "half\nnext"


def test_first_message__stored_at_the_second_try__is_no_draft_any_more() -> None:
    class FullOnce(FakeChats):
        is_full = True

        def add_message(self, *args: Any, **more: Any) -> int:
            if self.is_full:
                self.is_full = False
                raise fail("MD-DISK-02", path="p", done="3 messages")
            return super().add_message(*args, **more)

    chats = FullOnce()
    talk = Desk(Script(answers=("A.",)), chats=chats).conversation
    talk.save_draft("unsent")
    with pytest.raises(MoetError):
        talk.send("unsent")
    assert chats.new_draft()[0] == "unsent"
    talk.send("unsent")
    assert chats.new_draft()[0] == ""
    talk.new()
    assert talk.draft == Draft()


def test_drafts__put_together__words_by_lines_and_all_files() -> None:
    one, two = Attachment("a.md", "a", 1), Attachment("b.md", "b", 1)
    assert Draft("a", (one,)) + Draft("b", (two,)) == Draft("a\nb", (one, two))
    assert Draft() + Draft("b") == Draft("b") + Draft() == Draft("b")
