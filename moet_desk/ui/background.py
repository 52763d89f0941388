"""One slow call in a thread, polled by the screens' timer.

The thread never touches a widget: the screen asks for the result when it next draws. A result that
nobody wants any more is dropped with its `Background`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from moet_desk.errors import MoetError
from moet_desk.errors.disk import unexpected

T = TypeVar("T")


class Background(Generic[T]):
    """Runs `call` at once in a daemon thread; `result` and `error` are None until it has ended."""

    def __init__(self, call: Callable[[], T], *, name: str, log_dir: str = "") -> None:
        self.result: T | None = None
        self.error: MoetError | None = None
        self._call = call
        self._log_dir = log_dir
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether `result` or `error` is there."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:  # the screen that polls shows whatever it was
            self.error = unexpected(error, log=self._log_dir)
