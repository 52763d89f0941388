"""The mailbox in pinned memory through which a running step asks the host for rows on disk.

Owns the layout and the host's side of it; the device's side is `kernels.triton.fetch`. The step
posts a number and the rows it lacks, then spins; an io thread reads the rows into arena places of
its choice, answers and releases the number. No lock: each word has one writer. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Answer(IntEnum):
    """What the host says about a request."""

    READ = 0
    FAILED = 1


@dataclass(frozen=True, slots=True)
class MailboxLayout:
    """Where each int32 word lies, in words. The device writes the first line and `rows`, `kept`;
    the host writes `done` on a line of its own (64 bytes away) and the rest.

    Attributes:
        posted: number of the newest request, written last, released to the system.
        layer, plane: whose rows (MoE layer from 0; 0 base, 1 fine).
        n_rows, rows: row indices to read, in order.
        n_kept, kept: rows the same layer copies from the arena meanwhile: their places must not be
            given to others before the answer.
        done: number of the newest answered request, written last.
        status: an `Answer`.
        places: arena place of each row read.
        dropped: the row that lost that place, or -1.
    """

    posted: int = 0
    layer: int = 1
    plane: int = 2
    n_rows: int = 3
    n_kept: int = 4
    done: int = 16
    status: int = 17
    rows: int = 64
    kept: int = 128
    places: int = 192
    dropped: int = 256
    most_rows: int = 64
    n_words: int = 1024

    @property
    def n_bytes(self) -> int:
        """Size of the mailbox: one page."""
        return 4 * self.n_words


MAILBOX = MailboxLayout()


@dataclass(frozen=True, slots=True)
class Request:
    """One posted request, copied out of the mailbox."""

    number: int
    layer: int
    plane: int
    rows: tuple[int, ...]
    kept: tuple[int, ...]


def read_request(words: NDArray[np.int32], after: int) -> Request | None:
    """The newest request if its number is not `after`; called by the one thread that serves.

    Shapes:
        words [n_words] int32, a view of the pinned page
    """
    number = int(words[MAILBOX.posted])
    if number == after:
        return None
    n_rows, n_kept = int(words[MAILBOX.n_rows]), int(words[MAILBOX.n_kept])
    return Request(
        number=number,
        layer=int(words[MAILBOX.layer]),
        plane=int(words[MAILBOX.plane]),
        rows=tuple(words[MAILBOX.rows : MAILBOX.rows + n_rows].tolist()),
        kept=tuple(words[MAILBOX.kept : MAILBOX.kept + n_kept].tolist()),
    )


def answer(
    words: NDArray[np.int32],
    request: Request,
    *,
    status: Answer,
    places: Sequence[int] = (),
    dropped: Sequence[int] = (),
) -> None:
    """Release a request. With `Answer.READ`, every row's bytes already lie at its place.

    x86 keeps the order of stores and so does the number's own store here; the device acquires it.

    Args:
        words: [n_words] int32, a view of the pinned page.
        request: what was asked.
        status: whether all rows were read.
        places: arena place of each row, for `Answer.READ`.
        dropped: the row that lost each place or -1, for `Answer.READ`.
    """
    if status is Answer.READ:
        words[MAILBOX.places : MAILBOX.places + len(places)] = places
        words[MAILBOX.dropped : MAILBOX.dropped + len(dropped)] = dropped
    words[MAILBOX.status] = int(status)
    words[MAILBOX.done] = request.number
