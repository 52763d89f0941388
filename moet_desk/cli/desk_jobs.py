"""The jobs of the app as its screens show them. UI thread; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moet_desk.store.jobs import Job
from moet_desk.ui.desk import JobState, JobStep, JobView

_NAMES = {"pack": "Pack", "verify": "Verify"}


@dataclass(slots=True)
class _Kept:
    """A job, how to start it again, and what it has said so far."""

    id: str
    kind: str
    model: str
    arguments: tuple[str, ...]
    job: Job
    paused: bool = False
    steps: dict[str, JobStep] = field(default_factory=dict)


class AppJobs:
    """Starts jobs and turns their events into records."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._kept: dict[str, _Kept] = {}

    def start(self, kind: str, model: str, arguments: Sequence[str]) -> str:
        """Begin a job, or take up the one of the same kind and model."""
        job_id = f"{kind}-{model}"
        kept = self._kept.get(job_id)
        if kept is not None and not kept.job.finished:
            return job_id
        self._kept[job_id] = _Kept(
            job_id, kind, model, tuple(arguments), self._run(job_id, arguments)
        )
        return job_id

    def _run(self, job_id: str, arguments: Sequence[str]) -> Job:
        command = ["--data-dir", str(self._data_dir), *arguments]
        return Job(command, self._data_dir / "jobs" / f"{job_id}.ndjson")

    def views(self) -> tuple[JobView, ...]:
        """All jobs, with what they said since the last call."""
        return tuple(self._view(kept) for kept in self._kept.values())

    def _view(self, kept: _Kept) -> JobView:
        for event in kept.job.poll():
            step = step_of(event)
            if step is not None:
                kept.steps[step.name] = step
        state, error = JobState.RUNNING, None
        if kept.paused:
            state = JobState.PAUSED
        elif kept.job.finished:
            error = kept.job.error
            state = JobState.DONE if error is None else JobState.FAILED
        steps = tuple(kept.steps.values())
        return JobView(kept.id, kept.kind, kept.model, state, steps, error)

    def pause(self, job_id: str) -> None:
        """Stop the process; finished rows are kept."""
        kept = self._kept[job_id]
        kept.paused = True
        kept.job.cancel()

    def resume(self, job_id: str) -> None:
        """Start the same command again; it goes on where it stopped."""
        kept = self._kept[job_id]
        kept.paused = False
        kept.job = self._run(job_id, kept.arguments)

    def cancel(self, job_id: str) -> None:
        """Stop and forget."""
        kept = self._kept.pop(job_id)
        if not kept.job.finished:
            kept.job.cancel()


def step_of(event: Mapping[str, Any]) -> JobStep | None:
    """The step that an event of `pack` or `verify` tells of, None for other events."""
    name = _NAMES.get(str(event.get("event")))
    if name is None or not isinstance(event.get("total"), int):
        return None
    done, total = int(event["done"]), int(event["total"])
    unit = "experts" if event.get("unit") == "rows" else str(event.get("unit"))
    rate = event.get("rate_bytes_per_s")
    n_bytes = event.get("bytes")
    if unit == "experts" and rate and n_bytes:
        rate = rate * done / n_bytes
    return JobStep(name, done, total, unit, rate, finished=done >= total > 0)
