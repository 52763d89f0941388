"""Damage is mended from byte ranges of the hub's files, whatever the hub does meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moet_desk.errors import MoetError
from moet_desk.store import hub_repair
from moet_desk.store.fetch import Line
from moet_desk.store.hub_repair import repair_from_hub
from moet_desk.store.pack_format import PackProgress, Phase
from moet_desk.store.pack_verify import verify_pack
from moet_desk.store.sources import RawTensor, WeightFile
from tests.store.hub_server import Fault, HubServer, Repo
from tests.store.pulls import NAME, asked, line_to, planner, pull_all
from tests.store.tiny import Tiny, flip_bit, snapshot, write_source

TINY = Tiny(hidden=64, inter=64, n_experts=8, layers=(1, 2, 3))
STRIDE = 4096  # both rows of such an expert fit one page
ROW_SOURCE_BYTES = 3 * 64 * 64 * 2  # three matrices of bfloat16


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repair") / "origin"
    write_source(folder, TINY, "bf16", seed=3, shards=6, by_layer=True)
    return folder


@pytest.fixture
def hub(source: Path) -> Iterator[HubServer]:
    server = HubServer()
    server.repos[NAME] = Repo(source)
    yield server
    server.close()


@pytest.fixture(scope="module")
def pulled(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack that was pulled, and whose source was reclaimed."""
    server = HubServer()
    server.repos[NAME] = Repo(source)
    place = tmp_path_factory.mktemp("pulled")
    pull_all(asked(place, reclaim=True), line_to(server.url), planner(TINY, source))
    server.close()
    return place / "models" / "tiny"


@pytest.fixture
def pack(pulled: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pulled, tmp_path / "models" / "tiny")


def repair(pack: Path, line: Line, source: Path, **more: Any) -> int:
    work = pack.parent.parent / "sources" / ".repair-tiny"
    try:
        return repair_from_hub(pack, work, verify_pack(pack), line, planner(TINY, source), **more)
    finally:
        assert not work.exists()


def weights_sent(hub: HubServer) -> int:
    """Bytes of weights that were sent; headers come from the beginning of their files."""
    return sum(n for name, n in hub.sent.items() if name.endswith(".safetensors"))


def test_repair__two_rows__only_their_bytes_are_fetched(
    hub: HubServer, pack: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_repair, "_GAP_BYTES", 0)
    want = snapshot(pack)
    flip_bit(pack / "experts.base", 3 * STRIDE + 9)
    flip_bit(pack / "experts.fine", 20 * STRIDE)
    steps: list[PackProgress] = []
    assert repair(pack, line_to(hub.url), source, progress=steps.append) == 2
    assert snapshot(pack) == want
    fetched = [step for step in steps if step.phase is Phase.FETCH]
    assert fetched[-1].done == fetched[-1].total == 2 * ROW_SOURCE_BYTES
    spans = [wanted for path, wanted in hub.requests if path.endswith(".safetensors")]
    long = [end - start + 1 for start, end in map(_ends, spans) if start]
    assert sum(long) == 2 * ROW_SOURCE_BYTES
    assert weights_sent(hub) < sum(p.stat().st_size for p in source.glob("*.safetensors"))


def _ends(wanted: str) -> tuple[int, int]:
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    return int(first), int(last)


@pytest.mark.parametrize("name", ["dense.safetensors", "rows.b3", "tokenizer.json", "config.json"])
def test_repair__whole_files__as_they_were(
    hub: HubServer, pack: Path, source: Path, name: str
) -> None:
    want = snapshot(pack)
    flip_bit(pack / name, (pack / name).stat().st_size // 2)
    assert repair(pack, line_to(hub.url), source) == 1
    assert snapshot(pack) == want


def test_repair__no_right_digests__everything_is_made_again(
    hub: HubServer, pack: Path, source: Path
) -> None:
    want = snapshot(pack)
    flip_bit(pack / "experts.base", 0)
    (pack / "rows.b3").unlink()
    assert repair(pack, line_to(hub.url), source) == 2
    assert snapshot(pack) == want


@pytest.mark.parametrize("kind", ["drop", "whole", "429", "500", "truncated", "slow", "other"])
def test_repair__hub_fails_in_passing__goes_on(
    hub: HubServer, pack: Path, source: Path, kind: str
) -> None:
    want = snapshot(pack)
    flip_bit(pack / "experts.base", 3 * STRIDE)
    hub.faults = lambda path, n: Fault(kind, at=5000, seconds=0.001) if n % 2 else None
    repair(pack, line_to(hub.url), source)
    assert snapshot(pack) == want


def test_repair__wrong_bytes_once__fetched_again(hub: HubServer, pack: Path, source: Path) -> None:
    want = snapshot(pack)
    flip_bit(pack / "experts.base", 3 * STRIDE)
    left = [1]

    def choose(path: str, n: int) -> Fault | None:
        is_first = path.endswith(".safetensors") and hub.requests[-1][1].startswith("bytes=0-")
        if not path.endswith(".safetensors") or is_first or not left[0]:
            return None
        left[0] -= 1
        return Fault("wrong", at=3)

    hub.faults = choose
    repair(pack, line_to(hub.url), source)
    assert left == [0]
    assert snapshot(pack) == want


def test_repair__bytes_stay_wrong__said_and_nothing_is_worse(
    hub: HubServer, pack: Path, source: Path
) -> None:
    flip_bit(pack / "experts.base", 3 * STRIDE)
    before = snapshot(pack)

    def choose(path: str, n: int) -> Fault | None:
        is_first = hub.requests[-1][1].startswith("bytes=0-")
        is_weights = path.endswith(".safetensors")
        return Fault("wrong", at=3) if is_weights and not is_first else None

    hub.faults = choose
    with pytest.raises(MoetError, match="MD-PACK-10"):
        repair(pack, line_to(hub.url), source)
    assert snapshot(pack) == before


def test_repair__other_files_on_the_hub__refused(
    hub: HubServer, pack: Path, source: Path, tmp_path: Path
) -> None:
    flip_bit(pack / "experts.base", 0)
    write_source(tmp_path / "other", TINY, "bf16", seed=4, shards=6, by_layer=True)
    hub.repos[NAME] = Repo(tmp_path / "other")
    with pytest.raises(MoetError, match="MD-HUB-03"):
        repair(pack, line_to(hub.url), source)
    hub.repos[NAME] = Repo(source, gated=True, token="x")
    with pytest.raises(MoetError, match="MD-HUB-02"):
        repair(pack, line_to(hub.url), source)


def test_repair__no_origin__nothing_to_repair_from(
    hub: HubServer, pack: Path, source: Path
) -> None:
    flip_bit(pack / "experts.base", 0)
    (pack / "origin.json").unlink()
    with pytest.raises(MoetError, match="MD-PACK-11"):
        repair(pack, line_to(hub.url), source)
    assert not hub.requests


def test_span__tensor_of_all_experts__the_part_of_one() -> None:
    home = WeightFile(Path("x"))
    raw = RawTensor("w", "U8", (4, 2, 10), Path("x"), 100, 80, home)
    assert hub_repair._span(raw, 2) == range(140, 160)
    assert hub_repair._span(raw, None) == range(100, 180)


def test_joined__near_parts_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_repair, "_GAP_BYTES", 5)
    parts = [range(30, 40), range(0, 10), range(15, 20), range(2, 4), range(26, 28)]
    assert hub_repair._joined(parts) == (range(20), range(26, 40))
