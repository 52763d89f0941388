"""Where the screens read time. Any thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Clock:
    """Where the screens read time, so that tests can hold it."""

    wall: Callable[[], datetime]
    monotonic: Callable[[], float]
    cpu: Callable[[], float] = lambda: 0.0  # of the thread that asks


def system_clock() -> Clock:
    """Local time, the monotonic clock of this computer and the thread's CPU time."""
    return Clock(lambda: datetime.now().astimezone(), time.monotonic, time.thread_time)
