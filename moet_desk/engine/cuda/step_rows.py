"""Rows of a decode step, and what the device is told of those that belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moet_desk.engine.cuda.buffers import MAX_ROWS
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.engine.recurrent import pending_of
from moet_desk.kernels.triton.cache import MOST_PAIRS


@dataclass(frozen=True, slots=True)
class StepRow:
    """One row of a step: a token of a sequence, at the end of what the sequence holds.

    `ahead` counts rows of the same sequence before this one in the same step (draft verification).
    """

    token: int
    sequence: KvSequence
    ahead: int = 0


def most_rows(top_k: int) -> int:
    """Rows that a step can have: a look-up takes so many pairs of a token and an expert."""
    return min(MAX_ROWS, MOST_PAIRS // top_k)


def runs_of(rows: Sequence[StepRow]) -> list[list[int]]:
    """The table of runs, as `kernels.triton.delta` has it; states move on to the rows' beginning.

    Raises:
        ValueError: as `pending_of`, or rows of a sequence do not follow each other.
    """
    lines: list[list[int]] = []
    for i, row in enumerate(rows):
        sequence, first = row.sequence, i - row.ahead
        if first < 0 or any(other.sequence is not sequence for other in rows[first:i]):
            raise ValueError("rows of a sequence with states must follow each other")
        if row.ahead:
            lines[first][-1] += 1
            lines.append([lines[first][0], 0, row.ahead, 0])
        else:
            assert sequence.slot is not None, "a sequence of such a model has a slot"  # noqa: S101
            lines.append([sequence.slot, pending_of(sequence.base, sequence.length), 0, 1])
            sequence.base = sequence.length
    return lines


def head_runs_of(rows: Sequence[StepRow]) -> list[list[int]]:
    """The same for the MTP head, whose states, if it has some, lie where positions say."""
    return [[row.sequence.slot or 0, 0, 0, 0] for row in rows]
