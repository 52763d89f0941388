from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moet_desk.store.jobs import Job, JobState, JobStore, start_pack
from moet_desk.store.library import Library, embedded_source
from tests.cli.conftest import Command, environment


def run_to_end(job: Job, timeout_s: float = 60) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    end = time.monotonic() + timeout_s
    while not job.finished:
        assert time.monotonic() < end
        events += job.poll()
        time.sleep(0.01)
    return events


@pytest.fixture(autouse=True)
def child_environment(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(data_dir).items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_cancelled__then_started_again__goes_on(data_dir: Path) -> None:
    job = start_pack(embedded_source(), "demo", data_dir)
    assert job.error is None
    while not any(event["event"] == "dense" for event in job.poll()):
        time.sleep(0.01)
        assert not job.finished
    job.cancel()
    run_to_end(job)
    assert job.error is not None
    assert job.error.code == "MD-PACK-06"
    assert job.error.facts["model"] == "demo"
    job.cancel()

    again = start_pack(embedded_source(), "demo", data_dir)
    events = run_to_end(again)
    assert again.error is None
    assert events[-1]["event"] == "packed"
    rows = [event for event in events if event["event"] == "pack"]
    assert rows[-1]["done"] == rows[-1]["total"] == 288
    assert not Library(data_dir / "models").needs_packing("demo")
    assert again.poll() == []


def test_window_dies__job_goes_on_and_the_next_window_waits_for_it(data_dir: Path) -> None:
    code = (
        "import os; from pathlib import Path; from moet_desk.store.jobs import start_pack;"
        "from moet_desk.store.library import embedded_source;"
        f"job = start_pack(embedded_source(), 'demo', Path({str(data_dir)!r}));"
        "print(job.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    parent = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(data_dir)
    )
    assert parent.returncode == -9
    lock = data_dir / "models" / "demo" / "lock"
    end = time.monotonic() + 20
    while not (lock.exists() and lock.read_text() == parent.stdout.strip()):
        assert time.monotonic() < end
        time.sleep(0.01)
    second = start_pack(embedded_source(), "demo", data_dir)
    events = run_to_end(second)
    assert second.error is None
    assert events[-1]["state"] == "ready"


@pytest.mark.parametrize("bad", ['"a"', "NaN", "[]", "true", "1e999"])
def test_ps__damaged_events__job_is_shown_without_figures(
    moet: Command, data_dir: Path, bad: str
) -> None:
    jobs = data_dir / "jobs"
    jobs.mkdir(parents=True)
    record = {"id": "pull-x", "kind": "pull", "model": "x", "arguments": []}
    (jobs / "pull-x.json").write_text(json.dumps(record))
    event = f'{{"event":"download","done_bytes":{bad},"total_bytes":{bad}}}'
    (jobs / "pull-x.ndjson").write_text(event + "\n")
    (job,) = moet("ps", "--json").document["jobs"]
    assert (job["state"], job["done_bytes"], job["total_bytes"]) == ("paused", None, None)
    assert "pull-x" in moet("ps").out


def test_wrong_arguments__error_from_the_catalogue(tmp_path: Path) -> None:
    job = Job(["pack", str(tmp_path / "nowhere")], tmp_path / "jobs" / "x.ndjson")
    assert run_to_end(job) == []
    assert job.error is not None
    assert job.error.code == "MD-SRC-01"
    assert str(tmp_path / "nowhere") in job.error.cause


def test_killed__says_how_it_ended(data_dir: Path, tmp_path: Path) -> None:
    """As Linux does when memory runs out."""
    job = start_pack(embedded_source(), "demo", data_dir)
    assert int(Path(f"/proc/{job.pid}/oom_score_adj").read_text()) >= 500  # before the window
    subprocess.run(["kill", "-9", str(job.pid)], check=True)
    run_to_end(job)
    assert job.error is not None
    assert job.error.code == "MD-JOB-03"
    assert "signal 9" in job.error.cause
    view = JobStore(data_dir / "jobs").find("pack-demo")
    assert view.state is JobState.PAUSED
    assert view.reason is not None
    assert view.reason.code == "MD-JOB-03"
    assert "jobs resume pack-demo" in view.reason.do


def test_crashed__says_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "pack-x.log").write_text("Fatal Python error: Bus error\n\n")
    (tmp_path / "jobs" / "pack-x.json").write_text(
        '{"id": "pack-x", "kind": "pack", "model": "x", "arguments": []}'
    )
    reason = JobStore(tmp_path / "jobs").find("pack-x").reason
    assert reason is not None
    assert reason.code == "MD-BUG-01"
    assert "Fatal Python error: Bus error" in reason.cause
