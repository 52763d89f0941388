from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from moet_desk.engine.scripted import Script
from moet_desk.errors import fail
from moet_desk.settings import SETTINGS, Endpoint
from moet_desk.telemetry import EndpointState, EndpointView
from moet_desk.ui.look import Look
from moet_desk.ui.screens.endpoint import EndpointScreen
from moet_desk.ui.screens.log import LogScreen, at_level
from moet_desk.ui.screens.settings import SettingsScreen
from moet_desk.ui.theme import UNICODE
from tests.ui.desk import CALLS
from tests.ui.support import Stage, dump

RECORDS = [
    "2026-11-29T12:00:00.000Z INFO    main moet_desk.x: fine",
    "2026-11-29T12:00:01.000Z ERROR   main moet_desk.x: broken",
    "Traceback: of the broken one",
    "2026-11-29T12:00:02.000Z INFO    main moet_desk.x: \x1b[31mfine again",
]


def stage_with(folder: Path, *, key: str = "", script: Script | None = None) -> Stage:
    stage = Stage(script)
    app = stage.app
    app.endpoint = EndpointScreen(stage.endpoint, Endpoint(port=1, key=key), UNICODE, plain=False)
    app.settings = SettingsScreen(folder / "config.toml", UNICODE, plain=False)
    (folder / "log").write_text("\n".join(RECORDS))
    app.log_screen = LogScreen(folder / "log", UNICODE, plain=False)
    return stage


@pytest.mark.asyncio
async def test_endpoint__address_calls_and_copies(tmp_path: Path) -> None:
    stage = stage_with(tmp_path, key="topsecret")
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("f5")
        await stage.threads(pilot)
        screen = dump(stage.app)
        for words in (
            "http://127.0.0.1:4321/v1",
            "this computer only",
            "✓ running",
            "opencode     chat, stream       8,112    412   18 s  30.8 ● writing",
            "curl         chat                   -      -              ✗ failed",
            "waited 2.1 s, 8,112 tokens to read, first word after 18 s",
            "curl http://127.0.0.1:4321/v1/chat/completions",
        ):
            assert words in screen
        assert "topsecret" not in screen
        await pilot.press("k")
        assert stage.app.clipboard == "topsecret"
        await pilot.press("a")
        assert stage.app.clipboard == "http://127.0.0.1:4321/v1"
        await pilot.press("tab", "down", "enter")
        assert stage.app.clipboard.startswith("from openai import OpenAI")
        await pilot.press("end", "c")
        assert stage.app.clipboard == "moet-desk launch qwen --run"


@pytest.mark.asyncio
async def test_endpoint__stop_a_call_then_everything_and_start_again(tmp_path: Path) -> None:
    stage = stage_with(tmp_path)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("f5")
        await stage.threads(pilot)
        await pilot.press("down", "x")
        assert stage.endpoint.asked == []  # that one had ended
        await pilot.press("up", "x")
        await stage.threads(pilot)
        assert stage.endpoint.asked == [3]
        assert "· stopped" in dump(stage.app)
        await pilot.press("s")
        await stage.threads(pilot)
        assert stage.endpoint.asked == [3, "stop"]
        assert "· off" in dump(stage.app)
        await pilot.press("s")
        await stage.threads(pilot)
        assert stage.endpoint.asked == [3, "stop", "start"]


@pytest.mark.asyncio
async def test_endpoint__new_calls__cursor_stays_on_its_own(tmp_path: Path) -> None:
    stage = stage_with(tmp_path)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("f5")
        await stage.threads(pilot)
        await pilot.press("down", "down")
        assert "gpt-4o" in dump(stage.app)
        newest = replace(CALLS[0], number=4, client="newcomer")
        stage.endpoint.now = replace(stage.endpoint.now, calls=(newest, *CALLS))
        stage.app.pull_gauges()
        await stage.settle(pilot)
        assert "newcomer" in dump(stage.app)
        assert stage.app.endpoint.call == CALLS[-1]
        failed = EndpointView(EndpointState.FAILED, error=fail("MD-API-01", port=7).to_dict())
        stage.endpoint.now = failed
        stage.app.pull_gauges()
        await stage.settle(pilot)
        assert "✗ not running" in dump(stage.app)
        assert "MD-API-01" in dump(stage.app)
        assert "S starts the endpoint" in dump(stage.app)


@pytest.mark.asyncio
async def test_settings__change_refuse_and_reset(tmp_path: Path) -> None:
    stage = stage_with(tmp_path)
    file = tmp_path / "config.toml"
    names = list(SETTINGS)
    async with stage.open(120, 60) as pilot:
        await stage.ready(pilot)
        await pilot.press("f6")
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert all(name in screen for name in names)
        rows = stage.app.settings.list
        rows.highlighted = names.index("ui.theme")
        await pilot.press("right")
        assert tomllib.loads(file.read_text())["ui"]["theme"] == "moet-light"
        rows.highlighted = names.index("memory.context")
        await pilot.press("enter", *["backspace"] * 8, "7", "enter")
        await stage.settle(pilot)
        assert "MD-CFG-03" in dump(stage.app)
        assert "memory" not in tomllib.loads(file.read_text())
        await pilot.press("0", "0", "enter")
        await stage.settle(pilot)
        assert tomllib.loads(file.read_text())["memory"]["context"] == 700
        assert "R reload" in dump(stage.app)
        await pilot.press("r")
        await stage.settle(pilot)
        assert "context" not in tomllib.loads(file.read_text()).get("memory", {})
        await pilot.press("escape")
        await stage.settle(pilot)
        assert stage.app.current_mode == "chat"


