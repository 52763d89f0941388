"""What the wizard's steps say, from what was asked and answered so far.

Puts the pages of `setup_pages` together with waiting and failing threads; draws nothing itself.
UI thread.
"""

from __future__ import annotations

from textual.content import Content

from moet_desk.ui.bridge import Bridge, Phase
from moet_desk.ui.desk import JobView, Offer, PlanView
from moet_desk.ui.setup_asks import SetupAsks
from moet_desk.ui.setup_steps import Setup
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.job_lines import job_page
from moet_desk.ui.widgets.problem import problem_content
from moet_desk.ui.widgets.setup_pages import (
    OFFER_HEAD,
    machine_page,
    offer_notes,
    plan_page,
    rows,
    start_page,
    wrapped,
)
from moet_desk.ui.widgets.sign_in import may_sign_in
from moet_desk.units import show_duration


class SetupText:
    """One text per step; `width` is set before each drawing."""

    def __init__(self, asks: SetupAsks, bridge: Bridge, glyphs: Glyphs) -> None:
        self._asks = asks
        self._bridge = bridge
        self._glyphs = glyphs
        self.width = 80

    def waiting(self, words: str) -> Content:
        """That a thread still works, and for how long."""
        return Content(f" {self._glyphs.now} {words}: {show_duration(self._asks.elapsed_s)}")

    def machine(self) -> Content:
        """What this computer has."""
        found = self._asks.machine
        if found is not None and found.error is not None:
            return problem_content(found.error, self._glyphs)
        view = None if found is None else found.result
        elapsed_s = self._asks.elapsed_s
        return machine_page(view, elapsed_s=elapsed_s, width=self.width, glyphs=self._glyphs)

    def above_models(self) -> Content:
        """What stands over the list of models."""
        found, offers = self._asks.listing, self._asks.offers()
        lines = [Content.styled(" Which model?", "bold"), Content("")]
        if found is not None and found.error is not None:
            lines = [problem_content(found.error, self._glyphs), Content("")]
        elif not offers:
            lines.append(self.waiting("What fits this computer is worked out"))
        if offers:
            lines.append(Content.styled(OFFER_HEAD, "$dim"))
        return rows(lines)

    def below_models(self, offer: Offer | None, *, is_listed: bool) -> Content:
        """What stands under the list: about `offer`, or how the look-up goes."""
        asks, lines = self._asks, list[Content]()
        if asks.look_up_error is not None:
            lines.append(problem_content(asks.look_up_error, self._glyphs))
            if may_sign_in(asks.look_up_error):
                lines.append(Content(" Ctrl+S signs in to the hub."))
        elif asks.look_up is not None:
            lines.append(self.waiting("Its config and headers are read"))
        elif offer is not None:
            lines = offer_notes(offer, self.width, self._glyphs)
        elif is_listed:
            words = "Only config.json and the headers are read before the plan."
            lines = wrapped(words, self.width)
        return rows(lines)

    def plan(self, setup: Setup, offer: Offer, plan: PlanView | None, field: str) -> Content:
        """How a model will live here."""
        return plan_page(
            offer,
            plan,
            setup.wishes,
            field=field,
            width=self.width,
            glyphs=self._glyphs,
            limit=setup.limit,
        )

    def job(self, setup: Setup, job: JobView | None) -> Content:
        """How getting and packing goes."""
        offer = self._asks.offer(setup.offer)
        title = setup.model or "" if offer is None else offer.title
        return job_page(job, title=title, width=self.width, glyphs=self._glyphs)

    def start(self, setup: Setup) -> Content:
        """How loading goes."""
        bridge = self._bridge
        if bridge.phase is Phase.FAILED and bridge.error is not None:
            hint = Content(" Enter tries it again, Esc goes back, F7 looks for causes.")
            return rows([problem_content(bridge.error, self._glyphs), Content(""), hint])
        return start_page(
            setup.model or "", bridge.steps(), elapsed_s=bridge.elapsed_s(), width=self.width,
            glyphs=self._glyphs,
        )  # fmt: skip
