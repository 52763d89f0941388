"""The jobs of this computer as the app's screens show them.

The job store knows what they are and finds them whoever started them; this module turns their
events into steps with bars. Pausing and cancelling wait for the process to end, so they get threads
of their own; what goes wrong there is shown with the job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moet_desk.errors import MoetError
from moet_desk.store.jobs import JobState, JobStore
from moet_desk.store.jobs import JobView as Found
from moet_desk.ui import desk
from moet_desk.ui.desk import JobStep, JobView
from moet_desk.units import show_duration

LOOK_S = 0.5
"""Every look reads the ends of files; four a second beside a model that writes are too many."""

_STATES = {
    JobState.RUNNING: desk.JobState.RUNNING,
    JobState.STALLED: desk.JobState.STALLED,
    JobState.PAUSED: desk.JobState.PAUSED,
    JobState.FAILED: desk.JobState.FAILED,
    JobState.DONE: desk.JobState.DONE,
}
_STOPPED_BY_YOU = ("MD-PULL-01", "MD-PACK-06")
"""What a job says that was asked to stop: no error worth a panel."""

_STEPS = {
    "pull": (("Download", "download"), ("Dense", "dense"), ("Pack", "pack")),
    "pack": (("Dense", "dense"), ("Pack", "pack")),
    "verify": (("Verify", "verify"),),
    "repair": (("Verify", "verify"), ("Fetch", "fetch"), ("Repair", "repair")),
}
_MOST = 2**62  # bytes or rows, of anything
_WAITING = {"Dense": "weights that are no experts", "Pack": "begins when files are there"}


class AppJobs:
    """The job store for one thread of screens."""

    def __init__(self, jobs_dir: Path) -> None:
        self._store = JobStore(jobs_dir)
        self._troubles: dict[str, MoetError] = {}
        self._busy: dict[str, threading.Thread] = {}
        self._found: list[Found] = []
        self._due_s = 0.0

    def start(self, kind: str, model: str, arguments: Sequence[str]) -> str:
        """Begin a job, or take up the one of the same kind and model."""
        self._store.start(kind, model, arguments)
        self._due_s = 0.0
        return f"{kind}-{model}"

    def views(self) -> tuple[JobView, ...]:
        """All jobs as they were at most `LOOK_S` ago."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + LOOK_S
            self._found = self._all()
        return tuple(view_of(found, self._troubles.get(found.record.id)) for found in self._found)

    def _all(self) -> list[Found]:
        return self._store.jobs()

    def forget_done(self, *, but: str | None) -> None:
        """Drop jobs that ended well before this window was opened, but for the wizard's own."""
        for found in self._all():
            if found.state is JobState.DONE and found.record.id != but:
                self.cancel(found.record.id)

    def pause(self, job_id: str) -> None:
        """Stop the process; what is finished is kept."""
        self._later(job_id, lambda: self._store.pause(job_id))

    def resume(self, job_id: str) -> None:
        """Start the same command again; it goes on where it stopped."""
        self._troubles.pop(job_id, None)
        self._store.resume(job_id)
        self._due_s = 0.0

    def cancel(self, job_id: str) -> None:
        """Stop it and forget it."""
        self._later(job_id, lambda: self._store.cancel(job_id))

    def _later(self, job_id: str, act: Callable[[], object]) -> None:
        def run() -> None:
            try:
                act()
            except MoetError as error:
                self._troubles[job_id] = error

        if job_id in self._busy and self._busy[job_id].is_alive():
            return  # it is being stopped already
        self._troubles.pop(job_id, None)
        self._busy[job_id] = threading.Thread(target=run, name="stop-job", daemon=True)
        self._busy[job_id].start()


def view_of(found: Found, trouble: MoetError | None = None) -> JobView:
    """A job of the store as the screens show it."""
    record, state = found.record, _STATES[found.state]
    error = trouble or found.reason
    if error is not None and error.code in _STOPPED_BY_YOU:
        error = None
    words: tuple[str, ...] = ()
    if found.state is JobState.STALLED:
        words = (f"It has said nothing for {show_duration(found.silent_s)}.",)
    done = found.state is JobState.DONE
    steps = steps_of(record.kind, found.latest, is_done=done)
    return JobView(record.id, record.kind, record.model, state, steps, error, words)


def steps_of(
    kind: str, latest: Mapping[str, Mapping[str, Any]], *, is_done: bool
) -> tuple[JobStep, ...]:
    """The steps of a job, from the newest event of each kind."""
    wanted = _STEPS.get(kind, ())
    steps = [_step(name, latest.get(event), is_done=is_done) for name, event in wanted]
    for at, step in enumerate(steps):  # a later step begins when an earlier one is over
        later = any(other.total for other in steps[at + 1 :])
        if later and not step.total and step.name == "Dense":
            steps[at] = JobStep(step.name, finished=True)
    return tuple(steps)


def _step(name: str, event: Mapping[str, Any] | None, *, is_done: bool) -> JobStep:
    if is_done:
        return JobStep(name, finished=True)
    if event is None:
        return JobStep(name, note=_WAITING.get(name, ""))
    unit = str(event.get("unit", "bytes"))
    done, total = _number(event, "done"), _number(event, "total")
    if "done_bytes" in event:
        done, total, unit = _number(event, "done_bytes"), _number(event, "total_bytes"), "bytes"
    rate: float | None = _number(event, "rate_bytes_per_s") or None
    if unit == "rows":
        unit, n_bytes = "experts", _number(event, "bytes")
        rate = rate * done / n_bytes if rate and n_bytes else None
    finished = done >= total > 0
    note = _note(event, finished=finished)
    return JobStep(name, int(done), int(total), unit, rate, finished, note=note)


def _number(event: Mapping[str, Any], name: str) -> float:
    """A figure of an event; 0 for what is none: a line may be torn, or of another version."""
    value = event.get(name)
    return value if isinstance(value, int | float) and 0 <= value <= _MOST else 0


def _note(event: Mapping[str, Any], *, finished: bool) -> str:
    if event.get("trouble"):
        return str(event["trouble"])
    if event.get("files") and not finished:
        return f"{event.get('files_done', '?')} of {event['files']} files"
    return ""
