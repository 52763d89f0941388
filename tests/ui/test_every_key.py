"""Every key of every screen: it can be reached, and something comes of it.

Nothing here says what a key does; that is tested with its screen. A key that is bound to nothing,
that another binding hides, or that no screen offers is found here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import OptionList

from moet_desk.engine.scripted import Script
from moet_desk.ui.keymap import binding_ids
from moet_desk.ui.look import Look
from moet_desk.ui.screens.cache import Picture
from moet_desk.ui.widgets.filter_line import FilterLine
from moet_desk.ui.widgets.prompt import Prompt
from tests.ui.support import Stage, dump
from tests.ui.test_new_screens import stage_with

TEXT = "\n\n".join(["Words of an answer.", "```python\nx = 1\n```", *["More words."] * 12])

PLACES: Mapping[str, tuple[str, ...]] = {
    "prompt": (),
    "message": ("alt+up", "alt+up", "alt+up"),
    "find": ("ctrl+f", *"word", "enter"),
    "attach": ("ctrl+o", *"test"),
    "options": ("ctrl+s", "tab"),
    "chats": ("ctrl+l",),
    "grid": ("f3", "down", "right"),
    "list": ("f3", "v", "v", "v", "down"),
    "models": ("f4",),
    "plan": ("f4", "c", "down"),
    "sign in": ("f4", "s"),
    "dialog": ("ctrl+l", "delete"),
    "filter": ("f4", "slash", *"de"),
    "endpoint": ("f5",),
    "settings": ("f6", "down", "down", "down"),
    "doctor": ("f7",),
    "log": ("f8", "up"),
    "help": ("f1",),
}
"""Keys that lead there from the chat."""

BEFORE: Mapping[str, tuple[str, ...]] = {
    "chat.send": ("h",),
    "chat.newline": ("h",),
    "chat.follow": ("ctrl+home",),
    "chat.page_down": ("ctrl+home",),
    "chat.stop": ("alt+up",),
    "settings.undo": ("right",),
    "settings.reset": ("right",),
    "log.follow": ("l", "l", "l", "up"),
    "endpoint.stop_call": ("home",),
    "block.up": ("j",),
    "go.chat": ("f3",),
    "go.chat_digit": ("f3",),
    "pack_plan.automatic": ("right",),
}
"""What has to be so that a key has something to do."""

LAST = {"chat.new", "chat.retry", "block.edit", "block.again", "chats.delete"}
"""What changes the chat, and so what other keys have to work on."""

IN = {"cache.order": "list"}
"""Where alone a key acts that is offered in more places."""

ELSEWHERE = {
    "playback.": "test_recording.py, where there is a recording",
    "setup.": "test_setup_screen.py, step by step",
    "cache.record": "test_recording.py, where something can record",
    "app.quit": "it ends the app: test_app.py",
    "app.copy_or_stop": "test_app.py, with something selected and without",
    "log.pause": "test_new_screens.py, where the log grows",
    "app.help_letter": "the same as app.help, outside of text",
    "chat.thinking": "test_chat_messages.py, with a model that reasons",
    "block.left": "test_chat_messages.py, with two versions",
    "block.right": "test_chat_messages.py, with two versions",
    "cache.next": "test_cache_screen.py, where a cell holds several experts",
    "models.pause": "test_models_screen.py, with a job",
}


def is_elsewhere(name: str) -> bool:
    return any(name == key or (key.endswith(".") and name.startswith(key)) for key in ELSEWHERE)


class Walk:
    """Tries each binding once, in the first place that offers it."""

    def __init__(self, stage: Stage, pilot: Any) -> None:
        self.stage, self.pilot = stage, pilot
        self.is_last = False
        self.tried: set[str] = set()
        self.still: list[str] = []
        self.offered: set[str] = set()
        self.entered: set[tuple[str, ...]] = set()

    def look(self) -> tuple[Any, ...]:
        app = self.stage.app
        return (
            app.current_mode, len(app.screen_stack), id(app.focused), app.clipboard,
            [note.message for note in app._notifications], len(self.stage.desk.asked),
            len(self.stage.endpoint.asked), app.conversation.wishes, app.searching,
            app.chat.query_one(Prompt).text,
            [rows.highlighted for rows in app.screen.query(OptionList)],
        )  # fmt: skip

    def standpoint(self) -> tuple[Any, ...]:
        """Screen and widget that have the keys now."""
        app = self.stage.app
        return app.current_mode, type(app.screen), len(app.screen_stack), id(app.focused)

    def is_new(self, place: tuple[str, ...]) -> bool:
        """Whether this place is entered for the first time: what it looks for takes a while."""
        fresh = place not in self.entered
        self.entered.add(place)
        return fresh

    def keys_here(self) -> dict[str, str]:
        """Ids of what acts here, with a key: of the widget that has the focus and all around it.
        What is behind a dialog does not act.
        """
        app = self.stage.app
        nodes = app.focused.ancestors_with_self if app.focused is not None else [app.screen]
        around = [*nodes, *([] if app.screen.is_modal else [app])]
        return {
            binding.id: key
            for node in around
            for key, bindings in node._bindings.key_to_bindings.items()
            for binding in bindings
            if binding.id
        }

    async def press(self, *keys: str) -> None:
        if keys:
            await self.pilot.press(*keys)
        await self.stage.settle(self.pilot)

    async def walk(self, place: str, enter: Callable[[], Awaitable[None]]) -> None:
        """Try what is offered at a place and was not tried before."""
        await enter()
        here, stood = self.keys_here(), self.standpoint()
        if "app.help" in here:
            assert "F1 Help" in dump(self.stage.app).rstrip().splitlines()[-1]
        self.offered |= set(here)
        for name, key in here.items():
            is_later = not self.is_last if name in LAST else place != IN.get(name, place)
            if name in self.tried or is_later or is_elsewhere(name):
                continue
            self.tried.add(name)
            if self.standpoint() != stood:
                await enter()
            await self.press(*BEFORE.get(name, ()))
            self.stage.app.clear_notifications()
            before, drawn = self.look(), dump(self.stage.app)
            await self.press(key)
            if self.look() != before or dump(self.stage.app) != drawn:
                continue
            await self.stage.threads(self.pilot)  # it may have gone to a thread, or be drawn later
            if self.look() == before and dump(self.stage.app) == drawn:
                self.still.append(f"{name} ({key})")


@pytest.mark.slow
@pytest.mark.asyncio
async def test_every_key__is_offered_somewhere_and_does_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.txt").write_text("A file.")
    (tmp_path / "tests.txt").write_text("Another file.")
    stage = stage_with(tmp_path, script=Script(answers=(TEXT,), tokens_per_s=1e4))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        for question in ("One word?", "Two words?"):
            await stage.ask(pilot, question)
            await stage.play(pilot, 2.0)
        walk = Walk(stage, pilot)
        prompt = stage.app.chat.query_one(Prompt)
        for at, place in enumerate([*PLACES, "message", "prompt"]):
            walk.is_last = at >= len(PLACES)

            async def enter(keys: tuple[str, ...] = PLACES[place]) -> None:
                app = stage.app
                while len(app.screen_stack) > 1:
                    app.pop_screen()
                    await pilot.pause()
                for _ in range(len(Picture)):
                    if app.cache.is_mounted and app.cache._picture is not Picture.GRID:
                        app.cache.action_view()
                await app.action_go("chat")
                prompt.load_text("")
                prompt.focus()
                first = walk.is_new(keys)
                for part in (keys[:1], keys[1:]):
                    await walk.press(*part)
                    for line in app.screen.query(FilterLine) if part is keys[:1] else ():
                        line.action_close()
                    if first:
                        await stage.threads(pilot)

            await walk.walk(place, enter)
    assert not walk.still, " ".join(walk.still)
    missing = {name for name in binding_ids() if name not in walk.offered}
    assert {name for name in missing if not is_elsewhere(name)} == set()


LOOKS = {
    "dark": Look(motion="none", glyphs="unicode"),
    "light": Look(motion="none", glyphs="unicode", theme="moet-light"),
    "no colour": Look(motion="none", glyphs="unicode", colour=False),
}


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("look", "size"),
    [("dark", (80, 24)), ("light", (80, 24)), ("no colour", (80, 24)), ("light", (120, 40)),
     ("no colour", (200, 60))],
)  # fmt: skip
async def test_every_screen__nothing_is_cut_off(look: str, size: tuple[int, int]) -> None:
    stage = Stage(look=LOOKS[look])
    async with stage.open(*size) as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "One word?")
        await stage.play(pilot, 1.0)
        for key in ("f2", "f3", "f4", "f5", "f6", "f7", "f8"):
            await pilot.press(key)
            stage.app.pull_gauges()
            await stage.settle(pilot)
            lines = dump(stage.app).rstrip("\n").splitlines()
            assert "F8 Log" in lines[0]
            assert "F1 Help" in lines[-1]
            if look == "no colour":
                assert f"[{key.upper()} " in lines[0]
            screen = stage.app.screen
            for widget in screen.query("TabLine, StatusLine, KeyLine, #top, #words, #title, #ask"):
                if widget.display and widget.region:
                    assert screen.region.contains_region(widget.region), (key, widget)
