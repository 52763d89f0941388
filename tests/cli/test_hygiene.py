"""What a start costs: forbidden imports in a fresh interpreter, and the time of `--version`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import environment

HEAVY = {"torch", "triton", "numpy", "transformers", "tokenizers", "safetensors"}
DESK = Path(__file__).resolve().parents[1] / "data" / "machines" / "5090-96gb.json"
HUB = {"huggingface_hub", "httpx2"}
FRONT_ENDS = {"textual", "starlette", "uvicorn"}


def loaded_by(module: str, tmp_path: Path) -> set[str]:
    """Top-level names in `sys.modules` after importing `module` in a new process."""
    code = f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment(tmp_path),
    )
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("moet_desk.__main__", HEAVY | FRONT_ENDS | HUB | {"msgspec", "platformdirs", "tomlkit"}),
        ("moet_desk.cli.models", HEAVY | FRONT_ENDS | HUB | {"msgspec"}),
        ("moet_desk.cli.plan", HEAVY | FRONT_ENDS | {"msgspec"}),
        ("moet_desk.cli.doctor", HEAVY | FRONT_ENDS | {"msgspec"}),
        ("moet_desk.engine.planning", HEAVY | FRONT_ENDS),
        ("moet_desk.probing", HEAVY | FRONT_ENDS),
        ("moet_desk.catalogue", HEAVY | FRONT_ENDS),
        ("moet_desk.cli.desk", HEAVY | FRONT_ENDS | HUB),
        ("moet_desk.cli.desk_sources", HEAVY | FRONT_ENDS | HUB),
        ("moet_desk.cli.settings", HEAVY | FRONT_ENDS | {"msgspec"}),
        ("moet_desk.cli.pull", HEAVY | FRONT_ENDS | HUB | {"msgspec"}),
        ("moet_desk.cli.jobs", HEAVY | FRONT_ENDS | HUB | {"msgspec"}),
        ("moet_desk.store.pull_state", HEAVY | FRONT_ENDS | HUB),
        ("moet_desk.cli.run", HEAVY | FRONT_ENDS | HUB),
        ("moet_desk.cli.serve", HEAVY | FRONT_ENDS),
        ("moet_desk.cli.bench", HEAVY | FRONT_ENDS),
        ("moet_desk.cli.evaluate", HEAVY | FRONT_ENDS),
        ("moet_desk.cli.calibrate", HEAVY | FRONT_ENDS),
        ("moet_desk.engine.gate_file", HEAVY | FRONT_ENDS),
        ("moet_desk.cli.app", HEAVY | FRONT_ENDS),
        ("moet_desk.config", HEAVY | FRONT_ENDS | {"tomlkit"}),
        ("moet_desk.engine.handle", HEAVY | FRONT_ENDS),
        ("moet_desk.engine.parsers.formats", HEAVY | FRONT_ENDS),
        ("moet_desk.store.library", HEAVY | FRONT_ENDS | HUB),
        ("moet_desk.store.jobs", HEAVY | FRONT_ENDS | HUB),
        ("moet_desk.api.server", HEAVY | {"textual", "openai"}),
        ("moet_desk.ui.app", HEAVY | {"starlette", "uvicorn"}),
    ],
)
def test_import__in_a_fresh_interpreter__loads_nothing_heavy(
    module: str, forbidden: set[str], tmp_path: Path
) -> None:
    assert loaded_by(module, tmp_path) & forbidden == set()


def best_time_s(arguments: list[str], tmp_path: Path) -> float:
    times = []
    for _ in range(5):  # others run beside
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            env=environment(tmp_path),
        )
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize(
    ("arguments", "limit_s", "times_click"),
    [
        (["--version"], 0.2, 2.5),
        (["config", "list"], 0.4, 6),
        (["ls"], 0.4, 6),
        (["plan", "deepseek-v3.1", "--machine", str(DESK), "--device", "auto"], 0.4, 8),
        (["ls", "--available", "--machine", str(DESK)], 0.4, 8),
        (["doctor"], 2.0, 12),
    ],
)
def test_cold_start__within_budget(
    arguments: list[str], limit_s: float, times_click: float, tmp_path: Path
) -> None:
    took_s = best_time_s(["-m", "moet_desk", *arguments], tmp_path)
    if took_s >= limit_s:
        # On a slow or busy machine the limit grows with what python and click alone take.
        click_s = best_time_s(["-c", "import click"], tmp_path)
        assert took_s < click_s * times_click
