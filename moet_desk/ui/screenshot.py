"""Pictures of the app from a running engine: SVG files of all screens, for the README.

It drives the app without a terminal, the way a person would: asks, waits, looks. Called from a
command; runs its own event loop.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from textual.pilot import Pilot

from moet_desk.engine.handle import EngineHandle
from moet_desk.store.chats import ChatStore
from moet_desk.ui.app import MoetDeskApp
from moet_desk.ui.bridge import Phase
from moet_desk.ui.chat_records import ChatStoreLike
from moet_desk.ui.desk import Desk
from moet_desk.ui.look import Look

SIZES = ((80, 24), (120, 40))
MODES = ("chat", "cache", "models", "endpoint", "settings", "doctor", "log", "setup")
QUESTION = "Tell me a short story about a fox."
_STARTED = (Phase.READY, Phase.FAILED)
_START_S = 120.0
_ANSWER_S = 240.0  # on a computer that is busy with other things
_SEARCH_S = 60.0


def save_screenshots(
    out_dir: Path,
    handle: EngineHandle,
    desk: Desk,
    *,
    chats: ChatStoreLike | None = None,
    questions: Sequence[str] = (QUESTION,),
    theme: str = "moet-dark",
) -> list[Path]:
    """Ask the questions and write chat-80x24.svg, models-80x24.svg and so on, one per screen.

    Without `chats` the chat goes into a store that is thrown away. Engine and store are closed at
    the end, as when the app is closed.

    Raises:
        TimeoutError: the model did not load or answer in time.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        store = chats or ChatStore.open(Path(folder) / "chats.sqlite3")
        return asyncio.run(
            _take(out_dir, handle, desk, chats=store, questions=questions, theme=theme)
        )


async def _take(
    out_dir: Path,
    handle: EngineHandle,
    desk: Desk,
    *,
    chats: ChatStoreLike,
    questions: Sequence[str],
    theme: str,
) -> list[Path]:
    look = Look(theme=theme, glyphs="unicode", motion="none")
    app = MoetDeskApp(lambda: handle, chats, desk, look=look, model="demo")
    saved: list[Path] = []
    async with app.run_test(size=SIZES[-1]) as pilot:
        await _until(pilot, lambda: app.bridge.phase in _STARTED, _START_S)
        for question in questions:
            await app.chat.ask(question)
            await _until(pilot, lambda: not app.conversation.busy, _ANSWER_S)
        for columns, rows in SIZES:
            await pilot.resize_terminal(columns, rows)
            for mode in MODES:
                await app.action_go(mode)
                await asyncio.sleep(0.6)  # two gauge periods, and the switch's own delay
                await _until(pilot, lambda: not app.searching, _SEARCH_S)
                await pilot.pause(0.6)
                path = out_dir / f"{mode}-{columns}x{rows}.svg"
                path.write_text(app.export_screenshot(title="moet-desk"), "utf-8")
                saved.append(path)
        app.stop_pulling()
    return saved


async def _until(pilot: Pilot[int], reached: Callable[[], bool], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not reached():
            await pilot.pause(0.05)
