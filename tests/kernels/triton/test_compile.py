"""The gate over all kernels, in a process of its own: in this one they are interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gate__every_kernel__within_limits() -> None:
    """Some cases of each kernel for both cards; a change of kernels asks for all of them
    (`python -m tests.kernels.triton.gate`, all compilations).
    """
    rows = run_gate("--each", "3")
    assert len({str(row["kernel"]).split()[0] for row in rows}) > 25
    assert {row["capability"] for row in rows} == {90, 120}
    assert [row for row in rows if row["complaints"]] == []
