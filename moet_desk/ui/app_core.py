"""The app without its keys: screens as modes, timers, the models and recordings it shows.

It wires `Bridge`, `Conversation`, `Desk` and the screens together and owns the timer. It decides
nothing about chats, models or the engine. UI thread.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from textual.app import App
from textual.filter import LineFilter, Monochrome
from textual.screen import Screen
from textual.timer import Timer

from moet_desk import config
from moet_desk.engine.handle import EngineHandle, Quality
from moet_desk.engine.playback import Playback
from moet_desk.errors import ExitCode, MoetError
from moet_desk.runtime import LOG_FILE
from moet_desk.settings import Endpoint as EndpointSettings
from moet_desk.ui.bridge import Bridge, PackJob, Phase
from moet_desk.ui.chat_records import ChatStoreLike, Wishes
from moet_desk.ui.clock import Clock, system_clock
from moet_desk.ui.conversation import Conversation
from moet_desk.ui.desk import Desk, EndpointControl, JobView, NoEndpoint, PlanWishes
from moet_desk.ui.keymap import binding_ids
from moet_desk.ui.lean_screen import LeanScreen
from moet_desk.ui.look import Look, look_of, wishes_of
from moet_desk.ui.paces import CALM_PERIOD_S, GAUGE_PERIOD_S, START_PERIOD_S, TEXT_PERIOD_S
from moet_desk.ui.playback import Player, Record, Tape
from moet_desk.ui.quality_words import precision_line
from moet_desk.ui.screens.cache import CacheScreen
from moet_desk.ui.screens.chat import ChatScreen
from moet_desk.ui.screens.doctor import DoctorScreen
from moet_desk.ui.screens.endpoint import EndpointScreen
from moet_desk.ui.screens.log import LogScreen
from moet_desk.ui.screens.models import ModelsScreen
from moet_desk.ui.screens.settings import SettingsScreen
from moet_desk.ui.screens.setup import SetupScreen
from moet_desk.ui.setup_steps import Setup, Step
from moet_desk.ui.theme import ASCII, MOET_DARK, THEMES, Glyphs, choose_glyphs
from moet_desk.ui.widgets.frame import MIN_COLUMNS, MIN_ROWS, TabLine
from moet_desk.ui.widgets.gauges import History
from moet_desk.ui.widgets.problem import ConfirmDialog

_WAIT_S = 0.25  # at most, of gauges for text


class AppCore(App[int]):
    """See the module's paragraph. `timers=False` leaves pulling to the caller (tests).

    With `no_loading`, words why, what answers stays and models of this computer are not loaded.
    Without `open_engine` no model is loaded. `model` is the pack it opens; with `setup` the wizard
    is in front at first.
    """

    CSS_PATH = "app.tcss"
    TITLE = "moet-desk"
    ESCAPE_TO_MINIMIZE = False

    def __init__(
        self,
        open_engine: Callable[[], EngineHandle] | None,
        chats: ChatStoreLike,
        desk: Desk,
        *,
        model: str = "",
        setup: Setup | None = None,
        look: Look | None = None,
        wishes: Wishes | None = None,
        pack_job: PackJob | None = None,
        clock: Clock | None = None,
        log_dir: str = "",
        log_name: str = LOG_FILE,
        endpoint: EndpointControl | None = None,
        endpoint_settings: EndpointSettings | None = None,
        config_file: Path = Path("config.toml"),
        no_loading: str = "",
        timers: bool = True,
        playback: Playback | None = None,
        record: Record | None = None,
    ) -> None:
        self._no_loading = no_loading
        self._look = look or Look()
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (MIN_COLUMNS, "-normal"), (120, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-short"), (MIN_ROWS, "-tall")]
        clock = clock or system_clock()
        self._clock = clock
        self._pulls_itself = timers
        self.bridge = Bridge(open_engine, pack_job=pack_job, clock=clock, log_dir=log_dir)
        self.conversation = Conversation(self.bridge, chats, wishes=wishes or Wishes())
        self._desk = desk
        self._config_file = config_file
        self.model = model  # name of the pack that is loaded, or being loaded
        self.player = None if playback is None else Player(playback, self.conversation)
        self._tape = Tape(record, clock)
        self.bridge.is_recording = playback is not None
        self._starts_in = "chat" if setup is None else "setup"
        if playback is not None and not playback.recording.has_words:
            self._starts_in = "cache"
        self._jobs: tuple[JobView, ...] = ()
        self._history = History()
        self._pulls: tuple[Timer, ...] = ()  # every turn, every second turn
        self._is_seldom = False  # which of the two timers runs
        self._gauges_due_s = 0.0
        self._store_reported = False
        self._says = False  # tabs may show a line of a recording
        self._interrupted_s: float | None = None
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self.glyphs: Glyphs = choose_glyphs(
            self._look.glyphs, encoding=encoding, terminal=self._look.terminal
        )
        plain = not self._look.colour or self.glyphs is ASCII
        self.chat = ChatScreen(
            self.conversation, self.bridge, glyphs=self.glyphs, history=self._history,
            plain=plain, blink=self._look.motion == "full",
            marks_reruns=self._look.marks_reruns,
        )  # fmt: skip
        self.cache = CacheScreen(
            self.glyphs, self._history, clock=clock, plain=plain,
            period_s=self._gauge_period_s(),
        )  # fmt: skip
        self.models = ModelsScreen(desk, self.glyphs, clock=clock, plain=plain)
        self.doctor = DoctorScreen(desk, self.glyphs, clock=clock, plain=plain)
        self.endpoint = EndpointScreen(
            endpoint or NoEndpoint(), endpoint_settings or EndpointSettings(), self.glyphs,
            plain=plain,
        )  # fmt: skip
        self.settings = SettingsScreen(config_file, self.glyphs, plain=plain)
        self.log_screen = LogScreen(Path(log_dir) / log_name, self.glyphs, plain=plain)
        quality = self.conversation.wishes.quality.value
        first = Setup(Step.MODEL, Step.MODEL, wishes=PlanWishes(quality=quality))
        self.setup = SetupScreen(
            desk, self.bridge, glyphs=self.glyphs, load=self.load_model, setup=setup or first
        )
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = self._look.theme

    # -- life ----------------------------------------------------------------------------------

    def on_mount(self) -> None:
        if self._look.motion != "full":
            self._set_motion()
        self.set_class(self.glyphs is ASCII, "-ascii")
        known = binding_ids()
        self.set_keymap({name: key for name, key in self._look.keys.items() if name in known})
        unknown = [name for name in self._look.keys if name not in known]
        for mode, screen in self._screens().items():
            self.add_mode(mode, partial(self._first_visit, screen))
        self.switch_mode(self._starts_in)
        for name in unknown:
            self.notify(
                f'"{name}" under [keys] is not an action.', markup=False, severity="warning"
            )
        if self._pulls_itself:
            rarely = self.set_interval(2 * TEXT_PERIOD_S, self._tick, pause=True)
            self._pulls = (self.set_interval(TEXT_PERIOD_S, self._tick), rarely)
            self.call_after_refresh(_settle_memory)
            self._watch_terminal()
        self.pull_gauges()

    def _first_visit(self, screen: Screen[None]) -> Screen[None]:
        """The screen of a mode that is shown for the first time. Its styles are worked out while it
        is mounted, so Textual need not read the whole style sheet again for it (30 ms, twice).
        """
        screen._css_update_count = self._css_update_count
        return screen

    def _gauge_period_s(self) -> float:
        """Pictures that move are slower for people who want less motion."""
        return GAUGE_PERIOD_S if self._look.motion == "full" else CALM_PERIOD_S

    async def _tick(self) -> None:
        """Draw text and gauges; while an answer is written in one repaint, which costs half."""
        if not self.is_running:
            return
        screen = self.screen
        if self.chat.busy and isinstance(screen, LeanScreen):
            with screen.held():
                drawn = await self._draw_due()
            self.chat.painted(text=drawn)
        else:
            await self._draw_due()
        self._choose_timer()

    def _choose_timer(self) -> None:
        """Turns in which nothing is drawn are wake-ups as well: none between two of text."""
        chat = self.chat
        is_seldom = chat.busy and chat.is_current and self.player is None and chat.pace.skips_turns
        if is_seldom is not self._is_seldom and self._pulls:
            self._is_seldom = is_seldom
            often, rarely = self._pulls
            (often if is_seldom else rarely).pause()
            (rarely if is_seldom else often).reset()

    async def _draw_due(self) -> bool:
        """Draw what it is time for; gauges wait a little for text. Returns whether text came."""
        before = self.chat.pace.n_flushes
        await self.pull_text()
        drawn = self.chat.pace.n_flushes != before
        now_s = self._clock.monotonic()
        late_s = now_s - self._gauges_due_s
        if late_s >= 0 and (drawn or not self.chat.busy or late_s > _WAIT_S):
            ready = self.bridge.phase is Phase.READY and self.current_mode in ("chat", "cache")
            period_s = self._gauge_period_s() if ready else START_PERIOD_S
            self._gauges_due_s = now_s + period_s - TEXT_PERIOD_S / 2
            self.pull_gauges()
        return drawn

    def _watch_terminal(self) -> None:
        """Draw everything after a pause in the shell; leave well when the window is closed."""
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGHUP, signal.SIGTERM):
            loop.add_signal_handler(number, self.hang_up)

    def hang_up(self) -> None:
        """The terminal is gone, or this process was asked to end: keep everything, and leave."""
        self._leave_now(ExitCode.TERMINATED)  # the message that waits is kept with the draft
        self.conversation.keep()

    def _screens(self) -> dict[str, Screen[None]]:
        return {
            "chat": self.chat,
            "cache": self.cache,
            "models": self.models,
            "doctor": self.doctor,
            "endpoint": self.endpoint,
            "settings": self.settings,
            "log": self.log_screen,
            "setup": self.setup,
        }

    def stop_pulling(self) -> None:
        """Stop the timers; the screens are about to go."""
        for timer in self._pulls:
            timer.stop()

    def on_unmount(self) -> None:
        self._say_of_tape(self._tape.end)
        self.conversation.close()
        self.bridge.close()

    def get_line_filters(self) -> list[LineFilter]:
        filters = list(super().get_line_filters())
        return filters if self._look.colour else [*filters, Monochrome()]

    def _leave_now(self, code: ExitCode = ExitCode.OK) -> None:
        if self.chat.is_mounted:
            self.chat.save_draft()
        self.stop_pulling()
        self.exit(int(code))

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our own variables, for themes that are not ours."""
        return dict(MOET_DARK.variables)

    # -- timers --------------------------------------------------------------------------------

    async def pull_text(self) -> None:
        """Draw and save what the model has written since the last call."""
        if not self.is_running:
            return
        if self.player is not None and await self._play(self.player):
            self._history.clear()
        await self.chat.pull_text()

    async def _play(self, player: Player) -> bool:
        """Move a recording on. Returns whether its place went back."""
        ready = self.bridge.phase is Phase.READY
        chat = self.chat if self.chat.is_mounted else None
        return ready and await player.turn(chat)

    def pull_gauges(self) -> None:
        """Draw the newest snapshot on the screen in front; move the start on."""
        if not self.is_running:
            return
        self.bridge.poll()
        self._report_store()
        if self._tape.must_end:
            self._say_of_tape(self._tape.end)
        snapshot = self.bridge.snapshot()
        self._history.add(snapshot, self._now_s())
        self._draw_recording()
        self._jobs, notes = self._desk.jobs(), self._notes()
        used = max(self.conversation.context_used, snapshot.context_used)
        common: dict[str, Any] = {"context_used": used, "notes": notes, "jobs": self._jobs}
        match self.current_mode:
            case "cache":
                info, wishes = self.bridge.model(), self.conversation.wishes
                line = precision_line(info, wishes.quality, wishes.gate, width=self.size.width)
                if self.player is not None and self.player.playback.recording.note:
                    line = self.player.playback.recording.note
                self.cache.show(snapshot, **common, precision=line)
            case "models":
                self.models.show(snapshot, **common, loaded=self.model)
            case "doctor":
                self.doctor.show(snapshot, **common)
            case "endpoint":
                self.endpoint.show(snapshot, **common)
            case "settings":
                self.settings.show(snapshot, **common)
            case "log":
                self.log_screen.show(snapshot, **common)
            case "setup":
                self.setup.poll(self._jobs)
            case _:
                self.chat.show(snapshot, notes=notes, jobs=self._jobs)

    def _now_s(self) -> float:
        """The time that what is shown belongs to."""
        if self.player is not None:
            return self.player.playback.position_s
        return self._clock.monotonic()

    def _draw_recording(self) -> None:
        if self.player is None and not self._says:  # the usual case: nothing was ever said there
            return
        self._says = True
        line = None if self.player is None else self.player.header(self.size.width, self.glyphs)
        for tabs in self.screen.query(TabLine):
            tabs.say(line)

    def _report_store(self) -> None:
        self.conversation.save_when_due()
        problem = self.conversation.store_problem
        if problem is not None and not self._store_reported:
            self.chat.toast(problem)
        self._store_reported = problem is not None

    def _notes(self) -> tuple[str, ...]:
        facts = {
            "! not saved": self.conversation.store_problem is not None,
            "display slow": self.chat.pace.slow,
        }
        notes = [note for note, holds in facts.items() if holds]
        more = (self._tape.note, self._quality_note())
        return (*notes, *(note for note in more if note))

    def _quality_note(self) -> str:
        """The quality, if it is not the usual one; while a balanced answer is written its reruns
        and their cost, in narrow windows without the cost.
        """
        info = self.bridge.model()
        if info is not None and not info.has_qualities:
            return ""
        chosen, words = self.conversation.wishes.quality, self.chat.again_words()
        if not words:
            return "" if chosen is Quality.FAST else chosen.value
        return words if self.size.width >= 120 else words.partition(",")[0]

    # -- screens -------------------------------------------------------------------------------

    async def action_go(self, mode: str) -> None:
        """Bring a screen to the front, drawn with the newest figures."""
        if self.current_mode == "setup" != mode:
            self.setup.keep(open_next_time=False)
        await self.switch_mode(mode)
        self.pull_gauges()

    async def on_settings_screen_saved(self, event: SettingsScreen.Saved) -> None:
        """Put into effect what does not wait for a reload or a restart."""
        settings = config.load(self._config_file).settings
        look = look_of(settings, config.read_terminal())
        before, self._look = self._look, look
        if look.theme != before.theme:
            self.theme = look.theme
        self._set_motion()
        if look.marks_reruns != before.marks_reruns:
            await self.chat.show_reruns(look.marks_reruns)
        self.conversation.wish_for_new(wishes_of(settings))
        if event.name == "memory.vram_limit":
            self.bridge.limit_vram(settings.memory.vram_limit)

    def _set_motion(self) -> None:
        moves = self._look.motion == "full"
        self.animation_level = "full" if moves else "none"
        self.chat.set_blink(moves)

    async def on_tab_line_clicked(self, event: TabLine.Clicked) -> None:
        await self.action_go(event.mode)

    @property
    def searching(self) -> bool:
        """Whether the screen in front waits for something that is looked for in a thread."""
        return bool(getattr(self.screen, "searching", False))

    def _say_of_tape(self, act: Callable[[], str]) -> None:
        try:
            words = act()
        except MoetError as error:
            self.chat.toast(error)
            return
        if words:
            self.notify(words, markup=False, timeout=8)

    # -- models --------------------------------------------------------------------------------

    def load_model(self, name: str, wishes: PlanWishes | None = None) -> None:
        """Load a pack in the place of the one that is there; asks while an answer is written."""
        if self._no_loading:
            self.notify(self._no_loading, markup=False, timeout=8)
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._load_now(name, wishes)

        if not self.conversation.busy:
            self._load_now(name, wishes)
            return
        dialog = ConfirmDialog(
            "Load another model while an answer is written?",
            body="The answer is stopped. What is written so far is kept.",
            act="Load",
            keep="Stay",
        )
        self.push_screen(dialog, answered)

    def _load_now(self, name: str, wishes: PlanWishes | None) -> None:
        self.conversation.stop()
        self.player = None  # what is shown from now on is no recording
        self._say_of_tape(self._tape.end)
        self._draw_recording()
        self.model = name
        if wishes is not None:
            self.conversation.wish(quality=Quality(wishes.quality))
        self.bridge.load(self._desk.opener(name, wishes))

    async def on_models_screen_load(self, event: ModelsScreen.Load) -> None:
        is_here = event.name == self.model and self.bridge.phase is Phase.READY
        ready = is_here and event.wishes is None
        if not ready:
            self.load_model(event.name, event.wishes)
        if not self._no_loading and (ready or not self.conversation.busy):
            await self.action_go("chat")

    async def on_models_screen_add(self, event: ModelsScreen.Add) -> None:
        await self._add_model(None if event.offer is None else event.offer.id)

    async def _add_model(self, offer_id: str | None) -> None:
        """Open the wizard: where its job is, at the plan of an offer, or at the list of models."""
        kept = self.setup.setup
        if offer_id is not None:
            fresh = PlanWishes(quality=kept.wishes.quality)
            wishes = kept.wishes if kept.offer == offer_id else fresh
            self.setup.begin(Setup(Step.PLAN, Step.MODEL, offer_id, wishes))
        elif kept.step is not Step.GET or all(job.id != kept.job for job in self._jobs):
            self.setup.begin(replace(kept, step=Step.MODEL, job=None, model=None))
        await self.action_go("setup")

    async def on_setup_screen_left(self, event: SetupScreen.Left) -> None:
        await self.action_go("chat" if event.started else "models")


def _settle_memory() -> None:
    """What the first frame needed lives as long as the app: garbage is looked for beside it."""
    gc.freeze()
    gc.enable()  # the command line held it back while it imported
