"""What the UI tests share: held clocks, a chat store in memory, the app on a script, dumps."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console
from textual.app import App
from textual.screen import Screen

from moet_desk.engine.handle import EngineHandle
from moet_desk.engine.scripted import Script, ScriptedEngine
from moet_desk.errors import MoetError
from moet_desk.ui.app import MoetDeskApp
from moet_desk.ui.bridge import PackJob, Phase
from moet_desk.ui.chat_records import ChatStoreLike, Wishes
from moet_desk.ui.clock import Clock
from moet_desk.ui.look import Look
from moet_desk.ui.setup_steps import Setup
from tests.ui.desk import FakeDesk, FakeEndpoint

NOON = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


@dataclass
class HeldClock:
    """Time that moves only when told; the engine's moves with it."""

    seconds: float = 100.0

    def clock(self) -> Clock:
        return Clock(wall=lambda: NOON, monotonic=lambda: self.seconds)


@dataclass
class FakeMessage:
    id: int
    role: str
    content: str
    status: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    created: datetime = NOON
    parent: int | None = None
    reasoning: str = ""
    files: Sequence[Mapping[str, Any]] = ()


@dataclass
class FakeChat:
    id: int
    title: str
    system: str = ""
    draft: str = ""
    draft_files: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    tip: int | None = None
    updated: datetime = NOON
    messages: list[FakeMessage] = field(default_factory=list)


class FakeChats:
    """`ChatStoreLike` in memory; `saves` lists every content that was stored."""

    def __init__(self) -> None:
        self.chats: dict[int, FakeChat] = {}
        self.saves: list[tuple[str, str]] = []
        self.closed = False
        self.new = FakeChat(0, "")  # holds the draft of the chat that is not stored yet
        self._next = 1

    def _id(self) -> int:
        self._next += 1
        return self._next

    def create_chat(
        self, title: str, *, model: str, system: str, settings: Mapping[str, Any] | None = None
    ) -> int:
        chat = FakeChat(self._id(), title, system=system, settings=settings or {})
        self.chats[chat.id] = chat
        return chat.id

    def list_chats(self, limit: int, query: str) -> Sequence[FakeChat]:
        found = [
            chat
            for chat in reversed(self.chats.values())
            if query in chat.title or any(query in m.content for m in chat.messages)
        ]
        return found[:limit]

    def excerpts(self, query: str, chat_ids: Sequence[int]) -> Mapping[int, str]:
        return {
            chat_id: message.content
            for chat_id in chat_ids
            for message in self.chats[chat_id].messages
            if query and query in message.content
        }

    def get_chat(self, chat_id: int) -> FakeChat:
        return self.chats[chat_id]

    def delete_chat(self, chat_id: int) -> None:
        del self.chats[chat_id]

    def add_message(
        self,
        chat_id: int,
        role: str,
        content: str,
        *,
        status: str,
        parent: int | None = None,
        files: Sequence[Mapping[str, Any]] = (),
    ) -> int:
        message = FakeMessage(self._id(), role, content, status, parent=parent, files=files)
        self.chats[chat_id].messages.append(message)
        self.chats[chat_id].tip = message.id
        return message.id

    def update_message(
        self,
        message_id: int,
        *,
        content: str,
        status: str,
        meta: Mapping[str, Any],
        reasoning: str | None,
    ) -> None:
        self.saves.append((status, content))
        for chat in self.chats.values():
            for message in chat.messages:
                if message.id == message_id:
                    message.content, message.status, message.meta = content, status, dict(meta)
                    message.reasoning = reasoning or ""

    def set_tip(self, chat_id: int, message_id: int) -> None:
        self.chats[chat_id].tip = message_id

    def save_settings(self, chat_id: int, *, system: str, settings: Mapping[str, Any]) -> None:
        self.chats[chat_id].system, self.chats[chat_id].settings = system, settings

    def new_draft(self) -> tuple[str, Sequence[Mapping[str, Any]]]:
        return self.new.draft, self.new.draft_files

    def save_draft_files(self, chat_id: int | None, files: Sequence[Mapping[str, Any]]) -> None:
        (self.new if chat_id is None else self.chats[chat_id]).draft_files = files

    def save_draft(self, chat_id: int | None, draft: str) -> None:
        (self.new if chat_id is None else self.chats[chat_id]).draft = draft

    def close(self) -> None:
        self.closed = True


