"""What the Cache screen shows of experts: cells, one expert's story, layers, and the sorted list.

Pure functions over `CacheView`; loops are written for speed, since a big model has 11,000 experts
(a row of 256 costs about 25 us; measured 2026-11-30).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from moet_desk.telemetry import TIER_LETTERS, CacheView, Stories, Tier
from moet_desk.ui.theme import RAMP_STEPS
from moet_desk.units import show_duration

LEFT = 6
RIGHT = 7
_MAX_CELL_WIDTH = 3
_AGES_S = (1.0, 2.0, 5.0, 15.0, 60.0, 300.0)
"""Bounds of the steps of age, the freshest first."""

PLACES = {
    Tier.FINE: "4-bit slot",
    Tier.BASE: "2-bit slot",
    Tier.RAM: "in RAM",
    Tier.NVME: "on disk",
}


class Measure(Enum):
    """What a cell shows."""

    TIER = "answered by"
    HEAT = "heat"
    HITS = "hits"
    AGE = "age"


ENDS = {
    Measure.HEAT: ("less", "more"),
    Measure.HITS: ("always fetched", "never fetched"),
    Measure.AGE: ("minutes ago", "just used"),
}
"""Words at the two ends of a measure's ramp."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How experts are laid out: `group` experts per cell, `cell_width` columns per cell."""

    n_experts: int
    group: int
    cell_width: int

    @property
    def n_cells(self) -> int:
        return -(-self.n_experts // self.group)

    def experts(self, cell: int) -> range:
        """The experts behind a cell."""
        return range(cell * self.group, min(self.n_experts, (cell + 1) * self.group))


def plan_grid(n_experts: int, width: int) -> Grid:
    """Lay out `n_experts` in `width` columns, margins included.

    The group is the smallest divisor that fits; where that would waste more than half of the room
    (a prime number of experts), the last cell is allowed to hold fewer.
    """
    room = max(1, width - LEFT - RIGHT)
    least = max(1, -(-n_experts // room))
    group = next(g for g in range(least, max(least, n_experts) + 1) if n_experts % g == 0)
    if group > 2 * least:
        group = least
    n_cells = max(1, -(-n_experts // group))
    return Grid(n_experts, group, max(1, min(_MAX_CELL_WIDTH, room // n_cells)))


def measures(view: CacheView) -> tuple[Measure, ...]:
    """What can be shown of a view: hits and ages need stories."""
    every = tuple(Measure)
    return every if view.stories is not None else every[:2]


def row_values(view: CacheView, row: int, grid: Grid, measure: Measure) -> list[int | None]:
    """The `Tier` or ramp step (1 to 7) of each cell of a layer; None: not used.

    A group shows the tier of its hottest expert (the one that answers most), the highest heat, the
    newest use, and the hits of all together. An expert that was never used counts as used when a
    slot holds it (kept from the last run).
    """
    if measure is Measure.HITS or measure is Measure.AGE:
        return _story_values(view, row, grid, measure)
    both = bytes([heat << 2 | tier for heat, tier in zip(view.heat[row], view.tiers[row])])  # noqa: B905
    if grid.group > 1:
        step = grid.group
        both = both.ljust(grid.n_cells * step, b"\0")
        both = bytes(map(max, *(both[at::step] for at in range(step))))
    if measure is Measure.HEAT:
        return [value >> 2 or None for value in both]
    return [value & 3 if value >= Tier.BASE else None for value in both]


def _story_values(view: CacheView, row: int, grid: Grid, measure: Measure) -> list[int | None]:
    stories = view.stories
    if stories is None:
        return [None] * grid.n_cells
    begin = row * view.n_experts
    cells = [grid.experts(cell) for cell in range(grid.n_cells)]
    if measure is Measure.AGE:
        used_s = stories.floats(stories.used_s)[begin : begin + view.n_experts].tolist()
        newest = [max(used_s[cell.start : cell.stop]) for cell in cells]
        return [None if at < 0 else _age_step(stories.now_s - at) for at in newest]
    uses = stories.floats(stories.uses)[begin : begin + view.n_experts].tolist()
    fetches = stories.counts(stories.fetches)[begin : begin + view.n_experts].tolist()
    sums = [
        (sum(uses[cell.start : cell.stop]), sum(fetches[cell.start : cell.stop])) for cell in cells
    ]
    return [
        1 + round((RAMP_STEPS - 2) * (1 - min(1.0, fetched / used))) if used > 0 else None
        for used, fetched in sums
    ]


def _age_step(age_s: float) -> int:
    older = sum(age_s >= bound for bound in _AGES_S)
    return RAMP_STEPS - 1 - older


def describe(view: CacheView, row: int, experts: range) -> str:
    """The line under the grid about the experts below the cursor."""
    tiers, heat = view.tiers[row], view.heat[row]
    layer, hottest = view.layers[row], RAMP_STEPS - 1
    if len(experts) == 1:
        tier = Tier(tiers[experts[0]])
        where = f"{TIER_LETTERS[tier]} {PLACES[tier]}"
        return (
            f"Layer {layer}, expert {experts[0]}:  {where}   heat {heat[experts[0]]} of {hottest}"
        )
    shown = "   ".join(f"{e} {TIER_LETTERS[tiers[e]]} {heat[e]}" for e in experts[:8])
    more = f"  and {len(experts) - 8} more" if len(experts) > 8 else ""
    return f"Layer {layer}, experts {experts[0]}-{experts[-1]}:  {shown}{more}   heat 0-{hottest}"


def hottest(view: CacheView, row: int, experts: range) -> int:
    """The expert of a cell that answers most."""
    heat, tiers = view.heat[row], view.tiers[row]
    return max(experts, key=lambda expert: (heat[expert], tiers[expert]))


def tell(view: CacheView, row: int, expert: int) -> str:
    """One expert's story: uses, fetches and where from, evictions; "" where nobody keeps it."""
    stories = view.stories
    if stories is None:
        return ""
    story = stories.of(row * view.n_experts + expert)
    if story.used_s is None and not story.fetches and not story.evictions:
        return f"Expert {expert}: not used since the model was loaded"
    about, least = ("", "") if stories.exact else ("about ", "at least ")
    parts = [f"used {about}{story.uses:,.0f}x" + _ago(stories, story.used_s)]
    if story.fetches:
        source = "" if story.source is None else f" from {TIER_LETTERS[story.source]}"
        parts.append(f"fetched {least}{story.fetches:,}x{source}" + _ago(stories, story.fetched_s))
    else:
        parts.append("never fetched")
    parts.append(f"evicted {story.evictions:,}x")
    return f"Expert {expert}: " + "   ".join(parts)


def _ago(stories: Stories, at_s: float | None) -> str:
    if at_s is None:
        return ""
    age_s = stories.now_s - at_s
    return ", now" if age_s < 0.15 else f", {show_duration(age_s)} ago"


# -- layers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """One layer: experts by tier (N, R, G, Q), hits, and its share of all fetches."""

    layer: int
    by_tier: tuple[int, int, int, int]
    hit_share: float | None
    fetch_share: float | None


def layer_profile(view: CacheView) -> list[LayerFigures]:
    """The figures of every layer; `fetch_share` says which of them cause the waiting."""
    fetched: list[int] = []
    if view.stories is not None:
        counts = view.stories.counts(view.stories.fetches).tolist()
        n = view.n_experts
        fetched = [sum(counts[row * n : (row + 1) * n]) for row in range(len(view.layers))]
    total = sum(fetched)
    return [
        LayerFigures(
            layer,
            (tiers.count(0), tiers.count(1), tiers.count(2), tiers.count(3)),
            view.hit_share[row],
            fetched[row] / total if total else None,
        )
        for row, (layer, tiers) in enumerate(zip(view.layers, view.tiers, strict=True))
    ]


# -- the list --------------------------------------------------------------------------------


class Order(Enum):
    """What the list is sorted by."""

    USES = "uses"
    FETCHES = "fetches"
    AGE = "last use"
    LAYER = "layer"


def sorted_experts(view: CacheView, order: Order) -> list[int]:
    """All experts as layer row * E + expert, what counts most first."""
    rows = range(len(view.layers) * view.n_experts)
    if order is Order.LAYER:
        return list(rows)
    stories = view.stories
    if stories is None:
        heat = b"".join(view.heat)
        return sorted(rows, key=heat.__getitem__, reverse=True)
    values = {
        Order.USES: lambda: stories.floats(stories.uses).tolist(),
        Order.FETCHES: lambda: stories.counts(stories.fetches).tolist(),
        Order.AGE: lambda: stories.floats(stories.used_s).tolist(),
    }[order]()
    return sorted(rows, key=values.__getitem__, reverse=True)


LIST_HEAD = f" {'layer':>5} {'expert':>6}  {'where':<12} {'heat':>4} {'uses':>8} {'fetched':>8} {'evicted':>8}  {'last use':<12}"  # noqa: E501


def list_line(view: CacheView, place: int) -> str:
    """One expert's line under `LIST_HEAD`; place is layer row * E + expert."""
    row, expert = divmod(place, view.n_experts)
    tier = Tier(view.tiers[row][expert])
    where = f"{TIER_LETTERS[tier]} {PLACES[tier]}"
    head = f" {view.layers[row]:>5} {expert:>6}  {where:<12} {view.heat[row][expert]:>4}"
    if view.stories is None:
        return f"{head} {'–':>8} {'–':>8} {'–':>8}  –"
    story = view.stories.of(place)
    last = "–" if story.used_s is None else _ago(view.stories, story.used_s).lstrip(", ")
    return f"{head} {story.uses:>8,.0f} {story.fetches:>8,} {story.evictions:>8,}  {last:<12}"
