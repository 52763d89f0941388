"""Gated DeltaNet at the shapes of Qwen3-Next and Qwen3.5, and gates of attention."""

from __future__ import annotations

from collections.abc import Iterator

from moet_desk.kernels.triton import delta, delta_chunk, gates
from tests.kernels.triton.gate import Case

EXACT = {"enable_fp_fusion": False}
ONE_STAGE = {"num_stages": 1}
RUNS = {"runs": "*i32", "runs_stride": "i32", "positions": "*i32"}
GATES = {
    "mixed": "*fp32", "beta_decay": "*fp32", "bd_stride": "i32", "rate": "*fp32",
    "dt_bias": "*fp32",
}  # fmt: skip
KEY_HEADS, WIDTH = 16, 128


def _sizes(values: int) -> dict[str, int]:
    return {"M": KEY_HEADS, "N": values, "DK": WIDTH, "DV": WIDTH}


def _conv(values: int, *, whole: bool) -> Case:
    types = {
        **RUNS, "joined": "*fp32", "joined_stride": "i32", "weight": "*fp32", "inputs": "*fp32",
        "out": "*fp32", "scale": "fp32", "eps": "fp32",
    }  # fmt: skip
    sizes = _sizes(values)
    del sizes["N"]
    constants = {
        **sizes, "C": (2 * KEY_HEADS + values) * WIDTH, "KERNEL": 4, "RING": delta.RING,
        "BLOCK": WIDTH, "WHOLE": whole,
    }  # fmt: skip
    name = f"delta_conv N={values}{' chunk' if whole else ''}"
    return Case(name, delta._conv_kernel, types, constants, 1, EXACT)


def _step(values: int) -> Case:
    types = {
        **RUNS, **GATES, "matrices": "*fp32", "keys": "*fp32", "deltas": "*fp32", "kept": "*fp32",
        "out": "*fp32",
    }  # fmt: skip
    constants = {
        **_sizes(values), "RING": delta.RING, "BK": WIDTH, "BV": delta._COLUMNS, "PTX": True,
    }  # fmt: skip
    return Case(f"delta_step N={values}", delta._delta_step_kernel, types, constants, 4, EXACT)


def _norm(values: int) -> Case:
    types = {
        "x": "*fp32", "gate": "*fp32", "gate_stride": "i32", "weight": "*fp32", "eps": "fp32",
    }  # fmt: skip
    constants = {"N": values, "D": WIDTH, "BLOCK": WIDTH}
    name = f"gated_norm N={values}"
    return Case(name, delta._gated_norm_kernel, types, constants, 1, EXACT)


def _gate(width: int, *, one: bool) -> Case:
    """Of the heads of a layer, or of the shared expert."""
    types = {
        "x": "*fp32", "x_stride": "i32", "gate": "*fp32", "gate_stride": "i32", "out": "*fp32",
        "out_stride": "i32",
    }  # fmt: skip
    constants: dict[str, object] = {"W": width, "BLOCK": 1024, "ONE": one}
    if one:
        types |= {"residual": "*fp32", "residual_stride": "i32"}
    else:
        constants |= {"residual": None, "residual_stride": 0}
    name = f"gate {width}{' of a row' if one else ''}"
    return Case(name, gates._gate_kernel, types, constants, 4, EXACT)


def _solve(values: int) -> Case:
    types = {
        **GATES, "changes": "*fp32", "reads": "*fp32", "seen": "*fp32", "passed_out": "*fp32",
        "R": "i32",
    }  # fmt: skip
    constants = {
        **_sizes(values), "T": delta_chunk.BLOCK, "BK": WIDTH, "BV": delta_chunk._COLUMNS,
        "MMA": True,
    }  # fmt: skip
    name, kernel = f"delta_solve N={values}", delta_chunk._solve_kernel
    return Case(name, kernel, types, constants, delta_chunk._WARPS, ONE_STAGE, decode=False)


def _scan(values: int) -> Case:
    types = {
        "mixed": "*fp32", "changes": "*fp32", "reads": "*fp32", "seen": "*fp32",
        "passed_in": "*fp32", "matrices": "*fp32", "R": "i32", "slot": "i32", "start": "i32",
    }  # fmt: skip
    constants = {
        **_sizes(values), "T": delta_chunk.BLOCK, "BK": WIDTH, "BV": delta_chunk._COLUMNS,
        "MMA": True,
    }  # fmt: skip
    name, kernel = f"delta_scan N={values}", delta_chunk._scan_kernel
    return Case(name, kernel, types, constants, delta_chunk._WARPS, ONE_STAGE, decode=False)


def _cases() -> Iterator[Case]:
    for values in (32, 64):  # of Qwen3-Next and the smaller Qwen3.5; of Qwen3.5-397B
        yield _conv(values, whole=False)
        yield _conv(values, whole=True)
        yield _step(values)
        yield _norm(values)
        yield _solve(values)
        yield _scan(values)
    yield _gate(4096, one=False)
    yield _gate(2048, one=True)


CASES = list(_cases())
