"""Long work as child processes of our own command line, found again by whoever comes later.

Owns the children and the jobs folder. A child runs in a session of its own and prints its events to
a file, so it survives the window that started it and never blocks on a reader. It holds a lock for
as long as it lives; everything else about its state is read from its events. So nothing has to be
written when it dies, and a later window finds it running, paused or failed, whatever happened.
Nothing here blocks but `pause` and `cancel`. One thread at a time per job; imports no torch.

    ID.json what was started · ID.ndjson its events · ID.log its words · ID.lock held while it runs
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from moet_desk.errors import MoetError, Reaction, fail, from_record
from moet_desk.store.durable import disk_errors, replace_file

STALLED_S = 30.0
"""A running job that has said nothing for longer is shown as stalled."""

_DONE_EVENTS = ("packed", "pulled", "verified")
_TAIL_BYTES = 64 * 1024  # holds the newest events of any job
_POLL_S = 0.05
_STOP_WAIT_S = 60.0
_OOM_SCORE = b"500"  # if memory runs out, Linux ends a job, which can go on, and not the window
_ID = re.compile(r"[a-z]+-[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Job:
    """A `moet-desk` command that prints NDJSON events: started now, or found running.

    Args of the constructor: the command's arguments without `--format`, and where its events go.
    The file of a job that ended earlier is overwritten; one that runs is read from its beginning.
    """

    def __init__(self, arguments: Sequence[str], events: Path) -> None:
        self._log = events.with_suffix(".log")
        self._lock = events.with_suffix(".lock")
        self._child: subprocess.Popen[bytes] | None = None
        with disk_errors(events):
            events.parent.mkdir(parents=True, exist_ok=True)
            lock = _take(self._lock)
            if lock is not None:
                try:
                    self._start(arguments, events, lock)
                finally:
                    os.close(lock)  # the child has it now
            self._events = events.open("rb")
        self._line = b""
        self._error: MoetError | None = None
        self._is_done = False
        self._ended = False

    def _start(self, arguments: Sequence[str], events: Path, lock: int) -> None:
        command = [sys.executable, "-m", "moet_desk", *arguments, "--format", "ndjson"]
        with events.open("wb") as out, self._log.open("wb") as words:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=words,
                start_new_session=True,
                pass_fds=(lock,),
            )
        os.pwrite(lock, f"{self._child.pid}\n".encode(), 0)
        with contextlib.suppress(OSError):  # a wish
            Path(f"/proc/{self._child.pid}/oom_score_adj").write_bytes(_OOM_SCORE)

    @property
    def finished(self) -> bool:
        """True once the child has ended and all its events were polled."""
        return self._ended

    @property
    def error(self) -> MoetError | None:
        """Why it failed; None while it runs or when it went well."""
        return self._error

    @property
    def pid(self) -> int:
        """Its process; 0: it has ended, and was not started here."""
        return self._child.pid if self._child is not None else _holder(self._lock)

    def poll(self) -> list[dict[str, Any]]:
        """Events since the last call, oldest first; errors come out of `error`."""
        if self._ended:
            return []
        has_ended, status = self._status()  # before reading: after the end nothing is added
        events = [event for event in self._read() if not self._take_error(event)]
        self._is_done |= any(event.get("event") in _DONE_EVENTS for event in events)
        if has_ended:
            self._events.close()
            self._ended = True
            failed = not self._is_done if status is None else status != 0
            if failed and self._error is None:
                self._error = _crashed(status, self._log)
        return events

    def _status(self) -> tuple[bool, int | None]:
        if self._child is None:
            return not _is_held(self._lock), None
        status = self._child.poll()
        return status is not None, status

    def cancel(self) -> None:
        """Ask it to stop; what is finished stays, and the same job started again goes on."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.terminate()
        else:
            _terminate(self._lock)

    def _read(self) -> list[dict[str, Any]]:
        *lines, self._line = (self._line + self._events.read()).split(b"\n")
        return list(_parse(lines))

    def _take_error(self, event: dict[str, Any]) -> bool:
        error = error_of(event)
        self._error = error or self._error
        return error is not None


# -- all jobs ------------------------------------------------------------------------------------


class JobState(Enum):
    """What a job is doing; the values are shown to people."""

    RUNNING = "running"
    STALLED = "stalled"  # alive, and silent for long or suspended
    PAUSED = "paused"  # it can be resumed, `reason` says why it stopped
    FAILED = "failed"
    DONE = "done"


