"""The Chat screen, driven by keys on the scripted engine."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from textual.containers import Horizontal
from textual.widgets import Button, Input, Markdown, OptionList, Static

from moet_desk.engine.handle import GateInfo, GateSource, Quality
from moet_desk.engine.scripted import Script, ScriptedFailure
from moet_desk.telemetry import EngineSnapshot, EngineState, LoadStep
from moet_desk.ui.bridge import Phase
from moet_desk.ui.chat_lines import closing_line
from moet_desk.ui.chat_records import Status, Turn, Wishes
from moet_desk.ui.screens.chat_list import ChatList
from moet_desk.ui.theme import UNICODE
from moet_desk.ui.widgets.blocks import AnswerBlock, MessageBlock
from moet_desk.ui.widgets.gauges import StatusLine
from moet_desk.ui.widgets.problem import ProblemPanel
from moet_desk.ui.widgets.prompt import Prompt
from moet_desk.ui.widgets.segments import Segment
from moet_desk.ui.widgets.transcript import Transcript
from tests.ui.support import NOON, FakePack, Stage, dump

pytestmark = pytest.mark.asyncio

LONG = "\n\n".join(f"Paragraph {i} with **some** words that fill a line or two." for i in range(60))


def prompt_of(stage: Stage) -> Prompt:
    return stage.app.chat.query_one(Prompt)


async def test_ask__key_by_key__streams_and_closes() -> None:
    stage = Stage(Script(answers=("Hello **there**, and some more words.",)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        assert "moet-demo is ready" in dump(stage.app)
        await pilot.press(*"Hi you", "enter")
        assert prompt_of(stage).text == ""
        await stage.play(pilot, 0.15, step_s=0.05)
        assert "writing" in dump(stage.app)
        await stage.play(pilot, 2.0)
        screen = dump(stage.app)
    assert "Hi you" in screen
    assert "Hello there, and some more words." in screen
    assert "tok/s · waiting" in screen
    assert "first token" in screen
    assert "● ready" in screen


async def test_ask__answer_over_before_its_place_is_on_the_screen__all_of_it_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Timers go on while blocks are mounted, which takes long on a busy computer."""
    stage = Stage(Script(answers=("Hello **there**, and some more words.",)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        intact, pulls = Transcript.add, 0

        async def add(self: Transcript, block: MessageBlock | AnswerBlock) -> None:
            nonlocal pulls
            if isinstance(block, AnswerBlock):
                for _ in range(20):
                    stage.engine.advance(0.2)
                    stage.time.seconds += 0.2
                    await stage.app.pull_text()
                    pulls += 1
            await intact(self, block)

        monkeypatch.setattr(Transcript, "add", add)
        await pilot.press(*"Hi", "enter")
        await stage.play(pilot, 1.0)
        screen = dump(stage.app)
    assert pulls == 20
    assert "Hello there, and some more words." in screen
    assert "● ready" in screen


async def test_enter__blank_prompt__sends_nothing() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("space", "ctrl+j", "enter")
        assert stage.app.conversation.turns == []


async def test_newline__three_keys__all_make_one() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("a", "ctrl+j", "b", "alt+enter", "c", "shift+enter", "d")
        assert prompt_of(stage).text == "a\nb\nc\nd"


async def test_escape__writing__stops_and_keeps_the_text() -> None:
    stage = Stage(Script(answers=(LONG,)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 1.0)
        await pilot.press("escape")
        await stage.play(pilot, 0.5)
        screen = dump(stage.app)
        turn = stage.app.conversation.turns[-1]
    assert turn.status is Status.STOPPED
    assert "Paragraph 0" in turn.text
    assert "stopped by you · " in screen


async def test_queue__while_writing__shown_and_taken_back_and_sent() -> None:
    stage = Stage(Script(answers=("One two three four five six.", "Second answer.")))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "first")
        await stage.ask(pilot, "second")
        assert "next: second   (Esc takes it back)" in dump(stage.app)
        await stage.ask(pilot, "third")
        assert prompt_of(stage).text == "third"
        await pilot.press("escape")
        assert prompt_of(stage).text == "second\nthird"
        assert stage.app.conversation.busy
        await pilot.press("enter")
        await stage.play(pilot, 3.0)
        screen = dump(stage.app)
    assert "next:" not in screen
    assert "Second answer." in screen


async def test_failure__panel_in_the_transcript__try_again_works() -> None:
    failure = ScriptedFailure("MD-ENG-04", {"reason": "[b]row 3[/b]", "model": "m"}, 3)
    stage = Stage(Script(answers=("Some text that breaks.", "Fine now."), failures={0: failure}))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.ask(pilot, "waiting one")
        await stage.play(pilot, 2.0)
        screen = dump(stage.app)
        assert "✗ The answer could not be finished   MD-ENG-04" in screen
        assert "[b]row 3[/b]." in screen
        assert "Do: Try again." in screen
        assert "The text so far is kept." in screen
        assert prompt_of(stage).text == "waiting one"
        stage.app.chat.query_one("ProblemPanel Button", Button).press()
        await stage.settle(pilot)
        await stage.play(pilot, 2.0)
        screen = dump(stage.app)
    assert "Fine now." in screen
    assert "MD-ENG-04" not in screen


async def test_card_lost__text_and_next_message_are_kept_and_the_panel_says_what_to_do() -> None:
    facts = {"name": "NVIDIA X", "reason": "an illegal memory access was encountered"}
    lost = ScriptedFailure("MD-GPU-07", facts, 3, ends_engine=True)
    stage = Stage(Script(answers=("Some text that breaks.",), failures={0: lost}))
    async with stage.open(80, 30) as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.ask(pilot, "waiting one")
        await stage.play(pilot, 2.0)
        stage.app.pull_gauges()
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert screen.count("The graphics card stopped answering   MD-GPU-07") == 1
        assert len(stage.app.chat.query(ProblemPanel)) == 1
        assert "Start the engine again" not in screen  # this process has lost the card for good
        assert "✗ fault" in screen
        assert prompt_of(stage).text == "waiting one"
    chat = next(iter(stage.chats.chats.values()))
    assert [m.status for m in chat.messages] == ["done", "failed"]
    assert chat.messages[1].content.startswith("Some text th")


async def test_context_full__forget_oldest__goes_on() -> None:
    stage = Stage(Script(answers=("word " * 120,), context=460, tokens_per_s=400))
    async with stage.open(80, 40) as pilot:
        await stage.ready(pilot)
        for i in range(4):
            await stage.ask(pilot, f"question {i}")
            await stage.play(pilot, 1.0)
        assert "! ctx" in dump(stage.app)
        while stage.app.conversation.problem is None:
            await stage.ask(pilot, "one more")
            await stage.play(pilot, 1.0)
        screen = dump(stage.app)
        assert "MD-API-03" in screen
        assert "[ Forget the oldest turns ]" in screen
        stage.app.chat.query_one("ProblemPanel Button", Button).press()
        await stage.settle(pilot)
        await stage.play(pilot, 1.0)
        assert stage.app.conversation.problem is None
        assert stage.app.conversation.turns[-1].status is Status.DONE


async def test_retry__ctrl_r__answer_replaced() -> None:
    stage = Stage(Script(answers=("First try.", "Second try.")))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 2.0)
        await pilot.press("ctrl+r")
        await stage.play(pilot, 2.0)
        screen = dump(stage.app)
        assert len(stage.app.chat.query(AnswerBlock)) == 1
    assert "Second try." in screen
    assert "First try." not in screen


async def test_new_and_list__open_an_earlier_chat__draft_and_text_back() -> None:
    stage = Stage(Script(answers=("An answer about foxes.", "One about hens.")))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        for question in ("foxes?", "hens?"):
            await stage.ask(pilot, question)
            await stage.play(pilot, 2.0)
            prompt_of(stage).load_text(f"draft on {question}")
            await pilot.press("ctrl+n")
            await stage.settle(pilot)
        assert "moet-demo is ready" in dump(stage.app)
        await pilot.press("ctrl+l")
        await stage.settle(pilot)
        assert stage.app.screen.query_one(OptionList).option_count == 2
        await pilot.press(*"foxes")
        await stage.settle(pilot)
        assert stage.app.screen.query_one(OptionList).option_count == 1
        assert "foxes?" in dump(stage.app)
        await pilot.press("enter")
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert prompt_of(stage).text == "draft on foxes?"
    assert "An answer about foxes." in screen
    assert "hens" not in screen


async def test_list__delete__asks_and_keeps_by_default() -> None:
    stage = Stage(Script(answers=("A.",)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 1.0)
        await pilot.press("ctrl+l")
        await stage.settle(pilot)
        await pilot.press("delete")
        await stage.settle(pilot)
        assert "Delete this chat?" in dump(stage.app)
        await pilot.press("enter")  # the safe button has the focus
        await stage.settle(pilot)
        assert len(stage.chats.chats) == 1
        await pilot.press("delete")
        await stage.settle(pilot)
        await pilot.press("right", "enter")
        await stage.settle(pilot)
        assert stage.chats.chats == {}
        assert "No earlier chats." in dump(stage.app)
        await pilot.press("escape")
        await stage.settle(pilot)
        assert not isinstance(stage.app.screen, ChatList)
        assert "moet-demo is ready" in dump(stage.app)


async def test_list__search_field__delete_key_edits_nothing_and_empty_search_says_so() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("ctrl+l", *"none")
        await stage.settle(pilot)
        assert stage.app.screen.query_one(Input).value == "none"
        assert "No chat contains this: none" in dump(stage.app)


async def test_follow__scrolled_up__stays_there_and_says_what_is_below() -> None:
    stage = Stage(Script(answers=(LONG,), tokens_per_s=400))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 1.0)
        transcript = stage.app.chat.query_one(Transcript)
        assert transcript.following
        await pilot.press("pageup")
        await stage.settle(pilot)
        place = transcript.scroll_offset.y
        await stage.play(pilot, 0.5)
        assert transcript.scroll_offset.y == place
        assert "below, writing" in dump(stage.app)
        await pilot.press("ctrl+end")
        await stage.play(pilot, 0.5)
        assert transcript.following
        assert "below" not in dump(stage.app)
        await pilot.press("pageup")
        await stage.play(pilot, 0.2)
        await pilot.click("#below")
        await stage.settle(pilot)
        assert transcript.following


async def test_short_chat__stands_at_the_top() -> None:
    stage = Stage(Script(answers=("Short.",)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 1.0)
        assert dump(stage.app).splitlines()[2].startswith(" You")


async def test_prefill__long_prompt__bar_with_tokens_and_time() -> None:
    stage = Stage(Script(prompt_tok_per_s=100))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "word " * 400)
        await stage.play(pilot, 2.0)
        screen = dump(stage.app)
    assert "Reading your message" in screen
    assert "known from before" not in screen
    assert re.search(r"\d+ of 5\d\d tokens", screen)
    assert "left" in screen
    assert "◐ reading" in screen


async def test_slash__wishes__set_and_nothing_sent() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        for line in ("/quality exact", "/temp 0.2", "/system Be brief."):
            await stage.ask(pilot, line)
        wishes = stage.app.conversation.wishes
        assert (wishes.quality, wishes.temperature, wishes.system) == (
            Quality.EXACT, 0.2, "Be brief.",
        )  # fmt: skip
        for line in ("/fast", "/temp", "/system"):
            await stage.ask(pilot, line)
        assert stage.app.conversation.wishes == Wishes()
        assert stage.app.conversation.turns == []
        assert prompt_of(stage).text == ""


async def test_slash__wrong__kept_in_the_prompt_with_a_hint() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "/nwe")
        assert prompt_of(stage).text == "/nwe"
        await stage.settle(pilot)
        assert "There is no command /nwe. Did you" in dump(stage.app)
        await stage.ask(pilot, "//starts with a slash")
        assert stage.app.conversation.turns[0].text == "/starts with a slash"


