"""Costs: a flush must not grow with the answer, and the first picture must come soon."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

import pytest
from textual.color import Color
from textual.css.stylesheet import Stylesheet
from textual.widgets._footer import FooterKey

from bench.long_chat import measure
from moet_desk.engine.scripted import DEFAULT_ANSWER
from moet_desk.marked_text import MarkedText
from moet_desk.ui.look import Look
from moet_desk.ui.widgets.blocks import AnswerBlock
from moet_desk.ui.widgets.key_line import KeyLine
from moet_desk.ui.widgets.transcript import Transcript
from tests.ui.support import Stage


@pytest.mark.asyncio
@pytest.mark.parametrize("marked", [False, True], ids=["plain", "underlined"])
async def test_flush__long_answer__cost_and_widgets_stay_flat(marked: bool) -> None:
    """Later flushes cost about what earlier ones do, because far segments hold no widgets."""
    stage = Stage(look=Look(motion="none", glyphs="unicode", marks_reruns=marked))
    text = DEFAULT_ANSWER * 18  # 6,300 characters, about 270 widgets if all were kept
    costs: list[float] = []
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        block = stage.app.chat.query_one(AnswerBlock)
        transcript = stage.app.chat.query_one(Transcript)
        for start in range(0, len(text), 150):
            before = time.process_time()
            await block.append(MarkedText.whole(text[start : start + 150], marked=marked))
            await pilot.pause()
            costs.append(time.process_time() - before)
            await transcript.settle()
        n_widgets = len(block.query("*"))
    third = len(costs) // 3
    assert median(costs[-third:]) < 1.7 * median(costs[third : 2 * third])
    assert n_widgets < 200


@pytest.mark.slow
@pytest.mark.asyncio
async def test_long_chat__ten_thousand_messages__opening_scrolling_and_typing_stay_quick() -> None:
    """Seconds of CPU; about a fifth of these are measured (bench/records), more on a busy computer.

    Drawing all messages would take minutes.
    """
    costs = await measure(10_000, repeats=4)
    assert costs["widgets"] < 250
    assert costs["open_s"] < 2.0
    assert costs["page_s"]["median"] < 0.8
    assert costs["to_first_s"] < 2.0
    assert costs["to_end_s"] < 1.5
    assert costs["key_s"]["median"] < 0.15
    assert costs["find_s"] < 0.8


FIRST_PICTURE = """
import asyncio, time
start = time.process_time()
from tests.ui.support import Stage, dump
async def main():
    stage = Stage()
    async with stage.open() as pilot:
        stage.app.pull_gauges()
        await pilot.pause()
        assert "F2 Chat" in dump(stage.app)
        print(time.process_time() - start)
asyncio.run(main())
"""


def test_first_picture__fresh_interpreter__within_a_second_and_a_half_of_cpu() -> None:
    out = subprocess.run(
        [sys.executable, "-c", FIRST_PICTURE], capture_output=True, text=True, check=True
    )
    assert float(out.stdout) < 1.5


@pytest.mark.asyncio
async def test_screens__each_seen_for_the_first_time__the_style_sheet_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        read = 0
        reparse = Stylesheet.reparse

        def counted(sheet: Stylesheet) -> None:
            nonlocal read
            read += 1
            reparse(sheet)

        monkeypatch.setattr(Stylesheet, "reparse", counted)
        for key in ("f3", "f4", "f5", "f6", "f7", "f8"):
            await pilot.press(key)
        await stage.settle(pilot)
        assert stage.app.current_mode == "log"
        assert read == 0
        stage.app.theme = "moet-light"
        await stage.settle(pilot)
        assert read == 1
        await pilot.press("f4")
        await stage.settle(pilot)
        assert read == 2  # drawn before the theme was changed
        background = stage.app.screen.styles.background
        assert background == Color.parse(stage.app.current_theme.background or "")


@pytest.mark.asyncio
async def test_key_line__same_keys__stays_as_it_is_and_follows_the_focus() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("f4")
        await stage.settle(pilot)
        line = stage.app.screen.query_one(KeyLine)
        keys = list(line.children)
        assert keys
        await pilot.press("down", "up")
        await stage.settle(pilot)
        assert list(line.children) == keys
        await pilot.press("slash")
        await stage.settle(pilot)
        await stage.settle(pilot)
        assert list(line.children) != keys
        words = [key.description for key in line.query(FooterKey)]
        assert words == [key.words for key in line._wanted()]
        await pilot.click(line.query(FooterKey).last())
        await stage.settle(pilot)
        assert len(stage.app.screen_stack) == 2  # the help
