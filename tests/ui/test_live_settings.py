"""Settings that count at once, changed on their screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet_desk import config
from moet_desk.engine.scripted import Script
from moet_desk.telemetry import VramView
from moet_desk.ui.screens.settings import SettingsScreen
from moet_desk.ui.theme import UNICODE
from moet_desk.units import GIB
from tests.ui.support import Stage, dump


@pytest.mark.asyncio
async def test_settings__saved__theme_reruns_and_answers_follow(tmp_path: Path) -> None:
    stage = Stage()
    app, file = stage.app, tmp_path / "config.toml"
    app.settings = SettingsScreen(file, UNICODE, plain=False)
    app._config_file = file
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("f6")
        await stage.settle(pilot)
        assert (app.theme, app.animation_level) == ("moet-dark", "none")
        for name, value in (
            ("ui.theme", "moet-light"), ("ui.motion", "full"), ("answers.temperature", "0.5"),
            ("ui.mark_reruns", "true"),
        ):  # fmt: skip
            config.save_setting(file, name, value)
            app.settings.post_message(SettingsScreen.Saved(name))
        await stage.settle(pilot)
        assert app.theme == "moet-light"
        assert app.animation_level == "full"
        assert app.chat._marks_reruns
        assert app.conversation.wishes.temperature == 0.5
        app.settings.fill()
        app.settings.list.highlighted = theme_row()
        await pilot.press("right")
        await stage.settle(pilot)
        assert app.theme == "moet-contrast"


@pytest.mark.asyncio
async def test_settings__limit_of_the_cards_memory__reaches_the_engine_at_once(
    tmp_path: Path,
) -> None:
    stage = Stage(Script(vram=VramView(slots=3, planned=5, why="other programs")))
    app, file = stage.app, tmp_path / "config.toml"
    app.settings = SettingsScreen(file, UNICODE, plain=False)
    app._config_file = file
    async with stage.open(100, 30) as pilot:
        await stage.ready(pilot)
        await pilot.press("f6")
        await stage.settle(pilot)
        for value, limit in (("8GiB", 8 * GIB), ("auto", None)):
            config.save_setting(file, "memory.vram_limit", value)
            app.settings.post_message(SettingsScreen.Saved("ui.theme"))
            await stage.settle(pilot)
            app.settings.post_message(SettingsScreen.Saved("memory.vram_limit"))
            await stage.play(pilot, 0.3)
            vram = stage.engine.snapshot().vram
            assert vram is not None
            assert vram.limit == limit
        await pilot.press("f3")
        await stage.play(pilot, 0.5)
        assert "Slots: 3 B, planned 5 B: other programs" in dump(app)


def theme_row() -> int:
    from moet_desk.settings import SETTINGS

    return list(SETTINGS).index("ui.theme")
