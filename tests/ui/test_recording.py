"""The app on a recording: it says so everywhere, plays, stops, goes back, and answers nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moet_desk.engine.replay import ReplayEngine
from moet_desk.engine.trace_file import TraceWriter, read_trace
from moet_desk.telemetry import EngineState
from moet_desk.ui.app import MoetDeskApp
from moet_desk.ui.look import Look
from moet_desk.ui.playback import show_place
from moet_desk.ui.screens.cache import CacheScreen
from moet_desk.ui.screens.chat import ChatScreen
from tests.engine.test_trace_file import header, write
from tests.ui.desk import FakeDesk
from tests.ui.support import FakeChats, HeldClock, dump
from tests.ui.test_goldens import Album

SHIPPED = Path(__file__).parents[2] / "assets" / "traces" / "demo.mdtrace"


class Show:
    """An app that plays a file, with time in the hands of the test."""

    def __init__(self, path: Path, look: str = "unicode") -> None:
        self.time = HeldClock()
        self.player = ReplayEngine(read_trace(path), clock=lambda: self.time.seconds)
        self.chats = FakeChats()
        self.app = MoetDeskApp(
            lambda: self.player, self.chats, FakeDesk(lambda: self.player), model="demo",
            look=Look(motion="none", glyphs=look, colour=look != "ascii"),
            clock=self.time.clock(), timers=False, playback=self.player,
        )  # fmt: skip

    def open(self, columns: int = 80, rows: int = 24) -> Any:
        return self.app.run_test(size=(columns, rows), notifications=True)

    async def play(self, pilot: Any, seconds: float) -> None:
        for _ in range(max(1, round(seconds * 4))):
            self.time.seconds += 0.25 if seconds else 0.0
            await self.app.pull_text()
            self.app.pull_gauges()
            await asyncio.sleep(0.002)
        await pilot.pause()

    async def start(self, pilot: Any) -> None:
        """Open the engine and, still at the beginning, take the first pictures."""
        self.player.pause(True)
        for _ in range(6):
            await self.play(pilot, 0.0)
        self.player.pause(False)

    @property
    def head(self) -> str:
        return dump(self.app).splitlines()[1]


@pytest.mark.asyncio
async def test_shipped_recording__played_through__the_chat_of_then() -> None:
    show = Show(SHIPPED)
    async with show.open(120, 40) as pilot:
        await show.start(pilot)
        assert isinstance(show.app.screen, ChatScreen)
        show.app.action_playback("faster")
        await show.play(pilot, 4.0)
        text = dump(show.app)
        assert "Recording: demo, 20" in show.head
        assert "No model is running here." in show.head
        assert "2x" in show.head
        asked = next(word.text for word in read_trace(SHIPPED).words)
        assert asked in text
        assert "writing" in text
        await pilot.press("f3")
        await show.play(pilot, 0.25)
        assert isinstance(show.app.screen, CacheScreen)
        assert "Recording: demo" in show.head
        assert "waiting " in dump(show.app)
        for _ in range(12):  # every recorded answer ends in order
            show.player.seek(show.player.position_s + 20)
            await show.play(pilot, 0.5)
        (chat,) = show.chats.chats.values()
        said = [m for m in chat.messages if m.role == "assistant"]
        assert len(said) == sum(type(w).__name__ == "Asked" for w in read_trace(SHIPPED).words)
        assert {m.status for m in said} == {"done"}
        assert all(m.content for m in said)
        assert " end " in show.head


def words_file(tmp_path: Path) -> Path:
    write(tmp_path / "a.mdtrace")  # two seconds; asked at 0.1, said at 1.1, ended at 1.2
    return tmp_path / "a.mdtrace"


@pytest.mark.asyncio
async def test_keys__pause_back_and_speed__from_every_screen(tmp_path: Path) -> None:
    show = Show(words_file(tmp_path))
    async with show.open() as pilot:
        await show.start(pilot)
        await show.play(pilot, 1.5)
        assert "So." in dump(show.app)
        assert "plays 0:01/0:02 1x" in show.head
        await pilot.press("f12")
        assert show.player.paused
        assert "paused 0:01/0:02 1x" in show.head
        await pilot.press("f3")
        await show.play(pilot, 0.25)
        await pilot.press("comma", "plus")
        await show.play(pilot, 0.25)
        assert "paused 0:00/0:02 2x" in show.head
        await pilot.press("space", "minus", "minus")
        assert not show.player.paused
        assert "0.5x" in show.head
        await pilot.press("full_stop")
        await show.play(pilot, 0.5)
        assert " end 0:02/0:02" in show.head
        await pilot.press("f12")
        await show.play(pilot, 0.0)
        assert "plays 0:00/0:02" in show.head


@pytest.mark.asyncio
async def test_going_back__chat_begins_anew_and_history_is_empty(tmp_path: Path) -> None:
    show = Show(words_file(tmp_path))
    async with show.open() as pilot:
        await show.start(pilot)
        await show.play(pilot, 1.75)
        assert [turn.text for turn in show.app.conversation.turns] == ["Why?", "So."]
        assert len(show.app._history.tok_per_s) > 1
        show.app.action_playback("begin")
        await show.play(pilot, 0.0)
        assert show.app.conversation.turns == []
        assert len(show.app._history.tok_per_s) <= 1
        await show.play(pilot, 0.25)
        assert [turn.text for turn in show.app.conversation.turns] == ["Why?", ""]


@pytest.mark.asyncio
async def test_own_question__refused_with_the_reason(tmp_path: Path) -> None:
    show = Show(words_file(tmp_path))
    async with show.open() as pilot:
        await show.start(pilot)
        await show.play(pilot, 1.75)
        await show.app.chat.ask("And you?")
        await pilot.pause()
        assert "MD-TRACE-04" in dump(show.app)


@pytest.mark.asyncio
async def test_recording_without_words__opens_on_the_cache(tmp_path: Path) -> None:
    trace = read_trace(words_file(tmp_path))
    engine = ReplayEngine(trace, clock=lambda: 0.0)
    writer = TraceWriter(tmp_path / "b.mdtrace", header())
    writer.add(0.0, engine.snapshot())
    writer.close()
    show = Show(tmp_path / "b.mdtrace", "ascii")
    async with show.open() as pilot:
        await show.start(pilot)
        assert isinstance(show.app.screen, CacheScreen)
        assert show.head.isascii()
        assert "Recording: m, 2026-11-30" in show.head
        await pilot.press("f2")
        await show.play(pilot, 0.25)
        assert "A recording of m" in dump(show.app)
        assert "is ready" not in dump(show.app)


@pytest.mark.asyncio
async def test_real_model_loaded__no_recording_any_more(tmp_path: Path) -> None:
    show = Show(words_file(tmp_path))
    async with show.open() as pilot:
        await show.start(pilot)
        assert "Recording" in show.head
        show.app.load_model("other")
        await show.play(pilot, 0.25)
        assert "Recording" not in dump(show.app)
        assert show.app.check_action("playback", ("toggle",)) is False


def test_show_place__minutes_and_seconds() -> None:
    assert [show_place(s) for s in (0.0, 9.99, 61.0, 600.5)] == ["0:00", "0:09", "1:01", "10:00"]


def test_shipped_recording__small_and_without_names() -> None:
    trace = read_trace(SHIPPED)
    assert SHIPPED.stat().st_size < 300_000
    assert trace.header.exact
    assert trace.header.machine["os"] == "Linux"
    assert set(trace.header.machine) == {"gpu", "driver", "os", "cpu", "cores", "ram_gib"}
    assert {frame.snapshot.state for frame in trace.frames} >= {
        EngineState.WRITING, EngineState.READY
    }  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("look", ["unicode", "ascii"])
async def test_goldens__a_recording__as_stored(tmp_path: Path, look: str) -> None:
    show = Show(words_file(tmp_path), look)
    album = Album(f"80x24-{look.replace('unicode', 'dark')}")
    async with show.open() as pilot:
        await show.start(pilot)
        await show.play(pilot, 1.0)
        show.player.pause(True)
        await pilot.press("f3", "down", "right")
        show.time.seconds += 5.0
        await show.play(pilot, 0.0)
        await album.show("recording-cache", show, pilot)
        for name in ("layers", "list"):
            await pilot.press("v", *(["v"] if name == "layers" and look == "unicode" else []))
            await show.play(pilot, 0.0)
            await album.show(f"recording-{name}", show, pilot)
    assert not album.wrong, "\n" + "\n".join(album.wrong)
