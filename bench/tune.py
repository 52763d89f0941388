"""Measure tiles of the expert kernels on this card, and write them where the package reads them.

    python -m bench.tune [--seconds 230] [--only decode|prompt] [--missing] [--shapes NAME ...]
                         [--write FILE]

For expert shapes of the catalogue, those of much used models first: decode steps of one token and of
three, 2-bit and FP4, then full tiles of a prompt's pairs. Processes of their own compile candidates
and touch no card; those that spill registers or want too much shared memory are left out. Meanwhile
this one measures every job whose candidates are compiled, and writes the table after each. A
candidate whose result differs in one bit from that of the rule ends the run. At the end of the time
compiling stops as it stands; shapes that were not reached keep the rule, or what another run wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from bench import kernels_moe as moe
from bench.compiling import Answers, Found, compiled, compilers, newest
from bench.timing import DEVICE, per_call_us
from moet_desk.catalogue import load_catalogue
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton import experts, grouped, tile_table
from moet_desk.kernels.triton.tile_table import MANY_TOKENS, GroupedTile, Tile

Shape = tuple[int, int, int]  # hidden, inner width, experts per token
_T = TypeVar("_T", Tile, GroupedTile)

MUCH_USED = (
    (4096, 2048), (7168, 2048), (6144, 2048), (2048, 768), (2880, 2880), (4096, 1536), (2048, 512),
)  # fmt: skip
"""Hidden and inner width of the shapes that come first."""

HELD_WORDS = {"gate_up": (40, 100), "down": (18, 60)}
"""Fewest and most words of weights that a thread of a decode candidate holds. All of the best on an
H200 lie within (2026-11-29, 4096 x 2048: 20 to 96); 160 spill.
"""
_ROWS = {"gate_up": (4, 8, 32), "down": (8, 16, 32)}
_WARPS = (1, 2, 4, 8, 16)
GROUPED = tuple(GroupedTile(*t) for t in ((32, 4, 3), (64, 4, 3), (64, 8, 3)))
POOL_BYTES = 1 << 30  # far beyond L2
_LAST_START_S = 5.0  # before the end: a job takes less
_GAIN = 0.98  # a tile must take less than this share of the rule's time
_EXPERTS, _TOKENS, _TOP_K = 8, 512, 4  # of a prompt's batch: 256 pairs for each expert


# -- what is tried -------------------------------------------------------------------------------


def shapes_of_catalogue() -> dict[Shape, list[str]]:
    """Expert shapes with the models that have them, much used ones first; the most experts per
    token count.
    """
    found: dict[tuple[int, int], tuple[int, list[str]]] = {}
    for entry in load_catalogue():
        top_k, names = found.get((entry.hidden, entry.inter), (0, []))
        found[entry.hidden, entry.inter] = max(top_k, entry.top_k), [*names, entry.name]
    known = [widths for widths in MUCH_USED if widths in found]
    ordered = [*known, *(widths for widths in found if widths not in known)]
    return {(*widths, found[widths][0]): found[widths][1] for widths in ordered}


def candidates(layout: ExpertLayout, rule: Tile, *, fine: bool, has_gate: bool) -> list[Tile]:
    """Tiles that divide the matrix and fill a thread's registers without spilling them, the rule's
    first. Of 32 rows, which saves a launch, gate and up have one: in 2 bits, with the fewest warps.
    """
    name = "gate_up" if has_gate else "down"
    height, width = (layout.inter, layout.hidden) if has_gate else (layout.hidden, layout.inter)
    (least, most), found = HELD_WORDS[name], [rule]
    for rows in _ROWS[name]:
        words = {w: _held_words(Tile(rows, w), width, fine=fine, has_gate=has_gate) for w in _WARPS}
        fitting = [Tile(rows, warps) for warps in _WARPS if least <= words[warps] <= most]
        if has_gate and rows == 32:
            fitting = [] if fine else fitting[:1]
        found += [tile for tile in fitting if height % rows == 0 and tile != rule]
    return found


def _held_words(tile: Tile, width: int, *, fine: bool, has_gate: bool) -> float:
    """Words of weights of a thread: 3 for each block of 32 in 2 bits, 5 in FP4."""
    blocks = (2 if has_gate else 1) * tile.rows * -(-width // 1024) * 32
    return blocks * (5 if fine else 3) / (32 * tile.warps)


def grouped_candidates(layout: ExpertLayout, *, wide: bool, has_gate: bool) -> list[GroupedTile]:
    """Tiles of a prompt's programs, the rule's first."""
    rule = grouped.grouped_tile(layout, pairs=grouped.FULL_PAIRS, wide=wide, has_gate=has_gate)
    return [rule, *(tile for tile in GROUPED if tile != rule)]


@dataclass(frozen=True)
class Trial:
    """One kernel of one shape: a launch for a tile, on data that differ from call to call, and the
    tensors that it writes.
    """

    name: str  # "gate_up" or "down"
    kernel: Any
    tiles: Sequence[Any]
    calls: Callable[[Any], list[Callable[[], None]]]
    written: tuple[Tensor, ...]


@dataclass(frozen=True, order=True)
class Job:
    """A row of the table that is to be measured. `tokens` 0: of prompts, `fine` then means wide."""

    shape: Shape
    fine: bool
    tokens: int

    @property
    def names(self) -> dict[str, Any]:
        """The fields of the table's row that say what was measured."""
        kind = {"fine": self.fine, "tokens": self.tokens} if self.tokens else {"wide": self.fine}
        return {"hidden": self.shape[0], "inter": self.shape[1], **kind}

    @property
    def tiles(self) -> Found:
        """Candidates by kernel, the rule's first."""
        layout, gates = ExpertLayout(*self.shape[:2]), {"gate_up": True, "down": False}
        if not self.tokens:
            return {
                name: list(grouped_candidates(layout, wide=self.fine, has_gate=has_gate))
                for name, has_gate in gates.items()
            }
        rule = experts.tiles_for(layout, fine=self.fine)
        return {
            name: list(candidates(layout, getattr(rule, name), fine=self.fine, has_gate=has_gate))
            for name, has_gate in gates.items()
        }

    def trials(self, pool_bytes: int) -> list[Trial]:
        if self.tokens:
            return decode_trials(self, pool_bytes)
        return grouped_trials(self)


