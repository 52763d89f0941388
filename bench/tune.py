"""Measure tiles of the expert kernels on this card, and write them where the package reads them.

    python -m bench.tune [--seconds 230] [--shapes NAME ...] [--write FILE]

For every expert shape of the catalogue: decode steps of one token and of three, 2-bit and FP4, and
full tiles of a prompt's pairs. Candidates are compiled first, side by side, and those that spill
registers or want too much shared memory are left out. A candidate whose result differs in one bit
from that of the rule ends the run. Shapes that the time does not suffice for keep the rule.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bench import kernels_moe as moe
from bench.timing import DEVICE, per_call_us
from moet_desk.catalogue import load_catalogue
from moet_desk.kernels.kinds import Activations
from moet_desk.kernels.layouts import ExpertLayout
from moet_desk.kernels.triton import experts, grouped, tile_table
from moet_desk.kernels.triton.tile_table import MANY_TOKENS, GroupedTile, Tile

Shape = tuple[int, int, int]  # hidden, inner width, experts per token
_T = TypeVar("_T", Tile, GroupedTile)

GATE_UP = tuple(Tile(*t) for t in ((4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8)))
DOWN = tuple(Tile(*t) for t in ((8, 1), (8, 2), (16, 2), (16, 4), (16, 8), (32, 4), (32, 8)))
GROUPED = tuple(
    GroupedTile(*t) for t in ((32, 4, 3), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 8, 3))
)
POOL_BYTES = 1 << 30  # far beyond L2
_COMPILE_SHARE = 0.55  # of the time
_GAIN = 0.98  # a tile must take less than this share of the rule's time
_EXPERTS, _TOKENS, _TOP_K = 8, 512, 4  # of a prompt's batch: 256 pairs for each expert


# -- what is tried -------------------------------------------------------------------------------


def shapes_of_catalogue() -> dict[Shape, list[str]]:
    """Expert shapes with the models that have them; the most experts per token count."""
    found: dict[tuple[int, int], tuple[int, list[str]]] = {}
    for entry in load_catalogue():
        top_k, names = found.get((entry.hidden, entry.inter), (0, []))
        found[entry.hidden, entry.inter] = max(top_k, entry.top_k), [*names, entry.name]
    return {(*widths, top_k): names for widths, (top_k, names) in found.items()}


def candidates(layout: ExpertLayout, rule: Tile, *, has_gate: bool) -> list[Tile]:
    """Tiles that divide the matrix, the rule's first."""
    height = layout.inter if has_gate else layout.hidden
    others = (tile for tile in (GATE_UP if has_gate else DOWN) if height % tile.rows == 0)
    return [rule, *(tile for tile in others if tile != rule)]


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

    def trials(self, pool_bytes: int) -> list[Trial]:
        if self.tokens:
            return decode_trials(self, pool_bytes)
        return grouped_trials(self)


def jobs_of(shapes: Iterable[Shape]) -> list[Job]:
    """All rows of some shapes; the shapes stay in order, so that a run cut short has whole ones."""
    return [
        Job(shape, fine, tokens)
        for shape in shapes
        for fine in (False, True)
        for tokens in (1, MANY_TOKENS, 0)
    ]


