"""What the wizard has asked the desk for, in threads: this computer, the models, one more model.

Owns these calls and what they brought; knows no widgets and no steps. UI thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from moet_desk.errors import MoetError
from moet_desk.ui.background import Background
from moet_desk.ui.clock import Clock
from moet_desk.ui.desk import Desk, MachineView, Offer

T = TypeVar("T")


class SetupAsks:
    """Each question is asked once, until `begin` or the caller asks it again."""

    def __init__(self, desk: Desk, clock: Clock) -> None:
        self._desk = desk
        self._clock = clock
        self._since_s = clock.monotonic()
        self.machine: Background[MachineView] | None = None
        self.listing: Background[tuple[Offer, ...]] | None = None
        self.look_up: Background[Offer] | None = None
        self.looked_for = ""  # what `look_up` is about
        self._looked_up: tuple[Offer, ...] = ()

    def begin(self) -> None:
        """Forget the models; what this computer is stays known."""
        self.listing, self._looked_up = None, ()

    def restart_clock(self) -> None:
        """Count the time anew from here."""
        self._since_s = self._clock.monotonic()

    @property
    def elapsed_s(self) -> float:
        return self._clock.monotonic() - self._since_s

    def measure(self, *, again: bool) -> None:
        """Look at this computer."""
        self.machine = self._thread(partial(self._desk.machine, again=again), "machine")

    def list_offers(self) -> None:
        """Find out which models can be added, if that is not known."""
        if self.listing is None:
            self.listing = self._thread(self._desk.offers, "offers")

    def begin_look_up(self, text: str) -> None:
        """Read the headers of a repository or a folder."""
        self.restart_clock()
        self.looked_for = text
        self.look_up = self._thread(partial(self._desk.look_up, text), "look-up")

    def take_look_up(self) -> Offer | None:
        """The offer that a look-up has brought, once."""
        if self.look_up is None or not self.look_up.ended or self.look_up.result is None:
            return None
        offer, self.look_up = self.look_up.result, None
        self._looked_up = (*(o for o in self._looked_up if o.id != offer.id), offer)
        return offer

    @property
    def look_up_error(self) -> MoetError | None:
        return None if self.look_up is None else self.look_up.error

    @property
    def searching(self) -> bool:
        """Whether a thread still works."""
        threads = (self.machine, self.listing, self.look_up)
        return any(thread is not None and not thread.ended for thread in threads)

    def offers(self) -> tuple[Offer, ...]:
        """All offers so far, those that were looked up last."""
        known = (self.listing.result if self.listing is not None else None) or ()
        ids = {offer.id for offer in self._looked_up}
        return (*(offer for offer in known if offer.id not in ids), *self._looked_up)

    def offer(self, offer_id: str | None) -> Offer | None:
        """The offer of this id, as far as it is known."""
        return next((offer for offer in self.offers() if offer.id == offer_id), None)

    def _thread(self, call: Callable[[], T], name: str) -> Background[T]:
        return Background(call, name=f"setup-{name}")
