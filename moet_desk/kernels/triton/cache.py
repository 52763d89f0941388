"""The read-through cache's look-up on the device: hits, misses, victims, counters, in one launch.

Owns the tables' form on the device and the kernel that changes them during a step. Between steps
the engine thread may change them too (`claim`, `release`, `shrink`, `grow`, `rebase`). Twin:
`reference.cache`, the same policy: free slots first, then the coldest row of a window that moves
on, never a slot used at this `now`. Warmth is float32 here, by sums and products that round alike
everywhere, so the decisions can be checked exactly (tests/kernels/triton/twin_cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moet_desk.kernels.reference.cache import FREE, HALF_LIFE, WINDOW
from moet_desk.kernels.triton.portable import PTX, product

MOST_PAIRS = 64
"""Pairs (token, chosen expert) of one step and layer."""

STEPS_BETWEEN_REBASES = 1 << 20
"""After so many steps call `rebase`: float32 warmth then still tells 1/100 of a half-life apart,
and `now`, 32 bits wide, is far from its end.
"""

EXP2_TERMS = (0.69589012, 0.22486496, 0.07924492)
"""2**r = 1 + a r + b r^2 + c r^3 for r in 0..1, within 1.5e-4."""

LOG2_TERMS = (1.43872572, -0.67778387, 0.32118877, -0.08213062)
"""log2(1 + y) = a y + b y^2 + c y^3 + d y^4 for y in 0..1, within 1.2e-4."""

_E1, _E2, _E3 = (tl.constexpr(term) for term in EXP2_TERMS)
_L1, _L2, _L3, _L4 = (tl.constexpr(term) for term in LOG2_TERMS)
_WINDOW = tl.constexpr(WINDOW)


@dataclass(frozen=True, slots=True)
class GpuTables:
    """Slot tables of one pool on the device; `CacheTables` explains what they mean.

    Attributes:
        n_layers, n_experts: L and E; row (layer, expert) is layer * E + expert.
        slot_of: int32 [L * E], slot of a row or -1.
        owner: int32 [S], row in a slot or -1.
        last_used: int32 [S], `now` of the last look-up, or -1.
        warmth: float32 [L * E], log2 of the decayed count of uses; -inf if never used.
        free: int32 [S], a stack of unused slots; the top is free[n_free - 1].
        n_free, hand, clock: int32 [1]; `clock` counts steps, now = clock * L + layer + 1.
        counters: int32 [L, 4]: look-ups, hits, misses, evictions since the start; they wrap.
        ahead: int32 [L, 2]: rows that were brought before the layer asked, and those of them that
            it then asked for, which count as hits; they wrap. Of the last layer nobody counts.
        limit: int32 [1], slots that may be used; those behind them have no memory. It is data, so
            that captured graphs follow it.
    """

    n_layers: int
    n_experts: int
    slot_of: Tensor
    owner: Tensor
    last_used: Tensor
    warmth: Tensor
    free: Tensor
    n_free: Tensor
    hand: Tensor
    clock: Tensor
    counters: Tensor
    ahead: Tensor
    limit: Tensor

    @classmethod
    def empty(
        cls,
        n_layers: int,
        n_experts: int,
        n_slots: int,
        *,
        device: torch.device | str,
        limit: int | None = None,
    ) -> GpuTables:
        """Tables of a pool in which nothing lies yet; `limit` of its slots may be used, or all."""
        usable = n_slots if limit is None else limit

        def ints(size: int, value: int) -> Tensor:
            return torch.full((size,), value, dtype=torch.int32, device=device)

        n_rows = n_layers * n_experts
        return cls(
            n_layers=n_layers,
            n_experts=n_experts,
            slot_of=ints(n_rows, FREE),
            owner=ints(n_slots, FREE),
            last_used=ints(n_slots, FREE),
            warmth=torch.full((n_rows,), -torch.inf, device=device),
            free=_free_stack(usable, n_slots).to(device),
            n_free=ints(1, usable),
            hand=ints(1, 0),
            clock=ints(1, 0),
            counters=ints(n_layers * 4, 0).view(n_layers, 4),
            ahead=ints(n_layers * 2, 0).view(n_layers, 2),
            limit=ints(1, usable),
        )

    @property
    def n_slots(self) -> int:
        """Slots that there can be at most."""
        return self.owner.shape[0]


@dataclass(frozen=True, slots=True)
class LookupOutput:
    """What a look-up writes, for P pairs of T tokens.

    Attributes:
        uniq_slot: int32 [P], slot of the u-th distinct expert in order of first use, else -1.
        uniq_pair: int32 [P, T], the pair t * K + k in which token t uses it, else -1.
        n_uniq: int32 [1].
        miss_n: int32 [1]; miss_row, miss_slot: int32 [P], rows to fetch and where to.
        waiting: int32 [1], programs of the same launch that go on when these are known; 0 between
            launches.
    """

    uniq_slot: Tensor
    uniq_pair: Tensor
    n_uniq: Tensor
    miss_n: Tensor
    miss_row: Tensor
    miss_slot: Tensor
    waiting: Tensor

    @classmethod
    def empty(cls, n_tokens: int, top_k: int, *, device: torch.device | str) -> LookupOutput:
        """Room for a step's answers."""
        pairs = n_tokens * top_k

        def room(*shape: int, value: int = FREE) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        return cls(
            uniq_slot=room(pairs), uniq_pair=room(pairs, n_tokens), n_uniq=room(1),
            miss_n=room(1), miss_row=room(pairs), miss_slot=room(pairs), waiting=room(1, value=0),
        )  # fmt: skip


