"""The gate of balanced answers: which tokens are made again with FP4 experts.

A step runs with 2-bit experts. If the likeliest token is less probable than the request's tau, the
same token is read again with FP4 experts, and what that gives counts. The decision depends on the
row's logits and on tau, on nothing else, so it is the same alone and beside others. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moet_desk.telemetry import GateCounters


class Gated(Protocol):
    """As much of an `ActiveRequest` as the gate touches."""

    tau: float | None  # None: the answer is not balanced
    rerun_tokens: int
    rerun_s: float
    reran: bool  # the token that comes next is made again


def confidence(logits: Tensor) -> float:
    """Probability of the likeliest token, before temperature, penalties and biases.

    NaN if the logits hold NaN or infinity.

    Shapes:
        logits [V] float32
    """
    return 1.0 / float((logits - logits.max()).exp().sum())


@dataclass(slots=True)
class Gate:
    """Judges steps and counts what it decided."""

    _judged: int = 0
    _rerun: int = 0
    _flips: int = 0
    _rerun_s: float = 0.0

    @property
    def rerun_s(self) -> float:
        """Seconds spent on making tokens again."""
        return self._rerun_s

    def is_unsure(self, request: Gated, sure: float) -> bool:
        """Whether a 2-bit step is to be made again; `sure` is its `confidence`."""
        if request.tau is None:
            return False
        self._judged += 1
        if not sure < request.tau:  # NaN: the sampler will refuse it
            return False
        self._rerun += 1
        request.rerun_tokens += 1
        request.reran = True
        return True

    def note_rerun(self, before: int | None, after: int | None) -> None:
        """Likeliest tokens of a 2-bit step and of its rerun."""
        self._flips += before != after

    def note_time(self, requests: Sequence[Gated], seconds: float) -> None:
        """How long it took to make the newest token of these requests again, all together.

        Each of them waited for all of it.
        """
        self._rerun_s += seconds
        for request in requests:
            request.rerun_s += seconds

    def counters(self) -> GateCounters:
        """What happened since the model was loaded."""
        return GateCounters(self._judged, self._rerun, self._flips, self._rerun_s)
