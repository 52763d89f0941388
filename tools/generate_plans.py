"""Write tests/data/plans: what the planner says for every recorded machine and known model.

    python tools/generate_plans.py           write the pages
    python tools/generate_plans.py --check   compare only; exit 1 with the difference

The pages are for reading: a change of the planner, the forecast or the catalogue shows there as a
difference that a person can judge. Only the records in tests/data/machines go in, so the same code
gives the same bytes on every computer.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from moet_desk.cli.available import FIT_HEAD, fit_answers, fit_row
from moet_desk.cli.doctor import describe
from moet_desk.engine.handle import EngineOptions
from moet_desk.engine.planning import ModelPlan, Refusal
from moet_desk.machine import MachineFacts, from_json
from moet_desk.units import show_memory

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
MACHINES, PLANS = DATA / "machines", DATA / "plans"

_TIERS = [
    "Model", "dense", "context", "work", "chunk", "2-bit pool", "FP4 set", "= where it computes",
    "2-bit rows", "FP4 rows", "= RAM rows", "drive only",
]  # fmt: skip


def page(facts: MachineFacts) -> str:
    """The plans of all known models on one machine."""
    answers = fit_answers(facts, EngineOptions(device="auto"))
    lines = [f"{name:<8}  {value}" for name, value in describe(facts)]
    lines += ["", *_aligned([FIT_HEAD, *(fit_row(entry, answer) for entry, answer in answers)])]
    lines += ["", "GiB of every tier, of the nearest plan where the model's own does not fit:", ""]
    tiers = [_TIERS]
    refused = []
    for entry, answer in answers:
        plan = answer.nearest if isinstance(answer, Refusal) else answer
        if isinstance(answer, Refusal):
            refused.append(f"{entry.name}: {answer.error.cause} ({answer.error.code})")
        if plan is not None:
            tiers.append([entry.name, *_sizes(plan)])
    lines += _aligned(tiers)
    if refused:
        lines += ["", "Refused as they are:", "", *refused]
    return "\n".join([*lines, ""])


def _sizes(plan: ModelPlan) -> list[str]:
    sizes = plan.bytes
    budget = plan.budget.vram if plan.gpu is not None else plan.budget.ram
    parts = [sizes.dense, sizes.kv, sizes.work, sizes.chunk, sizes.base_slots, sizes.fine_slots]
    return [
        *map(_gib, parts),
        f"{_gib(sizes.compute)} of {show_memory(budget)}",
        _gib(sizes.arena_base),
        _gib(sizes.arena_fine),
        f"{_gib(sizes.arena)} of {show_memory(plan.budget.ram)}",
        _gib(sizes.nvme_only),
    ]


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def pages() -> dict[Path, str]:
    """Every page by where it belongs."""
    records = sorted(MACHINES.glob("*.json"))
    return {
        PLANS / f"{record.stem}.txt": page(from_json(record.read_bytes())) for record in records
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare; 1 if something differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args(arguments).check
    differs = False
    for path, text in pages().items():
        old = path.read_text("utf-8") if path.exists() else ""
        if old == text:
            continue
        differs = True
        if check:
            names = (f"{path.name} in the tree", f"{path.name} by the code")
            lines = difflib.unified_diff(old.splitlines(), text.splitlines(), *names, lineterm="")
            sys.stdout.write("\n".join(lines) + "\n")
        else:
            path.write_text(text, "utf-8")
            print(f"written: {path}")
    return int(check and differs)


if __name__ == "__main__":
    sys.exit(main())
