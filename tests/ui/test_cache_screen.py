"""The Cache screen: figures, measures, pause, and that nothing is drawn while it is hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moet_desk.engine.handle import GateInfo, GateSource, PromptReading, Quality
from moet_desk.engine.replay import ReplayEngine
from moet_desk.engine.scripted import Script
from moet_desk.engine.trace_file import read_trace
from moet_desk.errors import fail
from moet_desk.telemetry import CacheView, DraftChoice, LoadStep
from moet_desk.ui.cache_cells import Measure
from moet_desk.ui.chat_records import Wishes
from moet_desk.ui.look import Look
from moet_desk.ui.playback import Tape
from moet_desk.ui.widgets.heatmap import Heatmap
from tests.ui.support import Stage, dump

pytestmark = pytest.mark.asyncio

LONG = "word " * 400
SHIPPED = Path(__file__).parents[2] / "assets" / "traces" / "demo.mdtrace"


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
    assert lines[2].startswith(" waiting 21 % of time")
    assert lines[3].startswith(" Where experts are, 8 layers")
    assert lines[3].endswith("idle  [Space]")
    assert [line[1:4] for line in lines[5:13]] == [f"L{i:02d}" for i in range(1, 9)]
    assert all(line.rstrip().endswith(tuple("0123456789")) for line in lines[5:13])
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
        assert "▇" in screen.splitlines()[6] + screen.splitlines()[7]
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
        assert before[3].endswith("paused, 12:00:00, engine still runs  [Space]")
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


class Played:
    """The Cache screen on the recording of the demo model, half a minute in."""

    def __init__(self, *, look: Look | None = None) -> None:
        trace = read_trace(SHIPPED)
        self.engine = ReplayEngine(trace, clock=lambda: 0.0)
        self.engine.seek(30.0)
        self.engine.advance()
        self.stage = Stage(open_engine=lambda: self.engine, look=look)

    async def cache(self, pilot: Any) -> None:
        await self.stage.ready(pilot)
        await pilot.press("f3")
        await self.draw(pilot)

    async def draw(self, pilot: Any) -> list[str]:
        self.stage.time.seconds += 1.0
        self.stage.app.pull_gauges()
        await pilot.pause()
        return dump(self.stage.app).splitlines()

    def view(self) -> CacheView:
        view = self.engine.snapshot().cache
        assert view is not None
        return view


async def test_measures__with_stories__four_in_turn_with_their_words() -> None:
    played = Played()
    async with played.stage.open() as pilot:
        await played.cache(pilot)
        for measure, words in (
            ("heat", "less ▁▁▂▂▃▃▄▄▅▅▆▆▇▇ more"),
            ("hits", "always fetched ▁▁"),
            ("age", "minutes ago ▁▁"),
            ("answered by", "██ Q"),
        ):
            await pilot.press("m")
            lines = await played.draw(pilot)
            legend = next(line for line in lines if "measure: " in line)
            assert legend.endswith(f"measure: {measure}")
            assert words in legend


async def test_story__of_the_expert_under_the_cursor() -> None:
    played = Played()
    async with played.stage.open() as pilot:
        await played.cache(pilot)
        await pilot.press("down", "right", "right")
        lines = await played.draw(pilot)
    at = next(i for i, line in enumerate(lines) if line.startswith(" Layer 2, expert 2:"))
    stories = played.view().stories
    assert stories is not None
    story = stories.of(32 + 2)
    assert lines[at + 1].startswith(f" Expert 2: used {story.uses:.0f}x, ")
    assert f"fetched {story.fetches}x from " in lines[at + 1]
    assert lines[at + 1].endswith(f"evicted {story.evictions}x")


async def test_views__grid_dense_layers_list__and_back() -> None:
    played = Played()
    async with played.stage.open() as pilot:
        await played.cache(pilot)
        await pilot.press("v")
        dense = await played.draw(pilot)
        assert sum("▀▀" in line for line in dense) == 4
        await pilot.press("v")
        layers = await played.draw(pilot)
        rows = [line for line in layers if " fetches " in line]
        assert len(rows) == 8
        counts = [int(rows[0].split(f" {letter} ")[1].split()[0]) for letter in "QGRN"]
        assert counts == [played.view().tiers[0].count(tier) for tier in (3, 2, 1, 0)]
        shares = [float(row.split("fetches")[1].split("%")[0]) for row in rows]
        assert sum(shares) == pytest.approx(100, abs=0.5)
        await pilot.press("v")
        listed = await played.draw(pilot)
        assert any("order: uses" in line for line in listed)
        first = listed.index(next(line for line in listed if "expert  where" in line)) + 1
        uses = [float(line.split("slot" if "slot" in line else "RAM")[-1].split()[1])
                for line in listed[first : first + 4] if "disk" not in line]  # fmt: skip
        assert uses == sorted(uses, reverse=True)
        await pilot.press("o", "o", "o")
        by_layer = await played.draw(pilot)
        assert any("order: layer" in line for line in by_layer)
        assert by_layer[first].split()[1:3] == ["1", "0"]
        await pilot.press("end")
        assert any(line.split()[1:3] == ["8", "31"] for line in await played.draw(pilot))
        await pilot.press("v")
        assert "hit %" in "\n".join(await played.draw(pilot))


async def test_views__no_colour__dense_is_not_offered() -> None:
    look = Look(motion="none", glyphs="ascii", colour=False)
    played = Played(look=look)
    async with played.stage.open() as pilot:
        await played.cache(pilot)
        for _ in range(3):
            await pilot.press("v")
            lines = await played.draw(pilot)
            assert not any("▀" in line for line in lines)
            assert all(line.isascii() or "–" in line or "…" in line for line in lines)
        assert "hit %" in "\n".join(lines)


class Taped:
    """A recording that only remembers where it was asked to go."""

    seconds, full, problem = 5.0, False, None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


async def test_record__r_begins_and_ends_it__the_status_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tapes: list[Taped] = []

    def record(_engine: object, path: Path) -> Taped:
        tapes.append(Taped(path))
        return tapes[-1]

    stage = Stage()
    stage.app._tape = Tape(record, stage.time.clock())
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("f3", "r")
        await stage.play(pilot, 0.5)
        assert "recording 0:05" in dump(stage.app)
        assert tapes[0].path == tmp_path / "moet-desk-20261129-120000.mdtrace"
        await pilot.press("r")
        await stage.play(pilot, 0.5)
        assert tapes[0].closed == 1
        assert "recording 0:05" not in dump(stage.app)
        await pilot.press("r")
        Taped.full = True
        await stage.play(pilot, 0.5)
        Taped.full = False
        assert (len(tapes), tapes[1].closed) == (2, 1)
        await pilot.press("r")
    assert tapes[2].closed == 1  # the window was closed


async def test_record__cannot_write__said_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(_engine: object, path: Path) -> Taped:
        raise fail("MD-TRACE-05", path=str(path), reason="No space left on device")

    stage = Stage()
    stage.app._tape = Tape(record, stage.time.clock())
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("f3", "r")
        await stage.settle(pilot)
        assert "MD-TRACE-05" in dump(stage.app)
        assert stage.app._tape.note == ""


async def test_cache__enter__tells_of_the_next_expert_in_the_cell() -> None:
    stage = Stage(Script(answers=(LONG,), n_experts=256, n_layers=4))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        await stage.play(pilot, 1.0)
        await pilot.press("f3")
        await stage.play(pilot, 0.5)
        heatmap = stage.app.cache.query_one(Heatmap)
        told = [heatmap._chosen]
        for _ in range(2):
            await pilot.press("enter")
            told.append(heatmap._chosen)
    assert len(set(told)) == 3
