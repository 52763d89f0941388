"""What loading tells the screens: a growing list of steps with bytes and seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from moet_desk.telemetry import LoadStep


class LoadReport:
    """The growing list of loading steps; each change goes to `show`."""

    def __init__(self, show: Callable[[tuple[LoadStep, ...]], None]) -> None:
        self._show = show
        self._steps: list[LoadStep] = []
        self._began = 0.0

    def begin(self, name: str, *, total: int = 0, unit: str = "bytes") -> None:
        self._began = time.monotonic()
        self._steps.append(LoadStep(name, total=total, unit=unit))
        self._show(tuple(self._steps))

    def advance(self, amount: int) -> None:
        step = self._steps[-1]
        seconds = time.monotonic() - self._began
        self._steps[-1] = replace(step, done=step.done + amount, seconds=seconds)
        self._show(tuple(self._steps))

    def end(self) -> None:
        seconds = time.monotonic() - self._began
        self._steps[-1] = replace(self._steps[-1], seconds=seconds, finished=True)
        self._show(tuple(self._steps))
