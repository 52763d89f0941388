"""The Cache screen: figures, measures, pause, and that nothing is drawn while it is hidden."""

from __future__ import annotations

import pytest

from moet_desk.engine.handle import GateInfo, GateSource, PromptReading, Quality
from moet_desk.engine.scripted import Script
from moet_desk.telemetry import DraftChoice, LoadStep
from moet_desk.ui.chat_records import Wishes
from moet_desk.ui.widgets.heatmap import Heatmap, Measure
from tests.ui.support import Stage, dump

pytestmark = pytest.mark.asyncio

LONG = "word " * 400


async def test_cache__after_an_answer__grid_tiers_and_waiting() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("f3")
        await stage.play(pilot, 0.5)
        assert "Ask something and this fills in." in dump(stage.app)
        await stage.app.chat.ask("q")
        await stage.play(pilot, 3.0)
        lines = dump(stage.app).splitlines()
    assert lines[2].startswith(" Where experts are, 8 layers")
    assert lines[2].endswith("idle  [Space]")
    assert [line[1:4] for line in lines[4:12]] == [f"L{i:02d}" for i in range(1, 9)]
    assert all(line.rstrip().endswith(tuple("0123456789")) for line in lines[4:12])
    assert any(line.startswith(" waiting 21 % of time") for line in lines)
    assert [line[1] for line in lines if " answers " in line] == ["G", "Q", "R", "N"]


CALIBRATED = GateInfo(0.26, GateSource.PACK, date="2026-11-29", budget=0.15, caught=0.508)


@pytest.mark.parametrize(
    ("prompts", "quality", "said"),
    [
        (PromptReading.FP4, Quality.FAST, "prompts: FP4 "),
        (PromptReading.NO_ROOM, Quality.BALANCED, "prompts: 2 bits (FP4 rows do not fit RAM) "),
        (PromptReading.CPU, Quality.FAST, "prompts: 2 bits (always so on the CPU) "),
        (PromptReading.NO_ROOM, Quality.EXACT, "prompts: FP4 "),
    ],
)
async def test_precision__prompts_and_gate__said_with_the_reason(
    prompts: PromptReading, quality: Quality, said: str
) -> None:
    stage = Stage(Script(prompts=prompts, gate=CALIBRATED), wishes=Wishes(quality=quality))
    async with stage.open(120, 40) as pilot:
        await stage.ready(pilot)
        await pilot.press("f3")
        await stage.play(pilot, 0.5)
        wide = dump(stage.app)
        await pilot.resize_terminal(80, 24)
        await stage.play(pilot, 0.5)
        narrow = dump(stage.app)
    assert f" {said}" in wide
    assert f" {said}" in narrow
    assert "again below 0.26 (calibrated 2026-11-29: catches 51 %" in wide
    assert "balanced: again below 0.26 (pack)" in narrow


async def test_measure__m_toggles__legend_and_glyphs_follow() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        await stage.play(pilot, 3.0)
        await pilot.press("f3")
        await stage.play(pilot, 0.5)
        assert "measure: answered by" in dump(stage.app)
        await pilot.press("m")
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert "measure: heat" in screen
        assert "▇" in screen.splitlines()[5] + screen.splitlines()[6]
        await pilot.press("m")
        await stage.settle(pilot)
        assert stage.app.cache.query_one(Heatmap).measure is Measure.TIER


async def test_pause__space__picture_held_while_the_engine_runs() -> None:
    stage = Stage(Script(answers=(LONG,)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        await pilot.press("f3")
        await stage.play(pilot, 1.0)
        await pilot.press("space")
        await stage.settle(pilot)
        before = dump(stage.app).splitlines()
        assert before[2].endswith("paused, 12:00:00, engine still runs  [Space]")
        await stage.play(pilot, 2.0)
        after = dump(stage.app).splitlines()
        assert after[:20] == before[:20]
        assert after[-2] != before[-2]  # the status line goes on
        await pilot.press("space")
        await stage.play(pilot, 0.5)
        assert dump(stage.app).splitlines()[:20] != before[:20]


async def test_cursor__keys__show_one_expert() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("f3")
        await stage.play(pilot, 0.5)
        await pilot.press("down", "right", "right")
        await stage.settle(pilot)
        assert "Layer 2, expert 2:" in dump(stage.app)


async def test_resident_model__sentence_and_heat() -> None:
    stage = Stage(Script(pool_share=1.0, n_layers=2, n_experts=8, top_k=4, answers=(LONG,)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        await pilot.press("f3")
        await stage.play(pilot, 10.0, step_s=2.0)
        screen = dump(stage.app)
    assert "All 16 experts are in 2-bit slots. Fast fetches nothing." in screen
    assert "measure: heat" in screen


async def test_no_model__explanation_instead_of_a_grid() -> None:
    stage = Stage(Script(load=(LoadStep("wait", seconds=1e9),)))
    async with stage.open() as pilot:
        await stage.settle(pilot)
        await pilot.press("f3")
        await stage.settle(pilot)
        stage.app.pull_gauges()
        await stage.settle(pilot)
        screen = dump(stage.app)
        assert not stage.app.cache.query_one(Heatmap).display
    assert "No model is loaded yet" in screen
    assert "never its words." in screen


async def test_hidden__chat_in_front__grid_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(Script(answers=(LONG,)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("f3")
        await stage.play(pilot, 0.5)
        await pilot.press("f2")
        await stage.settle(pilot)
        shown: list[object] = []
        monkeypatch.setattr(stage.app.cache, "show", lambda *a, **k: shown.append(a))
        await stage.app.chat.ask("q")
        await stage.play(pilot, 1.0)
        assert shown == []


async def test_big_model__43_layers_256_experts__grouped_and_scrolled() -> None:
    stage = Stage(Script(n_layers=43, n_experts=256, top_k=6))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        await pilot.press("f3")
        await stage.play(pilot, 0.5)
        screen = dump(stage.app)
        assert "4 experts per cell, 43 layers" in screen
        assert "L01" in screen
        assert "L43" not in screen
        await pilot.press("end")
        await stage.settle(pilot)
        screen = dump(stage.app)
    assert "L43" in screen
    assert "Layer 43, experts 0-3:" in screen


async def test_guesses__made__tokens_of_a_step_and_who_guesses() -> None:
    choice = DraftChoice("auto", "mtp", 2, gain=1.42, acceptance=(0.7, 0.5))
    stage = Stage(Script(drafts=choice, tokens_per_step=1.92))
    async with stage.open(130, 40) as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        await stage.play(pilot, 3.0)
        chat = dump(stage.app).splitlines()
        await pilot.press("f3")
        await stage.play(pilot, 0.5)
        cache = dump(stage.app).splitlines()
    assert any("tok/s, 1.9 a step" in line for line in chat)
    assert any("ms/step, 1.92 tok (mtp 2, x1.42)" in line for line in cache)
    assert any("guesses    mtp 2, x1.42" in line for line in chat)