class JobRecord(msgspec.Struct, frozen=True):
    """What was started."""

    id: str
    kind: str  # "pack", "pull"
    model: str
    arguments: list[str]


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as it is now."""

    record: JobRecord
    state: JobState
    pid: int  # 0: it does not run
    phase: str  # name of its newest event
    done_bytes: int | None
    total_bytes: int | None
    rate: float | None  # bytes per second
    silent_s: float  # since its newest event
    reason: MoetError | None
    latest: Mapping[str, Mapping[str, Any]]  # newest event of each name; old ones may be left out


class JobStore:
    """The jobs below one folder, which need not exist yet."""

    def __init__(self, jobs_dir: Path) -> None:
        self.jobs_dir = jobs_dir

    def running(self, model: str) -> JobView | None:
        """A job that works on this model now."""
        views = (view for view in self.jobs() if view.record.model == model)
        return next((view for view in views if view.pid), None)

    def start(self, kind: str, model: str, arguments: Sequence[str]) -> Job:
        """Start a job, or attach to it if it runs already.

        Raises:
            MoetError: MD-DISK-02 or 03, the folder cannot be written.
        """
        record = JobRecord(f"{kind}-{model}", kind, model, list(arguments))
        path = self._path(record.id, ".json")
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not _is_held(self._path(record.id, ".lock")):
                replace_file(path, [msgspec.json.encode(record)])
        return Job(arguments, self._path(record.id, ".ndjson"))

    def jobs(self) -> list[JobView]:
        """All jobs by id, those that ended too until they are cancelled."""
        try:
            paths = sorted(self.jobs_dir.glob("*.json"))
        except OSError:
            return []
        records = (self._record(path.stem) for path in paths)
        return [self._look_at(record) for record in records if record is not None]

    def find(self, job_id: str) -> JobView:
        """The job of this id.

        Raises:
            MoetError: MD-JOB-01 there is none.
        """
        record = self._record(job_id)
        if record is None:
            raise fail("MD-JOB-01", job=job_id, path=str(self.jobs_dir))
        return self._look_at(record)

    def pause(self, job_id: str) -> JobView:
        """Stop a running job where it is, and wait for that; what is finished stays.

        Raises:
            MoetError: MD-JOB-01; MD-JOB-02 it does not run, or does not stop.
        """
        view = self.find(job_id)
        if not view.pid:
            raise fail("MD-JOB-02", job=job_id, state=view.state.value)
        self._stop(job_id)
        return self.find(job_id)

    def resume(self, job_id: str) -> Job:
        """Start a job again that is paused or failed.

        Raises:
            MoetError: MD-JOB-01; MD-JOB-02 it runs or is done.
        """
        view = self.find(job_id)
        if view.state not in (JobState.PAUSED, JobState.FAILED):
            raise fail("MD-JOB-02", job=job_id, state=view.state.value)
        return self.start(view.record.kind, view.record.model, view.record.arguments)

    def cancel(self, job_id: str) -> None:
        """Stop a job if it runs and forget it; what it made stays until `rm`.

        Raises:
            MoetError: MD-JOB-01; MD-JOB-02 it does not stop; MD-DISK-03.
        """
        if self.find(job_id).pid:
            self._stop(job_id)
        with disk_errors(self.jobs_dir):
            for suffix in (".json", ".ndjson", ".log", ".lock"):
                self._path(job_id, suffix).unlink(missing_ok=True)

    def _stop(self, job_id: str) -> None:
        lock = self._path(job_id, ".lock")
        _terminate(lock)
        end_s = time.monotonic() + _STOP_WAIT_S
        while _is_held(lock):
            if time.monotonic() > end_s:
                raise fail("MD-JOB-02", job=job_id, state="still stopping")
            time.sleep(_POLL_S)

    def _path(self, job_id: str, suffix: str) -> Path:
        return self.jobs_dir / f"{job_id}{suffix}"

    def _record(self, job_id: str) -> JobRecord | None:
        if not _ID.fullmatch(job_id):
            return None
        try:
            path = self._path(job_id, ".json")
            record = msgspec.json.decode(path.read_bytes(), type=JobRecord)
        except (OSError, ValueError, RecursionError):
            return None
        return record if record.id == job_id else None

    def _look_at(self, record: JobRecord) -> JobView:
        pid = _holder(self._path(record.id, ".lock"))  # before reading, as in `poll`
        events, silent_s = _tail(self._path(record.id, ".ndjson"))
        error = next((e for event in reversed(events) if (e := error_of(event))), None)
        newest = events[-1] if events else {}
        if not pid and newest.get("event") not in _DONE_EVENTS and error is None:
            error = _crashed(None, self._path(record.id, ".log"))
        counted: dict[str, Any] = next(
            (event for event in reversed(events) if "total_bytes" in event and _counts(event)), {}
        )
        return JobView(
            record=record,
            state=_state(pid, newest, error, silent_s),
            pid=pid,
            phase=str(newest.get("event", "")),
            done_bytes=_number(counted.get("done_bytes", counted.get("bytes"))),
            total_bytes=_number(counted.get("total_bytes")),
            rate=_number(counted.get("rate_bytes_per_s")) if pid else None,
            silent_s=silent_s,
            reason=None if pid else error,
            latest={str(event.get("event", "")): event for event in events},
        )


def _number(value: Any) -> Any:
    """A figure of an event; None for what is none, as in a damaged file."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_one and math.isfinite(value) else None