@triton.jit
def added_use(old, at, PTX: tl.constexpr):
    """log2(2**old + 2**at), the same bits on every device: products and sums only."""
    high = tl.maximum(old, at)
    d = tl.maximum(tl.minimum(old, at) - high, -24.0)
    whole = tl.floor(d)
    r = d - whole
    power = 1.0 + product(r, _E1 + product(r, _E2 + product(r, _E3, PTX), PTX), PTX)
    scale = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    y = power * scale
    inner = _L2 + product(y, _L3 + product(y, _L4, PTX), PTX)
    return high + product(y, _L1 + product(y, inner, PTX), PTX)


@triton.jit
def _coldest(owner, last_used, warmth, hand, since, now, n_slots):
    """Slot of the coldest row in the next window that has one not used from `since` to `now`, and
    the hand.
    """
    slot = -1
    while slot < 0:
        begin = tl.where(n_slots > _WINDOW, hand, 0)
        w = begin + tl.arange(0, _WINDOW)
        inside = w < n_slots  # a window stops at the last slot instead of wrapping
        row = tl.load(owner + w, mask=inside, other=0)
        used = tl.load(last_used + w, mask=inside, other=0)
        heat = tl.load(warmth + row, mask=inside, other=0.0)
        # The MTP head's look-ups may be of a later time than those of the step behind it.
        heat = tl.where(inside & ((used < since) | (used > now)), heat, float("inf"))
        end = begin + _WINDOW
        hand = tl.where(end >= n_slots, 0, end)
        if tl.min(heat, 0) < float("inf"):
            slot = begin + tl.argmin(heat, 0)
    return slot, hand


@triton.jit
def give_slots(
    n_missing, n_left, n_slots, at_slot, miss_row, miss_slot, slot_of, owner, last_used, warmth,
    free, since, now,
):  # fmt: skip
    """A slot for each of the missing rows; none that was used from `since` to `now`. Returns what
    is left of free ones, the hand, and how many rows lost theirs.
    """
    evicted = 0
    m = 0
    while m < n_missing:
        if n_left > 0:
            n_left -= 1
            victim = tl.load(free + n_left)
        else:
            victim, at_slot = _coldest(owner, last_used, warmth, at_slot, since, now, n_slots)
        old = tl.load(owner + victim)
        new = tl.load(miss_row + m)
        tl.debug_barrier()  # all have read before one writes
        if old >= 0:
            tl.store(slot_of + old, -1)
            evicted += 1
        tl.store(owner + victim, new)
        tl.store(slot_of + new, victim)
        tl.store(last_used + victim, now)
        tl.store(miss_slot + m, victim)
        tl.debug_barrier()
        m += 1
    return n_left, at_slot, evicted