async def test_quality_key__goes_through_them_and_shows() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        for quality in (Quality.BALANCED, Quality.EXACT):
            await pilot.press("f9")
            assert stage.app.conversation.wishes.quality is quality
            stage.app.pull_gauges()
            await stage.settle(pilot)
            assert quality.value in dump(stage.app).splitlines()[-2]
        await pilot.press("f9")
        assert stage.app.conversation.wishes.quality is Quality.FAST


async def test_loading__typing_works__message_goes_when_ready() -> None:
    load = (LoadStep("Dense layers", total=8 * 2**20, seconds=2.0), LoadStep("Self-test"))
    stage = Stage(
        Script(answers=("At last.",), load=load),
        pack_job=FakePack([{"event": "pack", "done": n, "total": 288, "bytes": n * 1000,
                            "rate_bytes_per_s": 2e6} for n in (72, 288)]),
    )  # fmt: skip
    async with stage.open() as pilot:
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert "First start: packing the model" in screen
        assert "72 of 288 rows" in screen
        await stage.ask(pilot, "early bird")
        assert "next: early bird" in dump(stage.app)
        while stage.app.bridge.phase is not Phase.LOADING:
            stage.app.pull_gauges()
            await pilot.pause(0.01)
        stage.engine.advance(1.0)
        stage.app.pull_gauges()
        await stage.settle(pilot)
        assert "4.0 of 8.0 MiB  4.0 MiB/s" in dump(stage.app)
        await stage.ready(pilot)
        await stage.play(pilot, 2.0)
        screen = dump(stage.app)
    assert "early bird" in screen
    assert "At last." in screen
    assert "Dense layers" not in screen


