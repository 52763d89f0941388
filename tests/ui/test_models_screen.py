"""The models screen and the doctor screen: rows, keys, questions, and jobs on every screen."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from textual.binding import Binding

from moet_desk.engine.handle import Quality
from moet_desk.engine.scripted import Script
from moet_desk.errors import fail
from moet_desk.ui.bridge import Phase
from moet_desk.ui.desk import Finding, JobState, JobStep, Mark, PackCondition, PlanWishes
from moet_desk.ui.palette import show_key
from moet_desk.ui.screens.doctor import count_words
from moet_desk.ui.screens.models import ModelList, ModelsScreen
from moet_desk.ui.setup_steps import Step
from moet_desk.ui.widgets.filter_line import matches
from moet_desk.ui.widgets.job_lines import figures, left_words
from moet_desk.ui.widgets.model_rows import _MORE_KEYS
from tests.ui.desk import DEMO, FINDINGS, FLASH, PULLING, READY
from tests.ui.support import Stage, dump
from tests.ui.test_setup_screen import press

OTHER = replace(READY, name="other", gate=None)
BROKEN = replace(
    READY, name="broken", condition=PackCondition.DAMAGED,
    error=fail("MD-PACK-07", path="/p", reason="a hole"),
)  # fmt: skip


@pytest.mark.asyncio
async def test_models__packs_jobs_and_what_can_be_added() -> None:
    stage = Stage()
    stage.desk.packs = (READY, BROKEN)
    stage.desk.running = (PULLING,)
    stage.desk.offered = (replace(FLASH, id="new"), DEMO)
    async with stage.open(120, 40) as pilot:
        await stage.ready(pilot)
        screen = await press(stage, pilot, "f4")
        for words in ("● loaded", "✗ damaged", "deepseek_v3", "0.62", "flash pull", " 48 %"):
            assert words in screen
        assert "To be added" in screen
        assert screen.count("Demo model") == 0  # it is on this computer already
        assert "8 layers x 32 experts" in screen
        assert "MD-PACK-07" in await press(stage, pilot, "down")


@pytest.mark.asyncio
async def test_enter__another_pack__loads_it_and_opens_the_chat() -> None:
    stage = Stage()
    stage.desk.packs = (READY, OTHER)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await press(stage, pilot, "f4", "down", "enter")
        await stage.ready(pilot)
        assert ("opener", "other", None) in stage.desk.asked
        assert stage.app.model == "other"
        assert stage.app.current_mode == "chat"
        assert stage.app.bridge.phase is Phase.READY


@pytest.mark.asyncio
async def test_enter__while_an_answer_is_written__asks_first() -> None:
    stage = Stage(Script(answers=("word " * 400,)))
    stage.desk.packs = (READY, OTHER)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 0.5)
        screen = await press(stage, pilot, "f4", "down", "enter")
        assert "Load another model while an answer is written?" in screen
        await press(stage, pilot, "escape")
        assert stage.app.model == "demo"
        assert stage.app.conversation.busy
        await press(stage, pilot, "enter", "right", "enter")
        assert stage.app.model == "other"


@pytest.mark.asyncio
async def test_delete__asks_with_the_size__safe_button_first() -> None:
    stage = Stage()
    stage.desk.packs = (READY, OTHER)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await press(stage, pilot, "f4", "d")
        assert "It is loaded" in dump(stage.app)
        screen = await press(stage, pilot, "down", "d")
        assert "Delete other?" in screen
        assert "50.0 MB become free" in screen
        await press(stage, pilot, "enter")
        assert len(stage.desk.packs) == 2
        await press(stage, pilot, "delete", "right", "enter")
        stage.time.seconds += 3
        assert " other " not in await press(stage, pilot)
        assert stage.desk.packs == (READY,)


@pytest.mark.asyncio
async def test_jobs__pause_resume_cancel_and_verify() -> None:
    stage = Stage()
    stage.desk.running = (PULLING,)
    stage.desk.packs = (READY, replace(OTHER, name="flash", condition=PackCondition.PACKING))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await press(stage, pilot, "f4", "v")
        assert ("verify", "demo") in stage.desk.asked
        await press(stage, pilot, "down", "p")  # the pack of the job
        assert stage.desk.running[0].state is JobState.PAUSED
        await press(stage, pilot, "down", "enter")  # the job itself
        assert stage.desk.running[0].state is JobState.RUNNING
        assert "Cancel pull of flash?" in await press(stage, pilot, "x")
        await press(stage, pilot, "right", "enter")
        assert stage.desk.running == ()


@pytest.mark.asyncio
async def test_add__from_the_list_or_an_offer__opens_the_wizard() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await press(stage, pilot, "f4", "a")
        assert stage.app.current_mode == "setup"
        assert stage.app.setup.setup.step is Step.MODEL
        assert "[1 Model]" in dump(stage.app)
        await press(stage, pilot, "escape", "down", "enter")
        assert stage.app.setup.setup.step is Step.PLAN
        assert stage.app.setup.setup.offer == "flash"


@pytest.mark.asyncio
async def test_models__nothing_here__says_how_to_add() -> None:
    stage = Stage()
    stage.desk.packs = ()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        assert "Nothing here yet. 412.0 GB are free. A adds" in await press(stage, pilot, "f4")


@pytest.mark.asyncio
async def test_job_lines__on_every_screen__and_gone_when_done() -> None:
    stage = Stage()
    stage.desk.running = tuple(replace(PULLING, id=f"j{n}") for n in range(4))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        for key in ("f2", "f3", "f7"):
            screen = await press(stage, pilot, key)
            assert screen.count("flash pull") == 2
            assert "and 2 more, F4 lists them" in screen
        stage.desk.running = (replace(PULLING, state=JobState.DONE),)
        assert "flash pull" not in await press(stage, pilot)


@pytest.mark.asyncio
async def test_list__refreshed__cursor_stays_on_its_row() -> None:
    stage = Stage()
    stage.desk.packs = (OTHER, READY)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await press(stage, pilot, "f4", "down")
        stage.desk.packs = (replace(OTHER, name="aaa"), OTHER, READY)
        stage.time.seconds += 3
        await stage.threads(pilot)
        here = stage.app.models.query_one(ModelList).highlighted_option
        assert here is not None
        assert here.id == "pack-demo"


@pytest.mark.asyncio
async def test_doctor__findings_again_copy_save() -> None:
    stage = Stage()
    async with stage.open(100, 30) as pilot:
        await stage.ready(pilot)
        screen = await press(stage, pilot, "f7")
        for words in ("1 ok, 1 warning, 1 problem", "MD-RAM-03", "Do: Close programs.", "lower"):
            assert words in screen
        await press(stage, pilot, "c")
        assert "✗ MD-RAM-03 Swap is in use\n  8.1 GiB" in stage.app.clipboard
        assert "/home/ada/doctor.json" in await press(stage, pilot, "s")
        before = stage.desk.asked.count(("doctor",))
        await press(stage, pilot, "r")
        assert stage.desk.asked.count(("doctor",)) == before + 1
        stage.desk.errors["doctor"] = fail("MD-BUG-01", reason="r", log="l")
        await press(stage, pilot, "r")
        assert stage.app.doctor.problem is stage.desk.errors["doctor"]


def test_count_words__unknown_and_plural() -> None:
    many = (*FINDINGS, Finding(Mark.BAD, "x"), Finding(Mark.UNKNOWN, "y"))
    assert count_words(many) == "1 ok, 1 warning, 2 problems, 1 not checked"
    assert count_words(()) == "0 ok"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(3, "about 10 s left"), (94, "about 90 s left"), (200, "about 3 m left"),
     (3000, "about 50 m left"), (3700, "about 1 h left"), (9900, "about 2 h 45 m left")],
)  # fmt: skip
def test_left_words__as_exact_as_can_be_foreseen(seconds: int, words: str) -> None:
    assert left_words(JobStep("Pack", 0, seconds * 10, "experts", rate=10)) == words


def test_figures__units_of_the_step() -> None:
    assert figures(JobStep("Pack", 5, 10, "experts", rate=None)) == "5 of 10 experts"
    assert figures(JobStep("Download", 10**9, 2 * 10**9)) == "1.0 GB of 2.0 GB"


@pytest.mark.slow
@pytest.mark.asyncio
async def test_plan__changed_and_saved__loaded_again_if_wanted() -> None:
    stage = Stage()
    stage.desk.packs = (READY, OTHER, BROKEN)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        screen = await press(stage, pilot, "f4", "c")
        assert "32K of 128K tokens" in screen
        await pilot.press("right", "down", "down", "left", "down", "right")
        screen = dump(stage.app)
        assert "64K of 128K tokens" in screen
        assert "32.0 GiB for packed experts" in screen
        wishes = PlanWishes(65536, None, "balanced", 32 * 2**30)
        assert "Load demo again now?" in await press(stage, pilot, "enter")
        assert stage.desk.wishes == {"demo": wishes}
        n_loads = stage.app.bridge.loads
        await press(stage, pilot, "right", "enter")
        await stage.ready(pilot)
        assert stage.app.bridge.loads == n_loads + 1
        assert ("opener", "demo", wishes) in stage.desk.asked
        assert stage.app.conversation.wishes.quality is Quality.BALANCED
        assert stage.app.current_mode == "chat"
        await press(stage, pilot, "f4", "down", "c", "right", "escape")
        assert "other" not in stage.desk.wishes
        await press(stage, pilot, "c", "enter")
        assert stage.desk.wishes["other"] == PlanWishes()
        await press(stage, pilot, "down", "c")
        assert ("pack_offer", "broken") not in stage.desk.asked


@pytest.mark.asyncio
async def test_plan__does_not_fit__is_not_saved() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        screen = await press(stage, pilot, "f4", "c", "down", "right", "right")
        assert "MD-GPU-05" in screen
        await press(stage, pilot, "enter")
        assert stage.desk.wishes == {}
        assert "2.0 GiB for the desktop" in await press(stage, pilot, "a")


@pytest.mark.asyncio
async def test_folder_and_repair__of_the_pack_under_the_cursor() -> None:
    stage = Stage()
    stage.desk.packs = (READY, OTHER)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await press(stage, pilot, "f4", "r", "o")
        assert ("repair", "demo") not in stage.desk.asked  # it is loaded
        assert stage.app.clipboard == "/home/ada/models/demo"
        stage.desk.has_desktop = True
        await press(stage, pilot, "down", "o", "r")
        assert stage.app.clipboard == "/home/ada/models/demo"
        assert ("show_folder", "other") in stage.desk.asked
        assert ("repair", "other") in stage.desk.asked


@pytest.mark.asyncio
async def test_filter__rows_with_all_words__esc_shows_all() -> None:
    stage = Stage()
    stage.desk.packs = (READY, OTHER)
    stage.desk.running = (PULLING,)
    async with stage.open(120, 40) as pilot:
        await stage.ready(pilot)
        assert "Qwen3.6" in await press(stage, pilot, "f4")
        await pilot.press("slash", *"qwen")
        screen = dump(stage.app)
        assert "Qwen3.6" in screen
        assert not any(word in screen for word in ("● loaded", "flash pull", "other"))
        await press(stage, pilot, "enter", "enter")  # to the list, and the row under the cursor
        assert stage.app.setup.setup.offer == "small"
        await press(stage, pilot, "f4")
        await pilot.press("slash", *" nothing")
        assert "Nothing here has these words" in dump(stage.app)
        screen = await press(stage, pilot, "escape")
        assert "● loaded" in screen
        assert "flash pull" in screen


def test_matches__every_word_in_any_text() -> None:
    assert matches("", "a")
    assert matches("QWEN 3b", "Qwen3", "35b a3b")
    assert not matches("qwen x", "Qwen3", "35b")


def test_more_keys__are_the_screen_s_own() -> None:
    shown = dict(re.findall(r"(\S) ([A-Z][a-z]+)", _MORE_KEYS))
    bindings = {show_key(b.key): b for b in ModelsScreen.BINDINGS if isinstance(b, Binding)}
    assert set(shown) == {key for key, b in bindings.items() if not b.show and len(key) == 1}


@pytest.mark.asyncio
async def test_doctor__measure__in_the_background_with_what_and_how_long() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await press(stage, pilot, "f7")
        await pilot.press("b")
        stage.time.seconds += 3
        screen = ""
        for _ in range(100):
            await pilot.pause(0.01)
            stage.app.pull_gauges()
            screen = dump(stage.app)
            if "measuring the drive" in screen:
                break
        assert "measuring the drive, 3 s" in screen
        await pilot.press("b", "r", "f")  # one thing at a time
        stage.desk.measuring.set()
        await stage.threads(pilot)
        assert "drive 5.9 GB/s" in dump(stage.app)
        assert [what[0] for what in stage.desk.asked if what[0] != "library"] == [
            "doctor", "measure",
        ]  # fmt: skip


@pytest.mark.asyncio
async def test_doctor__measuring_fails__the_error_is_shown() -> None:
    stage = Stage()
    stage.desk.errors["measure"] = fail("MD-DISK-03", path="/d", reason="no")
    async with stage.open() as pilot:
        await stage.ready(pilot)
        assert "MD-DISK-03" in await press(stage, pilot, "f7", "b")


@pytest.mark.asyncio
async def test_doctor__put_in_order__says_what_and_checks_again() -> None:
    stage = Stage()
    stage.desk.tidied = ("made the folder /x",)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await press(stage, pilot, "f7", "f")
        said = [note.message for note in stage.app._notifications]
        assert said == ["made the folder /x"]
        asked = [what[0] for what in stage.desk.asked if what[0] != "library"]
        assert asked == ["doctor", "put_in_order", "doctor"]