@pytest.mark.asyncio
async def test_settings__search_and_undo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_with(tmp_path)
    file = tmp_path / "config.toml"
    file.write_text('[ui]\ntheme = "moet-contrast"  # kept\n')
    monkeypatch.setenv("MOET_DESK_UI_MOTION", "none")
    async with stage.open(100, 30) as pilot:
        await stage.ready(pilot)
        await pilot.press("f6", "slash", *"them", "enter")
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert "ui.theme                   moet-contrast              file" in screen
        assert "Right Change" in screen
        assert "ui.motion" not in screen
        assert "memory.context" not in screen
        await pilot.press("right", "right")
        await stage.settle(pilot)
        assert tomllib.loads(file.read_text())["ui"]["theme"] != "moet-contrast"
        assert "U takes the last change back" in dump(stage.app)
        await pilot.press("u", "u", "u")  # the third has nothing to undo
        await stage.settle(pilot)
        assert file.read_text() == '[ui]\ntheme = "moet-contrast"  # kept\n'
        assert "U takes" not in dump(stage.app)
        assert stage.app.settings.setting == SETTINGS["ui.theme"]
        await pilot.press("slash", *"motoin", "enter")
        await stage.settle(pilot)
        assert 'No setting has "motoin"' in dump(stage.app)
        assert "Did you mean ui.motion?" in dump(stage.app)
        await pilot.press("right", "enter", "r")  # there is no row to act on
        await pilot.press("slash", *["backspace"] * 6, *"ui.motion", "enter", "right")
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert "Set by MOET_DESK_UI_MOTION, which overrides what is saved here." in screen
        assert "motion" in tomllib.loads(file.read_text())["ui"]
        await pilot.press("u")
        assert "motion" not in tomllib.loads(file.read_text())["ui"]


@pytest.mark.asyncio
async def test_log__level_words_pause_and_growth(tmp_path: Path) -> None:
    stage = stage_with(tmp_path)
    async with stage.open(120, 40) as pilot:
        await stage.ready(pilot)
        await pilot.press("f8")
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert "fine again" in screen
        assert "\x1b" not in screen
        await pilot.press("slash", *"traceback", "enter")
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert "broken   +1 lines" in screen
        assert "Traceback: of the broken one" in screen
        assert "fine" not in screen
        await pilot.press("enter")
        assert stage.app.clipboard == "\n".join(RECORDS[1:3])
        await pilot.press("slash", "escape", "l", "l")
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert "from error on" in screen
        assert "broken" in screen
        assert "fine" not in screen
        await pilot.press("space")
        (tmp_path / "log").write_text(RECORDS[1].replace("broken", "newer"))
        stage.app.pull_gauges()
        await stage.settle(pilot)
        assert "newer" not in dump(stage.app)
        await pilot.press("space")
        stage.app.pull_gauges()
        await stage.settle(pilot)
        assert "newer" in dump(stage.app)
        await pilot.press("c")
        assert stage.app.clipboard == RECORDS[1].replace("broken", "newer")


@pytest.mark.asyncio
async def test_log__cursor_at_the_end_follows__moved_up_it_stays(tmp_path: Path) -> None:
    stage = stage_with(tmp_path)
    log = stage.app.log_screen

    async def grow(text: str) -> None:
        with (tmp_path / "log").open("a") as file:
            file.write("\n" + RECORDS[0].replace("fine", text))
        stage.app.pull_gauges()
        await stage.settle(pilot)

    async with stage.open(120, 40) as pilot:
        await stage.ready(pilot)
        await pilot.press("f8")
        await stage.settle(pilot)
        await grow("first")
        assert log.record is not None
        assert log.record[0].endswith("first")
        await pilot.press("up", "up")
        await grow("second")
        assert log.record == tuple(RECORDS[1:3])
        assert "F follows" in dump(stage.app)
        await pilot.press("f")
        await stage.settle(pilot)
        assert log.record[0].endswith("second")
        await grow("third")
        assert log.record[0].endswith("third")


def test_at_level__lines_of_a_record_stay_with_it() -> None:
    assert at_level(RECORDS, "ERROR") == RECORDS[1:3]


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
@pytest.mark.parametrize(
    "look",
    [
        Look(motion="none", glyphs="ascii", colour=False),
        Look(motion="none", glyphs="unicode", theme="moet-light"),
    ],
)
async def test_every_screen__its_tab_and_title__at_every_size(
    look: Look, size: tuple[int, int]
) -> None:
    stage = Stage(look=look)
    async with stage.open(*size) as pilot:
        await stage.ready(pilot)
        for key, title in (("f5", "Endpoint for"), ("f6", "Settings   "), ("f8", "Log   ")):
            await pilot.press(key)
            await stage.settle(pilot)
            stage.app.pull_gauges()
            await stage.settle(pilot)
            screen = dump(stage.app)
            assert title in screen
            assert "F8 Log" in screen.splitlines()[0]
