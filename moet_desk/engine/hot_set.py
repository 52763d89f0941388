"""The hot FP4 set: copies the hottest experts' FP4 rows into spare 4-bit slots between steps.

Owned by the engine thread, which calls `turn` between steps and while idle. `promotion` decides,
the tiers copy (`Residency`, `CudaResidency`); this holds the clock and the budget, and takes a
breath after a fault. It changes speed alone: a slot's content is a function of its row, so whether
a row was promoted, fetched or not there at all gives the same answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from moet_desk.engine.promotion import MOST_PER_TURN, Allowance, Budget, Fill, Promotion, choose

log = logging.getLogger("moet_desk.engine")

LOOK_AGAIN_S = 0.25
"""Pause after a look that found nothing to promote: heat changes slowly, and looking costs a little
of every step.
"""

PAUSE_S = 60.0
"""Pause after a row could not be read."""

IDLE_TIMES = 8
"""How much more may be copied while idle: nobody waits for the same cores or the same bus then."""

IDLE_TURN_S = 0.05
"""Longest that a turn without answers lasts, so that a request that comes now waits no longer."""


class FineTier(Protocol):
    """What can promote rows: the residency of a device."""

    def promotion_budget(self) -> Budget | None:
        """Bytes per second and per row; None if no 4-bit slot is to spare."""
        ...

    def fine_fill(self, *, idle: bool) -> Fill:
        """The fine pool now. Rows on disk may be promoted while idle only."""
        ...

    def promote(self, promotions: Sequence[Promotion]) -> None:
        """Copy rows into 4-bit slots.

        Raises:
            MoetError: a row could not be read; no slot claims a row that it does not hold.
        """
        ...


class HotSet:
    """When rows are promoted.

    Args:
        tier: what promotes them.
        now_s: the clock's time, in seconds.
    """

    def __init__(self, tier: FineTier, now_s: float) -> None:
        self._tier = tier
        self._budget = tier.promotion_budget()
        self._allowance = Allowance()
        self._last_s = self._next_s = now_s
        self._base_bytes = 0
        self._refill_s = 0.0
        if self._budget is not None:
            self._refill_s = MOST_PER_TURN * self._budget.row_bytes / self._budget.bytes_per_s

    @torch.inference_mode()
    def turn(self, now_s: float, *, idle: bool) -> int:
        """Promote what the budget allows, at most a few rows; returns how many."""
        budget = self._budget
        if budget is None or now_s < self._next_s:
            return 0
        fill = self._tier.fine_fill(idle=idle)
        base_bytes = fill.base_bytes - self._base_bytes
        elapsed_s = (now_s - self._last_s) * (IDLE_TIMES if idle else 1)
        self._allowance = self._allowance.later(budget, elapsed_s=elapsed_s, base_bytes=base_bytes)
        self._last_s, self._base_bytes = now_s, fill.base_bytes
        n_allowed = self._allowance.rows(budget)
        chosen = choose(fill, most=min(n_allowed, MOST_PER_TURN))
        self._next_s = now_s + self._pause_s(n_allowed, len(chosen), idle=idle)
        if not chosen:
            return 0
        self._allowance = self._allowance.less(budget, len(chosen))
        try:
            self._tier.promote(chosen)
        except Exception as error:  # nobody asked for this row: whatever it is, answers go on
            self._next_s = now_s + PAUSE_S
            log.warning("promoting experts pauses for %.0f s: %s", PAUSE_S, error)
            return 0
        return len(chosen)

    def _pause_s(self, n_allowed: int, n_chosen: int, *, idle: bool) -> float:
        """Until the next look: what it takes to refill, or longer if there was nothing to do."""
        if n_chosen and idle:
            return 0.0
        if n_allowed and not n_chosen:
            return LOOK_AGAIN_S
        return min(self._refill_s, LOOK_AGAIN_S)

    def idle_turn(self) -> None:
        """Promote until there is nothing to do, or a request would have to wait."""
        began = now_s = time.monotonic()
        while self.turn(now_s, idle=True) and now_s < began + IDLE_TURN_S:
            now_s = time.monotonic()
