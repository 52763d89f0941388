"""A screen that paints at once and lays out only what has grown: what is seen is the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from textual._compositor import Compositor
from textual.message import Message
from textual.message_pump import MessagePump

from moet_desk.engine.scripted import DEFAULT_ANSWER, Script
from moet_desk.ui.lean_screen import LeanCompositor
from moet_desk.ui.look import Look
from moet_desk.ui.paces import AnswerPace
from moet_desk.ui.widgets.gauges import StatusLine
from moet_desk.ui.widgets.live_text import LiveText
from moet_desk.ui.widgets.transcript import Transcript
from tests.ui.support import Stage, dump
from tests.ui.test_live_text import cells

pytestmark = pytest.mark.asyncio

LONG = Script(("\n\n".join([DEFAULT_ANSWER] * 40),), tokens_per_s=100)


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a layout had its price: blank rows are held ready, so that not every turn has one."""
    monkeypatch.setattr(AnswerPace, "room", lambda *_: 8)


async def turn(stage: Stage, seconds: float = 0.2) -> None:
    """A turn of the app's timer, and nothing of what waits in queues."""
    stage.time.seconds += seconds
    stage.engine.advance(seconds)
    await stage.app._tick()


async def writing(stage: Stage, pilot: Any) -> None:
    """Until an answer is written that is longer than the window."""
    await stage.ready(pilot)
    await stage.app.chat.ask("q")
    for _ in range(60):
        await turn(stage)
        await stage.settle(pilot)
        if stage.app.chat.transcript.max_scroll_y > 10:
            return
    raise AssertionError("it does not come")


async def test_turn__words_come__painted_in_it_without_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(LONG)
    async with stage.open(120, 40) as pilot:
        await writing(stage, pilot)
        screen, live = stage.app.chat, stage.app.chat.query_one(LiveText)
        painted: list[int] = []
        intact, posted = screen._compositor_refresh, MessagePump.post_message
        monkeypatch.setattr(
            screen, "_compositor_refresh", lambda: (painted.append(live.n_rows), intact())
        )
        messages: Counter[str] = Counter()

        def post(self: MessagePump, message: Message) -> bool:
            messages[type(message).__name__] += 1
            return posted(self, message)

        monkeypatch.setattr(MessagePump, "post_message", post)
        for _ in range(10):
            held, n_flushes = live.n_rows_held, screen.pace.n_flushes
            painted.clear()
            messages.clear()
            await turn(stage)
            assert screen.pace.n_flushes == n_flushes + 1
            assert painted == [live.n_rows]
            assert not screen._dirty_widgets
            if live.n_rows_held == held:
                assert not messages
                break
            await stage.settle(pilot)
        else:
            raise AssertionError("every turn had a layout")


async def test_held__something_changes__painted_when_it_ends() -> None:
    stage = Stage(LONG)
    async with stage.open(120, 40) as pilot:
        await writing(stage, pilot)
        screen, painted = stage.app.chat, []
        intact = screen._compositor_refresh
        screen._compositor_refresh = lambda: (painted.append(True), intact())  # type: ignore[method-assign]
        with screen.held():
            screen.query_one(StatusLine).refresh()
            screen.prompt.load_text("typed meanwhile")
            await pilot.pause(0.05)
            assert not painted
        assert painted
        await stage.settle(pilot)
        assert "typed meanwhile" in dump(stage.app)


@pytest.mark.parametrize("follows", [True, False])
async def test_answer__becomes_taller__everything_where_a_whole_layout_puts_it(
    follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(LONG, look=Look(motion="none", glyphs="unicode"))
    async with stage.open(120, 40) as pilot:
        await writing(stage, pilot)
        screen, transcript = stage.app.chat, stage.app.chat.query_one(Transcript)
        if not follows:
            transcript.page(-1)
            await stage.settle(pilot)
        intact = LeanCompositor.reflow_part
        n_layouts: list[bool] = []

        def reflow_part(self: LeanCompositor, part: Any) -> Any:
            found = intact(self, part)
            assert found is not None
            whole, widgets = self._arrange_root(screen, self.size, visible_only=False)
            assert list(self._full_map.items()) == list(whole.items())
            assert self.widgets == widgets
            n_layouts.append(True)
            return found

        monkeypatch.setattr(LeanCompositor, "reflow_part", reflow_part)
        for _ in range(40):
            before = dump(stage.app)
            await turn(stage)
            await stage.settle(pilot)
            plain = Compositor()
            plain.reflow(screen, screen.size)
            lean = screen._compositor
            drawn, wanted = (cells(each.render_strips(screen.size)) for each in (lean, plain))
            assert drawn == wanted
            chat = {
                w: at for w, at in plain._full_map.items() if transcript in w.ancestors_with_self
            }
            assert len(chat) > 8
            for widget, place in chat.items():
                assert widget.outer_size == place.region.size
                assert widget.virtual_size == place.virtual_size
            assert (before != dump(stage.app)) or not follows
        assert len(n_layouts) >= 3
        assert transcript.following is follows


async def test_taller__other_things_change_as_well__whole_layout() -> None:
    stage = Stage(LONG)
    async with stage.open(120, 40) as pilot:
        await writing(stage, pilot)
        screen = stage.app.chat
        live, rail = screen.query_one(LiveText), screen.query_one("Rail")
        width, rows = live.size.width, live.n_rows_held
        rail.display = False
        await turn(stage, 2.0)
        await stage.settle(pilot)
        assert live.size.width > width
        assert live.size.height == live.n_rows_held != rows
        assert "Tiers, recent" not in dump(stage.app)


async def test_timers__answer_is_written__a_turn_for_each_text() -> None:
    stage = Stage(LONG)
    stage.app._pulls_itself = True
    async with stage.open(120, 40) as pilot:
        for timer in stage.app._pulls:
            assert timer._callback == stage.app._tick
        often, rarely = stage.app._pulls
        await writing(stage, pilot)
        for _ in range(8):
            stage.app.chat.pace._text.record(0.0016)  # what leaves five times a second
        await turn(stage)
        assert (often._active.is_set(), rarely._active.is_set()) == (False, True)
        await stage.app.action_go("models")
        await turn(stage)
        assert (often._active.is_set(), rarely._active.is_set()) == (True, False)
