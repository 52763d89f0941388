"""Tiny checkpoints on a local hub, and what it takes to pull them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

from moet_desk.store.fetch import Limiter, Line, Patience
from moet_desk.store.hub import Hub
from moet_desk.store.pack_format import ORIGIN_FILE, PackMeta, PackPlan
from moet_desk.store.pull import pull
from moet_desk.store.pull_prepare import Asked, Prepared, prepare
from tests.store.tiny import Tiny, plan_of, snapshot

NAME = "maker/tiny"
QUICK = Patience(attempts=6, first_s=0.01, longest_s=0.05, obeyed_s=2.0)
BUDGET = 550_000  # a few rows to a batch


def line_to(url: str, *, rate: float | None = None, patience: Patience = QUICK) -> Line:
    timeout = httpx2.Timeout(5.0, read=0.5)
    return Line(Hub(url, timeout=timeout), patience, Limiter(rate))


def asked(tmp_path: Path, **more: Any) -> Asked:
    options: dict[str, Any] = {
        "repo": NAME,
        "revision": "",
        "work": tmp_path / "sources" / "tiny",
        "dest": tmp_path / "models" / "tiny",
    }
    wanted = Asked(**{**options, **more})
    wanted.work.mkdir(parents=True, exist_ok=True)
    return wanted


def planner(tiny: Tiny, source: Path) -> Any:
    """A family that knows one model: the one in `source`."""
    plan = plan_of(tiny, source)

    def make(config: Mapping[str, Any], path: str, names: object) -> PackPlan:
        assert config["model_type"] == "tiny"
        return dataclasses.replace(plan)

    return make


def ready(wanted: Asked, line: Any, make: Any) -> Prepared:
    prepared = prepare(wanted, line, make)
    assert prepared is not None
    return prepared


def pull_all(wanted: Asked, line: Any, make: Any, **more: Any) -> PackMeta:
    options: dict[str, Any] = {"memory_budget": BUDGET, **more}
    return pull(ready(wanted, line, make), line, **options)


def pack_bytes(folder: Path) -> dict[str, bytes]:
    """The files of a pack; where it came from is no part of what it is."""
    return {name: data for name, data in snapshot(folder).items() if name != ORIGIN_FILE}
