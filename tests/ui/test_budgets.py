"""Costs: a flush must not grow with the answer, and the first picture must come soon."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

import pytest

from bench.long_chat import measure
from moet_desk.engine.scripted import DEFAULT_ANSWER
from moet_desk.marked_text import MarkedText
from moet_desk.ui.look import Look
from moet_desk.ui.widgets.blocks import AnswerBlock
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
