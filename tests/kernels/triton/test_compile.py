"""The gate over all kernels, in a process of its own: in this one they are interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.early_access import early_arguments

ROOT = Path(__file__).resolve().parents[3]


def run_gate(*parts: str) -> list[dict[str, object]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.gate", *parts]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_gate__one_kernel__compiles_for_both_cards() -> None:
    rows = run_gate("experts_gate_up 2bit H=512 I=128 T=1")
    assert [row["capability"] for row in rows] == [90, 120]
    assert all(row["complaints"] == [] for row in rows), rows


def test_gate__launched_early__touches_weights_alone_before_it_waits() -> None:
    rows = run_gate("pdl gemv fp8 4096x4096 T=1", "pdl add_rms_norm", "pdl combine")
    assert len(rows) == 6
    assert all(row["complaints"] == [] for row in rows), rows


PTX = """.entry f(
.param .u64 .ptr f_param_0, .param .u64 f_param_1
)
{
 ld.param.b64 %rd1, [f_param_0];
 ld.param.b64 %rd2, [f_param_1];
 mul.wide.u32 %rd3, %r1, 4;
 add.s64 %rd4, %rd1, %rd3;
 // begin inline asm
 @%p1 ld.global.v2.b32 { %r2, %r3 }, [ %rd4 + 0 ];
 // end inline asm
 EXTRA
 griddepcontrol.wait; // dummy %r5
 ld.global.b32 %r6, [%rd2];
 ret;
}"""


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ("", ["weight"]),
        ("add.s64 %rd5, %rd2, %rd3; ld.global.b32 %r7, [%rd5];", ["weight", "x"]),
        ("prefetch.global.L2 [%rd2];", ["weight", "x"]),
        ("st.global.b32 [%rd9], %r7;", ["weight", "?"]),
    ],
)
def test_early_arguments__some_accesses__named(extra: str, found: list[str]) -> None:
    assert early_arguments(PTX.replace("EXTRA", extra), ["weight", "x"]) == found


@pytest.mark.parametrize("extra", ["@%p1 bra $L1;", "griddepcontrol.wait;", "@%p1"])
def test_early_arguments__not_one_wait_of_all_threads__refused(extra: str) -> None:
    with pytest.raises(ValueError, match="wait"):
        early_arguments(PTX.replace("EXTRA", extra), ["weight", "x"])


@pytest.mark.slow
def test_gate__every_kernel__within_limits() -> None:
    rows = run_gate()
    assert len(rows) > 20
    assert [row for row in rows if row["complaints"]] == []