def jobs_of(shapes: Iterable[Shape], *, only: str | None = None) -> list[Job]:
    """Rows of some shapes, in their order: those of decode steps ("decode"), then "prompt"."""
    kinds = {"decode": (1, MANY_TOKENS), "prompt": (0,)}
    return [
        Job(shape, fine, tokens)
        for kind, every in kinds.items()
        if only in (None, kind)
        for shape in [*shapes]
        for fine in (False, True)
        for tokens in every
    ]


def decode_trials(job: Job, pool_bytes: int) -> list[Trial]:
    layers = moe.Layers(job.shape, job.tokens, fine=job.fine, pool_bytes=pool_bytes)
    return [
        Trial(
            "gate_up", experts._gate_up_kernel, job.tiles["gate_up"], layers.hidden_codes,
            (layers.out_codes, layers.out_scales),
        ),
        Trial("down", experts._down_kernel, job.tiles["down"], layers.down, (layers.part,)),
    ]  # fmt: skip


def grouped_trials(job: Job, *, tokens: int = _TOKENS) -> list[Trial]:
    layout = ExpertLayout(*job.shape[:2])
    base = moe.random_rows(layout, _EXPERTS)
    digits = moe.random_digits(layout, _EXPERTS) if job.fine else None

    def addresses(rows: Tensor) -> Tensor:
        ends = range(rows.data_ptr(), rows.data_ptr() + rows.numel(), rows.stride(0))
        return torch.tensor(list(ends), device=DEVICE)

    rows = grouped.RowAddresses(
        layout, addresses(base), None if digits is None else addresses(digits)
    )
    ids = torch.rand(tokens, _EXPERTS).topk(_TOP_K).indices.sort(-1).values
    counts = torch.bincount(ids.reshape(-1), minlength=_EXPERTS).tolist()
    groups = grouped.group_pairs(ids.to(DEVICE), _EXPERTS)
    batch = grouped.make_batch(counts, range(_EXPERTS), device=DEVICE, pairs=grouped.FULL_PAIRS)
    kind = Activations.INT15 if job.fine else Activations.INT8
    codes, scales = moe.plain_codes(torch.randn(tokens, layout.hidden, device=DEVICE), kind)
    mid = torch.randn(batch.n_rows, layout.inter, device=DEVICE)
    mid_codes, mid_scales = moe.plain_codes(mid, kind)
    part = torch.empty(batch.n_rows, layout.hidden, device=DEVICE)
    workspace = torch.empty(_EXPERTS, layout.slot_floats, dtype=torch.int8, device=DEVICE)
    grouped.expand(rows, batch, workspace)
    held = (base, digits)  # addresses keep nothing alive

    def gate_up(tile: GroupedTile) -> list[Callable[[], None]]:
        return [
            lambda: grouped.grouped_gate_up(
                rows, batch, workspace, groups=groups, codes=codes, scales=scales, out=mid,
                tile=tile,
            )
            if held
            else None
        ]  # fmt: skip

    def down(tile: GroupedTile) -> list[Callable[[], None]]:
        return [
            lambda: (
                grouped.grouped_down(
                    rows, batch, workspace, codes=mid_codes, scales=mid_scales, out=part, tile=tile
                )
                if held
                else None
            )
        ]

    kernel = grouped._grouped_kernel
    return [
        Trial("gate_up", kernel, job.tiles["gate_up"], gate_up, (mid,)),
        Trial("down", kernel, job.tiles["down"], down, (part,)),
    ]


