"""pull, ps and jobs against a hub on localhost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moet_desk.cli import pull as pull_command
from moet_desk.errors import ExitCode
from moet_desk.store.hub import Hub
from tests.cli.conftest import Command, HubOf, environment
from tests.store.deepseek import write_deepseek
from tests.store.hub_server import Fault, HubServer, Repo

NAME = "maker/tiny"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    write_deepseek(folder)
    return folder


@pytest.fixture
def hub(source: Path, hub_of: HubOf) -> HubServer:
    return hub_of(NAME, source)


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "origin.json"}


def test_pull__from_the_hub__usable_like_a_packed_folder(
    hub: HubServer, moet: Command, data_dir: Path, source: Path
) -> None:
    result = moet("pull", NAME, "--yes", "--format", "ndjson")
    assert result.code == 0, result.err
    events = result.events
    assert [event["event"] for event in events if event["event"] in ("plan", "pulled")] == [
        "plan",
        "pulled",
    ]
    plan = events[0]
    assert (plan["family"], plan["experts"], plan["files"]) == ("deepseek_v3", 24, 5)
    assert plan["peak_bytes"] > plan["pack_bytes"] > 0
    assert plan["fits"] is True
    packs = [event for event in events if event["event"] == "pack"]
    assert packs[-1]["done"] == packs[-1]["total"] == 24
    assert moet("pack", str(source), "--name", "twin").code == 0
    models = data_dir / "models"
    assert files_of(models / "tiny") == files_of(models / "twin")
    assert moet("verify", "tiny").code == 0
    assert moet("ls", "--json").document["models"][0]["state"] == "ready"
    again = moet("pull", NAME, "--json")
    assert (again.code, again.document["state"]) == (0, "ready")
    assert "already" in again.err


def test_pull__damaged_row__repaired_from_the_download(
    hub: HubServer, moet: Command, data_dir: Path
) -> None:
    moet("pull", NAME, "--yes")
    rows = data_dir / "models" / "tiny" / "experts.base"
    good = rows.read_bytes()
    rows.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert moet("verify", "tiny", "--json").code == ExitCode.DAMAGED
    assert moet("verify", "tiny", "--repair", "--json").document["repaired"] == 1
    assert rows.read_bytes() == good


def test_pull__reclaimed_and_damaged__repaired_from_the_hub(
    hub: HubServer, moet: Command, data_dir: Path, source: Path
) -> None:
    moet("pull", NAME, "--yes", "--reclaim")
    assert not (data_dir / "sources" / "tiny").exists()
    rows = data_dir / "models" / "tiny" / "experts.fine"
    good = rows.read_bytes()
    rows.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    events = moet("verify", "tiny", "--repair", "--format", "ndjson").events
    assert events[-1] == events[-1] | {"event": "verified", "repaired": 1}
    fetched = [event for event in events if event["event"] == "fetch"]
    assert fetched[-1]["done"] == fetched[-1]["total"] < 100_000
    assert rows.read_bytes() == good
    assert list((data_dir / "sources").iterdir()) == []


def test_rm__pulled_model__download_goes_too(hub: HubServer, moet: Command, data_dir: Path) -> None:
    moet("pull", NAME, "--yes")
    source = data_dir / "sources" / "tiny"
    (source / "mine.txt").write_text("keep")
    n_bytes = (data_dir / "models" / "tiny" / "experts.base").stat().st_size
    freed = moet("rm", "tiny", "--yes", "--json").document["freed_bytes"]
    assert freed > 2 * n_bytes
    assert [path.name for path in source.iterdir()] == ["mine.txt"]
    assert not (data_dir / "models" / "tiny").exists()
    assert moet("rm", "tiny", "--yes", "--json").error_code == "MD-LIB-01"


def test_pull__dry_run__figures_and_no_trace(
    hub: HubServer, moet: Command, data_dir: Path, source: Path
) -> None:
    seen = moet("pull", NAME, "--dry-run", "--json").document
    n_bytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert n_bytes < seen["download_bytes"] < n_bytes + 100_000
    assert seen["left_bytes"] == n_bytes
    assert seen["has_tokenizer"] is True
    rolling = moet("pull", NAME, "--dry-run", "--reclaim", "--json").document
    assert rolling["peak_bytes"] < seen["peak_bytes"]
    assert list((data_dir / "sources").iterdir()) == []
    assert not (data_dir / "models").exists()


@pytest.mark.parametrize(
    ("covered", "options", "code"),
    [
        (10**9, ["--yes"], None),
        (1000, ["--yes"], "MD-PULL-02"),
        (10**9, [], "MD-PULL-02"),
        (1000, ["--yes-really"], None),
    ],
)
def test_pull__consent__large_ones_need_their_own_word(
    hub: HubServer,
    moet: Command,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    covered: int,
    options: list[str],
    code: str | None,
) -> None:
    assert pull_command.YES_COVERS_BYTES == 10 * 10**9
    monkeypatch.setattr(pull_command, "YES_COVERS_BYTES", covered)
    result = moet("pull", NAME, *options, "--json")
    if code is None:
        assert result.code == 0, result.err
        return
    assert (result.code, result.error_code) == (ExitCode.USAGE, code)
    word = "--yes-really" if covered == 1000 else "--yes"
    assert word in result.document["error"]["do"]
    assert list((data_dir / "sources").iterdir()) == []


@pytest.mark.parametrize(
    ("repo", "code", "exit_code"),
    [
        ({"gated": True}, "MD-HUB-02", ExitCode.NETWORK),
        ({"token": "x"}, "MD-HUB-01", ExitCode.NOT_FOUND),
    ],
)
def test_pull__refused_by_the_hub__exit_code(
    hub: HubServer, moet: Command, source: Path, repo: dict[str, Any], code: str, exit_code: int
) -> None:
    hub.repos[NAME] = Repo(source, **repo)
    result = moet("pull", NAME, "--yes", "--json")
    assert (result.code, result.error_code) == (exit_code, code)


def test_pull__not_a_name__not_found(moet: Command) -> None:
    assert moet("pull", "no-such-folder", "--json").error_code == "MD-SRC-01"
    assert moet("pull", "a/b", "--name", "../x", "--json").error_code == "MD-CFG-03"


def test_pull__disk_too_small__exit_code_and_figures(
    hub: HubServer, moet: Command, monkeypatch: pytest.MonkeyPatch, data_dir: Path
) -> None:
    real = os.statvfs("/")
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([*real[:4], 100, *real[5:]]))
    result = moet("pull", NAME, "--yes-really", "--json")
    assert (result.code, result.error_code) == (ExitCode.NO_ROOM, "MD-DISK-01")
    error = result.document["error"]
    assert error["need_bytes"] > error["have_bytes"] == 100 * real.f_frsize
    assert list((data_dir / "sources").iterdir()) == []


def test_pull__folder__packed_where_it_is(moet: Command, source: Path, data_dir: Path) -> None:
    assert moet("pull", str(source), "--yes", "--json").document["state"] == "ready"
    assert not (data_dir / "sources").exists()
    refused = moet("pull", str(source), "--reclaim", "--json")
    assert refused.code == ExitCode.USAGE  # a person's own files are never deleted
    again = moet("pull", str(source), "--json")  # nothing is left to be agreed to
    assert (again.code, again.document["state"]) == (0, "ready")


def test_pull__folder__dry_run_says_the_sizes_and_writes_nothing(
    moet: Command, source: Path, data_dir: Path
) -> None:
    dry = moet("pull", str(source), "--dry-run", "--json")
    seen = dry.document
    assert not data_dir.exists()
    assert seen["source_bytes"] == sum(p.stat().st_size for p in source.glob("*.safetensors"))
    assert seen["free_bytes"] > seen["peak_bytes"] == seen["pack_bytes"] == seen["left_bytes"]
    assert "are free" in dry.err
    assert moet("pull", str(source), "--yes", "--format", "ndjson").events[0]["event"] == "plan"
    pack = data_dir / "models" / source.name
    for field, name in (("base", "base"), ("fine", "fine")):
        assert seen[f"{field}_bytes"] == (pack / f"experts.{name}").stat().st_size
    n_bytes = sum(path.stat().st_size for path in pack.iterdir())
    assert abs(n_bytes - seen["pack_bytes"]) < 20_000  # pack.json, and the header of dense
    assert moet("pull", str(source), "--dry-run", "--json").document["left_bytes"] == 0


@pytest.mark.parametrize(("covered", "options"), [(10**9, []), (1000, ["--yes"])])
def test_pull__folder__large_ones_need_their_own_word(
    moet: Command,
    source: Path,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    covered: int,
    options: list[str],
) -> None:
    monkeypatch.setattr(pull_command, "YES_COVERS_BYTES", covered)
    refused = moet("pull", str(source), *options, "--json")
    assert (refused.code, refused.error_code) == (ExitCode.USAGE, "MD-PULL-03")
    assert not data_dir.exists()


def test_pull__folder__no_room__figures(
    moet: Command, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs("/")
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([*real[:4], 100, *real[5:]]))
    result = moet("pull", str(source), "--dry-run", "--json")
    assert (result.code, result.error_code) == (ExitCode.NO_ROOM, "MD-DISK-01")


def test_pull__demo__its_own_name(moet: Command, data_dir: Path) -> None:
    seen = moet("pull", "demo", "--dry-run", "--json").document
    assert (seen["model"], seen["experts"]) == ("demo", 288)


def test_pull__snapshot_in_the_librarys_cache__named_as_the_model(
    moet: Command, source: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub" / "models--maker--small" / "snapshots" / ("c" * 40)
    blobs = tmp_path / "hub" / "models--maker--small" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(blobs / str(number))
    made = moet("pull", str(snapshot), "--yes", "--json").document
    assert (made["model"], made["state"]) == ("small", "ready")


def test_pull__sigterm__kept_and_resumed(
    hub: HubServer, data_dir: Path, moet: Command, source: Path
) -> None:
    command = [sys.executable, "-m", "moet_desk", "pull", NAME, "--yes", "--format", "ndjson"]
    command += ["--limit-rate", "200kB"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(data_dir), **pipes) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if json.loads(line)["event"] == "download":
                child.send_signal(signal.SIGTERM)
                break
        events = [json.loads(line) for line in child.stdout]
        assert child.wait(30) == ExitCode.TERMINATED
    assert events[-1]["error"]["code"] == "MD-PULL-01"
    (model,) = moet("ls", "--json").document["models"]
    assert model["state"] == "incomplete"
    assert moet("pull", NAME, "--yes").code == 0
    n_bytes = sum(path.stat().st_size for path in source.iterdir())
    assert sum(hub.sent.values()) < 2.5 * n_bytes  # headers twice at most, no file twice


# -- jobs ------------------------------------------------------------------------------------------


@pytest.fixture
def in_child(hub: HubServer, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(data_dir).items():
        monkeypatch.setenv(name, value)


def wait_for(moet: Command, what: Any, timeout_s: float = 60) -> dict[str, Any]:
    end = time.monotonic() + timeout_s
    while True:
        (job,) = moet("ps", "--json").document["jobs"]
        if what(job):
            return dict(job)
        assert time.monotonic() < end, job
        time.sleep(0.1)


def test_job__paused_resumed_killed_resumed__done(
    in_child: None, moet: Command, data_dir: Path, source: Path
) -> None:
    assert moet("ps").out == ""
    started = moet(
        *("pull", NAME, "--yes", "--reclaim", "--limit-rate", "20kB", "--background", "--json")
    )
    assert started.document["job"] == "pull-tiny"
    # it has just begun and holds no lock of the pack, which would let it begin anew afterwards
    assert moet("rm", "tiny", "--yes", "--json").error_code == "MD-PACK-09"
    running = wait_for(moet, lambda job: job["pid"] and job["total_bytes"])
    assert (running["state"], running["pid"]) == ("running", started.document["pid"])
    assert running["total_bytes"] > 0
    assert moet("jobs", "resume", "pull-tiny", "--json").error_code == "MD-JOB-02"

    os.kill(running["pid"], signal.SIGSTOP)
    assert wait_for(moet, lambda job: job["state"] == "stalled")["pid"] == running["pid"]
    paused = moet("jobs", "pause", "pull-tiny", "--json").document
    assert (paused["state"], paused["pid"]) == ("paused", None)
    assert paused["reason"]["code"] == "MD-PULL-01"
    assert "pull-tiny  paused" in moet("ps").out

    resumed = moet("jobs", "resume", "pull-tiny", "--json").document
    os.kill(resumed["pid"], signal.SIGKILL)
    os.waitpid(resumed["pid"], 0)
    killed = wait_for(moet, lambda job: job["pid"] is None)
    assert (killed["state"], killed["reason"]["code"]) == ("paused", "MD-JOB-03")

    record = data_dir / "jobs" / "pull-tiny.json"
    record.write_text(record.read_text().replace("20000", "100000000"))
    moet("jobs", "resume", "pull-tiny")
    done = wait_for(moet, lambda job: job["state"] == "done")
    assert done["reason"] is None
    pack_bytes = moet("show", "tiny", "--json").document["bytes"]
    assert (
        done["done_bytes"] == done["total_bytes"] > pack_bytes // 2
    )  # of the model, not of "finish"
    assert moet("verify", "tiny").code == 0
    assert not (data_dir / "sources" / "tiny").exists()
    assert moet("jobs", "pause", "pull-tiny", "--json").error_code == "MD-JOB-02"
    assert moet("jobs", "cancel", "pull-tiny", "--json").document["state"] == "canceled"
    assert moet("ps", "--json").document["jobs"] == []
    assert moet("jobs", "pause", "pull-tiny", "--json").error_code == "MD-JOB-01"
    assert moet("jobs", "cancel", "../x", "--json").code == ExitCode.NOT_FOUND


def test_job__hub_goes_away__paused_with_the_reason(
    in_child: None, hub: HubServer, moet: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert moet("pull", NAME, "--yes", "--background").code == 0
    hub.faults = lambda path, n: Fault("429", seconds=4000)
    paused = wait_for(moet, lambda job: job["pid"] is None)
    assert (paused["state"], paused["reason"]["code"]) == ("paused", "MD-NET-02")
    hub.faults = lambda path, n: None
    moet("jobs", "resume", "pull-tiny")
    wait_for(moet, lambda job: job["state"] == "done")


@pytest.mark.parametrize("address", ["huggingface.co", "ftp://hub.example", "https://"])
def test_pull__hub_is_no_address__said_at_once(
    moet: Command, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    result = moet("pull", NAME, "--yes", "--json")
    assert (result.code, result.error_code) == (ExitCode.USAGE, "MD-CFG-03")
    assert result.document["error"]["name"] == "HF_ENDPOINT"


def test_hub__variable_is_empty__the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "")
    assert Hub().host == "huggingface.co"
