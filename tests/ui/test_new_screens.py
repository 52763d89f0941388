from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from moet_desk.errors import fail
from moet_desk.settings import SETTINGS, Endpoint
from moet_desk.telemetry import EndpointState, EndpointView
from moet_desk.ui.app import Look
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


def stage_with(folder: Path, *, key: str = "") -> Stage:
    stage = Stage()
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
async def test_log__level_pause_and_growth(tmp_path: Path) -> None:
    stage = stage_with(tmp_path)
    async with stage.open(120, 40) as pilot:
        await stage.ready(pilot)
        await pilot.press("f8")
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert "fine again" in screen
        assert "\x1b" not in screen
        await pilot.press("l", "l")
        await stage.settle(pilot)
        screen = dump(stage.app)
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
