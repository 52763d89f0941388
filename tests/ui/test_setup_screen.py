"""The wizard on the screen: keys, threads, questions, and going on where it was."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from moet_desk.errors import fail
from moet_desk.ui.bridge import Phase
from moet_desk.ui.desk import JobState, PlanWishes
from moet_desk.ui.setup_steps import Setup, Step, from_kept, to_kept
from tests.ui.desk import DEMO, FLASH, HUGE, PULLING, SMALL
from tests.ui.support import Stage, dump


async def press(stage: Stage, pilot: Any, *keys: str) -> str:
    """Press keys one by one, let threads end, and return the screen."""
    for key in keys or ("",):
        await pilot.press(*filter(None, [key]))
        await stage.threads(pilot)
    return dump(stage.app)


def step(stage: Stage) -> Step:
    return stage.app.setup.setup.step


@pytest.mark.asyncio
async def test_first_run__enter_alone__demo_model_is_ready_to_chat() -> None:
    stage = Stage(setup=Setup())
    stage.desk.packs = ()
    async with stage.open() as pilot:
        await stage.threads(pilot)
        assert stage.app.bridge.phase is Phase.IDLE
        screen = await press(stage, pilot)
        assert "[1 Machine]" in screen
        assert "RTX 5090" in screen
        assert "1 warning, 1 problem" in screen
        assert "Which model?" in await press(stage, pilot, "enter")
        assert "[3 Plan]" in await press(stage, pilot, "enter")
        assert "0 of 288 experts" in await press(stage, pilot, "enter")
        assert stage.desk.asked[-1] == ("start", "demo", PlanWishes())
        stage.desk.finish("job-1")
        await stage.threads(pilot)
        await stage.ready(pilot)
        await stage.threads(pilot)
        assert stage.app.current_mode == "chat"
        assert "moet-demo is ready" in dump(stage.app)
        assert from_kept(stage.desk.kept) == Setup(Step.MODEL, Step.MODEL)
        await stage.ask(pilot, "Hello")
        await stage.play(pilot, 1.0)
        assert "You" in dump(stage.app)


@pytest.mark.asyncio
async def test_large_download__enter_alone__never_starts_it() -> None:
    stage = Stage(setup=Setup(Step.MODEL, Step.MODEL))
    async with stage.open() as pilot:
        await stage.threads(pilot)
        screen = await press(stage, pilot, "enter", "enter")
        assert "Download 167.0 GB?" in screen
        assert "The pack takes 86.0 GB." in screen
        await press(stage, pilot, "enter")
        assert step(stage) is Step.PLAN
        await press(stage, pilot, "enter", "right", "enter")
        assert step(stage) is Step.GET
        assert stage.desk.asked[-1] == ("start", "flash", PlanWishes())


@pytest.mark.asyncio
async def test_plan__arrows_change_it__and_the_problem_stops() -> None:
    stage = Stage(setup=Setup(Step.PLAN, Step.MODEL, "flash"))
    async with stage.open() as pilot:
        await stage.threads(pilot)
        screen = await press(stage, pilot, "right")
        assert "64K of 128K tokens" in screen
        assert "at 65536 tokens" in screen
        await press(stage, pilot, "down", "right", "right")
        assert "MD-GPU-05" in dump(stage.app)
        await press(stage, pilot, "enter")
        assert step(stage) is Step.PLAN
        await press(stage, pilot, "left", "down", "right", "j")
        assert '"context_tokens": 65536' in stage.app.clipboard
        wishes = PlanWishes(65536, 4 * 2**30, "balanced")
        assert stage.app.setup.setup.wishes == wishes
        kept = from_kept(stage.desk.kept)
        assert kept is not None
        assert kept.wishes == wishes


@pytest.mark.asyncio
async def test_escape__every_step__keeps_the_answers() -> None:
    stage = Stage(setup=Setup())
    async with stage.open() as pilot:
        await stage.threads(pilot)
        await press(stage, pilot, "enter", "up", "enter", "right")
        assert stage.app.setup.setup.wishes.context == 65536
        await press(stage, pilot, "escape")
        assert step(stage) is Step.MODEL
        await press(stage, pilot, "escape")
        assert step(stage) is Step.MACHINE
        screen = await press(stage, pilot, "enter", "enter")
        assert "64K of 128K tokens" in screen
        await press(stage, pilot, "escape", "escape", "escape")
        assert stage.app.current_mode == "models"


@pytest.mark.asyncio
async def test_job__pause_go_on_and_leave__models_screen_has_it() -> None:
    stage = Stage(setup=Setup(Step.GET, Step.MODEL, "flash", job="job-1", model="flash"))
    stage.desk.running = (PULLING,)
    async with stage.open() as pilot:
        await stage.threads(pilot)
        screen = dump(stage.app)
        for words in ("80.0 GB of 167.0 GB", "about 12 m left", "file 24 of 46", "✓ Check"):
            assert words in screen
        assert "Paused. What is done is kept" in await press(stage, pilot, "p")
        await press(stage, pilot, "enter")
        assert stage.desk.running[0].state is JobState.RUNNING
        screen = await press(stage, pilot, "x")
        assert stage.desk.running[0].state is JobState.PAUSED
        assert stage.app.current_mode == "models"
        assert "paused" in screen
        await press(stage, pilot, "a")
        assert stage.app.current_mode == "setup"
        assert step(stage) is Step.GET


@pytest.mark.asyncio
async def test_job__fails__error_is_shown_and_enter_tries_again() -> None:
    stage = Stage(setup=Setup(Step.GET, Step.MODEL, "flash", job="job-1", model="flash"))
    error = fail("MD-DISK-02", path="/models")
    stage.desk.running = (replace(PULLING, state=JobState.FAILED, error=error),)
    async with stage.open() as pilot:
        await stage.threads(pilot)
        assert "MD-DISK-02" in dump(stage.app)
        await press(stage, pilot, "enter")
        assert stage.desk.asked[-1] == ("resume", "job-1")


@pytest.mark.asyncio
async def test_repository_or_folder__looked_up_and_planned() -> None:
    stage = Stage(setup=Setup(Step.MODEL, Step.MODEL))
    async with stage.open() as pilot:
        await stage.threads(pilot)
        await press(stage, pilot, "end", "enter")
        await press(stage, pilot, *"nowhere", "enter")
        assert "MD-SRC-01" in dump(stage.app)
        await press(stage, pilot, *(["backspace"] * 7), *"a", "slash", *"b", "enter")
        screen = dump(stage.app)
        assert "▸a/b " in screen
        await press(stage, pilot, "enter")
        assert stage.app.setup.setup.offer == "a/b"
        assert step(stage) is Step.PLAN


@pytest.mark.asyncio
async def test_lost_window__kept_answers__go_on_at_the_same_step() -> None:
    first = Stage(setup=Setup())
    async with first.open() as pilot:
        await first.threads(pilot)
        await press(first, pilot, "enter", "up", "enter", "right")
    setup = from_kept(first.desk.kept)
    assert setup is not None
    assert setup.open
    second = Stage(setup=setup)
    async with second.open() as pilot:
        await second.threads(pilot)
        assert "64K of 128K tokens" in dump(second.app)


@pytest.mark.asyncio
async def test_start__engine_fails__enter_loads_again() -> None:
    stage = Stage(setup=Setup(Step.START, Step.MODEL, "demo", model="demo"))
    broken = [True]

    def open_engine() -> Any:
        if broken[0]:
            raise fail("MD-PACK-07", path="/p", reason="a disk")
        return stage.engine

    stage.desk._open_engine = open_engine
    async with stage.open() as pilot:
        await stage.threads(pilot)
        assert "MD-PACK-07" in dump(stage.app)
        broken[0] = False
        await press(stage, pilot, "enter")
        await stage.ready(pilot)
        await stage.threads(pilot)
        assert stage.app.current_mode == "chat"


@pytest.mark.asyncio
async def test_ready_pack__nothing_is_fetched_again() -> None:
    stage = Stage(setup=Setup(Step.PLAN, Step.MODEL, "demo"))
    stage.desk.offered = (replace(DEMO, ready=True), SMALL)
    async with stage.open() as pilot:
        await stage.threads(pilot)
        await press(stage, pilot, "enter")
        assert ("opener", "demo", PlanWishes()) in stage.desk.asked
        assert all(what[0] != "start" for what in stage.desk.asked)


@pytest.mark.asyncio
async def test_full_disk__answers_not_kept__said_once_and_goes_on() -> None:
    stage = Stage(setup=Setup())
    stage.desk.errors["save_setup"] = fail("MD-DISK-02", path="/d")
    async with stage.open() as pilot:
        await stage.threads(pilot)
        await press(stage, pilot, "enter", "enter")
        assert step(stage) is Step.PLAN
        assert len(stage.app._notifications) == 1


@pytest.mark.asyncio
async def test_offer_gone__back_to_the_list() -> None:
    stage = Stage(setup=Setup(Step.PLAN, Step.MODEL, "gone"))
    async with stage.open() as pilot:
        await stage.threads(pilot)
        assert step(stage) is Step.MODEL
        assert stage.app.setup.setup.offer != "gone"
        assert "MD-SRC-01" in dump(stage.app)  # why


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [(80, 24), (100, 24), (200, 60), (40, 10)])
async def test_any_size__every_step__nothing_raises(size: tuple[int, int]) -> None:
    at = Setup(Step.GET, Step.MACHINE, "flash", job="job-1", model="flash")
    long = replace(FLASH, title="x" * 300, reason="y " * 300, download_bytes=10**15)
    for wanted in Step:
        stage = Stage(setup=replace(at, step=wanted))
        stage.desk.offered = (long, SMALL)
        stage.desk.running = (replace(PULLING, words=("z" * 500,)),)
        async with stage.open(*size) as pilot:
            await stage.threads(pilot)
            assert all(len(line) <= size[0] for line in dump(stage.app).split("\n"))


def test_kept__is_plain_json_values() -> None:
    kept = to_kept(Setup(Step.PLAN, offer="flash"))
    assert all(isinstance(v, str | int | bool | None) for v in kept.values())


@pytest.mark.asyncio
async def test_resize__cursor_stays_on_its_model() -> None:
    stage = Stage(setup=Setup())
    async with stage.open() as pilot:
        await stage.threads(pilot)
        await press(stage, pilot, "enter", "down")
        assert "▸Qwen3.6" in dump(stage.app)
        await pilot.resize_terminal(120, 40)
        await stage.threads(pilot)
        assert "▸Qwen3.6" in dump(stage.app)


@pytest.mark.asyncio
async def test_models__more_than_fit__a_line_each_and_the_cursor_in_view() -> None:
    stage = Stage(setup=Setup())
    many = [replace(HUGE, id=f"m{i}", title=f"M{i}", forecast="0.2-0.4 t/s") for i in range(20)]
    worked_out = threading.Event()
    stage.desk.offers = lambda: (worked_out.wait(5.0), (*many, DEMO))[1]  # type: ignore[method-assign]
    async with stage.open() as pilot:
        await stage.threads(pilot)
        await pilot.press("enter")
        for _ in range(3):  # the empty list has its place on the screen
            stage.app.pull_gauges()
            await stage.settle(pilot)
        worked_out.set()
        await stage.threads(pilot)
        lines = dump(stage.app).splitlines()
    at = next(i for i, line in enumerate(lines) if "▸Demo model" in line)
    shown = [line.split()[0] for line in lines[5:at]]
    assert shown == [f"M{i}" for i in range(20 - len(shown), 20)]
    assert all("0.2-0.4 t/s" in line for line in lines[5:at])


@pytest.mark.asyncio
async def test_filter__models_with_these_words__the_last_row_stays() -> None:
    stage = Stage(setup=Setup(Step.MODEL, Step.MODEL))
    async with stage.open() as pilot:
        await stage.threads(pilot)
        await pilot.press("slash", *"deepseek", "space", *"pro")
        screen = dump(stage.app)
        assert "DeepSeek-V4-Pro" in screen
        assert "DeepSeek-V4-Flash" not in screen
        assert "From Hugging Face" in screen
        assert "DeepSeek-V4-Flash" in await press(stage, pilot, "escape")
        await pilot.press("slash", *"qwen", "enter")
        await press(stage, pilot, "enter")
        assert stage.app.setup.setup.offer == "small"
        assert step(stage) is Step.PLAN
        assert "DeepSeek-V4-Flash" in await press(stage, pilot, "escape")


@pytest.mark.asyncio
async def test_plan__limit_of_the_line__handed_to_the_job() -> None:
    stage = Stage(setup=Setup(Step.PLAN, Step.MODEL, "small"))
    async with stage.open() as pilot:
        await stage.threads(pilot)
        screen = await press(stage, pilot, "down")
        assert "< none, a download" in screen
        assert "100.0 MB/s" in await press(stage, pilot, "left", "left")
        await press(stage, pilot, "enter")
        assert stage.desk.asked[-1] == ("start", "small", PlanWishes(), 100_000_000)
        kept = from_kept(stage.desk.kept)
        assert kept is not None
        assert kept.limit == 100_000_000


@pytest.mark.asyncio
async def test_plan__nothing_to_fetch__no_limit_is_asked_for() -> None:
    stage = Stage(setup=Setup(Step.PLAN, Step.MODEL, "demo"))
    async with stage.open() as pilot:
        await stage.threads(pilot)
        assert "Limit" not in dump(stage.app)
