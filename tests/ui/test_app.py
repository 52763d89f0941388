"""The app around the screens: keys, palette, help, quitting, small windows, settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from textual.binding import Binding

from moet_desk.engine.handle import Quality
from moet_desk.engine.scripted import Script, ScriptedEngine
from moet_desk.errors import ExitCode, fail
from moet_desk.locations import TerminalFacts
from moet_desk.settings import Answers, Settings, Ui
from moet_desk.ui.app import MoetDeskApp, exit_code_of
from moet_desk.ui.keymap import binding_ids
from moet_desk.ui.look import Look, look_of, wishes_of
from moet_desk.ui.palette import COMMANDS, GO, show_key
from moet_desk.ui.screens.cache import CacheScreen
from moet_desk.ui.screens.chat import ChatScreen
from moet_desk.ui.screens.doctor import DoctorScreen
from moet_desk.ui.screens.models import ModelsScreen
from moet_desk.ui.screens.setup import SetupScreen
from moet_desk.ui.screenshot import save_screenshots
from moet_desk.ui.widgets.frame import SmallWindow
from moet_desk.ui.widgets.prompt import Prompt
from tests.ui.desk import FakeDesk
from tests.ui.support import Stage, dump

LONG = "word " * 400

IDS = {
    "app.copy_or_stop", "app.help", "app.help_letter", "app.palette", "app.quit", "cache.back",
    "cache.down", "cache.first", "cache.last", "cache.left", "cache.measure", "cache.page_down",
    "cache.page_up", "cache.pause", "cache.right", "cache.up", "chat.follow", "chat.list",
    "chat.new", "chat.newline", "chat.page_down", "chat.page_up", "chat.quality", "chat.rail",
    "chat.retry", "chat.send", "chat.stop", "chats.close", "chats.delete", "chats.down",
    "dialog.left", "dialog.right", "dialog.safe", "doctor.again", "doctor.back", "doctor.copy",
    "doctor.fix", "doctor.measure", "doctor.save", "filter.close", "filter.list", "go.cache",
    "go.cache_digit", "go.chat", "go.chat_digit", "go.doctor", "go.doctor_digit", "go.models",
    "go.models_digit", "help.close", "models.add", "models.back", "models.delete", "models.down",
    "models.filter", "models.folder", "models.load", "models.pause", "models.plan", "models.repair",
    "models.sign_in", "models.up", "models.verify", "pack_plan.automatic", "pack_plan.down",
    "pack_plan.leave", "pack_plan.less", "pack_plan.more", "pack_plan.save", "pack_plan.up",
    "setup.again", "setup.back", "setup.background", "setup.choose", "setup.down", "setup.filter",
    "setup.json", "setup.less", "setup.more", "setup.next", "setup.pause", "setup.sign_in",
    "setup.stop", "setup.up", "sign_in.leave", "endpoint.copy", "endpoint.address", "endpoint.key",
    "endpoint.again", "endpoint.back", "endpoint.switch", "endpoint.stop_call",
    "log.filter", "log.follow", "settings.undo", "settings.filter",
    "settings.left", "settings.right", "settings.reset",
    "settings.back", "log.level", "log.pause", "log.copy", "log.back", "go.endpoint",
    "block.copy", "block.code", "block.edit", "block.again", "block.fold", "block.left",
    "block.right", "block.up", "block.down", "chat.first", "chat.block_up", "chat.block_down",
    "chat.thinking", "chat.find", "chat.attach", "chat.options", "find.older", "find.newer",
    "find.close", "attach.close", "attach.down", "attach.up", "attach.complete", "options.close",
    "options.save", "options.down", "options.up", "options.next", "options.before",
    "cache.view", "cache.order", "cache.record", "cache.next", "cache.list_up", "cache.list_down",
    "cache.list_page_up", "cache.list_page_down", "cache.list_first", "cache.list_last",
    "playback.pause", "playback.back", "playback.forward", "playback.slower", "playback.faster",
    "go.endpoint_digit", "go.settings", "go.settings_digit", "go.log", "go.log_digit",
}  # fmt: skip


def test_binding_ids__public_contract() -> None:
    assert set(binding_ids()) == IDS
    assert len(binding_ids()) == len(IDS)
    for owner in (MoetDeskApp, ChatScreen, CacheScreen, ModelsScreen, DoctorScreen, SetupScreen):
        assert all(isinstance(b, Binding) and b.id for b in owner.BINDINGS)


@pytest.mark.parametrize(
    ("key", "shown"),
    [("escape", "Esc"), ("ctrl+n", "Ctrl+N"), ("f1", "F1"), ("m", "M"), ("G", "Shift+G"),
     ("question_mark", "?"), ("space", "Space")],
)  # fmt: skip
def test_show_key__as_people_write(key: str, shown: str) -> None:
    assert show_key(key) == shown


@pytest.mark.asyncio
async def test_keymap__remapped__new_key_works_old_one_does_not() -> None:
    look = Look(keys={"chat.quality": "f10", "no.such": "x"}, motion="none", glyphs="unicode")
    stage = Stage(look=look)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        assert '"no.such" under [keys] is not an' in dump(stage.app)
        await pilot.press("f9")
        assert stage.app.conversation.wishes.quality is Quality.FAST
        await pilot.press("f10")
        assert stage.app.conversation.wishes.quality is Quality.BALANCED


@pytest.mark.asyncio
async def test_screens__keys_and_tabs__change_and_keep_the_prompt() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("a", "2", "f3")
        await stage.settle(pilot)
        assert stage.app.current_mode == "cache"
        await pilot.press("1")
        await stage.settle(pilot)
        assert stage.app.current_mode == "chat"
        assert stage.app.chat.query_one(Prompt).text == "a2"
        await pilot.click("TabLine", offset=(13, 0))
        await stage.settle(pilot)
        assert stage.app.current_mode == "cache"
        await pilot.press("escape")
        await stage.settle(pilot)
        assert stage.app.current_mode == "chat"


@pytest.mark.asyncio
async def test_help__f1__keys_of_this_screen_commands_and_glyphs() -> None:
    stage = Stage()
    async with stage.open(80, 100) as pilot:
        await stage.ready(pilot)
        await pilot.press("f1")
        await stage.settle(pilot)
        screen = dump(stage.app)
        for words in ("Ctrl+N", "chat.new", "/system TEXT", "▓ G", "A tier changes speed"):
            assert words in screen
        await pilot.press("f1")
        await stage.settle(pilot)
        assert "Keys here" not in dump(stage.app)


@pytest.mark.asyncio
async def test_palette__every_action__runs() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        commands = {c.title: c for c in stage.app.get_system_commands(stage.app.screen)}
        assert set(commands) >= {title for _, title, *_ in (*COMMANDS, *GO)}
        await commands["Cache measure"].callback()
        await stage.settle(pilot)
        assert stage.app.current_mode == "cache"
        await commands["Quality"].callback()
        await stage.settle(pilot)
        await stage.settle(pilot)
        assert stage.app.current_mode == "chat"
        assert stage.app.conversation.wishes.quality is Quality.BALANCED
        await pilot.press("ctrl+p", *"earlier")
        await pilot.pause(0.2)
        await pilot.press("enter")
        await stage.settle(pilot)
        assert "Earlier chats" in dump(stage.app)


@pytest.mark.asyncio
async def test_quit__idle__leaves_and_closes_everything() -> None:
    stage = Stage()
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press("ctrl+q")
    assert stage.chats.closed
    assert stage.app.return_value == 0


@pytest.mark.asyncio
async def test_quit__while_writing__asks_and_keeps_the_text() -> None:
    stage = Stage(Script(answers=(LONG,)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 1.0)
        await pilot.press("ctrl+q")
        await stage.settle(pilot)
        assert "Quit while an answer is written?" in dump(stage.app)
        await pilot.press("escape")
        await stage.settle(pilot)
        assert stage.app.conversation.busy
        await pilot.press("ctrl+q")
        await stage.settle(pilot)
        await pilot.press("right", "enter")
    messages = next(iter(stage.chats.chats.values())).messages
    assert messages[-1].status == "stopped"
    assert messages[-1].content.startswith("word word")


@pytest.mark.asyncio
async def test_ctrl_c__selection_then_stop_then_quit() -> None:
    stage = Stage(Script(answers=(LONG,)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "q")
        await stage.play(pilot, 0.5)
        prompt = stage.app.chat.query_one(Prompt)
        prompt.load_text("copied")
        prompt.select_all()
        await pilot.press("ctrl+c")
        assert stage.app.clipboard == "copied"
        assert stage.app.conversation.busy
        prompt.load_text("")
        await pilot.press("ctrl+c")
        await stage.play(pilot, 0.5)
        assert not stage.app.conversation.busy
        stage.time.seconds += 5
        await pilot.press("ctrl+c")
        assert stage.app.is_running
        await pilot.press("ctrl+c")
    assert stage.app.return_value == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(("key", "columns"), [("f2", 4), ("f5", 2), ("f5", 1)])
async def test_window_of_no_columns_to_speak_of__the_app_goes_on(key: str, columns: int) -> None:
    """A pane of a terminal that is dragged shut, and open again."""
    stage = Stage(Script(answers=("One two.",)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await pilot.press(key)
        await stage.settle(pilot)
        before = dump(stage.app)
        await pilot.resize_terminal(columns, 24)
        await stage.settle(pilot)
        assert dump(stage.app) != before
        await pilot.resize_terminal(80, 24)
        await stage.settle(pilot)
        assert dump(stage.app) == before


@pytest.mark.asyncio
async def test_small_window__notice_while_everything_goes_on() -> None:
    stage = Stage(Script(answers=("Written behind the notice.",)))
    async with stage.open(40, 12) as pilot:
        await stage.ready(pilot)
        screen = dump(stage.app)
        assert "MD-TERM-01" in screen
        assert "this is 40 x 12." in " ".join(screen.split())
        assert "F2 Chat" not in screen
        await stage.app.chat.ask("q")
        await stage.play(pilot, 2.0)
        assert not stage.app.conversation.busy
        await pilot.press("f3")
        await stage.settle(pilot)
        assert "this is 40 x 12." in " ".join(dump(stage.app).split())
        await pilot.press("f2")
        await pilot.resize_terminal(80, 24)
        await stage.play(pilot, 0.5)
        assert not stage.app.chat.query_one(SmallWindow).display
        assert "Written behind the notice." in dump(stage.app)


@pytest.mark.asyncio
async def test_any_size__both_screens__nothing_raises() -> None:
    stage = Stage(Script(n_experts=97, n_layers=5))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        await stage.play(pilot, 1.0)
        for mode in ("f2", "f3"):
            await pilot.press(mode)
            for size in ((20, 5), (79, 24), (80, 23), (100, 24), (300, 100)):
                await pilot.resize_terminal(*size)
                stage.app.pull_gauges()
                await stage.settle(pilot)
                notice = size[0] < 80 or size[1] < 24
                assert stage.app.screen.query_one(SmallWindow).display is notice


@pytest.mark.asyncio
async def test_no_colour__only_greys_and_a_bracketed_tab() -> None:
    look = Look(colour=False, motion="none", glyphs="unicode")
    stage = Stage(look=look)
    async with stage.open() as pilot:
        await stage.ready(pilot)
        svg = stage.app.export_screenshot()
        assert "[F2 Chat]" in dump(stage.app)
    colours = {svg[i + 6 : i + 13] for i in range(len(svg)) if svg.startswith('fill="#', i)}
    body = colours - {"#ff5f57", "#febc2e", "#28c840", "#c5c8c6"}  # the picture's own frame
    assert body
    assert all(c[1:3] == c[3:5] == c[5:7] for c in body), body


@pytest.mark.asyncio
async def test_themes__all_settings_values__both_screens_draw() -> None:
    stage = Stage(look=Look(theme="ansi-light", motion="none", glyphs="unicode"))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.app.chat.ask("q")
        await stage.play(pilot, 1.0)
        await pilot.press("f3")
        for theme in ("ansi-light", "ansi-dark", "moet-light", "moet-contrast", "moet-dark"):
            stage.app.theme = theme
            await stage.settle(pilot)
            stage.app.pull_gauges()
            await stage.settle(pilot)
            assert "L01" in dump(stage.app)


def test_look_and_wishes__from_settings() -> None:
    settings = Settings(
        ui=Ui(theme="moet-light", glyphs="ascii", motion="none"),
        answers=Answers(quality="exact", gate=0.7, temperature=0.1, system="s", max_tokens=5),
        keys={"chat.new": "f5"},
    )
    look = look_of(settings, TerminalFacts(no_color=True, term="xterm"))
    assert (look.theme, look.glyphs, look.colour, look.terminal) == (
        "moet-light", "ascii", False, "xterm",
    )  # fmt: skip
    assert look.keys == {"chat.new": "f5"}
    assert look_of(Settings(ui=Ui(color="always")), TerminalFacts(no_color=True)).colour
    wishes = wishes_of(settings)
    assert (wishes.quality, wishes.gate, wishes.temperature, wishes.system, wishes.max_tokens) == (
        Quality.EXACT, 0.7, 0.1, "s", 5,
    )  # fmt: skip


def test_exit_code__of_a_failed_start() -> None:
    assert exit_code_of(fail("MD-DISK-02", path="p")) is ExitCode.NO_ROOM
    assert exit_code_of({"code": "MD-PACK-04"}) is ExitCode.DAMAGED
    assert exit_code_of({"code": "?"}) is ExitCode.FAILED


@pytest.mark.asyncio
async def test_hang_up__while_writing__text_and_draft_are_kept_without_a_question() -> None:
    stage = Stage(Script(answers=(LONG,)))
    async with stage.open() as pilot:
        await stage.ready(pilot)
        await stage.ask(pilot, "Go.")
        await stage.play(pilot, 1.5)
        stage.app.chat.query_one(Prompt).load_text("not sent yet")
        stage.app.hang_up()
        status, text = stage.chats.saves[-1]
        assert status == "stopped"
        assert text.startswith("word word")
        assert text == stage.app.conversation.turns[-1].text
    assert stage.chats.closed
    assert [chat.draft for chat in stage.chats.chats.values()] == ["not sent yet"]
    assert stage.app.return_value == ExitCode.TERMINATED


def test_imports__fresh_interpreter__no_torch_and_no_other_front_end() -> None:
    code = (
        "import sys, moet_desk.ui.app, moet_desk.ui.screenshot, moet_desk.engine.scripted;"
        "bad = {'torch', 'numpy', 'starlette', 'moet_desk.api', 'moet_desk.cli'};"
        "print(sorted(bad & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_failure_words__are_never_markup() -> None:
    error = fail("MD-ENG-04", reason="[bold]x[/bold]\x1b[31m", model="m")
    from moet_desk.ui.theme import UNICODE
    from moet_desk.ui.widgets.problem import problem_content

    assert "[bold]x[/bold]." in problem_content(error, UNICODE).plain
    assert "\x1b" not in problem_content(error, UNICODE).plain


def test_save_screenshots__running_engine__a_picture_of_every_screen(tmp_path: Path) -> None:
    engine = ScriptedEngine(Script(tokens_per_s=400, prompt_tok_per_s=4000)).start()
    saved = save_screenshots(tmp_path / "pictures", engine, FakeDesk())
    assert [path.name for path in saved] == [
        f"{mode}-{size}.svg"
        for size in ("80x24", "120x40")
        for mode in ("chat", "cache", "models", "endpoint", "settings", "doctor", "log", "setup")
    ]
    chat, cache = saved[0].read_text("utf-8"), saved[1].read_text("utf-8")
    assert "tokens&#160;·" in chat
    assert "L08" in cache
