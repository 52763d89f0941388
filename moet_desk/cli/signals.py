"""SIGINT and SIGTERM as a wish that work takes at a good moment. Main thread only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from moet_desk.errors import ExitCode


class Interrupt:
    """Whether SIGINT or SIGTERM came. A second SIGINT raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self._number: int = signal.SIGINT

    def asked(self) -> bool:
        """Whether to stop; work asks this between steps."""
        return self.came.is_set()

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a process that was stopped this way."""
        stopped = self._number == signal.SIGTERM
        return ExitCode.TERMINATED if stopped else ExitCode.INTERRUPTED

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self._number = number
        self.came.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Take SIGINT and SIGTERM as a wish for the time of the block."""
    interrupt = Interrupt()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, interrupt.note) for number in numbers}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
