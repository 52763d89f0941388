"""What a row of the catalogue of errors says: exit codes, severities, and who has to act.

Imports nothing of ours and may be used from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class ExitCode(IntEnum):
    """What a command's exit status means (docs/reference/cli.md lists the same table)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNFIT = 4
    NO_ROOM = 5
    NETWORK = 6
    DAMAGED = 7
    BUSY = 8
    ENGINE = 9
    STRICT = 10
    TIMEOUT = 124
    INTERRUPTED = 130
    TERMINATED = 143


class Severity(Enum):
    """How much an error takes away from the user."""

    STOPS = "stops"
    LOWER = "lower"
    INFO = "info"


class Reaction(Enum):
    """Who has to act; each value has one exception class."""

    USER = "user"  # the person must choose or change something
    JOB = "job"  # a long job is paused and can be resumed
    CLIENT = "client"  # the request was wrong; the server is fine
    ENGINE = "engine"  # the engine failed a request or must restart
    DAMAGED = "damaged"  # stored data is not what it should be


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """One row of the catalogue.

    `cause` and `do` are format strings over the facts given when the error is raised.
    `safe` says what was kept. `http` is the endpoint's status for this error.
    """

    code: str
    title: str
    cause: str
    do: str
    safe: str = "Nothing on disk was changed."
    reaction: Reaction = Reaction.USER
    severity: Severity = Severity.STOPS
    exit: ExitCode = ExitCode.FAILED
    http: int = 500
