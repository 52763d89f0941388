"""How many slots the pools on a card should have now: pure decisions, no clock, no device.

Other programs take memory of the card and give it back, and a person may change the limit while the
model is loaded. Between steps the engine thread asks `decide` (`engine/cuda/vram.py`), about once a
second. Slots are what gives way: everything else on the card is of a fixed size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from moet_desk.units import GIB, MIB

LEAST_FREE = 256 * MIB
"""Free memory of a card below which slots are always given back: windows are drawn with it."""

CALM_S = 10.0
"""How long there must have been room before slots come back, so that a program which takes its
memory in bursts does not make the pool go up and down."""

LEAST_GROWTH = 128 * MIB
"""Least room for which growing begins."""

MOST_GROWTH = GIB
"""Most that one turn adds: the driver clears the memory, and a step waits for it."""


class Why(Enum):
    """What a decision follows from; the values are shown to people."""

    FITS = "as it should be"
    PRESSURE = "other programs need the card's memory"
    LIMIT = "memory.vram_limit is lower"
    ROOM = "the card has room again"
    LEAST = "the pool has its least size already"


@dataclass(frozen=True, slots=True)
class Pool:
    """Slots of one plane.

    Attributes:
        slots: now.
        least: what one step needs; never fewer.
        planned: what the plan gave it.
        most: more are of no use.
        slot_bytes: of one.
    """

    slots: int
    least: int
    planned: int
    most: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if not self.least <= self.planned <= self.most:
            raise ValueError("a pool's sizes must grow from its least to its most")

    @property
    def n_bytes(self) -> int:
        """What its slots take."""
        return self.slots * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Card:
    """A card's memory in bytes: `free` has nobody, `fixed` has this engine beside its slots."""

    free: int
    fixed: int


@dataclass(frozen=True, slots=True)
class Terms:
    """What is asked for.

    Attributes:
        keep: bytes of the card that growing leaves free.
        limit: bytes that the engine may take in all; None: what there is.
    """

    keep: int
    limit: int | None = None

    @property
    def high(self) -> int:
        """Free bytes down to which slots may grow."""
        return max(self.keep, 2 * LEAST_FREE)

    @property
    def low(self) -> int:
        """Free bytes below which slots are given back."""
        return self.high // 2

    @property
    def aim(self) -> int:
        """Free bytes up to which slots are given back: between the two, so that neither follows."""
        return (self.low + self.high) // 2


@dataclass(frozen=True, slots=True)
class Pace:
    """When there began to be room to grow; None: there is none."""

    roomy_since_s: float | None = None


AT_ONCE = Pace(-math.inf)
"""For a person's wish: no calm is waited for."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Slots that each pool should have, and why."""

    base: int
    fine: int
    why: Why


def decide(
    base: Pool, fine: Pool, card: Card, terms: Terms, pace: Pace, now_s: float
) -> tuple[Decision, Pace]:
    """The sizes that the pools should have, and what to hand in the next time.

    Shrinking comes at once and goes as far as needed, down to the least. Growing waits until there
    has been room for `CALM_S` and goes in pieces.
    """
    n_bytes = base.n_bytes + fine.n_bytes
    most = math.inf if terms.limit is None else terms.limit - card.fixed
    short = terms.aim - card.free if card.free < terms.low else 0
    if n_bytes > most or short > 0:
        why = Why.PRESSURE if n_bytes - short < most else Why.LIMIT
        return _shrunk(base, fine, int(min(n_bytes - short, most)), why), Pace()
    room = min(card.free - terms.high, most - n_bytes)
    if room < LEAST_GROWTH or (base.slots >= base.most and fine.slots >= fine.most):
        return Decision(base.slots, fine.slots, Why.FITS), Pace()
    since_s = now_s if pace.roomy_since_s is None else pace.roomy_since_s
    if now_s - since_s < CALM_S:
        return Decision(base.slots, fine.slots, Why.FITS), Pace(since_s)
    return _grown(base, fine, int(min(room, MOST_GROWTH))), Pace(since_s)


def give_back(base: Pool, fine: Pool, n_bytes: int) -> Decision:
    """The sizes after giving back so many bytes, as far as the least allows."""
    return _shrunk(base, fine, base.n_bytes + fine.n_bytes - n_bytes, Why.PRESSURE)


def divide(n_bytes: int, base: Pool, fine: Pool) -> tuple[int, int]:
    """Slots of both pools that fit into so many bytes; their present sizes do not matter.

    First the least of both, then what the plan gave them, 2-bit slots before fine ones, then what
    is of use. More bytes never make a pool smaller: what comes later gets nothing until all that
    comes before it is full.
    """
    size = {"base": base.least, "fine": fine.least}
    pools = {"base": base, "fine": fine}
    spare = n_bytes - base.least * base.slot_bytes - fine.least * fine.slot_bytes
    for name, wanted in (
        ("base", base.planned), ("fine", fine.planned), ("base", base.most), ("fine", fine.most),
    ):  # fmt: skip
        more = min(wanted - size[name], max(0, spare) // pools[name].slot_bytes)
        size[name] += more
        spare -= more * pools[name].slot_bytes
        if size[name] < wanted:
            break
    return size["base"], size["fine"]


def _shrunk(base: Pool, fine: Pool, n_bytes: int, why: Why) -> Decision:
    n_base, n_fine = divide(n_bytes, base, fine)
    found = Decision(min(base.slots, n_base), min(fine.slots, n_fine), why)
    if (found.base, found.fine) == (base.slots, fine.slots):
        return replace(found, why=Why.LEAST)
    return found


def _grown(base: Pool, fine: Pool, room: int) -> Decision:
    """As much more as fits `room`. A pool that has more than its share keeps it."""
    n_base, n_fine = divide(base.n_bytes + fine.n_bytes + room, base, fine)
    n_base, n_fine = max(base.slots, n_base), max(fine.slots, n_fine)
    more = (n_base - base.slots) * base.slot_bytes + (n_fine - fine.slots) * fine.slot_bytes
    if not 0 < more <= room:
        return Decision(base.slots, fine.slots, Why.FITS)
    return Decision(n_base, n_fine, Why.ROOM)
