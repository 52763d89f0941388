"""Every error a person can meet: one table of words, exit codes and HTTP statuses, and the
exceptions.

The table is data, in files by area (`rows_*`). The command line, the screens, the endpoint and
docs/reference/errors.md all print the same record, so a failure reads the same wherever it shows.
Facts (sizes, names, limits) travel as keyword fields and are put into the words here; they are
never baked into strings elsewhere.

Imports nothing else of ours and may be used from any thread.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from typing import Any

from moet_desk.errors.kinds import ErrorSpec, ExitCode, Reaction, Severity
from moet_desk.errors.rows_answers import ANSWERS
from moet_desk.errors.rows_files import MEMORY_AND_FILES
from moet_desk.errors.rows_getting import GETTING

__all__ = [
    "CATALOGUE",
    "ClientFault",
    "Damaged",
    "EngineFault",
    "ErrorSpec",
    "ExitCode",
    "JobPaused",
    "MoetError",
    "NeedsUser",
    "Reaction",
    "Severity",
    "fail",
    "from_record",
    "without_frames",
]

CATALOGUE: dict[str, ErrorSpec] = {row.code: row for row in (*MEMORY_AND_FILES, *GETTING, *ANSWERS)}

_WORDS = ("code", "title", "cause", "do", "safe", "severity")  # of a record; the rest are facts


class _Facts(dict[str, Any]):
    """Facts for `str.format_map`: a missing one prints as "?", so that reporting never fails."""

    def __missing__(self, key: str) -> str:
        return "?"


def _as_json(fact: Any) -> Any:
    """A fact as JSON has it; what a file held may be a date or not a number."""
    if isinstance(fact, Mapping):
        return {str(name): _as_json(value) for name, value in fact.items()}
    if isinstance(fact, list | tuple):
        return [_as_json(value) for value in fact]
    if fact is None or isinstance(fact, bool | int | str):
        return fact
    return fact if isinstance(fact, float) and math.isfinite(fact) else str(fact)


class MoetError(Exception):
    """A failure from the catalogue. Raise it through `fail(code, ...)`.

    Attributes:
        spec: the catalogue row.
        facts: the figures and names of this occurrence, JSON-ready.
    """

    def __init__(self, spec: ErrorSpec, facts: Mapping[str, Any]) -> None:
        self.spec = spec
        self.facts = dict(facts)
        super().__init__(f"{spec.code} {spec.title}: {self.cause}")

    @property
    def code(self) -> str:
        return self.spec.code

    @property
    def title(self) -> str:
        return self.spec.title.format_map(_Facts(self.facts))

    @property
    def cause(self) -> str:
        return self.spec.cause.format_map(_Facts(self.facts))

    @property
    def do(self) -> str:
        return self.spec.do.format_map(_Facts(self.facts))

    @property
    def safe(self) -> str:
        return self.spec.safe.format_map(_Facts(self.facts))

    def to_dict(self) -> dict[str, Any]:
        """The error as the `error` object of `--json` output."""
        words = {"code": self.code, "title": self.title, "cause": self.cause, "do": self.do}
        facts = {name: _as_json(fact) for name, fact in self.facts.items()}
        return {**words, "safe": self.safe, "severity": self.spec.severity.value, **facts}

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.spec, self.facts))


class NeedsUser(MoetError):
    """The person must choose or change something before this can go on."""


class JobPaused(MoetError):
    """A long job stopped; its journal is valid and it can be resumed."""


class ClientFault(MoetError):
    """A request was wrong (HTTP 4xx); the server is unharmed."""


class EngineFault(MoetError):
    """The engine could not finish a request; the next one may work."""


class Damaged(MoetError):
    """Stored data is not what its checksum or header says."""


_CLASS_OF_REACTION: dict[Reaction, type[MoetError]] = {
    Reaction.USER: NeedsUser,
    Reaction.JOB: JobPaused,
    Reaction.CLIENT: ClientFault,
    Reaction.ENGINE: EngineFault,
    Reaction.DAMAGED: Damaged,
}


def without_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of what led to it, and what their frames hold."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)  # others may keep them, as a log does
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def from_record(record: object) -> MoetError | None:
    """The exception of what `to_dict` made, as it comes out of a file, a pipe or a snapshot; None
    if it is none of the catalogue's.
    """
    code = record.get("code") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(code, str) or code not in CATALOGUE:
        return None
    return fail(code, **{name: value for name, value in record.items() if name not in _WORDS})


def fail(code: str, **facts: Any) -> MoetError:
    """Make the exception for a catalogue code; the caller raises it.

    Args:
        code: a key of `CATALOGUE`, e.g. "MD-DISK-01".
        facts: values for the row's format strings; they also travel in `to_dict`.

    Raises:
        KeyError: the code is not in the catalogue (a programmer's mistake).
    """
    spec = CATALOGUE[code]
    return _CLASS_OF_REACTION[spec.reaction](spec, facts)
