from __future__ import annotations

import pytest

from moet_desk.engine.scripted import Script
from moet_desk.errors import CATALOGUE, fail
from moet_desk.ui.widgets.problem import ProblemPanel
from moet_desk.ui.widgets.transcript import Transcript
from tests.ui.support import Stage, dump


@pytest.mark.asyncio
async def test_panels__every_code_of_the_catalogue__title_code_and_next_step_at_80x24() -> None:
    stage = Stage(Script())
    async with stage.open(80, 24) as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 1.0)
        transcript = stage.app.chat.query_one(Transcript)
        for code in CATALOGUE:
            error = fail(code)
            await transcript.remove_children()
            panel = ProblemPanel(error, glyphs=stage.app.glyphs, actions={"retry": "Try again"})
            await transcript.mount(panel)
            await stage.settle(pilot)
            screen = dump(stage.app)
            assert code in screen, code
            assert f"{stage.app.glyphs.bad} {error.title[:40]}" in screen, code
            assert "Do: " in screen or not error.do, code
            assert "[ Try again ]" in screen, code
