"""Long work as child processes of our own command line.

Owns the child: it runs in a session of its own and prints its events to a file, so it survives the
window that started it and never blocks on a reader. Whoever holds the `Job` polls it; nothing here
blocks. One thread at a time per job; imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moet_desk.errors import CATALOGUE, MoetError, fail
from moet_desk.store.durable import disk_errors

_WORDS = ("code", "title", "cause", "do", "safe", "severity")


class Job:
    """A running `moet-desk` command that prints NDJSON events.

    Args of the constructor: the command's arguments without `--format`, and where its events go.
    The file of a job that ended earlier is overwritten.
    """

    def __init__(self, arguments: Sequence[str], events: Path) -> None:
        command = [sys.executable, "-m", "moet_desk", *arguments, "--format", "ndjson"]
        self._log = events.with_suffix(".log")
        with disk_errors(events):
            events.parent.mkdir(parents=True, exist_ok=True)
            with events.open("wb") as out, self._log.open("wb") as words:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=words,
                    start_new_session=True,
                )
            self._events = events.open("rb")
        self._line = b""
        self._error: MoetError | None = None
        self._ended = False

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
        return self._child.pid

    def poll(self) -> list[dict[str, Any]]:
        """Events since the last call, oldest first; errors come out of `error`."""
        if self._ended:
            return []
        status = self._child.poll()  # before reading: after the end nothing is added
        events = [event for event in self._read() if not self._take_error(event)]
        if status is not None:
            self._events.close()
            self._ended = True
            if status != 0 and self._error is None:
                self._error = self._crashed(status)
        return events

    def cancel(self) -> None:
        """Ask it to stop; what is finished stays, and the same job started again goes on."""
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()

    def _read(self) -> list[dict[str, Any]]:
        *lines, self._line = (self._line + self._events.read()).split(b"\n")
        events = []
        for line in lines:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    events.append(event)
        return events

    def _take_error(self, event: dict[str, Any]) -> bool:
        record = event.get("error")
        if not isinstance(record, dict) or record.get("code") not in CATALOGUE:
            return False
        facts = {name: value for name, value in record.items() if name not in _WORDS}
        self._error = fail(record["code"], **facts)
        return True

    def _crashed(self, status: int) -> MoetError:
        lines = self._log.read_text(errors="replace").split("\n") if self._log.is_file() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no words")
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return fail("MD-BUG-01", reason=f"The process {ended}: {last}", log=str(self._log))


def start_pack(source: Path, name: str, data_dir: Path) -> Job:
    """Pack a source below `data_dir`; if somebody packs it already, wait for that and take over.

    Raises:
        MoetError: MD-DISK-02 or MD-DISK-03, the folder cannot be written.
    """
    arguments = ["--data-dir", str(data_dir), "pack", str(source), "--name", name, "--wait"]
    return Job(arguments, data_dir / "jobs" / f"pack-{name}.ndjson")
