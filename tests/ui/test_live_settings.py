"""Settings that count at once, changed on their screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet_desk import config
from moet_desk.ui.screens.settings import SettingsScreen
from moet_desk.ui.theme import UNICODE
from tests.ui.support import Stage


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


def theme_row() -> int:
    from moet_desk.settings import SETTINGS

    return list(SETTINGS).index("ui.theme")