# -- compiling, in processes of their own --------------------------------------------------------


def passes(job: Job, name: str, tile: Any, most_shared_bytes: int) -> bool:
    """Compile one candidate of a job, and say whether the limits let it pass."""
    trial = next(trial for trial in job.trials(pool_bytes=1) if trial.name == name)
    trial.calls(tile)[0]()
    info = newest(trial.kernel)
    spills = job.tokens > 0 and info.stack_bytes > 0
    return info.shared_bytes <= most_shared_bytes and not spills


def submitted(pool: Pool, jobs: Iterable[Job], most_shared_bytes: int) -> dict[Job, Answers]:
    """Every candidate of every job, in order."""
    return {
        job: [
            (name, tile, pool.apply_async(passes, (job, name, tile, most_shared_bytes)))
            for name, tiles in job.tiles.items()
            for tile in tiles
        ]
        for job in jobs
    }


# -- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The tile of one kernel, its microseconds, and the rule's."""

    tile: Any
    us: float
    rule_us: float


def choose(times: Mapping[_T, float], rule: _T) -> Choice:
    """The quickest tile, if it gains enough over the rule's."""
    best = min(times, key=lambda tile: times[tile])
    if best != rule and times[best] > _GAIN * times[rule]:
        best = rule
    return Choice(best, times[best], times[rule])


def measured(trial: Trial, passed: Sequence[Any], time_of: Callable[..., float]) -> Choice:
    """Time every candidate that passed, all of which must write the rule's bits.

    Raises:
        ValueError: one wrote others.
    """
    rule, times = trial.tiles[0], {}
    wanted: list[Tensor] = []
    for tile in [rule, *(tile for tile in passed if tile != rule)]:
        calls = trial.calls(tile)
        for tensor in trial.written:
            tensor.zero_()
        calls[0]()
        if not wanted:
            wanted = [tensor.clone() for tensor in trial.written]
        if not all(map(_same_bits, trial.written, wanted)):
            raise ValueError(f"{tile} of {trial.name} gives other bits than {rule}")
        times[tile] = time_of(calls, repeats=5)
    return choose(times, rule)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def row_of(job: Job, found: Mapping[str, Choice]) -> dict[str, Any]:
    """A line of the table."""
    parts = [found["gate_up"], found["down"]]
    tiles = {name: _numbers(choice.tile) for name, choice in found.items()}
    us, rule_us = ([round(t, 2) for t in times] for times in _times(parts))
    return {**job.names, **tiles, "us": us, "rule_us": rule_us}


def _times(parts: Sequence[Choice]) -> tuple[list[float], list[float]]:
    return [part.us for part in parts], [part.rule_us for part in parts]


def _numbers(tile: Tile | GroupedTile) -> list[int]:
    both = [tile.rows, tile.warps]
    return both if isinstance(tile, Tile) else [*both, tile.stages]


