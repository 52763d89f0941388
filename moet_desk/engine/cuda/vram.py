"""Keeps the pools at the size that the card has room for, between steps, about once a second.

`vram_arbiter` decides, the pools map and unmap; this has the clock, reads how much of the card is
free, and says what it did. Owned by the engine thread. It changes speed alone: which rows have
slots never changes an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from moet_desk.engine.cuda.pools import DevicePool
from moet_desk.engine.cuda.vmm import DriverError
from moet_desk.engine.vram_arbiter import (
    AT_ONCE,
    Card,
    Decision,
    Pace,
    Pool,
    Terms,
    Why,
    decide,
    give_back,
)
from moet_desk.store.pack_format import Plane
from moet_desk.telemetry import VramView
from moet_desk.units import MIB, show_memory

log = logging.getLogger("moet_desk.engine")

LOOK_EVERY_S = 1.0
"""Between two looks at the card."""

ROOM_AFTER_FAULT = 256 * MIB
"""What is given back when something did not fit: as much as any single tensor of a request needs,
and what torch takes from the card beside it."""


@dataclass(frozen=True, slots=True)
class CardMemory:
    """What is asked of the card.

    Attributes:
        free: bytes that nobody has.
        trim: gives back what torch keeps of the card for its next tensors.
    """

    free: Callable[[], int]
    trim: Callable[[], None]

    @classmethod
    def of(cls, device: torch.device) -> CardMemory:
        """Of a CUDA device."""
        return cls(lambda: int(torch.cuda.mem_get_info(device)[0]), torch.cuda.empty_cache)


class VramKeeper:
    """See the module's paragraph.

    Args:
        pools: what gives way.
        bounds: the sizes of each; their `slots` do not matter.
        fixed: bytes that the engine has on the card beside slots.
        terms: what is asked for.
        card: the card.
        refill: puts the hottest rows into so many new 2-bit slots; fine ones have the hot FP4 set.
    """

    def __init__(
        self,
        pools: Mapping[Plane, DevicePool],
        bounds: Mapping[Plane, Pool],
        *,
        fixed: int,
        terms: Terms,
        card: CardMemory,
        refill: Callable[[int], object] = lambda n_slots: None,
    ) -> None:
        self._pools, self._bounds, self._fixed = dict(pools), dict(bounds), fixed
        self._terms, self._card, self._refill = terms, card, refill
        self._pace, self._next_s = Pace(), 0.0
        self._free: int | None = None  # nobody has looked yet
        self._changes = 0
        self._why = Why.FITS
        self._refusal = ""

    @torch.inference_mode()
    def turn(self, now_s: float) -> None:
        """Look at the card if it is time to, and shrink or grow the pools."""
        if now_s < self._next_s or self._refusal:
            return
        self._next_s = now_s + LOOK_EVERY_S
        decision = self._decide(now_s)
        if decision.why is Why.PRESSURE:
            self._card.trim()  # perhaps that is enough
            decision = self._decide(now_s)
        self._follow(decision)

    def limit(self, n_bytes: int | None) -> None:
        """From now on the engine may take so much of the card in all; None: what there is."""
        self._terms = replace(self._terms, limit=n_bytes)
        self._pace, self._next_s = AT_ONCE, 0.0

    @torch.inference_mode()
    def make_room(self) -> None:
        """Give memory back at once, after something did not fit."""
        self._card.trim()
        self._pace = Pace()
        if not self._refusal:
            self._follow(give_back(*self._sizes(), ROOM_AFTER_FAULT))
        self._free = self._card.free()

    def view(self) -> VramView:
        """What the screens see."""
        base, fine = self._sizes()
        return VramView(
            free=self._seen_free(),
            slots=base.n_bytes + fine.n_bytes,
            planned=base.planned * base.slot_bytes + fine.planned * fine.slot_bytes,
            limit=self._terms.limit,
            changes=self._changes,
            why=self._refusal or self._why.value,
        )

    def _sizes(self) -> tuple[Pool, Pool]:
        base, fine = (
            replace(self._bounds[plane], slots=self._pools[plane].n_slots)
            for plane in (Plane.BASE, Plane.FINE)
        )
        return base, fine

    def _seen_free(self) -> int:
        """Free bytes of the card at the last look."""
        if self._free is None:
            self._free = self._card.free()
        return self._free

    def _decide(self, now_s: float) -> Decision:
        self._free = self._card.free()
        base, fine = self._sizes()
        card = Card(self._free, self._fixed)
        decision, self._pace = decide(base, fine, card, self._terms, self._pace, now_s)
        return decision

    def _follow(self, decision: Decision) -> None:
        if decision.why is Why.FITS:
            self._why = Why.FITS if self._why is Why.LEAST else self._why
            return
        if decision.why is Why.LEAST:
            if self._why is not Why.LEAST:
                log.warning("%s, and %s", self._need(), Why.LEAST.value)
            self._why = Why.LEAST
            return
        before = self._sizes()
        try:
            self._resize(decision)
        except DriverError as error:
            self._refusal = f"the driver refuses: {error}"
            log.warning("slots stay as they are until the model is loaded again: %s", error)
        self._say(before, decision)

    def _resize(self, decision: Decision) -> None:
        """To the sizes of a decision, which all shrink or all grow."""
        for plane, wanted in ((Plane.FINE, decision.fine), (Plane.BASE, decision.base)):
            got = self._pools[plane].resize(wanted)
            if got < wanted:  # another program was quicker, or the card's free memory is in pieces
                self._pace = Pace()

    def _say(self, before: tuple[Pool, Pool], decision: Decision) -> None:
        after = self._sizes()
        old, new = (sum(pool.n_bytes for pool in pools) for pools in (before, after))
        if old == new:
            return
        self._changes += 1
        self._why = decision.why
        if after[0].slots > before[0].slots:
            self._refill(after[0].slots - before[0].slots)
        log.info(
            "slots now take %s of the card, before %s: %s 2-bit and %s 4-bit (%s; %s are free)",
            show_memory(new), show_memory(old), f"{after[0].slots:,}", f"{after[1].slots:,}",
            decision.why.value, show_memory(self._seen_free()),
        )  # fmt: skip

    def _need(self) -> str:
        free = self._seen_free()
        if self._terms.limit is not None and free >= self._terms.low:
            return f"{Why.LIMIT.value} than {show_memory(self._least())}"
        return f"{show_memory(free)} of the card are free"

    def _least(self) -> int:
        pools = self._bounds.values()
        return self._fixed + sum(pool.least * pool.slot_bytes for pool in pools)
