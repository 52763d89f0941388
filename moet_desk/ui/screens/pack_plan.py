"""The plan of a model that is here: what the wizard's third step shows, to be changed and saved.

Dismissed with the wishes to keep, or None. UI thread.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from moet_desk.ui.background import Background
from moet_desk.ui.desk import Desk, Offer, PlanView, PlanWishes
from moet_desk.ui.setup_steps import change, fields
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.frame import SmallWindow
from moet_desk.ui.widgets.key_line import KeyLine
from moet_desk.ui.widgets.problem import problem_content
from moet_desk.ui.widgets.setup_pages import plan_page

_POLL_S = 0.1


class PackPlan(ModalScreen[PlanWishes | None]):
    """See the module's paragraph."""

    DEFAULT_CSS = """
    PackPlan { background: $background; }
    PackPlan #head { height: 2; border-bottom: solid $line; }
    PackPlan #body { height: 1fr; }
    PackPlan #page { height: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "save", "Save", id="pack_plan.save"),
        Binding("left", "change(-1)", "Less", id="pack_plan.less"),
        Binding("right", "change(1)", "More", id="pack_plan.more"),
        Binding("up", "field(-1)", "Value above", id="pack_plan.up", show=False),
        Binding("down", "field(1)", "Value below", id="pack_plan.down", show=False),
        Binding("a", "automatic", "Automatic", id="pack_plan.automatic"),
        Binding("escape", "leave", "Leave as it was", id="pack_plan.leave"),
    ]

    def __init__(self, desk: Desk, glyphs: Glyphs, name: str) -> None:
        super().__init__()
        self._desk = desk
        self._glyphs = glyphs
        self._pack = name
        self._asking: Background[tuple[Offer, PlanWishes]] | None = None
        self._offer: Offer | None = None
        self._wishes = PlanWishes()
        self._field = "context"

    def compose(self) -> ComposeResult:
        title = f" moet-desk {self._glyphs.dot} plan of {clean_line(self._pack, 50)}"
        yield Static(Content.styled(title, "bold"), id="head", markup=False)
        with VerticalScroll(id="body", can_focus=False):
            yield Static(Content(" Its shape is looked up"), id="page", markup=False)
        yield KeyLine()
        yield SmallWindow(self._glyphs)

    def on_mount(self) -> None:
        ask = partial(self._desk.pack_offer, self._pack)
        self._asking = Background(ask, name="pack-offer")
        self.set_interval(_POLL_S, self._poll)

    @property
    def searching(self) -> bool:
        """Whether the model's shape is still read."""
        return self._asking is not None

    def _poll(self) -> None:
        asking = self._asking
        if asking is None or not asking.ended:
            return
        self._asking = None
        if asking.error is not None:
            page = problem_content(asking.error, self._glyphs)
            self.query_one("#page", Static).update(page)
        elif asking.result is not None:
            self._offer, self._wishes = asking.result
            self._draw()

    def _plan(self) -> PlanView | None:
        return None if self._offer is None else self._desk.plan(self._offer, self._wishes)

    def _draw(self) -> None:
        if self._offer is None:
            return
        page = plan_page(
            self._offer, self._plan(), self._wishes, field=self._field, width=self.size.width,
            glyphs=self._glyphs,
        )  # fmt: skip
        self.query_one("#page", Static).update(page)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def action_field(self, by: int) -> None:
        names = fields(self._plan(), downloads=False)
        at = names.index(self._field) if self._field in names else 0
        self._field = names[max(0, min(len(names) - 1, at + by))]
        self._draw()

    def action_change(self, by: int) -> None:
        plan = self._plan()
        if plan is not None:
            self._wishes = change(self._wishes, plan, self._field, by)
            self._draw()

    def action_automatic(self) -> None:
        """Leave everything but the quality to the planner."""
        self._wishes = PlanWishes(quality=self._wishes.quality)
        self._draw()

    def action_save(self) -> None:
        plan = self._plan()
        if plan is None:
            return
        if plan.problem is not None:
            words = f"{plan.problem.cause} {plan.problem.do}"
            self.notify(words, severity="warning", markup=False, timeout=10)
            return
        self.dismiss(self._wishes)

    def action_leave(self) -> None:
        self.dismiss(None)
