"""Whole downloads under seeded schedules of faults, stops and kill -9; and a disk that is full.

Each must end in a pack with the bytes of one that was packed from the folder in peace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moet_desk.errors import JobPaused, MoetError
from moet_desk.store.pack_verify import verify_pack
from moet_desk.store.pack_writer import write_pack
from moet_desk.store.pull import pull
from tests.store.hub_server import Fault, HubServer, Repo
from tests.store.pulls import BUDGET, NAME, asked, line_to, pack_bytes, planner, pull_all, ready
from tests.store.tiny import Tiny, plan_of, write_source

ROOT = Path(__file__).resolve().parents[2]
TINY = Tiny(hidden=64, inter=64, n_experts=8, layers=(1, 2, 3))
KINDS = [
    "drop",
    "drop",
    "truncated",
    "stall",
    "wrong",
    "whole",
    "other",
    "500",
    "503",
    "429",
    "slow",
]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    server = HubServer()
    yield server
    server.close()


def random_faults(seed: int) -> Any:
    """A third of all answers go wrong; every tenth fault begins a spell of 500s."""
    rng, lock, spell = random.Random(seed), threading.Lock(), [0]

    def choose(path: str, number: int) -> Fault | None:
        with lock:
            if spell[0] > 0:
                spell[0] -= 1
                return Fault("500")
            if rng.random() > 0.3:
                return None
            if rng.random() < 0.1:
                spell[0] = rng.randrange(5, 25)
            kind = rng.choice(KINDS)
            seconds = 0.8 if kind == "stall" else 0.02
            return Fault(kind, at=rng.randrange(200_000), seconds=seconds)

    return choose


def run_schedules(hub: HubServer, tmp_path: Path, seeds: range, kind: str) -> list[dict[str, Any]]:
    source = tmp_path / "origin"
    write_source(source, TINY, kind, seed=3, shards=6, by_layer=True)
    (tmp_path / "tiny.json").write_text(json.dumps(dataclasses.asdict(TINY)))
    write_pack(source, plan_of(TINY, source), tmp_path / "clean", memory_budget=BUDGET)
    clean = pack_bytes(tmp_path / "clean")
    hub.repos[NAME] = Repo(source)
    hub.faults = random_faults(seeds[0])
    command = [sys.executable, "-m", "tests.store.pull_driver", hub.url, str(source)]
    command += [str(tmp_path / "work"), *map(str, seeds)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert ran.returncode == 0, ran.stderr
    ended = [json.loads(line) for line in ran.stdout.splitlines()]
    for seed in seeds:
        made = tmp_path / "work" / str(seed) / "models" / "tiny"
        assert ended[seeds.index(seed)]["whole"] == 1, f"{ended}\n{ran.stderr}"  # not cut short
        assert pack_bytes(made) == clean
        assert verify_pack(made).ok
    return ended


def test_pull__a_few_fault_schedules_with_kills__same_pack(hub: HubServer, tmp_path: Path) -> None:
    ended = run_schedules(hub, tmp_path, range(4), "bf16")
    assert sum(run["killed"] for run in ended) > 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("first", "kind"), [(100, "bf16"), (200, "mxfp4")])
def test_pull__fault_schedules_with_kills__same_pack(
    hub: HubServer, tmp_path: Path, first: int, kind: str
) -> None:
    ended = run_schedules(hub, tmp_path, range(first, first + 25), kind)
    assert sum(run["killed"] for run in ended) >= 10
    assert sum(run["paused"] for run in ended) >= 5


# -- a file system that is really full ---------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB of our own."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_pull__real_disk_full__pauses_and_goes_on_when_there_is_room(
    hub: HubServer, tmp_path: Path, small_disk: Path
) -> None:
    source = tmp_path / "origin"
    write_source(source, TINY, "bf16", seed=3, shards=6, by_layer=True)
    write_pack(source, plan_of(TINY, source), tmp_path / "clean", memory_budget=BUDGET)
    hub.repos[NAME] = Repo(source)
    make = planner(TINY, source)
    wanted = asked(small_disk, reclaim=True)
    prepared = ready(wanted, line_to(hub.url), make)
    other = small_disk / "somebody-elses"
    filled = threading.Event()

    def fill(step: object) -> None:
        """Another program takes the disk while the download runs."""
        if not filled.is_set():
            filled.set()
            with contextlib.suppress(OSError), other.open("wb", buffering=0) as out:
                while True:
                    out.write(bytes(64 * 1024))

    with pytest.raises(JobPaused) as caught:
        pull(prepared, line_to(hub.url), memory_budget=BUDGET, report=fill)
    assert caught.value.code == "MD-DISK-02"
    with pytest.raises(MoetError, match="MD-DISK"):  # still full: refused with figures or paused
        pull_all(wanted, line_to(hub.url), make)
    other.unlink()
    pull_all(wanted, line_to(hub.url), make)
    assert pack_bytes(wanted.dest) == pack_bytes(tmp_path / "clean")