def merged(
    old: Mapping[str, Any], capability: str, card: str, rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The table with rows of this card in the place of its old ones of the same shapes."""
    before = old["cards"].get(capability, {"decode": [], "grouped": []})
    kept = {_key(row): row for part in ("decode", "grouped") for row in before[part]}
    every = list((kept | {_key(row): row for row in rows}).values())
    own = {
        "card": card,
        "date": datetime.now(UTC).date().isoformat(),
        "decode": [row for row in every if "fine" in row],
        "grouped": [row for row in every if "wide" in row],
    }
    made = {"format": tile_table.FORMAT, "cards": {**old["cards"], capability: own}}
    tile_table.parse(made)
    return made


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("hidden", "inter", "fine", "wide", "tokens"))


def written(table: Mapping[str, Any]) -> str:
    """As a file, one row to a line."""
    text = json.dumps(table, indent=1)
    for row in (r for c in table["cards"].values() for r in (*c["decode"], *c["grouped"])):
        lines = json.dumps(row, indent=1).replace("\n", "\n    ")
        text = text.replace(lines, json.dumps(row))
    return text + "\n"


def table_at(file: Path) -> Mapping[str, Any]:
    """The table of earlier runs: that of the file, else the package's."""
    found: Mapping[str, Any] = json.loads((file if file.is_file() else tile_table.FILE).read_text())
    return found


def lacking(jobs: Iterable[Job], table: Mapping[str, Any], capability: str) -> list[Job]:
    """Jobs of which the table has no row for cards of this capability."""
    card = table["cards"].get(capability, {"decode": [], "grouped": []})
    known = {_key(row) for part in ("decode", "grouped") for row in card[part]}
    return [job for job in jobs if _key(job.names) not in known]


def measure(ready: Iterable[tuple[Job, Found]], file: Path, *, capability: str, card: str) -> int:
    """Measure jobs as they come and write each one's row at once; the number of rows."""
    done = 0
    for job, passed in ready:
        trials = job.trials(POOL_BYTES)
        found = {trial.name: measured(trial, passed[trial.name], per_call_us) for trial in trials}
        row = row_of(job, found)
        file.write_text(written(merged(table_at(file), capability, card, [row])))
        print(json.dumps(row), flush=True)
        done += 1
        del trials
        torch.cuda.empty_cache()
    return done


def run(jobs: Sequence[Job], file: Path, *, until: float) -> int:
    """Compile and measure at once what there is time for; the number of rows written."""
    device = torch.device("cuda", torch.cuda.current_device())
    capability, card = tile_table.capability_of(device), torch.cuda.get_device_name(device)
    limits = triton.runtime.driver.active.utils.get_device_properties(device.index)
    torch.manual_seed(0)
    with compilers(int(capability.replace(".", "")), ("bench.kernels_moe", __name__)) as pool:
        waiting = submitted(pool, jobs, int(limits["max_shared_mem"]))
        ready = compiled(waiting, until=until)
        return measure(ready, file, capability=capability, card=card)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure tiles of the expert kernels.")
    parser.add_argument("--seconds", type=float, default=230.0)
    parser.add_argument("--only", choices=("decode", "prompt"), help="default: decode, then prompt")
    parser.add_argument("--missing", action="store_true", help="what the table has no row for")
    parser.add_argument("--shapes", nargs="*", default=[], help="models of the catalogue")
    parser.add_argument("--write", type=Path, default=tile_table.FILE)
    asked = parser.parse_args(arguments)
    began = time.monotonic()
    shapes = shapes_of_catalogue()
    chosen = [s for s, names in shapes.items() if not asked.shapes or {*names} & {*asked.shapes}]
    jobs = jobs_of(chosen, only=asked.only)
    if asked.missing:
        capability = tile_table.capability_of(torch.device("cuda", torch.cuda.current_device()))
        jobs = lacking(jobs, table_at(asked.write), capability)
    done = run(jobs, asked.write, until=began + asked.seconds - _LAST_START_S)
    took = time.monotonic() - began
    print(f"{done} of {len(jobs)} rows measured and written to {asked.write} after {took:.0f} s")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
