"""Keys and clicks that come before what the last ones changed is drawn or in its place."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from textual.widgets import Input, TextArea

from moet_desk.engine.scripted import Script
from moet_desk.ui.widgets.blocks import Block
from moet_desk.ui.widgets.find_line import FindLine
from moet_desk.ui.widgets.prompt import Prompt
from moet_desk.ui.widgets.transcript import Transcript
from tests.ui.support import Stage, dump

pytestmark = pytest.mark.asyncio

ANSWERS = ("First answer.", "Second answer.", "Third answer.", "Fourth answer.")


async def asked(stage: Stage, pilot: object, *questions: str) -> None:
    for question in questions:
        await stage.ask(pilot, question)
        await stage.play(pilot, 2.0)


async def another_version(stage: Stage, pilot: object, text: str) -> None:
    """Of the last message of the user."""
    await stage.ask(pilot, "/edit")
    await asked(stage, pilot, text)


async def test_version__clicked_twice_at_once__goes_there_once() -> None:
    stage = Stage(Script(answers=ANSWERS))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await asked(stage, pilot, "one")
        await another_version(stage, pilot, "uno")
        chat = stage.app.chat
        turn = chat._conversation.turns[0]
        # The second click meets the block of the version that is about to leave.
        chat.post_message(Block.Moved(turn, -1))
        chat.post_message(Block.Moved(turn, -1))
        await stage.settle(pilot)
        await stage.settle(pilot)
        assert "First answer." in dump(stage.app)
        assert "Second answer." not in dump(stage.app)


async def test_cursor__its_message_leaves_while_a_key_moves_it__begins_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(Script(answers=ANSWERS))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await asked(stage, pilot, "one", "two")
        await pilot.press("alt+up", "k", "e")
        transcript = stage.app.chat.query_one(Transcript)
        gone = transcript.cursor
        assert gone is not None
        intact = Transcript.remove_children

        keys: list[asyncio.Task[None]] = []

        async def slow(self: Transcript, given: Sequence[Block]) -> None:
            keys.append(asyncio.create_task(self.action_cursor(-1)))  # while blocks go
            await asyncio.sleep(0)
            await intact(self, given)

        monkeypatch.setattr(Transcript, "remove_children", slow)
        await stage.ask(pilot, "deux")
        monkeypatch.undo()
        await stage.play(pilot, 2.0)
        await asyncio.gather(*keys)
        assert keys
        assert transcript.cursor is not gone
        assert "Third answer." in dump(stage.app)


async def test_edit__its_branch_is_not_shown_any_more__sent_where_it_belongs() -> None:
    stage = Stage(Script(answers=ANSWERS))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await asked(stage, pilot, "one")
        await another_version(stage, pilot, "uno")
        await pilot.press("alt+up", "k", "e")
        assert stage.app.chat.query_one(Prompt).text == "uno"
        await pilot.press("alt+up", "k", "left")
        assert "First answer." in dump(stage.app)
        stage.app.chat.query_one(Prompt).focus()
        await asked(stage, pilot, "ein")
        screen = dump(stage.app)
    assert "Third answer." in screen
    assert "3/3" in screen


async def test_find__another_chat_is_opened__its_line_closes() -> None:
    stage = Stage(Script(answers=ANSWERS))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await asked(stage, pilot, "one")
        await pilot.press("ctrl+f", *"first")
        await stage.settle(pilot)
        assert "1 of 1" in dump(stage.app)
        await pilot.press("ctrl+n")
        await stage.settle(pilot)
        assert "1 of 1" not in dump(stage.app)
        assert not stage.app.chat.query_one(FindLine).display
        await pilot.press("ctrl+f")
        await stage.settle(pilot)
        assert stage.app.chat.query_one(FindLine).query_one(Input).value == "first"
        assert "nothing found" in dump(stage.app)


@pytest.mark.parametrize("n_lines", [4, 8])
@pytest.mark.parametrize("in_options", [False, True])
async def test_undo__the_last_line_goes_and_the_scroll_bar_with_it__the_app_goes_on(
    n_lines: int, in_options: bool
) -> None:
    stage = Stage(Script(answers=ANSWERS))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        if in_options:
            await pilot.press("ctrl+s")
            await stage.settle(pilot)
        area = stage.app.screen.query_one(TextArea)
        area.focus()
        for _ in range(n_lines):
            await pilot.press("a", "enter" if in_options else "ctrl+j")
        await pilot.press("ctrl+z")
        await stage.settle(pilot)
        assert area.text == "a\n" * (n_lines - 1) + "a"
        assert area.cursor_location == (n_lines - 1, 1)
        await pilot.press("ctrl+y", "ctrl+z", "b")
        assert area.text.endswith("a\nab")