async def test_load_fails__panel_and_restart() -> None:
    stage = Stage(Script(load_failure=ScriptedFailure("MD-PACK-04", {"model": "m"})))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert "MD-PACK-04" in screen
        assert "[ Start the engine again ]" in screen
        assert "✗ fault" in screen
        await stage.ask(pilot, "still waits")
        assert "next: still waits" in dump(stage.app)


async def test_model_text__escape_sequences_and_markup__inert() -> None:
    nasty = "a\x1b[31mb\x1b]0;owned\x07c [bold]d[/bold] [@click=app.quit]e[/] \u202ef <b>g</b>"
    stage = Stage(Script(answers=(nasty,)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "[red]q[/red] \x1b[2J")
        await stage.play(pilot, 3.0)
        screen = dump(stage.app)
    assert "[red]q[/red]" in screen
    assert "abc [bold]d[/bold] [@click=app.quit]e[/] f <b>g</b>" in screen
    assert "\x1b" not in screen


async def test_model_text__wide_characters__columns_stay_right() -> None:
    text = "漢字かな " * 20 + "\n\n| 漢 | 🦊🦊 |\n|---|---|\n| e\u0301 | ok |\n"
    stage = Stage(Script(answers=(text,)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "漢" * 60 + "🦊")
        await stage.play(pilot, 8.0)
        from rich.cells import cell_len

        lines = dump(stage.app).splitlines()
    assert max(cell_len(line) for line in lines) <= 80
    assert any("漢字かな" in line for line in lines)


async def test_links__never_open__shown_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Script(answers=("[click me](https://evil.example/x)",)))
    opened: list[str] = []
    async with stage.open() as pilot:
        monkeypatch.setattr(stage.app, "open_url", lambda url, **_: opened.append(url))
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 2.0)
        segment = stage.app.chat.query_one(Segment)
        segment.post_message(Markdown.LinkClicked(segment, "https://evil.example/x"))
        await stage.settle(pilot)
        await stage.settle(pilot)
        assert "https://evil.example/x" in dump(stage.app)
    assert opened == []


