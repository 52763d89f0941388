"""Words for what the system refuses. Any thread."""

from __future__ import annotations

import errno
from pathlib import Path

from moet_desk.errors import MoetError, fail

_FULL = (errno.ENOSPC, errno.EDQUOT)


def unwritable(path: Path, problem: OSError, *, done: str = "a part") -> MoetError:
    """The error of the catalogue for a file that cannot be written.

    Args:
        path: of the file.
        problem: what the system said.
        done: how far the work had come, e.g. "64 of 288 rows".

    Returns:
        MD-DISK-02 if the disk is full, else MD-DISK-03.
    """
    if problem.errno in _FULL:
        return fail("MD-DISK-02", path=str(path), done=done)
    return fail("MD-DISK-03", path=str(path), reason=problem.strerror or str(problem))


def refused(problem: OSError) -> MoetError:
    """The error of the catalogue for what the system refused where nobody expected it.

    Returns:
        MD-RAM-04 if memory ran out, else MD-DISK-04.
    """
    if problem.errno == errno.ENOMEM:
        return fail("MD-RAM-04")
    path = problem.filename or "The system"
    return fail("MD-DISK-04", path=path, reason=problem.strerror or str(problem))


def unexpected(problem: BaseException, *, log: str) -> MoetError:
    """The error of the catalogue for an exception that nobody expected.

    Args:
        problem: what was raised.
        log: where its traceback is.

    Returns:
        Itself if it is from the catalogue; what `refused` gives for an error of the system;
        MD-RAM-04 if memory ran out; else MD-BUG-01.
    """
    if isinstance(problem, MoetError):
        return problem
    if isinstance(problem, OSError):
        return refused(problem)
    if isinstance(problem, MemoryError):
        return fail("MD-RAM-04")
    return fail("MD-BUG-01", reason=f"{type(problem).__name__}: {problem}", log=log)