@triton.jit
def _publish(pointer, value, PTX: tl.constexpr):
    """Store a word for other programs, and with it all that was stored before the last barrier."""
    if PTX:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; st.release.gpu.global.u32 [$1], $2; mov.u32 $0, $2;", "=r,l,r",
            [pointer, value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(pointer, value)


@triton.jit
def look_up(
    i, expert, heat, slot, step, counted, n_left, n_slots, at_slot,
    slot_of, owner, last_used, warmth, free, n_free, hand, clock, counters,
    uniq_slot, uniq_pair, n_uniq, miss_n, miss_row, miss_slot, waiting, layer, before,
    L: tl.constexpr, E: tl.constexpr, PER_USE: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
    PAIRS: tl.constexpr, CELLS: tl.constexpr, ADVANCE: tl.constexpr, PTX: tl.constexpr,
    PLAIN: tl.constexpr, WAITING: tl.constexpr,
):  # fmt: skip
    """Of the experts of a step's pairs, -1 for one that does not count, see `lookup`. With them
    comes what the tables say of their rows (0 for -1) and of the step. PLAIN: there is one token,
    and all its pairs count.
    WAITING: programs that `waiting` lets go on, below 0 if they find misses.
    """
    # long: one launch per layer is the point; each paragraph needs the one before.
    now = step * L + layer + 1
    valid = expert >= 0
    row = layer * E + expert
    if PLAIN:
        first, uses = valid, valid.to(tl.int32)
        rank, uniq = i, i
        n_first, asked = K, K
    else:
        same = (expert[:, None] == expert[None, :]) & valid[:, None]
        earlier = same & (i[None, :] < i[:, None])
        first = valid & (tl.sum(earlier.to(tl.int32), 1) == 0)
        rank = tl.cumsum(first.to(tl.int32), 0) - 1
        uniq = tl.sum(tl.where(same & first[None, :], rank[None, :], 0), 1)
        uses = tl.sum(same.to(tl.int32), 1)
        n_first = tl.sum(first.to(tl.int32), 0)
        asked = tl.sum(valid.to(tl.int32), 0)
        cells = tl.arange(0, CELLS)
        tl.store(uniq_pair + cells, -1, mask=cells < T * K * T)
    missing = (first & (slot < 0)).to(tl.int32)
    n_missing = tl.sum(missing, 0)
    if WAITING > 0 and n_missing == 0:
        tl.store(waiting, WAITING)  # they read nothing else
    tl.store(last_used + slot, now, mask=first & (slot >= 0))

    at = product(now.to(tl.float32), PER_USE, PTX)
    for n in range(T):
        heat = tl.where(uses > n, added_use(heat, at, PTX), heat)
    tl.store(warmth + row, heat, mask=first)

    evicted = 0
    if n_missing > 0:
        tl.store(miss_row + tl.cumsum(missing, 0) - 1, row, mask=missing > 0)
        tl.debug_barrier()
        n_left, at_slot, evicted = give_slots(
            n_missing, n_left, n_slots, at_slot, miss_row, miss_slot, slot_of, owner, last_used,
            warmth, free, now - before, now,
        )  # fmt: skip
        if WAITING > 0:
            tl.store(miss_n, n_missing)
            tl.debug_barrier()
            _publish(waiting, -WAITING, PTX)
        tl.store(n_free, n_left)
        tl.store(hand, at_slot)
        slot = tl.load(slot_of + row, mask=first, other=0)
    elif not PLAIN:
        tl.debug_barrier()  # the cells are cleared

    tl.store(uniq_slot + rank, slot, mask=first)
    if not PLAIN:
        tl.store(uniq_slot + i, -1, mask=(i >= n_first) & (i < T * K))
    tl.store(uniq_pair + uniq * T + i // K, i, mask=valid)
    tl.store(n_uniq, n_first)
    tl.store(miss_n, n_missing)
    c = tl.arange(0, 4)
    hits = asked - n_missing
    more = tl.where(c < 2, tl.where(c == 0, asked, hits), tl.where(c == 2, n_missing, evicted))
    tl.store(counters + layer * 4 + c, counted + more)
    if ADVANCE:
        tl.store(clock, step + 1)


@triton.jit(do_not_specialize=["layer", "before"])
def _lookup_kernel(
    ids, slot_of, owner, last_used, warmth, free, n_free, hand, clock, counters, limit,
    uniq_slot, uniq_pair, n_uniq, miss_n, miss_row, miss_slot, layer, before,
    L: tl.constexpr, E: tl.constexpr, PER_USE: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
    PAIRS: tl.constexpr, CELLS: tl.constexpr, ADVANCE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    # All that does not depend on the ids is asked for with them.
    step, counted = tl.load(clock), tl.load(counters + layer * 4 + tl.arange(0, 4))
    n_left, n_slots, at_slot = tl.load(n_free), tl.load(limit), tl.load(hand)
    i = tl.arange(0, PAIRS)
    expert = tl.load(ids + i, mask=i < T * K, other=-1)
    row = layer * E + expert
    heat = tl.load(warmth + row, mask=expert >= 0, other=0.0)
    slot = tl.load(slot_of + row, mask=expert >= 0, other=0)
    look_up(
        i, expert, heat, slot, step, counted, n_left, n_slots, at_slot,
        slot_of, owner, last_used, warmth, free, n_free, hand, clock, counters,
        uniq_slot, uniq_pair, n_uniq, miss_n, miss_row, miss_slot, None, layer, before,
        L, E, PER_USE, T, K, PAIRS, CELLS, ADVANCE, PTX, False, 0,
    )  # fmt: skip


def lookup(
    ids: Tensor, tables: GpuTables, *, layer: int, out: LookupOutput, ends_step: bool = False,
    before: int = 0,
) -> None:  # fmt: skip
    """Find the slots of a layer's experts, giving the missing ones a slot each.

    Args:
        ids: int32 [T, K], distinct within a token; below 0 for a pair that does not count.
        tables: changed in place.
        layer: MoE layer, from 0. A (step, layer) must come only once, or its calls must together
            fit the pool, or `let_go` must come between them.
        out: written.
        ends_step: the clock moves on; for the last look-up of a step.
        before: layers right before this one whose rows are still needed in this step, so that their
            slots are not taken. The pool must have room for all of them together.

    Raises:
        ValueError: more pairs than `MOST_PAIRS`, or than slots.
    """
    n_tokens, top_k = ids.shape
    n_pairs = n_tokens * top_k
    needed = n_pairs * (1 + before)
    if n_pairs > MOST_PAIRS or needed > tables.n_slots:
        raise ValueError(f"{needed} pairs at once do not fit {tables.n_slots} slots")
    padded = triton.next_power_of_2(n_pairs)
    _lookup_kernel[(1,)](
        ids, tables.slot_of, tables.owner, tables.last_used, tables.warmth, tables.free,
        tables.n_free, tables.hand, tables.clock, tables.counters, tables.limit,
        out.uniq_slot, out.uniq_pair, out.n_uniq, out.miss_n, out.miss_row, out.miss_slot, layer,
        before, tables.n_layers, tables.n_experts, 1.0 / (HALF_LIFE * tables.n_layers), n_tokens,
        top_k, padded, triton.next_power_of_2(n_pairs * n_tokens), ends_step, PTX,
        # Left to itself the assembler aims at 32 registers here and spills a few.
        num_warps=1 if padded <= 16 else 4, maxnreg=128, enable_fp_fusion=False,
    )  # fmt: skip


def claim(tables: GpuTables, rows: Sequence[int]) -> list[int]:
    """Give rows that are in no slot free ones, between steps, and return them in order.

    Takes as many rows as there are free slots. They count as the coldest until a look-up hits them.
    """
    n_free = int(tables.n_free)
    taken = list(rows[:n_free])
    slots = tables.free[n_free - len(taken) : n_free].flip(0)
    index = torch.tensor(taken, dtype=torch.int32, device=slots.device)
    tables.owner[slots.long()] = index
    tables.last_used[slots.long()] = 0
    tables.slot_of[index.long()] = slots
    tables.n_free.fill_(n_free - len(taken))
    found: list[int] = slots.tolist()
    return found


def release(tables: GpuTables, slots: Sequence[int]) -> None:
    """Empty slots, between steps, whose rows did not arrive or are no longer wanted."""
    index = torch.tensor(slots, dtype=torch.int64, device=tables.owner.device)
    index = index[tables.owner[index] != FREE]
    tables.slot_of[tables.owner[index].long()] = FREE
    tables.owner[index] = FREE
    tables.last_used[index] = FREE
    n_free = int(tables.n_free)
    tables.free[n_free : n_free + len(index)] = index.int()
    tables.n_free.fill_(n_free + len(index))


def shrink(tables: GpuTables, n_slots: int) -> list[tuple[int, int]]:
    """Empty all slots but the first `n_slots`, between steps; the hottest rows stay.

    Returns:
        (from, to) of rows to be copied before anything else happens to the slots.
    """
    owner, heat = tables.owner.cpu(), tables.warmth.cpu()
    slots = torch.nonzero(owner != FREE).flatten()
    order = torch.argsort(heat[owner[slots].long()], descending=True, stable=True)
    stays = torch.zeros(len(owner), dtype=torch.bool)
    stays[slots[order[:n_slots]]] = True
    movers = torch.nonzero(stays[n_slots:]).flatten() + n_slots
    places = torch.nonzero(~stays[:n_slots]).flatten()[: len(movers)]
    slot_of, last_used = tables.slot_of.cpu(), tables.last_used.cpu()
    slot_of[owner[slots[order[n_slots:]]].long()] = FREE
    owner[:n_slots][~stays[:n_slots]] = FREE
    owner[places], last_used[places] = owner[movers], last_used[movers]
    slot_of[owner[places].long()] = places.int()
    owner[n_slots:] = FREE
    last_used[owner == FREE] = FREE
    tables.slot_of.copy_(slot_of)
    tables.owner.copy_(owner)
    tables.last_used.copy_(last_used)
    tables.hand.zero_()
    _limit(tables, n_slots, torch.nonzero(owner[:n_slots] == FREE).flatten())
    return list(zip(movers.tolist(), places.tolist(), strict=True))


def grow(tables: GpuTables, n_slots: int) -> None:
    """Let more slots be used, between steps."""
    owner = tables.owner[:n_slots].cpu()
    _limit(tables, n_slots, torch.nonzero(owner == FREE).flatten())


def forget(tables: GpuTables) -> None:
    """Empty all slots, between steps: what lies in them is not known any more."""
    tables.slot_of.fill_(FREE)
    tables.owner.fill_(FREE)
    tables.last_used.fill_(FREE)
    n_slots = int(tables.limit)
    _limit(tables, n_slots, torch.arange(n_slots))


def _limit(tables: GpuTables, n_slots: int, unused: Tensor) -> None:
    """The slots that may be used, and those of them in which nothing lies, in ascending order."""
    tables.limit.fill_(n_slots)
    tables.free[: len(unused)].copy_(unused.flip(0))  # allocates nothing: the card may be full
    tables.n_free.fill_(len(unused))


def _free_stack(n_free: int, n_slots: int) -> Tensor:
    """Unused slots, the lowest on top; what lies above it means nothing."""
    stack = torch.full((n_slots,), FREE, dtype=torch.int32)
    stack[:n_free] = torch.arange(n_free - 1, -1, -1)
    return stack


def warm_as(tables: GpuTables, other: GpuTables, rows: Sequence[int]) -> None:
    """Make rows at least as warm as they are in another pool, between steps.

    The two pools' clocks may differ: each counts the steps that use it.
    """
    index = torch.tensor(rows, dtype=torch.int64, device=tables.owner.device)
    ahead = (tables.clock - other.clock).float() / HALF_LIFE
    tables.warmth[index] = torch.maximum(tables.warmth[index], other.warmth[index] + ahead)


def let_go(tables: GpuTables) -> None:
    """Let the look-ups that follow take any slot, at whatever `now` it was used: one launch."""
    tables.last_used.clamp_(max=0)  # those of a `now` are above 0, FREE stays


def rebase(tables: GpuTables) -> None:
    """Set the clock back to 0, between steps, and everything that is measured by it."""
    passed = tables.clock.float() * tables.n_layers / (HALF_LIFE * tables.n_layers)
    tables.warmth.sub_(passed)
    tables.last_used.copy_(torch.where(tables.last_used == FREE, FREE, 0))
    tables.clock.zero_()