async def test_long_answer__rotated__segments_join_to_the_source() -> None:
    stage = Stage(Script(answers=(LONG,), tokens_per_s=2000))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 3.0, step_s=0.1)
        segments = stage.app.chat.query_one(AnswerBlock).segments
        texts = [segment.text for segment in segments]
        assert "".join(texts) == LONG
        assert len(texts) >= 2
        assert max(map(len, texts[:-1])) < 2000


async def test_long_answer__far_segments_parked__drawn_again_when_looked_at() -> None:
    stage = Stage(Script(answers=(LONG * 2,), tokens_per_s=4000))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 3.0, step_s=0.25)
        await stage.settle(pilot)
        first = stage.app.chat.query_one(AnswerBlock).segments[0]
        transcript = stage.app.chat.query_one(Transcript)
        height, bottom = first.size.height, transcript.max_scroll_y
        assert first.parked
        assert not first.children
        transcript.release_anchor()
        transcript.scroll_to(y=0, animate=False)
        for _ in range(6):
            await stage.settle(pilot)
        assert not first.parked
        assert "Paragraph 0 with some words" in dump(stage.app)
        assert (first.size.height, transcript.max_scroll_y) == (height, bottom)
        await pilot.resize_terminal(100, 30)
        for _ in range(6):
            await stage.settle(pilot)
        assert "Paragraph 0 with some words" in dump(stage.app)


