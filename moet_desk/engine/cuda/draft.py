"""The MTP head of a device, as `engine.draft.MtpDrafter` asks it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moet_desk.engine.cuda.buffers import MAX_ROWS
from moet_desk.engine.cuda.step import StepModel, StepRow
from moet_desk.engine.kv_cache import KvSequence
from moet_desk.store.pack_format import Plane


class DeviceHead:
    """See `engine.draft.Head`. One launch and one wait for up to 8 tokens."""

    most_rows = MAX_ROWS

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def read(
        self, ids: Sequence[int], states: Tensor, sequence: KvSequence, plane: Plane
    ) -> tuple[int | None, Tensor]:
        """See `engine.draft.Head`. Raises as `StepModel.guess`."""
        rows = [StepRow(token, sequence, i) for i, token in enumerate(ids)]
        guesses = self._model.guess(rows, plane, states)
        sequence.length += len(rows)
        return guesses[-1], self._model.states(len(rows) - 1, 1).clone()
