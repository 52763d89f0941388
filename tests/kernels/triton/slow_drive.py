"""A drive so slow that steps give up on it again and again, and what they then give."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moet_desk.engine.cuda.loader import CudaCore
from moet_desk.engine.cuda.step import StepModel
from moet_desk.engine.cuda.step_rows import StepRow
from moet_desk.kernels.triton import fetch
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from tests.kernels.triton.test_chunk import on_device

MOST_S = 2.0
"""Of a read, if the step does not give up: more than it waits on a card."""


@dataclass
class Again:
    """Attempts of steps that followed one which gave up."""

    count: int = 0


@contextmanager
def slow_drive(read_s: float | None = None) -> Iterator[Again]:
    """A read for a step ends when the step has given up, or after so many seconds; prompts wait for
    theirs as ever.
    """
    again, gave_up = Again(), threading.Event()
    intact, recover = PackReader._fill, StepModel._recover

    def slowly(self: PackReader, *given: Any) -> None:
        if not threading.current_thread().name.startswith("io-prompt"):
            gave_up.wait(MOST_S) if read_s is None else time.sleep(read_s)
        intact(self, *given)

    def counted(self: StepModel) -> None:
        again.count += 1
        gave_up.set()
        recover(self)
        gave_up.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackReader, "_fill", slowly)
        patch.setattr(StepModel, "_recover", counted)
        patch.setattr(fetch, "_POLLS", 1)  # the bound where there is no clock
        yield again


def check_steps_done_again(pack: Path, ids: Sequence[int]) -> None:
    """Steps of two rows, of which some are undone, have the same bits on a slow drive; a token of
    the model has one expert per layer.
    """

    def steps(core: CudaCore) -> Tensor:
        found, sequence = [], core.kv.reserve(len(ids) + 2)
        assert sequence is not None
        while sequence.length < len(ids):
            at = sequence.length
            n_right = min(1 + at % 2, len(ids) - at)
            rows = [StepRow(t, sequence, i) for i, t in enumerate([*ids[at : at + n_right], 9][:2])]
            found.append(core.model.run(rows, Plane.BASE)[:n_right].clone())
            sequence.length += n_right
        core.kv.release(sequence)
        return torch.cat(found)

    logits = []
    for drive in (nullcontext(Again()), slow_drive()):
        few = {"arena_rows": 1, "pool_slots": 8, "max_running": 1}
        with on_device(pack, **few) as core, drive as again:
            logits.append(steps(core))
    assert again.count > 1
    assert torch.equal(*logits)