async def test_reading__bar_makes_the_chat_longer_than_the_view__all_of_it_is_seen() -> None:
    three_lines = "a  \nb  \nc"  # with it the bar's last row is the first one that does not fit
    script = Script(answers=(three_lines, "B."), prompt_tok_per_s=2.0, prompt_chunk=1)
    stage = Stage(script)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 20.0, step_s=2.0)
        assert stage.app.chat.transcript.max_scroll_y == 0
        await stage.ask(pilot, "and then?")
        for _ in range(3):
            await stage.play(pilot, 0.5)
        rows = dump(stage.app).splitlines()
        at = next(i for i, row in enumerate(rows) if "Reading your message" in row)
        assert "tok/s" in rows[at + 2]


async def test_writing__no_word_for_some_seconds__said_in_place_of_the_speed() -> None:
    stage = Stage(Script(answers=(LONG,), tokens_per_s=20))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 2.0, step_s=0.1)
        assert "20.0 tok/s" in dump(stage.app)
        for seconds, said in ((1.5, False), (3.0, True)):
            stage.time.seconds += seconds
            await stage.app.pull_text()
            await stage.settle(pilot)
            assert ("no word for" in dump(stage.app)) is said
        await stage.play(pilot, 1.0, step_s=0.1)
        assert "no word for" not in dump(stage.app)


async def test_hidden__cache_in_front__text_pulled_and_drawn_on_return() -> None:
    answer = "Some words while you look elsewhere, and yet more."
    stage = Stage(Script(answers=(answer,), tokens_per_s=20))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await pilot.press("f3")
        await stage.play(pilot, 0.2)
        assert stage.app.conversation.turns[-1].text != ""
        assert len(stage.app.chat.query(Segment)) == 0
        await pilot.press("f2")
        await stage.play(pilot, 2.0)
        assert answer in dump(stage.app)


async def test_rail__wide_window__shown_and_toggled() -> None:
    stage = Stage()
    async with stage.open(120, 40) as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 3.0)
        assert "Tiers, recent look-ups" in dump(stage.app)
        await pilot.press("ctrl+b")
        await stage.settle(pilot)
        assert "Tiers, recent look-ups" not in dump(stage.app)
        assert stage.app.chat.query_one("#middle", Horizontal).size.width == 120


