"""Fetching from a hub on localhost and packing meanwhile, with everything that can go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moet_desk.store.pack_verify import verify_pack
from moet_desk.store.pack_writer import write_pack
from tests.store.hub_server import HubServer, Repo
from tests.store.pulls import BUDGET, NAME, asked, line_to, pack_bytes, planner, pull_all
from tests.store.tiny import Tiny, plan_of, write_source

TINY = Tiny(hidden=64, inter=64, n_experts=8, layers=(1, 2, 3))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    write_source(folder, TINY, "bf16", seed=3, shards=6, by_layer=True)
    return folder


@pytest.fixture
def clean(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """What packing the whole folder gives."""
    write_pack(source, plan_of(TINY, source), tmp_path / "clean", memory_budget=BUDGET)
    return pack_bytes(tmp_path / "clean")


@pytest.fixture
def hub(source: Path) -> Iterator[HubServer]:
    server = HubServer()
    server.repos[NAME] = Repo(source)
    yield server
    server.close()


@pytest.fixture
def make(source: Path) -> Any:
    return planner(TINY, source)


@pytest.mark.parametrize("reclaim", [False, True])
@pytest.mark.parametrize("redirect", [False, True])
def test_pull__clean_run__same_pack_as_from_the_folder(
    hub: HubServer,
    tmp_path: Path,
    make: Any,
    clean: dict[str, bytes],
    reclaim: bool,
    redirect: bool,
) -> None:
    hub.redirect = redirect
    wanted = asked(tmp_path, reclaim=reclaim)
    pull_all(wanted, line_to(hub.url), make)
    assert pack_bytes(wanted.dest) == clean
    assert verify_pack(wanted.dest).ok
    assert wanted.work.exists() is not reclaim
