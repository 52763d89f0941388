"""Which experts get a 4-bit slot before a token asks for them: pure decisions of the hot FP4 set.

Knows heat, who is in a slot, and how many bytes may be moved; moves nothing and has no clock. The
engine thread asks between steps (`engine/hot_set.py`), for the CPU's pool and the device's alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moet_desk.kernels.reference.cache import HALF_LIFE

FACTOR = 3.0
"""How much hotter a row must be than the one it replaces, so that rows of about equal heat, whose
order changes all the time, are left as they are. A copy between steps takes as long as the miss it
may save, and 1.5 copies twice as many rows for a point of hits (docs/design/residency.md).
"""

LEAST_SHARE = 0.01
"""Least heat of a row that is promoted, as the share of its layer's recent tokens that used it:
what is left of a single use after two half-lives.
"""

MOST_PER_TURN = 4
"""Rows promoted between two steps, so that no step waits long for it."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be copied for promotions.

    Attributes:
        bytes_per_s: over any longer time.
        row_bytes: what one promotion copies.
    """

    bytes_per_s: int
    row_bytes: int

    @property
    def most_bytes(self) -> int:
        """What may be saved up: a quarter of a second, but one row at least, else none would ever
        be promoted where a row takes longer than that.
        """
        return max(self.bytes_per_s // 4, self.row_bytes)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Bytes that may be copied now: a bucket that time fills and copies empty."""

    n_bytes: float = 0.0

    def later(self, budget: Budget, *, elapsed_s: float, base_bytes: int) -> Allowance:
        """After some time in which answers brought 2-bit rows of so many bytes.

        What they brought counts as spent: while 2-bit slots are short and every step lacks rows,
        the bus is theirs and promotions wait.
        """
        n_bytes = self.n_bytes + elapsed_s * budget.bytes_per_s - base_bytes
        return Allowance(min(max(n_bytes, 0.0), float(budget.most_bytes)))

    def rows(self, budget: Budget) -> int:
        """Promotions that fit."""
        return int(self.n_bytes // budget.row_bytes)

    def less(self, budget: Budget, n_rows: int) -> Allowance:
        """What is left after so many promotions."""
        return Allowance(self.n_bytes - n_rows * budget.row_bytes)


@dataclass(frozen=True, slots=True)
class Fill:
    """The fine pool and what could be in it, at one moment between steps.

    Attributes:
        heat: float [R], per row the share of its layer's recent tokens that used it (`share_of`).
        resident: int [N], rows that have a slot.
        n_free: slots without a row.
        may: bool [R], rows that could be copied now.
        base_bytes: 2-bit rows that answers have moved into slots since the start, in bytes.
    """

    heat: NDArray[np.floating]
    resident: NDArray[np.integer]
    n_free: int
    may: NDArray[np.bool_]
    base_bytes: int


@dataclass(frozen=True, slots=True)
class Promotion:
    """A row that gets a 4-bit slot: that of the row it replaces, or a free one."""

    row: int
    replaces: int | None = None


def share_of(warmth: NDArray[np.floating]) -> NDArray[np.floating]:
    """The share of its layer's recent tokens that used each row.

    It is the count that look-ups choose their victims by, of the pool's own uses or of those at 2
    bits, whichever is more: a slower count takes slots from rows that reruns just brought and are
    about to ask for again (docs/design/residency.md has the figures).

    Shapes:
        warmth: float [R], log2 of the decayed uses, the present counted as 1; -> float [R], 1 for a
            row that every token of its layer uses.
    """
    share: NDArray[np.floating] = np.exp2(warmth) * (1.0 - 0.5 ** (1 / HALF_LIFE))
    return share


def choose(fill: Fill, *, most: int) -> list[Promotion]:
    """The hottest rows without a slot, each for a free slot or for the coldest row that is clearly
    colder. Of equal rows the first is taken, so equal input gives equal output.

    Args:
        fill: the pool.
        most: how many at most.
    """
    wanted = np.where(fill.may, fill.heat, 0.0)
    wanted[fill.resident] = 0.0
    hottest = np.argsort(-wanted, kind="stable")[:most]
    own = np.sort(fill.resident)
    coldest = own[np.argsort(fill.heat[own], kind="stable")]
    chosen: list[Promotion] = []
    for place, row in enumerate(hottest.tolist()):
        if wanted[row] < LEAST_SHARE:
            break
        if place < fill.n_free:
            chosen.append(Promotion(row))
            continue
        at = place - fill.n_free
        if at >= len(coldest) or not wanted[row] > FACTOR * fill.heat[coldest[at]]:
            break
        chosen.append(Promotion(row, int(coldest[at])))
    return chosen