class FakePack:
    """A `PackJob` that hands out prepared events, one list per poll."""

    def __init__(self, events: list[dict[str, Any]], error: MoetError | None = None) -> None:
        self._events = events
        self._error = error
        self.cancelled = False

    @property
    def finished(self) -> bool:
        return not self._events

    @property
    def error(self) -> MoetError | None:
        return None if self._events else self._error

    def poll(self) -> list[dict[str, Any]]:
        return [self._events.pop(0)] if self._events else []

    def cancel(self) -> None:
        self.cancelled = True


class Stage:
    """An app on a scripted engine, with time in the hands of the test.

    Use as: `async with stage.open(80, 24) as pilot`, then `await stage.play(seconds)`.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        look: Look | None = None,
        wishes: Wishes | None = None,
        chats: ChatStoreLike | None = None,
        pack_job: PackJob | None = None,
        open_engine: Callable[[], EngineHandle] | None = None,
        setup: Setup | None = None,
    ) -> None:
        self.time = HeldClock()
        self.engine = ScriptedEngine(script)
        self.chats: Any = chats or FakeChats()
        self.desk = FakeDesk(lambda: self.engine)
        self.endpoint = FakeEndpoint()
        first_run = setup is not None
        self.app = MoetDeskApp(
            None if first_run else open_engine or (lambda: self.engine), self.chats, self.desk,
            model="" if first_run else "demo", setup=setup,
            endpoint=self.endpoint,
            look=look or Look(motion="none", glyphs="unicode"), wishes=wishes,
            pack_job=pack_job, clock=self.time.clock(), timers=False,
        )  # fmt: skip

    def open(self, columns: int = 80, rows: int = 24) -> Any:
        return self.app.run_test(size=(columns, rows), notifications=True)

    async def ready(self, pilot: Any) -> None:
        """Let the start go on until the engine is open and loaded or has failed."""
        for _ in range(200):
            self.app.pull_gauges()
            if self.app.bridge.phase in (Phase.READY, Phase.FAILED):
                break
            await pilot.pause(0.005)
            self.engine.advance(1.0)
        await self.settle(pilot)

    async def play(self, pilot: Any, seconds: float, *, step_s: float = 0.5) -> None:
        """Let time pass for engine and screens together."""
        left = seconds
        while left > 1e-9:
            part = min(step_s, left)
            left -= part
            self.time.seconds += part
            self.engine.advance(part)
            await self.app.pull_text()
            self.app.pull_gauges()
            await asyncio.sleep(0.001)
        await self.settle(pilot)

    async def threads(self, pilot: Any) -> None:
        """Let what the screens asked for in threads end, and be drawn."""
        quiet = 0
        for _ in range(100):
            await asyncio.sleep(0.02)
            self.app.pull_gauges()
            await self.settle(pilot)
            quiet = 0 if self.app.searching else quiet + 1
            if quiet == 3:  # what one thread brought may have started another
                return

    async def settle(self, pilot: Any) -> None:
        await pilot.pause()

    async def ask(self, pilot: Any, text: str) -> None:
        """Type a message and send it."""
        self.app.chat.query_one("Prompt").load_text(text)
        await pilot.press("enter")
        await self.settle(pilot)


def dump(app: App[Any]) -> str:
    """The screen as plain text, one line per row, blanks at line ends removed."""
    width, height = app.size
    console = Console(
        width=width, height=height, file=io.StringIO(), force_terminal=True,
        color_system="truecolor", record=True, legacy_windows=False, safe_box=False,
    )  # fmt: skip
    render = app.screen._compositor.render_update(
        full=True, screen_stack=app._background_screens, simplify=False
    )
    console.print(render)
    lines = console.export_text(styles=False).split("\n")
    return "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"


def count_layouts(monkeypatch: pytest.MonkeyPatch, screen: Screen[Any]) -> list[str]:
    """A list that gets longer with each layout of the screen, or of what has grown in it."""
    layouts: list[str] = []
    for name in ("_refresh_layout", "_lay_out"):
        intact = getattr(screen, name)
        counted = lambda *a, do=intact, name=name, **k: (layouts.append(name), do(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(screen, name, counted)
    return layouts