def _counts(event: dict[str, Any]) -> bool:
    """Whether an event counts bytes of the model; "finish" says 0 or 1 of 1."""
    return event.get("event") != "finish"


def _state(pid: int, newest: dict[str, Any], error: MoetError | None, silent_s: float) -> JobState:
    if pid:
        is_stalled = silent_s > STALLED_S or _is_suspended(pid)
        return JobState.STALLED if is_stalled else JobState.RUNNING
    if newest.get("event") in _DONE_EVENTS:
        return JobState.DONE
    # killed without a word: by a crash of the computer as well as by a bug; both can go on
    goes_on = error is None or error.spec.reaction is Reaction.JOB or error.code == "MD-BUG-01"
    is_disk = error is not None and error.code.startswith("MD-DISK")  # full, read only, no room
    return JobState.PAUSED if goes_on or is_disk else JobState.FAILED


# -- processes and files -------------------------------------------------------------------------


def _take(path: Path) -> int | None:
    """The lock of a job as a file descriptor; None: a job that runs has it. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    for _ in range(20):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.005)  # somebody may only be looking whether it is held
        else:
            os.truncate(fd, 0)
            return fd
    os.close(fd)
    return None


def _is_held(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _holder(path: Path) -> int:
    """The process that holds a job's lock, 0: nobody."""
    for _ in range(20):
        if not _is_held(path):
            return 0
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text())
        time.sleep(0.005)  # it is being started: its number is written a moment after the lock
    return 0


def _terminate(lock: Path) -> None:
    """SIGTERM to the holder, and SIGCONT so that a suspended one hears it."""
    pid = _holder(lock)
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)


def _is_suspended(pid: int) -> bool:
    import psutil

    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _tail(path: Path) -> tuple[list[dict[str, Any]], float]:
    """The newest events, and seconds since the last one."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return [], 0.0
    return list(_parse(lines)), max(0.0, time.time() - status.st_mtime)


def _parse(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event


def error_of(event: dict[str, Any]) -> MoetError | None:
    """The error that an event of a child reports, if it does."""
    return from_record(event.get("error"))


def _crashed(status: int | None, log: Path) -> MoetError:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if status == -signal.SIGKILL or (status is None and not last):
        ended = "ended without a word" if status is None else "was killed (signal 9)"
        return fail("MD-JOB-03", job=log.stem, ended=ended)
    if status is None:
        ended = "ended without saying why"
    elif status < 0:
        ended = f"was killed by signal {-status}"
    else:
        ended = f"ended with status {status}"
    return fail("MD-BUG-01", reason=f"The process {ended}: {last or 'no words'}", log=str(log))


def start_pack(source: Path, name: str, data_dir: Path) -> Job:
    """Pack a source below `data_dir`; if a job does that already, attach to it, and if another
    process does, wait for that and take over.

    Raises:
        MoetError: MD-DISK-02 or MD-DISK-03, the folder cannot be written.
    """
    arguments = ["--data-dir", str(data_dir), "pack", str(source), "--name", name, "--wait"]
    return JobStore(data_dir / "jobs").start("pack", name, arguments)