def decode_trials(job: Job, pool_bytes: int) -> list[Trial]:
    layers = moe.Layers(job.shape, job.tokens, fine=job.fine, pool_bytes=pool_bytes)
    rule = experts.tiles_for(layers.layout, fine=job.fine)
    return [
        Trial(
            "gate_up", experts._gate_up_kernel,
            candidates(layers.layout, rule.gate_up, has_gate=True),
            layers.hidden_codes, (layers.out_codes, layers.out_scales),
        ),
        Trial(
            "down", experts._down_kernel, candidates(layers.layout, rule.down, has_gate=False),
            layers.down, (layers.part,),
        ),
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
    drawn = torch.rand(tokens, _EXPERTS, device=DEVICE)
    ids = drawn.topk(_TOP_K).indices.sort(-1).values
    groups = grouped.group_pairs(ids, _EXPERTS)
    batch = grouped.make_batch(
        groups.counts.tolist(), range(_EXPERTS), device=DEVICE, pairs=grouped.FULL_PAIRS
    )
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
    tiles = [grouped_candidates(layout, wide=job.fine, has_gate=gate) for gate in (True, False)]
    return [
        Trial("gate_up", kernel, tiles[0], gate_up, (mid,)),
        Trial("down", kernel, tiles[1], down, (part,)),
    ]


# -- compiling, in processes of their own --------------------------------------------------------


def compiled(job: Job) -> dict[str, list[Any]]:
    """Launch every candidate once, so that its code lies in the cache, and name those that the
    limits let pass.
    """
    decode, found = job.tokens > 0, dict[str, list[Any]]()
    for trial in job.trials(pool_bytes=1):
        passed = []
        for tile in trial.tiles:
            try:
                trial.calls(tile)[0]()
                spilled = _spilled(trial.kernel) if decode else 0
            except Exception as problem:  # whatever a compiler or a driver refuses
                print(f"left out: {job} {trial.name} {tile}: {problem!r}"[:200], file=sys.stderr)
                continue
            if not spilled:
                passed.append(tile)
        found[trial.name] = passed
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return found


def _spilled(kernel: Any) -> int:
    """Registers that the kernel launched last keeps in memory."""
    newest = next(reversed(kernel.device_caches[torch.cuda.current_device()][0].values()))
    return int(newest.n_spills)


def compile_all(jobs: Sequence[Job], *, until: float) -> dict[Job, dict[str, list[Any]]]:
    """What passed of each job that was compiled in time."""
    context, found = multiprocessing.get_context("spawn"), dict[Job, dict[str, list[Any]]]()
    workers = max(1, min(len(os.sched_getaffinity(0)), 16, len(jobs)))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        pending = {pool.submit(compiled, job): job for job in jobs}
        done, late = wait(pending, timeout=max(0.0, until - time.monotonic()))
        for one in late:
            one.cancel()
        for one in done:
            if one.exception() is None:
                found[pending[one]] = one.result()
            else:
                print(f"left out: {pending[one]}: {one.exception()!r}", file=sys.stderr)
    return found


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
    hidden, inter, _ = job.shape
    kind = {"fine": job.fine, "tokens": job.tokens} if job.tokens else {"wide": job.fine}
    parts = [found["gate_up"], found["down"]]
    tiles = {name: _numbers(choice.tile) for name, choice in found.items()}
    us, rule_us = ([round(t, 2) for t in times] for times in _times(parts))
    return {"hidden": hidden, "inter": inter, **kind, **tiles, "us": us, "rule_us": rule_us}


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


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure tiles of the expert kernels.")
    parser.add_argument("--seconds", type=float, default=230.0)
    parser.add_argument("--shapes", nargs="*", default=[], help="models of the catalogue")
    parser.add_argument("--write", type=Path, default=tile_table.FILE)
    asked = parser.parse_args(arguments)
    began = time.monotonic()
    shapes = shapes_of_catalogue()
    chosen = [s for s, names in shapes.items() if not asked.shapes or {*names} & {*asked.shapes}]
    jobs = jobs_of(chosen)
    ready = compile_all(jobs, until=began + _COMPILE_SHARE * asked.seconds)
    print(f"{len(ready)} of {len(jobs)} compiled after {time.monotonic() - began:.0f} s")
    torch.manual_seed(0)
    rows = []
    for job in jobs:
        if job not in ready or time.monotonic() > began + asked.seconds - 5:
            print(f"not measured, the rule stays: {job}")
            continue
        trials = job.trials(POOL_BYTES)
        found = {t.name: measured(t, ready[job][t.name], per_call_us) for t in trials}
        rows.append(row_of(job, found))
        print(json.dumps(rows[-1]), flush=True)
        del trials
        torch.cuda.empty_cache()
    if not rows:
        print("nothing was measured", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    capability, card = tile_table.capability_of(device), torch.cuda.get_device_name(device)
    old = json.loads(asked.write.read_text()) if asked.write.is_file() else {"cards": {}}
    asked.write.write_text(written(merged(old, capability, card, rows)))
    print(f"{len(rows)} rows in {asked.write} after {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
