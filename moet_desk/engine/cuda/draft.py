"""The MTP head of a device, as `engine.draft.MtpDrafter` asks it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from moet_desk.engine.cuda.buffers import MAX_ROWS
from moet_desk.engine.cuda.step import StepModel
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.store.pack_format import Plane


class DeviceHead:
    """See `engine.draft.Head`. One launch and one wait for up to 8 tokens.

    Args:
        model: with a head.
        widths: numbers of rows that are read at once; others would be launched for the first time
            in the middle of an answer, and compiled there. Bits do not depend on them.
    """

    def __init__(self, model: StepModel, widths: Iterable[int] = range(1, MAX_ROWS + 1)) -> None:
        self._model = model
        self.most_rows = model.most_rows
        known = (width for width in widths if width <= model.most_rows)
        self._widths = sorted({1, *known}, reverse=True)

    def read(
        self, ids: Sequence[int], states: Tensor, sequence: KvSequence, plane: Plane
    ) -> tuple[int | None, Tensor]:
        """See `engine.draft.Head`. Raises as `StepModel.guess`."""
        at, guess, count = 0, None, 1
        while at < len(ids):
            count = next(width for width in self._widths if width <= len(ids) - at)
            rows = [StepRow(token, sequence, i) for i, token in enumerate(ids[at : at + count])]
            guess = self._model.guess(rows, plane, states[at : at + count])[-1]
            sequence.length += count
            at += count
        return guess, self._model.states(count - 1, 1).clone()
