"""Plain-text pictures of the screens, compared with the files in goldens/.

After a wanted change: MOET_DESK_UPDATE_GOLDENS=1 pytest tests/ui/test_goldens.py, then read it.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from moet_desk import __version__
from moet_desk.engine.parsers.answers import THINK, AnswerFormat
from moet_desk.engine.scripted import DEFAULT_ANSWER, Script, ScriptedFailure
from moet_desk.telemetry import LoadStep
from moet_desk.ui.app import MoetDeskApp
from moet_desk.ui.attachments import Attachment
from moet_desk.ui.desk import JobState
from moet_desk.ui.look import Look
from moet_desk.ui.setup_steps import Setup
from tests.ui.desk import PULLING
from tests.ui.support import FakePack, Stage, dump

GOLDENS = Path(__file__).parent / "goldens"
UPDATE = bool(os.environ.pop("MOET_DESK_UPDATE_GOLDENS", ""))  # the app knows no such variable

LOOKS = {
    "dark": Look(motion="none", glyphs="unicode"),
    "no-colour": Look(motion="none", glyphs="unicode", colour=False),
    "ascii": Look(motion="none", glyphs="ascii", colour=False),
}
SCRIPT = Script(
    answers=(DEFAULT_ANSWER,),
    load=(
        LoadStep("Read the pack index", seconds=0.3),
        LoadStep("Dense layers", total=16 * 2**20, seconds=1.0),
        LoadStep("Self-test", seconds=0.2),
    ),
    failures={
        1: ScriptedFailure("MD-ENG-04", {"reason": "A row was not readable", "model": "m"}, 9)
    },
    prompt_tok_per_s=50.0,
    prompt_chunk=4,
)
PACK = [{"event": "pack", "done": 144, "total": 288, "bytes": 16e6, "rate_bytes_per_s": 4e6}] * 3


class Shown(Protocol):
    """Whatever holds the app of a test."""

    @property
    def app(self) -> MoetDeskApp: ...


async def come_to_rest(stage: Shown, pilot: Any) -> None:
    """Wait until two looks in a row are the same."""
    before, now = "", dump(stage.app)
    while before != now:
        await pilot.pause()
        before, now = now, dump(stage.app)


class Album:
    """Compares dumps with the stored ones, or stores them."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.wrong: list[str] = []

    async def show(self, name: str, stage: Shown, pilot: Any) -> None:
        path = GOLDENS / f"{name}-{self._kind}.txt"
        await come_to_rest(stage, pilot)
        text = dump(stage.app).replace(__version__, "9.9.9")
        if UPDATE:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
        else:
            stored = path.read_text("utf-8") if path.exists() else ""
            diff = difflib.unified_diff(
                stored.splitlines(), text.splitlines(), path.name, "now", n=0, lineterm=""
            )
            self.wrong += diff


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("look", "columns", "rows"),
    [("dark", 80, 24), ("dark", 120, 40), ("no-colour", 80, 24), ("no-colour", 120, 40),
     ("ascii", 80, 24)],
)  # fmt: skip
async def test_goldens__start_chat_and_cache__as_stored(look: str, columns: int, rows: int) -> None:
    stage = Stage(SCRIPT, look=LOOKS[look], pack_job=FakePack([dict(event) for event in PACK]))
    album = Album(f"{columns}x{rows}-{look}")
    async with stage.open(columns, rows) as pilot:
        await take_pictures(stage, pilot, album)
    assert not album.wrong, "\n" + "\n".join(album.wrong)