async def test_closing_line__balanced_answer__says_how_much_was_made_again() -> None:
    meta = {"reason": "stop", "tokens": 50, "decode_s": 2.0, "quality": "balanced"}
    turn = Turn(1, "assistant", "Hi.", Status.DONE, NOON, meta)
    assert "again" not in closing_line(turn, UNICODE).plain
    turn.meta["rerun_tokens"] = 6
    assert closing_line(turn, UNICODE).plain.endswith("balanced · 12 % again")
    turn.meta["rerun_s"] = 0.04
    assert closing_line(turn, UNICODE).plain.endswith("balanced · 12 % again, +0.8 ms/token")


@pytest.mark.parametrize("columns", [80, 120])
async def test_balanced_answer__share_and_cost__while_written_and_after(columns: int) -> None:
    answer = ("word " * 60).strip()
    script = Script(answers=(answer,), rerun_every=4, rerun_share=0.2, tokens_per_s=50)
    stage = Stage(script, wishes=Wishes(quality=Quality.BALANCED))
    cost = "+1.0 ms/token"  # a fifth of the 20 ms of each fourth token
    async with stage.open(columns, 40) as pilot:
        await stage.ready(pilot)
        assert "   balanced   " in status_of(dump(stage.app))
        await stage.ask(pilot, "q")
        await stage.play(pilot, 0.9, step_s=0.1)
        writing = dump(stage.app)
        assert stage.app.conversation.busy
        await stage.play(pilot, 3.0)
        after = dump(stage.app)
        closing = str(stage.app.chat.query(".closing").last(Static).content)
    status = status_of(writing)
    assert re.search(r"2\d % again", status)
    assert ("ms/token" in status) is (columns >= 120)
    assert re.search(r"writing.*2\d % again, \+1\.\d ms/token", " ".join(writing.split()))
    assert closing.endswith(f"balanced · 25 % again, {cost}")
    assert "   balanced   " in status_of(after)


def status_of(screen: str) -> str:
    return next(line for line in screen.splitlines() if line.startswith(" ●"))


async def test_fast_answer__nothing_about_reruns() -> None:
    stage = Stage(Script(answers=("word " * 60,)))
    async with stage.open(120, 40) as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 0.9, step_s=0.1)
        assert stage.app.conversation.busy
        assert "again" not in dump(stage.app)


CALIBRATED = GateInfo(0.26, GateSource.PACK, date="2026-11-29", budget=0.15, caught=0.508)


@pytest.mark.parametrize(
    ("gate", "wished", "said"),
    [
        (GateInfo(), None, "below 0.60 (built in)"),
        (CALIBRATED, None,
         "below 0.26 (calibrated 2026-11-29: catches 51 % of flips, budget 15 %)"),
        (CALIBRATED, 0.7, "below 0.70 (settings)"),
    ],
)  # fmt: skip
async def test_quality_key__balanced__tau_and_where_it_comes_from(
    gate: GateInfo, wished: float | None, said: str
) -> None:
    stage = Stage(Script(gate=gate), wishes=Wishes(gate=wished))
    async with stage.open(120, 40) as pilot:
        await stage.ready(pilot)
        await pilot.press("f9")
        await stage.settle(pilot)
        await pilot.pause(0.1)
        toast = stage.app.screen.query("Toast").last()
        assert said in " ".join(str(toast.render()).split())
        await pilot.press("f9")
        await stage.settle(pilot)
        assert "below" not in str(stage.app.screen.query("Toast").last().render())


async def test_opportunistic__status_line_and_closing_line__say_so() -> None:
    meta = {"reason": "stop", "tokens": 50, "decode_s": 2.0, "quality": "fast"}
    turn = Turn(1, "assistant", "Hi.", Status.DONE, NOON, meta)
    assert "opportunistic" not in closing_line(turn, UNICODE).plain
    turn.meta["opportunistic"] = True
    assert closing_line(turn, UNICODE).plain.endswith("fast · opportunistic")
    line = StatusLine(UNICODE)
    now = EngineSnapshot(EngineState.READY, "demo", context=2048, device="cpu")
    for opportunistic in (False, True):
        line._snapshot = replace(now, opportunistic=opportunistic)
        assert ("opportunistic" in line.make_text(80).plain) == opportunistic
