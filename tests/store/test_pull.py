"""Fetching from a hub on localhost and packing meanwhile, with everything that can go wrong."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from moet_desk.errors import JobPaused, MoetError, fail
from moet_desk.store import fetch
from moet_desk.store.durable import pack_lock
from moet_desk.store.fetch import Limiter, Line, Patience, Stopped
from moet_desk.store.hub import Hub, Passing
from moet_desk.store.pack_verify import verify_pack
from moet_desk.store.pack_writer import write_pack
from moet_desk.store.pull import pull
from moet_desk.store.pull_prepare import prepare
from tests.faults import Refusal, refused
from tests.store.hub_server import BLOCK, Fault, HubServer, Repo
from tests.store.pulls import (
    BUDGET,
    NAME,
    QUICK,
    asked,
    line_to,
    pack_bytes,
    planner,
    pull_all,
    ready,
)
from tests.store.tiny import Tiny, plan_of, snapshot, write_source

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


# -- what goes wrong on the line ---------------------------------------------------------------

PASSING = ["drop", "truncated", "stall", "wrong", "whole", "other", "500", "503", "429", "slow"]


@pytest.mark.parametrize("kind", PASSING)
def test_pull__fault_in_every_third_answer__same_pack_in_one_run(
    hub: HubServer, tmp_path: Path, make: Any, clean: dict[str, bytes], kind: str
) -> None:
    fault = Fault(kind, at=20_000, seconds=1.0 if kind == "stall" else 0.05)
    hub.faults = lambda path, n: fault if n % 3 == 0 else None
    wanted = asked(tmp_path, reclaim=True)
    patient = Patience(attempts=6, first_s=0.01, longest_s=0.05, obeyed_s=2.0, fetches=8)
    pull_all(wanted, line_to(hub.url, patience=patient), make)
    assert pack_bytes(wanted.dest) == clean


def test_pull__connection_drops__only_the_rest_is_fetched_again(
    hub: HubServer, tmp_path: Path, make: Any, source: Path
) -> None:
    name = "model-00003.safetensors"
    dropped = []

    def drop_once(path: str, n: int) -> Fault | None:
        if path.endswith(name) and not dropped and not hub.requests[-1][1].endswith("65535"):
            dropped.append(n)
            return Fault("drop", at=3 * BLOCK)
        return None

    hub.faults = drop_once
    pull_all(asked(tmp_path), line_to(hub.url), make)
    ranges = [wanted for path, wanted in hub.requests if path.endswith(name)]
    assert dropped
    size = (source / name).stat().st_size
    header = min(size, 65536)
    assert hub.sent[name] <= size + header + BLOCK
    assert any(wanted not in ("bytes=0-", f"bytes=0-{header - 1}") for wanted in ranges)


def test_pull__hub_stays_away__pauses_with_the_reason_and_goes_on(
    hub: HubServer, tmp_path: Path, make: Any, clean: dict[str, bytes]
) -> None:
    hub.faults = lambda path, n: Fault("500") if "resolve" in path and n > 12 else None
    wanted = asked(tmp_path)
    with pytest.raises(JobPaused) as caught:
        pull_all(wanted, line_to(hub.url), make)
    assert caught.value.code == "MD-NET-02"
    assert caught.value.facts["attempts"] == QUICK.attempts
    assert "500" in caught.value.cause
    hub.faults = lambda path, n: None
    before = dict(hub.sent)
    pull_all(wanted, line_to(hub.url), make)
    assert pack_bytes(wanted.dest) == clean
    whole = {name for name in before if (wanted.work / name).is_file()}
    again = {name for name in whole if hub.sent[name] > 2 * (wanted.work / name).stat().st_size}
    assert not again


def test_pull__no_server__network_error(tmp_path: Path, make: Any) -> None:
    with pytest.raises(JobPaused) as caught:
        pull_all(asked(tmp_path), line_to("http://127.0.0.1:9"), make)
    assert caught.value.code == "MD-NET-01"


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(("socket",), errno.EMFILE),
        Refusal(("connect",), errno.ENETUNREACH),
        Refusal(("recvfrom",), errno.ECONNRESET),
        Refusal(("recvfrom",), errno.ETIMEDOUT),
    ],
    ids=str,
)
def test_pull__no_way_through_the_network__pauses_then_goes_on(
    refusal: Refusal, hub: HubServer, tmp_path: Path, make: Any
) -> None:
    wanted = asked(tmp_path)
    with pytest.raises(JobPaused) as caught:
        refused(refusal, lambda: pull_all(wanted, line_to(hub.url), make))
    assert caught.value.code == "MD-NET-01"
    assert os.strerror(refusal.number) in caught.value.cause
    pull_all(wanted, line_to(hub.url), make)
    assert verify_pack(wanted.dest).ok


def test_pull__retry_after_beyond_patience__pauses_at_once(
    hub: HubServer, tmp_path: Path, make: Any
) -> None:
    hub.faults = lambda path, n: Fault("429", seconds=3600)
    with pytest.raises(JobPaused) as caught:
        pull_all(asked(tmp_path), line_to(hub.url), make)
    assert (caught.value.code, len(hub.requests)) == ("MD-NET-02", 1)
    assert "3600 s" in caught.value.cause


def test_pull__bytes_stay_wrong__named_and_only_that_file_again(
    hub: HubServer, tmp_path: Path, make: Any, clean: dict[str, bytes]
) -> None:
    name = "model-00004.safetensors"

    def spoil(path: str, n: int) -> Fault | None:
        is_it = path.endswith(name) and hub.requests[-1][1] == "bytes=0-"
        return Fault("wrong", at=70_000) if is_it else None

    hub.faults = spoil
    wanted = asked(tmp_path, parallel=1)
    with pytest.raises(JobPaused) as caught:
        pull_all(wanted, line_to(hub.url), make)
    assert (caught.value.code, caught.value.facts["file"]) == ("MD-PACK-02", name)
    hub.faults = lambda path, n: None
    before = dict(hub.sent)
    pull_all(wanted, line_to(hub.url), make)
    assert pack_bytes(wanted.dest) == clean
    assert hub.sent["model-00001.safetensors"] == before["model-00001.safetensors"]


# -- who may see it, and which revision --------------------------------------------------------


@pytest.mark.parametrize(
    ("repo", "code"),
    [
        ({"gated": True}, "MD-HUB-02"),
        ({"token": "secret"}, "MD-HUB-01"),
        ({"branch": "other"}, "MD-HUB-01"),
    ],
)
def test_pull__not_allowed_or_not_there__says_what_to_do(
    hub: HubServer, source: Path, tmp_path: Path, make: Any, repo: dict[str, Any], code: str
) -> None:
    hub.repos[NAME] = Repo(source, **repo)
    with pytest.raises(MoetError) as caught:
        pull_all(asked(tmp_path, revision="main"), line_to(hub.url), make)
    assert caught.value.code == code
    assert not (tmp_path / "models").exists()


def test_pull__signed_in__token_goes_to_the_hub_and_nowhere_else(
    hub: HubServer, source: Path, tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.repos[NAME] = Repo(source, gated=True, token="secret")
    hub.redirect = True
    pull_all(asked(tmp_path), line_to(hub.url), make)
    seen = {(h["host"].split(":")[0], h.get("authorization")) for h in hub.headers_seen}
    assert seen == {("127.0.0.1", "Bearer secret"), ("localhost", None)}


def test_pull__what_is_sent__is_what_the_privacy_page_says(
    hub: HubServer, tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    pull_all(asked(tmp_path), line_to(hub.url), make)
    assert {path.split("/")[1] for path, _ in hub.requests} == {"api", "maker"}
    assert {path for path, _ in hub.requests if path.startswith("/api/")} == {f"/api/models/{NAME}"}
    agents = {headers["user-agent"] for headers in hub.headers_seen}
    words = {part.split("/")[0].strip() for agent in agents for part in agent.split(";")}
    assert words == {"moet-desk", "hf_hub", "python"}


def test_pull__branch_moves_meanwhile__pinned_commit_is_kept_and_said(
    hub: HubServer, source: Path, tmp_path: Path, make: Any, clean: dict[str, bytes]
) -> None:
    wanted = asked(tmp_path)
    first = ready(wanted, line_to(hub.url), make)
    assert first.moved == ""
    newer = tmp_path / "newer"
    shutil.copytree(source, newer)
    (newer / "tokenizer.json").write_text('{"version": "2.0"}')
    hub.repos[NAME] = Repo(newer, commit="d" * 40, older={"c" * 40: source})
    again = ready(wanted, line_to(hub.url), make)
    assert again.moved == "d" * 40
    pull(again, line_to(hub.url), memory_budget=BUDGET)
    assert pack_bytes(wanted.dest) == clean


def test_pull__pinned_commit_is_gone__refused(
    hub: HubServer, source: Path, tmp_path: Path, make: Any
) -> None:
    wanted = asked(tmp_path)
    first = ready(wanted, line_to(hub.url), make)
    hub.repos[NAME] = Repo(source, commit="d" * 40)
    with pytest.raises(MoetError) as caught:
        pull(first, line_to(hub.url), memory_budget=BUDGET)
    assert caught.value.code == "MD-HUB-03"
    assert "cccc" in caught.value.cause


def test_pull__another_revision_asked__equal_files_are_not_fetched_again(
    hub: HubServer, source: Path, tmp_path: Path, make: Any
) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(source, newer)
    (newer / "tokenizer.json").write_text('{"version": "2.0"}')
    wanted = asked(tmp_path)
    hub.repos[NAME] = Repo(newer, commit="d" * 40, older={"c" * 40: source})
    old = dataclasses.replace(wanted, revision="c" * 40)
    pull_all(old, line_to(hub.url), make)
    shutil.rmtree(wanted.dest)
    before = dict(hub.sent)
    pull_all(wanted, line_to(hub.url), make)
    assert (wanted.dest / "tokenizer.json").read_bytes() == b'{"version": "2.0"}'
    weights = [name for name in before if name.startswith("model-")]
    # at most the headers again
    assert all(hub.sent[name] - before[name] <= 65536 for name in weights)


def test_pull__pack_is_there__nothing_is_fetched(
    hub: HubServer, tmp_path: Path, make: Any, source: Path
) -> None:
    wanted = asked(tmp_path, reclaim=True)
    pull_all(wanted, line_to(hub.url), make)
    n_requests = len(hub.requests)
    whole = snapshot(wanted.dest)
    left = [wanted.dest / name for name in ("journal", "lock", "x.partial")]
    for path in left:  # as of a process that was killed behind its last step
        path.write_bytes(b"")
    with pack_lock(wanted.dest):  # another one is at it: all stays
        assert prepare(wanted, line_to(hub.url), make) is None
        assert all(path.exists() for path in left)
    left[1].write_bytes(b"")
    assert prepare(wanted, line_to(hub.url), make) is None
    assert len(hub.requests) == n_requests + 2
    assert snapshot(wanted.dest) == whole
    other = tmp_path / "other"
    write_source(other, TINY, "bf16", seed=4, shards=6, by_layer=True)
    hub.repos["maker/other"] = Repo(other)
    with pytest.raises(MoetError, match="MD-PACK-08"):
        prepare(dataclasses.replace(wanted, repo="maker/other"), line_to(hub.url), make)
    hub.repos[NAME] = Repo(other)
    with pytest.raises(MoetError, match="MD-PACK-08"):
        prepare(wanted, line_to(hub.url), make)


def test_prepare__model_that_cannot_be_packed__no_weights_are_fetched(
    hub: HubServer, tmp_path: Path, source: Path
) -> None:
    smaller = Tiny(hidden=64, inter=64, n_experts=8, layers=(1, 2))
    other = tmp_path / "smaller"
    write_source(other, smaller, "bf16", shards=2)
    with pytest.raises(MoetError, match="MD-SRC-08"):
        prepare(asked(tmp_path), line_to(hub.url), planner(smaller, other))
    for path in source.glob("*.safetensors"):
        assert hub.sent[path.name] <= 2 * 65536 + BLOCK


def test_pull__file_in_the_librarys_cache__is_used_and_kept(
    hub: HubServer,
    tmp_path: Path,
    make: Any,
    source: Path,
    clean: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "model-00002.safetensors"
    monkeypatch.setattr(
        Hub, "cached", lambda self, listing, wanted: source / name if wanted == name else None
    )
    wanted = asked(tmp_path, reclaim=True)
    pull_all(wanted, line_to(hub.url), make)
    assert pack_bytes(wanted.dest) == clean
    assert (source / name).is_file()
    assert hub.sent[name] <= 65536 + BLOCK


# -- limits ------------------------------------------------------------------------------------


def test_pull__bandwidth_limit__is_kept(
    hub: HubServer, tmp_path: Path, make: Any, source: Path
) -> None:
    n_bytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    rate = n_bytes / 1.5
    began = time.monotonic()
    pull_all(asked(tmp_path), line_to(hub.url, rate=rate), make)
    assert time.monotonic() - began > 1.4


def test_limiter__after_a_pause__no_burst() -> None:
    now = [0.0]
    limiter = Limiter(100.0, now=lambda: now[0])
    assert limiter.delay_s(50) == 0.5
    now[0] = 3600.0
    assert limiter.delay_s(100) == 1.0
    assert limiter.delay_s(100) == 2.0


@pytest.mark.parametrize("parallel", [1, 2])
def test_pull__reclaim__disk_holds_the_pack_and_a_few_shards(
    hub: HubServer, tmp_path: Path, make: Any, source: Path, parallel: int
) -> None:
    wanted = asked(tmp_path, reclaim=True, parallel=parallel)
    largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
    n_shards = len(list(source.glob("*.safetensors")))
    peaks: list[int] = []

    def measure(step: object = None) -> None:
        there = [path for path in wanted.work.glob("model-*") if "index" not in path.name]
        peaks.append(sum(path.stat().st_size for path in there))
        assert len(there) <= parallel + 1
        maps = Path("/proc/self/maps").read_text().splitlines()
        assert not any(str(wanted.work) in line and "(deleted)" in line for line in maps)

    prepared = ready(wanted, line_to(hub.url), make)
    pull(prepared, line_to(hub.url), memory_budget=BUDGET, report=measure)
    window = (parallel + 1) * largest
    assert 0 < max(peaks) <= window < n_shards * largest
    assert prepared.figures.peak <= prepared.figures.pack + window + 65536


def test_pull__experts_over_all_shards__bound_is_said_before(
    hub: HubServer, tmp_path: Path, source: Path
) -> None:
    spread = tmp_path / "spread"
    write_source(spread, TINY, "bf16", seed=3, shards=6)
    hub.repos[NAME] = Repo(spread)
    wanted = asked(tmp_path, reclaim=True)
    make = planner(TINY, spread)
    prepared = ready(wanted, line_to(hub.url), make)
    held = sum(path.stat().st_size for path in spread.glob("model-*.safetensors"))
    assert prepared.figures.peak > prepared.figures.pack + held * 0.8
    pull(prepared, line_to(hub.url), memory_budget=BUDGET)
    write_pack(spread, plan_of(TINY, spread), tmp_path / "clean", memory_budget=BUDGET)
    assert pack_bytes(wanted.dest) == pack_bytes(tmp_path / "clean")


def test_pull__too_little_disk__refused_with_figures_before_weights(
    hub: HubServer, tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = asked(tmp_path)
    prepared = ready(wanted, line_to(hub.url), make)
    before = dict(hub.sent)
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([*real[:4], 9, *real[5:]]))
    with pytest.raises(MoetError) as caught:
        pull(prepared, line_to(hub.url), memory_budget=BUDGET)
    assert caught.value.code == "MD-DISK-01"
    assert caught.value.facts["need_bytes"] == prepared.figures.need
    assert hub.sent == before
    assert not wanted.dest.exists()
    needed = prepared.figures.need
    assert (
        ready(dataclasses.replace(wanted, reclaim=True), line_to(hub.url), make).figures.need
        < needed
    )


# -- stopped, full, damaged --------------------------------------------------------------------


def test_pull__stopped_at_any_step__goes_on(
    hub: HubServer, tmp_path: Path, make: Any, clean: dict[str, bytes]
) -> None:
    wanted = asked(tmp_path, reclaim=True)
    rng = random.Random(7)
    paused: list[str] = []
    while len(paused) < 80:
        left = rng.randrange(1, 30)

        def stop() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        try:
            pull_all(wanted, line_to(hub.url, rate=4e6), make, stop=stop)
            break
        except JobPaused as error:
            paused.append(error.code)
    assert set(paused) == {"MD-PULL-01"}
    assert len(paused) > 3
    assert pack_bytes(wanted.dest) == clean


def test_pull__shard_on_disk_was_cut__fetched_again_alone(
    hub: HubServer, tmp_path: Path, make: Any, clean: dict[str, bytes]
) -> None:
    wanted = asked(tmp_path)
    pull_all(wanted, line_to(hub.url), make)
    shutil.rmtree(wanted.dest)
    name = "model-00005.safetensors"
    data = (wanted.work / name).read_bytes()
    (wanted.work / name).write_bytes(data[:-1])
    before = dict(hub.sent)
    pull_all(wanted, line_to(hub.url), make)
    assert pack_bytes(wanted.dest) == clean
    again = {n for n in before if hub.sent[n] > before[n]}
    assert again == {name}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_pull__disk_full_at_any_write__pauses_and_goes_on(
    hub: HubServer,
    tmp_path: Path,
    make: Any,
    clean: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    real = os.pwrite
    rng = random.Random(code)
    left = [10]

    def pwrite(fd: int, data: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    wanted = asked(tmp_path, reclaim=True)
    codes: list[str] = []
    while len(codes) < 200:
        left[0] = rng.randrange(3, 25)
        try:
            pull_all(wanted, line_to(hub.url), make)
            break
        except JobPaused as error:
            codes.append(error.code)
    assert set(codes) == {"MD-DISK-02"}
    assert len(codes) > 3
    assert pack_bytes(wanted.dest) == clean


def test_pull__file_cannot_take_its_name__kept_and_nothing_fetched_again(
    hub: HubServer,
    tmp_path: Path,
    make: Any,
    clean: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if self.name.endswith(".safetensors.part"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(self, target)

    wanted = asked(tmp_path, parallel=1)
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(MoetError) as caught:
        pull_all(wanted, line_to(hub.url), make)
    assert caught.value.code == "MD-DISK-03"
    monkeypatch.setattr(Path, "replace", real)
    name = "model-00001.safetensors"
    before = hub.sent[name]
    pull_all(wanted, line_to(hub.url), make)
    assert hub.sent[name] == before
    assert pack_bytes(wanted.dest) == clean


def test_pull__shard_is_deleted__only_when_nothing_made_from_it_is_unsynced(
    hub: HubServer, tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = asked(tmp_path, reclaim=True, parallel=1)
    real_write, real_unlink = os.pwrite, Path.unlink
    real_sync = {name: getattr(os, name) for name in ("fsync", "fdatasync")}
    dirty: set[str] = set()
    journalled: list[int] = []
    deleted: list[tuple[str, set[str], int]] = []

    def pwrite(fd: int, data: Any, offset: int) -> int:
        name = Path(f"/proc/self/fd/{fd}").readlink()
        if name.parent == wanted.dest:
            dirty.add(name.name)
            if name.name == "journal":
                journalled.append(len(data))
        return real_write(fd, data, offset)

    def sync(kind: str) -> Any:
        def call(fd: int) -> None:
            real_sync[kind](fd)
            dirty.discard(Path(f"/proc/self/fd/{fd}").readlink().name)

        return call

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self.parent == wanted.work and self.suffix == ".safetensors" and self.exists():
            deleted.append((self.name, set(dirty), len(journalled)))
        real_unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fsync", sync("fsync"))
    monkeypatch.setattr(os, "fdatasync", sync("fdatasync"))
    monkeypatch.setattr(Path, "unlink", unlink)
    pull_all(wanted, line_to(hub.url), make)
    names = [name for name, _, _ in deleted]
    assert names == sorted(names)
    assert len(names) == 6
    assert all(unsynced <= {"lock"} for _, unsynced, _ in deleted)
    records = [n_records for _, _, n_records in deleted]
    assert records == sorted(records)
    assert records[0] > 0


# -- patience ----------------------------------------------------------------------------------


def failing(line: Line, times: int) -> Any:
    left = [times]

    def work() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise Passing(fail("MD-NET-01", host="h", reason="r"))
        return "done"

    return work


def test_patience__failures_without_progress__give_up() -> None:
    line = line_to("http://127.0.0.1:9")
    assert line.patiently(failing(line, QUICK.attempts - 1)) == "done"
    with pytest.raises(JobPaused, match="MD-NET-01"):
        line.patiently(failing(line, QUICK.attempts))
    assert line.retries == 2 * QUICK.attempts - 1


def test_patience__progress_or_a_sleep_between__counts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = line_to("http://127.0.0.1:9")
    n_bytes = iter(range(1000))
    assert line.patiently(failing(line, 3 * QUICK.attempts), lambda: next(n_bytes)) == "done"
    slept = iter(range(0, 100_000, 3600))
    monkeypatch.setattr(fetch, "_slept_s", lambda: next(slept))
    assert line.patiently(failing(line, 2 * QUICK.attempts)) == "done"


def test_patience__asked_to_stop__at_once() -> None:
    line = line_to("http://127.0.0.1:9", patience=Patience(first_s=60))
    threading.Timer(0.2, line.stop.set).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        line.patiently(failing(line, 5))
    assert time.monotonic() - began < 20