async def take_pictures(stage: Stage, pilot: Any, album: Album) -> None:
    stage.app.pull_gauges()
    await stage.settle(pilot)
    await album.show("start-packing", stage, pilot)
    await stage.ready(pilot)
    await album.show("chat-empty", stage, pilot)
    await stage.ask(pilot, "Why does a mixture-of-experts layer need load balancing?")
    await stage.play(pilot, 0.25, step_s=0.25)
    await album.show("chat-reading", stage, pilot)
    await stage.play(pilot, 1.5)
    await stage.ask(pilot, "And then?")
    await album.show("chat-writing", stage, pilot)
    await pilot.press("f3")
    await come_to_rest(stage, pilot)
    await stage.play(pilot, 2.0)
    await album.show("cache-tiers", stage, pilot)
    await pilot.press("m", "down", "right")
    await come_to_rest(stage, pilot)
    await album.show("cache-heat", stage, pilot)
    await pilot.press("f2")
    await come_to_rest(stage, pilot)
    await stage.play(pilot, 3.0)
    await album.show("chat-problem", stage, pilot)
    await pilot.press("f1")
    await come_to_rest(stage, pilot)
    await album.show("help", stage, pilot)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_goldens__every_screen_in_a_large_window_in_light__as_stored() -> None:
    look = replace(LOOKS["dark"], theme="moet-light")
    stage = Stage(Script(answers=(DEFAULT_ANSWER,)), look=look)
    album = Album("200x60-light")
    async with stage.open(200, 60) as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "Why does a mixture-of-experts layer need load balancing?")
        await stage.play(pilot, 3.0)
        await album.show("chat", stage, pilot)
        screens = {
            "cache": ["f3"], "models": ["f4"], "endpoint": ["f5"],
            "settings": ["f6", "slash", *"ui", "full_stop"],  # other groups gain settings often
            "doctor": ["f7"], "log": ["f8"], "help": ["f1"],
        }  # fmt: skip
        for name, keys in screens.items():
            await pilot.press(*keys)
            if name in ("models", "doctor"):
                await stage.threads(pilot)
            await album.show(name, stage, pilot)
    assert not album.wrong, "\n" + "\n".join(album.wrong)


TALK = Script(
    answers=(
        "<think>\nThe reader wants it short.\n</think>\n\n" + DEFAULT_ANSWER,
        "Another version:\n\n- sort once\n- keep a *table* of the names\n",
    ),
    format=AnswerFormat(think=THINK),
)


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(("look", "columns", "rows"), [("dark", 200, 60), ("ascii", 80, 24)])
async def test_goldens__messages_of_a_chat__as_stored(look: str, columns: int, rows: int) -> None:
    stage = Stage(TALK, look=LOOKS[look])
    album = Album(f"{columns}x{rows}-{look}")
    async with stage.open(columns, rows) as pilot:

        async def show(name: str, *keys: str) -> None:
            await pilot.press(*keys)
            await come_to_rest(stage, pilot)
            stage.app.chat.pace.reset()  # a busy computer is no part of the picture
            stage.time.seconds += 1.0
            await stage.app.pull_text()
            stage.app.pull_gauges()
            await album.show(name, stage, pilot)

        await stage.ready(pilot)
        stage.app.chat.chips.add(Attachment("notes.md", "word " * 80, 104))
        await stage.ask(pilot, "\n".join(f"Line {i} of a long message" for i in range(20)))
        await stage.play(pilot, 4.0)
        await show("chat-thought", "ctrl+t", "alt+up")
        await pilot.press("r")
        await stage.play(pilot, 3.0)
        await show("chat-version", "k", "e")
        await show("chat-find", "escape", "ctrl+f", "t", "a", "b")
        await show("chat-options", "escape", "ctrl+s")
    assert not album.wrong, "\n" + "\n".join(album.wrong)


def test_goldens__ascii__nothing_but_ascii_in_the_frame() -> None:
    for path in GOLDENS.glob("*-ascii.txt"):
        drawn = set(path.read_text("utf-8")) - set("╭╮╰╯─│▁▂▃▄▅▆▇█▌▏–…")
        assert all(char.isascii() for char in drawn), (path.name, sorted(drawn))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("look", "columns", "rows"),
    [("dark", 80, 24), ("dark", 120, 40), ("no-colour", 80, 24), ("ascii", 80, 24)],
)
async def test_goldens__set_up_models_and_doctor__as_stored(
    look: str, columns: int, rows: int
) -> None:
    stage = Stage(SCRIPT, look=LOOKS[look], setup=Setup())
    album = Album(f"{columns}x{rows}-{look}")
    async with stage.open(columns, rows) as pilot:

        async def show(name: str, *keys: str) -> None:
            await pilot.press(*keys)
            await stage.threads(pilot)
            await album.show(name, stage, pilot)

        await show("setup-machine")
        await show("setup-model", "enter")
        await show("setup-plan", "up", "enter")
        await show("setup-question", "enter")
        await pilot.press("right", "enter")
        await stage.threads(pilot)
        stage.desk.running = (PULLING, replace(PULLING, id="job-2", state=JobState.PAUSED))
        await show("setup-get")
        await show("models", "f4")
        await show("doctor", "f7")
    assert not album.wrong, "\n" + "\n".join(album.wrong)
