"""Compile every kernel for the cards we name, without a card, and check what it takes.

Run as `python -m tests.kernels.triton.gate [--write FILE] [--each N] [PART ...]` from the
repository's root; a PART selects cases by the beginning of their name. Prints one JSON line per
kernel and capability; exits with 1 if one breaks a limit. Kernels must not be interpreted in this
process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moet_desk.kernels.triton.compile import CompiledInfo, compile_for

CAPABILITIES = (90, 120)
MOST_SHARED_BYTES = {90: 227 * 1024, 120: 99 * 1024}
"""What one program can have on each card (design §13)."""

MODULES = (
    "cases_moe", "cases_dense", "cases_attention", "cases_indexer", "cases_delta", "cases_sampling",
    "cases_streams",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One kernel with the arguments that the engine uses.

    `decode` kernels must not spill; `wants` are beginnings of SASS opcodes that must occur;
    `fused` is how many multiply-adds may be fused where rounding is part of the contract; a tile
    made for one card is compiled for it `only`.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)
    decode: bool = True
    wants: tuple[str, ...] = ()
    fused: int | None = None
    only: int | None = None


def all_cases() -> Iterator[Case]:
    """The cases of every module that is there."""
    for name in MODULES:
        if (Path(__file__).parent / f"{name}.py").exists():
            yield from importlib.import_module(f"tests.kernels.triton.{name}").CASES


def spread(cases: Sequence[Case], each: int) -> list[Case]:
    """At most `each` cases of every kernel, from its first to its last."""
    by_kernel: dict[str, list[Case]] = {}
    for case in cases:
        by_kernel.setdefault(case.name.split()[0], []).append(case)
    chosen = []
    for own in by_kernel.values():
        places = {round(i * (len(own) - 1) / max(1, each - 1)) for i in range(each)}
        chosen += [own[place] for place in sorted(places)]
    return chosen


def compile_case(case: Case, capability: int) -> CompiledInfo:
    return compile_for(
        case.kernel,
        case.signature,
        constexprs=case.constexprs,
        capability=capability,
        num_warps=case.num_warps,
        **case.options,
    )


def complaints(case: Case, info: CompiledInfo, capability: int) -> list[str]:
    """What is wrong with a compiled kernel; empty if nothing."""
    found = [f"no {opcode}" for opcode in case.wants if not info.count(opcode)]
    if case.decode and info.stack_bytes:
        found.append(f"{info.stack_bytes} bytes spilled")
    if case.fused is not None and info.fused_adds > case.fused:
        found.append(f"{info.fused_adds} multiply-adds fused")
    if info.shared_bytes > MOST_SHARED_BYTES[capability]:
        found.append(f"{info.shared_bytes} bytes of shared memory")
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compile every kernel and check its limits.")
    parser.add_argument("--write", type=Path, help="also write the table to this JSON file")
    parser.add_argument("--each", type=int, help="at most so many cases of a kernel")
    parser.add_argument("parts", nargs="*", help="beginnings of case names; default all")
    args = parser.parse_args(arguments)
    rows = []
    cases = list(all_cases())
    for case in cases if args.each is None else spread(cases, args.each):
        if args.parts and not case.name.startswith(tuple(args.parts)):
            continue
        for capability in CAPABILITIES if case.only is None else (case.only,):
            info = compile_case(case, capability)
            row = {
                "kernel": case.name,
                "capability": capability,
                "num_warps": case.num_warps,
                "registers": info.registers,
                "stack_bytes": info.stack_bytes,
                "shared_bytes": info.shared_bytes,
                "wants": {opcode: info.count(opcode) for opcode in case.wants},
                "complaints": complaints(case, info, capability),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.write:
        args.write.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["complaints"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
