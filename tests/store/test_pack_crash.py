"""A packer that is killed at any moment, resumed, gives the bytes of one that never was."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.store.tiny import Tiny, write_source

ROOT = Path(__file__).resolve().parents[2]


def drive(mode: str, tiny: Tiny, tmp_path: Path, *more: str) -> Any:
    source = tmp_path / "source"
    write_source(source, tiny, seed=5)
    (source / "tiny.json").write_text(json.dumps(dataclasses.asdict(tiny)))
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-m", "tests.store.crash_driver", mode, str(source)]
    command += [str(tmp_path / "work"), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_write_pack__killed_at_20_random_points__resumes_to_identical_bytes(
    tmp_path: Path,
) -> None:
    tiny = Tiny(hidden=32, inter=32, n_experts=64, layers=tuple(range(1, 9)))
    seen = drive("kill", tiny, tmp_path, "20")
    assert len(seen["kept"]) == 20
    assert len(set(seen["kept"])) > 5  # the moments differ
    assert any(0 < kept < 512 for kept in seen["kept"])
    assert seen["equal"] == seen["finished"] >= 1
    assert "journal" not in seen["files"]
    assert "lock" not in seen["files"]


def test_write_pack__power_cut_at_every_disk_operation__resumes_to_identical_bytes(
    tmp_path: Path,
) -> None:
    seen = drive("cut", Tiny(hidden=32, inter=32, n_experts=5, layers=(1, 2)), tmp_path)
    assert seen["crashes"] > 40
    assert seen["equal"] == seen["crashes"]
