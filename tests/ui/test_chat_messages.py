"""What can be done with the messages of a chat, driven by keys at 80 x 24."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from textual.widgets import Input, TextArea

from moet_desk.engine.handle import Quality
from moet_desk.engine.parsers.answers import THINK, AnswerFormat
from moet_desk.engine.scripted import Script
from moet_desk.store.chats import ChatStore, Window
from moet_desk.ui.attachments import Attachment
from moet_desk.ui.chat_records import Status
from moet_desk.ui.screens.chat_options import ChatOptions
from moet_desk.ui.widgets import transcript as transcript_of_the_screen
from moet_desk.ui.widgets.blocks import AnswerBlock, Block
from moet_desk.ui.widgets.prompt import Prompt
from moet_desk.ui.widgets.transcript import Transcript
from tests.ui.support import FakeChats, Stage, dump

pytestmark = pytest.mark.asyncio

CODE = "Two ways:\n\n```py\nfirst()\n```\n\nor\n\n```\nsecond()\n```\n"


async def asked(stage: Stage, pilot: object, *questions: str) -> None:
    for question in questions:
        await stage.ask(pilot, question)
        await stage.play(pilot, 2.0)


async def press(stage: Stage, pilot: object, *keys: str) -> str:
    await pilot.press(*keys)  # type: ignore[attr-defined]
    await stage.settle(pilot)
    return dump(stage.app)


async def test_edit__alt_up_e__another_version_and_back_with_the_arrows() -> None:
    stage = Stage(Script(answers=("First answer.", "Second answer.", "Third answer.")))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await asked(stage, pilot, "one", "two")
        stage.app.chat.query_one(Prompt).load_text("half a thought")
        screen = await press(stage, pilot, "alt+up", "k", "k", "k", "e")
        assert "another version of your message" in screen
        assert stage.app.chat.query_one(Prompt).text == "one"
        await press(stage, pilot, *", better", "enter")
        await stage.play(pilot, 2.0)
        screen = dump(stage.app)
        assert "‹ 2/2 ›" in screen
        assert "one, better" in screen
        assert "Third answer." in screen
        assert "two" not in screen
        assert stage.app.chat.query_one(Prompt).text == "half a thought"
        screen = await press(stage, pilot, "alt+up", "k", "left")
        assert "▸You" in screen
        assert "‹ 1/2 ›" in screen
        assert "Second answer." in screen
        screen = await press(stage, pilot, "e", "escape")
        assert stage.app.chat.query_one(Prompt).text == "half a thought"
        assert "another version" not in screen
        line = next(i for i, row in enumerate(screen.splitlines()) if "‹ 1/2 ›" in row)
        await pilot.click(offset=(screen.splitlines()[line].index("›"), line))
        await stage.settle(pilot)
        assert "Third answer." in dump(stage.app)


@pytest.mark.slow
async def test_retry_here__earlier_answer__asked_again_from_there() -> None:
    stage = Stage(Script(answers=("First answer.", "Second answer.", "Third answer.")))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await asked(stage, pilot, "one", "two")
        await press(stage, pilot, "alt+up", "k", "k", "r")
        await stage.play(pilot, 2.0)
        screen = dump(stage.app)
    assert "Third answer." in screen
    assert "two" not in screen


async def test_copy__message_answer_and_each_block_of_code() -> None:
    stage = Stage(Script(answers=(CODE,)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await asked(stage, pilot, "how?")
        await press(stage, pilot, "alt+up", "c")
        assert stage.app.clipboard == "first()\n"
        await press(stage, pilot, "c")
        assert stage.app.clipboard == "second()\n"
        await press(stage, pilot, "y")
        assert stage.app.clipboard == stage.app.conversation.turns[1].text
        await press(stage, pilot, "k", "y")
        assert stage.app.clipboard == "how?"
        await press(stage, pilot, "c")
        await pilot.pause(0.1)
        toast = str(stage.app.screen.query("Toast").last().render())
        assert "There is no block of code" in toast


async def test_thinking__one_line_while_it_goes_on__unfolded_with_ctrl_t() -> None:
    thought = "Foxes are quick.\nSo the answer is yes."
    script = Script(
        answers=(f"<think>\n{thought}\n</think>\n\nYes, **they** are.",),
        format=AnswerFormat(think=THINK),
        tokens_per_s=20,
    )
    stage = Stage(script)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 0.5, step_s=0.1)
        screen = dump(stage.app)
        assert "▸ thinking 0.3 s, 7 tokens" in screen
        assert "Foxes" not in screen
        await stage.play(pilot, 3.0)
        screen = dump(stage.app)
        assert "▸ thought for 0.8 s, 10 tokens" in screen
        assert "   Yes, they are." in screen
        assert "think>" not in screen
        assert "     Foxes are quick." in await press(stage, pilot, "ctrl+t")
        assert "Foxes" not in await press(stage, pilot, "ctrl+t")
        await pilot.click("ThoughtFold Fold")
        await stage.settle(pilot)
        assert "So the answer is yes." in dump(stage.app)
        turn = stage.app.conversation.turns[-1]
        assert (turn.thought, turn.text) == (thought, "Yes, **they** are.")
        chat = next(iter(stage.chats.chats.values()))
        assert chat.messages[1].reasoning == thought


async def test_long_message__folded_until_space_or_a_click() -> None:
    stage = Stage(Script(answers=("A.",)))
    lines = [f"line {i}" for i in range(18)]
    async with stage.open(80, 50) as pilot:
        await stage.ready(pilot)
        await asked(stage, pilot, "\n".join(lines))
        screen = dump(stage.app)
        assert "line 7" in screen
        assert "line 8" not in screen
        assert "▸ all 18 lines, 133 characters" in screen
        assert "line 17" in await press(stage, pilot, "alt+up", "k", "space")
        assert "line 8" not in await press(stage, pilot, "space")
        assert "▸ answer folded, 2 characters" in await press(stage, pilot, "j", "space")


async def test_find__in_all_versions__goes_there_and_back() -> None:
    stage = Stage(Script(answers=("Of foxes.", "Of hens.", "Of owls.")))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await asked(stage, pilot, "one")
        await pilot.press("ctrl+r")
        await stage.play(pilot, 2.0)
        await asked(stage, pilot, "two")
        assert "foxes" not in dump(stage.app)
        screen = await press(stage, pilot, "ctrl+f", *"OF")
        assert "3 of 3" in screen
        assert "▸moet-demo" in screen
        screen = await press(stage, pilot, "up", "up")
        assert "1 of 3" in screen
        assert "Of foxes." in screen
        assert "Of owls." not in screen
        assert "Of owls." in await press(stage, pilot, "enter")
        assert "nothing found" in await press(stage, pilot, "x")
        screen = await press(stage, pilot, "escape")
        assert "Find" not in screen
        assert stage.app.focused is stage.app.chat.query_one(Prompt)


@pytest.mark.slow
async def test_list__search__shows_the_words_and_opens_at_them() -> None:
    chats = FakeChats()
    chat_id = chats.create_chat("About hens", model="m", system="")
    for i in range(100):
        words = "a needle here" if i == 20 else f"m{i}"
        parent = chats.chats[chat_id].tip
        chats.add_message(chat_id, "user", words, status="done", parent=parent)
    stage = Stage(chats=chats)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        screen = await press(stage, pilot, "ctrl+l", *"needle")
        assert "About hens" in screen
        assert "a needle here" in screen
        screen = await press(stage, pilot, "enter")
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert "1 of 1" in screen
        assert "a needle here" in screen
        assert stage.app.chat.query_one(Input).value == "needle"


async def test_file__attached_counted_sent_and_shown(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("Remember the fox. " * 20)
    (tmp_path / "photo").write_bytes(b"\0\1")
    stage = Stage(Script(answers=("A.",)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, f"/file {tmp_path}/photo")
        await stage.settle(pilot)
        assert "MD-CHAT-04" in dump(stage.app)
        await press(stage, pilot, "ctrl+o")
        stage.app.screen.query_one(Input).value = f"{tmp_path}/no"
        await press(stage, pilot, "enter")
        await counted(stage, pilot)
        assert "▤ notes.md, 360 B, 92 tokens" in dump(stage.app)
        await press(stage, pilot, "backspace")
        assert "notes.md" not in dump(stage.app)
        stage.app.chat.chips.put([Attachment("counted for another model", "word " * 4, 999)])
        stage.app.chat.chips.poll(4096)
        await counted(stage, pilot)
        assert [file.n_tokens for file in stage.app.chat.chips.files] == [7]
        stage.app.chat.chips.put(())
        await stage.ask(pilot, f"/file {tmp_path}/notes.md")
        await counted(stage, pilot)
        await asked(stage, pilot, "What of it?")
        screen = dump(stage.app)
        request = stage.app.conversation.request()
    assert screen.count("▤ notes.md, 360 B, 92 tokens") == 1
    assert request.messages is not None
    assert str(request.messages[0]["content"]).startswith("notes.md:\n```\nRemember the fox.")
    assert str(request.messages[0]["content"]).endswith("```\n\nWhat of it?")


async def counted(stage: Stage, pilot: object) -> None:
    for _ in range(100):
        stage.app.pull_gauges()
        if all(file.n_tokens is not None for file in stage.app.chat.chips.files):
            break
        await asyncio.sleep(0.01)
    await stage.settle(pilot)


async def test_paste__a_megabyte__a_chip_at_once_and_a_draft_that_comes_back() -> None:
    stage = Stage(Script(answers=("A.",)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await asked(stage, pilot, "one")
        prompt = stage.app.chat.query_one(Prompt)
        before = time.process_time()
        prompt.post_message(events_paste("word " * 200_000))
        screen = await press(stage, pilot, *"and this")
        assert time.process_time() - before < 1.0
        await counted(stage, pilot)
        assert prompt.text == "and this"
        screen = dump(stage.app)
        assert "pasted text, 1.0 MB, 250,002 tokens" in screen
        assert "more than the model holds (2,048)" in " ".join(screen.split())
        stage.time.seconds += 1.0
        await stage.app.pull_text()
        await press(stage, pilot, "ctrl+n")
        assert stage.app.chat.chips.files == ()
        await press(stage, pilot, "ctrl+l", "enter")
        assert [file.name for file in stage.app.chat.chips.files] == ["pasted text"]
        assert prompt.text == "and this"


def events_paste(text: str) -> object:
    from textual.events import Paste

    return Paste(text)


@pytest.mark.slow
async def test_options__saved_with_the_chat__wrong_numbers_refused() -> None:
    stage = Stage(Script(answers=("A.",)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await asked(stage, pilot, "one")
        await press(stage, pilot, "ctrl+s")
        panel = stage.app.screen
        assert isinstance(panel, ChatOptions)
        panel.query_one(TextArea).load_text("Be brief.")
        await press(stage, pilot, "tab", "right", "tab", *"3", "ctrl+s")
        assert "✗ Temperature: a number from 0 to 2, or nothing." in dump(stage.app)
        await press(stage, pilot, "backspace", *"0.5", "ctrl+s")
        wishes = stage.app.conversation.wishes
        assert (wishes.system, wishes.temperature) == ("Be brief.", 0.5)
        assert wishes.quality is Quality.BALANCED
        stored = next(iter(stage.chats.chats.values()))
        assert stored.system == "Be brief."
        assert stored.settings["temperature"] == 0.5
        await press(stage, pilot, "ctrl+s", "tab", "tab", "backspace", "1", "escape")
        assert stage.app.conversation.wishes.temperature == 0.5


def long_chat(n: int) -> FakeChats:
    chats = FakeChats()
    chat_id = chats.create_chat("long", model="m", system="")
    for i in range(n):
        role = "user" if i % 2 == 0 else "assistant"
        parent = chats.chats[chat_id].tip
        chats.add_message(chat_id, role, f"Message {i}, *short*.", status="done", parent=parent)
    return chats


@pytest.mark.slow
async def test_long_chat__window_moves_with_the_reader_and_stays_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transcript_of_the_screen, "MOST_TURNS", 20)
    script = Script(answers=("The newest.",), context=10**5, prompt_tok_per_s=1e5)
    stage = Stage(script, chats=long_chat(160))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        screen = await press(stage, pilot, "ctrl+l", "enter")
        assert "Message 159, short." in screen
        transcript = stage.app.chat.query_one(Transcript)
        seen: set[int] = set()
        for _ in range(7):
            before = numbers(dump(stage.app))
            await press(stage, pilot, "pageup")
            await stage.settle(pilot)
            now = numbers(dump(stage.app))
            assert not now or max(now) >= min(before or [0]) - 1  # nothing was jumped over
            assert len(stage.app.chat.query(Block)) <= 28  # four screens, and a step
            seen |= now
        assert set(range(min(seen), 156)) <= seen
        assert min(seen) < 132
        assert "messages below" in dump(stage.app)
        screen = await press(stage, pilot, "ctrl+home")
        assert "Message 0, *short*." in screen
        assert "earlier message" not in screen
        await asked(stage, pilot, "and now?")
        assert "The newest." in dump(stage.app)
        assert transcript.following
        await press(stage, pilot, "ctrl+home")
        screen = await press(stage, pilot, "ctrl+end")
        assert "The newest." in screen


def numbers(screen: str) -> set[int]:
    return {
        int(row.split("Message ")[1].split(",")[0])
        for row in screen.splitlines()
        if "Message " in row
    }


@pytest.mark.slow
async def test_writing__reader_far_away__text_there_when_he_is_back() -> None:
    answer = "word " * 300
    stage = Stage(Script(answers=(answer,), tokens_per_s=100), chats=long_chat(200))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await press(stage, pilot, "ctrl+l", "enter")
        await stage.ask(pilot, "go")
        await stage.play(pilot, 0.5, step_s=0.1)
        await press(stage, pilot, "ctrl+home")
        await stage.play(pilot, 1.0, step_s=0.1)
        screen = dump(stage.app)
        assert "Message 0, *short*." in screen
        assert "messages below, writing" in screen
        await press(stage, pilot, "ctrl+end")
        await stage.play(pilot, 8.0)
        assert stage.app.conversation.turns[-1].status is Status.DONE
        block = stage.app.chat._answer
        assert block is not None
        assert "".join(segment.text for segment in block.segments) == answer


async def test_find__words_reversed__in_text_code_and_messages_and_not_afterwards() -> None:
    stage = Stage(
        Script(answers=("A *fox* and `fox`.\n\n```py\nfox = 1\n```\n\n|a|\n|---|\n|fox|\n",))
    )
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await asked(stage, pilot, "which FOX?")
        await press(stage, pilot, "ctrl+f", *"fox")
        assert reversed_words(stage) == ["fox"] * 4
        await press(stage, pilot, "up")
        assert reversed_words(stage) == ["FOX"]
        await press(stage, pilot, "escape")
        assert reversed_words(stage) == []


def reversed_words(stage: Stage) -> list[str]:
    """What is drawn reversed in the transcript, row by row."""
    region = stage.app.chat.query_one(Transcript).region
    lines = stage.app.screen._compositor.render_strips()[region.y : region.bottom]
    return [
        segment.text
        for line in lines
        for segment in line
        if segment.style is not None and segment.style.reverse and segment.text.isalpha()
    ]


async def test_click__on_a_head_only__cursor_there_and_the_keys_of_a_message() -> None:
    stage = Stage(Script(answers=("An answer.",)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await asked(stage, pilot, "q")
        await pilot.click(offset=(5, 6))  # on the answer's text
        assert stage.app.focused is stage.app.chat.query_one(Prompt)
        await pilot.click(offset=(5, 5))
        assert "▸moet-demo" in await press(stage, pilot, "y")
        assert stage.app.clipboard == "An answer."


async def test_queued__app_is_closed__message_is_the_chats_draft() -> None:
    stage = Stage(Script(answers=("word " * 99,)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "one")
        await stage.ask(pilot, "two")
        await press(stage, pilot, *"more")
        stage.app.chat.save_draft()
        chat = next(iter(stage.chats.chats.values()))
        assert chat.draft == "two\nmore"
        await stage.play(pilot, 9.0)
        assert chat.draft == "more"


async def test_two_windows__prompts_of_new_chats__neither_takes_the_other_s(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    words = {Window.APP: "for my model", Window.CONNECTED: "for the server"}

    def stages() -> dict[Window, Stage]:
        return {window: Stage(chats=ChatStore.open(path, window=window)) for window in words}

    opened = stages()
    app, connected = opened.values()
    async with app.open() as one, connected.open() as two:
        await app.ready(one)
        await connected.ready(two)
        await one.press(*words[Window.APP])
        await two.press(*words[Window.CONNECTED])
        await app.play(one, 1.0)
        await connected.play(two, 1.0)
    for window, stage in stages().items():
        async with stage.open() as pilot:
            await stage.ready(pilot)
            assert stage.app.chat.prompt.text == words[window]
            if window is Window.APP:  # what is sent here stays unsent there
                await pilot.press("enter")
                await stage.play(pilot, 1.0)
                assert stage.app.chat.prompt.text == ""


@pytest.mark.slow
async def test_window_grows__and_messages_are_folded__filled_and_at_rest() -> None:
    chats = FakeChats()
    chat_id = chats.create_chat("long", model="m", system="")
    for i in range(60):
        words = f"Message {i}, it.\n\n" + "More. " * 250
        parent = chats.chats[chat_id].tip
        chats.add_message(chat_id, "assistant", words, status="done", parent=parent)
    stage = Stage(chats=chats)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await press(stage, pilot, "ctrl+l", "enter")
        transcript = stage.app.chat.query_one(Transcript)
        n_opened = len(stage.app.chat.query(Block))
        await pilot.resize_terminal(80, 32)
        quiet, before = 0, 0
        while quiet < 4:
            for block in stage.app.chat.query(AnswerBlock):
                if block._rest.is_open:
                    await block.toggle()
            await transcript.settle()
            await stage.settle(pilot)
            now = transcript.virtual_size.height
            quiet, before = quiet + 1 if now == before else 0, now
        rows = transcript.size.height
        n_drawn, first = len(stage.app.chat.query(Block)), transcript._first
        assert n_drawn > n_opened
        assert transcript.virtual_size.height >= 2 * rows
        assert first > 0
        for _ in range(5):
            await transcript.settle()
            await stage.settle(pilot)
        assert (len(stage.app.chat.query(Block)), transcript._first) == (n_drawn, first)
