"""The Textual app: what its keys and commands do; and `run`, its entry. UI thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from moet_desk import config
from moet_desk.engine.handle import EngineHandle
from moet_desk.engine.playback import Playback
from moet_desk.errors import CATALOGUE, ExitCode, MoetError
from moet_desk.locations import Locations
from moet_desk.runtime import LOG_FILE
from moet_desk.settings import Settings
from moet_desk.ui.app_core import AppCore
from moet_desk.ui.bridge import PackJob, Phase
from moet_desk.ui.chat_records import ChatStoreLike
from moet_desk.ui.desk import Desk, EndpointControl
from moet_desk.ui.keymap import APP_KEYS, binding_ids
from moet_desk.ui.look import look_of, wishes_of
from moet_desk.ui.palette import COMMANDS, GO, PLAYBACK, show_key
from moet_desk.ui.playback import Record
from moet_desk.ui.screens.help import HelpPanel
from moet_desk.ui.setup_steps import Setup
from moet_desk.ui.widgets.problem import ConfirmDialog

QUIT_AGAIN_S = 1.0


class MoetDeskApp(AppCore):
    """The app."""

    BINDINGS: ClassVar[list[BindingType]] = APP_KEYS

    # -- recordings ----------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys of a recording work only while one is played."""
        return self.player is not None if action == "playback" else True

    def action_playback(self, what: str) -> None:
        """Pause, place and speed of the recording that is played."""
        if self.player is not None:
            self.player.control(what)
            self.pull_gauges()

    def action_record(self) -> None:
        """Begin or end a recording of what the cache does."""
        if self.player is not None:
            self.notify("This is a recording already.")
            return
        self._say_of_tape(lambda: self._tape.toggle(self.bridge.engine, Path.cwd()))

    # -- other actions -------------------------------------------------------------------------

    def action_help(self) -> None:
        if isinstance(self.screen, HelpPanel):
            self.pop_screen()
            return
        self.push_screen(HelpPanel(self._keys_here(), self.glyphs))

    def _keys_here(self) -> list[tuple[str, str, str]]:
        """Keys, meaning and id of what works on the screen in front, most useful first."""
        keys: dict[str, list[str]] = {}
        words: dict[str, str] = {}
        for active in self.screen.active_bindings.values():
            binding = active.binding
            if binding.id is not None:
                keys.setdefault(binding.id, []).append(self.get_key_display(binding))
                words[binding.id] = binding.description
        order = list(binding_ids())
        return [(keys[name][0], words[name], name) for name in sorted(keys, key=order.index)]

    def action_copy_or_stop(self) -> None:
        focused = self.screen.focused
        selected = getattr(focused, "selected_text", "") or self.screen.get_selected_text()
        if selected:
            self.copy_to_clipboard(selected)
            self.notify("Copied, if the terminal allows it.")
            return
        now_s = self._clock.monotonic()
        again = self._interrupted_s is not None and now_s - self._interrupted_s < QUIT_AGAIN_S
        self._interrupted_s = now_s
        if again:
            self.action_leave()
        elif not self.conversation.stop():
            self.notify("Press Ctrl+C again to quit.")

    def action_leave(self) -> None:
        """Quit; asks first while an answer is written."""
        if isinstance(self.screen, ConfirmDialog):
            return
        if not self.conversation.busy or self.player is not None:
            self._leave_now()
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._leave_now()

        dialog = ConfirmDialog(
            "Quit while an answer is written?",
            body="It is stopped. What is written so far is kept.",
            act="Quit",
            keep="Stay",
        )
        self.push_screen(dialog, answered)

    # -- words ---------------------------------------------------------------------------------

    def get_key_display(self, binding: Binding) -> str:
        """Keys as people write them: Ctrl+N, Esc, F1."""
        return binding.key_display or show_key(binding.key)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette: every action."""
        yield from self._palette()

    def _palette(self) -> Iterator[SystemCommand]:
        screens = self._screens()
        for mode, title, text, action in COMMANDS:
            yield SystemCommand(title, text, self._runs(mode, screens[mode], action))
        for mode, title, text in GO:
            yield SystemCommand(title, text, partial(self.action_go, mode))
        adding = partial(self._add_model, None)
        yield SystemCommand("Add a model", "From the list, Hugging Face or a folder", adding)
        for title, text, what in PLAYBACK if self.player is not None else ():
            yield SystemCommand(title, text, partial(self.action_playback, what))
        yield SystemCommand("Help", "Keys, commands and glyphs (F1)", self.action_help)
        yield SystemCommand("Theme", "Change the colours", self.action_change_theme)
        yield SystemCommand("Quit", "Close moet-desk (Ctrl+Q)", self.action_leave)

    def _runs(self, mode: str, screen: Screen[None], action: str) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            await self.action_go(mode)
            await self.run_action(action, screen)

        return run


def run(
    settings: Settings,
    locations: Locations,
    *,
    open_engine: Callable[[], EngineHandle] | None,
    pack_job: PackJob | None,
    chats: ChatStoreLike,
    desk: Desk,
    endpoint: EndpointControl,
    model: str,
    setup: Setup | None,
    playback: Playback | None = None,
    record: Record | None = None,
    log_name: str = LOG_FILE,
    no_loading: str = "",
) -> int:
    """Open the app and return the exit code when it is closed.

    Args:
        settings: look, keys and answer wishes are taken from them.
        locations: only to name the log folder in reports.
        open_engine: called in a thread of its own, after the pack job; None: no model yet.
        pack_job: the pack being made on the first start, None if it is there.
        chats: the store; closed with the app.
        desk: what the models, doctor and set-up screens ask.
        endpoint: what the endpoint screen shows and starts.
        model: name of the pack that `open_engine` opens.
        setup: where the wizard is to begin or to go on, None to begin with the chat.
        playback: controls of the recording that `open_engine` gives, None for a real engine.
        record: starts a recording of what the cache does; None: that cannot be done.
        log_name: of the log in the folder of logs.
        no_loading: why models of this computer cannot be loaded; empty if they can.
    """
    look = look_of(settings, config.read_terminal())
    app = MoetDeskApp(
        open_engine, chats, desk, model=model, setup=setup, look=look,
        wishes=wishes_of(settings), pack_job=pack_job, log_dir=str(locations.logs_dir),
        endpoint=endpoint, endpoint_settings=settings.endpoint,
        config_file=locations.config_file, playback=playback, record=record, log_name=log_name,
        no_loading=no_loading,
    )  # fmt: skip
    app.run()
    if app.bridge.phase is Phase.FAILED and app.bridge.error is not None:
        return int(exit_code_of(app.bridge.error))
    return app.return_value or 0


def exit_code_of(error: MoetError | Mapping[str, Any]) -> ExitCode:
    """The exit code of a start that failed."""
    code = error.code if isinstance(error, MoetError) else str(error.get("code"))
    return CATALOGUE[code].exit if code in CATALOGUE else ExitCode.FAILED
