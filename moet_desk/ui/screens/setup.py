"""The wizard: machine, model, plan, get and pack, start; it is also how a model is added.

What Enter and Esc do is decided in `setup_steps`; what the pages say is made in `setup_pages`. This
screen asks the desk in threads, keeps the answers after every change, and hands the pack that is
ready to the app. A job goes on when the wizard is left or the window closed. UI thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.widgets import OptionList, Static

from moet_desk.errors import MoetError
from moet_desk.ui.bridge import Bridge, Phase
from moet_desk.ui.desk import Desk, JobState, JobView, Offer, PlanView, PlanWishes
from moet_desk.ui.setup_asks import SetupAsks
from moet_desk.ui.setup_steps import (
    Setup,
    Step,
    after_plan,
    back,
    change,
    change_limit,
    downloads,
    fields,
    follow_job,
    obstacle,
    question,
    recommended,
    size_is_open,
    to_kept,
)
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.frame import SmallWindow
from moet_desk.ui.widgets.key_line import KeyLine
from moet_desk.ui.widgets.model_choice import ModelChoice
from moet_desk.ui.widgets.problem import ConfirmDialog
from moet_desk.ui.widgets.setup_pages import head_line
from moet_desk.ui.widgets.setup_text import SetupText
from moet_desk.ui.widgets.sign_in import HubGate, may_sign_in

_ON_STEP = {
    Step.MACHINE: {"again"},
    Step.MODEL: {"filter", "sign_in"},
    Step.PLAN: {"change", "field", "json"},
    Step.GET: {"pause", "stop", "background", "sign_in"},
    Step.START: set[str](),
}


class SetupScreen(Screen[None]):
    """See the module's paragraph. `poll` is called by the app's gauge timer."""

    DEFAULT_CSS = """
    SetupScreen #steps { height: 2; border-bottom: solid $line; }
    SetupScreen #body { height: 1fr; }
    SetupScreen #page { height: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "next", "Next", id="setup.next"),
        Binding("escape", "back", "Back", id="setup.back"),
        Binding("r", "again", "Measure again", id="setup.again"),
        Binding("left", "change(-1)", "Less", id="setup.less"),
        Binding("right", "change(1)", "More", id="setup.more"),
        Binding("up", "field(-1)", "Value above", id="setup.up", show=False),
        Binding("down", "field(1)", "Value below", id="setup.down", show=False),
        Binding("j", "json", "JSON", id="setup.json"),
        Binding("p", "pause", "Pause", id="setup.pause"),
        Binding("x", "stop", "Stop", id="setup.stop"),
        Binding("b", "background", "Background", id="setup.background"),
        Binding("slash", "filter", "Filter", id="setup.filter"),
        Binding("ctrl+s", "sign_in", "Sign in", id="setup.sign_in", show=False),
    ]

    class Left(Message):
        """The wizard is done or was left; `started`: a model is ready to chat."""

        def __init__(self, *, started: bool) -> None:
            super().__init__()
            self.started = started

    def __init__(
        self,
        desk: Desk,
        bridge: Bridge,
        *,
        glyphs: Glyphs,
        load: Callable[[str, PlanWishes], None],
        setup: Setup,
    ) -> None:
        super().__init__()
        self._desk = desk
        self._bridge = bridge
        self._glyphs = glyphs
        self._load = load
        self.setup = setup
        self._field = "context"
        self._gate = HubGate(self, desk, glyphs, self._refusal, self._signed_in)
        self._asks = SetupAsks(desk, bridge.clock)
        self._text = SetupText(self._asks, bridge, glyphs)
        self._jobs: tuple[JobView, ...] = ()
        self._again = False  # whether to measure although it was done before
        self._loads_before: int | None = None
        self._unkept = False
        self._drawn_once = False

    def compose(self) -> ComposeResult:
        yield Static("", id="steps", markup=False)
        with VerticalScroll(id="body"):
            yield Static("", id="page", markup=False)
            yield ModelChoice(self._glyphs, self._redraw_models)
        yield KeyLine()
        yield SmallWindow(self._glyphs)

    def on_mount(self) -> None:
        self._drawn_once = True
        self._enter_step()

    def on_screen_resume(self) -> None:
        self.keep()

    # -- life ------------------------------------------------------------------------------------

    def begin(self, setup: Setup) -> None:
        """Start anew or go on with kept answers."""
        self._asks.begin()
        if self._drawn_once:
            self._choice.forget()
        self._move(setup)

    def _move(self, setup: Setup) -> None:
        """Take a new state: keep it, and show its step."""
        self.setup = replace(setup, open=True)
        self.keep()
        if self._drawn_once:
            self._enter_step()

    def keep(self, *, open_next_time: bool = True) -> None:
        """Write the answers down; a disk that is full is said once."""
        self.setup = replace(self.setup, open=open_next_time)
        try:
            self._desk.save_setup(to_kept(self.setup))
        except MoetError as error:
            if not self._unkept:
                self.notify(error.cause, title=error.title, severity="warning", markup=False)
            self._unkept = True

    def _enter_step(self) -> None:
        self._asks.restart_clock()
        step = self.setup.step
        if step is Step.MACHINE and self._asks.machine is None:
            self._asks.measure(again=self._again)
        elif step in (Step.MODEL, Step.PLAN, Step.GET):
            self._asks.list_offers()
        elif step is Step.START:
            self._load_now()
        self._choice.close_all()
        self._choice.display = step is Step.MODEL
        if step is Step.PLAN:
            self.set_focus(None)  # arrows change the values
        elif step is Step.MODEL:
            self._choice.focus_list()
        else:
            self.query_one("#body").focus()
        self.refresh_bindings()
        self.draw()

    def _load_now(self) -> None:
        if self.setup.model is not None:
            self._loads_before = self._bridge.loads
            self._load(self.setup.model, self.setup.wishes)

    def poll(self, jobs: Sequence[JobView]) -> None:
        """Take what threads and jobs have brought; called four times a second while in front."""
        if not self._drawn_once:
            return
        self._jobs = tuple(jobs)
        self._take_look_up()
        self._gate.poll()
        moved = follow_job(self.setup, self._jobs)
        if moved != self.setup:
            if moved.step is Step.START and self.setup.job is not None:
                self._desk.cancel(self.setup.job)  # it is done; nobody has to dismiss it
            self._move(moved)
        elif self._started():
            self._finish()
        else:
            self.draw()

    def _started(self) -> bool:
        loaded = self._loads_before is not None and self._bridge.loads > self._loads_before
        return self.setup.step is Step.START and loaded and self._bridge.phase is Phase.READY

    def _finish(self) -> None:
        self.setup = Setup(Step.MODEL, Step.MODEL, wishes=self._fresh_wishes())
        self._loads_before = None
        self.keep(open_next_time=False)
        self.post_message(self.Left(started=True))

    @property
    def searching(self) -> bool:
        """Whether a thread still works for this step."""
        return self._asks.searching

    # -- what is shown ---------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw the step that is in front."""
        width, text = self.size.width, self._text
        text.width = width
        self._set("steps", head_line(self.setup, self._glyphs, width))
        match self.setup.step:
            case Step.MACHINE:
                self._set("page", text.machine())
            case Step.MODEL:
                self._draw_models(width)
            case Step.PLAN:
                self._draw_plan()
            case Step.GET:
                self._set("page", text.job(self.setup, self._job()))
            case Step.START:
                self._set("page", text.start(self.setup))

    def _set(self, name: str, content: Content) -> None:
        static = self.query_one(f"#{name}", Static)
        if static.content != content:
            static.update(content)

    def _draw_models(self, width: int) -> None:
        self._set("page", self._text.above_models())
        choice, listing, offers = self._choice, self._asks.listing, self._asks.offers()
        first_run = self.setup.first is Step.MACHINE
        first = self.setup.offer or recommended(offers, first_run=first_run)
        is_all = listing is not None and listing.ended
        choice.show(offers, first=first, width=width, is_all=is_all)
        choice.say(self._text.below_models(choice.chosen, is_listed=choice.is_listed))

    def _redraw_models(self) -> None:
        if self._drawn_once and self.setup.step is Step.MODEL:
            self._draw_models(self.size.width)

    @property
    def _choice(self) -> ModelChoice:
        return self.query_one(ModelChoice)

    def _draw_plan(self) -> None:
        offer = self.offer()
        if offer is None:
            self._draw_unknown_offer()
            return
        names = self._fields()
        self._field = self._field if self._field in names else names[0]
        page = self._text.plan(self.setup, offer, self._plan(offer), self._field)
        self._set("page", page)

    def _draw_unknown_offer(self) -> None:
        """A repository or folder of an earlier window is looked up again; what is gone is not."""
        asks = self._asks
        if asks.listing is not None and asks.listing.ended and asks.look_up is None:
            asks.begin_look_up(self.setup.offer or "")
        if asks.look_up_error is not None:
            self._move(replace(self.setup, step=Step.MODEL, offer=None))
        else:
            self._set("page", self._text.waiting("Its shape is looked up"))

    # -- signing in ------------------------------------------------------------------------------

    def _refusal(self) -> MoetError | None:
        """What the hub refused with in this step."""
        job = self._job()
        if self.setup.step is Step.MODEL:
            return self._asks.look_up_error
        if job is None or self.setup.step is not Step.GET or job.state is JobState.RUNNING:
            return None
        return job.error

    def action_sign_in(self) -> None:
        self._gate.ask()

    def _signed_in(self) -> None:
        """Try again what was refused."""
        if self.setup.step is Step.MODEL:
            self._begin_look_up(self._asks.looked_for)
        else:
            self.action_pause()

    # -- what is known ---------------------------------------------------------------------------

    def offer(self) -> Offer | None:
        """The chosen offer."""
        return self._asks.offer(self.setup.offer)

    def _plan(self, offer: Offer) -> PlanView | None:
        return self._desk.plan(offer, self.setup.wishes)

    def _job(self) -> JobView | None:
        return next((job for job in self._jobs if job.id == self.setup.job), None)

    def _take_look_up(self) -> None:
        offer = self._asks.take_look_up()
        if offer is None:
            return
        self.setup = replace(self.setup, offer=offer.id)
        if self.setup.step is Step.MODEL:
            self._choice.close_field()

    # -- events ----------------------------------------------------------------------------------

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.action_next()

    def on_model_choice_look_up(self, event: ModelChoice.LookUp) -> None:
        self._begin_look_up(event.text)

    def _begin_look_up(self, text: str) -> None:
        self._asks.begin_look_up(text)
        self.draw()

    def on_resize(self) -> None:
        if not self._drawn_once:
            return
        here = self._choice.chosen
        if here is not None and self.setup.step is Step.MODEL:
            self.setup = replace(self.setup, offer=here.id)  # the cursor stays
        self._choice.forget()  # rows are cut to the width
        self.call_after_refresh(self.draw)

    # -- actions ---------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        on_other_steps = set().union(*_ON_STEP.values()) - _ON_STEP[self.setup.step]
        return action not in on_other_steps

    def action_filter(self) -> None:
        self._choice.open_filter()

    def action_next(self) -> None:
        """What Enter does."""
        match self.setup.step:
            case Step.MACHINE:
                self._move(replace(self.setup, step=Step.MODEL))
            case Step.MODEL:
                self._choose()
            case Step.PLAN:
                self._accept_plan()
            case Step.GET:
                self._go_on()
            case Step.START:
                if self._bridge.phase is Phase.FAILED or self._bridge.loads == self._loads_before:
                    self._load_now()

    def _choose(self) -> None:
        offer = self._choice.chosen
        if offer is not None and size_is_open(offer):
            self._begin_look_up(offer.id)
        elif offer is not None:
            wishes = self.setup.wishes if offer.id == self.setup.offer else self._fresh_wishes()
            self._move(replace(self.setup, step=Step.PLAN, offer=offer.id, wishes=wishes))
        elif self._choice.is_listed:
            self._asks.look_up = None
            self._choice.open_field()

    def _fresh_wishes(self) -> PlanWishes:
        """For another model: memory is planned anew, the quality stays."""
        return PlanWishes(quality=self.setup.wishes.quality)

    def _accept_plan(self) -> None:
        offer = self.offer()
        if offer is None:
            return
        stops = obstacle(offer, self._plan(offer))
        asked = question(offer)
        if stops is not None:
            self.notify(stops, severity="warning", markup=False, timeout=10)
        elif asked is None:
            self._begin(offer)
        else:
            title, body = asked
            dialog = ConfirmDialog(title, body=body, act="Download", keep="Not now")
            self.app.push_screen(dialog, lambda yes: self._begin(offer) if yes else None)

    def _begin(self, offer: Offer) -> None:
        wanted = after_plan(self.setup, offer)
        try:
            name = self._desk.name_of(offer)
            job = None
            if wanted.step is Step.GET:
                job = self._desk.start(offer, wanted.wishes, wanted.limit)
        except MoetError as error:
            self._say(error)
            return
        self._move(replace(wanted, model=name, job=job))

    def _go_on(self) -> None:
        job = self._job()
        if job is not None and may_sign_in(job.error):
            self.action_sign_in()
        elif job is not None and job.state is not JobState.RUNNING:
            self.action_pause()
        else:
            self.notify("The model starts as soon as it is packed. B leaves this running.")

    def action_back(self) -> None:
        """What Esc does: an open field first, then the step before."""
        if self.setup.step is Step.MODEL and self._choice.field_is_open:
            self._asks.look_up = None
            self._choice.close_field()
            self.draw()
            return
        before = back(self.setup)
        if before is None:
            self.action_background()
        else:
            self._move(before)

    def action_background(self) -> None:
        """Leave the wizard; a job goes on, and the wizard goes on from here when it is opened."""
        self.keep(open_next_time=False)
        self.post_message(self.Left(started=False))

    def action_again(self) -> None:
        self._asks.machine, self._asks.listing, self._again = None, None, True
        self._enter_step()

    def action_field(self, by: int) -> None:
        names = self._fields()
        at = names.index(self._field) if self._field in names else 0
        self._field = names[max(0, min(len(names) - 1, at + by))]
        self.draw()

    def _fields(self) -> tuple[str, ...]:
        offer = self.offer()
        if offer is None:
            return ("answers",)
        return fields(self._plan(offer), downloads=downloads(offer))

    def action_change(self, by: int) -> None:
        offer = self.offer()
        if offer is None:
            return
        plan = self._plan(offer)
        if self._field == "limit":
            self.setup = replace(self.setup, limit=change_limit(self.setup.limit, by))
        else:
            plan = plan or PlanView((), 0, (), 0, ())
            wishes = change(self.setup.wishes, plan, self._field, by)
            self.setup = replace(self.setup, wishes=wishes)
        self.keep()
        self.draw()

    def action_json(self) -> None:
        offer = self.offer()
        plan = None if offer is None else self._plan(offer)
        if plan is None or not plan.document:
            self.notify("There is no plan yet.", severity="warning")
            return
        self.app.copy_to_clipboard(json.dumps(plan.document, indent=1))
        self.notify("The plan is on the clipboard as JSON, if the terminal allows it.")

    def action_pause(self) -> None:
        job = self._job()
        if job is None:
            return
        try:
            if job.state is JobState.RUNNING:
                self._desk.pause(job.id)
            else:
                self._desk.resume(job.id)
        except MoetError as error:
            self._say(error)

    def action_stop(self) -> None:
        """Pause the job and leave; the models screen goes on with it."""
        job = self._job()
        if job is not None and job.state is JobState.RUNNING:
            self.action_pause()
        self.action_background()

    def _say(self, error: MoetError) -> None:
        self.notify(
            f"{error.cause}\n{error.do}", title=f"{error.title}  {error.code}",
            severity="error", markup=False, timeout=10,
        )  # fmt: skip
